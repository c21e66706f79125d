"""MicroMsg2's frames, parsed and serialized; `layout.py` has their bytes.

A message's properties stay as bytes until `Message.properties()` parses them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, ClassVar, Final

from crosswire.envelope import PROPERTIES
from crosswire.errors import FrameError, FrameTooLarge, MalformedFrame
from crosswire.wire.contract import Frame, Limits, Placed
from crosswire.wire.micromsg2.layout import (
    DESTINATION_LENGTH_OFFSET,
    DESTINATION_LENGTH_SIZE,
    DESTINATION_OFFSET,
    EXTENSION_HEADER_SIZE,
    EXTENSION_NUMBER_OFFSET,
    EXTENSIONS_LENGTH_SIZE,
    FIRST_SEQUENCE,
    FLAG_CONTINUED,
    FLAG_LARGE,
    FLAGS_OFFSET,
    HANDSHAKE_FLAGS_OFFSET,
    HANDSHAKE_HEADER_SIZE,
    HEADER_SIZE,
    IDENTITY_LENGTH_OFFSET,
    IDENTITY_LENGTH_SIZE,
    IDENTITY_OFFSET,
    LARGE_LENGTH_SIZE,
    LAST_FLAGS,
    LAST_SEQUENCE,
    LENGTH_STRUCT,
    MAJOR_OFFSET,
    MAX_DESTINATION_SIZE,
    MAX_PAYLOAD_SIZE,
    MAX_PROPERTIES_SIZE,
    MAX_SHORT_SIZE,
    MESSAGE_HEADER_SIZE,
    MESSAGE_STRUCT,
    MIN_MESSAGE_SIZE,
    MINOR_OFFSET,
    PROPERTIES_LENGTH_SIZE,
    SEQUENCE_STRUCT,
    SHORT_LENGTH_SIZE,
    TYPE_COMMAND,
    TYPE_ERROR,
    TYPE_EXTENSION,
    TYPE_MASK,
    TYPE_MESSAGE,
)
from crosswire.wire.micromsg2.values import (
    Extension,
    Value,
    parse_call,
    parse_extensions,
    parse_properties,
    serialize_call,
    serialize_extensions,
)

__all__ = [
    "DEFAULTS",
    "Command",
    "Error",
    "ErrorName",
    "Extension",
    "ExtensionFrame",
    "Handshake",
    "Message",
    "MicroMsg2Limits",
    "following",
    "is_handshake",
    "message_prefix",
    "parse",
    "parse_handshake",
    "scan_messages",
    "serialize",
    "serialize_message",
    "serialize_run",
]


class MicroMsg2Limits(Limits, frozen=True, kw_only=True):
    """`frame_bytes` limits a frame's payload, `message_bytes` that of a whole message.

    A client's message may have `properties` properties, and a name of a .NET type `type_bytes`.
    """

    frame_bytes: int = MAX_PAYLOAD_SIZE
    message_bytes: int = 64 * 1024 * 1024
    properties: int = PROPERTIES
    type_bytes: int = 8192


DEFAULTS: Final = MicroMsg2Limits()


class ErrorName(StrEnum):
    """The names of the ERRORs that we send; the specification defines none."""

    VERSION = "version"
    EXTENSION = "extension"
    HANDSHAKE = "handshake"
    MALFORMED = "malformed"
    LIMIT = "limit"
    UNKNOWN_DESTINATION = "unknown-destination"
    FORBIDDEN = "forbidden"
    INTERNAL = "internal"


def following(sequence: int) -> int:
    """The sequence number after this one: 65535 is followed by 1."""
    return FIRST_SEQUENCE if sequence == LAST_SEQUENCE else sequence + 1


# ---------------------------------------------------------------------------------------- frames


class Handshake(Frame, frozen=True, gc=False):
    """`identity` has a character per byte; only ASCII is allowed, which `fields()` checks."""

    frame_name: ClassVar[str] = "handshake"
    major: int
    minor: int
    flags: int
    identity: str
    required: tuple[Extension, ...] = ()
    optional: tuple[Extension, ...] = ()

    def fields(self) -> dict[str, Any]:
        """Raises MalformedFrame for an identity that is not ASCII."""
        if not self.identity.isascii():
            raise MalformedFrame("an identity that is not ASCII")
        return {
            "major": self.major,
            "minor": self.minor,
            "flags": self.flags,
            "identity": self.identity,
            "required": [_extension_fields(extension) for extension in self.required],
            "optional": [_extension_fields(extension) for extension in self.optional],
        }


class Message(Frame, frozen=True, gc=False):
    """MESSAGE from a server, SEND from a client. `properties()` parses `raw_properties`."""

    frame_name: ClassVar[str] = "message"
    sequence: int
    destination: str
    raw_properties: bytes
    payload: bytes
    continued: bool = False

    def properties(self) -> dict[str, Value]:
        """Names and typed values. Raises MalformedFrame."""
        return parse_properties(self.raw_properties) if self.raw_properties else {}

    def fields(self) -> dict[str, Any]:
        """With the properties parsed. Raises MalformedFrame."""
        return {
            "sequence": self.sequence,
            "destination": self.destination,
            "properties": self.properties(),
            "payload": self.payload.hex(),
            "continued": self.continued,
        }


class Command(Frame, frozen=True, gc=False):
    """`name` may be any: a connection refuses an undefined one, a decoder shows it."""

    frame_name: ClassVar[str] = "command"
    name: str
    arguments: dict[str, str]


class ExtensionFrame(Frame, frozen=True, gc=False):
    """`id` is the extension's number: its position in the client's final handshake, from 1."""

    frame_name: ClassVar[str] = "extension"
    id: int
    payload: bytes


class Error(Frame, frozen=True, gc=False):
    """Ends the connection, also with an unknown name."""

    frame_name: ClassVar[str] = "error"
    name: str
    arguments: dict[str, str]


def _extension_fields(extension: Extension) -> dict[str, Any]:
    return {"name": extension.name, "properties": extension.properties}


# ----------------------------------------------------------------------------------------- parse

_SHORT_LENGTHS: Final = [bytes([size]) for size in range(MAX_SHORT_SIZE + 1)]
_NOT_COPIED_BYTES: Final = 65536
# Bound once: calling a method of an imported name costs a slower lookup each time.
_pack_message: Final = MESSAGE_STRUCT.pack
_pack_length: Final = LENGTH_STRUCT.pack
"""A payload that is larger is written as it is, not joined with its header."""


def scan_messages(
    buffer: bytes, position: int, base: int, sequence: int, placed: list[Placed]
) -> tuple[int, int]:
    """The run of plain messages from `position` on: small, complete, in sequence, with destination.

    Returns the position after them and the sequence number that is due there. They are the most
    frequent frames, so no function is called for them; `parse` reads all others.
    """
    end_of_buffer = len(buffer)
    last_start = end_of_buffer - MIN_MESSAGE_SIZE
    unpack = MESSAGE_STRUCT.unpack_from
    append = placed.append
    try:
        while position <= last_start:
            flags, number, size = unpack(buffer, position)
            if flags or number != sequence or not size:
                break
            name = position + DESTINATION_OFFSET
            name_end = name + size
            properties = name_end + PROPERTIES_LENGTH_SIZE
            properties_end = properties + (buffer[name_end] << 8 | buffer[name_end + 1])
            payload = properties_end + SHORT_LENGTH_SIZE
            end = payload + buffer[properties_end]
            if end > end_of_buffer:
                break
            message = Message(
                number,
                str(buffer[name:name_end], "utf-8"),
                buffer[properties:properties_end],
                buffer[payload:end],
            )
            append((base + position, end - position, message))
            position = end
            sequence = FIRST_SEQUENCE if number == LAST_SEQUENCE else number + 1
    except (IndexError, UnicodeDecodeError):
        pass  # incomplete, or not a destination: `parse` finds out which
    return position, sequence


def is_handshake(octet: int) -> bool:
    """Whether this first byte begins a handshake: with 4 or 12 an ERROR begins instead.

    A handshake's first byte is the major version, so versions 4 and 12 can't exist.
    """
    return octet not in (TYPE_ERROR, TYPE_ERROR | FLAG_LARGE)


def parse_handshake(
    buffer: bytes, position: int, base: int, limit: int
) -> tuple[Frame | None, int]:
    """The handshake at `position`, or the ERROR instead of it, and its length.

    If it is incomplete, None and the number of bytes that are needed to read on.
    """
    available = len(buffer) - position
    if available < 1:
        return None, 1
    if not is_handshake(buffer[position]):
        return parse(buffer, position, base, limit)
    # Each length is needed to know how far the next one is.
    if available < HANDSHAKE_HEADER_SIZE:
        return None, HANDSHAKE_HEADER_SIZE
    identity_end = IDENTITY_OFFSET + buffer[position + IDENTITY_LENGTH_OFFSET]
    required_at = identity_end + EXTENSIONS_LENGTH_SIZE
    if available < required_at:
        return None, required_at
    (size,) = LENGTH_STRUCT.unpack_from(buffer, position + identity_end)
    required_end = required_at + size
    optional_at = required_end + EXTENSIONS_LENGTH_SIZE
    if available < optional_at:
        return None, optional_at
    (size,) = LENGTH_STRUCT.unpack_from(buffer, position + required_end)
    length = optional_at + size
    if available < length:
        return None, length
    whole = buffer[position : position + length]
    try:
        required = parse_extensions(whole[required_at:required_end])
        optional = parse_extensions(whole[optional_at:])
    except FrameError as error:
        raise _at(error, base + position, length) from None
    major, minor, flags = whole[MAJOR_OFFSET], whole[MINOR_OFFSET], whole[HANDSHAKE_FLAGS_OFFSET]
    identity = str(whole[IDENTITY_OFFSET:identity_end], "latin-1")
    return Handshake(major, minor, flags, identity, required, optional), length


def parse(buffer: bytes, position: int, base: int, limit: int) -> tuple[Frame | None, int]:
    """The frame at `position` and its length; `buffer[0]` is at `base`.

    If it is incomplete, None and the number of bytes that are needed to read on. Raises FrameError
    with its offset; a payload over `limit` is refused when its length is read.
    """
    available = len(buffer) - position
    if available < 1:
        return None, 1
    flags = buffer[position + FLAGS_OFFSET]
    kind = flags & TYPE_MASK
    # A type is one bit or none: clearing the lowest must leave nothing.
    if flags > LAST_FLAGS or kind & (kind - 1):
        raise MalformedFrame(
            f"frame flags {flags} are not defined together", offset=base + position, length=1
        )
    if kind == TYPE_MESSAGE:
        if available < MESSAGE_HEADER_SIZE:
            return None, MESSAGE_HEADER_SIZE
        name_end = DESTINATION_OFFSET + buffer[position + DESTINATION_LENGTH_OFFSET]
        at = name_end + PROPERTIES_LENGTH_SIZE
        if available < at:
            return None, at
        (size,) = LENGTH_STRUCT.unpack_from(buffer, position + name_end)
        at += size
    else:
        at = EXTENSION_HEADER_SIZE if kind == TYPE_EXTENSION else HEADER_SIZE
    start = at + (LARGE_LENGTH_SIZE if flags & FLAG_LARGE else SHORT_LENGTH_SIZE)
    if available < start:
        return None, start
    size = int.from_bytes(buffer[position + at : position + start])
    if size > limit:
        raise FrameTooLarge(
            f"a payload of {size} bytes, more than the {limit} allowed in a frame",
            offset=base + position,
            length=start,
        )
    length = start + size
    if available < length:
        return None, length
    try:
        payload = buffer[position + start : position + length]
        return _parse_whole(flags, buffer[position : position + at], payload), length
    except FrameError as error:
        raise _at(error, base + position, length) from None


def _parse_whole(flags: int, head: bytes, payload: bytes) -> Frame:
    """`head` is the frame up to the payload's length. Raises MalformedFrame without an offset."""
    kind = flags & TYPE_MASK
    continued = bool(flags & FLAG_CONTINUED)
    if kind == TYPE_MESSAGE:
        (_, sequence, size) = MESSAGE_STRUCT.unpack_from(head)
        name_end = DESTINATION_OFFSET + size
        try:
            destination = str(head[DESTINATION_OFFSET:name_end], "utf-8")
        except UnicodeDecodeError as error:
            raise MalformedFrame(f"a destination is not UTF-8: {error.reason}") from None
        properties = head[name_end + PROPERTIES_LENGTH_SIZE :]
        return Message(sequence, destination, properties, payload, continued)
    if continued:
        raise MalformedFrame("only a message can be continued")
    if kind == TYPE_EXTENSION:
        return ExtensionFrame(head[EXTENSION_NUMBER_OFFSET], payload)
    name, arguments = parse_call(payload)
    return Command(name, arguments) if kind == TYPE_COMMAND else Error(name, arguments)


