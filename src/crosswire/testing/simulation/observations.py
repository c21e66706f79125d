"""What the clients of a simulated hub saw, and the invariants that it must keep.

Clients report what they tried, what was acknowledged, what was delivered and what they settled. The
invariants are checked as reports come in, and once more at the end, when all faults have ended and
everything must have been delivered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple, Protocol

import msgspec

from crosswire.errors import CrosswireError, HubError

__all__ = ["DeliveryKey", "MessageKey", "Observations"]

_SETTLE_S: Final = 2.0
"""A settlement is durable after this time at the latest, if nothing fails meanwhile."""


EXPECTED_ERRORS: Final = frozenset(
    {
        "ConnectFailed",
        "ConnectionLost",
        "DeliveryLost",
        "DestinationFull",
        "LinkLost",
        "NoProvider",
        "ProviderLost",
        "RequestTimeout",
    }
)
"""Errors that a program has to expect of a hub that crashes, restarts and runs out of disk."""


class MessageKey(NamedTuple):
    """Which message: its destination, its producer, and the producer's count."""

    destination: str
    producer: str
    number: int

    def __str__(self) -> str:
        return f"{self.destination} {self.producer}#{self.number}"


class DeliveryKey(NamedTuple):
    """To whom something was delivered: a queue or a subscription, and a message of it."""

    group: str
    message: MessageKey


class _Life(msgspec.Struct):
    """What became of one message."""

    attempted_at: float
    acknowledged_at: float | None = None
    is_refused: bool = False


class _Reception(msgspec.Struct):
    """What became of one message at one queue or subscription."""

    deliveries: int = 0
    settled_at: float | None = None
    settled_by: str = ""
    refusals: int = 0
    holder: str = ""
    held_since: float = 0.0


class ViolationSink(Protocol):
    """Where violations are reported: the world."""

    now: float

    def violate(self, text: str, cause: BaseException | None = None) -> None:
        """Something is wrong that never may be."""


