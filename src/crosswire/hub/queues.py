"""Queues: each message goes to one consumer, in order, until it is settled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from crosswire.commitlog.contract import AcceptedMessages
from crosswire.envelope import Envelope
from crosswire.errors import DestinationFull, RecordDamaged
from crosswire.hub.attachment import Consumer
from crosswire.hub.backlog.backlog import Backlog
from crosswire.hub.backlog.logs import QueueLog
from crosswire.hub.core import Core, SendEnvelope
from crosswire.hub.policies import QueuePolicy
from crosswire.store.contract import Page, Store
from crosswire.store.keys import MAX_ID, state_key
from crosswire.store.records import Count, reader

__all__ = ["DEPTHS", "Depth", "Queue", "read_depth", "stored_depth", "stored_pause"]

DEPTHS: Final = "depth"
_PAUSED: Final = "paused"
"""A space: queues that an operator paused, by their number."""
_STUCK_AFTER: Final = 65_536
_UNSAVED: Final = 16
"""Messages that a queue accepts before its counters are saved: a start counts those after them."""
_COUNTED: Final = 1024


class Depth(msgspec.Struct, array_like=True, frozen=True):
    """The counters of a queue, as they are stored: of its messages up to the id `upto`.

    Those after it were accepted since, and none of them is settled: whatever else changes the
    counters saves them. A length of 0 is saved as soon as it is one no more.
    """

    length: Count
    size_bytes: Count
    upto: Count = MAX_ID
    """A store of the format before this one has no such field: it saved them with every group."""

    def with_later(self, read: ReadPage) -> Depth:
        """With the messages after `upto`; `read` gives a page of those after an id."""
        depth = self
        while depth.length and depth.upto < MAX_ID and (records := read(depth.upto)):
            sizes = [len(record) for _, _, record in records]
            length, size_bytes = depth.length + len(sizes), depth.size_bytes + sum(sizes)
            depth = Depth(length, size_bytes, records[-1][1])
        return depth


ReadPage: TypeAlias = Callable[[int], list[tuple[int, int, bytes]]]
_encode = msgspec.msgpack.Encoder().encode
read_depth: Callable[[bytes], Depth] = reader(Depth, "the length of a queue")


def stored_depth(store: Store, number: int) -> tuple[int, int]:
    """Length and size of a queue that nobody has opened. Raises RecordDamaged."""
    stored = store.get(DEPTHS, number.to_bytes(4))
    if stored is None:
        return 0, 0
    depth = read_depth(stored).with_later(_reading(store, number))
    return depth.length, depth.size_bytes


def _reading(store: Store, number: int) -> ReadPage:
    """Reads pages of a queue's messages."""

    def read(after: int) -> list[tuple[int, int, bytes]]:
        pages: list[Page] = []
        store.read([number], after=after, count=_COUNTED, done=pages.append)
        return pages[0].records

    return read


def stored_pause(store: Store, number: int) -> bool:
    """Whether a queue that nobody has opened is paused."""
    return store.get(_PAUSED, number.to_bytes(4)) is not None


