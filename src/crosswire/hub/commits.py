"""The commit path: what is accepted and settled together becomes durable as one group.

Nothing is written per message. Whatever happens between two commits is collected in one open
`CommitGroup`; then, for one group at a time:

    request     somebody needs a commit: at the end of this turn of the event loop, or a little
                later if nobody waits for it
    seal        queues and subscriptions save what was settled, the ledger adds its block, and the
                store completes the group's body. What happens from now on is in the next group
    append      `CommitLog.append` makes the group durable, and what it changes can be read from the
                store. This is the only step that can fail, and nothing is acknowledged as durable
                before it has ended
    apply       the store counts the group's ids, rows and number as used
    listeners   in the order of `CommitStage`

**One group is in flight.** While the disk works on it the event loop goes on, and all that arrives
meanwhile is the next group. So a slow disk makes groups larger, not slower one by one, and the
order of groups on disk is the order in which they were sealed. It also makes numbers simple: rows
and groups are numbered when a group is sealed, and the one before it has ended then. (Ids are given
out when messages are accepted, and never again, whatever becomes of their group.)

**A group closes at its log's size.** Where the log has records of a limited size, an open group
that has reached it is sealed at the end of the turn, although another one is in flight: it waits
for its append in a queue, and the next one is open. Such a log has no failing groups, so rows and
numbers may be given out before the groups ahead of it have ended. What is open, sealed and in
flight together is limited by the `gate`.

**Durable, or only written.** A group is synced if something in it asks for that: a receipt of a
durable message, a settlement that a peer is to be sure of. A group in which nothing does is only
given to the operating system. It survives the process, not a power failure, and nobody has been
promised more; the sync of any later group covers it, because the engine's log is sequential, and a
timer asks for that sync after a second. For its listeners it is committed like any other.

**A group that fails.** With the local log an append can fail for good: no room, or a broken disk.
Messages of producers are lost with the group, and their receipts carry the error. All else (what
was settled, saved and retained, and the ledger's rows about it) goes into the next group, which is
tried after a quarter of a second, even if a commit is requested before: a part that repeats its
request as soon as it fails would keep the event loop busy for as long as the disk is full. So
nothing is ever half acknowledged: a durable message is on disk and its receipt is done, or it was
never accepted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from itertools import islice
from time import perf_counter
from typing import Final, NamedTuple, Protocol, TypeAlias
from weakref import WeakSet

from crosswire.commitlog.contract import (
    AcceptedMessages,
    Append,
    CommitGroup,
    CommitLog,
    MessageTarget,
    Receipt,
)
from crosswire.commitlog.local import LocalLog
from crosswire.errors import HubError, NotLeading, StoreError, StoreFailed
from crosswire.hub.dispatch import Dispatcher, DispatchLoop
from crosswire.hub.intake_gate import IntakeGate
from crosswire.hub.ledger import Ledger
from crosswire.hub.turns import LARGE_BYTES, TurnShare
from crosswire.store.contract import Store
from crosswire.store.engine import refusal

__all__ = ["CommitPath", "CommitReader", "CommitStage", "StoredBacklog"]

_log = logging.getLogger("crosswire.hub")

_SYNC_S: Final = 1.0
"""How long what was written may stay with the operating system only."""
_CHANGED: Final = 128
"""Queues and subscriptions that are written when a group is sealed; those before them are written
while it collects."""
_FULL_MESSAGES: Final = 4096
_FULL_BYTES: Final = 2 << 20
"""From here on a group takes long to write: its producers are not read from until it is sealed."""
_RELEASED: Final = 16
"""Queues and subscriptions that get their messages before others may have a turn."""
_RETRY_S: Final = 0.25
_TICK_S: Final = 0.001
_LARGE_S: Final = 0.01
"""Roughly how long a group with a message of a MiB takes to be written: more than a turn."""


class CommitStage(IntEnum):
    """In this order the listeners of a group run, whatever the order in which they registered.

    Visibility comes first, so that delivery does not depend on who waits for the commit, and a
    producer that gets its receipt can rely on its message being on its way. The lake comes last:
    it takes what all others are done with.
    """

    VISIBILITY = 1
    RECEIPTS = 2
    LEDGER = 3
    METRICS = 4
    TELEMETRY = 5
    LAKE = 6


Committed: TypeAlias = Callable[[CommitGroup], None]
"""Called for a group that is committed: durable, or only written if nothing in it asks for more."""
Failed: TypeAlias = Callable[[CommitGroup, StoreError], None]
"""Called for a group that could not be written; the next one has what must not be lost of it."""


class _CommitListener(NamedTuple):
    stage: CommitStage
    committed: Committed | None
    failed: Failed | None


class CommitReader(Dispatcher, Protocol):
    """A dispatcher that reads messages from the store, and only those that are committed.

    The store also returns those of a group on its way, which may still be taken back.
    """

    @property
    def visible(self) -> int:
        """The last id that it is to read."""


class StoredBacklog(CommitReader, MessageTarget, Protocol):
    """A queue or named subscription, as far as commits concern it."""

    def write(self) -> None:
        """Save what was settled and refused since the last commit, into the open group."""


class CommitPath:
    """The open group, the group in flight, and the listeners.

    `committed_id` is the newest id that was given out when the last committed group was sealed: no
    message above it may be read. Without `start` no event loop is needed, and nothing is committed
    before `commit_now` is called.
    """

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        dispatch: DispatchLoop,
        clock: Callable[[], float] | None = None,
        log: CommitLog | None = None,
    ) -> None:
        self.committed_id = store.newest_id
        self._store = store
        self._ledger = ledger
        self._dispatch = dispatch
        self._clock = clock
        self._log = log or LocalLog(store, store.limits.patience_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lazy_timer: asyncio.TimerHandle | None = None
        self._lazy_at = 0.0
        self._sync_timer: asyncio.TimerHandle | None = None
        self._awaits_sync = False
        self._is_scheduled = False
        self._own_turn = TurnShare(dispatch.turns, self._begin_alone)
        self._has_own_turn = False
        self._is_closed = False
        self._flight: CommitGroup | None = None
        self._sealed: deque[CommitGroup] = deque()
        self._sealed_bytes = 0
        self._is_closing = False
        self.gate: IntakeGate | None = None
        """Closed while too much waits for the log; None where the log has no such limit."""
        if self._log.pending_limit_bytes:
            self.gate = IntakeGate(self.pending_bytes, self._log.pending_limit_bytes)
            dispatch.turns.gate = self.gate
        self._flushes: list[asyncio.Future[None]] = []
        self._changed: dict[StoredBacklog, None] = {}
        self._readers: dict[CommitReader, None] = {}
        self._forgotten: WeakSet[MessageTarget] = WeakSet()
        self._first_listeners: tuple[_CommitListener, ...] = ()
        """Those up to the receipts: what was planned by them is written before the others run."""
        self._later_listeners: tuple[_CommitListener, ...] = ()
        self.add_listener(CommitStage.VISIBILITY, self._release, self._withdraw)
        self.add_listener(CommitStage.RECEIPTS, self._acknowledge, self._refuse)
        self.add_listener(CommitStage.LEDGER, ledger.committed, ledger.failed)

    # Listeners.

    def add_listener(
        self, stage: CommitStage, committed: Committed | None = None, failed: Failed | None = None
    ) -> None:
        """Have one of these called for every group, on the event loop, at this stage.

        One that raises harms no other: the error is logged and counted. None may rely on another
        one of its own stage.
        """
        listener = _CommitListener(stage, committed, failed)
        self._set_listeners([*self._first_listeners, *self._later_listeners, listener])

    def remove_listener(self, committed: Committed) -> None:
        """Call it no more, from the next group on; no error if it is not registered."""
        listeners = (*self._first_listeners, *self._later_listeners)
        self._set_listeners([each for each in listeners if each.committed != committed])

    def _set_listeners(self, listeners: list[_CommitListener]) -> None:
        # New tuples: the loop that calls listeners may be running.
        listeners.sort(key=lambda each: each.stage)
        first = [each for each in listeners if each.stage <= CommitStage.RECEIPTS]
        self._first_listeners = tuple(first)
        self._later_listeners = tuple(listeners[len(first) :])

    # What goes into the open group.

    @property
    def group(self) -> CommitGroup:
        """The open group."""
        return self._store.group

    def pending_bytes(self) -> int:
        """What waits for the log in memory, roughly; 0 where nobody limits it."""
        log = self._log
        if not log.pending_limit_bytes:
            return 0
        open_bytes = self._store.open_bytes + self._ledger.open_bytes
        return log.pending_bytes + self._sealed_bytes + open_bytes

    def committed(self) -> Receipt:
        """Done when all that was requested so far, settlements included, is durable."""
        receipt = Receipt([], {})
        self.finish_with_group(receipt)
        return receipt

    def finish_with_group(self, receipt: Receipt) -> None:
        """Have this done when all that was requested so far is durable."""
        self.group.receipts.append(receipt)
        self.request()

    def written(self) -> Receipt:
        """Done when what was saved so far is with the operating system: it survives the process,
        though not a power failure."""
        receipt = Receipt([], {})
        self.group.written.append(receipt)
        self.request(sync=False)
        return receipt

    def finish(self, receipt: Receipt, error: HubError | None = None) -> None:
        """Its batch is durable, or with `error` never will be: call those who wait for it."""
        for callback in receipt.finish(error):
            try:
                callback(receipt)
            except Exception as raised:
                self._dispatch.callbacks.note("receipt", raised)

    def changed(self, backlog: StoredBacklog, *, request: bool = True) -> None:
        """It has something to write when the group is sealed; nobody waits for it.

        A peer that sends to thousands of queues is charged for each of them: the one that has not
        changed for longest is written now, and again if it changes once more before the group is
        sealed.
        """
        changed = self._changed
        changed.pop(backlog, None)
        changed[backlog] = None
        if len(changed) > _CHANGED:
            self._write_oldest()
        if request:
            self.request(urgent=False)

    def changed_all(self, backlogs: Iterable[StoredBacklog]) -> None:
        """`changed` for many, without a request."""
        changed = self._changed
        for backlog in backlogs:
            changed.pop(backlog, None)
            changed[backlog] = None
        if len(changed) > _CHANGED:
            self._write_oldest()

    def _write_oldest(self) -> None:
        changed = self._changed
        oldest = list(islice(changed, len(changed) - _CHANGED))
        for backlog in oldest:
            del changed[backlog]
        self._write(oldest)

    def _write(self, backlogs: Iterable[StoredBacklog]) -> None:
        for backlog in backlogs:
            try:
                backlog.write()
            except Exception as error:
                # It must not keep the group, and all who wait for it, from the disk.
                self._dispatch.callbacks.note("write", error)

    def added(self, sizes: Sequence[int]) -> None:
        """Messages of these sizes were added to the open group for the peer that is served now.

        One in flight, and a disk that is slow, would make the next group so large that to write it
        is a long turn. So a full one keeps its producers waiting, for as long as they would have to
        wait for their receipts anyway.
        """
        group = self._store.group
        group.size_bytes += sum(sizes)
        if max(sizes) >= LARGE_BYTES:
            group.is_large = True
        turns = self._dispatch.turns
        if (
            group.is_large
            or group.size_bytes >= _FULL_BYTES
            or group.appended_count >= _FULL_MESSAGES
        ) and self._loop is not None:
            turns.is_full = True
            if turns.current is not None:
                turns.current.hold()

    def await_commit(self, reader: CommitReader) -> None:
        """Some of what it is to read is not committed yet: commits touch it until all is."""
        self._readers[reader] = None

    def forget(self, backlog: StoredBacklog) -> None:
        """It is removed for good: nothing of it is written or released any more."""
        # The group in flight too: it would release messages to a backlog that does not exist. And
        # what it has released may wait for its turn.
        self._forgotten.add(backlog)
        self._changed.pop(backlog, None)
        self._readers.pop(backlog, None)
        self._dispatch.forget(backlog)
        for group in (self.group, self._flight, *self._sealed):
            if group is not None:
                group.arrivals.pop(backlog, None)
                group.retained_arrivals.pop(backlog, None)

    # When groups are sealed.

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on groups are committed as soon as there is something to write."""
        self._loop = loop
        self._log.start(loop)
        if self.group.has_changes:
            self.request()

    def request(self, *, sync: bool = True, urgent: bool = True) -> None:
        """Have the open group committed: at the end of this turn if `urgent`, else soon.

        Without `sync` it is enough that the operating system has it, which brings it to the disk
        within about a second.
        """
        group = self._store.group
        if sync:
            group.sync = True
        if urgent:
            group.urgent = True
        if self._flight is not None and not self._is_closing and self._is_full():
            self._is_closing = True
            assert self._loop is not None
            self._loop.call_soon(self._close_group)
        # With a group in flight, `_continue` looks at the flags when that one is done.
        if self._loop is None or self._flight is not None or self._is_scheduled:
            return
        if self._store.last_error is not None:
            self._timer = self._timer or self._loop.call_later(_RETRY_S, self._begin)
        elif urgent:
            self._is_scheduled = True
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            # At the end of the turn: everything that was read in it is one group.
            self._loop.call_soon(self._begin)
        elif not self._lazy_at and self._timer is None:
            self._lazy_at = self._loop.time() + self._log.lazy_s
            if self._lazy_timer is None:
                self._lazy_timer = self._loop.call_at(self._lazy_at, self._on_lazy)

    def _on_lazy(self) -> None:
        """Begin what nobody waits for, if it has been gathered for long enough.

        Where somebody waits, a commit begins before that, nearly always: the timer is not cancelled
        then, and set again only if it is still needed. To cancel and set one for each message costs
        more.
        """
        self._lazy_timer = None
        if not self._lazy_at or self._loop is None:
            return
        # The loop's clock counts milliseconds: one that is due now may seem to be due soon.
        if self._loop.time() + _TICK_S < self._lazy_at:
            self._lazy_timer = self._loop.call_at(self._lazy_at, self._on_lazy)
        else:
            self._begin()

    def _is_full(self) -> bool:
        """Has the open group reached the size of its log's records?"""
        most_bytes = self._log.group_bytes
        return bool(most_bytes) and self._store.open_bytes >= most_bytes

    def _close_group(self) -> None:
        """Seal the open group, which follows the one in flight."""
        self._is_closing = False
        if self._flight is None or self._is_closed or self._loop is None or not self._is_full():
            return
        size_bytes = self._store.open_bytes + self._ledger.open_bytes
        group = self._seal()
        group.pending_bytes = size_bytes
        self._sealed_bytes += size_bytes
        self._sealed.append(group)

    def _next_group(self) -> CommitGroup:
        """The group to be appended next: the open one is sealed, unless another was before."""
        if not self._sealed:
            return self._seal()
        group = self._sealed.popleft()
        self._sealed_bytes -= group.pending_bytes
        return group

    def _begin(self) -> None:
        """Append the next group."""
        self._dispatch.turns.enter()
        self._is_scheduled = False
        self._lazy_at = 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._flight is not None or self._is_closed or self._loop is None:
            return
        store = self._store
        if store.group.is_large and not self._has_own_turn and not self._sealed:
            self._is_scheduled = self._has_own_turn = True
            self._own_turn.later(_LARGE_S)
            return
        self._has_own_turn = False
        if store.last_error is not None and not store.mend():
            # Not sealed: the open group keeps growing until the engine can be opened again.
            self._timer = self._loop.call_later(_RETRY_S, self._begin)
            self._end_flushes(store.last_error)
            # What they send is refused meanwhile.
            self._dispatch.turns.release()
            return
        group = self._next_group()
        if not group.has_changes:
            # Only receipts, for what earlier groups have written.
            self._notify(group, None)
            return
        self._flight = group
        append = self._log.append(group)
        group.waited_s = perf_counter() - group.sealed_at
        if append.done:
            self._end(append)
            self._continue(append.error)
        else:
            append.add_done_callback(self._on_appended)

    def _begin_alone(self) -> None:
        """To write a large message takes long: in a turn that began with this."""
        # What the commit causes is not this share's: it may go on meanwhile.
        self._dispatch.turns.current = None
        self._begin()

    def _on_appended(self, append: Append) -> None:
        self._dispatch.turns.enter()
        self._end(append)
        is_awaited = self.group.urgent or self._sealed
        if append.error is None and is_awaited and self._flight is None:
            # Those who wait in the next group have waited for this one: not another turn.
            self._begin()
        else:
            self._continue(append.error)

    def _continue(self, error: StoreError | None) -> None:
        """What was collected meanwhile is the next group."""
        if self._loop is None or self._flight is not None or self._is_closed:
            return
        group = self._store.group
        if error is not None:
            self._timer = self._timer or self._loop.call_later(_RETRY_S, self._begin)
        elif group.urgent or group.has_changes:
            self.request(sync=False, urgent=group.urgent)

    def commit_now(self) -> StoreError | None:
        """Commit the open group before this returns; the error, if it could not be written."""
        if self._flight is not None:
            raise StoreFailed("a group is being committed already")
        store = self._store
        if store.last_error is not None and not store.mend():
            return store.last_error
        group = self._seal()
        if not group.has_changes:
            self._notify(group, None)
            return None
        self._flight = group
        append = self._log.append(group, blocking=True)
        self._end(append)
        return append.error

    async def flush(self) -> None:
        """Returns when all that was requested so far is on disk. Raises StoreError if it is not."""
        if self._loop is None:
            error = self.commit_now()
            if error is not None:
                raise error
            return
        # Twice: a group in flight may have been sealed before the last change, which is in the
        # next one then, or in one after those that are sealed.
        for _ in range(2 + len(self._sealed)):
            if self._flight is None and not self.group.has_changes and not self._awaits_sync:
                break
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._flushes.append(waiter)
            self.request()
            await waiter
        if self._sync_timer is not None and not self._awaits_sync:
            self._sync_timer.cancel()
            self._sync_timer = None

    async def close(self) -> None:
        """Commit what is open, then close log and store. Raises StoreError if that can't be
        written; they are closed all the same."""
        if self._is_closed:
            return
        try:
            await self.flush()
        finally:
            for timer in (self._timer, self._lazy_timer, self._sync_timer):
                if timer is not None:
                    timer.cancel()
            self._log.stop()
            self._is_closed = True
            self._store.close()

    def abandon(self) -> None:
        """Stop without an answer to anybody, now: another replica leads. The store stays open."""
        for timer in (self._timer, self._lazy_timer, self._sync_timer):
            if timer is not None:
                timer.cancel()
        # Without a loop no request begins a group.
        self._loop, self._is_closed = None, True
        self._log.stop()
        if self.gate is not None:
            self.gate.end(NotLeading("this replica leads no more"))

    # One group.

    def _seal(self) -> CommitGroup:
        changed, self._changed = self._changed, {}
        self._write(changed)
        # After the backlogs, whose writing may note steps of messages. Like theirs, an exception
        # here must not keep the group, and all who wait for it, from the disk.
        store = self._store
        try:
            sealed = self._ledger.seal(store.sealed_row)
            if sealed is not None:
                store.journal(*sealed)
        except Exception as error:
            self._dispatch.callbacks.note("write", error)
        sealed_at = perf_counter()
        group = store.seal()
        self._dispatch.turns.release()
        group.sealed_at = sealed_at
        if group.written:
            group.on_written = self._on_written
        return group

    def _on_written(self) -> None:
        """The group in flight is with the operating system: finish those who asked for no more."""
        assert self._flight is not None
        receipts, self._flight.written = self._flight.written, []
        for receipt in receipts:
            self.finish(receipt)

    def _end(self, append: Append) -> None:
        """The group in flight is durable, or can't be written."""
        # First: a listener may request the next commit, which a group in flight would put off.
        group, self._flight = self._flight, None
        assert group is not None
        store, error = self._store, append.error
        if error is None:
            store.applied(group)
            self._awaits_sync = not group.sync and not self._log.is_always_durable
            if self._awaits_sync and self._sync_timer is None and self._loop is not None:
                self._sync_timer = self._loop.call_later(_SYNC_S, self._sync_soon)
        else:
            # Once, not for every attempt while the disk stays as it is.
            if type(error) is not type(store.last_error):
                _log.error("a commit group can't be written, it is tried again: %s", error)
            store.take_back(group, error)
        self._notify(group, error)
        if self.gate is not None:
            self.gate.look()

    def _notify(self, group: CommitGroup, error: StoreError | None) -> None:
        """Run the listeners, then hand out what they made ready."""
        dispatch = self._dispatch
        # Before the listeners: what is handed out by them is not the disk's time.
        group.ended_at = perf_counter()
        # A commit ends without a call from outside, which would have set the hub's time.
        if self._clock is not None:
            dispatch.now = max(dispatch.now, self._clock())
        group.ended_now = dispatch.now
        # Those of now: what is added or removed meanwhile counts from the next group on.
        first, later = self._first_listeners, self._later_listeners
        self._run_listeners(first, group, error)
        dispatch.callbacks.run("write", dispatch.turns.run_planned)
        self._run_listeners(later, group, error)
        dispatch.pump(dispatch.now)
        if self._flushes:
            self._end_flushes(error)

    def _run_listeners(
        self, listeners: tuple[_CommitListener, ...], group: CommitGroup, error: StoreError | None
    ) -> None:
        for stage, committed, failed in listeners:
            # As `Callbacks.run`, without a call for each.
            try:
                if error is None:
                    if committed is not None:
                        committed(group)
                elif failed is not None:
                    failed(group, error)
            except Exception as raised:
                kind = "metrics" if stage is CommitStage.METRICS else "commit listener"
                self._dispatch.callbacks.note(kind, raised)

    def _end_flushes(self, error: StoreError | None) -> None:
        flushes, self._flushes = self._flushes, []
        for waiter in flushes:
            if not waiter.done():
                waiter.set_result(None) if error is None else waiter.set_exception(error)

    def _sync_soon(self) -> None:
        self._sync_timer = None
        if self._awaits_sync:
            self.request(urgent=False)

    # The listeners of the first two stages.

    def _release(self, group: CommitGroup) -> None:
        """Visibility: its messages are given to queues and subscriptions, and handed out."""
        dispatch, now = self._dispatch, self._dispatch.now
        self.committed_id = group.newest_id
        # A backlog takes messages in order of ids. What was retained, perhaps with a group that
        # failed, is among what producers sent.
        for backlog, retained in group.retained_arrivals.items():
            group.arrivals.setdefault(backlog, []).extend(retained)
            group.arrivals[backlog].sort(key=lambda run: run.envelopes[0].id)
        # A publication may be for thousands of subscriptions. What is not released in this turn is
        # before what the next group releases, as the deferred calls are in order.
        arrivals = list(group.arrivals.items())
        for start in range(0, len(arrivals), _RELEASED):
            dispatch.defer("release", self._release_some, arrivals[start : start + _RELEASED], now)
        for reader in list(self._readers):
            dispatch.touch(reader)
            if reader.visible <= self.committed_id:
                del self._readers[reader]
        dispatch.pump(now)

    def _release_some(
        self, arrivals: list[tuple[MessageTarget, list[AcceptedMessages]]], now: float
    ) -> None:
        forgotten = self._forgotten if len(self._forgotten) else ()
        for backlog, runs in arrivals:
            if backlog not in forgotten:
                try:
                    backlog.release(runs, now)
                except Exception as error:
                    # One that raises must not keep others from getting their messages.
                    self._dispatch.callbacks.note("release", error)

    def _withdraw(self, group: CommitGroup, _error: StoreError) -> None:
        """Visibility: messages of producers were never accepted, retained ones wait for the next
        group."""
        for backlog, runs in group.arrivals.items():
            self._dispatch.callbacks.run("release", backlog.withdraw, runs)
        following = self.group
        for backlog, retained in group.retained_arrivals.items():
            retained = retained + following.retained_arrivals.get(backlog, [])
            following.retained_arrivals[backlog] = retained
        following.retained[:0] = group.retained
        self._dispatch.pump(self._dispatch.now)

    def _acknowledge(self, group: CommitGroup) -> None:
        """Receipts: everything that waits for this group is done."""
        for receipt in (*group.receipts, *group.written):
            self.finish(receipt)

    def _refuse(self, group: CommitGroup, error: StoreError) -> None:
        """Receipts: everything that waits for this group gets the error, in words for peers."""
        refused = refusal(error)
        for receipt in (*group.receipts, *group.written):
            self.finish(receipt, refused)
