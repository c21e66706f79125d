"""Keeps Python's garbage collections short.

A collection is part of a turn of the event loop, and a full one looks at every object that is not
frozen: with fifty thousand queues in use that takes tenths of a second. Nearly all of what a hub
keeps is freed without the collector; only closed connections, removed queues and subscriptions, and
a hub that ceases to lead need it, as their objects refer to each other. So full collections come
early, while little is new, and what survives one that took noticeably long is frozen: the next does
not look at it.

What is frozen and becomes garbage later stays in memory. When that is much, one collection looks at
all objects again.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from typing import Final, Protocol

__all__ = ["Collector", "Departures"]

_THRESHOLDS: Final = (2_000, 5, 1)
"""Of new objects the youngest are collected after 2,000 (0.3 ms), all after 20,000 (2 to 6 ms).
With Python's defaults a busy hub spends a sixth of its time on collections that find nothing."""
_LONG_S: Final = 0.002
_CHECK_S: Final = 10.0
_MOST_DEPARTED: Final = 10_000
"""Connections that have ended, and queues that were removed, and are still in memory: about 4 KB
each."""


class Departures(Protocol):
    """Knows objects that nobody uses any more, and that only the collector frees."""

    @property
    def departed(self) -> int:
        """How many of them are still in memory."""


class Collector:
    """Sets up Python's collector for a process that runs a hub."""

    def __init__(self, departures: Sequence[Departures]) -> None:
        self._departures = departures
        self._began_s = 0.0
        self._has_frozen = False
        self._frees_all = False
        self._most_departed = _MOST_DEPARTED
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Freeze what is there: modules, configuration, what was loaded from the disk."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_THRESHOLDS)
        gc.callbacks.append(self._note)
        self._check()

    def stop(self) -> None:
        """Collect as Python does by default."""
        gc.callbacks.remove(self._note)
        gc.unfreeze()
        gc.set_threshold(700, 10, 10)
        if self._timer is not None:
            self._timer.cancel()

    @property
    def departed(self) -> int:
        """What has ended and is still in memory."""
        return sum(each.departed for each in self._departures)

    def free_later(self) -> None:
        """Much has ended at once: collect everything, some seconds later."""
        self._frees_all = True

    def _note(self, phase: str, info: dict[str, int]) -> None:
        """Called by Python, in any thread, before and after each collection."""
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began_s = time.thread_time()
        elif time.thread_time() - self._began_s > _LONG_S:
            gc.freeze()
            self._has_frozen = True

    def _check(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_CHECK_S, self._check)
        self.free_departed()

    def free_departed(self) -> None:
        """Collect everything if too much has ended and is still in memory."""
        if self._frees_all or (self._has_frozen and self.departed > self._most_departed):
            self._has_frozen = self._frees_all = False
            gc.unfreeze()
            gc.collect()
            # What is left is in use: the hub keeps a link for a while, for example.
            self._most_departed = max(_MOST_DEPARTED, 2 * self.departed)
