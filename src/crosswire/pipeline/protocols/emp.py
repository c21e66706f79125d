"""EMP: requests and responses; the hub's own operations carry messages to queues and topics.

A body is taken to have its `data` between two texts that come again and again: with what these say
read once and kept, only `data` is left to be read. What looks otherwise is read as a whole.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import pyarrow as pa

from crosswire.errors import FrameError, MalformedFrame
from crosswire.pipeline.protocols.contract import (
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
    Memory,
    Reading,
    Rows,
    json_text,
    kind_of_destination,
)
from crosswire.wire.contract import Frame
from crosswire.wire.emp.frames import Bye, Error, Hello, Ping, Pong, Request, Response, Result

__all__ = ["READING"]

_JSON: Final = "application/json"
_BINARY: Final = "application/octet-stream"
_SECRET: Final = "$authenticate"
_SUBSCRIBERS: Final = ("$subscribe", "$unsubscribe", "$serve")
_SIMPLE: Final = {
    Hello: HANDSHAKE,
    Bye: GOODBYE,
    Ping: HEARTBEAT,
    Pong: HEARTBEAT,
}

# What the scanner calls frames; those before them are small and rare.
_HELLO_ROW, _REQUEST_ROW = 0, 5
_EMPTY: Final = {
    1: Described("{}", GOODBYE),
    2: Described("{}", HEARTBEAT),
    3: Described("{}", HEARTBEAT),
}
"""bye, ping, pong"""

_UNASKED: Final = (RESPONSE, None)

_MOST_AROUND: Final = 256
"""Bytes around `data`, or of a destination: what is longer hardly comes again."""


# ------------------------------------------------------------------------------------------- JSON

_Id = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Publication(msgspec.Struct, gc=False):
    """The data of `$publish`, read as far as it is what it should be."""

    destination: str
    json: msgspec.Raw = msgspec.Raw(b"")
    text: str | None = None
    base64: str | None = None
    properties: dict[str, Any] | None = None


class _Delivery(_Publication, gc=False):
    """The same of `$deliver`, where the hub says which message it is."""

    id: _Id | None = None


class _Published(msgspec.Struct, gc=False):
    id: _Id


_CARRIERS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    "$publish": msgspec.json.Decoder(_Publication),
    "$deliver": msgspec.json.Decoder(_Delivery),
}
_ANY: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder(msgspec.Raw)
_PUBLISHED: Final = msgspec.json.Decoder(_Published)
_NO_JSON: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class _Call(NamedTuple):
    """What requests with the same `op` share; `op` is JSON, `shown` whether data may be told."""

    op: str
    kind: str
    destination: str
    answer: tuple[str, str]
    decode: Callable[[bytes], Any]
    carries: bool
    content_type: str | None
    shown: bool


class _Answer(NamedTuple):
    """What responses share that say the same; `fields` is the rest of the JSON."""

    fields: str
    status: str


def _called(op: str) -> _Call:
    destination = f"service/{op}"
    if op in _SUBSCRIBERS:
        answer = (ACKNOWLEDGEMENT, destination)
        return _Call(
            json_text(op), SUBSCRIPTION, destination, answer, _ANY.decode, False, None, False
        )
    answer = (RESPONSE, destination)
    decoder = _CARRIERS.get(op, _ANY)
    return _Call(
        json_text(op),
        REQUEST,
        destination,
        answer,
        decoder.decode,
        decoder is not _ANY,
        _JSON,
        op != _SECRET,
    )


def _answered(result: Result) -> _Answer:
    fields = {"status": result.status, "code": result.code, "description": result.description}
    told = json_text({name: value for name, value in fields.items() if value is not None})
    return _Answer(told[1:], "success" if result.status == "success" else result.code or "failure")


# -------------------------------------------------------------------------------------------- data

_MEMBER: Final = b'"data":'
_MARK: Final = b'{"":0}'


def _search(data: bytes, start: int, end: int, member: int) -> tuple[int, int]:
    """Where `data` might be in the body data[start:end], which has its name at `member`, or not at
    all; nowhere, if what is around it is long."""
    opened = data.find(b"{", member, end) if member >= 0 else 0
    closed = data.rfind(b"}", opened, end - 1) + 1
    if 0 < opened < closed and opened - start + end - closed <= _MOST_AROUND:
        return opened, closed
    return 0, 0


# Where a mark between the two is read as `data`, any other object would be. Neither cuts through a
# character: what stands beside them is a brace.


@lru_cache(maxsize=1024)
def _call_around(before: bytes, behind: bytes) -> _Call | None:
    """What a request asks for that has its data between these two, if it has it there."""
    try:
        call = Request(0, before + _MARK + behind).call()
    except MalformedFrame:
        return None
    return _called(call.op) if bytes(call.data) == _MARK else None


@lru_cache(maxsize=1024)
def _answer_around(before: bytes, behind: bytes) -> _Answer | None:
    """The same for a response."""
    try:
        result = Response(0, before + _MARK + behind).result()
    except MalformedFrame:
        return None
    return _answered(result) if bytes(result.data) == _MARK else None


def _is_object(text: bytes) -> bool:
    """What opens with a brace and has nothing behind the last: is it one JSON value?"""
    if text == b"{}":
        return True
    try:
        _ANY.decode(text)
        # The decoder passes over strings without a look at their encoding.
        if not text.isascii():
            text.decode()
    except _NO_JSON:
        return False
    return True


def _read_call(body: bytes) -> tuple[_Call, bytes, int, int, Any]:
    """What a request asks for; its data, how large that is in the body, what is behind it, and
    what it carries. Raises MalformedFrame."""
    asked = Request(0, body).call()
    call, value = _called(asked.op), bytes(asked.data)
    try:
        carried = call.decode(value)
    except _NO_JSON:
        carried = None  # the hub refuses it: a request like any other
    return call, value, *_place(body, asked.data), carried


def _place(body: bytes, data: msgspec.Raw) -> tuple[int, int]:
    """Size of `data` in the body, of which it is a view, and how much is behind it; 0 and 0 if it
    is not written."""
    at = int(pa.py_buffer(data).address) - int(pa.py_buffer(body).address)
    size = len(memoryview(data))
    return (size, len(body) - at - size) if 0 <= at < len(body) else (0, 0)


@lru_cache(maxsize=1024)
def _carrying(destination: str) -> tuple[str, tuple[str, str]]:
    """What a message to it is, and what the carrier's answer."""
    return kind_of_destination(destination), (ACKNOWLEDGEMENT, destination)


