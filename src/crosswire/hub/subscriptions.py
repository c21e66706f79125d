"""Subscriptions: the named ones, which outlive their connections, and the list of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, TypeAlias
from urllib.parse import quote
from weakref import WeakSet

import msgspec

from crosswire.access import subscription_dead_letters, subscription_label
from crosswire.commitlog.contract import Receipt
from crosswire.envelope import (
    LARGEST_INTEGER,
    MICROSECONDS,
    ONLY_FOR,
    Envelope,
)
from crosswire.errors import (
    HubError,
    InvalidDestination,
    RecordDamaged,
    SubscriptionConflict,
    UnknownMessage,
)
from crosswire.hub.attachment import Consumer, DeliveryGap, DeliveryReceiver, Ended, Window
from crosswire.hub.backlog.backlog import Backlog
from crosswire.hub.core import Core, SendEnvelope
from crosswire.hub.filters import Filter, Predicate
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.pattern_index import PatternIndex
from crosswire.hub.policies import Retry
from crosswire.hub.shares import Quota
from crosswire.hub.subscribers import Subscriber
from crosswire.hub.topic_index import KnownTopics
from crosswire.hub.topic_reads import PatternLogs
from crosswire.hub.topics import Topic
from crosswire.store.records import Count, reader

__all__ = [
    "AtId",
    "AtTime",
    "Audience",
    "Definition",
    "Start",
    "Subscription",
    "Subscriptions",
    "predicate",
    "record_key",
]

_SPACE: Final = "subscription"
_GAPS: Final = "gap"
"""A space: gaps that no consumer was there for, by the key of the subscription's record."""
_NAME_BYTES: Final = 200
_AUDIENCE_ENTRIES: Final = 1 << 20
"""Subscribers and subscriptions in the audiences of all topics together that are kept, 8 bytes
each: of tens of thousands of topics each may have thousands."""
_LAST_S: Final = 253_402_300_800.0
"""When the year 9999 ends."""


class AtId(msgspec.Struct, frozen=True):
    """Start with this message."""

    id: int


class AtTime(msgspec.Struct, frozen=True):
    """Start with what was published at this time or later; in seconds since 1970."""

    time_s: float


Start: TypeAlias = Literal["earliest", "latest"] | AtId | AtTime


class Definition(msgspec.Struct, array_like=True, frozen=True):
    """What is stored of a named subscription beside its cursor."""

    name: str
    pattern: str
    filter: str
    since_us: Annotated[int, msgspec.Meta(le=LARGEST_INTEGER)]
    created_us: Count
    owner: str = ""
    """The user who made it; empty if that was without users, or before there were any."""


def record_key(owner: str, name: str) -> bytes:
    """The key of a new subscription's record. Names are printable: NUL is in no name."""
    return f"\0{quote(owner, safe='')}\0{name}".encode() if owner else name.encode()


def _is_key_of(key: bytes, name: str) -> bool:
    """Whether a record of this name may have this key, with any owner."""
    parts = key.split(b"\0")
    return (parts[2] if len(parts) in (3, 4) else key) == name.encode()


