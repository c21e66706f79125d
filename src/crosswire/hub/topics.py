"""Topics: to everybody who subscribed, through an index of patterns.

Index         patterns in a tree: a name finds its subscriptions without trying each
Subscriber    unnamed: gets messages at once and at most once, while it is attached
Subscription  named: a cursor that outlives its connections, shared by who uses its name
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Final, Generic, Literal, TypeVar

import msgspec

from crosswire.envelope import LARGEST_INTEGER, MICROSECONDS, Envelope
from crosswire.errors import RecordDamaged
from crosswire.hub.attachment import (
    Attachment,
    Delivery,
    DeliveryGap,
    DeliveryReceiver,
    Ended,
    Window,
)
from crosswire.hub.backlog import Backlog
from crosswire.hub.filters import Predicate
from crosswire.hub.floors import floor_of, save_floor
from crosswire.hub.items import Retry
from crosswire.hub.ledger import LedgerPeer
from crosswire.store.records import Count, reader

if TYPE_CHECKING:
    from crosswire.hub.hub import Hub
    from crosswire.store.contract import Page

__all__ = ["Definition", "Index", "Subscriber", "Subscription", "Topic", "TopicPolicy"]

_MARKS: Final = "mark"
_MARK_BYTES: Final = 4 << 20
_MARK_S: Final = 3600
_BACK_S: Final = 60
_PAGE: Final = 256

T = TypeVar("T")


class TopicPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """`ledger` is about topics that are not durable: a row a message, or one a delivery."""

    durable: bool = True
    retention_s: float = 7 * 24 * 3600.0
    retention_bytes: int = 10 << 30
    slow: Literal["lag", "disconnect"] = "lag"
    ledger: Literal["counts", "rows"] = "counts"


# ------------------------------------------------------------------------------------------ index


class _Node(Generic[T]):
    __slots__ = ("children", "here", "rest")

    def __init__(self) -> None:
        self.children: dict[str, _Node[T]] = {}
        self.here: list[T] = []
        self.rest: list[T] = []


class Index(Generic[T]):
    """Patterns as MQTT has them: `+` is one level, a final `#` is any number, its parent too.

    Neither stands for a first level that starts with `$`. `version` grows with every change.
    """

    def __init__(self) -> None:
        self.version = 0
        self._root: _Node[T] = _Node()

    def add(self, pattern: str, entry: T) -> None:
        node, in_rest = self._find(pattern)
        (node.rest if in_rest else node.here).append(entry)
        self.version += 1

    def remove(self, pattern: str, entry: T) -> None:
        path = [self._root]
        levels = pattern.split("/")
        in_rest = levels[-1] == "#"
        for level in levels[:-1] if in_rest else levels:
            path.append(path[-1].children[level])
        (path[-1].rest if in_rest else path[-1].here).remove(entry)
        steps = levels[: len(path) - 1]
        for parent, level in zip(reversed(path[:-1]), reversed(steps), strict=True):
            child = parent.children[level]
            if child.here or child.rest or child.children:
                break
            del parent.children[level]
        self.version += 1

    def __iter__(self) -> Iterator[T]:
        """Every entry, in no order that means anything."""
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            yield from node.here
            yield from node.rest
            nodes += node.children.values()

    def match(self, name: str) -> list[T]:
        """The entries of every pattern that the name fits."""
        found: list[T] = []
        levels = name.split("/")
        nodes = [self._root]
        for depth, level in enumerate(levels):
            hidden = depth == 0 and level.startswith("$")
            following = []
            for node in nodes:
                if not hidden:
                    found += node.rest
                    if "+" in node.children:
                        following.append(node.children["+"])
                if level in node.children:
                    following.append(node.children[level])
            nodes = following
        for node in nodes:
            found += node.here
            found += node.rest
        return found

    def _find(self, pattern: str) -> tuple[_Node[T], bool]:
        levels = pattern.split("/")
        in_rest = levels[-1] == "#"
        node = self._root
        for level in levels[:-1] if in_rest else levels:
            node = node.children.setdefault(level, _Node())
        return node, in_rest


# ------------------------------------------------------------------------------------------ topic


class _RetentionMark(msgspec.Struct, array_like=True, frozen=True):
    """Up to this message, exclusive: how old, and how many bytes came before."""

    id: Count
    time: Count
    bytes_before: Count


_encode = msgspec.msgpack.Encoder().encode
_read_mark: Callable[[bytes], _RetentionMark] = reader(_RetentionMark, "a mark of a topic")


class Topic:
    """A log, and who is interested in it, looked up anew only when subscriptions changed."""

    def __init__(self, hub: Hub, destination: str, policy: TopicPolicy) -> None:
        self.destination = destination
        self.name = destination.removeprefix("topic/")
        self.policy = policy
        self.number = hub.store.number(destination)
        self.reclaimed = floor_of(hub, self.number)
        self.published = 0
        self.subscribers: list[Subscriber] = []
        self.subscriptions: list[Subscription] = []
        self._hub = hub
        self._version = -1
        self._key = self.number.to_bytes(4)
        self._marks = self._load_marks()
        last = self._marks[-1] if self._marks else _RetentionMark(0, 0, 0)
        self._bytes = last.bytes_before
        pairs = zip(self._marks, self._marks[1:], strict=False)
        self._went_back = any(before.time > after.time for before, after in pairs)

    def _load_marks(self) -> list[_RetentionMark]:
        """Retention cuts at marks: one that does not fit the others is not used."""
        marks: list[_RetentionMark] = []
        for key, value in self._hub.store.load(_MARKS, self._key):
            try:
                mark = _read_mark(value)
                before = marks[-1] if marks else _RetentionMark(0, 0, 0)
                if (
                    mark.id != int.from_bytes(key[len(self._key) :])
                    # Times may go back: the clock may have been set.
                    or mark.bytes_before < before.bytes_before
                ):
                    raise RecordDamaged(f"a mark of {self.destination} does not fit")
            except RecordDamaged as error:
                self._hub.set_aside_state(_MARKS, key, value, error)
            else:
                marks.append(mark)
        return marks

    def refresh(self, subscribers: Index[Subscriber], subscriptions: Index[Subscription]) -> None:
        version = subscribers.version + subscriptions.version
        if version == self._version:
            return
        self._version = version
        self.subscribers = [each for each in subscribers.match(self.name) if each.wants(self.name)]
        self.subscriptions = subscriptions.match(self.name)

    def count(self, identifier: int, size: int, now_us: int) -> None:
        """A message was stored; now and then a mark tells retention where it could cut."""
        self.published += 1
        marks = self._marks
        if not marks or self._is_mark_due(self._bytes, now_us):
            self._went_back |= bool(marks) and now_us < marks[-1].time
            mark = _RetentionMark(identifier, now_us, self._bytes)
            marks.append(mark)
            self._hub.store.save(_MARKS, self._key + identifier.to_bytes(8), _encode(mark))
        self._bytes += size

    def _is_mark_due(self, size_bytes: int, now_us: int) -> bool:
        """So much or so long after the last mark, or because the clock was set back."""
        last = self._marks[-1]
        since_us = now_us - last.time
        return (
            size_bytes - last.bytes_before >= _MARK_BYTES
            or since_us >= _MARK_S * MICROSECONDS
            or since_us < -_BACK_S * MICROSECONDS
        )

    def count_run(self, first: int, sizes: Sequence[int], now_us: int) -> None:
        """`count` for many with ids in a row."""
        total, marks = sum(sizes), self._marks
        if marks and not self._is_mark_due(self._bytes + total, now_us):
            self.published += len(sizes)
            self._bytes += total
        else:
            for identifier, size in enumerate(sizes, first):
                self.count(identifier, size, now_us)

    def retain(self, now: float) -> None:
        """Let go of what is too old or too much, if the lake has it. Whole marks at a time."""
        oldest = int((self._hub.wall.age(now) - self.policy.retention_s) * MICROSECONDS)
        marks, times = self._marks, self._mark_times()
        cut = 0
        while cut + 1 < len(marks) and marks[cut + 1].id - 1 <= self._hub.feed.reclaim_limit:
            too_much = self._bytes - marks[cut].bytes_before > self.policy.retention_bytes
            if times[cut + 1] > oldest and not too_much:
                break
            cut += 1
        if cut:
            for mark in marks[:cut]:
                self._hub.store.drop(_MARKS, self._key + mark.id.to_bytes(8))
            del marks[:cut]
            self._hub.store.reclaim(self.number, self.reclaimed + 1, marks[0].id - 1)
            self.reclaimed = marks[0].id - 1
            save_floor(self._hub.store, self.number, self.reclaimed)
            self._hub.store.request(sync=False, urgent=False)

    def _mark_times(self) -> Sequence[int]:
        """How old each mark is at least: no older message has a later time, whatever it says."""
        times = [mark.time for mark in self._marks]
        if self._went_back:
            times = list(accumulate(reversed(times), min))[::-1]
        return times

    def before(self, time_us: int) -> int:
        """An id behind which everything is that came at `time_us` or later."""
        found = 0
        for mark in self._marks:
            if mark.time >= time_us:
                break
            found = mark.id - 1
        return found


# ------------------------------------------------------------------------------ unnamed subscriber


class Subscriber(Attachment):
    """Gets what is published while it is attached, at once and at most once.

    `settle` only says that there is room again. One that is too slow is sent away or, by policy,
    reads what it missed from the disk as soon as it can; what was never stored it has missed.
    """

    __slots__ = (
        "_gap_first",
        "_gap_last",
        "_gap_reported",
        "_hub",
        "_is_reading",
        "is_lagging",
        "missed",
        "names",
        "pattern",
        "position",
        "since_us",
        "slow",
    )

    def __init__(
        self,
        hub: Hub,
        pattern: str,
        receiver: DeliveryReceiver,
        *,
        peer: LedgerPeer,
        window: Window,
        matches: Predicate | None,
        slow: Literal["lag", "disconnect"] | None,
        names: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(pattern, receiver, peer=peer, window=window, matches=matches)
        self.names = names
        self.pattern = pattern.removeprefix("topic/")
        self.slow = slow
        self.is_lagging = False
        self.position = 0
        self.missed = 0
        self.since_us = 0
        self._hub = hub
        self._is_reading = False
        self._gap_first = 0
        self._gap_last = 0
        self._gap_reported = 0

    def wants(self, topic: str) -> bool:
        """Does its own choice, beyond the pattern, include the topic of this name?"""
        try:
            return self.names is None or self.names(topic)
        except Exception as error:
            self._hub.give_up(self, error)
            return False

    def takes(self, envelope: Envelope) -> bool:
        """Does its filter let this one pass?"""
        try:
            return self.matches is None or self.matches(envelope.properties)
        except Exception as error:
            self._hub.give_up(self, error)
            return False

    def renew(self) -> None:
        """Its choice of names has changed."""
        self._hub.subscriptions.choose_anew()

    def publish(self, topic: Topic, envelopes: list[Envelope], *, stored: bool) -> list[Envelope]:
        """Deliver these, as many as there is room for. Gives those that matched and went out."""
        if self.matches is not None:
            envelopes = [each for each in envelopes if self.takes(each)]
        if not envelopes or not self.is_open:
            return []
        room = 0 if self.is_lagging else max(self.window.free, 0)
        if room < len(envelopes):
            self._fall_behind(topic, envelopes[room:], stored=stored)
            envelopes = envelopes[:room]
            if not envelopes or not self.is_open:
                return []
        self.window.free -= len(envelopes)
        self._hub.deliver(self, [Delivery(each, 1) for each in envelopes])
        return envelopes

    def _fall_behind(self, topic: Topic, missed: list[Envelope], *, stored: bool) -> None:
        if (self.slow or topic.policy.slow) == "disconnect":
            self.let_go()
            self._hub.subscriptions.leave(self)
            self._hub.notice(self, Ended("too slow"))
            return
        if not stored:
            self._gap_first = self._gap_first or missed[0].id
            self._gap_last = missed[-1].id
            return
        if not self.is_lagging:
            self.is_lagging = True
            self.position = missed[0].id - 1
            self._hub.subscriptions.lagging[self] = None
        self.missed = max(self.missed, missed[-1].id)

    def start_after(self, position: int, since_us: int) -> None:
        """Begin with what is stored already."""
        self.is_lagging = True
        self.position = position
        self.since_us = since_us
        self.missed = self._hub.store.newest_id
        self._hub.subscriptions.lagging[self] = None

    def _catch_up(self) -> None:
        """Read on from the disk, as far as the window and what is committed allow."""
        upto = min(self.missed, self._hub.committed_id)
        while self.is_lagging and self.is_open and self.window.free > 0 and not self._is_reading:
            if self.position >= upto:
                break
            self._is_reading = True
            self._report_gap()
            try:
                self._hub.store.read(
                    self._hub.subscriptions.numbers(self.pattern),
                    after=self.position,
                    upto=upto,
                    count=min(self.window.free, _PAGE),
                    done=self._read,
                )
            except Exception:
                self._is_reading = False
                self._hub.try_again(self)
                raise
        if self.is_lagging and self.position >= self.missed:
            self.is_lagging = False
            self._hub.subscriptions.lagging.pop(self, None)

    def _read(self, page: Page) -> None:
        self._is_reading = False
        deliveries = []
        for number, identifier, record in page.records:
            try:
                envelope = self._hub.decode(number, identifier, record)
            except RecordDamaged as error:
                self._hub.set_aside(number, identifier, record, error)
                continue
            if (
                envelope.time >= self.since_us
                and self.takes(envelope)
                and self.wants(envelope.destination.removeprefix("topic/"))
            ):
                deliveries.append(Delivery(envelope, 1))
        self.position = page.last
        if deliveries:
            self.window.free -= len(deliveries)
            self._hub.deliver(self, deliveries)

    def _report_gap(self) -> None:
        """Where retention overtook it, it is told what it will never see."""
        seen = max(self.position, self._gap_reported)
        reclaimed = self._hub.subscriptions.reclaimed(self.pattern)
        if reclaimed > seen:
            self._gap_reported = reclaimed
            self._hub.notice(self, DeliveryGap(seen + 1, reclaimed, "retention"))

    def settle(self, ids: Collection[int], now: float) -> int:
        if not self.window.granted:
            self.window.grant(len(ids), now)
        return len(ids)

    def refuse(
        self,
        ids: Collection[int],
        now: float,
        *,
        cause: str = "",  # noqa: ARG002  at most once: there is no second time
        delay_s: float | None = None,  # noqa: ARG002
        final: bool | None = None,  # noqa: ARG002
    ) -> int:
        return self.settle(ids, now)

    def extend(self, ids: Collection[int], now: float, lease_s: float) -> int:  # noqa: ARG002
        return 0

    def wake(self, now: float) -> None:
        if self.is_lagging or self._gap_last:
            self._hub.touch(self)
            self._hub.pump(now)

    def dispatch(self, now: float) -> None:  # noqa: ARG002
        if self._gap_last and self.window.free > 0:
            gap = DeliveryGap(self._gap_first, self._gap_last, "too slow")
            self._gap_first = self._gap_last = 0
            self._hub.notice(self, gap)
        if self.is_lagging:
            self._catch_up()

    def close(self, now: float) -> None:  # noqa: ARG002
        if self.is_open:
            self.let_go()
            self._hub.subscriptions.leave(self)


# ------------------------------------------------------------------------------ named subscription


class Definition(msgspec.Struct, array_like=True, frozen=True):
    """What is kept of a named subscription beside its cursor."""

    name: str
    pattern: str
    filter: str
    since_us: Annotated[int, msgspec.Meta(le=LARGEST_INTEGER)]
    created_us: Count


class Subscription(Backlog):
    """Gets only what is committed; refusals are tried again, then dead letters, as in queues."""

    is_choosy = True

    def __init__(
        self,
        hub: Hub,
        definition: Definition,
        matches: Predicate | None,
        *,
        retry: Retry,
        window_messages: int = 1024,
        window_bytes: int = 16 << 20,
    ) -> None:
        super().__init__(
            hub,
            f"topic/{definition.pattern}",
            b"s" + definition.name.encode(),
            retry=retry,
            window_messages=window_messages,
            window_bytes=window_bytes,
        )
        self.definition = definition
        self.matches = matches
        self.numbers = hub.subscriptions.numbers(definition.pattern)
        self._skipped = 0
        self._gap_seen = 0
        self._gap: DeliveryGap | None = None

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def title(self) -> str:
        return f"subscription {self.definition.name!r} to {self.destination}"

    @property
    def dead_letters(self) -> str:
        return f"queue/{self.definition.name}/dead"

    def wants(self, envelope: Envelope) -> bool:
        if envelope.time >= self.definition.since_us and (
            self.matches is None or self.matches(envelope.properties)
        ):
            return True
        self._skipped += 1
        if self._skipped >= 10_000:
            self._skipped = 0
            self._hub.changed(self)
            self.snapshot()
        return False

    def forget(self) -> None:
        """Remove every trace of its cursor."""
        self._hub.forget(self)
        self.cursor.forget()

    def add_topic(self, number: int) -> None:
        if number not in self.numbers:
            self.numbers.append(number)

    def begin(self, position: int) -> None:
        """A new one starts behind this id."""
        self.loaded = self.cursor.upto = position
        # What is on its way to the disk right now belongs to it, and comes from there.
        self.visible = max(self._hub.store.newest_id, position)
        self.snapshot()
        self._fill()
        self._hub.changed(self)
        self._hub.touch(self)

    def _fill(self) -> None:
        if self.loaded < self.visible:
            self._look_for_gap()
        super()._fill()

    def _look_for_gap(self) -> None:
        """Retention may have overtaken it."""
        seen = max(self.loaded, self._gap_seen)
        reclaimed = self._hub.subscriptions.reclaimed(self.definition.pattern)
        if reclaimed > seen:
            self._gap_seen = reclaimed
            first = seen + 1 if self._gap is None else self._gap.first
            self._gap = DeliveryGap(first, reclaimed, "retention")

    def report_gap(self) -> None:
        """Whoever consumes is told what is gone; if nobody does, whoever comes next."""
        if self._gap is not None and self.consumers:
            gap, self._gap = self._gap, None
            for consumer in list(self.consumers):
                self._hub.notice(consumer, gap)
