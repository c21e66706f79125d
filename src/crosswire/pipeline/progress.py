"""The steps of a run and how long each took, as lines on standard error; on a terminal, with the
count of tasks of the current step.

A step begins where the one before it ended. So the preparation of a query counts for the table that
it makes, and the steps of a run add up to its duration. Where several threads work side by side,
each moment counts for the steps of all of them in equal shares.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import SparkSession

__all__ = ["Progress", "process_start"]

_EVERY_S: Final = 0.5
_SHOWN_S: Final = 0.1
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
    """Times steps from `start` on (now by default), and prints them unless `quiet`. `seconds` has
    the duration of each, or its share, by name."""

    def __init__(self, *, quiet: bool = False, start: float | None = None) -> None:
        self._tracker: StatusTracker | None = None
        self._quiet = quiet
        self._lock = threading.Lock()
        self._last = time.monotonic() if start is None else start
        self._main = threading.get_ident()
        self._working = {self._main}
        self._shares = {self._main: 0.0}
        """By thread: the seconds that no step has been given yet."""
        self._begun = {self._main: self._last}
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
        is_alone = threading.get_ident() == self._main
        if is_alone and not self._quiet and sys.stderr.isatty():
            begun = self._begun[self._main]
            display = threading.Thread(target=self._show, args=(name, begun, done), daemon=True)
            display.start()
        try:
            yield
        finally:
            done.set()
            if display is not None:
                display.join()
        self.end(name)

    def end(self, name: str) -> None:
        """Count all the time since the last step of this thread as this one, and print its line;
        if it had the machine for itself only in part, with the time that passed."""
        thread = threading.get_ident()
        with self._lock:
            now = self._share()
            seconds = self._shares.pop(thread, 0.0)
            self._shares[thread] = 0.0
            passed, self._begun[thread] = now - self._begun[thread], now
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if not self._quiet:
            beside = f"  of {passed:.1f} s" if passed - seconds >= _SHOWN_S else ""
            print(f"  {name:<24} {seconds:8.1f} s{beside}", file=sys.stderr)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """This thread only waits for others in the body of a `with` statement."""
        thread = threading.get_ident()
        with self._lock:
            self._share()
            self._working.discard(thread)
        try:
            yield
        finally:
            with self._lock:
                self._begun[thread] = self._share()
                self._working.add(thread)

    def beside(self, work: Callable[[], None]) -> None:
        """Do some work on a thread of its own. What follows its last step is left to the next step
        of the main thread."""
        thread = threading.get_ident()
        with self._lock:
            self._begun[thread] = self._share()
            self._working.add(thread)
        try:
            work()
        finally:
            with self._lock:
                self._share()
                self._working.discard(thread)
                self._shares[self._main] += self._shares.pop(thread, 0.0)

    def _share(self) -> float:
        """Divide the time since the last call among the threads that work; returns the time."""
        now = time.monotonic()
        working = self._working or {self._main}
        for thread in working:
            share = (now - self._last) / len(working)
            self._shares[thread] = self._shares.get(thread, 0.0) + share
        self._last = now
        return now

    def _show(self, name: str, begun: float, done: threading.Event) -> None:
        while not done.wait(_EVERY_S):
            finished = total = 0
            for stage in () if self._tracker is None else self._tracker.getActiveStageIds():
                info = None if self._tracker is None else self._tracker.getStageInfo(stage)
                if info is not None:
                    finished += info.numCompletedTasks
                    total += info.numTasks
            tasks = f"{finished} of {total} tasks" if total else ""
            spent = time.monotonic() - begun
            print(f"\r  {name:<24} {spent:8.1f} s  {tasks:<24}", end="", file=sys.stderr)
        print("\r\x1b[K", end="", file=sys.stderr)
