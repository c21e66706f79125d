"""MicroMsg2's frames, parsed and serialized.

A frame on the wire (specification, "Frame prefix" and below; numbers are big-endian):

    flags         1   command 1, extension 2, error 4, large payload 8, continued 16
    by type       …   MESSAGE/SEND:   sequence 2 · destination length 1 · destination
                                      · properties length 2 · properties
                      EXTENSION:      number 1
    length        1   or 4, with flag 8
    payload       …   COMMAND and ERROR: name;key=value,…

A handshake, before all frames; an ERROR (first octet 4 or 12) may stand in its place:

    major         1
    minor         1
    flags         1   reserved, ignored
    identity      …   length 1, ASCII
    required      …   length 2, extensions
    optional      …   length 2, extensions

A message's properties stay the bytes they came as until somebody asks: `Message.properties()`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from struct import Struct
from typing import Any, ClassVar, Final

from crosswire.errors import FrameError, FrameTooLarge, MalformedFrame
from crosswire.wire.contract import Frame, Limits, Placed
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
    "FRAME_BYTES",
    "LAST_SEQUENCE",
    "VERSION",
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

VERSION: Final = (1, 0)
FRAME_BYTES: Final = 1024 * 1024
LAST_SEQUENCE: Final = 65535


class MicroMsg2Limits(Limits, frozen=True, kw_only=True):
    """`frame_bytes` counts a frame's payload; `message_bytes` one put together from frames."""

    frame_bytes: int = FRAME_BYTES
    message_bytes: int = 64 * 1024 * 1024


DEFAULTS: Final = MicroMsg2Limits()


class ErrorName(StrEnum):
    """What an ERROR that we send is called."""

    VERSION = "version"
    EXTENSION = "extension"
    HANDSHAKE = "handshake"
    MALFORMED = "malformed"
    LIMIT = "limit"
    UNKNOWN_DESTINATION = "unknown-destination"
    FORBIDDEN = "forbidden"
    INTERNAL = "internal"


def following(sequence: int) -> int:
    """65535 is followed by 1: 0 is never used."""
    return 1 if sequence == LAST_SEQUENCE else sequence + 1


# ---------------------------------------------------------------------------------------- frames


class Handshake(Frame, frozen=True, gc=False):
    """`identity` has a character per octet; only ASCII is allowed, which `fields()` checks."""

    frame_name: ClassVar[str] = "handshake"
    major: int
    minor: int
    flags: int
    identity: str
    required: tuple[Extension, ...] = ()
    optional: tuple[Extension, ...] = ()

    def fields(self) -> dict[str, Any]:
        if not self.identity.isascii():
            raise MalformedFrame("an identity that is not ASCII")
        return {
            "major": self.major,
            "minor": self.minor,
            "flags": self.flags,
            "identity": self.identity,
            "required": [_in_words(extension) for extension in self.required],
            "optional": [_in_words(extension) for extension in self.optional],
        }


class Message(Frame, frozen=True, gc=False):
    """MESSAGE from a server, SEND from a client. `properties()` reads `raw_properties`."""

    frame_name: ClassVar[str] = "message"
    sequence: int
    destination: str
    raw_properties: bytes
    payload: bytes
    continued: bool = False

    def properties(self) -> dict[str, Value]:
        """Raises MalformedFrame."""
        return parse_properties(self.raw_properties) if self.raw_properties else {}

    def fields(self) -> dict[str, Any]:
        return {
            "sequence": self.sequence,
            "destination": self.destination,
            "properties": self.properties(),
            "payload": self.payload.hex(),
            "continued": self.continued,
        }


class Command(Frame, frozen=True, gc=False):
    """`name` may be one that nobody defined: a connection refuses it, a decoder shows it."""

    frame_name: ClassVar[str] = "command"
    name: str
    arguments: dict[str, str]


class ExtensionFrame(Frame, frozen=True, gc=False):
    """`id` is the extension's place in the final client handshake, from 1."""

    frame_name: ClassVar[str] = "extension"
    id: int
    payload: bytes


