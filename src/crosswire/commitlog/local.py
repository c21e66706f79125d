"""The local log: RocksDB's write-ahead log, in which a group is durable when it is synced.

Durability and application are one step here. The engine writes a group to its log and its tables
in memory, and a sync brings the log to the disk. What a sync does not confirm is not acknowledged:
a group whose write or sync fails is reported as failed, and is taken back with the next one.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from threading import Lock, Thread
from time import perf_counter
from typing import Final, NamedTuple, Protocol, TypeAlias

from crosswire.commitlog.contract import Append, CommitGroup, CommitLog
from crosswire.errors import StoreError

__all__ = ["LocalLog", "LogEngine", "Sync", "Synced", "Syncer"]

_FEW: Final = 4
"""Up to this number of messages the loop waits for the disk. With more it is better to gather the
next group meanwhile."""
_HAND_OVER_S: Final = 0.001
_WEIGHT: Final = 0.1


Sync: TypeAlias = Callable[[], StoreError | None]
"""Brings a group to the disk; gives the error if that fails."""


class LogEngine(Protocol):
    """What a local log writes to: a store."""

    def write_group(self, group: CommitGroup) -> None:
        """Give it to the operating system. Raises StoreError."""

    def sync_group(self, group: CommitGroup) -> None:
        """Bring all that was written to the disk, and the group's second copies with it.

        Called on the log's thread or the event loop's. Raises StoreError.
        """


class LocalLog(CommitLog):
    """Writes and syncs groups through the engine of the store.

    `patience_s` is how long the event loop may wait for a sync; with 0 it never does.
    """

    def __init__(
        self,
        engine: LogEngine,
        patience_s: float,
        *,
        syncer: Callable[[Sync, float], Syncer] | None = None,
    ) -> None:
        """`syncer` makes what calls the engine's sync: a thread, unless time is simulated."""
        self._engine = engine
        self._syncer = (syncer or Syncer)(self._sync, patience_s)
        self._group: CommitGroup | None = None
        self._append = Append()
        self._is_started = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the thread that syncs."""
        self._is_started = True
        self._syncer.start(loop, self._on_synced)

    def stop(self) -> None:
        """Ends the thread that syncs."""
        self._syncer.stop()

    def append(self, group: CommitGroup, *, blocking: bool = False) -> Append:
        """The write is always done on this thread: it takes microseconds, and a second group must
        not overtake it. The sync is done by the log's thread. Where the disk is known to be quick
        and few messages wait for it, this one waits for the other, at most `patience_s`."""
        self._append = append = Append()
        try:
            self._engine.write_group(group)
        except StoreError as error:
            append.finish(error)
            return append
        if not group.sync:
            append.finish()
            return append
        self._group = group
        if blocking or not self._is_started:
            append.finish(self._sync())
        elif group.urgent and group.appended_count <= _FEW and self._syncer.is_quick:
            if group.on_written is not None:
                group.on_written()
            synced = self._syncer.order_and_wait()
            if synced is not None:
                append.finish(synced.error)
        else:
            # The disk first: what `on_written` causes runs while it works.
            self._syncer.order()
            if group.on_written is not None:
                group.on_written()
        return append

    def _sync(self) -> StoreError | None:
        """On the log's thread or the event loop's: the other one does nothing to the group now."""
        # Not kept until the next append: a body has all messages of its group.
        group, self._group = self._group, None
        assert group is not None
        try:
            self._engine.sync_group(group)
        except StoreError as error:
            return error
        return None

    def _on_synced(self, error: StoreError | None) -> None:
        append = self._append
        for callback in append.finish(error):
            callback(append)


class Synced(NamedTuple):
    """The outcome of a sync."""

    error: StoreError | None


class _SyncOrder:
    """One sync. Its outcome is given once: to the loop that waits for it, or, after that has given
    up, by a call of `done`. Who takes `claim` first decides."""

    __slots__ = ("claim", "error", "is_done")

    def __init__(self) -> None:
        self.claim = Lock()
        self.is_done = Lock()
        self.is_done.acquire()
        self.error: StoreError | None = None


class _OrderPipe:
    """Orders from the event loop to the thread that syncs, which waits for them.

    A pipe wakes the thread, not a lock: a system call is made without the interpreter's lock. The
    thread that a lock wakes finds that one still taken, since its owner is on its way out of the
    call that woke it, and has to be woken twice.
    """

    def __init__(self) -> None:
        self._orders: deque[_SyncOrder | None] = deque()
        self._reader, self._writer = os.pipe()

    def put(self, order: _SyncOrder | None) -> None:
        self._orders.append(order)
        os.write(self._writer, b".")

    def get(self) -> _SyncOrder | None:
        os.read(self._reader, 1)
        return self._orders.popleft()

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)
        # The numbers may be those of other files soon.
        self._reader = self._writer = -1


class Syncer:
    """Calls `sync`, which returns the error if there is one, on a thread of its own.

    The loop may wait for it: with few messages that is sooner than to be called by the loop's next
    turn, if the disk is quick. `is_quick` is whether a sync is worth waiting for: the moving
    average of recent ones is below `patience_s`. In that average one sync that took very long
    counts for dozens. Until there is an average, the disk counts as slow. A disk that was quick and
    is not is waited for no longer than `patience_s`: the loop goes on, and is called when it is
    done.
    """

    def __init__(self, sync: Sync, patience_s: float) -> None:
        self._sync = sync
        self._patience_s = patience_s
        self._average_s = 2 * patience_s
        self._thread: Thread | None = None
        self._orders: _OrderPipe
        self._taken = Lock()

    def start(
        self, loop: asyncio.AbstractEventLoop, done: Callable[[StoreError | None], None]
    ) -> None:
        """Start the thread; `done` is called on the loop when an order is done."""
        self._orders = _OrderPipe()
        # Not a pool: what that does for every order takes longer than a small group's write.
        self._thread = Thread(
            target=self._work, args=(loop, done), name="crosswire-store", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the order that it works on."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join()
            self._thread = None
            self._orders.close()

    @property
    def is_quick(self) -> bool:
        """Is waiting for a sync cheaper than having the thread do it?"""
        return self._average_s < self._patience_s

    def sync_now(self) -> StoreError | None:
        """Sync on this thread, and count the time that it takes."""
        start = perf_counter()
        error = self._sync()
        self._average_s += _WEIGHT * (perf_counter() - start - self._average_s)
        return error

    def order(self) -> None:
        """Have the thread sync, and wait until it has begun.

        It needs the interpreter's lock for a moment. If this thread did not release it, the fsync
        would begin when the loop has nothing else to do, and would save no time.
        """
        order = _SyncOrder()
        order.claim.acquire()
        self._taken.acquire(blocking=False)
        self._orders.put(order)
        self._taken.acquire(timeout=_HAND_OVER_S)

    def order_and_wait(self) -> Synced | None:
        """Have the thread sync, and wait for the outcome. None if that takes longer than
        `patience_s`: then `done` is called on the loop."""
        order = _SyncOrder()
        self._orders.put(order)
        if not order.is_done.acquire(timeout=self._patience_s) and order.claim.acquire(False):
            return None
        return Synced(order.error)

    def _work(
        self, loop: asyncio.AbstractEventLoop, done: Callable[[StoreError | None], None]
    ) -> None:
        while (order := self._orders.get()) is not None:
            if self._taken.locked():
                self._taken.release()
            order.error = self.sync_now()
            if order.claim.acquire(blocking=False):
                order.is_done.release()
                continue
            if loop.is_closed():
                return  # the program ends without having closed the store: nobody waits
            loop.call_soon_threadsafe(done, order.error)