def _at(error: FrameError, offset: int, length: int) -> FrameError:
    """The error with its offset; decoding can resume, since the frame's end is known."""
    error.offset, error.length, error.resumable = offset, length, True
    return error


# ------------------------------------------------------------------------------------- serialize


def serialize_message(
    sequence: int,
    destination: bytes,
    properties: bytes,
    payload: bytes | memoryview,
    continued: bool = False,
) -> list[bytes | memoryview]:
    """A message's bytes; a large payload is not copied. The caller has checked the lengths."""
    flags = FLAG_CONTINUED if continued else 0
    size = len(payload)
    if size <= MAX_SHORT_SIZE:
        length = _SHORT_LENGTHS[size]
    else:
        flags |= FLAG_LARGE
        length = size.to_bytes(LARGE_LENGTH_SIZE)
    head = (
        _pack_message(flags, sequence, len(destination))
        + destination
        + _pack_length(len(properties))
        + properties
    )
    if size > _NOT_COPIED_BYTES:
        return [head + length, payload]
    return [b"".join((head, length, payload))]


def message_prefix(destination: bytes, properties: bytes) -> bytes:
    """A message between its sequence number and its payload's length, for `serialize_run`."""
    return b"".join(
        (
            len(destination).to_bytes(DESTINATION_LENGTH_SIZE),
            destination,
            _pack_length(len(properties)),
            properties,
        )
    )


