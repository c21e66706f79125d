"""What a run is doing, on standard error: a line a step, with a count of tasks on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pyspark.sql import SparkSession

__all__ = ["Progress"]

_EVERY_S: Final = 0.5


class Progress:
    """Steps that run one after the other; `quiet` says nothing."""

    def __init__(self, spark: SparkSession, *, quiet: bool = False) -> None:
        self._tracker = spark.sparkContext.statusTracker()
        self._quiet = quiet
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        start = time.monotonic()
        done = threading.Event()
        shown = None
        if not self._quiet and sys.stderr.isatty():
            shown = threading.Thread(target=self._show, args=(what, start, done), daemon=True)
            shown.start()
        try:
            yield
        finally:
            done.set()
            if shown is not None:
                shown.join()
        self.seconds[what] = time.monotonic() - start
        if not self._quiet:
            print(f"  {what:<24} {self.seconds[what]:8.1f} s", file=sys.stderr)

    def _show(self, what: str, start: float, done: threading.Event) -> None:
        while not done.wait(_EVERY_S):
            finished = total = 0
            for stage in self._tracker.getActiveStageIds():
                info = self._tracker.getStageInfo(stage)
                if info is not None:
                    finished += info.numCompletedTasks
                    total += info.numTasks
            tasks = f"{finished} of {total} tasks" if total else ""
            spent = time.monotonic() - start
            print(f"\r  {what:<24} {spent:8.1f} s  {tasks:<24}", end="", file=sys.stderr)
        print("\r\x1b[K", end="", file=sys.stderr)
