"""Consumers and subscribers as gateways see them, and windows: how many messages are in flight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count
from typing import Final, Protocol, TypeAlias

import msgspec

from crosswire.envelope import Envelope
from crosswire.hub.cursor import FailedDelivery
from crosswire.hub.filters import Predicate
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.policies import Retry

__all__ = [
    "LEFT",
    "UNSUBSCRIBED",
    "Attachment",
    "Choice",
    "Consumer",
    "ConsumerBacklog",
    "Delivery",
    "DeliveryGap",
    "DeliveryReceiver",
    "Ended",
    "Item",
    "Notice",
    "Waiter",
    "Window",
]

LEFT: Final = "the consumer left"
UNSUBSCRIBED: Final = "the consumer unsubscribed"
"""Why messages are returned: in the first case their consumer may have processed them, in the
second it gave them back by an operation of its protocol. The pipeline distinguishes them."""

_NEVER: Final = 1 << 62

_numbers = count()

Choice: TypeAlias = Callable[[Envelope], bool]


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """A message for a consumer; `attempt` starts at 1."""

    envelope: Envelope
    attempt: int

    @property
    def id(self) -> int:
        """The message's id, with which it is settled or refused."""
        return self.envelope.id


class DeliveryGap(msgspec.Struct, frozen=True):
    """Messages that this subscriber will never get: ids from `first` to `last`, and why."""

    first: int
    last: int
    reason: str


class Ended(msgspec.Struct, frozen=True):
    """The hub ended this attachment."""

    reason: str


Notice: TypeAlias = DeliveryGap | Ended


class DeliveryReceiver(Protocol):
    """A gateway's side of an attachment.

    Called on the event loop, once per attachment for all that became ready together. It may call
    the hub meanwhile, and settle what it was just given.
    """

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        """Send these to the peer. They count against the window until they are settled."""

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        """The peer misses messages, or gets no more."""

    def broken(self, error: Exception) -> None:
        """One of its methods raised: the hub closed the attachment, and what it held goes to
        others. End the peer's connection, which would wait for ever."""


class Waiter(Protocol):
    """An attachment or provider that is woken when a window has free capacity again.

    It only touches itself in the dispatch loop: delivering right here would, with a peer that
    settles at once, free the window again within the same call.
    """

    weight: int

    def wake(self, now: float) -> None:
        """There is free capacity in its window."""


class Window:
    """How many messages may be in flight to a peer: `free` more than now.

    Settling frees capacity again, unless the window is `granted`: then only `grant` does, whatever
    becomes of the messages, as protocols with explicit credit want it. One window can be shared by
    several attachments of one peer.
    """

    __slots__ = ("attachments", "free", "granted")

    def __init__(self, size: int, *, granted: bool = False) -> None:
        self.free = size
        self.granted = granted
        self.attachments: list[Waiter] = []

    def join(self, waiter: Waiter) -> None:
        """One more shares this window; those with a higher weight are woken before it."""
        insort(self.attachments, waiter, key=lambda each: -each.weight)

    def grant(self, count: int, now: float) -> None:
        """Add capacity for `count` messages."""
        self.free += count
        self.wake(now)

    def close(self) -> None:
        """No capacity any more, whatever is settled."""
        # So far below zero that no number of settlements makes it positive again.
        self.free = -_NEVER

    def wake(self, now: float) -> None:
        """Wake those that share it, the highest weight first."""
        # A copy: to be woken may close an attachment, which leaves the window.
        for attachment in tuple(self.attachments):
            attachment.wake(now)

    def dispatch(self, now: float) -> None:
        """Wake those that share it once, however often capacity was freed since it was touched."""
        self.wake(now)


class Attachment(ABC):
    """A gateway's handle on a queue or topic that it gets messages from.

    `settle` and `refuse` ignore ids that it does not hold: a lease may have run out meanwhile.
    `number` is larger than that of all that were made before it.
    """

    __slots__ = (
        "destination",
        "is_open",
        "matches",
        "number",
        "peer",
        "receiver",
        "weight",
        "window",
    )

    def __init__(
        self,
        destination: str,
        receiver: DeliveryReceiver,
        *,
        peer: LedgerPeer,
        window: Window,
        weight: int = 10,
        matches: Predicate | None = None,
    ) -> None:
        self.destination = destination
        self.receiver = receiver
        self.peer = peer
        self.window = window
        self.weight = weight
        self.matches = matches
        self.number = next(_numbers)
        self.is_open = True
        window.join(self)

    @abstractmethod
    def settle(self, ids: Collection[int], now: float) -> int:
        """The peer is done with these. Returns how many of them it held."""

    @abstractmethod
    def refuse(
        self,
        ids: Collection[int],
        now: float,
        *,
        cause: str = "",
        delay_s: float | None = None,
        final: bool | None = None,
    ) -> int:
        """The peer can't process these: they are retried after `delay_s`, default as in the
        queue's policy. Returns how many of them it held.

        `final` True makes them dead letters, False retries them whatever the policy; None leaves
        it to the policy.
        """

    @abstractmethod
    def extend(self, ids: Collection[int], now: float, lease_s: float) -> int:
        """The peer still works on these: their leases start anew. Returns how many it holds."""

    @abstractmethod
    def wake(self, now: float) -> None:
        """There is free capacity in its window."""

    @abstractmethod
    def close(self, now: float, *, cause: str = LEFT) -> None:
        """Detach it: what it holds is ready for others at once, and the ledger has the `cause`.
        Does nothing the second time."""

    def stop_deliveries(self) -> None:
        """The first half of closing: nothing more is delivered to it."""
        self.is_open = False
        if self in self.window.attachments:
            self.window.attachments.remove(self)