def serialize_run(sequences: Iterable[int], messages: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The bytes of many small messages, each a `message_prefix` and a payload."""
    parts: list[bytes] = []
    pack, lengths = SEQUENCE_STRUCT.pack, _SHORT_LENGTHS
    for sequence, (prefix, payload) in zip(sequences, messages, strict=True):
        size = len(payload)
        if size <= MAX_SHORT_SIZE:
            parts += (pack(TYPE_MESSAGE, sequence), prefix, lengths[size], payload)
        else:
            length = size.to_bytes(LARGE_LENGTH_SIZE)
            parts += (pack(TYPE_MESSAGE | FLAG_LARGE, sequence), prefix, length, payload)
    return b"".join(parts)


def serialize(frame: Frame) -> bytes:
    """The bytes of a frame. Raises OverflowError for a field that is too long."""
    match frame:
        case Message():
            destination = frame.destination.encode()
            if (
                len(destination) > MAX_DESTINATION_SIZE
                or len(frame.raw_properties) > MAX_PROPERTIES_SIZE
            ):
                raise OverflowError("a destination or properties that are too long")
            return b"".join(
                serialize_message(
                    frame.sequence,
                    destination,
                    frame.raw_properties,
                    frame.payload,
                    frame.continued,
                )
            )
        case ExtensionFrame(id=number, payload=payload):
            return _with_length(TYPE_EXTENSION, bytes([number]), payload)
        case Command(name=name, arguments=arguments):
            return _with_length(TYPE_COMMAND, b"", serialize_call(name, arguments))
        case Error(name=name, arguments=arguments):
            return _with_length(TYPE_ERROR, b"", serialize_call(name, arguments))
        case Handshake():
            return _serialize_handshake(frame)
    raise TypeError(f"{type(frame).__name__} is not a MicroMsg2 frame")


def _with_length(flags: int, head: bytes, payload: bytes) -> bytes:
    size = len(payload)
    if size > MAX_SHORT_SIZE:
        return bytes([flags | FLAG_LARGE]) + head + size.to_bytes(LARGE_LENGTH_SIZE) + payload
    return bytes([flags]) + head + size.to_bytes(SHORT_LENGTH_SIZE) + payload


def _serialize_handshake(frame: Handshake) -> bytes:
    identity = frame.identity.encode("latin-1")
    required = serialize_extensions(frame.required)
    optional = serialize_extensions(frame.optional)
    return b"".join(
        (
            bytes([frame.major, frame.minor, frame.flags]),
            len(identity).to_bytes(IDENTITY_LENGTH_SIZE),
            identity,
            len(required).to_bytes(EXTENSIONS_LENGTH_SIZE),
            required,
            len(optional).to_bytes(EXTENSIONS_LENGTH_SIZE),
            optional,
        )
    )
