"""What an eMQP connection reports to its owner.

Four events are ZMTP's: `PeerReady` after ZeroMQ's handshake, `PongReceived`, and for a broker
`Subscribed` and `Unsubscribed`.
"""

from __future__ import annotations

from crosswire.errors import RemoteProtocolError
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, Event
from crosswire.wire.emqp.frames import Queue
from crosswire.wire.zmtp.events import PeerReady, PongReceived, Subscribed, Unsubscribed

__all__ = [
    "Acknowledged",
    "AdminRequested",
    "CommandIgnored",
    "ConnectionClosed",
    "ConnectionFailed",
    "PeerInformed",
    "PeerLeaving",
    "PeerReady",
    "PongReceived",
    "PublicationReceived",
    "PublishReceived",
    "Registered",
    "ReplyReceived",
    "RequestReceived",
    "ScheduleReceived",
    "ShutdownRequested",
    "SlotOffered",
    "Subscribed",
    "UnscheduleReceived",
    "Unsubscribed",
]


# To both sides.


class RequestReceived(Event, frozen=True, gc=False):
    """A job: from a client to the broker, or from the broker to a worker."""

    msgid: str
    queue: str
    headers: str
    message: bytes


class ScheduleReceived(Event, frozen=True, gc=False):
    """To be sent to `queue` every `interval_s`, or by `cron`: one of them is None."""

    msgid: str
    queue: str
    headers: str
    interval_s: float | None
    cron: str | None
    message: bytes


class UnscheduleReceived(Event, frozen=True, gc=False):
    """The schedule whose message has the same identity is to end, in any queue."""

    msgid: str
    queue: str
    headers: str
    interval_s: float | None
    cron: str | None
    message: bytes


class ReplyReceived(Event, frozen=True, gc=False):
    """The result of `request`. Without it: the broker's receipt, or its answer to an admin."""

    msgid: str
    message: bytes
    request: str | None


class PeerLeaving(Event, frozen=True):
    """The peer sent KBAI: send it nothing but results that it still waits for."""


class CommandIgnored(Event, frozen=True):
    """A message that is no command, or not allowed here and now. It had no effect."""

    error: RemoteProtocolError


# To the broker.


class PeerInformed(Event, frozen=True):
    """A `worker` or `scheduler` asks to be registered, which `send_ack(msgid)` does.

    Without queues the configured default is meant. If the peer was registered before, it starts
    over: its free slots are 0 again.
    """

    msgid: str
    peer: str
    queues: tuple[Queue, ...]


class SlotOffered(Event, frozen=True):
    """A worker can take one more job; `EmqpConnection.free_slots` counts them."""


class PublishReceived(Event, frozen=True, gc=False):
    """A message for all subscribers of `topic`."""

    msgid: str
    topic: str
    headers: str
    message: bytes


class AdminRequested(Event, frozen=True, gc=False):
    """A question of an admin, to be answered with `send_answer`, except HELLO."""

    msgid: str
    command: str


class ShutdownRequested(Event, frozen=True, gc=False):
    """An admin asks the broker to stop; `send_ack(msgid)` confirms that it will."""

    msgid: str


# To the others.


class Registered(Event, frozen=True):
    """The broker registered us: a worker may offer its slots now."""


class Acknowledged(Event, frozen=True, gc=False):
    """The broker acknowledged our command `msgid`."""

    msgid: str


class PublicationReceived(Event, frozen=True, gc=False):
    """A message of a topic that we subscribed to."""

    topic: str
    message: bytes
