"""EMP's messages, parsed and serialized; `layout.py` has their bytes.

Requests and responses carry JSON, which stays as bytes until `Request.call()` or
`Response.result()` reads it. msgspec does, since it can check one member and pass another on
untouched, so that `$echo` returns what it received to the last digit; it is also the fastest reader
that we measured (benchmarks/codec.py).
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import Any, ClassVar, Final, Literal, TypeVar

import msgspec

from crosswire.errors import FrameTooLarge, MalformedFrame, UnknownFrame
from crosswire.wire.contract import Frame, Limits, Placed
from crosswire.wire.emp.layout import (
    ERROR_DESCRIPTION_OFFSET,
    ERROR_STRUCT,
    HEADER_STRUCT,
    HELLO_LENGTH,
    HELLO_STRUCT,
    JSON_OFFSET,
    LENGTH_OFFSET,
    LENGTH_SIZE,
    MAX_DESCRIPTION_SIZE,
    MIN_ERROR_LENGTH,
    MIN_LENGTH,
    MIN_REQUEST_LENGTH,
    REQUEST_STRUCT,
    TYPE_BYE,
    TYPE_ERROR,
    TYPE_HELLO,
    TYPE_OFFSET,
    TYPE_PING,
    TYPE_PONG,
    TYPE_REQUEST,
    TYPE_RESPONSE,
)

__all__ = [
    "ABSENT",
    "DEFAULTS",
    "Bye",
    "EmpCall",
    "EmpLimits",
    "Error",
    "ErrorCode",
    "Hello",
    "Ping",
    "Pong",
    "Request",
    "Response",
    "Result",
    "scan",
    "serialize",
    "serialize_call",
    "serialize_large_request",
    "serialize_request",
    "serialize_response",
    "serialize_result",
    "serialize_success",
]


class EmpLimits(Limits, frozen=True, kw_only=True):
    """`pending_requests` is how many requests of a peer may wait for a response before we stop
    reading, and `pending_bytes` their total size, each counted with 512 bytes more.

    While we don't read, the peer's pings and responses are not read either, so both limits are far
    beyond what peers pipeline.
    """

    ping_interval_s: float = 10.0
    ping_timeout_s: float = 10.0
    pending_requests: int = 32_768
    pending_bytes: int = 64 * 1024 * 1024


DEFAULTS: Final = EmpLimits()


class ErrorCode(IntEnum):
    """The codes of the specification's section "Error"."""

    INTERNAL = 0
    PROTOCOL = 1
    UNAVAILABLE = 2
    INVALID_IDENTIFIER = 3
    INVALID_REQUEST = 4


# ---------------------------------------------------------------------------------------- frames


class Hello(Frame, frozen=True, gc=False):
    """The first message of both peers."""

    frame_name: ClassVar[str] = "hello"
    version: int


class Bye(Frame, frozen=True, gc=False):
    """The sender closes the connection, without an error."""

    frame_name: ClassVar[str] = "bye"


class Ping(Frame, frozen=True, gc=False):
    """To be answered with Pong."""

    frame_name: ClassVar[str] = "ping"


class Pong(Frame, frozen=True, gc=False):
    """The answer to Ping."""

    frame_name: ClassVar[str] = "pong"


class Error(Frame, frozen=True, gc=False):
    """Ends the connection. `code` may be one that is not in ErrorCode."""

    frame_name: ClassVar[str] = "error"
    code: int
    description: str


class Request(Frame, frozen=True, gc=False):
    """`body` is unparsed JSON; `call()` parses it."""

    frame_name: ClassVar[str] = "request"
    id: int
    body: bytes

    def call(self) -> EmpCall:
        """The operation and its data. Raises MalformedFrame if `body` is no object with an `op`."""
        return _read_json(self.body, _CALL)

    def fields(self) -> dict[str, Any]:
        """With the JSON parsed. Raises MalformedFrame."""
        call = self.call()
        fields: dict[str, Any] = {"id": self.id, "op": call.op}
        if call.data is not ABSENT:
            fields["data"] = _on_one_line(call.data)
        return fields


class Response(Frame, frozen=True, gc=False):
    """`body` is unparsed JSON; `result()` parses it."""

    frame_name: ClassVar[str] = "response"
    id: int
    body: bytes

    def result(self) -> Result:
        """Status and data. Raises MalformedFrame if `body` is no object with a `status`, and for a
        failure without a description, which the specification requires ("Application data")."""
        if self.body == _SUCCESS_BODY:
            return _SUCCESS
        result = _read_json(self.body, _RESULT)
        if result.status == "failure" and result.description is None:
            raise MalformedFrame("a failure without a description")
        return result

    def fields(self) -> dict[str, Any]:
        """With the JSON parsed. Raises MalformedFrame."""
        result = self.result()
        fields: dict[str, Any] = {"id": self.id, "status": result.status}
        if result.code is not None:
            fields["code"] = result.code
        if result.description is not None:
            fields["description"] = result.description
        if result.data is not ABSENT:
            fields["data"] = _on_one_line(result.data)
        return fields


