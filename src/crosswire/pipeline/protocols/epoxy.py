"""Epoxy: requests and responses by conversation, events as publications.

The hub's own service carries messages to queues and topics, and its events carry deliveries.
"""

from __future__ import annotations

from typing import Any, Final

from crosswire.bond import hub_module, marshal
from crosswire.errors import BondError
from crosswire.pipeline.protocols.contract import (
    ACKNOWLEDGEMENT,
    CONTROL,
    ERROR,
    HANDSHAKE,
    PUBLISH,
    REQUEST,
    RESPONSE,
    SUBSCRIPTION,
    Described,
    Memory,
    Reading,
    kind_of_destination,
)
from crosswire.wire.contract import Frame
from crosswire.wire.epoxy.comm import unmarshal_credentials, unmarshal_error
from crosswire.wire.epoxy.frames import Config, Message, MessageType, ProtocolError

__all__ = ["READING"]

_BY_MAGIC: Final = {
    b"CB\x01\x00": "application/vnd.bond.compact",
    b"CB\x02\x00": "application/vnd.bond.compact",
    b"MF\x01\x00": "application/vnd.bond.fast",
}
_PUBLISH: Final = "service/crosswire.Hub/Publish"
_DELIVER: Final = "topic/crosswire.Subscriber/Deliver"
_AROUND: Final = {
    "service/crosswire.Hub/Subscribe": SUBSCRIPTION,
    "service/crosswire.Hub/Unsubscribe": SUBSCRIPTION,
    "service/crosswire.Hub/Serve": SUBSCRIPTION,
    "service/crosswire.Hub/Settle": ACKNOWLEDGEMENT,
}
_CARRIERS: Final = {
    _PUBLISH: hub_module().struct("crosswire.Publication"),
    _DELIVER: hub_module().struct("crosswire.Delivery"),
}


class EpoxyReading(Reading):
    """A response has no names on the wire: it gets the destination of its request."""

    def __init__(self) -> None:
        self._asked: Memory[tuple[str, str]] = Memory()

    def describe(self, forward: bool, frame: Frame, offset: int, length: int) -> Described:  # noqa: ARG002
        match frame:
            case Message():
                return self._message(forward, frame)
            case Config():
                return Described(frame.fields(), HANDSHAKE)
            case ProtocolError():
                return Described(frame.fields(), ERROR, status=frame.error_name)
        return Described(frame.fields(), CONTROL)

    def _save(self) -> Any:
        return self._asked.save()

    def _restore(self, own: Any) -> None:
        self._asked.restore(own)

    def _message(self, forward: bool, frame: Message) -> Described:
        identifier = str(frame.conversation_id)
        fields = frame.fields()
        fields.pop("payload", None)
        if frame.layer_data is not None and _is_secret(frame.layer_data):
            fields.pop("layer_data")
        payload = frame.payload if frame.payload is not None else frame.error or b""
        described = Described(
            fields,
            identifier=identifier,
            payload_size=len(payload),
            payload=payload,
            content_type=_BY_MAGIC.get(payload[:4], "application/octet-stream"),
        )
        if frame.message_type == MessageType.RESPONSE:
            asked = self._asked.take((not forward, identifier)) or (RESPONSE, None)
            return described._replace(kind=asked[0], destination=asked[1], status=_status(frame))
        name = frame.service_name or ""
        name = f"{name}/{frame.method_name}" if frame.method_name else name
        is_request = frame.message_type == MessageType.REQUEST
        destination = f"service/{name}" if is_request else f"topic/{name}"
        carried = _carried(destination, payload)
        kind = _AROUND.get(destination, REQUEST if is_request else PUBLISH)
        if carried is not None:
            destination = carried.destination
            kind = kind_of_destination(destination)
            described = described._replace(
                payload=carried.payload,
                content_type=carried.content_type or "application/octet-stream",
                properties=_values(carried.properties),
                message_id=getattr(carried, "id", None),
            )
        if is_request:
            answer = RESPONSE if kind == REQUEST else ACKNOWLEDGEMENT
            self._asked.put((forward, identifier), (answer, destination))
        return described._replace(kind=kind, destination=destination)


def _carried(destination: str, payload: bytes) -> Any:
    struct = _CARRIERS.get(destination)
    if struct is None:
        return None
    try:
        return marshal.unmarshal(payload, struct)
    except BondError:
        return None  # the hub refuses it: a request like any other


def _values(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: next((each for each in members if each is not None), None)
        for name, value in values.items()
        for members in [(value.text, value.integer, value.real, value.truth)]
    }


def _status(frame: Message) -> str:
    if frame.error is None:
        return "success"
    try:
        return unmarshal_error(frame.error).error_name
    except BondError:
        return "failure"


def _is_secret(layer_data: bytes) -> bool:
    try:
        return bool(unmarshal_credentials(layer_data))
    except BondError:
        return False


READING = EpoxyReading
