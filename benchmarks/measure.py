"""Timing for the benchmarks: rates over a fixed time, and a line to print them in."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["line", "rate"]


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
