"""Detects a blocked event loop.

The server calls `beat` each time it runs timers. A thread checks that these calls don't stop: only
a thread can report that the loop is blocked, and in which function, while it is blocked.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Final

from crosswire.logs import log_event
from crosswire.server.metrics import Histogram

__all__ = ["LATE_S", "Watchdog"]

_log = logging.getLogger("crosswire.watchdog")

LATE_S: Final = 5.0
"""A loop that is blocked for longer is reported; a busy one never is."""
_CHECK_S: Final = 1.0
_REPEAT_S: Final = 60.0
_MINUTE_S: Final = 60.0
_TURNS_S: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
_LAGS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)


class Watchdog:
    """`start` it on the event loop's thread; its own thread calls `check` every second.

    The two threads share a few attributes without a lock: each is written by one thread and read
    in one step. `_reported_at` is written by both, at worst a report is repeated or delayed.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.lag = Histogram(_LAGS_S)
        """Delays of timer runs."""
        self.turns = Histogram(_TURNS_S)
        """For how long each turn of the event loop kept its thread busy: `Turns.on_turn` adds."""
        self.blocked = 0
        """How many times the loop was blocked for more than `LATE_S`."""
        self._monotonic = monotonic
        self._beat_at: float | None = None
        self._worst: deque[tuple[int, float]] = deque()
        self._reported_at: float | None = None
        self._loop_thread = 0
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Expect `beat` from now on, and start the thread."""
        self._beat_at = self._monotonic()
        self._stopped.clear()
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="crosswire-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Expect no more calls of `beat`, and end the thread."""
        self._beat_at = None
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_CHECK_S)

    # On the event loop.

    def beat(self, lag_s: float) -> None:
        """Timers run now, `lag_s` later than requested."""
        now = self._monotonic()
        silent_s = self.silent_s()
        self._beat_at = now
        self.lag.add(lag_s)
        _note(self._worst, now, lag_s)
        if silent_s > LATE_S:
            self.blocked += 1
            self._reported_at = None
            log_event(
                _log, logging.WARNING, "the event loop was blocked", seconds=round(silent_s, 1)
            )

    def silent_s(self) -> float:
        """The time since the last `beat`; 0 when none is expected. From any thread."""
        # Read once: `stop` may set it to None meanwhile.
        beat_at = self._beat_at
        return 0.0 if beat_at is None else max(self._monotonic() - beat_at, 0.0)

    def worst_lag_s(self) -> float:
        """The largest delay of the last minute."""
        first = self._monotonic() - _MINUTE_S
        return max((lag for second, lag in self._worst if second >= first), default=0.0)

    # On its own thread.

    def _run(self) -> None:
        while not self._stopped.wait(_CHECK_S):
            self.check()

    def check(self) -> None:
        """Log that the loop is blocked, if it is; again every minute."""
        silent_s, now = self.silent_s(), self._monotonic()
        if silent_s <= LATE_S or (
            self._reported_at is not None and now - self._reported_at < _REPEAT_S
        ):
            return
        self._reported_at = now
        log_event(
            _log,
            logging.ERROR,
            "the event loop is blocked",
            seconds=round(silent_s, 1),
            where=_where(self._loop_thread),
        )


def _note(values: deque[tuple[int, float]], now: float, value: float) -> None:
    """Keep one entry per second, the largest: at most 60, those of the last minute."""
    second = int(now)
    if values and values[-1][0] == second:
        value = max(value, values.pop()[1])
    values.append((second, value))
    while values[0][0] < second - _MINUTE_S:
        values.popleft()


def _where(thread: int) -> str:
    """The innermost calls of a thread, the last one first."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    calls = traceback.extract_stack(frame)[-4:]
    return " < ".join(f"{each.filename}:{each.lineno} {each.name}" for each in reversed(calls))
