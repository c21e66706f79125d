"""Where the fields of MicroMsg2's handshakes and frames are, and the items of their lists."""

from __future__ import annotations

from collections.abc import Iterator

from crosswire.wire.contract import Decoder, Frame
from crosswire.wire.field_ranges import RangeList
from crosswire.wire.micromsg2.frames import Command, Error, ExtensionFrame, Handshake, Message
from crosswire.wire.micromsg2.layout import (
    ARGUMENT_SEPARATOR,
    ARGUMENT_VALUE_SEPARATOR,
    DESTINATION_LENGTH_OFFSET,
    DESTINATION_OFFSET,
    EXTENSION_HEADER_SIZE,
    EXTENSION_NUMBER_OFFSET,
    EXTENSIONS_LENGTH_SIZE,
    FLAG_LARGE,
    FLAGS_OFFSET,
    HANDSHAKE_FLAGS_OFFSET,
    HEADER_SIZE,
    IDENTITY_LENGTH_OFFSET,
    IDENTITY_OFFSET,
    ITEM_SEPARATOR,
    LARGE_LENGTH_SIZE,
    MAJOR_OFFSET,
    MINOR_OFFSET,
    PROPERTIES_LENGTH_SIZE,
    SEQUENCE_OFFSET,
    SHORT_LENGTH_SIZE,
    VALUE_SEPARATOR,
)

__all__ = ["ranges"]

_ITEM = bytes([ITEM_SEPARATOR])
_VALUE = bytes([VALUE_SEPARATOR])
_ARGUMENT = bytes([ARGUMENT_SEPARATOR])
_EQUALS = bytes([ARGUMENT_VALUE_SEPARATOR])


def ranges(frame: Frame, data: bytes, _decoder: Decoder, found: RangeList) -> None:
    """See `crosswire.wire.field_ranges`."""
    if isinstance(frame, Handshake):
        _handshake(data, found)
    elif isinstance(frame, Message):
        _message(data, found)
    elif isinstance(frame, ExtensionFrame):
        found.layout(FLAGS_OFFSET, HEADER_SIZE, "flags")
        found.field(EXTENSION_NUMBER_OFFSET, EXTENSION_HEADER_SIZE, "id")
        found.field(_payload(data, EXTENSION_HEADER_SIZE, found), len(data), "payload")
    elif isinstance(frame, Command | Error):
        found.layout(FLAGS_OFFSET, HEADER_SIZE, "flags")
        start = _payload(data, HEADER_SIZE, found)
        name = data[start:].partition(_ITEM)[0]
        found.field(start, start + len(name), "name")
        arguments = min(start + len(name) + 1, len(data))
        found.field(arguments, len(data), "arguments")
        _pairs(data, arguments, len(data), (_EQUALS,), found, "arguments")


def _payload(data: bytes, at: int, found: RangeList) -> int:
    """Where the payload begins, after its length."""
    is_large = data[FLAGS_OFFSET] & FLAG_LARGE
    start = at + (LARGE_LENGTH_SIZE if is_large else SHORT_LENGTH_SIZE)
    found.layout(at, start, "length")
    return start


def _handshake(data: bytes, found: RangeList) -> None:
    found.field(MAJOR_OFFSET, MINOR_OFFSET, "major")
    found.field(MINOR_OFFSET, HANDSHAKE_FLAGS_OFFSET, "minor")
    found.field(HANDSHAKE_FLAGS_OFFSET, IDENTITY_LENGTH_OFFSET, "flags")
    found.layout(IDENTITY_LENGTH_OFFSET, IDENTITY_OFFSET, "identity length")
    at = IDENTITY_OFFSET + data[IDENTITY_LENGTH_OFFSET]
    found.field(IDENTITY_OFFSET, at, "identity")
    for name in ("required", "optional"):
        start = at + EXTENSIONS_LENGTH_SIZE
        found.layout(at, start, f"{name} length")
        at = start + int.from_bytes(data[at:start])
        found.field(start, at, name)
        for number, (begin, end) in enumerate(_split(data, start, at, _ITEM)):
            found.field(begin, end, name, number)
            word = data[begin:end].partition(_VALUE)[0]
            found.field(begin, begin + len(word), name, number, "name")
            first = begin + len(word) + 1
            _pairs(data, first, end, (_EQUALS, _VALUE), found, name, number, "properties")


def _message(data: bytes, found: RangeList) -> None:
    # The flags are where `continued` is.
    found.field(FLAGS_OFFSET, SEQUENCE_OFFSET, "continued")
    found.field(SEQUENCE_OFFSET, DESTINATION_LENGTH_OFFSET, "sequence")
    found.layout(DESTINATION_LENGTH_OFFSET, DESTINATION_OFFSET, "destination length")
    at = DESTINATION_OFFSET + data[DESTINATION_LENGTH_OFFSET]
    found.field(DESTINATION_OFFSET, at, "destination")
    start = at + PROPERTIES_LENGTH_SIZE
    end = start + int.from_bytes(data[at:start])
    found.layout(at, start, "properties length")
    found.field(start, end, "properties")
    _pairs(data, start, end, (_VALUE,), found, "properties", between=_ITEM)
    found.field(_payload(data, end, found), len(data), "payload")


def _pairs(
    data: bytes,
    start: int,
    end: int,
    separators: tuple[bytes, ...],
    found: RangeList,
    *path: str | int,
    between: bytes = _ARGUMENT,
) -> None:
    """Keys and values; the first of the separators ends a key."""
    for begin, stop in _split(data, start, end, between):
        item = data[begin:stop]
        ends = [at for each in separators if (at := item.find(each)) >= 0]
        if ends:
            key = item[: min(ends)].decode(errors="replace")
            found.field(begin + min(ends) + 1, stop, *path, key)


def _split(data: bytes, start: int, end: int, separator: bytes) -> Iterator[tuple[int, int]]:
    """Where the items between separators are; a trailing separator ends the last of them."""
    while start < end:
        stop = data.find(separator, start, end)
        stop = end if stop < 0 else stop
        yield start, stop
        start = stop + 1
