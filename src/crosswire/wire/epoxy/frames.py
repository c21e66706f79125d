"""Epoxy's frames, parsed and serialized; `layout.py` has the layout.

The content of most framelets stays the bytes that were received. The headers of nearly every
message are written alike, so those are read in line, by one unpacking; whatever is written in
another way is left to `crosswire.bond`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from functools import lru_cache
from typing import Any, ClassVar, Final

from crosswire.errors import (
    BondError,
    ErrorInError,
    FrameError,
    FrameTooLarge,
    MalformedFrame,
    UnknownFrame,
    UnsupportedFrame,
)
from crosswire.wire.contract import Frame, Limits, Placed
from crosswire.wire.epoxy.comm import (
    Error,
    decode_config,
    decode_headers,
    decode_protocol_error,
    encode_protocol_error,
)
from crosswire.wire.epoxy.layout import (
    CONVERSATION_FIELD,
    CONVERSATION_FIELD_SIZE,
    COUNT_SIZE,
    FIELD_HEADER_SIZE,
    FIRST_MESSAGE_TYPE,
    FIRST_TYPE_SHIFT,
    FRAMELET_HEADER_SIZE,
    FRAMELET_STRUCT,
    HEADER_SIZE,
    HEADERS_STRUCT,
    HEADERS_WITHOUT_CONVERSATION_STRUCT,
    LAST_MESSAGE_TYPE,
    MAX_FRAMELETS,
    MAX_VARINT32_SIZE,
    MESSAGE_EVENT,
    MESSAGE_REQUEST,
    MESSAGE_RESPONSE,
    MESSAGE_TYPE_FIELD,
    MESSAGE_TYPE_FIELD_SIZE,
    METHOD_FIELD,
    SERVICE_FIELD,
    SIZE_SIZE,
    STOP,
    TYPE_CONFIG,
    TYPE_ERROR_DATA,
    TYPE_HEADERS,
    TYPE_LAYER_DATA,
    TYPE_PAYLOAD,
    TYPE_PROTOCOL_ERROR,
    TYPE_SIZE,
    TYPES,
    VARINT_BITS,
    VARINT_MASK,
    VARINT_MORE,
)

__all__ = [
    "DEFAULTS",
    "ConfigFrame",
    "EpoxyLimits",
    "Message",
    "MessageType",
    "ProtocolError",
    "ProtocolErrorCode",
    "measure",
    "scan",
    "serialize",
]

_MIB = 1024 * 1024


class EpoxyLimits(Limits, frozen=True, kw_only=True):
    """`framelets`, `framelet_bytes` and `frame_bytes` can't be below the minimum that the
    specification requires (section "Limits"). Raises ValueError.

    `pending_requests` is the number of unanswered requests at which we stop reading from a peer,
    `pending_bytes` their size, 512 bytes each added. Both are far beyond what peers pipeline: while
    we don't read, responses can't be read either, and two peers that wait for each other's
    responses would block.

    `drain_s` is how long pending requests may take once one side is closing, `goodbye_s` how long
    the peer may take to close its half. `strict` checks that a client's conversation ids are odd
    and a server's even.
    """

    frame_bytes: int = 32 * _MIB
    framelet_bytes: int = 32 * _MIB
    framelets: int = 16
    pending_requests: int = 32_768
    pending_bytes: int = 64 * _MIB
    drain_s: float = 30.0
    goodbye_s: float = 5.0
    strict: bool = False

    def __post_init__(self) -> None:
        for name, least in (("framelets", 4), ("framelet_bytes", 512), ("frame_bytes", 2048)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")


DEFAULTS: Final = EpoxyLimits()


class MessageType(IntEnum):
    """Specification, section Message type."""

    REQUEST = MESSAGE_REQUEST
    RESPONSE = MESSAGE_RESPONSE
    EVENT = MESSAGE_EVENT


class ProtocolErrorCode(IntEnum):
    """Specification, section ProtocolError struct."""

    GENERIC_ERROR = 0
    INTERNAL_ERROR = 1
    NOT_SUPPORTED = 2
    PROTOCOL_VIOLATED = 3
    MALFORMED_DATA = 4
    LIMIT_EXCEEDED = 5
    CLIENT_BAD_HANDSHAKE = 6
    SERVER_BAD_HANDSHAKE = 7
    BAD_CONVERSATION_ID = 8
    CONVERSATION_IDS_EXHAUSTED = 9
    TIMEOUT = 10
    CONNECTION_REJECTED = 11
    ERROR_IN_ERROR = 0xFFFF


# ---------------------------------------------------------------------------------------- frames


class ConfigFrame(Frame, frozen=True, gc=False):
    """The handshake. There is nothing to configure yet; unknown fields are ignored."""

    frame_name: ClassVar[str] = "config"


class Message(Frame, frozen=True, gc=False):
    """A request, response or event, with either `payload` or `error`.

    They and `layer_data` are marshalled Bond.
    """

    frame_name: ClassVar[str] = "message"
    conversation_id: int
    message_type: MessageType
    service_name: str = ""
    method_name: str = ""
    layer_data: bytes | None = None
    payload: bytes | None = None
    error: bytes | None = None

    def fields(self) -> dict[str, Any]:
        """As `crosswire decode` prints them; Bond in hexadecimal, absent fields omitted."""
        fields: dict[str, Any] = {
            "conversation_id": self.conversation_id,
            "message_type": _public(self.message_type),
        }
        for name in ("service_name", "method_name"):
            if value := getattr(self, name):
                fields[name] = value
        for name in ("layer_data", "payload", "error"):
            if (value := getattr(self, name)) is not None:
                fields[name] = value.hex()
        return fields


class ProtocolError(Frame, frozen=True, gc=False):
    """Ends the connection. `error_code` may be one that is not defined."""

    frame_name: ClassVar[str] = "protocol-error"
    error_code: int
    details: Error | None = None

    @property
    def error_name(self) -> str:
        """The code's name in lower case with hyphens, or its number."""
        try:
            return _public(ProtocolErrorCode(self.error_code))
        except ValueError:
            return str(self.error_code)

    def fields(self) -> dict[str, Any]:
        """As `crosswire decode` prints them; the code by name."""
        fields: dict[str, Any] = {"error_code": self.error_name}
        if self.details is not None:
            fields["details"] = self.details.fields()
        return fields


