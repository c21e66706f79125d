"""Messages that wait to be settled: what queues and named subscriptions share.

A backlog is a cursor over one or more logs, and the consumers that share it. Its parts are the
memory window (`memory`), the dispatch to consumers (`consumers`), what waits for a time (`retries`)
and the cursor on disk (`cursor`); `Backlog` is what others call.

Liveness: between two calls into the hub, nothing that could be delivered waits for an event that
may never happen.

- If there is room in memory and a committed message on disk, a read is under way. Without
  consumers, what a queue gets while a message is ready stays on disk: the first one is in memory.
- If a message is ready and a consumer that takes it has capacity, the backlog is touched: it is
  dispatched before the hub's pump ends. A consumer has capacity if its window is free and, while
  consumers together hold `window_bytes`, it holds nothing. So nobody who keeps messages keeps
  others from getting theirs; they only get one at a time.
- If what is on disk is not committed, the commit touches the backlog.
- If what is delayed, leased or at the head with an expiry could make room, a timer is set.

Ready messages that the filters of all consumers with capacity pass over delay no others: they fill
the memory until a consumer takes them or they expire.

Every transition that could make one of the conditions true ends in one of three calls: `touch`
where a message becomes ready, `has_room` where a window gets free, and `check` where bytes or
messages leave the memory, more is committed or the limits change. What a peer causes (`attach`,
`detach`, `settle`, `refuse`) pumps the loop at its end, as do `remove` and `Queue.exchange`; after
all else the caller does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Final, Literal

from crosswire.commitlog.contract import AcceptedMessages
from crosswire.envelope import MICROSECONDS, Envelope
from crosswire.hub.attachment import Choice, Consumer, DeliveryReceiver, Item, Window
from crosswire.hub.backlog.consumers import ConsumerDispatch
from crosswire.hub.backlog.logs import MessageLog
from crosswire.hub.backlog.memory import PAGE, BacklogMemory
from crosswire.hub.backlog.recovery import recover_unsettled
from crosswire.hub.backlog.retries import Retries
from crosswire.hub.core import Core, SendEnvelope
from crosswire.hub.cursor import Cursor
from crosswire.hub.filters import Predicate
from crosswire.hub.ledger import LedgerPeer, Step
from crosswire.hub.policies import Retry
from crosswire.store.contract import Page
from crosswire.store.keys import MAX_ID

__all__ = ["Backlog"]

_RECLAIM_AFTER: Final = 65_536
_BROWSED_BYTES: Final = 1 << 20
_RETURNED: Final = 64
"""Messages that return to the backlog before others may have a turn."""
_NOBODY: Final = LedgerPeer()


class Backlog(ABC):
    """`length` and `size_bytes` count what is accepted and not settled, in queues only.

    `stopped` is why nothing is delivered: the cursor can't be read, so nobody knows what is
    settled. What is accepted meanwhile is kept on disk.
    """

    has_filter: ClassVar[bool] = False
    """Whether `wants` may return False."""
    drops_oldest = False
    """Whether a dispatch may drop messages, consumers or not."""

    def __init__(
        self,
        core: Core,
        destination: str,
        key: bytes,
        log: MessageLog,
        *,
        send: SendEnvelope,
        retry: Retry,
        window_messages: int,
        window_bytes: int,
    ) -> None:
        self.destination = destination
        self.retry = retry
        self.length = 0
        self.size_bytes = 0
        self.stopped = ""
        self.cursor = Cursor(core.store, key)
        self.memory = BacklogMemory(
            core,
            self.cursor,
            self,
            log,
            has_filter=self.has_filter,
            window_messages=window_messages,
            window_bytes=window_bytes,
        )
        self._retries = Retries(core, self.cursor, self.memory, self, send)
        self._dispatch = ConsumerDispatch(core, self.memory, self._retries, self)
        self.consumers = self._dispatch.consumers
        self._core = core
        self._store = core.store
        self._commits = core.commits
        self._loop = core.loop
        self._ledger = core.ledger
        self._watchers = core.watchers
        self._settled_since_reclaim = 0
        self.subscription = ""
        """What the ledger calls it, if it is a named subscription."""

    @property
    @abstractmethod
    def dead_letters(self) -> str:
        """The queue of messages that could not be delivered."""

    @property
    def title(self) -> str:
        """What reports call it."""
        return self.destination

    @property
    def visible(self) -> int:
        """The last id that is for consumers, in memory or on disk."""
        return self.memory.visible

    @property
    def is_filtered(self) -> bool:
        """Whether a consumer has a filter, and may leave messages that others take."""
        return self._dispatch.filtering > 0

    # What kinds of backlog do differently.

    def wants(self, _envelope: Envelope) -> bool:
        """Whether this message is for the backlog at all."""
        return True

    def note_reclaimed(self, _identifier: int) -> None:
        """Retention has deleted messages up to this id that should have been read next."""

    def on_all_loaded(self) -> None:
        """Nothing is on disk only, so counters can be corrected; damage makes them drift."""

    def _uncount(self, count: int, size: int) -> None:
        """`count` messages less, of this total size."""

    def _write_counters(self) -> None:
        """Save what must be known after a restart without counting."""

    def reclaim(self) -> None:
        """Delete settled messages from the store."""

    # Accepted messages.

    def has_space_for(self, count: int) -> bool:
        """Whether this many messages could be added to memory at once."""
        return not self.stopped and self.memory.takes(count)

    def release(self, runs: Iterable[AcceptedMessages], now: float) -> None:
        """These are committed: they may be delivered."""
        self.arrive(runs, now)

    def withdraw(self, runs: Iterable[AcceptedMessages]) -> None:
        """These could not be written: they were never accepted."""

    def arrive(self, runs: Iterable[AcceptedMessages], now: float) -> None:
        """These may be delivered: they are committed or need not be. In order of ids."""
        if self.stopped:
            return
        memory = self.memory
        memory.add_runs(runs)
        if memory.ready and memory.ready[0].envelope.expires:
            self._retries.schedule_expiry(now)
        if memory.loaded < memory.visible:
            memory.check()
        # Without consumers there is nobody to dispatch to; one that attaches touches it.
        if self.consumers or self.drops_oldest:
            self._loop.touch(self)

    def _schedule_expiry(self, now: float) -> None:
        ready = self.memory.ready
        if ready and ready[0].envelope.expires:
            self._retries.schedule_expiry(now)

    def check(self) -> None:
        """Have done what has become possible; see the liveness rule.

        To be called by whatever may have made room, committed more or changed a limit.
        """
        memory = self.memory
        if memory.loaded < memory.visible:
            memory.check()
        if self._dispatch.is_held_up and memory.ready:
            self._loop.touch(self)

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
        """Add a consumer: see `Hub.consume`."""
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
        self._dispatch.add(consumer, holding, now)
        self.has_room(consumer, now)
        return consumer

    def has_room(self, consumer: Consumer, now: float) -> None:
        """The window of a consumer has free capacity."""
        memory = self.memory
        # Without a message there is nothing to hand out: the next one to arrive touches it.
        if self._dispatch.offer(consumer) and (memory.ready or memory.loaded < memory.visible):
            self._loop.touch(self)
            self._loop.pump(now)

    def give_up(self, consumer: Consumer, error: Exception) -> None:
        """Its filter raised: it is detached."""
        self._loop.give_up(consumer, error)

    def detach(self, consumer: Consumer, now: float, cause: str) -> None:
        """Remove a consumer; what it held is ready again at once, in the old order."""
        held = self._dispatch.remove(consumer)
        if held:
            self._loop.defer("return", self._return, consumer, held, sorted(held), now, cause)
        self._loop.touch(self)
        self._loop.pump(now)

    def _return(
        self, consumer: Consumer, held: dict[int, Item], ids: list[int], now: float, cause: str
    ) -> None:
        """What a consumer that left has held is ready again."""
        # The last one first, as each goes to the front. In parts, which are deferred: all of them
        # are before the next dispatch, which would hand out what comes later first.
        part = [held[each] for each in reversed(ids[-_RETURNED:])]
        del ids[-_RETURNED:]
        if ids:
            self._loop.defer("return", self._return, consumer, held, ids, now, cause)
        # Some may have been settled since by other means, a message that was taken back.
        left = [item for item in part if self.memory.items.get(item.id) is item]
        self._retries.fail(left, consumer, Step.RETURNED, cause, now, 0.0)
        self._commits.changed(self)
        self.make_room(consumer, len(part), now)
        self._loop.touch(self)

    def dispatch(self, now: float) -> None:
        """Hand out what is ready to consumers with capacity."""
        self._dispatch.dispatch(now)

    def settle(self, consumer: Consumer, ids: Iterable[int], now: float) -> int:
        """A consumer is done with these. Returns how many of them it held."""
        held, items = consumer.held, self.memory.items
        settled: list[int] = []
        size = 0
        for identifier in ids:
            item = held.pop(identifier, None)
            if item is not None:
                del items[identifier]
                size += item.size
                settled.append(identifier)
        if settled:
            self.memory.held_bytes -= size
            self._remove_from_memory(settled, size)
            self.note(Step.SETTLED, now, settled, peer=consumer.peer)
            self._commits.changed(self)
            if self._watchers.by_id:
                self._watchers.notify(settled)
            self.make_room(consumer, len(settled), now)
            self.check()
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
        """A consumer can't process these: see `Attachment.refuse`."""
        held = consumer.held
        items = [held.pop(each) for each in dict.fromkeys(ids) if each in held]
        for start in range(0, len(items), _RETURNED):
            part = items[start : start + _RETURNED]
            self._loop.defer("refuse", self._refuse, consumer, part, now, cause, delay_s, final)
        self._loop.pump(now)
        return len(items)

    def _refuse(
        self,
        consumer: Consumer,
        items: Sequence[Item],
        now: float,
        cause: str,
        delay_s: float | None,
        final: bool | None,
    ) -> None:
        """A part of what a consumer refused at once."""
        left = [item for item in items if self.memory.items.get(item.id) is item]
        step, cause = Step.REFUSED, cause or "refused"
        self._retries.fail(left, consumer, step, cause, now, delay_s, final=final)
        self._commits.changed(self)
        self.make_room(consumer, len(items), now)
        self.check()

    def extend(self, consumer: Consumer, ids: Iterable[int], now: float, lease_s: float) -> int:
        """The leases of these start anew. Returns how many of them the consumer holds."""
        items = [consumer.held[each] for each in ids if each in consumer.held]
        for item in items:
            self._retries.extend(item, now + lease_s)
        return len(items)

    def make_room(self, consumer: Consumer, count: int, now: float) -> None:
        """`count` messages are no longer with a consumer: its window has capacity again."""
        if not consumer.window.granted:
            consumer.window.free += count
            consumer.window.wake(now)

    # Leaving.

    def discard(self, item: Item) -> None:
        """It is settled, whatever the reason, and leaves memory."""
        del self.memory.items[item.id]
        self._remove_from_memory((item.id,), item.size)

    def _remove_from_memory(self, ids: Sequence[int], size: int) -> None:
        """These are settled and no longer in `memory.items`; `size` is that of all together."""
        self.memory.grow(-size, -len(ids))
        self.cursor.settle(*ids)
        self._settled_since_reclaim += len(ids)
        self._uncount(len(ids), size)

    def expire(self, item: Item, now_us: int) -> None:
        """It is no longer worth delivering; the caller has removed it from `memory.ready`."""
        self.discard(item)
        self._ledger.note(
            Step.EXPIRED,
            now_us,
            item.envelope.destination,
            [item.id],
            subscription=self.subscription,
        )
        self._commits.changed(self)
        if self._watchers.by_id:
            self._watchers.notify([item.id], "expired")

    def note(
        self,
        step: Step,
        now: float,
        ids: Iterable[int],
        *,
        peer: LedgerPeer | None = None,
        attempt: int = 0,
        detail: str = "",
    ) -> None:
        """Enter a step of these messages into the ledger."""
        self._ledger.note(
            step,
            int(now * MICROSECONDS),
            self.destination,
            ids,
            peer=_NOBODY if peer is None else peer,
            attempt=attempt,
            detail=detail,
            subscription=self.subscription,
        )

    # Operators.

    def oldest_us(self) -> int:
        """When the oldest message that is not settled was accepted, in µs; 0 if all are, or if
        nothing of it is in memory."""
        # In order of ids, the oldest first.
        for item in self.memory.items.values():
            return item.envelope.time
        return 0

    def state_of(self, identifier: int) -> Literal["waiting", "held"] | None:
        """Whether a message waits for a consumer or is held by one; None if it is settled."""
        item = self.memory.items.get(identifier)
        if item is not None:
            return "waiting" if item.consumer is None else "held"
        return None if self._record_on_disk(identifier) is None else "waiting"

    def is_free(self, identifier: int) -> bool:
        """Whether this message is not settled, and no consumer holds it."""
        item = self.memory.items.get(identifier)
        if item is not None:
            return item.consumer is None
        return self._record_on_disk(identifier) is not None

    def browse(self, after: int, count: int) -> list[Envelope]:
        """Up to `count` unsettled messages after an id, in memory or on disk, left as they are."""
        return self.browse_page(after, count, MAX_ID)[0]

    def browse_page(self, after: int, count: int, most_bytes: int) -> tuple[list[Envelope], bool]:
        """Like `browse`, and of `most_bytes` together, or one message that is larger. Also whether
        there may be more."""
        found: list[Envelope] = []
        left_bytes = most_bytes
        memory = self.memory
        after = max(after, memory.head() - 1)

        def look(page: Page, _reclaimed: int) -> None:
            nonlocal after, left_bytes
            for number, identifier, record in page.records:
                left_bytes -= len(record)
                if identifier in memory.items:
                    found.append(memory.items[identifier].envelope)
                elif identifier > memory.loaded and identifier not in self.cursor.later:
                    envelope = memory.decode(number, identifier, record)
                    if envelope is not None and self.wants(envelope):
                        found.append(envelope)
            after = page.last

        while len(found) < count and after < memory.visible and (left_bytes > 0 or not found):
            # One letter is looked up more often than a page of them.
            page = min(count - len(found), PAGE)
            memory.log.read_now(
                after=after,
                upto=memory.visible,
                count=page,
                size_bytes=max(min(left_bytes, _BROWSED_BYTES), 1),
                done=look,
            )
        return found[:count], len(found) > count or after < memory.visible

    def remove(self, ids: Iterable[int], step: Step, now: float, *, detail: str = "") -> list[int]:
        """Settle those of these that no consumer holds, in memory or on disk. Returns their ids."""
        gone: set[int] = set()
        for identifier in ids:
            item = self.memory.items.get(identifier)
            if item is not None and item.consumer is None:
                gone.add(identifier)
                self.discard(item)
            elif item is None and self._remove_from_disk(identifier):
                gone.add(identifier)
        if gone:
            self.memory.remove_ready(gone)
            self._retries.remove_delayed(gone)
            self.note(step, now, sorted(gone), detail=detail)
            self._commits.changed(self)
            self._schedule_expiry(now)
            self.check()
            self._loop.pump(now)
        return sorted(gone)

    def _remove_from_disk(self, identifier: int) -> bool:
        record = self._record_on_disk(identifier)
        if record is None:
            return False
        self.cursor.settle(identifier)
        # It is still in the log: a read has to skip it.
        self.cursor.later.add(identifier)
        self._uncount(1, len(record))
        return True

    def _record_on_disk(self, identifier: int) -> bytes | None:
        """A message that is on disk only, and not settled."""
        memory = self.memory
        if not memory.loaded < identifier <= memory.visible or identifier in self.cursor.later:
            return None
        return memory.log.fetch(identifier)

    def purge(self, now: float) -> int:
        """Settle everything that no consumer holds. Returns how much of it was in memory."""
        memory = self.memory
        gone = [item for item in memory.items.values() if item.consumer is None]
        for item in gone:
            self.discard(item)
        ids = {item.id for item in gone}
        memory.ready.clear()
        self._retries.remove_delayed(ids)
        memory.loaded = memory.visible
        self.cursor.later.clear()
        self.on_all_loaded()
        self.note(Step.DROPPED, now, [item.id for item in gone], detail="purged")
        self.snapshot()
        self._commits.changed(self)
        return len(gone)

    def drop_oldest(self, is_too_full: Callable[[], bool], now: float) -> None:
        """Drop the oldest messages that no consumer holds while `is_too_full`."""
        gone: list[int] = []
        memory = self.memory
        try:
            while is_too_full():
                memory.fill()
                # What is delayed may take all the memory into which more would be read.
                item = (
                    memory.ready.popleft() if memory.ready else self._retries.pop_oldest_delayed()
                )
                if item is None:
                    break
                self.discard(item)
                gone.append(item.id)
        finally:
            # Also when the disk can't be read: those are gone.
            if gone:
                self.note(Step.DROPPED, now, gone, detail="the queue is full")
                self._commits.changed(self)
                self._schedule_expiry(now)
                self.check()

    # The disk.

    def stop(self, reason: str) -> None:
        """Its cursor can't be used: nothing is delivered, and nothing of it is written, until it
        is repaired."""
        self.stopped = reason
        self._core.damage.report_stopped(self, reason)

    def recover(self, now: float) -> None:
        """Continue after a restart: first with what was in memory, then with what is on disk."""
        memory = self.memory
        if self.cursor.damage:
            self.stop(str(self.cursor.damage[0]))
        if self.stopped:
            return
        recover_unsettled(self._core, self.cursor, memory)
        memory.visible = max(memory.log.newest_id(), memory.loaded)
        memory.fill()
        if memory.loaded >= memory.visible:
            # A message that was visible before it was written, and never was, is still counted.
            self.on_all_loaded()
        self._schedule_expiry(now)

    def write(self) -> None:
        """Before a group is written: save what was settled and refused since the last one."""
        memory, cursor = self.memory, self.cursor
        # Messages that only arrived change nothing of a position that is saved. Without any, it is
        # saved when it has moved: past messages that are for nobody here.
        if not self.stopped and (
            cursor.is_dirty or (not memory.items and cursor.saved_upto != memory.loaded)
        ):
            cursor.write(memory.loaded, memory.head(), len(memory.items), memory.unsettled)
        self._write_counters()
        if self._settled_since_reclaim >= _RECLAIM_AFTER:
            self._settled_since_reclaim = 0
            self.reclaim()

    def snapshot(self) -> None:
        """Save the whole position, as a new subscription and a purge do."""
        if not self.stopped:
            self.cursor.write_snapshot(self.memory.loaded, self.memory.unsettled())
            self._write_counters()
