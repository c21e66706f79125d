"""MicroMsg2: messages to destinations, joined where they are split over several frames."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from crosswire.pipeline.decode.readings.contract import (
    ACKNOWLEDGEMENT,
    CONTROL,
    ERROR,
    HANDSHAKE,
    RESPONSE,
    SUBSCRIPTION,
    Described,
    Memory,
    Reading,
    json_text,
    kind_of_destination,
    quoted,
)
from crosswire.wire.contract import Frame
from crosswire.wire.micromsg2.frames import Command, Error, ExtensionFrame, Handshake, Message
from crosswire.wire.micromsg2.values import Value

__all__ = [
    "ACKS",
    "BINARY",
    "MESSAGE_BYTES",
    "PREFIXES",
    "READING",
    "SUCCESS",
    "MicroMsg2Reading",
    "PartialMessage",
    "Properties",
    "describe_properties",
    "describe_small",
    "extensions_of",
    "full_name",
]

ACKS: Final = ("ack", "batch-ack")
BINARY: Final = "application/octet-stream"
MESSAGE_BYTES: Final = 64 * 1024 * 1024
PREFIXES: Final = ("queue/", "topic/", "service/", "reply/")
SUCCESS: Final = "success"

_SECRET: Final = "x-auth"
_SUBSCRIBERS: Final = ("subscribe", "unsubscribe", "serve")


class Properties(NamedTuple):
    """A message's properties as JSON, and the values of well-known ones."""

    text: str
    identifier: str | None
    reply_to: str | None
    content_type: str | None
    error: str | None


def describe_properties(properties: dict[str, Value]) -> Properties:
    """Properties for the tables."""
    reply_to = properties.get("reply-to")
    identifier, content_type, error = (
        None if (value := properties.get(name)) is None else str(value)
        for name in ("correlation-id", "content-type", "error")
    )
    # A number is no address.
    address = reply_to if isinstance(reply_to, str) else None
    return Properties(json_text(properties), identifier, address, content_type, error)


class PartialMessage:
    """A message of which more frames may follow."""

    def __init__(self, destination: str, properties: dict[str, Value], offset: int) -> None:
        self.destination = destination
        self.properties = properties
        self.offset = offset
        self.size_bytes = 0
        self.payloads: list[bytes] = []

    def add(self, payload: bytes, size_bytes: int) -> None:
        """Add a frame; `payload` is empty where payloads are not needed."""
        self.payloads.append(payload)
        self.size_bytes += size_bytes

    def save(self) -> Any:
        """The message so far, for `restored`."""
        return self.destination, self.properties, self.offset, self.size_bytes, self.payloads

    @classmethod
    def restored(cls, saved: Any) -> PartialMessage:
        """The message that `save` gave."""
        destination, properties, offset, size_bytes, payloads = saved
        begun = cls(destination, properties, offset)
        begun.payloads = [bytes(payload) for payload in payloads]
        begun.size_bytes = size_bytes
        return begun