def _public(member: IntEnum) -> str:
    return member.name.lower().replace("_", "-")


# ------------------------------------------------------------------------------------- framelets

_LAYOUTS: Final = {
    (TYPE_CONFIG,): ConfigFrame,
    (TYPE_PROTOCOL_ERROR,): ProtocolError,
    (TYPE_HEADERS, TYPE_PAYLOAD): Message,
    (TYPE_HEADERS, TYPE_ERROR_DATA): Message,
    (TYPE_HEADERS, TYPE_LAYER_DATA, TYPE_PAYLOAD): Message,
    (TYPE_HEADERS, TYPE_LAYER_DATA, TYPE_ERROR_DATA): Message,
}
"""The frames by their framelets. Any other combination is malformed."""

_CONVERSATION: Final = CONVERSATION_FIELD.to_bytes(FIELD_HEADER_SIZE, "little")
_MESSAGE_TYPE: Final = MESSAGE_TYPE_FIELD.to_bytes(FIELD_HEADER_SIZE, "little")
_SERVICE: Final = SERVICE_FIELD.to_bytes(FIELD_HEADER_SIZE, "little")
_METHOD: Final = METHOD_FIELD.to_bytes(FIELD_HEADER_SIZE, "little")
_STOP: Final = bytes((STOP,))

# Of a message, what `HEADERS_STRUCT` reads first: how many framelets, and that the first of them is
# the headers.
_TWO_FRAMELETS: Final = TYPE_HEADERS << FIRST_TYPE_SHIFT | 2
_THREE_FRAMELETS: Final = TYPE_HEADERS << FIRST_TYPE_SHIFT | 3
_HEADERS_OFFSET: Final = HEADER_SIZE + FRAMELET_HEADER_SIZE
"""Where the content of a message's headers begins."""
_NAMES_OFFSET: Final = HEADERS_STRUCT.size
"""Where the names in its headers begin, if it has a conversation id."""
_NAMES_BYTES: Final = 256
_NAMES_KEPT: Final = 1024

_MESSAGE_TYPES: Final = (
    MessageType.REQUEST,  # never looked up: 0 is no message type
    MessageType.REQUEST,
    MessageType.RESPONSE,
    MessageType.EVENT,
)

_names: dict[bytes, tuple[str, str]] = {_STOP: ("", "")}
"""Service and method by the bytes at the end of the headers: a connection uses few methods, and a
lookup is quicker than parsing. Bounded, since peers choose the names."""


