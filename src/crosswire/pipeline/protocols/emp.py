"""EMP: requests and responses; the hub's own operations carry messages to queues and topics."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

import msgspec

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
    kind_of_destination,
)
from crosswire.wire.contract import Frame
from crosswire.wire.emp.frames import Bye, Error, Hello, Ping, Pong, Request, Response

__all__ = ["READING"]

_JSON: Final = "application/json"
_SECRET: Final = "$authenticate"
_CARRIERS: Final = ("$publish", "$deliver")
_SUBSCRIBERS: Final = ("$subscribe", "$unsubscribe", "$serve")
_SIMPLE: Final = {
    Hello: HANDSHAKE,
    Bye: GOODBYE,
    Ping: HEARTBEAT,
    Pong: HEARTBEAT,
}


class _Carried(msgspec.Struct, gc=False):
    """The data of `$publish` and `$deliver`, read as far as it is what it should be."""

    destination: str
    json: msgspec.Raw = msgspec.Raw(b"")
    text: str | None = None
    base64: str | None = None
    properties: dict[str, Any] | None = None
    id: int | None = None


class _Published(msgspec.Struct, gc=False):
    id: int


_CARRIED: Final = msgspec.json.Decoder(_Carried)
_PUBLISHED: Final = msgspec.json.Decoder(_Published)


class EmpReading(Reading):
    """A response has the destination of the request that it answers."""

    def __init__(self) -> None:
        self._asked: Memory[tuple[str, str]] = Memory()

    def describe(self, forward: bool, frame: Frame, offset: int, length: int) -> Described:  # noqa: ARG002
        if isinstance(frame, Request):
            return self._request(forward, frame)
        if isinstance(frame, Response):
            return self._response(forward, frame)
        if isinstance(frame, Error):
            return Described(frame.fields(), ERROR, status=str(frame.code))
        return Described(frame.fields(), _SIMPLE.get(type(frame), CONTROL))

    def _save(self) -> Any:
        return self._asked.save()

    def _restore(self, own: Any) -> None:
        self._asked.restore(own)

    def _request(self, forward: bool, frame: Request) -> Described:
        call = frame.call()
        op, data = call.op, bytes(call.data)
        fields = {"id": frame.id, "op": op}
        identifier = str(frame.id)
        size, end = _place(frame.body, data)
        carried = _carried(data) if op in _CARRIERS else None
        if carried is not None:
            kind = kind_of_destination(carried.destination)
            self._asked.put((forward, identifier), (ACKNOWLEDGEMENT, carried.destination))
            payload, content_type = _payload(carried)
            return Described(
                fields,
                kind,
                identifier,
                carried.destination,
                payload_size=size,
                payload_end=end,
                payload=payload,
                content_type=content_type,
                properties=carried.properties,
                message_id=carried.id,
            )
        destination = f"service/{op}"
        if op in _SUBSCRIBERS:
            self._asked.put((forward, identifier), (ACKNOWLEDGEMENT, destination))
            return Described(
                fields,
                SUBSCRIPTION,
                identifier,
                destination,
                payload_size=size,
                payload_end=end,
            )
        self._asked.put((forward, identifier), (RESPONSE, destination))
        return Described(
            fields,
            REQUEST,
            identifier,
            destination,
            payload_size=size,
            payload_end=end,
            payload=None if op == _SECRET else data,
            content_type=_JSON,
        )

    def _response(self, forward: bool, frame: Response) -> Described:
        result = frame.result()
        data = bytes(result.data)
        fields: dict[str, Any] = {"id": frame.id, "status": result.status}
        if result.code is not None:
            fields["code"] = result.code
        if result.description is not None:
            fields["description"] = result.description
        identifier = str(frame.id)
        size, end = _place(frame.body, data)
        kind, destination = self._asked.take((not forward, identifier)) or (RESPONSE, None)
        return Described(
            fields,
            kind,
            identifier,
            destination,
            "success" if result.status == "success" else result.code or "failure",
            payload_size=size,
            payload_end=end,
            payload=data,
            content_type=_JSON,
            message_id=_published(data) if kind == ACKNOWLEDGEMENT else None,
        )


def _place(body: bytes, data: bytes) -> tuple[int, int]:
    """Size of the JSON of `data` in the body, 0 if it is not written, and how much is behind it.

    Where the same text stands there twice, it is tried out which of them is `data`.
    """
    at = body.rfind(data)
    if at < 0:
        return 0, 0
    if body.find(data) != at:
        mark = b'{"":0}'
        while at >= 0:
            changed = body[:at] + mark + body[at + len(data) :]
            try:
                if bytes(_DATA.decode(changed).data) == mark:
                    break
            except msgspec.MsgspecError:
                pass  # that was not it: the rest of the body is no JSON any more
            at = body.rfind(data, 0, at + len(data) - 1)
        if at < 0:
            return 0, 0
    return len(data), len(body) - at - len(data)


class _Data(msgspec.Struct, gc=False):
    data: msgspec.Raw = msgspec.Raw(b"{}")


_DATA: Final = msgspec.json.Decoder(_Data)


def _carried(data: bytes) -> _Carried | None:
    try:
        return _CARRIED.decode(data)
    except msgspec.MsgspecError:
        return None  # the hub refuses it: a request like any other


def _published(data: bytes) -> int | None:
    try:
        return _PUBLISHED.decode(data).id
    except msgspec.MsgspecError:
        return None


def _payload(carried: _Carried) -> tuple[bytes, str]:
    if raw := bytes(carried.json):
        return raw, _JSON
    if carried.text is not None:
        return carried.text.encode(errors="surrogatepass"), "text/plain"
    try:
        return base64.b64decode(carried.base64 or "", validate=True), "application/octet-stream"
    except binascii.Error:
        return b"", "application/octet-stream"


READING = EmpReading