class Error(Frame, frozen=True, gc=False):
    """Ends the connection, whatever its name is."""

    frame_name: ClassVar[str] = "error"
    name: str
    arguments: dict[str, str]


def _in_words(extension: Extension) -> dict[str, Any]:
    return {"name": extension.name, "properties": extension.properties}


# ----------------------------------------------------------------------------------------- parse

_COMMAND = 1
_EXTENSION = 2
_ERROR = 4
_LARGE = 8
_CONTINUED = 16
_TYPES = _COMMAND | _EXTENSION | _ERROR

_HEAD: Final = Struct(">BHB")
_SHORT: Final = Struct(">H")
_NUMBERED: Final = Struct(">BH")
_OCTETS: Final = [bytes([octet]) for octet in range(256)]


def scan_messages(
    buffer: bytes, position: int, base: int, sequence: int, placed: list[Placed]
) -> tuple[int, int]:
    """The run of plain messages from `position` on: small, whole, in sequence, with a destination.

    Gives the position behind them and the sequence number that is due there. They are what there
    is most of, so they are read in line; `parse` knows all the others.
    """
    end_of_buffer = len(buffer)
    last_start = end_of_buffer - 8
    unpack = _HEAD.unpack_from
    append = placed.append
    try:
        while position <= last_start:
            flags, number, size = unpack(buffer, position)
            if flags or number != sequence or not size:
                break
            name = position + 4
            at = name + size
            properties_at = at + 2
            payload_at = properties_at + (buffer[at] << 8 | buffer[at + 1])
            end = payload_at + 1 + buffer[payload_at]
            if end > end_of_buffer:
                break
            message = Message(
                number,
                str(buffer[name:at], "utf-8"),
                buffer[properties_at:payload_at],
                buffer[payload_at + 1 : end],
            )
            append((base + position, end - position, message))
            position = end
            sequence = 1 if number == LAST_SEQUENCE else number + 1
    except (IndexError, UnicodeDecodeError):
        pass  # not whole, or not a destination: `parse` tells which
    return position, sequence


def is_handshake(octet: int) -> bool:
    """In a handshake the first octet tells: 4 or 12 is an ERROR, any other a major version."""
    return octet not in (_ERROR, _ERROR | _LARGE)


def parse_handshake(
    buffer: bytes, position: int, base: int, limit: int
) -> tuple[Frame | None, int]:
    """The handshake at `position`, or the ERROR in its place, and its length.

    None and the number of bytes that it takes to know more, when it is not whole.
    """
    available = len(buffer) - position
    if available < 1:
        return None, 1
    if not is_handshake(buffer[position]):
        return parse(buffer, position, base, limit)
    if available < 4:
        return None, 4
    required_at = 4 + buffer[position + 3] + 2
    if available < required_at:
        return None, required_at
    (size,) = _SHORT.unpack_from(buffer, position + required_at - 2)
    optional_at = required_at + size + 2
    if available < optional_at:
        return None, optional_at
    (size,) = _SHORT.unpack_from(buffer, position + optional_at - 2)
    length = optional_at + size
    if available < length:
        return None, length
    whole = buffer[position : position + length]
    try:
        required = parse_extensions(whole[required_at : optional_at - 2])
        optional = parse_extensions(whole[optional_at:])
    except FrameError as error:
        raise _at(error, base + position, length) from None
    identity = str(whole[4 : required_at - 2], "latin-1")
    return Handshake(whole[0], whole[1], whole[2], identity, required, optional), length


