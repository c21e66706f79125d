"""eMQP: jobs to queues, publications to topics, replies; ZMTP's own frames below them."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from crosswire.pipeline.protocols.contract import (
    ACKNOWLEDGEMENT,
    CONTROL,
    ERROR,
    GOODBYE,
    HANDSHAKE,
    HEARTBEAT,
    PUBLISH,
    REQUEST,
    RESPONSE,
    SEND,
    SUBSCRIPTION,
    Described,
    Memory,
    Reading,
)
from crosswire.wire.contract import Frame
from crosswire.wire.emqp.frames import (
    Ack,
    Delivery,
    Disconnect,
    Heartbeat,
    Inform,
    Kbai,
    Publish,
    Reply,
    Request,
    Schedule,
    Unschedule,
)
from crosswire.wire.emqp.headers import Headers
from crosswire.wire.zmtp.frames import Command, Greeting, Message

__all__ = ["READING"]

_COMMANDS: Final = {
    "READY": HANDSHAKE,
    "HELLO": HANDSHAKE,
    "WELCOME": HANDSHAKE,
    "INITIATE": HANDSHAKE,
    "ERROR": ERROR,
    "PING": HEARTBEAT,
    "PONG": HEARTBEAT,
    "SUBSCRIBE": SUBSCRIPTION,
    "CANCEL": SUBSCRIPTION,
}


class _Outcome(msgspec.Struct, gc=False):
    value: Any = None
    error: str | None = None


_OUTCOME: Final = msgspec.json.Decoder(_Outcome)


class EmqpReading(Reading):
    """A reply has the destination of the request that it answers."""

    def __init__(self) -> None:
        self._asked: Memory[str] = Memory()
        self._parts: tuple[bytes, ...] = ()

    def describe(self, forward: bool, frame: Frame, offset: int, length: int) -> Described:  # noqa: ARG002
        match frame:
            case Message(parts=parts):
                self._parts = parts
                return Described({})
            case Request():
                return self._request(forward, frame)
            case Reply():
                return self._reply(forward, frame)
            case Publish() | Delivery():
                return self._publication(frame)
            case Ack():
                return Described(frame.fields(), ACKNOWLEDGEMENT, frame.acknowledged)
            case Schedule() | Unschedule():
                destination = f"queue/{frame.queue}"
                return self._with_body(frame, CONTROL, frame.msgid, destination, frame.message)
            case Inform():
                return Described(frame.fields(), SUBSCRIPTION, frame.msgid)
            case Heartbeat():
                return Described(frame.fields(), HEARTBEAT, frame.msgid)
            case Disconnect() | Kbai():
                return Described(frame.fields(), GOODBYE, frame.msgid)
            case Greeting():
                return Described(frame.fields(), HANDSHAKE)
            case Command():
                return Described(frame.fields(), _COMMANDS.get(frame.name, CONTROL))
        fields = frame.fields()
        return Described(fields, CONTROL, fields.get("msgid"))

    def _save(self) -> Any:
        """The parts at hand are those of a message whose command is read with it."""
        return self._asked.save()

    def _restore(self, own: Any) -> None:
        self._asked.restore(own)

    def _request(self, forward: bool, frame: Request) -> Described:
        headers = Headers.parse(frame.headers)
        destination = f"queue/{frame.queue}"
        self._asked.put((forward, frame.msgid), destination)
        described = self._with_body(
            frame,
            REQUEST if headers.reply_requested else SEND,
            frame.msgid,
            destination,
            frame.message,
        )
        return described._replace(properties=headers.properties())

    def _reply(self, forward: bool, frame: Reply) -> Described:
        if frame.request is not None:
            destination = self._asked.take((not forward, frame.request))
            described = self._with_body(frame, RESPONSE, frame.request, destination, frame.message)
            return described._replace(status=_outcome(frame.message))
        # The receipt for a request: its body is the request's id.
        identifier = frame.message.decode(errors="replace")
        destination = self._asked.get((not forward, identifier))
        if destination is None:
            return self._with_body(frame, CONTROL, frame.msgid, None, frame.message)
        return Described(
            {"msgid": frame.msgid}, ACKNOWLEDGEMENT, identifier, destination, "success"
        )

    def _publication(self, frame: Publish | Delivery) -> Described:
        identifier = frame.msgid if isinstance(frame, Publish) else None
        headers = frame.headers if isinstance(frame, Publish) else None
        described = self._with_body(
            frame, PUBLISH, identifier, f"topic/{frame.topic}", frame.message
        )
        return described._replace(properties=Headers.parse(headers or "").properties())

    def _with_body(
        self,
        frame: Frame,
        kind: str,
        identifier: str | None,
        destination: str | None,
        body: bytes,
    ) -> Described:
        fields = frame.fields()
        fields.pop("message", None)
        return Described(
            fields,
            kind,
            identifier,
            destination,
            payload_size=len(body),
            payload_end=self._behind(body),
            payload=body,
            content_type="application/octet-stream",
        )

    def _behind(self, body: bytes) -> int:
        """Bytes of the ZeroMQ message behind the part that is the body."""
        behind = 0
        for part in reversed(self._parts):
            if part is body:
                return behind
            behind += len(part) + (2 if len(part) < 256 else 9)
        return 0


def _outcome(message: bytes) -> str:
    """A job manager reports exceptions like results; only these two are told apart."""
    try:
        outcome = _OUTCOME.decode(message)
    except msgspec.MsgspecError:
        return "success"
    if outcome.error is not None:
        return "failure"
    return "timeout" if outcome.value == "TimeoutError" else "success"


READING = EmqpReading
