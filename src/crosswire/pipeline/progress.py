"""Progress of a run on standard error: a line for each step; on a terminal, its count of tasks."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pyspark.sql import SparkSession

from crosswire.pipeline.spark import is_connect

__all__ = ["Progress"]

_EVERY_S: Final = 0.5


class Progress:
    """Times steps that run one after the other, and prints them unless `quiet`."""

    def __init__(self, spark: SparkSession, *, quiet: bool = False) -> None:
        # Spark Connect shows no stages of others' sessions, and has none of its own to ask for.
        self._tracker = None if is_connect(spark) else spark.sparkContext.statusTracker()
        self._quiet = quiet
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time the body of a `with` statement; the line is printed if it does not raise."""
        start = time.monotonic()
        done = threading.Event()
        display = None
        if not self._quiet and sys.stderr.isatty():
            display = threading.Thread(target=self._show, args=(name, start, done), daemon=True)
            display.start()
        try:
            yield
        finally:
            done.set()
            if display is not None:
                display.join()
        self.seconds[name] = time.monotonic() - start
        if not self._quiet:
            print(f"  {name:<24} {self.seconds[name]:8.1f} s", file=sys.stderr)

    def _show(self, name: str, start: float, done: threading.Event) -> None:
        while not done.wait(_EVERY_S):
            finished = total = 0
            for stage in () if self._tracker is None else self._tracker.getActiveStageIds():
                info = None if self._tracker is None else self._tracker.getStageInfo(stage)
                if info is not None:
                    finished += info.numCompletedTasks
                    total += info.numTasks
            tasks = f"{finished} of {total} tasks" if total else ""
            spent = time.monotonic() - start
            print(f"\r  {name:<24} {spent:8.1f} s  {tasks:<24}", end="", file=sys.stderr)
        print("\r\x1b[K", end="", file=sys.stderr)
