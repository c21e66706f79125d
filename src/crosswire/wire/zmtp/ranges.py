"""Where the fields of ZMTP's frames are, and the parts of a message."""

from __future__ import annotations

from collections.abc import Iterator

from crosswire.wire.contract import Decoder, Frame
from crosswire.wire.field_ranges import RangeList
from crosswire.wire.zmtp.frames import Command, Greeting, Message, Sealed
from crosswire.wire.zmtp.layout import (
    AS_SERVER_OFFSET,
    COMMAND_READY,
    FILLER_OFFSET,
    FLAG_COMMAND,
    FLAG_LONG,
    FLAGS_OFFSET,
    GREETING_SIZE,
    LONG_HEADER_SIZE,
    MAJOR_OFFSET,
    MECHANISM_OFFSET,
    NAME_LENGTH_SIZE,
    PROPERTY_NAME_LENGTH_SIZE,
    PROPERTY_VALUE_LENGTH_SIZE,
    SHORT_HEADER_SIZE,
    SIZE_OFFSET,
)

__all__ = ["parts_of", "ranges"]


def ranges(frame: Frame, data: bytes, _decoder: Decoder, found: RangeList) -> None:
    """See `crosswire.wire.field_ranges`."""
    match frame:
        case Greeting():
            found.layout(0, MAJOR_OFFSET, "signature")
            found.field(MAJOR_OFFSET, MECHANISM_OFFSET, "version")
            found.field(MECHANISM_OFFSET, AS_SERVER_OFFSET, "mechanism")
            found.field(AS_SERVER_OFFSET, FILLER_OFFSET, "as_server")
            found.layout(FILLER_OFFSET, GREETING_SIZE, "filler")
        case Command():
            _command(frame, data, found)
        case Sealed():
            _header(data, 0, found)
        case Message():
            for number, (head, body, end) in enumerate(parts_of(data)):
                _header(data, head, found)
                found.field(body, end, "parts", number)


def parts_of(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Of each part of a message: where its frame, its body, and what follows begin. Commands
    between the parts are passed over."""
    position = 0
    while position < len(data):
        body, end = _frame(data, position)
        if not data[position + FLAGS_OFFSET] & FLAG_COMMAND:
            yield position, body, end
        position = end


def _frame(data: bytes, position: int) -> tuple[int, int]:
    """Where the body of a frame begins, and where it ends."""
    is_long = data[position + FLAGS_OFFSET] & FLAG_LONG
    body = position + (LONG_HEADER_SIZE if is_long else SHORT_HEADER_SIZE)
    return body, body + int.from_bytes(data[position + SIZE_OFFSET : body])


def _header(data: bytes, position: int, found: RangeList) -> int:
    body, _ = _frame(data, position)
    found.layout(position + FLAGS_OFFSET, position + SIZE_OFFSET, "flags")
    found.layout(position + SIZE_OFFSET, body, "size")
    return body


def _command(frame: Command, data: bytes, found: RangeList) -> None:
    body = _header(data, 0, found)
    content = len(data) - len(frame.body)
    # The misspelled ERROR of libzmq has no length before its name.
    name = min(body + NAME_LENGTH_SIZE, content - len(frame.name))
    found.layout(body, name, "name length")
    found.field(name, content, "name")
    if frame.name != COMMAND_READY or frame.sealed:
        found.layout(content, len(data), "body")
        return
    position = content
    while position < len(data):
        name = position + PROPERTY_NAME_LENGTH_SIZE
        name_end = name + data[position]
        value = name_end + PROPERTY_VALUE_LENGTH_SIZE
        end = value + int.from_bytes(data[name_end:value])
        found.layout(position, value, "property")
        found.field(value, end, "properties", data[name:name_end].decode("ascii", "replace"))
        position = end
