"""The events of a Relink connection."""

from __future__ import annotations

from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, ConnectionOpened, Event
from crosswire.wire.relink.frames import Acknowledgement, Buffer
from crosswire.wire.relink.handshake import ConnectorHello

__all__ = [
    "Acknowledged",
    "ChannelClosed",
    "CloseReceived",
    "CommitReceived",
    "ConnectionClosed",
    "ConnectionFailed",
    "HandshakeReceived",
    "LinkForgotten",
    "LinkOpened",
    "LinkResumed",
    "MessageReceived",
    "RollbackReceived",
    "ShutdownReceived",
]


class HandshakeReceived(Event, frozen=True):
    """A connector asks for a link: answer with `accept`, `deny_link` or `refuse`."""

    hello: ConnectorHello


class LinkOpened(ConnectionOpened, frozen=True):
    """The handshake is done; `resumed` if it is an old link."""

    epoch: int
    link: int
    resumed: bool


class LinkResumed(Event, frozen=True):
    """The peer has reported what it received before; the rest is being repeated."""


class LinkForgotten(Event, frozen=True):
    """The listener does not know the old link: unacknowledged messages may not have arrived."""

    epoch: int
    link: int


class MessageReceived(Event, frozen=True, gc=False):
    """A message on a channel of the peer, each once and in order.

    If the peer's channels use transactions, it may be stored now, and is to be processed after
    CommitReceived.
    """

    channel: int
    sequence: int
    parts: tuple[Buffer, ...]


class CommitReceived(Event, frozen=True, gc=False):
    """The messages from `first` to `last` are to be processed, and then to be settled."""

    channel: int
    first: int
    last: int


class RollbackReceived(Event, frozen=True, gc=False):
    """The messages from `first` to `last` are to be ignored; that counts as consuming them."""

    channel: int
    first: int
    last: int


class CloseReceived(Event, frozen=True, gc=False):
    """The peer closes its channel; `closed` is answered when all of it has been consumed."""

    channel: int


class Acknowledged(Event, frozen=True, gc=False):
    """The peer has acknowledged our messages from `first` to `last`."""

    acknowledgement: Acknowledgement
    channel: int
    first: int
    last: int


class ChannelClosed(Event, frozen=True, gc=False):
    """The peer has consumed all of a channel that we closed; it may be opened again."""

    channel: int


class ShutdownReceived(Event, frozen=True):
    """The peer opens no more channels. The link ends when we have shut down, too."""
