"""The hub's steady time: the wall clock at the start plus the monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["Clock"]

_APART_S: Final = 0.05


class Clock:
    """Seconds since 1970 that pass as on a stopwatch, however the system's clock is set.

    The monotonic clock stands still while the machine is suspended: nobody could have worked, so
    nothing is late afterwards. To the hub a suspended machine is a clock that jumped forward.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._start = wall() - monotonic()

    def now(self) -> float:
        return self._start + self._monotonic()

    def look(self) -> tuple[float, float] | None:
        """The wall clock and the steady time at one moment.

        None if the process was interrupted between the two: the difference would look like a jump.
        """
        before = self.now()
        wall = self._wall()
        now = self.now()
        return (wall, now) if now - before < _APART_S else None
