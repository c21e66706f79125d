"""What a ZMTP connection reports to its owner."""

from __future__ import annotations

from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, ConnectionOpened, Event

__all__ = [
    "ConnectionClosed",
    "ConnectionFailed",
    "MessageReceived",
    "PeerReady",
    "PongReceived",
    "Subscribed",
    "Unsubscribed",
]


class PeerReady(ConnectionOpened, frozen=True):
    """The handshake is complete and identifies the peer.

    `user` is a PLAIN client's name, `public_key` a CURVE client's; the owner's callable has
    accepted both. `identity` is the peer's own choice and proves nothing.
    """

    socket_type: str
    identity: bytes
    metadata: dict[str, bytes]
    version: str
    user: str | None = None
    public_key: bytes | None = None


class MessageReceived(Event, frozen=True, gc=False):
    """A complete message, with at least one part."""

    parts: tuple[bytes, ...]


class Subscribed(Event, frozen=True, gc=False):
    """The peer subscribed to all that begins with `topic`; reported once, however often it does."""

    topic: bytes


class Unsubscribed(Event, frozen=True, gc=False):
    """The peer has cancelled each of its subscriptions to `topic`."""

    topic: bytes


class PongReceived(Event, frozen=True, gc=False):
    """The answer to a PING of ours with a context."""

    context: bytes
