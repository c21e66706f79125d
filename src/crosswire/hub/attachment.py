"""Who takes messages from the hub, and how many it may hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from itertools import count
from typing import Final, Protocol, TypeAlias

import msgspec

from crosswire.envelope import Envelope
from crosswire.hub.cursor import FailedDelivery
from crosswire.hub.filters import Predicate
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.policies import Retry

__all__ = [
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

_NEVER: Final = 1 << 62

_numbers = count()

Choice: TypeAlias = Callable[[Envelope], bool]


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """A message for a consumer; `attempt` starts at 1."""

    envelope: Envelope
    attempt: int

    @property
    def id(self) -> int:
        return self.envelope.id


class DeliveryGap(msgspec.Struct, frozen=True):
    """Messages that this subscriber will never get: ids from `first` to `last`, and why."""

    first: int
    last: int
    reason: str


class Ended(msgspec.Struct, frozen=True):
    """The hub let go of this attachment."""

    reason: str


Notice: TypeAlias = DeliveryGap | Ended


class DeliveryReceiver(Protocol):
    """A gateway's side of an attachment.

    Called on the event loop, once per attachment for all that became ready together. It may call
    back into the hub, and settle what it was just given.
    """

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None: ...

    def notice(self, attachment: Attachment, notice: Notice) -> None: ...

    def broken(self, error: Exception) -> None:
        """One of its methods raised: the hub closed the attachment, and what it held goes to
        others. End the peer's connection, which would wait for ever."""


class Waiter(Protocol):
    """Who is told when there is room in a window again; the highest weight first.

    It only puts itself among those for whom the hub looks for work: to be given something right
    here would, with a peer that answers at once, make room again within the same call.
    """

    weight: int

    def wake(self, now: float) -> None: ...


class Window:
    """How many messages may be on their way to somebody.

    Settling makes room again, unless the window is `granted`: then only `grant` does, whatever
    becomes of the messages. One window can be shared by several attachments of one peer.
    """

    __slots__ = ("attachments", "free", "granted")

    def __init__(self, size: int, *, granted: bool = False) -> None:
        self.free = size
        self.granted = granted
        self.attachments: list[Waiter] = []

    def join(self, waiter: Waiter) -> None:
        """One more shares this window."""
        self.attachments.append(waiter)
        self.attachments.sort(key=lambda each: -each.weight)

    def grant(self, count: int, now: float) -> None:
        """Room for `count` more."""
        self.free += count
        self.wake(now)

    def close(self) -> None:
        """Room for nothing more, whatever is settled."""
        self.free = -_NEVER

    def wake(self, now: float) -> None:
        """Those with the highest weight are asked first: they share what is free."""
        for attachment in tuple(self.attachments):
            attachment.wake(now)

    def dispatch(self, now: float) -> None:
        """For `Hub.touch`: wake them once, however often there was room meanwhile."""
        self.wake(now)


class Attachment(ABC):
    """What a gateway holds of a queue or topic that it takes messages from.

    `settle` and `refuse` ignore ids that it does not hold: a lease may have run out meanwhile.
    """

    __slots__ = ("destination", "is_open", "matches", "peer", "receiver", "weight", "window")

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
        self.is_open = True
        window.join(self)

    @abstractmethod
    def settle(self, ids: Collection[int], now: float) -> int:
        """Done with these. Gives how many of them it held."""

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
        """Can't do these: they are tried again, after `delay_s` or as the queue has it.

        `final` says whether that was the last attempt, where the queue is not to decide.
        """

    @abstractmethod
    def extend(self, ids: Collection[int], now: float, lease_s: float) -> int:
        """Still working on these: their leases start anew."""

    @abstractmethod
    def wake(self, now: float) -> None:
        """There is room in its window."""

    @abstractmethod
    def close(self, now: float) -> None:
        """It leaves: what it holds goes to others at once."""

    def let_go(self) -> None:
        """The first half of leaving: nothing more is given to it."""
        self.is_open = False
        if self in self.window.attachments:
            self.window.attachments.remove(self)


class Item(msgspec.Struct, eq=False):
    """A message in memory that is not settled; `number` is its destination's."""

    id: int
    number: int
    envelope: Envelope
    size: int
    delivered: int = 0
    attempts: list[FailedDelivery] = []
    consumer: Consumer | None = None
    due: float = 0.0


class ConsumerBacklog(Protocol):
    """A queue or named subscription, as its consumers see it: see `Attachment`."""

    destination: str
    retry: Retry

    def settle(self, consumer: Consumer, ids: Iterable[int], now: float) -> int: ...

    def refuse(
        self,
        consumer: Consumer,
        ids: Iterable[int],
        now: float,
        *,
        cause: str,
        delay_s: float | None,
        final: bool | None = None,
    ) -> int: ...

    def extend(self, consumer: Consumer, ids: Iterable[int], now: float, lease_s: float) -> int: ...

    def has_room(self, consumer: Consumer, now: float) -> None: ...

    def give_up(self, consumer: Consumer, error: Exception) -> None: ...

    def detach(self, consumer: Consumer, now: float) -> None: ...


class Consumer(Attachment):
    """Of a queue or of a named subscription."""

    __slots__ = ("_backlog", "choice", "held", "is_listed", "last_used", "lease_s", "number")

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
        self.number = next(_numbers)
        self.held: dict[int, Item] = {}
        self.lease_s = lease_s
        self.choice = choice
        self.last_used = 0
        self.is_listed = False

    @property
    def backlog(self) -> ConsumerBacklog:
        return self._backlog

    @property
    def has_filter(self) -> bool:
        """Whether there may be messages that it does not take."""
        return self.matches is not None or self.choice is not None

    def takes(self, envelope: Envelope) -> bool:
        try:
            return (self.matches is None or self.matches(envelope.properties)) and (
                self.choice is None or self.choice(envelope)
            )
        except Exception as error:
            self._backlog.give_up(self, error)
            return False

    def settle(self, ids: Iterable[int], now: float) -> int:
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
        return self._backlog.refuse(self, ids, now, cause=cause, delay_s=delay_s, final=final)

    def extend(self, ids: Iterable[int], now: float, lease_s: float) -> int:
        return self._backlog.extend(self, ids, now, lease_s)

    def wake(self, now: float) -> None:
        self._backlog.has_room(self, now)

    def close(self, now: float) -> None:
        if self.is_open:
            self.let_go()
            self._backlog.detach(self, now)