def _payload(carried: _Publication) -> tuple[bytes, str]:
    if carried.text is not None and not carried.json:
        return carried.text.encode(), "text/plain"
    if raw := bytes(carried.json):
        return raw, _JSON
    try:
        return base64.b64decode(carried.base64 or "", validate=True), _BINARY
    except ValueError:
        return b"", _BINARY


def _published(data: bytes) -> int | None:
    try:
        return _PUBLISHED.decode(data).id
    except _NO_JSON:
        return None


# ----------------------------------------------------------------------------------------- reading


class EmpReading(Reading):
    """A response has the destination of the request that it answers."""

    def __init__(self) -> None:
        self._asked: Memory[tuple[str, str]] = Memory()

    def describe(self, forward: bool, frame: Frame, offset: int, length: int) -> Described:  # noqa: ARG002
        if isinstance(frame, Request):
            return self._request(forward, frame.id, frame.body, 0, len(frame.body), True)
        if isinstance(frame, Response):
            return self._response(forward, frame.id, frame.body, 0, len(frame.body), True)
        if isinstance(frame, Error):
            return _error(frame)
        return Described(json_text(frame.fields()), _SIMPLE.get(type(frame), CONTROL))

    def describe_rows(self, rows: Rows, start: int, stop: int) -> Iterator[Described | FrameError]:
        data, payloads = rows.data, rows.payloads
        forwards, frames, numbers = rows.forward, rows.frame, rows.number
        starts, lengths = rows.slices[0]
        request, response = self._request, self._response
        for row in range(start, stop):
            forward, kind, at = forwards[row], frames[row], starts[row]
            found: Described | FrameError
            try:
                if kind == _REQUEST_ROW:
                    end = at + lengths[row]
                    found = request(forward, numbers[row], data, at, end, payloads)
                elif kind > _REQUEST_ROW:
                    end = at + lengths[row]
                    found = response(forward, numbers[row], data, at, end, payloads)
                else:
                    found = _EMPTY.get(kind) or _small(rows, row)
            except FrameError as error:
                error.__traceback__ = None
                self.interrupt(forward)
                found = error
            yield found

    def _save(self) -> Any:
        return self._asked.save()

    def _restore(self, own: Any) -> None:
        self._asked.restore(own)

    def _request(
        self, forward: bool, number: int, data: bytes, start: int, end: int, payloads: bool
    ) -> Described:
        """The request whose body is data[start:end]."""
        member = data.find(_MEMBER, start, end)
        opened, closed = member + 7, end - 1
        if (
            member < 0
            or opened - start > _MOST_AROUND
            or data[opened : opened + 1] != b"{"
            or data[closed - 1 : end] != b"}}"
        ):
            opened, closed = _search(data, start, end, member)
        value = data[opened:closed]
        size, behind = closed - opened, end - closed
        call = _call_around(data[start:opened], data[closed:end]) if size else None
        carried = None
        if call is not None:
            try:
                carried = call.decode(value)
                if not value.isascii():
                    value.decode()
            except _NO_JSON:
                call = None
        if call is None:
            call, value, size, behind, carried = _read_call(data[start:end])

        identifier = str(number)
        op, kind, destination, answer, _, carries, content_type, shown = call
        payload = value if payloads and shown else None
        properties = message_id = None
        if carries and carried is not None:
            destination = carried.destination
            known = _carrying if len(destination) <= _MOST_AROUND else _carrying.__wrapped__
            kind, answer = known(destination)
            payload, content_type = _payload(carried)
            if carried.properties is not None:
                properties = json_text(carried.properties)
            if type(carried) is _Delivery:
                message_id = carried.id
        self._asked.put((forward, identifier), answer)
        return Described(
            f'{{"id":{identifier},"op":{op}}}',
            kind,
            identifier,
            destination,
            None,
            None,
            size,
            behind,
            payload,
            content_type,
            properties,
            None,
            message_id,
            None,
        )

    def _response(
        self, forward: bool, number: int, data: bytes, start: int, end: int, payloads: bool
    ) -> Described:
        """The response whose body is data[start:end]."""
        member = data.find(_MEMBER, start, end)
        opened, closed = member + 7, end - 1
        if (
            member < 0
            or opened - start > _MOST_AROUND
            or data[opened : opened + 1] != b"{"
            or data[closed - 1 : end] != b"}}"
        ):
            opened, closed = _search(data, start, end, member)
        value = data[opened:closed]
        size, behind = closed - opened, end - closed
        answer = _answer_around(data[start:opened], data[closed:end]) if size else None
        if answer is None or not _is_object(value):
            body = data[start:end]
            result = Response(number, body).result()
            answer, value = _answered(result), bytes(result.data)
            size, behind = _place(body, result.data)

        identifier = str(number)
        kind, destination = self._asked.take((not forward, identifier)) or _UNASKED
        return Described(
            f'{{"id":{identifier},{answer.fields}',
            kind,
            identifier,
            destination,
            answer.status,
            None,
            size,
            behind,
            value if payloads else None,
            _JSON,
            None,
            None,
            _published(value) if kind == ACKNOWLEDGEMENT else None,
            None,
        )


def _small(rows: Rows, row: int) -> Described:
    """A hello, or an error."""
    if rows.frame[row] == _HELLO_ROW:
        return _hello(Hello(rows.detail[row]))
    starts, lengths = rows.slices[0]
    said = rows.data[starts[row] : starts[row] + lengths[row]].decode()
    return _error(Error(rows.detail[row], said))


@lru_cache(maxsize=256)
def _hello(frame: Hello) -> Described:
    return Described(json_text(frame.fields()), HANDSHAKE)


def _error(frame: Error) -> Described:
    return Described(json_text(frame.fields()), ERROR, status=str(frame.code))


READING = EmpReading
