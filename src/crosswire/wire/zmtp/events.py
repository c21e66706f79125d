"""What a ZMTP connection tells its owner."""

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
    """The handshake is done and says who the peer is.

    `user` is what a PLAIN client called itself, `public_key` is a CURVE client's; both were
    accepted by the owner's own callable.
    """

    socket_type: str
    identity: bytes
    metadata: dict[str, bytes]
    version: str
    user: str | None = None
    public_key: bytes | None = None


class MessageReceived(Event, frozen=True, gc=False):
    """A whole message, with at least one part."""

    parts: tuple[bytes, ...]


class Subscribed(Event, frozen=True, gc=False):
    """The peer wants what begins with `topic`; said once, however often it asks."""

    topic: bytes


class Unsubscribed(Event, frozen=True, gc=False):
    """The peer has taken back every subscription to `topic`."""

    topic: bytes


class PongReceived(Event, frozen=True, gc=False):
    """The answer to a PING of ours that had a context."""

    context: bytes
