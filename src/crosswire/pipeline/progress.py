"""The steps of a run and how long each took, as lines on standard error; on a terminal, with the
count of tasks of the current step.

A step begins where the one before it ended. So the preparation of a query counts for the table that
it makes, and the steps of a run add up to its duration.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import SparkSession

__all__ = ["Progress", "process_start"]

_EVERY_S: Final = 0.5
_START_TIME: Final = 19
"""The index of a process's start among the fields of /proc/PID/stat that follow its name."""


def process_start() -> float:
    """When this process was started, on the clock of `time.monotonic`: before its first line of
    Python. Now, where the system does not show it."""
    now = time.monotonic()
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - max(age, 0.0)


class Progress:
    """Times steps that follow one another, from `start` on (now by default), and prints them unless
    `quiet`. `seconds` has the duration of each, in order."""

    def __init__(self, *, quiet: bool = False, start: float | None = None) -> None:
        self._tracker: StatusTracker | None = None
        self._quiet = quiet
        self._last_end = time.monotonic() if start is None else start
        self.seconds: dict[str, float] = {}

    def watch(self, spark: SparkSession) -> None:
        """Show the tasks of this session, if it is one of this process: Spark Connect shows no
        stages."""
        # Imported here: it loads Spark, and the first step begins before that.
        from crosswire.pipeline.spark import is_connect

        if not is_connect(spark):
            self._tracker = spark.sparkContext.statusTracker()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A step that ends with the body of a `with` statement; the line is printed if that does
        not raise. Steps of the same name are added up."""
        done = threading.Event()
        display = None
        if not self._quiet and sys.stderr.isatty():
            display = threading.Thread(target=self._show, args=(name, done), daemon=True)
            display.start()
        try:
            yield
        finally:
            done.set()
            if display is not None:
                display.join()
        self.end(name)

    def end(self, name: str) -> None:
        """Count all the time since the last step as this one, and print its line."""
        now = time.monotonic()
        seconds = now - self._last_end
        self._last_end = now
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if not self._quiet:
            print(f"  {name:<24} {seconds:8.1f} s", file=sys.stderr)

    def _show(self, name: str, done: threading.Event) -> None:
        while not done.wait(_EVERY_S):
            finished = total = 0
            for stage in () if self._tracker is None else self._tracker.getActiveStageIds():
                info = None if self._tracker is None else self._tracker.getStageInfo(stage)
                if info is not None:
                    finished += info.numCompletedTasks
                    total += info.numTasks
            tasks = f"{finished} of {total} tasks" if total else ""
            spent = time.monotonic() - self._last_end
            print(f"\r  {name:<24} {spent:8.1f} s  {tasks:<24}", end="", file=sys.stderr)
        print("\r\x1b[K", end="", file=sys.stderr)
