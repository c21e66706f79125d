"""EMP: requests and responses; the hub's own operations carry messages to queues and topics.

Most bodies have their `data` between two texts, of which there are few: they are read once and
cached, and only `data` is left to be read. Other bodies are read as a whole.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import pyarrow as pa

from crosswire.errors import MalformedFrame
from crosswire.pipeline.decode.meanings.contract import (
    ACKNOWLEDGEMENT,
    CONTROL,
    ERROR,
    GOODBYE,
    HANDSHAKE,
    HEARTBEAT,
    REQUEST,
    RESPONSE,
    SUBSCRIPTION,
    Described,
    PendingRequests,
    ProtocolMemory,
    json_text,
    kind_of_destination,
)
from crosswire.wire.contract import Frame
from crosswire.wire.emp.frames import (
    ABSENT,
    Bye,
    Error,
    Hello,
    Ping,
    Pong,
    Request,
    Response,
    Result,
)

__all__ = [
    "BINARY",
    "JSON",
    "MEMORY",
    "MOST_AROUND",
    "TEXT",
    "UNASKED",
    "EmpBody",
    "EmpMemory",
    "OperationText",
    "Target",
    "asked",
    "carrying",
    "describe_properties",
    "operation_around",
    "operation_beside",
    "published",
    "read_request",
    "read_response",
]

JSON: Final = "application/json"
TEXT: Final = "text/plain"
BINARY: Final = "application/octet-stream"
_SECRET: Final = "$authenticate"
_SUBSCRIBERS: Final = ("$subscribe", "$unsubscribe", "$serve")
_SIMPLE: Final = {
    Hello: HANDSHAKE,
    Bye: GOODBYE,
    Ping: HEARTBEAT,
    Pong: HEARTBEAT,
}

Target = tuple[str, str | None]
"""Kind and destination."""
UNASKED: Final[Target] = (RESPONSE, None)

MOST_AROUND: Final = 256
"""Bytes around `data`, or of a destination: longer ones are not worth caching."""


# ------------------------------------------------------------------------------------------- JSON

_Id = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _PublicationData(msgspec.Struct, gc=False):
    """The data of `$publish`; unknown members are ignored."""

    destination: str
    json: msgspec.Raw = msgspec.Raw(b"")
    text: str | None = None
    base64: str | None = None
    properties: dict[str, Any] | None = None


class _DeliveryData(_PublicationData, gc=False):
    """The data of `$deliver`, which has the hub's id of the message."""

    id: _Id | None = None


class _Published(msgspec.Struct, gc=False):
    id: _Id


_CARRIERS: Final[dict[str, Callable[[bytes], Any]]] = {
    "$publish": msgspec.json.Decoder(_PublicationData).decode,
    "$deliver": msgspec.json.Decoder(_DeliveryData).decode,
}
_ANY: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder(msgspec.Raw)
_PUBLISHED: Final = msgspec.json.Decoder(_Published)
_PROPERTIES: Final = msgspec.json.Decoder(dict[str, Any])
_NO_JSON: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


# -------------------------------------------------------------------------------------- operations


class OperationText(NamedTuple):
    """What requests with the same `op` share, or responses with the same result.

    `fields` is what the JSON has after the id. The target of a response is the `answer` of its
    request, if that is known. `decode` reads the data of operations that carry a message, and
    `has_id` is whether the message has an id of the hub. `shown` is whether data may be in the
    tables: credentials may not.
    """

    fields: str
    target: Target = UNASKED
    answer: Target | None = None
    status: str | None = None
    content_type: str | None = None
    shown: bool = False
    decode: Callable[[bytes], Any] | None = None
    has_id: bool = False


def _called(op: str) -> OperationText:
    destination = f"service/{op}"
    fields = f',"op":{json_text(op)}}}'
    if op in _SUBSCRIBERS:
        return OperationText(fields, (SUBSCRIPTION, destination), (ACKNOWLEDGEMENT, destination))
    return OperationText(
        fields,
        (REQUEST, destination),
        (RESPONSE, destination),
        None,
        JSON,
        op != _SECRET,
        _CARRIERS.get(op),
        op == "$deliver",
    )


def _answered(result: Result) -> OperationText:
    fields = {"status": result.status, "code": result.code, "description": result.description}
    fields_text = json_text({name: value for name, value in fields.items() if value is not None})
    status = "success" if result.status == "success" else result.code or "failure"
    return OperationText(f",{fields_text[1:]}", status=status, content_type=JSON, shown=True)


def operation_beside(frame: Frame) -> OperationText:
    """Of a frame that is neither request nor response; `fields` is all of the JSON."""
    fields, kind = json_text(frame.fields()), _SIMPLE.get(type(frame), CONTROL)
    if isinstance(frame, Error):
        return OperationText(fields, (ERROR, None), status=str(frame.code))
    return OperationText(fields, (kind, None))


# -------------------------------------------------------------------------------------------- data


class EmpBody(NamedTuple):
    """A request's or response's body: its data, the size of that in the body, and how many bytes
    follow it.

    `data` is empty if there is none; an object has at least two braces.
    """

    operation: OperationText
    data: bytes
    size: int
    after: int