def scan(
    buffer: bytes, position: int, base: int, limits: EpoxyLimits, placed: list[Placed]
) -> tuple[int, int]:
    """Append the frames from `position` on, as `Decoder._scan` does; `base` is the offset of
    `buffer[0]` in the stream.

    Most frames are messages of two framelets with the usual headers. Those that are whole and
    within the limits are read in this loop; `_walk` and `_parse` read all others, and find the
    violations.
    """
    size_of_buffer = len(buffer)
    last_usual = size_of_buffer - _NAMES_OFFSET
    framelet_bytes, frame_bytes = limits.framelet_bytes, limits.frame_bytes
    unpack, unpack_framelet = HEADERS_STRUCT.unpack_from, FRAMELET_STRUCT.unpack_from
    append, names_of, types = placed.append, _names.get, _MESSAGE_TYPES
    first_type, last_type = FIRST_MESSAGE_TYPE, LAST_MESSAGE_TYPE
    while position < size_of_buffer:
        if position <= last_usual:
            key, size, id_field, conversation, type_field, kind = unpack(buffer, position)
            middle = position + _HEADERS_OFFSET + size
            if (
                key == _TWO_FRAMELETS
                and id_field == _CONVERSATION
                and type_field == _MESSAGE_TYPE
                and first_type <= kind <= last_type
                and size <= _NAMES_BYTES
                and middle + FRAMELET_HEADER_SIZE < size_of_buffer
            ):
                tail = buffer[position + _NAMES_OFFSET : middle]
                names = names_of(tail) or _read_names(tail)
                content, size = unpack_framelet(buffer, middle)
                middle += FRAMELET_HEADER_SIZE
                end = middle + size
                if (
                    names is not None
                    and content == TYPE_PAYLOAD
                    and 0 < size <= framelet_bytes
                    and end <= size_of_buffer
                    and end - position <= frame_bytes
                ):
                    service, method = names
                    message = Message(
                        conversation, types[kind], service, method, None, buffer[middle:end]
                    )
                    append((base + position, end - position, message))
                    position = end
                    continue
        start, (position, need) = position, scan_one(buffer, position, base, limits, placed)
        if position == start:
            return position, need
    return position, COUNT_SIZE


def scan_one(
    buffer: bytes, position: int, base: int, limits: EpoxyLimits, placed: list[Placed]
) -> tuple[int, int]:
    """`scan` for one frame of any kind; if it is not whole, `position` stays."""
    framelets, end = _walk(buffer, position, base, limits)
    if framelets is None:
        return position, end - position
    placed.append((base + position, end - position, _parse(buffer, position, base, framelets, end)))
    return end, COUNT_SIZE


def framelets_of(buffer: bytes, position: int) -> Iterator[tuple[int, int, int]]:
    """Type, start and end of the framelets of a frame whose headers are in the buffer; their
    contents need not be."""
    count = int.from_bytes(buffer[position : position + COUNT_SIZE], "little")
    at = position + COUNT_SIZE
    for _ in range(count):
        if at + FRAMELET_HEADER_SIZE > len(buffer):
            return
        kind, size = FRAMELET_STRUCT.unpack_from(buffer, at)
        at += FRAMELET_HEADER_SIZE
        yield kind, at, at + size
        at += size


def _read_names(tail: bytes) -> tuple[str, str] | None:
    """Service and method in the end of the headers; None if they are not written as usual."""
    position = 0
    names = ["", ""]
    for index, field in enumerate((_SERVICE, _METHOD)):
        if tail[position : position + FIELD_HEADER_SIZE] == field:
            size, position = _read_length(tail, position + FIELD_HEADER_SIZE)
            name = tail[position : position + size]
            position += size
            try:
                names[index] = name.decode()
            except UnicodeDecodeError:
                return None
    if tail[position : position + 1] != _STOP:
        return None
    service, method = names
    if len(tail) <= _NAMES_BYTES:
        if len(_names) >= _NAMES_KEPT:
            _names.clear()
            _names[_STOP] = ("", "")
        _names[tail] = service, method
    return service, method


def _read_length(data: bytes, position: int) -> tuple[int, int]:
    """A variable-length uint32 and where it ends; if it has no end, a length beyond the data."""
    length = 0
    for index, octet in enumerate(data[position : position + MAX_VARINT32_SIZE]):
        length |= (octet & VARINT_MASK) << VARINT_BITS * index
        if octet < VARINT_MORE:
            return length, position + index + 1
    return len(data), position