class MicroMsg2Reading(Reading):
    """A response is recognized by its destination: the `reply-to` of a request of the other side.

    `begun` are the messages of either direction that are not whole yet, `extensions` the names of
    those in use, by their numbers.
    """

    def __init__(self) -> None:
        self.begun: dict[bool, PartialMessage | None] = {True: None, False: None}
        self.extensions: list[str] = []
        self.asked: Memory[tuple[str, str]] = Memory()

    def describe(self, forward: bool, frame: Frame, offset: int, length: int) -> Described:  # noqa: ARG002
        """Collects the frames of a message; the last one has its payload."""
        match frame:
            case Message():
                return self._message(forward, frame, offset)
            case ExtensionFrame():
                return self._extension(frame.id, frame.payload)
            case Handshake():
                if forward:
                    self.extensions = extensions_of(frame)
        return describe_small(frame)

    def interrupt(self, forward: bool) -> None:
        """Drops the message that is not complete."""
        self.begun[forward] = None

    def _save(self) -> Any:
        begun = [each and each.save() for each in (self.begun[True], self.begun[False])]
        return begun, self.extensions, self.asked.save()

    def _restore(self, own: Any) -> None:
        (forward, backward), extensions, asked = own
        self.begun = {
            True: forward and PartialMessage.restored(forward),
            False: backward and PartialMessage.restored(backward),
        }
        self.extensions = list(extensions)
        self.asked.restore(asked)

    def _message(self, forward: bool, frame: Message, offset: int) -> Described:
        properties = frame.properties()
        sequence, size = frame.sequence, len(frame.payload)
        fields = (
            f'{{"sequence":{sequence},"destination":{quoted(frame.destination)},'
            f'"properties":{json_text(properties)},'
            f'"continued":{"true" if frame.continued else "false"}}}'
        )
        begun = self.begun[forward]
        if begun is None:
            if not frame.destination:
                # The rest of a message whose first frame was missed.
                return Described(fields, sequence=sequence, payload_size=size)
            begun = PartialMessage(frame.destination, properties, offset)
        begun.add(frame.payload, size)
        too_large = begun.size_bytes > MESSAGE_BYTES
        self.begun[forward] = begun if frame.continued and not too_large else None
        if too_large:
            return Described(fields, sequence=sequence, payload_size=size)
        if frame.continued:
            return Described(
                fields,
                destination=full_name(begun.destination),
                sequence=sequence,
                payload_size=size,
            )
        return self._whole(forward, fields, sequence, size, begun)

    def _whole(
        self, forward: bool, fields: str, sequence: int, size: int, message: PartialMessage
    ) -> Described:
        status = None
        destination = full_name(message.destination)
        kind = kind_of_destination(destination)
        text, identifier, reply_to, content_type, error = describe_properties(message.properties)
        answers = self.asked.get((not forward, message.destination, identifier))
        if answers is not None:
            kind, destination = RESPONSE, answers[1]
            status = SUCCESS if error is None else error
        elif reply_to is not None:
            self.asked.put((forward, reply_to, identifier), (kind, destination))
        return Described(
            fields,
            kind,
            identifier,
            destination,
            status,
            sequence,
            size,
            0,
            b"".join(message.payloads),
            BINARY if content_type is None else content_type,
            text,
            reply_to,
            None,
            message.offset,
        )

    def _extension(self, number: int, payload: bytes) -> Described:
        known = 1 <= number <= len(self.extensions)
        name = self.extensions[number - 1] if known else None
        fields = f'{{"id":{number},"payload":"{payload.hex()}"}}'
        if name in ACKS and len(payload) == 2:
            sequence = int.from_bytes(payload)
            return Described(fields, ACKNOWLEDGEMENT, None, None, name, sequence)
        return Described(fields, CONTROL, status=name)


def extensions_of(handshake: Handshake) -> list[str]:
    """The names of the extensions, in the order of their numbers."""
    return [each.name.lower() for each in (*handshake.required, *handshake.optional)]


def describe_small(frame: Frame) -> Described:
    """Describe a frame that does not depend on earlier ones."""
    match frame:
        case Command():
            kind = SUBSCRIPTION if frame.name.lower() in _SUBSCRIBERS else CONTROL
            destination = frame.arguments.get("destination")
            return Described(json_text(frame.fields()), kind, destination=destination)
        case Handshake():
            return Described(json_text(_without_secrets(frame.fields())), HANDSHAKE)
        case Error():
            return Described(json_text(frame.fields()), ERROR, status=frame.name)
    return Described(json_text(frame.fields()), CONTROL)


def full_name(destination: str) -> str:
    """A bare name is a queue."""
    return destination if destination.startswith(PREFIXES) else f"queue/{destination}"


def _without_secrets(fields: dict[str, Any]) -> dict[str, Any]:
    for name in ("required", "optional"):
        fields[name] = [
            {**each, "properties": {}} if each["name"].lower() == _SECRET else each
            for each in fields[name]
        ]
    return fields


READING = MicroMsg2Reading
