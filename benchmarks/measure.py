"""What the benchmarks measure with: rates over a fixed time, and what a piece of work costs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Cost", "Memory", "costs", "line", "processor_s", "rate"]


def rate(work: Callable[[], object], amount: int = 1, *, seconds: float = 1.0) -> float:
    """Units a second: `work` does `amount` of them, as often as fits."""
    work()
    rounds, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        work()
        rounds += 1
    return rounds * amount / spent


def line(name: str, per_second: float, size_bytes: int, ratio: float) -> None:
    """One row: what, how many a second, how many megabytes, how many times the yardstick."""
    megabytes = per_second * size_bytes / 1e6
    print(f"  {name:<30}{per_second:>14,.0f}/s {megabytes:>9,.0f} MB/s {ratio:>8.1f} ×")


class Cost(NamedTuple):
    """What a piece of work took: seconds by the clock, and of all processors."""

    clock: float
    processor: float

    def __call__(self, other: Cost) -> str:
        """How many times as much as the other's this is."""
        return f"{self.clock / other.clock:5.2f} ({self.processor / other.processor:5.2f}) x"


def costs(*works: Callable[[], object], rounds: int = 3, warm_up: bool = True) -> list[Cost]:
    """The best of some rounds, in which they take turns."""
    found: list[list[Cost]] = [[] for _ in works]
    for _ in range(rounds + warm_up):
        for work, taken in zip(works, found, strict=True):
            clock, processor = time.perf_counter(), processor_s()
            work()
            taken.append(Cost(time.perf_counter() - clock, processor_s() - processor))
    return [
        Cost(min(cost.clock for cost in taken), min(cost.processor for cost in taken))
        for taken in (each[warm_up:] for each in found)
    ]


def processor_s() -> float:
    """Of this process and all below it."""
    ticks = 0
    for process in _family(os.getpid()):
        try:
            told = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        ticks += sum(map(int, told[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _family(process: int) -> set[int]:
    """A process and all below it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended meanwhile
    found = {process}
    while more := {each for each, parent in parents.items() if parent in found} - found:
        found |= more
    return found


class Memory:
    """The most bytes that a Spark program has held while somebody looked: its own process, the
    Java below it, and of its Python workers that which held most."""

    def __init__(self, process: int | None = None) -> None:
        self.driver = self.java = self.worker = 0
        self._process = process or os.getpid()
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Memory:
        for process in _family(self._process):
            try:
                # From here on the kernel looks for the highest value anew.
                Path(f"/proc/{process}/clear_refs").write_text("5")
            except OSError:
                continue  # it has ended, or the kernel can't: then what was before counts too
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()

    def __str__(self) -> str:
        told = (self.worker, self.java, self.driver)
        return "worker {:,.0f}  java {:,.0f}  driver {:,.0f} MB".format(*(n / 1e6 for n in told))

    def _look(self) -> None:
        while True:
            is_last = self._done.wait(0.1)
            for process in _family(self._process):
                try:
                    self._note(process, Path(f"/proc/{process}"))
                except (OSError, IndexError, ValueError):
                    continue  # it has ended meanwhile
            if is_last:
                return

    def _note(self, process: int, told: Path) -> None:
        high = int((told / "status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
        if process == self._process:
            self.driver = max(self.driver, high)
            return
        command = (told / "cmdline").read_bytes()
        if b"pyspark.daemon" in command:
            self.worker = max(self.worker, high)
        elif command.partition(b"\0")[0].endswith(b"java"):
            self.java = max(self.java, high)
