"""MicroMsg2: messages to destinations, put together where they come in several frames."""

from __future__ import annotations

from typing import Any, Final

from crosswire.pipeline.protocols.contract import (
    ACKNOWLEDGEMENT,
    CONTROL,
    ERROR,
    HANDSHAKE,
    RESPONSE,
    SUBSCRIPTION,
    Described,
    Memory,
    Reading,
    kind_of_destination,
)
from crosswire.wire.contract import Frame
from crosswire.wire.micromsg2.frames import Command, Error, ExtensionFrame, Handshake, Message

__all__ = ["READING"]

_ACKS: Final = ("ack", "batch-ack")
_SECRET: Final = "x-auth"
_SUBSCRIBERS: Final = ("subscribe", "unsubscribe", "serve")
_MESSAGE_BYTES: Final = 64 * 1024 * 1024


class _Begun:
    """A message of which more frames are to come."""

    def __init__(self, destination: str, properties: dict[str, Any], offset: int) -> None:
        self.destination = destination
        self.properties = properties
        self.offset = offset
        self.size_bytes = 0
        self.payloads: list[bytes] = []

    def save(self) -> Any:
        return self.destination, self.properties, self.offset, self.payloads

    @classmethod
    def restored(cls, saved: Any) -> _Begun:
        destination, properties, offset, payloads = saved
        begun = cls(destination, properties, offset)
        begun.payloads = [bytes(payload) for payload in payloads]
        begun.size_bytes = sum(map(len, begun.payloads))
        return begun


class MicroMsg2Reading(Reading):
    """An answer is known by its destination: the `reply-to` of a request from the other side."""

    def __init__(self) -> None:
        self._begun: dict[bool, _Begun | None] = {True: None, False: None}
        self._extensions: list[str] = []
        self._asked: Memory[tuple[str, str]] = Memory()

    def describe(self, forward: bool, frame: Frame, offset: int, length: int) -> Described:  # noqa: ARG002
        match frame:
            case Message():
                return self._message(forward, frame, offset)
            case ExtensionFrame():
                return self._extension(frame)
            case Command():
                kind = SUBSCRIPTION if frame.name.lower() in _SUBSCRIBERS else CONTROL
                destination = frame.arguments.get("destination")
                return Described(frame.fields(), kind, destination=destination)
            case Handshake():
                if forward:
                    self._extensions = [
                        each.name.lower() for each in (*frame.required, *frame.optional)
                    ]
                return Described(_without_secrets(frame.fields()), HANDSHAKE)
            case Error():
                return Described(frame.fields(), ERROR, status=frame.name)
        return Described(frame.fields(), CONTROL)

    def interrupt(self, forward: bool) -> None:
        self._begun[forward] = None

    def _save(self) -> Any:
        begun = [each and each.save() for each in (self._begun[True], self._begun[False])]
        return begun, self._extensions, self._asked.save()

    def _restore(self, own: Any) -> None:
        (forward, backward), extensions, asked = own
        self._begun = {
            True: forward and _Begun.restored(forward),
            False: backward and _Begun.restored(backward),
        }
        self._extensions = list(extensions)
        self._asked.restore(asked)

    def _message(self, forward: bool, frame: Message, offset: int) -> Described:
        fields = {
            "sequence": frame.sequence,
            "destination": frame.destination,
            "properties": frame.properties(),
            "continued": frame.continued,
        }
        described = Described(fields, sequence=frame.sequence, payload_size=len(frame.payload))
        begun = self._begun[forward]
        if begun is None:
            if not frame.destination:
                return described  # the rest of a message whose beginning was missed
            begun = _Begun(frame.destination, frame.properties(), offset)
        begun.payloads.append(frame.payload)
        begun.size_bytes += len(frame.payload)
        self._begun[forward] = begun if frame.continued else None
        if begun.size_bytes > _MESSAGE_BYTES:
            self._begun[forward] = None
            return described
        if frame.continued:
            return described._replace(destination=_full_name(begun.destination))
        return self._whole(forward, described, begun)

    def _whole(self, forward: bool, described: Described, begun: _Begun) -> Described:
        properties = begun.properties
        reply_to = properties.get("reply-to")
        correlation = properties.get("correlation-id")
        identifier = None if correlation is None else str(correlation)
        destination = _full_name(begun.destination)
        kind = kind_of_destination(destination)
        answers = self._asked.get((not forward, begun.destination, identifier))
        status = None
        if answers is not None:
            kind, destination = RESPONSE, answers[1]
            error = properties.get("error")
            status = "success" if error is None else str(error)
        elif isinstance(reply_to, str):
            self._asked.put((forward, reply_to, identifier), (kind, destination))
        return described._replace(
            kind=kind,
            identifier=identifier,
            destination=destination,
            status=status,
            payload=begun.payloads[0] if len(begun.payloads) == 1 else b"".join(begun.payloads),
            content_type=str(properties.get("content-type", "application/octet-stream")),
            properties=properties,
            reply_to=reply_to if isinstance(reply_to, str) else None,
            begun_at=begun.offset,
        )

    def _extension(self, frame: ExtensionFrame) -> Described:
        known = 1 <= frame.id <= len(self._extensions)
        name = self._extensions[frame.id - 1] if known else None
        if name in _ACKS and len(frame.payload) == 2:
            sequence = int.from_bytes(frame.payload)
            return Described(frame.fields(), ACKNOWLEDGEMENT, status=name, sequence=sequence)
        return Described(frame.fields(), CONTROL, status=name)


def _full_name(destination: str) -> str:
    """A bare name is a queue."""
    known = destination.startswith(("queue/", "topic/", "service/", "reply/"))
    return destination if known else f"queue/{destination}"


def _without_secrets(fields: dict[str, Any]) -> dict[str, Any]:
    for name in ("required", "optional"):
        fields[name] = [
            {**each, "properties": {}} if each["name"].lower() == _SECRET else each
            for each in fields[name]
        ]
    return fields


READING = MicroMsg2Reading