def _write_length(length: int) -> bytes:
    octets = bytearray()
    while length > VARINT_MASK:
        octets.append(length & VARINT_MASK | VARINT_MORE)
        length >>= VARINT_BITS
    octets.append(length)
    return bytes(octets)


def _read_headers(content: bytes) -> tuple[int, int, str, str]:
    """The headers of any message. Raises BondDecodeError."""
    at = conversation = 0
    if content[:FIELD_HEADER_SIZE] == _CONVERSATION:
        at = CONVERSATION_FIELD_SIZE
        conversation = int.from_bytes(content[FIELD_HEADER_SIZE:at], "little")
    type_at = at + FIELD_HEADER_SIZE
    if content[at:type_at] == _MESSAGE_TYPE:
        names_at = at + MESSAGE_TYPE_FIELD_SIZE
        tail = content[names_at:]
        names = _names.get(tail) or _read_names(tail)
        if names is not None:
            kind = int.from_bytes(content[type_at:names_at], "little", signed=True)
            return conversation, kind, *names
    return decode_headers(content)


Framelets = list[tuple[int, int, int]]
"""Type, and where the content begins and ends."""


def _walk(
    buffer: bytes, position: int, base: int, limits: EpoxyLimits
) -> tuple[Framelets | None, int]:
    """The framelets of the frame at `position` and its end; or None, and up to where bytes are
    needed to continue.

    Raises FrameError as soon as a count, type or size is wrong, before the content arrives.
    """
    size_of_buffer = len(buffer)
    at = position + COUNT_SIZE
    if at > size_of_buffer:
        return None, at
    count = int.from_bytes(buffer[position:at], "little")
    framelets: Framelets = []

    def refuse(kind: type[FrameError], reason: str) -> FrameError:
        if framelets and framelets[0][0] == TYPE_PROTOCOL_ERROR:
            kind = ErrorInError
        return kind(reason, offset=base + position, length=at - position)

    if not count:
        raise refuse(UnknownFrame, "a frame without framelets")
    if count > limits.framelets:
        reason = f"a frame of {count} framelets, more than the {limits.framelets} allowed"
        raise refuse(FrameTooLarge, reason)
    while len(framelets) < count:
        at += TYPE_SIZE
        if at > size_of_buffer:
            return None, at
        kind = int.from_bytes(buffer[at - TYPE_SIZE : at], "little")
        if kind not in TYPES:
            raise refuse(UnknownFrame, f"framelet type {kind:#06x} is not defined")
        at += SIZE_SIZE
        if at > size_of_buffer:
            return None, at
        size = int.from_bytes(buffer[at - SIZE_SIZE : at], "little")
        end = at + size
        framelets.append((kind, at, end))
        if size > limits.framelet_bytes:
            reason = f"a framelet of {size} bytes, more than the {limits.framelet_bytes} allowed"
            raise refuse(FrameTooLarge, reason)
        if end - position > limits.frame_bytes:
            reason = f"a frame of more than the {limits.frame_bytes} bytes allowed"
            raise refuse(FrameTooLarge, reason)
        at = end
        # Contents are not waited for one by one: the next header, or the end, decides.
        if len(framelets) == count and at > size_of_buffer:
            return None, at
    return framelets, at


def _parse(buffer: bytes, position: int, base: int, framelets: Framelets, end: int) -> Frame:
    """A whole frame of any kind."""
    location: Any = {"offset": base + position, "length": end - position, "resumable": True}
    kinds = tuple(kind for kind, _, _ in framelets)
    contents = [buffer[start:stop] for _, start, stop in framelets]
    layout = _LAYOUTS.get(kinds)
    try:
        if layout is None:
            shown = " ".join(kind.to_bytes(TYPE_SIZE, "little").decode() for kind in kinds)
            raise MalformedFrame(f"framelets {shown} don't make a frame", **location)
        if not all(contents):
            raise MalformedFrame("a framelet without content", **location)
        if layout is ConfigFrame:
            decode_config(contents[0])
            return ConfigFrame()
        if layout is ProtocolError:
            return ProtocolError(*decode_protocol_error(contents[0]))
        conversation, kind, service, method = _read_headers(contents[0])
    except (BondError, MalformedFrame) as error:
        reason = error.reason if isinstance(error, MalformedFrame) else str(error)
        refusal = ErrorInError if kinds[0] == TYPE_PROTOCOL_ERROR else MalformedFrame
        raise refusal(reason, **location) from None
    if not FIRST_MESSAGE_TYPE <= kind <= LAST_MESSAGE_TYPE:
        raise UnsupportedFrame(f"message type {kind} is not supported", **location)
    return Message(
        conversation,
        _MESSAGE_TYPES[kind],
        service,
        method,
        contents[1] if len(contents) == MAX_FRAMELETS else None,
        contents[-1] if kinds[-1] == TYPE_PAYLOAD else None,
        contents[-1] if kinds[-1] == TYPE_ERROR_DATA else None,
    )


