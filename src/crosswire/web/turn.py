"""A request's turn: how long it may work before the event loop serves everybody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

__all__ = ["Turn"]

_TURN_S: Final = 0.005


class Turn:
    """A request's turn. What it iterates over may change at each `pause`."""

    def __init__(self, lock: asyncio.Lock, enter: Callable[[], None]) -> None:
        """`enter` is called when a turn begins: the hub measures what the event loop does."""
        self._lock = lock
        self._enter = enter
        self._is_held = False
        self._ends_at = 0.0

    async def begin(self) -> None:
        """Wait for a turn."""
        await self._lock.acquire()
        self._is_held = True
        self._enter()
        self._ends_at = time.perf_counter() + _TURN_S

    def end(self) -> None:
        """Let the next request have one."""
        if self._is_held:
            self._is_held = False
            self._lock.release()

    async def pause(self) -> None:
        """If this turn has taken long enough, let others work, and wait for the next one."""
        if time.perf_counter() >= self._ends_at:
            # Given back only after everybody else was served: else all requests that do long work
            # would have a turn in the same round of the event loop.
            await asyncio.sleep(0)
            self.end()
            await self.begin()