_MEMBER: Final = b'"data":'
_MARK: Final = b'{"":0}'


def read_request(body: bytes) -> EmpBody:
    """The parts of a request's body. Raises MalformedFrame."""
    found = _between(body, True)
    if found is not None:
        return found
    call = Request(0, body).call()
    return EmpBody(_called(call.op), _written(call.data), *_target(body, call.data))


def read_response(body: bytes) -> EmpBody:
    """The parts of a response's body. Raises MalformedFrame."""
    found = _between(body, False)
    if found is not None:
        return found
    result = Response(0, body).result()
    return EmpBody(_answered(result), _written(result.data), *_target(body, result.data))


def _written(data: msgspec.Raw) -> bytes:
    return b"" if data is ABSENT else bytes(data)


def _between(body: bytes, is_request: bool) -> EmpBody | None:
    """The body, if its data is an object in the usual position."""
    member = body.find(_MEMBER, 0, MOST_AROUND)
    opened = body.find(b"{", member) if member >= 0 else 0
    closed = body.rfind(b"}", opened, -1) + 1
    if not 0 < opened < closed or opened + len(body) - closed > MOST_AROUND:
        return None
    operation = operation_around(body[:opened], body[closed:], is_request)
    data = body[opened:closed]
    if operation is None or not _is_object(data):
        return None
    return EmpBody(operation, data, len(data), len(body) - closed)


@lru_cache(maxsize=2048)
def operation_around(before: bytes, after: bytes, is_request: bool) -> OperationText | None:
    """The operation of bodies with these texts around an object; None if that is not their `data`.

    If a mark between the two is read as `data`, any other object would be too. Neither text ends
    within a character: what is next to it is a brace.
    """
    body = before + _MARK + after
    fields_text: Any
    try:
        fields_text = Request(0, body).call() if is_request else Response(0, body).result()
    except MalformedFrame:
        return None
    if _target(body, fields_text.data) != (len(_MARK), len(after)):
        return None
    return _called(fields_text.op) if is_request else _answered(fields_text)


def _is_object(text: bytes) -> bool:
    """Whether a text from an opening brace to a closing one is one JSON value."""
    if text == b"{}":
        return True
    try:
        _ANY.decode(text)
        # The decoder skips strings without checking that they are UTF-8.
        if not text.isascii():
            text.decode()
    except _NO_JSON:
        return False
    return True


def _target(body: bytes, data: msgspec.Raw) -> tuple[int, int]:
    """The size of `data` in the body, of which it is a view, and how many bytes follow it; 0 and 0
    if there is none."""
    at = int(pa.py_buffer(data).address) - int(pa.py_buffer(body).address)
    size = len(memoryview(data))
    return (size, len(body) - at - size) if 0 <= at < len(body) else (0, 0)


# ---------------------------------------------------------------------------------------- carriers


def asked(number: int, body: EmpBody) -> tuple[Described, Target | None]:
    """The description of a request, and the target that its response will have."""
    operation, data, size, after = body
    target, answer, content_type = operation.target, operation.answer, operation.content_type
    payload = data or None if operation.shown else None
    if not data:
        content_type = None
    properties = message_id = None
    carried = None if operation.decode is None else _carried(operation.decode, data)
    if carried is not None:
        target, answer = carrying(carried.destination)
        payload, content_type = _payload(carried)
        if carried.properties is not None:
            properties = json_text(carried.properties)
        if operation.has_id:
            message_id = carried.id
    described = Described(
        f'{{"id":{number}{operation.fields}',
        target[0],
        str(number),
        target[1],
        payload_size=size,
        payload_end=after,
        payload=payload,
        content_type=content_type,
        properties=properties,
        message_id=message_id,
    )
    return described, answer


def _carried(decode: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return decode(data)
    except _NO_JSON:
        return None  # the hub refuses it: a request like any other


def carrying(destination: str) -> tuple[Target, Target]:
    """The target of a message to this destination, and that of the carrier's response."""
    return (kind_of_destination(destination), destination), (ACKNOWLEDGEMENT, destination)


def _payload(carried: _PublicationData) -> tuple[bytes, str]:
    if carried.text is not None and not carried.json:
        return carried.text.encode(), TEXT
    if raw := bytes(carried.json):
        return raw, JSON
    try:
        return base64.b64decode(carried.base64 or "", validate=True), BINARY
    except ValueError:
        return b"", BINARY


def describe_properties(properties: bytes) -> str:
    """Properties as the tables have them."""
    return json_text(_PROPERTIES.decode(properties))


def published(data: bytes) -> int | None:
    """The hub's id of a message, from the response to its publisher."""
    try:
        return _PUBLISHED.decode(data).id
    except _NO_JSON:
        return None


# ------------------------------------------------------------------------------------------ memory


class EmpMemory(ProtocolMemory):
    """By request, the target of its response."""

    def __init__(self) -> None:
        self.asked: PendingRequests[Target] = PendingRequests()

    def _save(self) -> Any:
        return self.asked.save()

    def _restore(self, own: Any) -> None:
        self.asked.restore(own)


MEMORY = EmpMemory
