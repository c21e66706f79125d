"""What happens at each destination, named subscription and connection: totals, rates, latencies.

Counted by `Metrics` from the ledger's runs, an addition for each run: nothing is done per message.
Rates are those of the last five to ten seconds. What was idle for longest is forgotten where there
are too many names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log2
from typing import Final

from crosswire.hub.ledger import Step

__all__ = ["BUCKET_S", "Activities", "Activity", "LatencyWindow", "merged_percentiles_s"]

BUCKET_S: Final = 5.0
_STEPS: Final = max(Step) + 1
_REDELIVERED: Final = _STEPS
"""The index of deliveries that were not the first of their message, after those of the steps."""
_GENERATION_S: Final = 30.0
_BUCKETS: Final = 128
_PER_OCTAVE: Final = 4


class LatencyWindow:
    """Latencies of the last 30 to 60 seconds, in buckets that are 19 % apart."""

    __slots__ = ("_before", "_counts", "_generation")

    def __init__(self) -> None:
        self._generation = 0
        self._counts = [0] * _BUCKETS
        self._before = [0] * _BUCKETS

    def add(self, latency_us: int, now: float, count: int = 1) -> None:
        """Count a latency."""
        self._follow(now)
        index = int(log2(latency_us) * _PER_OCTAVE) + 1 if latency_us > 0 else 0
        self._counts[min(index, _BUCKETS - 1)] += count

    def counts(self, now: float) -> list[int]:
        """How many latencies are in which bucket."""
        self._follow(now)
        return [sum(each) for each in zip(self._counts, self._before, strict=True)]

    def _follow(self, now: float) -> None:
        generation = int(now // _GENERATION_S)
        if generation != self._generation:
            is_next = generation == self._generation + 1
            self._before = self._counts if is_next else [0] * _BUCKETS
            self._counts = [0] * _BUCKETS
            self._generation = generation


def merged_percentiles_s(
    windows: Sequence[LatencyWindow], now: float, *parts: float
) -> list[float]:
    """The latencies that these parts of all are below, such as 0.5 and 0.99; 0 without any."""
    if not windows:
        return [0.0] * len(parts)
    counts = [sum(each) for each in zip(*[window.counts(now) for window in windows], strict=True)]
    total = sum(counts)
    found = []
    for part in parts:
        seen = 0
        latency_s = 0.0
        for index, count in enumerate(counts):
            seen += count
            if total and seen >= part * total:
                latency_s = 2.0 ** (index / _PER_OCTAVE) / 1e6 if index else 0.0
                break
        found.append(latency_s)
    return found


class Activity:
    """Totals since it is known, by step, and what they were when the last buckets began."""

    __slots__ = ("_before", "_began", "bucket", "latency", "since", "totals")

    def __init__(self, now: float) -> None:
        self.totals = [0] * (_STEPS + 1)
        self.since = now
        """Since when it is counted, by the hub's time."""
        self.bucket = int(now // BUCKET_S)
        """The bucket of time in which something happened last."""
        self.latency: LatencyWindow | None = None
        """Of calls that were answered."""
        self._began = tuple(self.totals)
        self._before = self._began

    def begin(self, bucket: int) -> None:
        """Something happens in another bucket than before."""
        began = tuple(self.totals)
        self._before = self._began if bucket == self.bucket + 1 else began
        self._began = began
        self.bucket = bucket

    def redelivered(self, count: int) -> None:
        """Some of the deliveries were not the first of their message."""
        self.totals[_REDELIVERED] += count

    def answered(self, latency_us: int, now: float, count: int) -> None:
        """Calls were answered after this time."""
        if self.latency is None:
            self.latency = LatencyWindow()
        self.latency.add(latency_us, now, count)

    def total(self, *steps: Step) -> int:
        """How many messages had one of these steps."""
        return sum(self.totals[step] for step in steps)

    def rate(self, now: float, *steps: Step) -> float:
        """Such messages per second."""
        return self._rate(now, steps)

    def redelivery_rate(self, now: float) -> float:
        """Deliveries per second that were not the first of their message."""
        return self._rate(now, (_REDELIVERED,))

    def recent(self) -> int:
        """How much has happened in the last bucket and the one before it, in steps."""
        return sum(self.totals) - sum(self._before)

    def _rate(self, now: float, indexes: tuple[int, ...]) -> float:
        bucket = int(now // BUCKET_S)
        if bucket == self.bucket:
            start, since = self._before, (bucket - 1) * BUCKET_S
        elif bucket == self.bucket + 1:
            start, since = self._began, self.bucket * BUCKET_S
        else:
            return 0.0
        elapsed_s = max(now - max(since, self.since), 1.0)
        return sum(self.totals[each] - start[each] for each in indexes) / elapsed_s


class Activities:
    """Activities by name, a limited number: the one that was idle for longest is dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.by_name: dict[str, Activity] = {}
        """Those that were active last are at the end."""

    def begin(self, name: str, now: float) -> Activity:
        """The activity of a name that is new, or has something in a new bucket of time."""
        activity = self.by_name.pop(name, None)
        if activity is None:
            activity = Activity(now)
            if len(self.by_name) >= self._most:
                del self.by_name[next(iter(self.by_name))]
        else:
            activity.begin(int(now // BUCKET_S))
        self.by_name[name] = activity
        return activity

    def get(self, name: str) -> Activity | None:
        """None if nothing happened there lately."""
        return self.by_name.get(name)

    def active(self, now: float) -> Iterator[tuple[str, Activity]]:
        """Those with something in this bucket of time or the one before it, the latest first."""
        least = int(now // BUCKET_S) - 1
        for name in reversed(self.by_name):
            activity = self.by_name[name]
            if activity.bucket < least:
                return
            yield name, activity

    def forget(self, name: str) -> None:
        """It is gone for good."""
        self.by_name.pop(name, None)
