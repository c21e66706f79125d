"""Relink: what a message is follows from the endpoint that the connector asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

import msgspec

from crosswire.pipeline.protocols.contract import (
    ACKNOWLEDGEMENT,
    CONTROL,
    GOODBYE,
    HANDSHAKE,
    HEARTBEAT,
    REQUEST,
    RESPONSE,
    Described,
    Reading,
    kind_of_destination,
)
from crosswire.wire.contract import Frame
from crosswire.wire.relink.frames import (
    ChannelAcknowledgement,
    ChannelOperation,
    Message,
    Nop,
    Ping,
    Pong,
    SequenceAcknowledgement,
    SequenceOperation,
    Shutdown,
)
from crosswire.wire.relink.handshake import ConnectorHello, ListenerHello

__all__ = ["READING"]

_MOST_LISTED: Final = 16
_PROPERTIES: Final = msgspec.json.Decoder(dict[str, bool | int | float | str])


class RelinkReading(Reading):
    """Messages don't carry their sequence number: it is counted, channel by channel, where the link
    is new; on a link that was resumed it is not known.

    The n-th message on a listener's channel answers the n-th on the connector's channel of the same
    number, or the other way round where the connector serves: their identifier is `channel:n`.
    """

    def __init__(self) -> None:
        self._destination: str | None = None
        self._serves = False
        self._asked_for = 0
        self._counted = False
        self._next: dict[tuple[bool, int], int] = defaultdict(int)

    def describe(self, forward: bool, frame: Frame, offset: int, length: int) -> Described:  # noqa: ARG002
        match frame:
            case Message():
                return self._message(forward, frame)
            case ChannelAcknowledgement() | SequenceAcknowledgement():
                return Described(
                    frame.fields(),
                    ACKNOWLEDGEMENT,
                    _listed(frame.channels),
                    self._destination,
                    frame.acknowledgement,
                    getattr(frame, "sequence", None),
                )
            case ChannelOperation() | SequenceOperation():
                if frame.operation == "close":
                    for channel in frame.channels:
                        self._next.pop((forward, channel), None)
                return Described(
                    frame.fields(),
                    CONTROL,
                    _listed(frame.channels),
                    self._destination,
                    frame.operation,
                    getattr(frame, "sequence", None),
                )
            case ConnectorHello():
                self._destination, _, query = frame.endpoint.partition("?")
                self._serves = "serve" in query.split("&")
                self._asked_for = frame.link
                return Described(frame.fields(), HANDSHAKE, destination=self._destination)
            case ListenerHello():
                self._counted = frame.link != 0 and frame.link != self._asked_for
                session = f"{frame.epoch:x}/{frame.link:x}" if frame.link else None
                return Described(frame.fields(), HANDSHAKE, session, self._destination)
            case Ping() | Pong() | Nop():
                return Described(frame.fields(), HEARTBEAT)
            case Shutdown():
                return Described(frame.fields(), GOODBYE)
        kind = HANDSHAKE if frame.frame_name.endswith("-version") else CONTROL
        return Described(frame.fields(), kind)

    def interrupt(self, forward: bool) -> None:  # noqa: ARG002
        """What was missed may have been messages."""
        self._counted = False

    def _save(self) -> Any:
        numbers = [(*key, number) for key, number in self._next.items()]
        return self._destination, self._serves, self._asked_for, self._counted, numbers

    def _restore(self, own: Any) -> None:
        self._destination, self._serves, self._asked_for, self._counted, numbers = own
        self._next = defaultdict(int)
        for forward, channel, number in numbers:
            self._next[forward, channel] = number

    def _message(self, forward: bool, frame: Message) -> Described:
        numbers = []
        for channel in frame.channels:
            numbers.append(self._next[forward, channel])
            self._next[forward, channel] += 1
        identifier = _listed(
            f"{channel}:{number}" for channel, number in zip(frame.channels, numbers, strict=True)
        )
        fields: dict[str, Any] = {
            "channels": list(frame.channels),
            "multicast": frame.multicast,
            "part_sizes": [len(part) for part in frame.parts],
        }
        properties, payload, size, end = _content(frame)
        return Described(
            fields,
            self._kind(forward),
            identifier,
            self._destination,
            sequence=numbers[0] if numbers and self._counted else None,
            payload_size=size,
            payload_end=end,
            payload=payload,
            content_type="application/octet-stream",
            properties=properties,
        )

    def _kind(self, forward: bool) -> str:
        kind = kind_of_destination(self._destination or "")
        if kind == REQUEST and forward is self._serves:
            return RESPONSE
        return kind


def _listed(items: Iterable[object]) -> str:
    """A multicast may have 65,536 targets: `fields` has them all, this the first few."""
    first = list(islice(map(str, items), _MOST_LISTED + 1))
    if len(first) > _MOST_LISTED:
        first[-1] = "…"
    return ",".join(first)


def _content(frame: Message) -> tuple[dict[str, Any] | None, bytes, int, int]:
    """Properties, payload, how many bytes it takes on the wire, how many stand behind it.

    One part is the payload, two are properties and payload (DESIGN, section 4); more are taken as
    they stand, padding included.
    """
    parts = frame.parts
    if not parts:
        return None, b"", 0, 0
    padding = -len(parts[-1]) % 8
    if len(parts) <= 2:
        properties = _properties(bytes(parts[0])) if len(parts) == 2 else None
        return properties, bytes(parts[-1]), len(parts[-1]), padding
    whole = b"".join(bytes(part) + bytes(-len(part) % 8) for part in parts)
    whole = whole[: len(whole) - padding] if padding else whole
    return None, whole, len(whole), padding


def _properties(part: bytes) -> dict[str, Any] | None:
    try:
        return _PROPERTIES.decode(part)
    except msgspec.MsgspecError:
        return None  # two parts that are somebody's own business


READING = RelinkReading
