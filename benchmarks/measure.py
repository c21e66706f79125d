"""Tools of the benchmarks: rates over a fixed time, the cost of a piece of work, peak memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Cost", "Memory", "costs", "family", "line", "processor_s", "rate"]


def rate(work: Callable[[], object], amount: int = 1, *, seconds: float = 1.0) -> float:
    """Units per second: `work` does `amount` of them and is repeated for `seconds`."""
    work()
    rounds, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        work()
        rounds += 1
    return rounds * amount / spent


def line(name: str, per_second: float, size_bytes: int, ratio: float) -> None:
    """Print a row: name, units and megabytes per second, ratio to the reference."""
    megabytes = per_second * size_bytes / 1e6
    print(f"  {name:<30}{per_second:>14,.0f}/s {megabytes:>9,.0f} MB/s {ratio:>8.1f} ×")


class Cost(NamedTuple):
    """Cost of a piece of work: elapsed seconds, and CPU seconds of all processes."""

    clock: float
    processor: float

    def __call__(self, other: Cost) -> str:
        """The ratio to the other's cost, that of CPU time in brackets."""
        return f"{self.clock / other.clock:5.2f} ({self.processor / other.processor:5.2f}) x"


def costs(*works: Callable[[], object], rounds: int = 3, warm_up: bool = True) -> list[Cost]:
    """The smallest cost of each over several rounds, in which they alternate."""
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
    """CPU time of this process and its descendants."""
    ticks = 0
    for process in family(os.getpid()):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def family(process: int) -> set[int]:
    """A process and its descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
    found = {process}
    while more := {each for each, parent in parents.items() if parent in found} - found:
        found |= more
    return found


class Memory:
    """Peak memory of a Spark program during the block: of its own process, of its Java process, and
    of the Python worker with the highest peak."""

    def __init__(self, process: int | None = None) -> None:
        self.driver = self.java = self.worker = 0
        self._process = process or os.getpid()
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Memory:
        for process in family(self._process):
            try:
                # Resets the peak that the kernel records.
                Path(f"/proc/{process}/clear_refs").write_text("5")
            except OSError:
                continue  # it has ended, or the kernel can't: then an earlier peak counts too
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()

    def __str__(self) -> str:
        peaks = (self.worker, self.java, self.driver)
        return "worker {:,.0f}  java {:,.0f}  driver {:,.0f} MB".format(*(n / 1e6 for n in peaks))

    def _sample(self) -> None:
        while True:
            is_last = self._done.wait(0.1)
            for process in family(self._process):
                try:
                    self._note(process, Path(f"/proc/{process}"))
                except (OSError, IndexError, ValueError):
                    continue  # it has ended
            if is_last:
                return

    def _note(self, process: int, folder: Path) -> None:
        high = int((folder / "status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
        if process == self._process:
            self.driver = max(self.driver, high)
            return
        command = (folder / "cmdline").read_bytes()
        if b"pyspark.daemon" in command:
            self.worker = max(self.worker, high)
        elif command.partition(b"\0")[0].endswith(b"java"):
            self.java = max(self.java, high)