class Subscription(Backlog):
    """A named subscription: a cursor that outlives its connections, shared by all consumers of its
    owner that use its name.

    It gets only what is committed; refused messages are retried, then dead letters, as in queues.
    """

    has_filter = True

    def __init__(
        self,
        core: Core,
        topics: KnownTopics,
        definition: Definition,
        matches: Predicate | None,
        *,
        key: bytes,
        send: SendEnvelope,
        retry: Retry,
        window_messages: int = 1024,
        window_bytes: int = 16 << 20,
    ) -> None:
        self.logs = PatternLogs(core, topics, definition.pattern, definition.since_us)
        super().__init__(
            core,
            f"topic/{definition.pattern}",
            b"s" + key,
            self.logs,
            send=send,
            retry=retry,
            window_messages=window_messages,
            window_bytes=window_bytes,
        )
        self.definition = definition
        self.record_key = key
        """Of its record. It stays the same when it gets another owner, as its cursor's key does."""
        self.subscription = subscription_label(definition.owner, definition.name)
        self.matches = matches
        self.holder = definition.owner
        """Whose share it counts for; of one that was made without users, an address since the last
        start."""
        self._skipped = 0
        self._gap_seen = 0
        self._gap: DeliveryGap | None = None
        self._saved_gap: DeliveryGap | None = None

    @property
    def name(self) -> str:
        """The name under which consumers share it."""
        return self.definition.name

    @property
    def owner(self) -> str:
        """The user who may use and remove it; empty without users."""
        return self.definition.owner

    @property
    def title(self) -> str:
        """What reports call it."""
        of = f" of {self.definition.owner!r}" if self.definition.owner else ""
        return f"subscription {self.definition.name!r}{of} to {self.destination}"

    @property
    def dead_letters(self) -> str:
        """The queue of its dead letters: its own, as a topic has none."""
        return subscription_dead_letters(self.definition.owner, self.definition.name)

    def wants(self, envelope: Envelope) -> bool:
        """Whether start and filter match. A dead letter that is given back to one subscription is
        in the topic's log like any other, and is taken by that one only, whatever its filter."""
        only = envelope.native.get(ONLY_FOR)
        if only is not None:
            if only == self.record_key:
                return True
        elif envelope.time >= self.definition.since_us and (
            self.matches is None or self.matches(envelope.properties)
        ):
            return True
        # Skipped messages leave no trace in the cursor: a snapshot now and then keeps a restart
        # from reading all of them again.
        self._skipped += 1
        if self._skipped >= 10_000:
            self._skipped = 0
            self._core.commits.changed(self)
            self.snapshot()
        return False

    def delete(self) -> None:
        """Delete its cursor; nothing of it is written any more."""
        self._core.commits.forget(self)
        self.cursor.forget()
        self.memory.forget()
        if self._saved_gap is not None:
            self._store.drop(_GAPS, self.record_key)

    def recover(self, now: float) -> None:
        """Continue after a restart: what retention has deleted meanwhile of what was in memory is
        a gap, too."""
        opened, floors = self.cursor.open, self._core.floors
        super().recover(now)
        items = self.memory.items
        gone = [
            each.id
            for each in opened
            if each.id <= floors.of(each.number) and each.id not in items and not self.stopped
        ]
        if gone:
            self._add_gap(min(gone), max(gone))
        stored = self._store.get(_GAPS, self.record_key)
        if stored is not None:
            try:
                first, last = _read_gap(stored)
            except RecordDamaged as error:
                self._core.damage.set_aside_state(_GAPS, self.record_key, stored, error)
            else:
                self._saved_gap = DeliveryGap(first, last, "retention")
                self._add_gap(first, last)

    def begin(self, position: int, retentions: int) -> None:
        """A new subscription starts after this id; see `PatternLogs.retentions`."""
        memory = self.memory
        self.logs.retentions = retentions
        memory.loaded = self.cursor.upto = position
        # Messages that are being committed right now belong to it, and are read from disk.
        memory.visible = max(self._core.store.newest_id, position)
        self.snapshot()
        memory.fill()
        self._core.commits.changed(self)
        self._core.loop.touch(self)

    def note_reclaimed(self, identifier: int) -> None:
        """Report a gap, before what follows it can be delivered."""
        seen = max(self.memory.loaded, self._gap_seen)
        if identifier > seen:
            self._gap_seen = identifier
            self._add_gap(seen + 1, identifier)
            self._report_gap()

    def _add_gap(self, first: int, last: int) -> None:
        if self._gap is not None:
            first, last = min(first, self._gap.first), max(last, self._gap.last)
        self._gap = DeliveryGap(first, last, "retention")

    def _write_counters(self) -> None:
        """Save a gap that nobody knows of, with the position that may be after it."""
        gap = self._gap
        if gap != self._saved_gap:
            self._saved_gap = gap
            if gap is None:
                self._store.drop(_GAPS, self.record_key)
            else:
                self._store.save(_GAPS, self.record_key, _encode((gap.first, gap.last)))

    def attach(self, *args: Any, **options: Any) -> Consumer:
        """Add a consumer: see `Backlog.attach`. It learns of a gap that nobody was there for."""
        consumer = super().attach(*args, **options)
        self._report_gap()
        return consumer

    def dispatch(self, now: float) -> None:
        """Hand out what is ready, and before that what is missing."""
        if self._gap is not None:
            self._report_gap()
        super().dispatch(now)

    def _report_gap(self) -> None:
        """Report to consumers what was deleted before they got it; without any, to the next one."""
        if self._gap is not None and self.consumers:
            gap, self._gap = self._gap, None
            if self._saved_gap is not None:
                self._core.commits.changed(self)
            for consumer in list(self.consumers):
                self._core.loop.notice(consumer, gap)


