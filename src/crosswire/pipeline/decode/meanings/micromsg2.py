"""MicroMsg2: messages to destinations, joined where they are split over several frames."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from crosswire.pipeline.decode.meanings.contract import (
    CONTROL,
    ERROR,
    HANDSHAKE,
    SUBSCRIPTION,
    Described,
    PendingRequests,
    ProtocolMemory,
    json_text,
)
from crosswire.wire.contract import Frame
from crosswire.wire.micromsg2.frames import Command, Error, Handshake
from crosswire.wire.micromsg2.values import Value

__all__ = [
    "ACKS",
    "BINARY",
    "MEMORY",
    "MESSAGE_BYTES",
    "PREFIXES",
    "SUCCESS",
    "MicroMsg2Memory",
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


class MicroMsg2Memory(ProtocolMemory):
    """A response is recognized by its destination: the `reply-to` of a request of the other side.

    `begun` are the messages of either direction that are not whole yet, `extensions` the names of
    those in use, by their numbers.
    """

    def __init__(self) -> None:
        self.begun: dict[bool, PartialMessage | None] = {True: None, False: None}
        self.extensions: list[str] = []
        self.asked: PendingRequests[tuple[str, str]] = PendingRequests()

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


MEMORY = MicroMsg2Memory