def parse(buffer: bytes, position: int, base: int, limit: int) -> tuple[Frame | None, int]:
    """The frame at `position` and its length; `buffer[0]` stands at `base`.

    None and the number of bytes that it takes to know more, when it is not whole. Raises
    FrameError, placed; a payload over `limit` is refused by its header.
    """
    available = len(buffer) - position
    if available < 1:
        return None, 1
    flags = buffer[position]
    kind = flags & _TYPES
    if flags > 31 or kind & (kind - 1):
        raise MalformedFrame(
            f"frame flags {flags} are not defined together", offset=base + position, length=1
        )
    if not kind:
        if available < 4:
            return None, 4
        at = 4 + buffer[position + 3] + 2
        if available < at:
            return None, at
        at += buffer[position + at - 2] << 8 | buffer[position + at - 1]
    else:
        at = 2 if kind == _EXTENSION else 1
    start = at + (4 if flags & _LARGE else 1)
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
    """`head` is what stands before the payload's length."""
    kind = flags & _TYPES
    continued = bool(flags & _CONTINUED)
    if not kind:
        (_, sequence, size) = _HEAD.unpack_from(head)
        try:
            destination = str(head[4 : 4 + size], "utf-8")
        except UnicodeDecodeError as error:
            raise MalformedFrame(f"a destination is not UTF-8: {error.reason}") from None
        return Message(sequence, destination, head[4 + size + 2 :], payload, continued)
    if continued:
        raise MalformedFrame("only a message can be continued")
    if kind == _EXTENSION:
        return ExtensionFrame(head[1], payload)
    name, arguments = parse_call(payload)
    return Command(name, arguments) if kind == _COMMAND else Error(name, arguments)


def _at(error: FrameError, offset: int, length: int) -> FrameError:
    """The violation with its place; the frame's end is known."""
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
    """A message's bytes; a large payload is not copied. Lengths are the caller's to check."""
    flags = _CONTINUED if continued else 0
    size = len(payload)
    head = (
        _HEAD.pack(flags | _LARGE if size > 255 else flags, sequence, len(destination))
        + destination
        + _SHORT.pack(len(properties))
        + properties
    )
    if size > 65536:
        return [head + size.to_bytes(4), payload]
    return [b"".join((head, size.to_bytes(4 if size > 255 else 1), payload))]


def message_prefix(destination: bytes, properties: bytes) -> bytes:
    """What stands between a message's number and its payload's length: see `serialize_run`."""
    return b"".join(
        (len(destination).to_bytes(1), destination, _SHORT.pack(len(properties)), properties)
    )


def serialize_run(sequences: Iterable[int], messages: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Many small messages, each a prefix and a payload, as one piece."""
    parts: list[bytes] = []
    pack, octets = _NUMBERED.pack, _OCTETS
    for sequence, (prefix, payload) in zip(sequences, messages, strict=True):
        size = len(payload)
        if size < 256:
            parts += (pack(0, sequence), prefix, octets[size], payload)
        else:
            parts += (pack(_LARGE, sequence), prefix, size.to_bytes(4), payload)
    return b"".join(parts)


def serialize(frame: Frame) -> bytes:
    """The bytes of a frame. A length that has no room on the wire raises OverflowError."""
    match frame:
        case Message():
            destination = frame.destination.encode()
            if len(destination) > 255 or len(frame.raw_properties) > 65535:
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
            return _with_length(_EXTENSION, bytes([number]), payload)
        case Command(name=name, arguments=arguments):
            return _with_length(_COMMAND, b"", serialize_call(name, arguments))
        case Error(name=name, arguments=arguments):
            return _with_length(_ERROR, b"", serialize_call(name, arguments))
        case Handshake():
            return _serialize_handshake(frame)
    raise TypeError(f"{type(frame).__name__} is not a MicroMsg2 frame")


def _with_length(flags: int, head: bytes, payload: bytes) -> bytes:
    size = len(payload)
    if size > 255:
        return bytes([flags | _LARGE]) + head + size.to_bytes(4) + payload
    return bytes([flags]) + head + bytes([size]) + payload


def _serialize_handshake(frame: Handshake) -> bytes:
    identity = frame.identity.encode("latin-1")
    required = serialize_extensions(frame.required)
    optional = serialize_extensions(frame.optional)
    return b"".join(
        (
            bytes([frame.major, frame.minor, frame.flags]),
            len(identity).to_bytes(1),
            identity,
            len(required).to_bytes(2),
            required,
            len(optional).to_bytes(2),
            optional,
        )
    )
