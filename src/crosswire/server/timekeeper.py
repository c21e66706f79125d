"""The clock of a hub that runs: its timers, and what is checked every tenth of a second."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from crosswire.budget import trim_memory
from crosswire.gateways.context import GatewayContext
from crosswire.hub.hub import Hub
from crosswire.hub.wall import Clock
from crosswire.server.watchdog import Watchdog

__all__ = ["Timekeeper"]

_log = logging.getLogger("crosswire.server")

_TICK_S: Final = 0.1
_AFTER_FAILURE_S: Final = 1.0
_IDLE_CHECK_S: Final = 10.0
_TRIM_BYTES: Final = 32 << 20
"""When peers hold this much less than before, the allocator gives its free pages back."""


class Timekeeper:
    """Runs the hub's timers at their deadlines, and at least every tenth of a second, in which the
    watchdog, the wall clock, memory and idle peers are checked."""

    def __init__(self, hub: Hub, context: GatewayContext, clock: Clock, watchdog: Watchdog) -> None:
        self._hub = hub
        self._context = context
        self._clock = clock
        self._watchdog = watchdog
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._idle_at = 0.0
        self._most_held_bytes = 0

    def start(self) -> None:
        """Run what is due, and from now on what becomes due."""
        self._hub.on_earlier_deadline(self._advance)
        self._timer_at = asyncio.get_running_loop().time()
        self._watchdog.start()
        self._hub.turns.on_turn = self._watchdog.turns.add
        self._keep_time()

    def stop(self) -> None:
        """Run no more timers."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._watchdog.stop()

    def late_s(self) -> float:
        """How long the hub's next deadline has been overdue; 0 if it is not."""
        deadline = self._hub.next_deadline()
        return 0.0 if deadline is None else max(self._context.now() - deadline, 0.0)

    def _advance(self) -> None:
        """Run timers earlier: a new deadline is before the next run."""
        loop, deadline = asyncio.get_running_loop(), self._hub.next_deadline()
        if self._timer is None or deadline is None:
            return
        wait_s = max(deadline - self._context.now(), 0.0)
        if loop.time() + wait_s < self._timer_at:
            self._timer.cancel()
            self._set_timer(wait_s)

    def _set_timer(self, wait_s: float) -> None:
        # Kept beside the handle: uvloop's handles don't have the time at which they run.
        loop = asyncio.get_running_loop()
        self._timer_at = loop.time() + wait_s
        self._timer = loop.call_later(wait_s, self._keep_time)

    def _keep_time(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        self._hub.turns.enter()
        self._watchdog.beat(max(loop.time() - self._timer_at, 0.0))
        shortest_s = 0.0
        try:
            self._run_timers()
            self._close_idle(loop.time())
            self._check_memory(loop)
            self._check_newcomers(loop.time())
        except Exception:
            self._context.count("failed", "", "clock")
            _log.exception("running timers failed")
            shortest_s = _AFTER_FAILURE_S
        finally:
            # In any case: without this no timer would ever run again.
            deadline = self._hub.next_deadline()
            wait_s = _TICK_S if deadline is None else min(deadline - self._context.now(), _TICK_S)
            self._set_timer(max(wait_s, shortest_s))

    def _run_timers(self) -> None:
        now = self._context.now()
        look = self._clock.look()
        if look is not None:
            self._hub.follow_wall(*look)
        deadline = self._hub.next_deadline()
        if deadline is not None and deadline <= now:
            self._hub.handle_deadline(now)

    def _close_idle(self, loop_time: float) -> None:
        idle_s = self._context.config.connections.idle_s
        if idle_s and loop_time >= self._idle_at:
            self._idle_at = loop_time + min(idle_s / 4, _IDLE_CHECK_S)
            for gateway in list(self._context.gateways.values()):
                self._hub.callbacks.run("idle", gateway.close_idle, idle_s, loop_time)

    def _check_memory(self, loop: asyncio.AbstractEventLoop) -> None:
        budget = self._context.budget
        budget.check(loop.time())
        self._most_held_bytes = max(self._most_held_bytes, budget.held_bytes)
        if self._most_held_bytes - budget.held_bytes > _TRIM_BYTES:
            self._most_held_bytes = budget.held_bytes
            loop.run_in_executor(None, trim_memory)

    def _check_newcomers(self, loop_time: float) -> None:
        expired = self._context.newcomers.check(loop_time)
        if expired:
            self._context.count("turned_away", "", "time", by=expired)