_encode = msgspec.msgpack.Encoder().encode
_read: Callable[[bytes], Definition] = reader(Definition, "a subscription")
_read_gap: Callable[[bytes], tuple[Count, Count]] = reader(tuple[Count, Count], "a gap")


def predicate(text: str) -> Predicate | None:
    """A filter's text as a function of properties; None for no filter. Raises InvalidFilter."""
    return Filter.parse(text).compile() if text else None


def _check_start(start: Start | None) -> None:
    """Raises InvalidDestination for what could be stored but not be read again."""
    if isinstance(start, AtId) and not 0 <= start.id <= LARGEST_INTEGER:
        raise InvalidDestination("a subscription starts at an id of 63 bits")
    if isinstance(start, AtTime) and not 0 <= start.time_s <= _LAST_S:
        raise InvalidDestination("a subscription starts at a time from 1970 to 9999")


class Audience(msgspec.Struct, frozen=True):
    """Who gets what is published to a topic, as of a version of the indexes."""

    versions: tuple[int, int]
    subscribers: list[Subscriber]
    subscriptions: list[Subscription]

    @property
    def entries(self) -> int:
        """How many they are."""
        return len(self.subscribers) + len(self.subscriptions)


class Subscriptions:
    """Who subscribed to what: unnamed subscribers while attached, named subscriptions for good."""

    def __init__(
        self,
        core: Core,
        topics: KnownTopics,
        *,
        send: SendEnvelope,
        retry: Retry,
        share: Quota,
    ) -> None:
        self.share = share
        """How many named ones each owner may have."""
        self.retry = retry
        """The retry policy of subscriptions that are made from now on."""
        self._core = core
        self._store = core.store
        self._topics = topics
        self._send = send
        self._audiences: dict[int, Audience] = {}
        self._audience_entries = 0
        self._subscribers: PatternIndex[Subscriber] = PatternIndex()
        self._named: PatternIndex[Subscription] = PatternIndex()
        self._by_name: dict[tuple[str, str], Subscription] = {}
        """By owner and name."""
        self._keys: set[bytes] = set()
        """Of the records, so that no two subscriptions share a record."""
        self._unsure: dict[Subscription, int] = {}
        """New subscriptions that are not on disk yet, and how many calls rely on each."""
        self._removed: WeakSet[Subscription] = WeakSet()

    def recover(self, now: float) -> None:
        """Load the named subscriptions after a restart."""
        for key, value in self._store.load(_SPACE):
            try:
                definition = _read(value)
                if (
                    not _is_key_of(key, definition.name)
                    or (definition.owner, definition.name) in self._by_name
                ):
                    raise RecordDamaged("a subscription has the key of another")
                subscription = self._keep(definition, key)
            except HubError as error:
                # Its cursor stays: a new subscription of that name continues there.
                self._core.damage.set_aside_state(_SPACE, key, value, error)
                continue
            if not subscription.cursor.is_begun and not subscription.cursor.damage:
                subscription.stop("its cursor is missing")
            subscription.recover(now)

    def all(self) -> list[Subscription]:
        """The named subscriptions, in order of owners and names."""
        return [subscription for _, subscription in sorted(self._by_name.items())]

    @property
    def count(self) -> int:
        """How many named subscriptions there are."""
        return len(self._by_name)

    @property
    def departed(self) -> int:
        """How many named subscriptions were removed, and are still in memory."""
        return len(self._removed)

    def subscribers(self) -> list[Subscriber]:
        """Those without a name, as long as they are attached."""
        return list(self._subscribers)

    def get(self, name: str, owner: str = "") -> Subscription | None:
        """The named subscription; None if there is none of that owner and name."""
        return self._by_name.get((owner, name))

    # Subscribing and unsubscribing.

    def named(
        self,
        name: str,
        pattern: str,
        filter_text: str,
        start: Start | None,
        now: float,
        owner: str = "",
        holder: str = "",
    ) -> Subscription:
        """The subscription of this owner and name, created if there is none.

        Raises SubscriptionConflict if it has another pattern or filter, QuotaExceeded if the
        owner, or else the `holder`, has too many, and StoreError if a new one can't be stored. One
        whose commit fails later is removed again.
        """
        # Everything is checked before anything is saved.
        predicate(filter_text)
        _check_start(start)
        if len(name.encode(errors="replace")) > _NAME_BYTES or not name.isprintable():
            raise InvalidDestination(f"{name[:80]!r} can't be a subscription's name")
        pattern = pattern.removeprefix("topic/")
        existing = self._by_name.get((owner, name))
        if existing is not None:
            known = existing.definition
            if (known.pattern, known.filter) != (pattern, filter_text):
                # Not shown: what another peer subscribed to is not this one's business.
                raise SubscriptionConflict(
                    f"there is a subscription {name!r} with another pattern or filter: take another"
                    " name, or have it deleted"
                )
            if existing in self._unsure:
                self._await_outcome(existing)
            return existing
        self.share.check(owner or holder)
        obstacle = self._store.obstacle(now)
        if obstacle is not None:
            raise obstacle
        since_us = int(start.time_s * MICROSECONDS) if isinstance(start, AtTime) else 0
        created_us = self._core.wall.stamp_us(int(now * MICROSECONDS))
        definition = Definition(name, pattern, filter_text, since_us, created_us, owner)
        subscription = self._keep(definition, self._free_key(owner, name), holder)
        if subscription.cursor.is_begun or subscription.cursor.damage:
            # There was one of this name whose definition was damaged: its cursor is continued.
            subscription.recover(now)
        else:
            subscription.begin(*self._position(pattern, start))
            self._core.commits.await_commit(subscription)
            self._await_outcome(subscription)
        self._store.save(_SPACE, subscription.record_key, _encode(definition))
        self._core.commits.request()
        return subscription

    def _free_key(self, owner: str, name: str) -> bytes:
        """A key for a new record: the usual one may belong to one that got another owner."""
        key = record_key(owner, name)
        number = 0
        while key in self._keys:
            number += 1
            key = f"\0{quote(owner, safe='')}\0{name}\0{number}".encode()
        return key

    def _await_outcome(self, subscription: Subscription) -> None:
        """Each call relies on the commit of its own group: the last one that fails removes it."""
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
                # Deferred: receipts of the same commit come first, and detach their consumers.
                self._core.loop.defer("subscription", self._take_back, subscription)

        self._core.commits.committed().add_done_callback(decide)

    def _take_back(self, subscription: Subscription) -> None:
        """It could not be written: detach its consumers, and save nothing of it later."""
        known = self._by_name.get((subscription.owner, subscription.name))
        if known is not subscription or subscription in self._unsure:
            return
        for consumer in list(subscription.consumers):
            consumer.close(self._core.loop.now)
            self._core.loop.notice(consumer, Ended("the subscription could not be stored"))
        self._drop(subscription)

    def _keep(self, definition: Definition, key: bytes, holder: str = "") -> Subscription:
        subscription = Subscription(
            self._core,
            self._topics,
            definition,
            predicate(definition.filter),
            key=key,
            send=self._send,
            retry=self.retry,
        )
        self._by_name[definition.owner, definition.name] = subscription
        self._keys.add(key)
        subscription.holder = definition.owner or holder
        self.share.add(subscription.holder)
        self._named.add(definition.pattern, subscription)
        return subscription

    def remove(self, name: str, owner: str = "") -> None:
        """Delete a named subscription.

        Raises UnknownMessage, SubscriptionConflict while it has consumers, and StoreError while
        nothing can be written.
        """
        self._drop(self._unused(name, owner))

    def assign(self, name: str, owner: str, new_owner: str) -> Subscription:
        """Give a named subscription to another owner, with its backlog.

        Its dead letters of before stay in the queue where they are. Raises UnknownMessage,
        SubscriptionConflict while it has consumers or if the new owner has one of that name, and
        StoreError while nothing can be written.
        """
        subscription = self._unused(name, owner)
        if owner == new_owner:
            return subscription
        if (new_owner, name) in self._by_name:
            raise SubscriptionConflict(f"{new_owner!r} has a subscription {name!r} already")
        definition = msgspec.structs.replace(subscription.definition, owner=new_owner)
        del self._by_name[owner, name]
        self._by_name[new_owner, name] = subscription
        # An administrator may give somebody more than its share.
        self.share.remove(subscription.holder)
        self.share.add(new_owner)
        subscription.definition, subscription.holder = definition, new_owner
        subscription.subscription = subscription_label(new_owner, name)
        self._store.save(_SPACE, subscription.record_key, _encode(definition))
        self._core.commits.request()
        return subscription

    def _unused(self, name: str, owner: str) -> Subscription:
        """One that can be changed now. Raises UnknownMessage, SubscriptionConflict, StoreError."""
        subscription = self._by_name.get((owner, name))
        if subscription is None:
            raise UnknownMessage(f"there is no subscription {name!r}")
        if subscription.consumers:
            raise SubscriptionConflict(f"{name!r} is in use")
        obstacle = self._store.obstacle(self._core.loop.now)
        if obstacle is not None and self._store.last_error is not None:
            raise obstacle
        return subscription

    def _drop(self, subscription: Subscription) -> None:
        del self._by_name[subscription.owner, subscription.name]
        self._keys.discard(subscription.record_key)
        self.share.remove(subscription.holder)
        self._unsure.pop(subscription, None)
        self._named.remove(subscription.definition.pattern, subscription)
        subscription.delete()
        self._removed.add(subscription)
        self._store.drop(_SPACE, subscription.record_key)
        self._core.commits.request()

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
        """Attach an unnamed subscriber. Raises InvalidDestination for an impossible start."""
        subscriber = Subscriber(
            self._core,
            self._topics,
            self._subscribers,
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
            position, retentions = self._position(subscriber.pattern, start)
            subscriber.start_after(position, since_us, retentions)
            self._core.loop.touch(subscriber)
        return subscriber

    def leave(self, subscriber: Subscriber) -> None:
        """Remove a closed subscriber from the index, where `close` could not."""
        self._subscribers.remove(subscriber.pattern, subscriber)

    def _position(self, pattern: str, start: Start | None) -> tuple[int, int]:
        """The id after which a new subscription starts, and `PatternLogs.retentions` of it.

        That is known without a look at the topics of a pattern, of which there may be many. One
        that starts at a time passes over older messages of each topic when it reads that.
        """
        if start is None or start == "latest":
            return self._store.newest_id, -1
        if isinstance(start, AtId):
            return max(start.id - 1, 0), -1
        if isinstance(start, AtTime):
            return 0, -1
        topic = self._topics.get(pattern)
        return 0 if topic is None else topic.reclaimed, self._core.floors.raised

    # Matching.

    def audience(self, topic: Topic) -> Audience:
        """Who gets what is published to a topic, looked up again when subscriptions changed."""
        versions = self._subscribers.version, self._named.version
        known = self._audiences.get(topic.number)
        if known is not None and known.versions == versions:
            return known
        name = topic.name
        subscribers = subscriptions = None
        if known is not None:
            subscribers = self._subscribers.update(
                known.subscribers, known.versions[0], name, lambda each: each.wants(name)
            )
            subscriptions = self._named.update(
                known.subscriptions, known.versions[1], name, lambda _: True
            )
        if subscribers is None:
            found = self._subscribers.match(name)
            subscribers = [each for each in found if each.names is None or each.wants(name)]
        if subscriptions is None:
            subscriptions = self._named.match(name)
        self._forget_audience(topic.number)
        audience = self._audiences[topic.number] = Audience(versions, subscribers, subscriptions)
        self._audience_entries += audience.entries
        while self._audience_entries > _AUDIENCE_ENTRIES and len(self._audiences) > 1:
            # The oldest one.
            self._forget_audience(next(iter(self._audiences)))
        return audience

    def _forget_audience(self, number: int) -> None:
        known = self._audiences.pop(number, None)
        if known is not None:
            self._audience_entries -= known.entries

    def use(self, topic: Topic) -> str:
        """How a topic without messages is used: by who names it, or has not settled what it had;
        "" if it is not. A pattern alone does not keep a topic: it finds the next one of the
        name."""
        if any(each.pattern == topic.name for each in self._subscribers.match(topic.name)):
            return "has subscribers"
        for each in self._named.match(topic.name):
            if each.definition.pattern == topic.name:
                return "has a named subscription"
            if each.stopped or each.memory.head() <= topic.reclaimed:
                return "has messages that a named subscription has not settled"
        return ""

    def remove_topic(self, topic: Topic) -> None:
        """A topic is removed: its log is not read any more."""
        self._forget_audience(topic.number)
        for subscriber in self._subscribers.match(topic.name):
            subscriber.note_removed(topic)
