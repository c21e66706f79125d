"""What an eMQP connection tells its owner.

`PeerReady` says that ZeroMQ's handshake is done and who the peer is; `Subscribed` and
`Unsubscribed` reach the broker from a subscriber. All three are ZMTP's own.
"""

from __future__ import annotations

from crosswire.errors import RemoteProtocolError
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, Event
from crosswire.wire.emqp.frames import Queue
from crosswire.wire.zmtp.events import PeerReady, Subscribed, Unsubscribed

__all__ = [
    "Acknowledged",
    "AdminRequested",
    "CommandIgnored",
    "ConnectionClosed",
    "ConnectionFailed",
    "PeerInformed",
    "PeerLeaving",
    "PeerReady",
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
    """A client asks the broker, or the broker gives a worker a job."""

    msgid: str
    queue: str
    headers: str
    message: bytes


class ScheduleReceived(Event, frozen=True, gc=False):
    """To be sent to `queue` every `interval_s`, or as `cron` says: one of the two is there."""

    msgid: str
    queue: str
    headers: str
    interval_s: float | None
    cron: str | None
    message: bytes


class UnscheduleReceived(Event, frozen=True, gc=False):
    """The schedule whose message has the same identity is to end, whatever its queue."""

    msgid: str
    queue: str
    headers: str
    interval_s: float | None
    cron: str | None
    message: bytes


class ReplyReceived(Event, frozen=True, gc=False):
    """A result for `request`. Without it: the broker's receipt, or its answer to administration."""

    msgid: str
    message: bytes
    request: str | None


class PeerLeaving(Event, frozen=True):
    """The peer said KBAI: send it nothing but results that it still waits for."""


class CommandIgnored(Event, frozen=True):
    """A command that is none, or has no place here. It had no effect and is to be counted."""

    error: RemoteProtocolError


# To the broker.


class PeerInformed(Event, frozen=True):
    """A `worker` or `scheduler` introduced itself; `send_ack(msgid)` lets it in.

    No queues means the configured default. One that is known already starts anew: its slots are
    forgotten.
    """

    msgid: str
    peer: str
    queues: tuple[Queue, ...]


class SlotOffered(Event, frozen=True):
    """A worker has room for one more job; `EmqpConnection.free_slots` counts them."""


class PublishReceived(Event, frozen=True, gc=False):
    """To be handed to all subscribers of `topic`."""

    msgid: str
    topic: str
    headers: str
    message: bytes


class AdminRequested(Event, frozen=True, gc=False):
    """Administration wants to know; `send_answer` takes JSON. HELLO is answered by nobody."""

    msgid: str
    command: str


class ShutdownRequested(Event, frozen=True, gc=False):
    """Administration wants the broker to stop; `send_ack(msgid)` says that it will."""

    msgid: str


# To the others.


class Registered(Event, frozen=True):
    """The broker knows us: a worker may offer its slots."""


class Acknowledged(Event, frozen=True, gc=False):
    """The broker acknowledged our command `msgid`."""

    msgid: str


class PublicationReceived(Event, frozen=True, gc=False):
    """Something was published."""

    topic: str
    message: bytes
