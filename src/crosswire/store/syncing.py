"""Bringing to the disk what is written: on a thread of its own, or at once where that is quick."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from time import perf_counter
from typing import Final

from crosswire.errors import StoreError

__all__ = ["Syncer"]

_TAKING_S: Final = 0.001
_WEIGHT: Final = 0.1


class Syncer:
    """Calls `sync`, which gives the error if there is one; never twice at a time.

    To wake a thread and to be woken by it takes longer than a quick disk does. So `is_quick` says
    whether that is worth waiting for: lately it took less than `patience_s`, on an average in which
    one that took very long counts for dozens. As long as nothing is known the disk is slow.
    """

    def __init__(self, sync: Callable[[], StoreError | None], patience_s: float) -> None:
        self._sync = sync
        self._patience_s = patience_s
        self._lately_s = 2 * patience_s
        self._thread: Thread | None = None
        self._orders: SimpleQueue[bool] = SimpleQueue()
        self._taken = Lock()

    def start(
        self, loop: asyncio.AbstractEventLoop, done: Callable[[StoreError | None], None]
    ) -> None:
        """From now on there is a thread, and `done` is called on the loop when an order is."""
        # Not a pool: what that does for every order takes longer than a small group's write.
        self._thread = Thread(
            target=self._work, args=(loop, done), name="crosswire-store", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._orders.put(False)
            self._thread.join()

    @property
    def is_quick(self) -> bool:
        return self._lately_s < self._patience_s

    def now(self) -> StoreError | None:
        start = perf_counter()
        error = self._sync()
        self._lately_s += _WEIGHT * (perf_counter() - start - self._lately_s)
        return error

    def order(self) -> None:
        """Have the thread do it, and see to it that it begins.

        It needs the interpreter for a moment. If nobody let go of that, the fsync would begin when
        there is nothing else to do, and save no time.
        """
        self._taken.acquire(blocking=False)
        self._orders.put(True)
        self._taken.acquire(timeout=_TAKING_S)

    def _work(
        self, loop: asyncio.AbstractEventLoop, done: Callable[[StoreError | None], None]
    ) -> None:
        while self._orders.get():
            self._taken.release()
            error = self.now()
            if loop.is_closed():
                return  # the program ends without having closed the store: nobody is to be told
            loop.call_soon_threadsafe(done, error)
