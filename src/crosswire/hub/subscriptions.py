"""Who subscribed to what: the unnamed ones that are attached, and the named ones that stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

from crosswire.envelope import LARGEST_INTEGER, MICROSECONDS
from crosswire.errors import (
    HubError,
    InvalidDestination,
    RecordDamaged,
    SubscriptionConflict,
    UnknownMessage,
)
from crosswire.hub.attachment import DeliveryReceiver, Ended, Window
from crosswire.hub.backlog import Backlog
from crosswire.hub.filters import Filter, Predicate
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.receipt import Receipt
from crosswire.hub.topics import Definition, Index, Subscriber, Subscription, Topic
from crosswire.store.records import reader

if TYPE_CHECKING:
    from crosswire.hub.hub import Hub

__all__ = ["AtId", "AtTime", "Start", "Subscriptions", "predicate"]

_SPACE: Final = "subscription"
_NAME_BYTES: Final = 200
_LAST_S: Final = 253_402_300_800.0
"""When the year 9999 ends."""


class AtId(msgspec.Struct, frozen=True):
    """Start with this message."""

    id: int


class AtTime(msgspec.Struct, frozen=True):
    """Start with what came at this time or later; in seconds since 1970."""

    time_s: float


Start: TypeAlias = Literal["earliest", "latest"] | AtId | AtTime

_encode = msgspec.msgpack.Encoder().encode
_read: Callable[[bytes], Definition] = reader(Definition, "a subscription")


def predicate(text: str) -> Predicate | None:
    """What a filter's text asks of properties, None for no filter. Raises InvalidFilter."""
    return Filter.parse(text).compile() if text else None


def _check_start(start: Start | None) -> None:
    """Raises InvalidDestination for what could be kept but not be read again."""
    if isinstance(start, AtId) and not 0 <= start.id <= LARGEST_INTEGER:
        raise InvalidDestination("a subscription starts at an id of 63 bits")
    if isinstance(start, AtTime) and not 0 <= start.time_s <= _LAST_S:
        raise InvalidDestination("a subscription starts at a time from 1970 to 9999")