class Queue(Backlog):
    """`length` and `size_bytes` count what is accepted and not settled, in memory or on disk.

    `waiting` and `waiting_bytes` are those of it that are not committed yet.
    """

    # Beside the dictionary of a `Backlog`: with more than thirty names Python would give each queue
    # a dictionary of its own, and a group for thousands of queues reads all of them.
    __slots__ = (
        "_attached",
        "_consumers_changed",
        "_depth_key",
        "_floor",
        "_is_inexact",
        "_is_own",
        "_reclaimed",
        "_reclaimed_between",
        "_saved_length",
        "_used_before",
        "accepted_id",
        "drops_oldest",
        "is_limited",
        "is_plain",
        "number",
        "paused",
        "policy",
        "waiting",
        "waiting_bytes",
    )

    def __init__(
        self,
        core: Core,
        destination: str,
        policy: QueuePolicy,
        *,
        send: SendEnvelope,
        consumers_changed: Callable[[Queue], None],
    ) -> None:
        self.number = core.store.number(destination)
        super().__init__(
            core,
            destination,
            b"q" + self.number.to_bytes(4),
            QueueLog(core.store, self.number),
            send=send,
            retry=policy.retry,
            window_messages=policy.window_messages,
            window_bytes=policy.window_bytes,
        )
        self.policy = policy
        self._is_own = destination.startswith("queue/@")
        self.is_plain = False
        """Whether peers may send to it, and its policy changes nothing of what they send."""
        self.is_limited = False
        """Whether its policy may refuse messages, or drop others for them."""
        self._look_at_policy()
        self.waiting = 0
        self.waiting_bytes = 0
        self.accepted_id = 0
        """The last id that is counted."""
        self._saved_length = 0
        """The length that is saved, if the counters need not be saved yet; else 0."""
        self._is_inexact = False
        self._reclaimed = 0
        self._reclaimed_between = 0
        self._floor = core.floors.of(self.number)
        self._depth_key = state_key(DEPTHS, self.number.to_bytes(4))
        self._consumers_changed = consumers_changed
        self._attached = 0
        self._used_before = (0, 0)
        key = self.number.to_bytes(4)
        self.paused = stored_pause(core.store, self.number)
        """Whether nothing is delivered from it until an operator resumes it."""
        stored = core.store.get(DEPTHS, key)
        if stored is not None:
            try:
                depth = read_depth(stored).with_later(_reading(core.store, self.number))
            except RecordDamaged as error:
                core.damage.set_aside_state(DEPTHS, key, stored, error)
                depth = self._count_stored()
                # With the group that removes the damaged ones.
                core.commits.changed(self, request=False)
            self.length, self.size_bytes = depth.length, depth.size_bytes
            self.accepted_id = min(depth.upto, core.store.newest_id)

    def _count_stored(self) -> Depth:
        """Count unsettled messages by reading the log: the saved counters are damaged."""
        cursor, read = self.cursor, _reading(self._store, self.number)
        opened = {each.id for each in cursor.open}
        sizes: list[int] = []
        after = min(min(opened, default=cursor.upto + 1) - 1, cursor.upto)
        while records := read(after):
            after = records[-1][1]
            sizes += [
                len(record)
                for _, identifier, record in records
                if identifier in opened
                or (identifier > cursor.upto and identifier not in cursor.later)
            ]
        return Depth(len(sizes), sum(sizes), after)

    @property
    def is_empty(self) -> bool:
        """Whether every message is settled, and none is on its way."""
        memory = self.memory
        return not (self.length or self.waiting or memory.items or memory.loaded < memory.visible)

    def was_used(self) -> bool:
        """Whether it got a message or a consumer since the last call, or since it was opened."""
        before, self._used_before = self._used_before, (self.visible, self._attached)
        return before != self._used_before

    def delete(self) -> None:
        """Delete its cursor and counters; nothing of it is written any more."""
        self._commits.forget(self)
        self.cursor.forget()
        self.memory.forget()
        self._store.drop(DEPTHS, self.number.to_bytes(4))
        self._store.drop(_PAUSED, self.number.to_bytes(4))

    def pause(self, paused: bool, now: float) -> None:
        """Deliver nothing more, or continue; it holds when it is committed, restarts included.

        What consumers hold stays with them, and messages are accepted as before.
        """
        if paused == self.paused:
            return
        self.paused = paused
        key = self.number.to_bytes(4)
        if paused:
            self._store.save(_PAUSED, key, b"1")
        else:
            self._store.drop(_PAUSED, key)
        self._commits.request()
        self._loop.touch(self)
        self._loop.pump(now)

    def adopt(self, policy: QueuePolicy) -> None:
        """Apply another policy from now on."""
        self.policy = policy
        self._look_at_policy()
        self.retry = policy.retry
        self.memory.window_messages = policy.window_messages
        self.memory.window_bytes = policy.window_bytes
        self.check()

    def _look_at_policy(self) -> None:
        policy = self.policy
        self.is_plain = not self._is_own and not policy.ttl_s
        self.is_limited = bool(policy.max_length or policy.max_bytes)
        self.drops_oldest = policy.overflow == "drop-oldest"

    @property
    def name(self) -> str:
        """The destination without its kind."""
        return self.destination.removeprefix("queue/")

    @property
    def is_dead(self) -> bool:
        """Whether it is a dead letter queue."""
        return self.destination.endswith("/dead")

    @property
    def dead_letters(self) -> str:
        """The queue of messages that could not be delivered."""
        return f"{self.destination}/dead"

    def attach(self, *args: Any, **options: Any) -> Consumer:
        """Add a consumer, and notify `Hub.consumers_changed`."""
        consumer = super().attach(*args, **options)
        self._attached += 1
        self._consumers_changed(self)
        return consumer

    def detach(self, consumer: Consumer, now: float, cause: str) -> None:
        """Remove a consumer, and notify `Hub.consumers_changed`."""
        # First: the dispatch loop runs deferred calls before it dispatches this queue. A listener
        # whose consumer only takes what others leave can then take over what this one held.
        self._consumers_changed(self)
        super().detach(consumer, now, cause)

    def admit(self, size: int) -> None:
        """Count a message. Raises DestinationFull if the policy refuses it."""
        policy = self.policy
        length = self.length if policy.overflow == "refuse" else 0
        size_bytes = self.size_bytes if policy.overflow == "refuse" else 0
        if (policy.max_length and length >= policy.max_length) or (
            policy.max_bytes and size_bytes + size > policy.max_bytes
        ):
            raise DestinationFull(
                f"{self.destination} is full: length {self.length}, {self.size_bytes} bytes"
            )
        self.length += 1
        self.size_bytes += size

    def admit_run(self, count: int, size: int) -> bool:
        """Count several messages of this total size; False, and none is counted, if the policy
        would refuse any of them."""
        if self.is_limited and not self.admits(count, size):
            return False
        self.length += count
        self.size_bytes += size
        return True

    def admits(self, count: int, size: int) -> bool:
        """Whether the policy refuses none of several messages of this total size."""
        if not self.is_limited:
            return True
        policy = self.policy
        refuses = policy.overflow == "refuse"
        length = self.length + count if refuses else 0
        size_bytes = self.size_bytes + size if refuses else size
        return not (
            (policy.max_length and length > policy.max_length)
            or (policy.max_bytes and size_bytes > policy.max_bytes)
        )

    def accept(self, count: int, size: int, last: int) -> None:
        """Count messages of this total size, which become visible when they are committed; `last`
        is the id of the last one."""
        self.accepted_id = last
        self.length += count
        self.size_bytes += size
        self.waiting += count
        self.waiting_bytes += size

    def recover(self, now: float) -> None:
        """Continue after a restart, within the limits."""
        super().recover(now)
        self._used_before = (self.visible, 0)
        # The hub may have been killed between a batch and the drops that make room for it.
        self._keep_bounds(now)
        # Those made room in memory, too, and nobody pumps the loop after a queue was opened.
        self.memory.fill()
        # What was just read may expire first, or have expired while the hub was stopped.
        self._schedule_expiry(now)

    def dispatch(self, now: float) -> None:
        """Drop the oldest messages if the policy demands it, then hand out the rest."""
        # Not when messages are admitted: one that is not committed can't be dropped, and none is
        # dropped for one whose commit may fail.
        self._keep_bounds(now)
        if self.paused:
            # What is in memory is shown to operators, and expires.
            self.memory.fill()
        else:
            super().dispatch(now)

    def _keep_bounds(self, now: float) -> None:
        if self.drops_oldest and not self.stopped and self._is_too_full():
            self.drop_oldest(self._is_too_full, now)

    def _is_too_full(self) -> bool:
        """Whether more is committed than the policy allows."""
        policy, length = self.policy, self.length - self.waiting
        size_bytes = self.size_bytes - self.waiting_bytes
        return bool(
            (policy.max_length and length > policy.max_length)
            or (policy.max_bytes and size_bytes > policy.max_bytes)
        )

    def exchange(self, envelope: Envelope, record: bytes) -> None:
        """Replace the message that has this envelope's id."""
        memory, number = self.memory, self.number
        item = memory.items.get(envelope.id)
        if item is not None:
            grown = len(record) - item.size
            memory.grow(grown)
            if item.consumer is not None:
                memory.held_bytes += grown
            item.envelope, item.size = envelope, len(record)
            self._uncount(0, -grown)
        else:
            stored = self._store.fetch(number, [envelope.id])[0]
            if stored is not None:
                self._uncount(0, len(stored) - len(record))
        self._store.retain(number, envelope.id, record)
        # Its size may be among what the saved counters have.
        self._commits.changed(self, request=False)
        self._commits.request()
        # A filter may match it now, and a smaller one makes room.
        self._dispatch.look_again()
        self.check()
        self._loop.touch(self)
        self._loop.pump(self._loop.now)

    def await_commit(self, sizes: Sequence[int]) -> None:
        """Messages of these sizes are counted, and become visible when they are committed."""
        self.waiting += len(sizes)
        self.waiting_bytes += sum(sizes)

    def release(self, runs: Iterable[AcceptedMessages], now: float) -> None:
        """These are committed: they may be delivered."""
        # As `_end_wait`: a group may be for thousands of queues, and each call for one counts.
        last = 0
        for run in runs:
            self.waiting -= len(run.sizes)
            self.waiting_bytes -= sum(run.sizes)
            last = run.envelopes[-1].id
        # Nobody takes them, and the first message, whose age is shown and which may expire, is in
        # memory: they stay on disk until there is a consumer.
        if self.consumers or self.drops_oldest or self.stopped or not self.memory.ready:
            self.arrive(runs, now)
        else:
            self.memory.visible = last

    def _end_wait(self, runs: Iterable[AcceptedMessages]) -> tuple[int, int]:
        """These are committed, or could not be. Returns how many, and their total size."""
        count = size = 0
        for run in runs:
            count += len(run.sizes)
            size += sum(run.sizes)
        self.waiting -= count
        self.waiting_bytes -= size
        return count, size

    def withdraw(self, runs: Iterable[AcceptedMessages]) -> None:
        """Undo the count of messages that were admitted but could not be stored."""
        self._uncount(*self._end_wait(runs))
        if self._is_inexact and self.memory.loaded >= self.memory.visible:
            self.on_all_loaded()
        self._commits.changed(self, request=False)

    def _uncount(self, count: int, size: int) -> None:
        self._saved_length = 0
        self.length = max(self.length - count, 0)
        self.size_bytes = max(self.size_bytes - size, 0)

    def arrive(self, runs: Iterable[AcceptedMessages], now: float) -> None:
        """These may be delivered."""
        Backlog.arrive(self, runs, now)
        if self._is_inexact and self.memory.loaded >= self.memory.visible:
            self.on_all_loaded()

    def on_all_loaded(self) -> None:
        """Set the counters to what is in memory, which is all there is."""
        # Except what waits for its commit, which is counted and not in memory: then it is done
        # when that has arrived.
        self._is_inexact = self.waiting > 0
        if not self._is_inexact:
            self.length = len(self.memory.items)
            self.size_bytes = self.memory.size_bytes
            self._saved_length = 0

    def write(self) -> None:
        """Before a group is written: save the counters, and what was settled and refused."""
        # Messages that only arrived change nothing of the cursor, and a few of them need not be
        # counted: a group may have one for each of thousands of queues.
        if self.cursor.is_dirty or not self.memory.items:
            super().write()
        elif not 0 < self._saved_length <= self.length < self._saved_length + _UNSAVED:
            self._write_counters()

    def _write_counters(self) -> None:
        # As `Depth` is encoded, in half the time.
        counters = self.length, self.size_bytes, self.accepted_id
        self._store.save_as(self._depth_key, _encode(counters))
        self._saved_length = self.length

    def reclaim(self) -> None:
        """Delete everything below the head; if that has not moved for long, also what is settled
        between the messages that are not."""
        if self.stopped:
            return
        limit = self._core.seals.reclaim_limit
        upto = min(self.memory.head() - 1, limit)
        store = self._store
        if upto > self._reclaimed:
            last = store.last_id(self.number, upto)
            if last > self._reclaimed:
                store.reclaim(self.number, self._reclaimed + 1, upto)
                self._note_floor(last)
            self._reclaimed = upto
        last = min(self.memory.loaded, limit)
        start = max(self._reclaimed, self._reclaimed_between)
        if last - start < _STUCK_AFTER:
            return
        self._reclaimed_between = last
        for held in sorted(each for each in self.memory.items if start < each <= last):
            store.reclaim(self.number, start + 1, held - 1)
            start = held
        store.reclaim(self.number, start + 1, last)
        self._note_floor(last)

    def _note_floor(self, last: int) -> None:
        """Some messages up to this id are deleted: log readers must not report them as lost."""
        self._floor = max(self._floor, last)
        self._core.floors.save(self.number, self._floor)
        self._commits.request(sync=False, urgent=False)