class Observations:
    """Reports of clients, and what follows from them."""

    def __init__(self, world: ViolationSink, *, max_attempts: int) -> None:
        self._world = world
        self._max_attempts = max_attempts
        self.lives: dict[MessageKey, _Life] = {}
        self.receptions: dict[DeliveryKey, _Reception] = {}
        self.ids: dict[int, MessageKey] = {}
        self._disturbances: dict[str, list[float]] = defaultdict(list)
        self._last_first: dict[tuple[str, str, str], tuple[int, float]] = {}
        self.errors: dict[str, int] = defaultdict(int)
        self.subscriptions: dict[str, float] = {}
        """Queues and named subscriptions that are consumed, and since when."""
        self._suspicions: list[tuple[str, str, float]] = []
        self._consumers: dict[str, set[str]] = defaultdict(set)

    # What clients report.

    def attempted(self, key: MessageKey) -> None:
        """A producer is about to send it."""
        self.lives[key] = _Life(self._world.now)

    def acknowledged(self, key: MessageKey, identifier: int | None = None) -> None:
        """The hub has promised to keep it."""
        self.lives[key].acknowledged_at = self._world.now
        if identifier is not None:
            other = self.ids.setdefault(identifier, key)
            if other != key:
                self._world.violate(f"id {identifier} was given to {other} and to {key}")

    def refused(self, key: MessageKey) -> None:
        """The hub has reported that it did not take it."""
        self.lives[key].is_refused = True

    def failed(self, who: str, error: CrosswireError) -> None:
        """A client got this error."""
        name = type(error).__name__
        self.errors[name] += 1
        # Relink does not carry why an endpoint is refused: a hub that stops refuses all of them.
        is_temporary = type(error) is HubError and (
            "disk" in str(error) or "refuses the endpoint" in str(error)
        )
        if name not in EXPECTED_ERRORS and not is_temporary:
            self._world.violate(f"{who} got {name}, which no fault explains: {error}", error)

    def subscribed(self, group: str, consumer: str) -> None:
        """The hub has confirmed a subscription: from now on all that it matches is delivered."""
        self._consumers[group].add(consumer)
        self.subscriptions.setdefault(group, self._world.now)

    def disturbed(self, who: str) -> None:
        """A client lost its connection, or (`hub`) the hub its memory or its disk."""
        self._disturbances[who].append(self._world.now)

    def delivered(
        self, group: str, key: MessageKey, consumer: str, attempt: int | None = None
    ) -> None:
        """A consumer has got it."""
        world, life = self._world, self.lives.get(key)
        if life is None:
            world.violate(f"{consumer} got {key}, which nobody sent")
            return
        if life.is_refused:
            world.violate(f"{consumer} got {key}, which the hub had refused")
        reception = self.receptions.setdefault(DeliveryKey(group, key), _Reception())
        reception.deliveries += 1
        if attempt is not None and attempt > self._max_attempts:
            world.violate(f"{consumer} got {key} for the {attempt}th time")
        settled_at = reception.settled_at
        if settled_at is not None and not self._was_disturbed(
            (reception.settled_by, "hub"), settled_at - _SETTLE_S, settled_at + _SETTLE_S
        ):
            world.violate(
                f"{consumer} got {key} again, which {reception.settled_by} settled at"
                f" {settled_at:.6f}"
            )
        if reception.holder and settled_at is None:
            self._check_holder(group, key, consumer, reception)
        reception.holder, reception.held_since = consumer, world.now
        if reception.deliveries == 1:
            self._check_order(group, key, consumer)

    def _check_holder(
        self, group: str, key: MessageKey, consumer: str, reception: _Reception
    ) -> None:
        """Somebody else has it, and has neither settled nor refused it: he must be gone."""
        # He may learn later than the hub that he is: the hub's end of his connection ends first.
        if not self._was_disturbed(
            (reception.holder, "hub"), reception.held_since - _SETTLE_S, self._world.now
        ):
            text = f"{consumer} got {key} of {group}, which {reception.holder} had"
            self._suspicions.append((text, reception.holder, reception.held_since))

    def _check_order(self, group: str, key: MessageKey, consumer: str) -> None:
        """Messages of one producer are delivered to one consumer in order, for the first time."""
        if len(self._consumers[group]) > 1:
            return
        way = (group, key.producer, consumer)
        last = self._last_first.get(way)
        if last is not None and key.number < last[0]:
            disturbed = self._was_disturbed(
                (consumer, "hub", key.producer), self.lives[key].attempted_at, self._world.now
            )
            if not disturbed:
                self._world.violate(f"{consumer} got {key} after #{last[0]}")
        self._last_first[way] = (max(key.number, last[0] if last else 0), self._world.now)

    def settled(self, group: str, key: MessageKey, consumer: str) -> None:
        """A consumer has settled it."""
        reception = self.receptions[DeliveryKey(group, key)]
        reception.settled_at, reception.settled_by = self._world.now, consumer
        reception.holder = ""

    def returned(self, group: str, key: MessageKey) -> None:
        """A consumer has refused it."""
        reception = self.receptions[DeliveryKey(group, key)]
        reception.refusals += 1
        reception.holder = ""

    def _was_disturbed(self, who: Iterable[str], first: float, last: float) -> bool:
        for each in who:
            times = self._disturbances[each]
            index = bisect_left(times, first)
            if index < len(times) and times[index] <= last:
                return True
        return False

    # At the end.

    def missing(self, dead: Collection[DeliveryKey] = ()) -> list[DeliveryKey]:
        """What was acknowledged, and is neither settled nor a dead letter."""
        found = []
        for key, life in self.lives.items():
            if life.acknowledged_at is None:
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
            if not self._was_disturbed((holder, "hub"), since - _SETTLE_S, self._world.now):
                self._world.violate(text)
        self._suspicions.clear()