def measure(buffer: bytes, position: int, most_bytes: int) -> int | None:
    """Length of what may be a frame here, as `Decoder._measure` has it: framelets in an allowed
    order, of plausible sizes."""
    at = position + HEADER_SIZE
    count = int.from_bytes(buffer[position:at], "little")
    if len(buffer) >= at and not 1 <= count <= MAX_FRAMELETS:
        return None
    kinds: tuple[int, ...] = ()
    while len(kinds) < max(count, 1):
        if at + FRAMELET_HEADER_SIZE > len(buffer):
            return 0
        kind, size = FRAMELET_STRUCT.unpack_from(buffer, at)
        kinds += (kind,)
        at += FRAMELET_HEADER_SIZE + size
        if not size or at - position > most_bytes:
            return None
        if not any(layout[: len(kinds)] == kinds for layout in _LAYOUTS):
            return None
    return at - position if kinds in _LAYOUTS else None


# ------------------------------------------------------------------------------------- serialize

# Bound once: a method of an imported name is looked up anew with every call.
_pack_framelet: Final = FRAMELET_STRUCT.pack
_pack_headers: Final = HEADERS_STRUCT.pack
_pack_headers_without_id: Final = HEADERS_WITHOUT_CONVERSATION_STRUCT.pack


def _frame_of(kind: int, content: bytes) -> bytes:
    """A frame of one framelet."""
    return (1).to_bytes(COUNT_SIZE, "little") + _pack_framelet(kind, len(content)) + content


_CONFIG_FRAME: Final = _frame_of(TYPE_CONFIG, _STOP)


def serialize(frame: Frame) -> bytes:
    """The bytes of a frame."""
    match frame:
        case Message():
            return _serialize_message(frame)
        case ConfigFrame():
            return _CONFIG_FRAME
        case ProtocolError(error_code=code, details=details):
            return _frame_of(TYPE_PROTOCOL_ERROR, encode_protocol_error(code, details))
    raise TypeError(f"{type(frame).__name__} is not an Epoxy frame")


def _serialize_message(frame: Message) -> bytes:
    conversation, kind, service, method, layer_data, payload, error = (
        frame.conversation_id,
        frame.message_type,
        frame.service_name,
        frame.method_name,
        frame.layer_data,
        frame.payload,
        frame.error,
    )
    last, content = (TYPE_PAYLOAD, payload) if error is None else (TYPE_ERROR_DATA, error)
    if content is None:
        raise TypeError("a message has a payload or an error")
    names = (
        _names_kept(service, method)
        if len(service) + len(method) < _NAMES_BYTES
        else _serialize_names(service, method)
    )
    key = _TWO_FRAMELETS if layer_data is None else _THREE_FRAMELETS
    size = _NAMES_OFFSET - _HEADERS_OFFSET + len(names)
    if conversation:
        head = _pack_headers(key, size, _CONVERSATION, conversation, _MESSAGE_TYPE, kind)
    else:
        head = _pack_headers_without_id(key, size - CONVERSATION_FIELD_SIZE, _MESSAGE_TYPE, kind)
    if layer_data is None:
        return b"".join((head, names, _pack_framelet(last, len(content)), content))
    layer = _pack_framelet(TYPE_LAYER_DATA, len(layer_data))
    return b"".join((head, names, layer, layer_data, _pack_framelet(last, len(content)), content))


def _serialize_names(service: str, method: str) -> bytes:
    """The end of the headers; empty names are left out."""
    parts = []
    for field, name in ((_SERVICE, service), (_METHOD, method)):
        if name:
            text = name.encode()
            parts += [field, _write_length(len(text)), text]
    return b"".join((*parts, _STOP))


_names_kept = lru_cache(maxsize=_NAMES_KEPT)(_serialize_names)
