"""What the clients of a simulated hub saw, and the invariants that it must keep.

Clients report what they tried, what was acknowledged, what was delivered and what they settled. The
invariants are checked as reports come in, and once more at the end, when all faults have ended and
everything must have been delivered.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Container, Iterable
from typing import Final, NamedTuple, Protocol

import msgspec

from crosswire.errors import CrosswireError, HubError
from crosswire.testing.simulation.disturbances import Disturbances, held
from crosswire.testing.simulation.durable import MessageKey, find_messages

__all__ = ["DeliveryKey", "Observations", "ViolationSink"]

_LONGEST_FAULT_S: Final = 12.0
_STARTED_S: Final = 6.0
"""When hubs, and leaders of replicas, are up at the latest, if nothing hinders them."""


EXPECTED_ERRORS: Final = frozenset(
    {
        "ConnectFailed",
        "ConnectionLost",
        "DeliveryLost",
        "DestinationFull",
        "HandshakeFailed",
        "LinkLost",
        "NoProvider",
        "ProviderLost",
        "RequestTimeout",
    }
)
"""Errors that a program has to expect of a hub that crashes, restarts and runs out of disk."""


class DeliveryKey(NamedTuple):
    """To whom something was delivered: a queue or a subscription, and a message of it."""

    group: str
    message: MessageKey


class _Life(msgspec.Struct):
    """What became of one message."""

    attempted_at: float
    acknowledged_at: float | None = None
    refused_at: float | None = None


class _Reception(msgspec.Struct):
    """What became of one message at one queue or subscription."""

    deliveries: int = 0
    settled_at: float | None = None
    settled_by: str = ""
    refusals: list[tuple[str, float]] = []
    """Who refused it, and when."""
    holder: str = ""
    held_since: float = 0.0


class _ConnectionOrder:
    """What a consumer has got on one connection."""

    def __init__(self, connection: object, began: float) -> None:
        self.connection = connection
        self.began = began
        self.numbers: dict[str, int] = {}
        """The last message of each producer."""


class ViolationSink(Protocol):
    """Where violations are reported: the world."""

    @property
    def now(self) -> float:
        """Seconds since the beginning."""

    def violate(self, text: str, cause: BaseException | None = None) -> None:
        """Something is wrong that never may be."""


class Observations:
    """Reports of clients, and what follows from them."""

    def __init__(
        self,
        world: ViolationSink,
        durable: Container[MessageKey],
        *,
        max_attempts: int,
        patience: float = 1.0,
    ) -> None:
        self._world = world
        self._durable = durable
        self._max_attempts = max_attempts
        self.lives: dict[MessageKey, _Life] = {}
        self.receptions: dict[DeliveryKey, _Reception] = {}
        self.ids: dict[int, MessageKey] = {}
        self._disturbances = Disturbances(patience)
        self._settle_s = self._disturbances.settle_s
        self._streams: dict[str, _ConnectionOrder] = {}
        """What consumers got on the connections that they have now."""
        self.errors: dict[str, int] = defaultdict(int)
        self.subscriptions: dict[str, float] = {}
        """Queues and named subscriptions that are consumed, and since when."""
        self.lost: set[MessageKey] = set()
        """What was damaged on the only disk that had it."""
        self.damaged_records = 0
        self.damages = 0
        """How many times something was done to a disk at rest."""
        self._suspicions: list[tuple[str, str, float]] = []
        self._refused: deque[tuple[MessageKey, float]] = deque()
        """What producers were refused lately, and when."""
        self._consumers: dict[str, set[str]] = defaultdict(set)

    # What clients report.

    def attempted(self, key: MessageKey) -> None:
        """A producer is about to send it."""
        self.lives[key] = _Life(self._world.now)

    def acknowledged(self, key: MessageKey, identifier: int | None = None) -> None:
        """The hub has promised to keep it."""
        self.lives[key].acknowledged_at = self._world.now
        if key.destination.startswith("queue/") and key not in self._durable:
            self._world.violate(f"{key} was acknowledged, and is not durable")
        if identifier is not None:
            other = self.ids.setdefault(identifier, key)
            if other != key:
                self._world.violate(f"id {identifier} was given to {other} and to {key}")

    def refused(self, key: MessageKey) -> None:
        """The hub has reported that it did not take it."""
        self.lives[key].refused_at = self._world.now
        self._refused.append((key, self._world.now))
        for reception in self._receptions_of(key):
            if reception.deliveries:
                self._world.violate(f"the hub refused {key} after it had delivered it")

    def _receptions_of(self, key: MessageKey) -> Iterable[_Reception]:
        return (each for delivery, each in self.receptions.items() if delivery.message == key)

    def failed(
        self, who: str, error: CrosswireError, *others: str, since: float | None = None
    ) -> None:
        """A client got this error, to a request of that time; faults of `others` may explain it."""
        name = type(error).__name__
        self.errors[name] += 1
        # Relink does not carry why an endpoint is refused: a hub that stops refuses all of them.
        is_temporary = type(error) is HubError and (
            "disk" in str(error) or "refuses the endpoint" in str(error)
        )
        if name not in EXPECTED_ERRORS and not is_temporary:
            self._world.violate(f"{who} got {name}, which no fault explains: {error}", error)
        now = self._world.now
        is_early = now < _STARTED_S and name != "RequestTimeout"
        if not is_early and not self._disturbances.explain(since or now, now, *others):
            self._world.violate(f"{who} got {name}, though nothing was wrong: {error}", error)

    def subscribed(self, group: str, consumer: str) -> None:
        """The hub has confirmed a subscription: from now on all that it matches is delivered."""
        self._consumers[group].add(consumer)
        self.subscriptions.setdefault(group, self._world.now)

    @property
    def has_crashed(self) -> bool:
        """Whether the hub was killed, or lost power."""
        return self._disturbances.happened(("crash",), 0.0, self._world.now)

    def forgotten_at(self, *, has_links: bool) -> float:
        """When the hub has nothing of programs that end now, or have ended before: half-open
        connections have to be noticed first."""
        now, disturbances = self._world.now, self._disturbances
        noticed_at = max(now, disturbances.last("network") + disturbances.unnoticed_s)
        return noticed_at + (disturbances.link_s if has_links else 0.0)

    def disturbed(self, who: str) -> None:
        """Something was done to it: see `disturbances`."""
        self._disturbances.note(who, self._world.now)

    def damaged(self, records: Iterable[bytes]) -> None:
        """A hub alone can't keep what its disk has lost: these messages, and no others."""
        for record in records:
            self.damaged_records += 1
            self.lost.update(find_messages(record))

    def delivered(
        self,
        group: str,
        key: MessageKey,
        consumer: str,
        attempt: int | None = None,
        *,
        connection: object = None,
    ) -> None:
        """A consumer has got it, on this connection."""
        world, life = self._world, self.lives.get(key)
        if life is None:
            world.violate(f"{consumer} got {key}, which nobody sent")
            return
        if self._is_gone(life):
            world.violate(f"{consumer} got {key}, which the hub had refused")
        if group.startswith("queue/") and key not in self._durable:
            world.violate(f"{consumer} got {key}, which is not durable")
        reception = self.receptions.setdefault(DeliveryKey(group, key), _Reception())
        reception.deliveries += 1
        if attempt is not None:
            self._check_attempt(key, consumer, reception, attempt)
        settled_at = reception.settled_at
        if settled_at is not None and self._arrived(reception.settled_by, settled_at):
            world.violate(
                f"{consumer} got {key} again, which {reception.settled_by} settled at"
                f" {settled_at:.6f}"
            )
        if reception.holder and settled_at is None:
            self._check_holder(group, key, consumer, reception)
        reception.holder, reception.held_since = consumer, world.now
        self._check_order(group, key, consumer, reception, connection)

    def _arrived(self, consumer: str, at: float) -> bool:
        """Whether what a consumer decided is certain to be known to the hub, and durable.

        While packets are lost, a decision is on its way until TCP has repeated it, or given up: the
        hub, or the connection, may end before.
        """
        ends = (consumer, "hub")
        if self._disturbances.happened(ends, at - self._settle_s, at + self._settle_s):
            return False
        return not (
            self._disturbances.happened(("network",), at - _LONGEST_FAULT_S, at + self._settle_s)
            and self._disturbances.happened(ends, at, at + self._disturbances.unnoticed_s)
        )

    def _is_gone(self, life: _Life) -> bool:
        """Whether the hub has refused it, and had time to delete it."""
        # A disk that fails to sync may keep what it was given, and a hub that crashes then had no
        # time to delete it: nobody can promise that such a message is gone.
        return life.refused_at is not None and not self._disturbances.happened(
            ("crash",),
            life.refused_at - self._settle_s,
            life.refused_at + _LONGEST_FAULT_S,
        )

    def check_refused(self, is_stored: Callable[[MessageKey], bool]) -> None:
        """A hub that works deletes what it has refused. Each is looked at once."""
        deleted_at = self._world.now - self._settle_s
        while self._refused and self._refused[0][1] < deleted_at:
            key, _ = self._refused.popleft()
            if self._is_gone(self.lives[key]) and is_stored(key):
                self._world.violate(f"the hub refused {key}, and keeps it on its disk")

    def is_calm(self, who: str, for_s: float) -> bool:
        """Whether nothing was done to it for so long."""
        now = self._world.now
        return not self._disturbances.happened((who,), now - for_s, now)

    def _check_attempt(
        self, key: MessageKey, consumer: str, reception: _Reception, attempt: int
    ) -> None:
        """No attempt above the limit, and none that leaves out refusals that the hub knows."""
        if attempt > self._max_attempts:
            self._world.violate(f"{consumer} got {key} for the {attempt}th time")
        certain = sum(self._arrived(who, at) for who, at in reception.refusals)
        if attempt <= certain:
            self._world.violate(
                f"{consumer} got {key} as attempt {attempt} after {certain} refusals"
            )

    def check_window(self, consumer: str, unsettled: int, window: int) -> None:
        """A consumer has this many messages that it has not settled."""
        if unsettled > window:
            self._world.violate(f"{consumer} has {unsettled} messages and a window of {window}")

    def _check_holder(
        self, group: str, key: MessageKey, consumer: str, reception: _Reception
    ) -> None:
        """Somebody else has it, and has neither settled nor refused it: he must be gone."""
        # He may learn later than the hub that he is: the hub's end of his connection ends first.
        if not self._disturbances.happened(
            (reception.holder, "hub"),
            reception.held_since - self._settle_s,
            self._world.now,
        ):
            text = f"{consumer} got {key} of {group}, which {reception.holder} had"
            self._suspicions.append((text, reception.holder, reception.held_since))

    def _check_order(
        self,
        group: str,
        key: MessageKey,
        consumer: str,
        reception: _Reception,
        connection: object,
    ) -> None:
        """Messages of one producer are delivered to a single consumer in order, on each of its
        connections; not those that it has refused."""
        if len(self._consumers[group]) > 1:
            return
        stream = self._streams.get(consumer)
        if stream is None or stream.connection is not connection:
            stream = self._streams[consumer] = _ConnectionOrder(connection, self._world.now)
        if reception.refusals:
            return
        number = stream.numbers.get(key.producer, 0)
        if key.number < number and not self._may_be_late(key, consumer, stream.began):
            self._world.violate(f"{consumer} got {key} after #{number}")
        stream.numbers[key.producer] = key.number

    def _may_be_late(self, key: MessageKey, consumer: str, began: float) -> bool:
        """Whether the hub may have had another connection of this consumer, which had the message,
        beside the one that began then."""
        now, disturbances = self._world.now, self._disturbances
        if disturbances.happened(("network",), began - disturbances.unnoticed_s, now):
            return True
        if disturbances.happened((held(consumer),), began - disturbances.held_s, now):
            return True
        # A hub that stood still sees the new connection before the end of the old one.
        was_before = self.lives[key].attempted_at < began
        return was_before and disturbances.happened(("still",), began - disturbances.hub_s, now)

    def settled(self, group: str, key: MessageKey, consumer: str) -> None:
        """A consumer has settled it."""
        reception = self.receptions[DeliveryKey(group, key)]
        reception.settled_at, reception.settled_by = self._world.now, consumer
        reception.holder = ""

    def returned(self, group: str, key: MessageKey, consumer: str) -> None:
        """A consumer has refused it."""
        reception = self.receptions[DeliveryKey(group, key)]
        reception.refusals.append((consumer, self._world.now))
        reception.holder = ""

    # At the end.

    def missing(self, dead: Collection[DeliveryKey] = ()) -> list[DeliveryKey]:
        """What was acknowledged, and is neither settled nor a dead letter."""
        found = []
        for key, life in self.lives.items():
            if life.acknowledged_at is None or key in self.lost:
                continue
            for group, since in self.subscriptions.items():
                # A subscription starts with the earliest that is kept, or when it was made.
                if group.partition(" ")[0] != key.destination or life.attempted_at < since:
                    continue
                delivery = DeliveryKey(group, key)
                reception = self.receptions.get(delivery)
                if (reception is None or reception.settled_at is None) and delivery not in dead:
                    found.append(delivery)
        return found

    def check_suspicions(self) -> None:
        """Who was thought to be gone must have noticed it by now."""
        for text, holder, since in self._suspicions:
            if not self._disturbances.happened(
                (holder, "hub"), since - self._settle_s, self._world.now
            ):
                self._world.violate(text)
        self._suspicions.clear()