class Item(msgspec.Struct, eq=False):
    """A message in memory that is not settled; `number` is its destination's.

    `delivered` counts deliveries, `attempts` are those that failed. `consumer` holds it; `due` is
    when its lease, or its delay, ends. `returned` numbers the times at which a message of this
    backlog became ready again; 0 if this one never did.
    """

    id: int
    number: int
    envelope: Envelope
    size: int
    delivered: int = 0
    attempts: Sequence[FailedDelivery] = ()
    consumer: Consumer | None = None
    due: float = 0.0
    returned: int = 0


class ConsumerBacklog(Protocol):
    """A queue or named subscription, as its consumers see it."""

    destination: str
    retry: Retry

    def settle(self, consumer: Consumer, ids: Iterable[int], now: float) -> int:
        """See `Attachment.settle`."""

    def refuse(
        self,
        consumer: Consumer,
        ids: Iterable[int],
        now: float,
        *,
        cause: str,
        delay_s: float | None,
        final: bool | None = None,
    ) -> int:
        """See `Attachment.refuse`."""

    def extend(self, consumer: Consumer, ids: Iterable[int], now: float, lease_s: float) -> int:
        """See `Attachment.extend`."""

    def has_room(self, consumer: Consumer, now: float) -> None:
        """The window of a consumer has free capacity."""

    def give_up(self, consumer: Consumer, error: Exception) -> None:
        """The filter of a consumer raised."""

    def detach(self, consumer: Consumer, now: float, cause: str) -> None:
        """Remove a consumer; what it held is ready again."""


class Consumer(Attachment):
    """A consumer of a queue or of a named subscription; `held` are its messages by id.

    `seen_id` and `seen_returns` are for filters: no message that is ready up to that id, or became
    ready again up to that number, is for this consumer.
    """

    __slots__ = (
        "_backlog",
        "choice",
        "held",
        "is_listed",
        "last_used",
        "lease_s",
        "seen_id",
        "seen_returns",
    )

    def __init__(
        self,
        backlog: ConsumerBacklog,
        receiver: DeliveryReceiver,
        *,
        peer: LedgerPeer,
        window: Window,
        weight: int,
        matches: Predicate | None,
        lease_s: float | None,
        choice: Choice | None = None,
    ) -> None:
        super().__init__(
            backlog.destination, receiver, peer=peer, window=window, weight=weight, matches=matches
        )
        self._backlog = backlog
        self.held: dict[int, Item] = {}
        self.lease_s = lease_s
        self.choice = choice
        self.last_used = 0
        self.is_listed = False
        self.seen_id = 0
        self.seen_returns = 0

    @property
    def backlog(self) -> ConsumerBacklog:
        """The queue or subscription that it consumes."""
        return self._backlog

    @property
    def has_filter(self) -> bool:
        """Whether there may be messages that it does not take."""
        return self.matches is not None or self.choice is not None

    def takes(self, envelope: Envelope) -> bool:
        """Whether filter and choice match. If one raises, the consumer is detached."""
        try:
            return (self.matches is None or self.matches(envelope.properties)) and (
                self.choice is None or self.choice(envelope)
            )
        except Exception as error:
            self._backlog.give_up(self, error)
            return False

    def settle(self, ids: Iterable[int], now: float) -> int:
        """Done with these: they are not delivered again."""
        return self._backlog.settle(self, ids, now)

    def refuse(
        self,
        ids: Iterable[int],
        now: float,
        *,
        cause: str = "",
        delay_s: float | None = None,
        final: bool | None = None,
    ) -> int:
        """Retry these later, or make them dead letters."""
        return self._backlog.refuse(self, ids, now, cause=cause, delay_s=delay_s, final=final)

    def extend(self, ids: Iterable[int], now: float, lease_s: float) -> int:
        """Restart the leases of these."""
        return self._backlog.extend(self, ids, now, lease_s)

    def wake(self, now: float) -> None:
        """Get a turn in the dispatch of the backlog."""
        self._backlog.has_room(self, now)

    def close(self, now: float, *, cause: str = LEFT) -> None:
        """Detach it; what it holds is ready for others."""
        if self.is_open:
            self.stop_deliveries()
            self._backlog.detach(self, now, cause)
