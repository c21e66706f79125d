"""Relink: what a message is follows from the endpoint that the connector asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec

from crosswire.pipeline.decode.meanings.contract import (
    ACKNOWLEDGEMENT,
    CONTROL,
    REQUEST,
    RESPONSE,
    Described,
    ProtocolMemory,
    json_text,
    kind_of_destination,
)
from crosswire.wire.relink.frames import (
    ChannelAcknowledgement,
    ChannelOperation,
    Message,
    SequenceAcknowledgement,
    SequenceOperation,
)
from crosswire.wire.relink.handshake import ConnectorHello

__all__ = [
    "CONTENT_TYPE",
    "MEMORY",
    "MOST_CHANNELS",
    "NOTHING",
    "AboutChannels",
    "RelinkMemory",
    "RequestedLink",
    "about_channels",
    "message",
    "properties_of",
]

AboutChannels = (
    ChannelAcknowledgement | ChannelOperation | SequenceAcknowledgement | SequenceOperation
)

CONTENT_TYPE: Final = "application/octet-stream"
MOST_CHANNELS: Final = 2 * 65_536
"""The hub's limit for a link, on both sides of it."""
_MOST_LISTED: Final = 16
_MOST_NAMED: Final = 1024
_PROPERTIES: Final = msgspec.json.Decoder(dict[str, bool | int | float | str])


class RequestedLink(NamedTuple):
    """What a connector asked for: an endpoint, whether to serve it, and a link to resume."""

    destination: str | None
    serves: bool
    link: int

    @classmethod
    def of(cls, hello: ConnectorHello) -> RequestedLink:
        """What this hello asks for."""
        destination, _, query = hello.endpoint.partition("?")
        return cls(destination, "serve" in query.split("&"), hello.link)

    def kind(self, forward: bool) -> str:
        """The kind of a message in this direction."""
        kind = kind_of_destination(self.destination or "")
        return RESPONSE if kind == REQUEST and forward is self.serves else kind

    def is_new(self, link: int) -> bool:
        """Whether the listener has given another link than the one to resume."""
        return link not in (0, self.link)


NOTHING: Final = RequestedLink(None, False, 0)


class RelinkMemory(ProtocolMemory):
    """Messages don't carry their sequence number: it is counted, channel by channel, where the link
    is new; on a link that was resumed it is not known.

    The n-th message on a listener's channel answers the n-th on the connector's channel of the same
    number, or the other way round where the connector serves: their identifier is `channel:n`.

    `following` has the next message's number, by direction and channel. Of more than
    `MOST_CHANNELS` at once it would be too much: then the count is lost, as on a resumed link.
    """

    def __init__(self) -> None:
        self.wanted = NOTHING
        self.counted = False
        self.following: dict[tuple[bool, int], int] = {}

    def interrupt(self, forward: bool) -> None:  # noqa: ARG002
        """What was missed may have been messages."""
        self.counted = False

    def _save(self) -> Any:
        numbers = [(*key, number) for key, number in self.following.items()]
        return tuple(self.wanted), self.counted, numbers

    def _restore(self, own: Any) -> None:
        (destination, serves, link), self.counted, numbers = own
        self.wanted = RequestedLink(destination, serves, link)
        self.following = {(forward, channel): number for forward, channel, number in numbers}


def about_channels(frame: AboutChannels, wanted: RequestedLink) -> Described:
    """An operation or an acknowledgement."""
    if isinstance(frame, ChannelAcknowledgement | SequenceAcknowledgement):
        kind, status = ACKNOWLEDGEMENT, str(frame.acknowledgement)
    else:
        kind, status = CONTROL, str(frame.operation)
    return Described(
        _describe_fields(frame.fields()),
        kind,
        _listed(frame.channels),
        wanted.destination,
        status,
        getattr(frame, "sequence", None),
    )


def message(
    frame: Message, forward: bool, numbers: Sequence[int], wanted: RequestedLink, counted: bool
) -> Described:
    """`numbers` are those that it has on its channels."""
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
        _describe_fields(fields),
        wanted.kind(forward),
        identifier,
        wanted.destination,
        sequence=numbers[0] if numbers and counted else None,
        payload_size=size,
        payload_end=end,
        payload=payload,
        content_type=CONTENT_TYPE,
        properties=properties,
    )


def _describe_fields(fields: dict[str, Any]) -> str:
    """A packet of a few bytes may have 65,536 targets, all the same: its description must not be
    thousands of times as large. So the first are listed, and all are counted."""
    channels = fields["channels"]
    if len(channels) > _MOST_NAMED:
        fields |= {"channels": channels[:_MOST_NAMED], "channels_count": len(channels)}
    return json_text(fields)


def _listed(items: Iterable[object]) -> str:
    """The first few of them."""
    first = list(islice(map(str, items), _MOST_LISTED + 1))
    if len(first) > _MOST_LISTED:
        first[-1] = "…"
    return ",".join(first)


def _content(frame: Message) -> tuple[str | None, bytes, int, int]:
    """Properties, payload, its size on the wire, and how many bytes follow it.

    One part is the payload, two are properties and payload; more are a payload as they are on the
    wire, padding included.
    """
    parts = frame.parts
    if not parts:
        return None, b"", 0, 0
    padding = -len(parts[-1]) % 8
    if len(parts) <= 2:
        properties = properties_of(bytes(parts[0])) if len(parts) == 2 else None
        return properties, bytes(parts[-1]), len(parts[-1]), padding
    whole = b"".join(bytes(part) + bytes(-len(part) % 8) for part in parts)
    whole = whole[: len(whole) - padding] if padding else whole
    return None, whole, len(whole), padding


def properties_of(part: bytes) -> str | None:
    """The first of two parts, if it is JSON as our clients write it."""
    try:
        return json_text(_PROPERTIES.decode(part))
    except msgspec.MsgspecError:
        return None  # two parts with another meaning


MEMORY = RelinkMemory