# ------------------------------------------------------------------------------ application data


ABSENT: Final = msgspec.Raw(b"{}")
"""Missing `data`, which means an empty object. Compare by identity: an empty object that was sent
is equal to it."""


class EmpCall(msgspec.Struct, frozen=True, gc=False):
    """The operation of a request; `data` is an unparsed JSON object, or ABSENT."""

    op: str
    data: msgspec.Raw = ABSENT


class Result(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The outcome in a response; `data` is an unparsed JSON object, or ABSENT."""

    status: Literal["success", "failure"]
    code: str | None = None
    description: str | None = None
    data: msgspec.Raw = ABSENT


_SUCCESS_BODY: Final = b'{"status":"success","data":{}}'
_SUCCESS: Final = Result("success", data=msgspec.Raw(b"{}"))
"""Nearly all responses to the hub are this body: it is recognized without parsing."""

_T = TypeVar("_T", EmpCall, Result)

_CALL: Final = msgspec.json.Decoder(EmpCall)
_RESULT: Final = msgspec.json.Decoder(Result)


def _read_json(body: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    """Raises MalformedFrame. msgspec does not check the UTF-8 of the raw `data`: done here."""
    try:
        if not body.isascii():
            body.decode()
        value = decoder.decode(body)
    except UnicodeDecodeError as error:
        raise MalformedFrame(f"application data is not UTF-8: {error.reason}") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise MalformedFrame(f"application data is not as it should be: {reason}") from None
    # A view: `bytes(value.data)` would copy all of it.
    if memoryview(value.data)[:1] != b"{":
        raise MalformedFrame("application data is not as it should be: `data` is not an object")
    return value


def _on_one_line(data: msgspec.Raw) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.format(bytes(data), indent=-1))


def serialize_call(op: str, data: bytes = b"{}") -> bytes:
    """The body of a request. `data`, an object, is always sent: the reference requires it."""
    return b"%b%b}" % (_opening(op), data)


@lru_cache(maxsize=1024)
def _opening(op: str) -> bytes:
    """A request's body up to its data. A peer uses few operations, again and again."""
    return b'{"op":%b,"data":' % msgspec.json.encode(op)


def serialize_success(data: bytes = b"{}") -> bytes:
    """The body of a successful response; `data`, an object, is always sent."""
    return b'{"status":"success","data":%b}' % data


def serialize_result(result: Result) -> bytes:
    """The body of any response."""
    body: dict[str, Any] = {"status": result.status, "data": result.data}
    if result.code is not None:
        body["code"] = result.code
    if result.description is not None:
        body["description"] = result.description
    return msgspec.json.encode(body)


# ------------------------------------------------------------------------------ parse, serialize


def scan(
    buffer: bytes, position: int, base: int, limit: int, placed: list[Placed]
) -> tuple[int, int]:
    """The frames from `position` on, as specified for `Decoder._scan`; `buffer[0]` is at `base`.

    Most messages are requests and responses: one unpacking reads their whole header, and no
    function is called for them.
    """
    end_of_buffer = len(buffer)
    # Locals: in this loop the lookups of globals could be measured.
    prefix, head, least = LENGTH_SIZE, JSON_OFFSET, MIN_REQUEST_LENGTH
    unpack = REQUEST_STRUCT.unpack_from
    append = placed.append
    last_request = end_of_buffer - head
    while position <= last_request:
        length, kind, identifier = unpack(buffer, position)
        end = position + prefix + length
        if length > limit:
            break
        if end > end_of_buffer:
            return position, prefix + length
        if length >= least and kind == TYPE_REQUEST:
            frame: Frame = Request(identifier, buffer[position + head : end])
        elif length >= least and kind == TYPE_RESPONSE:
            frame = Response(identifier, buffer[position + head : end])
        else:
            frame = _parse(kind, buffer, position, base, length)
        append((base + position, end - position, frame))
        position = end

    # A length over the limit, or the last bytes: they may be too few for an identifier.
    while position + LENGTH_SIZE <= end_of_buffer:
        start = position + LENGTH_OFFSET
        length = int.from_bytes(buffer[start : start + LENGTH_SIZE])
        end = position + LENGTH_SIZE + length
        if length > limit:
            raise FrameTooLarge(
                f"a message of {length} bytes, more than the {limit} allowed",
                offset=base + position,
                length=LENGTH_SIZE,
            )
        if end > end_of_buffer:
            return position, LENGTH_SIZE + length
        kind = buffer[position + TYPE_OFFSET] if length else 0
        append((base + position, end - position, _parse(kind, buffer, position, base, length)))
        position = end
    return position, LENGTH_SIZE


def _parse(kind: int, buffer: bytes, position: int, base: int, length: int) -> Frame:
    """A complete message of any type. Raises MalformedFrame or UnknownFrame."""
    location: Any = {"offset": base + position, "length": LENGTH_SIZE + length, "resumable": True}
    if length < MIN_LENGTH:
        raise MalformedFrame(f"a message of {length} bytes has no header", **location)
    if kind in (TYPE_REQUEST, TYPE_RESPONSE):
        if length < MIN_REQUEST_LENGTH:
            raise MalformedFrame("no room for an identifier", **location)
        (_, _, identifier) = REQUEST_STRUCT.unpack_from(buffer, position)
        body = buffer[position + JSON_OFFSET : position + LENGTH_SIZE + length]
        return Request(identifier, body) if kind == TYPE_REQUEST else Response(identifier, body)
    if kind == TYPE_HELLO:
        if length != HELLO_LENGTH:
            raise MalformedFrame(
                f"hello has a body of {HELLO_LENGTH - MIN_LENGTH} bytes, not {length - MIN_LENGTH}",
                **location,
            )
        return Hello(HELLO_STRUCT.unpack_from(buffer, position)[2])
    if kind == TYPE_BYE:
        return Bye()
    if kind == TYPE_PING:
        return Ping()
    if kind == TYPE_PONG:
        return Pong()
    if kind == TYPE_ERROR:
        if length < MIN_ERROR_LENGTH:
            raise MalformedFrame("error has no room for its code and description", **location)
        (_, _, code, size) = ERROR_STRUCT.unpack_from(buffer, position)
        room = length - MIN_ERROR_LENGTH
        if size != room:
            raise MalformedFrame(
                f"a description of {size} bytes in a body that has {room} for it", **location
            )
        start = position + ERROR_DESCRIPTION_OFFSET
        try:
            text = buffer[start : start + size].decode()
        except UnicodeDecodeError as error:
            raise MalformedFrame(
                f"a description is not UTF-8: {error.reason}", **location
            ) from None
        return Error(code, text)
    raise UnknownFrame(f"message type {kind} is not defined", **location)


_pack_request: Final = REQUEST_STRUCT.pack
_BYE: Final = HEADER_STRUCT.pack(MIN_LENGTH, TYPE_BYE)
_PING: Final = HEADER_STRUCT.pack(MIN_LENGTH, TYPE_PING)
_PONG: Final = HEADER_STRUCT.pack(MIN_LENGTH, TYPE_PONG)


def serialize_request(identifier: int, body: bytes) -> bytes:
    """The bytes of a request; `body` as `serialize_call` returns it."""
    return _pack_request(MIN_REQUEST_LENGTH + len(body), TYPE_REQUEST, identifier) + body


def serialize_large_request(identifier: int, op: str, data: bytes) -> list[bytes]:
    """The bytes of a request in pieces, of which `data` is one, so that it is not copied."""
    opening, end = _opening(op), b"}"
    length = MIN_REQUEST_LENGTH + len(opening) + len(data) + len(end)
    return [_pack_request(length, TYPE_REQUEST, identifier) + opening, data, end]


def serialize_response(identifier: int, body: bytes) -> bytes:
    """The bytes of a response; `body` as `serialize_success` or `serialize_result` returns it."""
    return _pack_request(MIN_REQUEST_LENGTH + len(body), TYPE_RESPONSE, identifier) + body


def serialize(frame: Frame) -> bytes:
    """The bytes of a message. An error's description is cut if it is too long."""
    match frame:
        # Not through `serialize_request`: a call would take a third of the time.
        case Request():
            body = frame.body
            return _pack_request(MIN_REQUEST_LENGTH + len(body), TYPE_REQUEST, frame.id) + body
        case Response():
            body = frame.body
            return _pack_request(MIN_REQUEST_LENGTH + len(body), TYPE_RESPONSE, frame.id) + body
        case Hello(version=version):
            return HELLO_STRUCT.pack(HELLO_LENGTH, TYPE_HELLO, version)
        case Bye():
            return _BYE
        case Ping():
            return _PING
        case Pong():
            return _PONG
        case Error(code=code, description=description):
            text = _at_most(description.encode(), MAX_DESCRIPTION_SIZE)
            length = MIN_ERROR_LENGTH + len(text)
            return ERROR_STRUCT.pack(length, TYPE_ERROR, code, len(text)) + text
    raise TypeError(f"{type(frame).__name__} is not an EMP message")


def _at_most(text: bytes, size: int) -> bytes:
    """Cut to `size` bytes without splitting a UTF-8 character."""
    return text if len(text) <= size else text[:size].decode(errors="ignore").encode()
