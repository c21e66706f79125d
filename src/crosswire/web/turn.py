"""A request's turn: how long it may work before the event loop serves everybody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

__all__ = ["Turn"]

_TURN_S: Final = 0.005
_LEAST_S: Final = 0.002
"""Where the hub has used up the turn of the event loop for others, or a busy hub would make no
progress with long lists."""


class Turn:
    """A request's turn. What it iterates over may change at each `pause`."""

    def __init__(
        self, lock: asyncio.Lock, enter: Callable[[], None], is_over: Callable[[], bool]
    ) -> None:
        """`enter` is called when a turn begins: the hub measures what the event loop does.
        `is_over`: whether the event loop has worked long enough without a look at the sockets."""
        self._lock = lock
        self._enter = enter
        self._is_over = is_over
        self._is_held = False
        self._began = 0.0

    async def begin(self) -> None:
        """Wait for a turn."""
        await self._lock.acquire()
        self._is_held = True
        self._enter()
        self._began = time.perf_counter()

    def end(self) -> None:
        """Let the next request have one."""
        if self._is_held:
            self._is_held = False
            self._lock.release()

    async def pause(self) -> None:
        """If this turn has taken long enough, let others work, and wait for the next one."""
        passed_s = time.perf_counter() - self._began
        if passed_s >= _TURN_S or (passed_s >= _LEAST_S and self._is_over()):
            # Given back only after everybody else was served: else all requests that do long work
            # would have a turn in the same round of the event loop.
            await asyncio.sleep(0)
            self.end()
            await self.begin()
