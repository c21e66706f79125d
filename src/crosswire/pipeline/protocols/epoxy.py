"""Epoxy: requests and responses by conversation, events as publications."""

from __future__ import annotations

from typing import Any, Final

from crosswire.errors import BondError
from crosswire.pipeline.protocols.contract import (
    CONTROL,
    ERROR,
    HANDSHAKE,
    PUBLISH,
    REQUEST,
    RESPONSE,
    Described,
    Memory,
    Reading,
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


class EpoxyReading(Reading):
    """A response has no names on the wire: it gets the destination of its request."""

    def __init__(self) -> None:
        self._asked: Memory[str] = Memory()

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
        name = f"{frame.service_name}/{frame.method_name}"
        destination: str | None
        if frame.message_type == MessageType.REQUEST:
            kind, destination = REQUEST, f"service/{name}"
            self._asked.put((forward, identifier), destination)
        elif frame.message_type == MessageType.RESPONSE:
            kind, destination = RESPONSE, self._asked.take((not forward, identifier))
        else:
            kind, destination = PUBLISH, f"topic/{name}"
        fields = frame.fields()
        fields.pop("payload", None)
        if frame.layer_data is not None and _is_secret(frame.layer_data):
            fields.pop("layer_data")
        payload = frame.payload if frame.payload is not None else frame.error or b""
        return Described(
            fields,
            kind,
            identifier,
            destination,
            _status(frame) if kind == RESPONSE else None,
            payload_size=len(payload),
            payload=payload,
            content_type=_BY_MAGIC.get(payload[:4], "application/octet-stream"),
        )


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