class Subscriptions:
    def __init__(self, hub: Hub) -> None:
        self.lagging: dict[Subscriber, None] = {}
        self._hub = hub
        self._subscribers: Index[Subscriber] = Index()
        self._named: Index[Subscription] = Index()
        self._by_name: dict[str, Subscription] = {}
        self._awaiting_commit: dict[Backlog, None] = {}
        self._unsure: dict[Subscription, int] = {}
        """Those that are not on disk yet, and how many calls count on it."""
        self._numbers: dict[str, tuple[int, list[int], list[Topic]]] = {}

    def recover(self, now: float) -> None:
        hub = self._hub
        for key, value in hub.store.load(_SPACE):
            try:
                definition = _read(value)
                if definition.name.encode() != key:
                    raise RecordDamaged("a subscription has the key of another")
                subscription = self._keep(definition)
            except HubError as error:
                # Its cursor stays: who subscribes with that name goes on where it was.
                hub.set_aside_state(_SPACE, key, value, error)
                continue
            if not subscription.cursor.is_begun and not subscription.cursor.damage:
                subscription.stop("its cursor is missing")
            subscription.recover(now)

    def all(self) -> list[Subscription]:
        return sorted(self._by_name.values(), key=lambda each: each.name)

    def subscribers(self) -> list[Subscriber]:
        """Those without a name."""
        return list(self._subscribers)

    def get(self, name: str) -> Subscription | None:
        return self._by_name.get(name)

    # Joining and leaving.

    def named(
        self, name: str, pattern: str, filter_text: str, start: Start | None, now: float
    ) -> Subscription:
        """The one with this name, made if there is none; nothing is ever removed by this.

        Raises SubscriptionConflict if it has another pattern or filter, and StoreError if a new one
        can't be kept. One whose commit fails later is removed again.
        """
        # All of it is checked before anything is kept.
        predicate(filter_text)
        _check_start(start)
        if len(name.encode(errors="replace")) > _NAME_BYTES or not name.isprintable():
            raise InvalidDestination(f"{name[:80]!r} can't be a subscription's name")
        pattern = pattern.removeprefix("topic/")
        existing = self._by_name.get(name)
        if existing is not None:
            known = existing.definition
            if (known.pattern, known.filter) != (pattern, filter_text):
                # What the other one is belongs to whoever made it.
                raise SubscriptionConflict(
                    f"there is a subscription {name!r} with another pattern or filter: take another"
                    " name, or have it deleted"
                )
            if existing in self._unsure:
                self._await_outcome(existing)
            return existing
        obstacle = self._hub.store.obstacle(now)
        if obstacle is not None:
            raise obstacle
        since_us = int(start.time_s * MICROSECONDS) if isinstance(start, AtTime) else 0
        created_us = self._hub.wall.stamp_us(int(now * MICROSECONDS))
        definition = Definition(name, pattern, filter_text, since_us, created_us)
        subscription = self._keep(definition)
        if subscription.cursor.is_begun or subscription.cursor.damage:
            # There was one of this name whose record was damaged: it goes on where it was.
            subscription.recover(now)
        else:
            subscription.begin(self._position(pattern, start))
            self.await_commit(subscription)
            self._await_outcome(subscription)
        self._hub.store.save(_SPACE, name.encode(), _encode(definition))
        self._hub.store.request()
        return subscription

    def _await_outcome(self, subscription: Subscription) -> None:
        """Each call counts on the commit of its own group: the last one to fail takes it back."""
        self._unsure[subscription] = self._unsure.get(subscription, 0) + 1

        def decide(receipt: Receipt) -> None:
            left = self._unsure.get(subscription, 0) - 1
            if left < 0:
                return
            if receipt.error is None:
                del self._unsure[subscription]
            elif left:
                self._unsure[subscription] = left
            else:
                del self._unsure[subscription]
                # After those who wait for the same commit: they detach what they attached.
                self._hub.defer("subscription", self._take_back, subscription)

        self._hub.committed().add_done_callback(decide)

    def _take_back(self, subscription: Subscription) -> None:
        """It could not be written: nobody has it, and nothing of it is written later."""
        name = subscription.name
        if self._by_name.get(name) is not subscription or subscription in self._unsure:
            return
        for consumer in list(subscription.consumers):
            consumer.close(self._hub.now)
            self._hub.notice(consumer, Ended("the subscription could not be stored"))
        self._drop(subscription)

    def _keep(self, definition: Definition) -> Subscription:
        subscription = Subscription(
            self._hub, definition, predicate(definition.filter), retry=self._hub.config.retry
        )
        self._by_name[definition.name] = subscription
        self._named.add(definition.pattern, subscription)
        return subscription

    def remove(self, name: str) -> None:
        """End a named subscription for good. Raises UnknownMessage; its consumers must be gone."""
        subscription = self._by_name.get(name)
        if subscription is None:
            raise UnknownMessage(f"there is no subscription {name!r}")
        if subscription.consumers:
            raise SubscriptionConflict(f"{name!r} is in use")
        obstacle = self._hub.store.obstacle(self._hub.now)
        if obstacle is not None and self._hub.store.last_error is not None:
            raise obstacle
        self._drop(subscription)

    def _drop(self, subscription: Subscription) -> None:
        name = subscription.name
        del self._by_name[name]
        self._unsure.pop(subscription, None)
        self._awaiting_commit.pop(subscription, None)
        self._named.remove(subscription.definition.pattern, subscription)
        subscription.forget()
        self._hub.store.drop(_SPACE, name.encode())
        self._hub.store.request()

    def unnamed(
        self,
        pattern: str,
        receiver: DeliveryReceiver,
        start: Start | None,
        *,
        peer: LedgerPeer,
        window: Window,
        matches: Predicate | None,
        slow: Literal["lag", "disconnect"] | None,
        names: Callable[[str], bool] | None = None,
    ) -> Subscriber:
        subscriber = Subscriber(
            self._hub,
            pattern,
            receiver,
            peer=peer,
            window=window,
            matches=matches,
            slow=slow,
            names=names,
        )
        _check_start(start)
        self._subscribers.add(subscriber.pattern, subscriber)
        if start is not None and start != "latest":
            since_us = int(start.time_s * MICROSECONDS) if isinstance(start, AtTime) else 0
            subscriber.start_after(self._position(subscriber.pattern, start), since_us)
            self._hub.touch(subscriber)
        return subscriber

    def leave(self, subscriber: Subscriber) -> None:
        self._subscribers.remove(subscriber.pattern, subscriber)
        self.lagging.pop(subscriber, None)

    def _position(self, pattern: str, start: Start | None) -> int:
        """The id behind which a new subscription starts."""
        if start is None or start == "latest":
            return self._hub.store.newest_id
        topics = self._matching(pattern)[1]
        kept = min((topic.reclaimed for topic in topics), default=0)
        if isinstance(start, AtId):
            return max(start.id - 1, kept)
        if isinstance(start, AtTime):
            since_us = int(start.time_s * MICROSECONDS)
            return min((topic.before(since_us) for topic in topics), default=0)
        return kept

    # Matching.

    def choose_anew(self) -> None:
        """A subscriber's choice has changed: every topic looks up who wants it."""
        self._subscribers.version += 1

    def refresh(self, topic: Topic) -> None:
        """Bring a topic's list of who wants it up to date."""
        topic.refresh(self._subscribers, self._named)

    def _matching(self, pattern: str) -> tuple[list[int], list[Topic]]:
        """The topics that there are for a pattern, looked up again when there are new ones."""
        topics = self._hub.topics_by_name()
        cached = self._numbers.get(pattern)
        if cached is not None and cached[0] == len(topics):
            return cached[1], cached[2]
        if "+" in pattern or "#" in pattern:
            index: Index[None] = Index()
            index.add(pattern, None)
            found = [topic for topic in topics.values() if index.match(topic.name)]
        else:
            found = [topics[name] for name in (f"topic/{pattern}",) if name in topics]
        if len(self._numbers) > 10_000:
            self._numbers.clear()
        numbers = [topic.number for topic in found]
        self._numbers[pattern] = (len(topics), numbers, found)
        return numbers, found

    def numbers(self, pattern: str) -> list[int]:
        return list(self._matching(pattern)[0])

    def reclaimed(self, pattern: str) -> int:
        """The highest id that retention has taken from any topic of a pattern."""
        return max((topic.reclaimed for topic in self._matching(pattern)[1]), default=0)

    # From time to time.

    def catch_up(self) -> None:
        """More is committed: those who lag, or could not read it yet, may read it."""
        for subscriber in self.lagging:
            self._hub.touch(subscriber)
        for backlog in list(self._awaiting_commit):
            self._hub.touch(backlog)
            if backlog.visible <= self._hub.committed_id:
                del self._awaiting_commit[backlog]

    def await_commit(self, backlog: Backlog) -> None:
        """Its tail reaches beyond what is committed: commits touch it until they are past that."""
        self._awaiting_commit[backlog] = None

    def report_gaps(self) -> None:
        for subscription in list(self._by_name.values()):
            subscription.report_gap()
