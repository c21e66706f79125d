"""Messages that wait for somebody to settle them: what queues and named subscriptions share.

tail      on disk only, after `loaded`
ready     in memory, up to the policy's window, in order
held      with a consumer, until settled, refused or returned
delayed   refused, until their time has come

Memory is bounded twice by `window_bytes`: what is ready or delayed, and what consumers hold
together. Each bound lets one message pass that is larger than what is left: the tail is read while
less than half of the window is taken, so always when nothing is ready or delayed, and a consumer
that holds nothing gets a message whatever the others hold. So the memory of a backlog is at most
twice `window_bytes`, and a message for each consumer and one more. Nobody who keeps messages keeps
others from getting theirs; he only makes them take one at a time.

Liveness: between two calls into the hub, nothing that could move waits for a call that may never
come.

- If there is room in memory and a committed message in the tail, a read is under way.
- If a message is ready and a consumer that takes it has room, the backlog is touched: it is
  dispatched before the hub's pump ends. To have room is to have a free window and, while consumers
  hold `window_bytes` together, to hold nothing.
- If the tail is not committed, the commit touches the backlog.
- If what is delayed, leased or at the head with an expiry could make room, a timer is set.

Ready messages that the filters of all who have room pass over are in nobody's way but their own:
they fill the memory until somebody takes them or they expire.

Every transition that could make one of the conditions true ends in one of three places: `touch`
where a message becomes ready, `has_room` where a window gets free, and `_check` where bytes or
messages leave the memory, the tail grows or the bounds change. Whoever is called from outside
pumps the hub afterwards.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Final

from crosswire.commitlog.contract import AcceptedMessages
from crosswire.envelope import MICROSECONDS, Envelope
from crosswire.hub.attachment import Choice, Consumer, Delivery, DeliveryReceiver, Item, Window
from crosswire.hub.core import Core, SendEnvelope
from crosswire.hub.cursor import Cursor, FailedDelivery, UnsettledMessage
from crosswire.hub.dead import bury
from crosswire.hub.filters import Predicate
from crosswire.hub.ledger import LedgerPeer, Step
from crosswire.hub.policies import Retry
from crosswire.store.contract import Page

__all__ = ["Backlog"]

_PAGE: Final = 256
_PAGE_BYTES: Final = 1 << 20
_RECLAIM_AFTER: Final = 65_536


class Backlog(ABC):
    """One cursor over one or more logs, and the consumers that share it."""

    def __init__(
        self,
        core: Core,
        destination: str,
        key: bytes,
        *,
        send: SendEnvelope,
        retry: Retry,
        window_messages: int,
        window_bytes: int,
    ) -> None:
        self.destination = destination
        self.retry = retry
        self.numbers: list[int] = []
        self.length = 0
        self.size_bytes = 0
        self.consumers: list[Consumer] = []
        self.cursor = Cursor(core.store, key)
        self.stopped = ""
        """Why nothing is delivered: nobody knows what is settled. What arrives is kept on disk."""
        self.loaded = self.cursor.upto
        self.visible = 0
        self.in_memory_bytes = 0
        self._core = core
        self._store = core.store
        self._commits = core.commits
        self._loop = core.loop
        self._ledger = core.ledger
        self._wall = core.wall
        self._watchers = core.watchers
        self._send = send
        self._window_messages = window_messages
        self._window_bytes = window_bytes
        self._items: dict[int, Item] = {}
        self._ready: deque[Item] = deque()
        self._delayed: list[tuple[float, int, Item]] = []
        self._leases: list[tuple[float, int, int]] = []
        self._eligible: list[tuple[int, int, int, Consumer]] = []
        self._uses = 0
        self._filtered = 0
        self._held_bytes = 0
        self._is_held_up = False
        self._reading = False
        self._wake_at = 0.0
        self._reclaimed = 0
        self._reclaimed_between = 0
        self._settled_since = 0

    def stop(self, reason: str) -> None:
        """Its cursor can't be used: nothing is delivered, and nothing of it is written, until it
        is repaired."""
        self.stopped = reason
        self._core.damage.report_stopped(self.title, reason)

    # Coming in.

    is_choosy: ClassVar[bool] = False
    """Does `wants` ever say no?"""

    def wants(self, _envelope: Envelope) -> bool:
        """Is this message one of ours?"""
        return True

    @property
    @abstractmethod
    def dead_letters(self) -> str:
        """The queue of those that nobody could take."""

    @property
    def title(self) -> str:
        """What reports call it."""
        return self.destination

    def has_space_for(self, count: int) -> bool:
        """Could this many be taken at once?"""
        return self.takes_at_once and len(self._ready) + count <= self._window_messages

    @property
    def takes_at_once(self) -> bool:
        """Is there room in memory, and nothing on disk that comes first?"""
        return (
            not self.stopped
            and self.loaded >= self.visible
            and len(self._ready) < self._window_messages
            and self._waiting_bytes < self._window_bytes
        )

    @property
    def _waiting_bytes(self) -> int:
        """What is in memory and with nobody: ready or delayed."""
        return self.in_memory_bytes - self._held_bytes

    def release(self, runs: Iterable[AcceptedMessages], now: float) -> None:
        """These are committed: they may be delivered."""
        self.arrive(runs, now)

    def withdraw(self, runs: Iterable[AcceptedMessages]) -> None:
        """These could not be written: they were never accepted."""

    def arrive(self, runs: Iterable[AcceptedMessages], now: float) -> None:
        """These are committed, or need not be; in order of ids."""
        if self.stopped:
            return
        for run in runs:
            if not self.has_space_for(1):
                self.visible = run.envelopes[-1].id
            elif (
                self.has_space_for(len(run.sizes))
                and self._waiting_bytes + sum(run.sizes) <= self._window_bytes
            ):
                self._take_all(run)
            else:
                self._take_some(run)
        self._schedule_expiry(now)
        self._check()
        self._loop.touch(self)

    def _take_all(self, run: AcceptedMessages) -> None:
        """There is room for these, and nothing on disk comes before them."""
        items, ready, number = self._items, self._ready, run.number
        for envelope, size in zip(run.envelopes, run.sizes, strict=True):
            identifier = envelope.id
            if self.is_choosy:
                self.loaded = self.visible = identifier
                if not self.wants(envelope):
                    continue
            items[identifier] = item = Item(identifier, number, envelope, size)
            self.in_memory_bytes += size
            ready.append(item)
        self.loaded = self.visible = run.envelopes[-1].id

    def _take_some(self, run: AcceptedMessages) -> None:
        """As many as there is room for: the rest is on disk."""
        for index, envelope in enumerate(run.envelopes):
            if self.takes_at_once:
                self._take_all(run.part(index, index + 1))
            else:
                self.visible = envelope.id

    def _take(self, item: Item) -> None:
        self._items[item.id] = item
        self.in_memory_bytes += item.size
        self._ready.append(item)

    def _check(self) -> None:
        """Decide whether something has to be under way; see the module's liveness rule.

        To be called by whatever may have made room, moved the tail's end or changed a bound. What
        is called from outside pumps the hub afterwards.
        """
        if self.loaded < self.visible:
            if self.visible > self._commits.committed_id:
                self._commits.await_commit(self)
            if self._needs_read():
                self._loop.touch(self)
        if self._is_held_up and self._ready:
            self._loop.touch(self)

    def _needs_read(self) -> bool:
        """Is there room for some of the tail, and may it be read?

        Below half of the window, so that pages are large. At least one message always has room: a
        window of one has no half, and a message may be larger than the window.
        """
        return (
            self.loaded < self.visible
            and not self._reading
            and self.loaded < self._commits.committed_id
            and (not self._ready or len(self._ready) < self._window_messages // 2)
            and (2 * self._waiting_bytes < self._window_bytes or not self._waiting_bytes)
        )

    def _fill(self) -> None:
        """Bring in some of the tail when there is room for it."""
        if self.stopped:
            return
        while self._needs_read():
            self._reading = True
            try:
                self._store.read(
                    self.numbers,
                    after=self.loaded,
                    upto=min(self.visible, self._commits.committed_id),
                    count=max(min(_PAGE, self._window_messages - len(self._ready)), 1),
                    size_bytes=max(min(_PAGE_BYTES, self._window_bytes - self._waiting_bytes), 1),
                    done=self._filled,
                )
            except Exception:
                # Not read, and nobody else would ask for it again.
                self._reading = False
                self._core.read_again(self)
                raise

    def _filled(self, page: Page) -> None:
        self._reading = False
        later = self.cursor.later
        attempts = self.cursor.refused_later
        for number, identifier, record in page.records:
            if identifier in later:
                later.discard(identifier)
                continue
            # A purge while the page was on its way has moved `loaded` past it.
            if identifier in self._items or identifier <= self.loaded:
                continue
            envelope = self._decode(number, identifier, record)
            if envelope is not None and self.wants(envelope):
                item = Item(identifier, number, envelope, len(record))
                if attempts:
                    item.attempts = attempts.pop(identifier, [])
                    item.delivered = len(item.attempts)
                self._take(item)
        self.loaded = max(self.loaded, page.last)
        if self.loaded >= self.visible:
            self._count_exactly()
        self._loop.touch(self)

    def _count_exactly(self) -> None:
        """Everything is in memory, so the counters can be checked; damage makes them drift."""

    def _decode(self, number: int, identifier: int, record: bytes) -> Envelope | None:
        envelope = self._core.damage.decode_or_set_aside(number, identifier, record)
        if envelope is None:
            self.cursor.settle(identifier)
        return envelope

    def recover(self, now: float) -> None:
        """Take up what was left unsettled: first what had been given out, then the tail."""
        if self.cursor.damage:
            self.stop(str(self.cursor.damage[0]))
        if self.stopped:
            return
        by_number: dict[int, list[UnsettledMessage]] = {}
        for opened in self.cursor.open:
            by_number.setdefault(opened.number, []).append(opened)
        found: list[Item] = []
        for number, openeds in by_number.items():
            records = self._store.fetch(number, [each.id for each in openeds])
            for opened, record in zip(openeds, records, strict=True):
                if record is None:
                    floor = self._core.floors.of(number)
                    self._core.damage.report_missing(number, opened.id, floor)
                    self.cursor.settle(opened.id)
                    continue
                envelope = self._decode(number, opened.id, record)
                if envelope is not None:
                    item = Item(opened.id, number, envelope, len(record))
                    item.attempts = opened.attempts
                    item.delivered = len(opened.attempts)
                    found.append(item)
        for item in sorted(found, key=lambda each: each.id):
            self._take(item)
        self.cursor.open = []
        self.visible = max((self._store.last_id(number) for number in self.numbers), default=0)
        self.visible = max(self.visible, self.loaded)
        self._fill()
        if self.loaded >= self.visible:
            # What was visible before it was written, and never was, is still in the counters.
            self._count_exactly()
        self._schedule_expiry(now)

    # Consumers.

    def attach(
        self,
        receiver: DeliveryReceiver,
        now: float,
        *,
        peer: LedgerPeer,
        window: Window,
        weight: int,
        matches: Predicate | None,
        lease_s: float | None,
        holding: Sequence[int],
        choice: Choice | None = None,
    ) -> Consumer:
        consumer = Consumer(
            self,
            receiver,
            peer=peer,
            window=window,
            weight=weight,
            matches=matches,
            lease_s=lease_s if lease_s is not None else self.retry.lease_s,
            choice=choice,
        )
        self.consumers.append(consumer)
        self._filtered += consumer.is_choosy
        if holding:
            self._hold(consumer, holding, now)
        self.has_room(consumer, now)
        return consumer

    def _hold(self, consumer: Consumer, holding: Sequence[int], now: float) -> None:
        """It has these already, from before the hub was restarted: nobody else may get them."""
        wanted = set(holding)
        while self.loaded < self.visible and self.loaded < max(wanted):
            before = self.loaded
            self._store.read(
                self.numbers, after=self.loaded, upto=self.visible, count=_PAGE, done=self._filled
            )
            if self.loaded == before:
                break
        self._ready = deque(item for item in self._ready if item.id not in wanted)
        for identifier in sorted(wanted):
            item = self._items.get(identifier)
            if item is not None and item.consumer is None:
                self._give(item, consumer, now)
                consumer.window.free -= 1

    def has_room(self, consumer: Consumer, now: float) -> None:
        if consumer.is_open and not consumer.is_listed and consumer.window.free > 0:
            self._list(consumer)
            self._loop.touch(self)
            self._loop.pump(now)

    def _list(self, consumer: Consumer) -> None:
        """It may be given something: it has been offered all that is ready, or will be soon."""
        consumer.is_listed = True
        heapq.heappush(
            self._eligible, (-consumer.weight, consumer.last_used, consumer.number, consumer)
        )

    def give_up(self, consumer: Consumer, error: Exception) -> None:
        """What it chooses messages by raised."""
        self._loop.give_up(consumer, error)

    def detach(self, consumer: Consumer, now: float) -> None:
        self.consumers.remove(consumer)
        self._filtered -= consumer.is_choosy
        returned = sorted(consumer.held.values(), key=lambda item: item.id)
        consumer.held = {}
        if returned:
            self._return(consumer, returned, "the consumer left", now)
        if not consumer.window.granted and returned:
            consumer.window.free += len(returned)
            consumer.window.wake(now)
        if len(self._eligible) > 2 * len(self.consumers) + 16:
            # Who left is dropped when it is its turn, which on an idle queue never comes.
            self._eligible = [entry for entry in self._eligible if entry[3].is_open]
            heapq.heapify(self._eligible)
        self._loop.touch(self)
        self._loop.pump(now)

    # Handing out.

    def dispatch(self, now: float) -> None:
        """Hand out what is ready to whom has room: the highest weight first, then who waited
        longest. Each consumer is told once."""
        self._fill()
        self._is_held_up = False
        given: dict[Consumer, list[Delivery]] = {}
        passed: list[Consumer] = []
        now_us = int(now * MICROSECONDS)
        try:
            while self._ready and self._eligible:
                consumer = heapq.heappop(self._eligible)[3]
                consumer.is_listed = False
                if not consumer.is_open or consumer.window.free <= 0:
                    continue
                if consumer.held and self._held_bytes >= self._window_bytes:
                    self._is_held_up = True
                    passed.append(consumer)
                    continue
                alone = not self._eligible
                before = consumer.window.free
                if self._filtered:
                    self._give_matching(consumer, given, now, now_us)
                else:
                    self._give_some(consumer, before if alone else 1, given, now, now_us)
                if consumer.window.free == before and self._filtered:
                    passed.append(consumer)
                elif consumer.window.free > 0:
                    self._list(consumer)
                if self.loaded < self.visible:
                    self._fill()
        finally:
            # Also when the disk can't be read: what was given is theirs, and they must get it.
            # Who was passed over stays listed: what becomes ready later touches the backlog, and so
            # does what was read above, after its turn.
            for consumer in passed:
                self._list(consumer)
            if self._ready:
                is_full_of_others = bool(self._filtered and passed) and self.loaded < self.visible
                self._schedule_expiry(now, anywhere=is_full_of_others)
            for consumer, deliveries in given.items():
                self._hand_over(consumer, deliveries, now)

    def _give_some(
        self,
        consumer: Consumer,
        count: int,
        given: dict[Consumer, list[Delivery]],
        now: float,
        now_us: int,
    ) -> None:
        ready = self._ready
        deliveries = given.setdefault(consumer, [])
        self._uses += 1
        consumer.last_used = self._uses
        held, free, lease_s = consumer.held, consumer.window.free, consumer.lease_s
        held_bytes, most_bytes = self._held_bytes, self._window_bytes
        while ready and count and (held_bytes < most_bytes or not held):
            item = ready.popleft()
            envelope = item.envelope
            if envelope.expires and self._wall.is_expired(envelope, now_us):
                self._expire(item, now_us)
                continue
            item.delivered += 1
            item.consumer = consumer
            held[item.id] = item
            held_bytes += item.size
            if lease_s is not None:
                self._lease(item, now + lease_s)
            deliveries.append(Delivery(envelope, item.delivered))
            count -= 1
            free -= 1
        consumer.window.free = free
        self._held_bytes = held_bytes

    def _give_matching(
        self, consumer: Consumer, given: dict[Consumer, list[Delivery]], now: float, now_us: int
    ) -> None:
        """Its filter may pass over messages: they stay where they are, for others."""
        has_expired = False
        for index, item in enumerate(self._ready):
            if self._is_expired(item, now_us):
                has_expired = True
            elif consumer.takes(item.envelope):
                del self._ready[index]
                self._uses += 1
                consumer.last_used = self._uses
                self._give(item, consumer, now)
                given.setdefault(consumer, []).append(Delivery(item.envelope, item.delivered))
                consumer.window.free -= 1
                break
        if has_expired:
            self._expire_all(now_us)

    def _give(self, item: Item, consumer: Consumer, now: float) -> None:
        item.delivered += 1
        item.consumer = consumer
        consumer.held[item.id] = item
        self._held_bytes += item.size
        if consumer.lease_s is not None:
            self._lease(item, now + consumer.lease_s)

    def _hand_over(self, consumer: Consumer, deliveries: list[Delivery], now: float) -> None:
        if not deliveries:
            return
        attempts = {each.attempt for each in deliveries}
        for attempt in sorted(attempts):
            # A run for each attempt: nearly always one.
            ids = [
                each.envelope.id
                for each in deliveries
                if len(attempts) == 1 or each.attempt == attempt
            ]
            self._note(Step.DELIVERED, now, ids, peer=consumer.peer, attempt=attempt)
        self._commits.request(sync=False, urgent=False)
        self._loop.deliver(consumer, deliveries)

    # What consumers say.

    def settle(self, consumer: Consumer, ids: Iterable[int], now: float) -> int:
        held, items = consumer.held, self._items
        settled: list[int] = []
        size = 0
        for identifier in ids:
            item = held.pop(identifier, None)
            if item is not None:
                del items[identifier]
                size += item.size
                settled.append(identifier)
        if settled:
            self._held_bytes -= size
            self._let_go(settled, size)
            self._note(Step.SETTLED, now, settled, peer=consumer.peer)
            self._commits.changed(self)
            if self._watchers.by_id:
                self._watchers.notify(settled)
            self._make_room(consumer, len(settled), now)
            self._check()
            self._loop.pump(now)
        return len(settled)

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
        count = 0
        for identifier in ids:
            item = consumer.held.pop(identifier, None)
            if item is not None:
                count += 1
                self._fail(
                    item, consumer, Step.REFUSED, cause or "refused", now, delay_s, final=final
                )
        if count:
            self._commits.changed(self)
            self._make_room(consumer, count, now)
            self._check()
            self._loop.pump(now)
        return count

    def extend(self, consumer: Consumer, ids: Iterable[int], now: float, lease_s: float) -> int:
        items = [consumer.held[each] for each in ids if each in consumer.held]
        for item in items:
            self._lease(item, now + lease_s)
        return len(items)

    def _make_room(self, consumer: Consumer, count: int, now: float) -> None:
        if not consumer.window.granted:
            consumer.window.free += count
            consumer.window.wake(now)

    def _fail(
        self,
        item: Item,
        consumer: Consumer,
        step: Step,
        cause: str,
        now: float,
        delay_s: float | None,
        *,
        final: bool | None = None,
    ) -> None:
        """A delivery ended badly: later again, at once again, or never again."""
        now_us = int(now * MICROSECONDS)
        item.consumer = None
        self._held_bytes -= item.size
        time_us = self._wall.stamp_us(now_us)
        item.attempts = [*item.attempts, FailedDelivery(time_us, consumer.peer.connection, cause)]
        self._note(step, now, [item.id], peer=consumer.peer, attempt=item.delivered, detail=cause)
        if final is None:
            final = 0 < self.retry.max_attempts <= item.delivered
        if final:
            self._bury(item, cause, now)
            return
        self.cursor.refuse(item.number, item.id, item.attempts)
        if delay_s is None:
            delay_s = self.retry.delay_s(item.delivered, self._core.chance())
        if delay_s <= 0:
            self._ready.appendleft(item)
            self._loop.touch(self)
            return
        item.due = now + delay_s
        heapq.heappush(self._delayed, (item.due, item.id, item))
        self._wake(item.due)

    def _return(self, consumer: Consumer, items: list[Item], cause: str, now: float) -> None:
        """Back to the front, in their old order, at once."""
        for item in reversed(items):
            self._fail(item, consumer, Step.RETURNED, cause, now, 0.0)
        self._commits.changed(self)

    def _bury(self, item: Item, cause: str, now: float) -> None:
        """Move it to the dead letters, and settle it here in the same group."""
        self._note(Step.DEAD, now, [item.id], detail=cause)
        self._send(bury(item.envelope, self.dead_letters, cause, item.attempts), now)
        if self._watchers.by_id:
            self._watchers.notify([item.id], cause)
        self._forget(item)

    def _forget(self, item: Item) -> None:
        del self._items[item.id]
        self._let_go((item.id,), item.size)

    def _let_go(self, ids: Sequence[int], size: int) -> None:
        """These are settled, and in memory no more; `size` is what they took together."""
        self.in_memory_bytes -= size
        self.cursor.settle(*ids)
        self._settled_since += len(ids)
        self._uncount(len(ids), size)

    def _uncount(self, count: int, size: int) -> None:
        """So many messages less, of this size together."""

    def _expire(self, item: Item, now_us: int) -> None:
        self._forget(item)
        self._ledger.note(Step.EXPIRED, now_us, item.envelope.destination, [item.id])
        self._commits.changed(self)
        if self._watchers.by_id:
            self._watchers.notify([item.id], "expired")

    def _expire_all(self, now_us: int) -> None:
        """Those too that are not at the head: messages that filters pass over keep them there."""
        expired = [item for item in self._ready if self._is_expired(item, now_us)]
        if expired:
            gone = {item.id for item in expired}
            self._ready = deque(item for item in self._ready if item.id not in gone)
            for item in expired:
                self._expire(item, now_us)

    def browse(self, after: int, count: int) -> list[Envelope]:
        """What is not settled, behind an id, wherever it is; without touching it."""
        found: list[Envelope] = []
        after = max(after, self.head() - 1)

        def look(page: Page) -> None:
            nonlocal after
            for number, identifier, record in page.records:
                if identifier in self._items:
                    found.append(self._items[identifier].envelope)
                elif identifier > self.loaded and identifier not in self.cursor.later:
                    envelope = self._decode(number, identifier, record)
                    if envelope is not None and self.wants(envelope):
                        found.append(envelope)
            after = page.last

        while len(found) < count and after < self.visible:
            self._store.read(self.numbers, after=after, upto=self.visible, count=_PAGE, done=look)
        return found[:count]

    def remove(self, ids: Iterable[int], step: Step, now: float, *, detail: str = "") -> list[int]:
        """Settle these if nobody holds them, on disk or in memory; gives those that were there."""
        gone: set[int] = set()
        for identifier in ids:
            item = self._items.get(identifier)
            if item is not None and item.consumer is None:
                gone.add(identifier)
                self._forget(item)
            elif item is None and self._remove_from_tail(identifier):
                gone.add(identifier)
        if gone:
            self._ready = deque(item for item in self._ready if item.id not in gone)
            self._delayed = [entry for entry in self._delayed if entry[1] not in gone]
            heapq.heapify(self._delayed)
            self._note(step, now, sorted(gone), detail=detail)
            self._commits.changed(self)
            self._schedule_expiry(now)
            self._check()
            self._loop.pump(now)
        return sorted(gone)

    def _remove_from_tail(self, identifier: int) -> bool:
        if not self.loaded < identifier <= self.visible or identifier in self.cursor.later:
            return False
        for number in self.numbers:
            record = self._store.fetch(number, [identifier])[0]
            if record is not None:
                self.cursor.settle(identifier)
                self.cursor.later.add(identifier)
                self._uncount(1, len(record))
                return True
        return False

    def purge(self, now: float) -> int:
        """Let everything go that nobody holds; gives how much of it was in memory."""
        gone = [item for item in self._items.values() if item.consumer is None]
        for item in gone:
            self._forget(item)
        self._ready.clear()
        self._delayed.clear()
        self.loaded = self.visible
        self.cursor.later.clear()
        self._count_exactly()
        self._note(Step.DROPPED, now, [item.id for item in gone], detail="purged")
        self.snapshot()
        self._commits.changed(self)
        return len(gone)

    def exchange(self, envelope: Envelope, record: bytes) -> None:
        """Put another envelope in the place of the one with its id."""
        store, number = self._store, self.numbers[0]
        item = self._items.get(envelope.id)
        if item is not None:
            grown = len(record) - item.size
            self.in_memory_bytes += grown
            if item.consumer is not None:
                self._held_bytes += grown
            item.envelope, item.size = envelope, len(record)
            self._uncount(0, -grown)
        else:
            stored = store.fetch(number, [envelope.id])[0]
            if stored is not None:
                self._uncount(0, len(stored) - len(record))
        store.retain(number, envelope.id, record)
        self._commits.request()
        # A filter may take what it has become, and a smaller one makes room.
        self._check()
        self._loop.touch(self)
        self._loop.pump(self._loop.now)

    def drop_oldest(self, is_too_full: Callable[[], bool], now: float) -> None:
        """Let the oldest go that nobody holds, as long as this says so."""
        gone: list[int] = []
        try:
            while is_too_full():
                item = self._take_oldest()
                if item is None:
                    break
                self._forget(item)
                gone.append(item.id)
        finally:
            # Also when the disk can't be read: those are gone.
            if gone:
                self._note(Step.DROPPED, now, gone, detail="the queue is full")
                self._commits.changed(self)
                self._schedule_expiry(now)
                self._check()

    def _take_oldest(self) -> Item | None:
        """The oldest of those with nobody, out of what is ready or delayed."""
        self._fill()
        if self._ready:
            return self._ready.popleft()
        if not self._delayed:
            return None
        # What is delayed may take all the memory that the tail would be read into.
        entry = min(self._delayed, key=lambda each: each[1])
        self._delayed.remove(entry)
        heapq.heapify(self._delayed)
        return entry[2]

    def _note(
        self,
        step: Step,
        now: float,
        ids: Iterable[int],
        *,
        peer: LedgerPeer | None = None,
        attempt: int = 0,
        detail: str = "",
    ) -> None:
        self._ledger.note(
            step,
            int(now * MICROSECONDS),
            self.destination,
            ids,
            peer=peer or LedgerPeer(),
            attempt=attempt,
            detail=detail,
        )

    # Time.

    def _lease(self, item: Item, due: float) -> None:
        item.due = due
        heapq.heappush(self._leases, (due, item.id, item.delivered))
        if len(self._leases) > 1024 + 2 * len(self._items):
            self._prune_leases()
        self._wake(due)

    def _prune_leases(self) -> None:
        """Most leases end with a settlement, long before their time."""
        items = self._items
        self._leases = [
            entry for entry in self._leases if entry[1] in items and items[entry[1]].due == entry[0]
        ]
        heapq.heapify(self._leases)

    def _wake(self, due: float) -> None:
        if not self._wake_at or due < self._wake_at:
            self._wake_at = due
            # Called again if it raises: what waits here must not depend on what comes later.
            self._core.timers.at_least(self, due, self._on_time)

    def _is_expired(self, item: Item, now_us: int) -> bool:
        return item.envelope.expires > 0 and self._wall.is_expired(item.envelope, now_us)

    def _schedule_expiry(self, now: float, *, anywhere: bool = False) -> None:
        """Expiry is looked at where it matters: at the head, which is the oldest.

        `anywhere` is for a memory full of what filters pass over: whatever expires makes room.
        """
        if not self._ready:
            return
        items = self._ready if anywhere else (self._ready[0],)
        expiries = (self._wall.expiry(each.envelope) for each in items if each.envelope.expires)
        due = min(expiries, default=None)
        if due is not None:
            self._wake(max(due, now))

    def _on_time(self, now: float) -> None:
        self._wake_at = 0.0
        now_us = int(now * MICROSECONDS)
        while self._delayed and self._delayed[0][0] <= now:
            item = heapq.heappop(self._delayed)[2]
            item.due = 0.0
            self._ready.appendleft(item)
            self._loop.touch(self)
        while self._leases and self._leases[0][0] <= now:
            due, identifier, attempt = heapq.heappop(self._leases)
            found = self._items.get(identifier)
            if found is None or found.consumer is None:
                continue
            if found.due == due and found.delivered == attempt:
                consumer = found.consumer
                del consumer.held[identifier]
                self._fail(found, consumer, Step.RETURNED, "the lease ran out", now, None)
                self._commits.changed(self)
                self._make_room(consumer, 1, now)
        while self._ready and self._is_expired(self._ready[0], now_us):
            self._expire(self._ready.popleft(), now_us)
            self._fill()
        if self._filtered:
            self._expire_all(now_us)
        if self._delayed:
            self._wake(self._delayed[0][0])
        if self._leases:
            self._wake(self._leases[0][0])
        self._schedule_expiry(now)
        self._check()
        # A timer that was set for what is gone ends here too: whatever is next to expire among
        # those that filters pass over is looked for by the dispatch.
        self._loop.touch(self)
        self._loop.pump(now)

    # The disk.

    def write(self) -> None:
        """Before a group is written: what was settled and refused since the last."""
        if self.stopped:
            self._write_counters()
            return
        cursor = self.cursor
        if cursor.due_for_snapshot(len(self._items)):
            cursor.write_snapshot(self._snapshot_upto(), self._opened())
        else:
            cursor.write_changes(self.head())
        self._write_counters()
        if self._settled_since >= _RECLAIM_AFTER:
            self._settled_since = 0
            self.reclaim()

    def snapshot(self) -> None:
        """Write down the whole position, as a new subscription and a clean stop do."""
        if self.stopped:
            return
        self.cursor.write_snapshot(self._snapshot_upto(), self._opened())
        self._write_counters()

    def _snapshot_upto(self) -> int:
        return self.loaded

    def _opened(self) -> list[UnsettledMessage]:
        return [
            UnsettledMessage(item.number, item.id, item.attempts)
            for item in sorted(self._items.values(), key=lambda each: each.id)
        ]

    def _write_counters(self) -> None:
        """What must be known at a restart without counting."""

    def reclaim(self) -> None:
        """Give back the room of what is settled."""

    def head(self) -> int:
        """Nothing below this id is needed."""
        # Items come in order of ids and keep their places.
        return next(iter(self._items), self.loaded + 1)
