"""Samples the hub every second: rates, lengths, ages, latencies, commits, connections and the disk.

The hub as a whole, and single queues, topics, services and named subscriptions: the busiest, and
those that somebody asked for lately. Both are limited, as each takes about a hundred kilobytes.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest
from itertools import islice
from math import floor
from pathlib import Path
from typing import Final

from crosswire.access import parse_subscription_label
from crosswire.envelope import MICROSECONDS
from crosswire.gateways.context import GatewayContext
from crosswire.hub.hub import Hub
from crosswire.hub.ledger import Step
from crosswire.hub.subscriptions import Subscription
from crosswire.hub.turns import TurnShare
from crosswire.server.activity import Activity, merged_percentiles_s
from crosswire.server.metrics import Histogram, Metrics
from crosswire.server.time_series import Measure, SeriesGroup
from crosswire.server.watchdog import Watchdog

__all__ = ["Statistics", "until_next_sample"]

_SAMPLE_S: Final = 1.0
_BUSIEST: Final = 64
_ASKED: Final = 36
_ASKED_S: Final = 600.0
_CHOSEN: Final = 2_000
"""Names that are compared for being the busiest, the ones that were active last."""
_DISK_S: Final = 10.0
_SLICE: Final = 100
_SLICE_S: Final = 0.001
_SLICE_PAUSE_S: Final = 0.01
_REST: Final = 20
"""A round over all queues is followed by a pause of this many times the time that it worked."""
_LONGEST_S: Final = 3.0

_FLOW: Final = (
    Measure("accepted_per_s"),
    Measure("delivered_per_s"),
    Measure("settled_per_s"),
    Measure("failed_per_s"),
    Measure("dead_per_s"),
    Measure("redelivered_per_s"),
)
_BACKLOG: Final = (*_FLOW, Measure("length"), Measure("oldest_age_s", "max"), Measure("consumers"))
_SERVICE: Final = (
    Measure("calls_per_s"),
    Measure("errors_per_s"),
    Measure("waiting"),
    Measure("p50_s", "max"),
    Measure("p99_s", "max"),
)
_HUB: Final = (
    *_FLOW,
    Measure("calls_per_s"),
    Measure("errors_per_s"),
    Measure("messages"),
    Measure("dead_letters"),
    Measure("delivery_p50_s", "max"),
    Measure("delivery_p99_s", "max"),
    Measure("settlement_p50_s", "max"),
    Measure("settlement_p99_s", "max"),
    Measure("commits_per_s"),
    Measure("commit_p50_s", "max"),
    Measure("commit_p99_s", "max"),
    Measure("connections"),
    Measure("memory_bytes"),
    Measure("loop_lag_s", "max"),
    Measure("store_bytes"),
    Measure("lake_bytes"),
    Measure("free_bytes"),
)


def until_next_sample(now: float) -> float:
    """How long to wait for the middle of the next second: every second has a sample, unless it
    comes half a second late. Waiting for a second each time would skip one now and then, since each
    timer is a little late."""
    return floor(now) + 1.5 * _SAMPLE_S - now


class Statistics:
    """The sampler and its series. Use it on the event loop."""

    def __init__(
        self,
        hub: Hub,
        metrics: Metrics,
        context: GatewayContext,
        watchdog: Watchdog,
        *,
        store: Path,
        lake: Path,
    ) -> None:
        self.hub = SeriesGroup(_HUB)
        """Of the hub as a whole."""
        self._source = hub
        self._metrics = metrics
        self._context = context
        self._watchdog = watchdog
        self._folders = (store, lake)
        self._groups: dict[str, SeriesGroup] = {}
        self._asked: dict[str, float] = {}
        self._busiest: set[str] = set()
        self._before: dict[str, tuple[int, ...]] = {}
        self._counts_before: dict[str, list[int]] = {}
        self._sampled_at = 0.0
        self._totals = (0, 0, 0, 0)
        self._disk = (0, 0, 0)
        self._disk_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._round_timer: asyncio.TimerHandle | None = None
        self._measuring: asyncio.Future[tuple[int, int, int]] | None = None
        self._sampling: Iterator[None] | None = None
        """The sample that is being taken."""
        self._sample_share = TurnShare(hub.turns, self._continue_sample)
        self._is_stopped = False

    def start(self) -> None:
        """Take a sample every second from now on."""
        self._sampled_at = self._source_now()
        self._round()
        self._plan()

    def stop(self) -> None:
        """Take no more samples."""
        self._is_stopped = True
        for timer in (self._timer, self._round_timer):
            if timer is not None:
                timer.cancel()

    # Reading.

    @property
    def totals(self) -> tuple[int, int, int, int]:
        """Queues, their messages and the size of these, and dead letters, as of the last round over
        all queues."""
        return self._totals

    def group(self, name: str) -> SeriesGroup | None:
        """The series of a destination, or of a named subscription by its label in the ledger. They
        begin now if nobody asked for them before; None if there is nothing of that name."""
        now = self._source_now()
        group = self._groups.get(name)
        if group is None:
            measures = self._measures(name)
            if measures is None:
                return None
            self._make_room(now)
            group = self._groups[name] = SeriesGroup(measures)
        self._asked[name] = now
        return group

    def _make_room(self, now: float) -> None:
        """Forget what nobody asked for lately; of too many, the one that was asked for first."""
        for name, asked in list(self._asked.items()):
            if now - asked > _ASKED_S:
                del self._asked[name]
        while len(self._asked) >= _ASKED:
            del self._asked[min(self._asked, key=lambda each: self._asked[each])]
        self._forget()

    def _forget(self) -> None:
        for name in self._groups.keys() - self._asked.keys() - self._busiest:
            del self._groups[name]
            self._before.pop(name, None)

    def _measures(self, name: str) -> tuple[Measure, ...] | None:
        if name.startswith("queue/"):
            return _BACKLOG if name in self._source.store.destinations() else None
        if name.startswith("topic/"):
            return _FLOW if name in self._source.topics_by_name() else None
        if name.startswith("service/"):
            return _SERVICE
        return None if self._subscription(name) is None else _BACKLOG

    def _subscription(self, label: str) -> Subscription | None:
        owner, name = parse_subscription_label(label)
        return self._source.subscriptions.get(name, owner)

    # Sampling.

    def _source_now(self) -> float:
        return self._context.now()

    def _plan(self) -> None:
        if not self._is_stopped:
            wait_s = until_next_sample(self._source_now())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._tick)

    def _tick(self) -> None:
        if self._sampling is None:
            self._sampling = self._sample_steps(self._source_now())
            self._sample_share.later()
        self._plan()

    def _continue_sample(self) -> None:
        self._source.callbacks.run("statistics", self._sample_on)

    def _sample_on(self) -> None:
        sampling, self._sampling = self._sampling, None
        if sampling is None or self._is_stopped:
            return
        for _ in sampling:
            if self._source.turns.is_over():
                self._sampling = sampling
                self._sample_share.later()
                return

    def sample(self, now: float) -> None:
        """Take a sample."""
        for _ in self._sample_steps(now):
            pass

    def _sample_steps(self, now: float) -> Iterator[None]:
        """Take a sample in short steps: with a hundred series it takes some milliseconds, which the
        turn of the event loop may not have."""
        elapsed_s = max(now - self._sampled_at, 0.001)
        self._sampled_at = now
        second = int(now)
        self.hub.add(second, self._sample_hub(elapsed_s))
        yield
        if second % 5 == 0:
            yield from self._choose_busiest(now)
        for name, group in list(self._groups.items()):
            if name not in self._groups:
                # Forgotten since the last step.
                continue
            values = self._sample_name(name, elapsed_s, now)
            if values is not None and len(values) == len(group.measures):
                group.add(second, values)
            elif name not in self._asked:
                del self._groups[name]
            yield
        if now - self._disk_at >= _DISK_S and self._measuring is None:
            self._disk_at = now
            self._measure_disk()

    def _choose_busiest(self, now: float) -> Iterator[None]:
        active = []
        for name, activity in self._metrics.destinations.active(now):
            active.append((activity.recent(), name))
            if len(active) >= _CHOSEN:
                break
        self._busiest = {name for _, name in nlargest(_BUSIEST, active)}
        self._forget()
        for name in self._busiest:
            if name not in self._groups:
                measures = self._measures(name)
                if measures is not None:
                    self._groups[name] = SeriesGroup(measures)
                yield

    def _rates(self, name: str, activity: Activity | None, elapsed_s: float) -> tuple[float, ...]:
        """Of each step, and of redeliveries, since the last sample."""
        totals = tuple(activity.totals) if activity is not None else ()
        before = self._before.get(name)
        self._before[name] = totals
        if not totals:
            return (0.0,) * (max(Step) + 2)
        if before is None or len(before) != len(totals):
            # Not the total since the start, as if all of it was in this second.
            before = totals
        return tuple(
            max(now - then, 0) / elapsed_s for now, then in zip(totals, before, strict=True)
        )

    @staticmethod
    def _flow(rates: tuple[float, ...]) -> tuple[float, ...]:
        return (
            rates[Step.ACCEPTED],
            rates[Step.DELIVERED],
            rates[Step.SETTLED],
            rates[Step.REFUSED] + rates[Step.RETURNED],
            rates[Step.DEAD],
            rates[-1],
        )

    def _sample_name(self, name: str, elapsed_s: float, now: float) -> tuple[float, ...] | None:
        """None if there is nothing of that name any more."""
        activity = self._metrics.destinations.get(name)
        rates = self._rates(name, activity, elapsed_s)
        if name.startswith("service/"):
            return self._sample_service(name, rates, activity, now)
        flow = self._flow(rates)
        hub = self._source
        if name.startswith("topic/"):
            return flow if name in hub.topics_by_name() else None
        if name.startswith("queue/"):
            if name not in hub.store.destinations():
                return None
            queue = hub.queue(name)
            return (*flow, queue.length, self._age_s(queue.oldest_us(), now), len(queue.consumers))
        subscription = self._subscription(name)
        if subscription is None:
            return None
        return (
            *flow,
            len(subscription.memory.items),
            self._age_s(subscription.oldest_us(), now),
            len(subscription.consumers),
        )

    def _sample_service(
        self, name: str, rates: tuple[float, ...], activity: Activity | None, now: float
    ) -> tuple[float, ...]:
        latency = None if activity is None else activity.latency
        percentiles = merged_percentiles_s([] if latency is None else [latency], now, 0.5, 0.99)
        waiting = self._source.services.load(name)[1]
        calls = rates[Step.ANSWERED] + rates[Step.FAILED]
        return (calls, rates[Step.FAILED], waiting, *percentiles)

    def _age_s(self, oldest_us: int, now: float) -> float:
        if not oldest_us:
            return 0.0
        return max(self._source.wall.at(now) - oldest_us / MICROSECONDS, 0.0)

    def _sample_hub(self, elapsed_s: float) -> tuple[float, ...]:
        metrics, context = self._metrics, self._context
        rates = self._rates("", metrics.total, elapsed_s)
        commits = self._since("commits", [metrics.commit_seconds])
        bounds = metrics.commit_seconds.bounds
        lag = self._since("lag", [self._watchdog.lag])
        return (
            *self._flow(rates),
            rates[Step.ANSWERED] + rates[Step.FAILED],
            rates[Step.FAILED],
            self._totals[1],
            self._totals[3],
            *self._latencies(Step.DELIVERED),
            *self._latencies(Step.SETTLED),
            sum(commits) / elapsed_s,
            _percentile(bounds, commits, 0.5),
            _percentile(bounds, commits, 0.99),
            len(context.gateways),
            context.budget.held_bytes,
            _percentile(self._watchdog.lag.bounds, lag, 0.99),
            *self._disk,
        )

    def _latencies(self, step: Step) -> tuple[float, float]:
        histograms = [
            series.histogram
            for (_, _, each), series in self._metrics.series.items()
            if each is step and series.histogram is not None
        ]
        if not histograms:
            return 0.0, 0.0
        counts = self._since(step.name, histograms)
        bounds = histograms[0].bounds
        return _percentile(bounds, counts, 0.5), _percentile(bounds, counts, 0.99)

    def _since(self, name: str, histograms: Sequence[Histogram]) -> list[int]:
        """The counts of all of these together, since the last sample."""
        counts = [sum(each) for each in zip(*[each.counts for each in histograms], strict=True)]
        before = self._counts_before.get(name, counts)
        self._counts_before[name] = counts
        return [now - then for now, then in zip(counts, before, strict=True)]

    # All queues, in slices: there may be a hundred thousand.

    def _round(self) -> None:
        destinations = list(self._source.store.destinations())
        self._continue_round(iter(destinations), [0, 0, 0, 0], 0.0)

    def _continue_round(self, names: Iterator[str], sums: list[int], took_s: float) -> None:
        if self._is_stopped:
            return
        loop = asyncio.get_running_loop()
        start = time.perf_counter()
        while time.perf_counter() - start < _SLICE_S:
            some = list(islice(names, _SLICE))
            if not some:
                self._totals = (sums[0], sums[1], sums[2], sums[3])
                took_s += time.perf_counter() - start
                wait_s = max(_SAMPLE_S, _REST * min(took_s, _LONGEST_S))
                self._round_timer = loop.call_later(wait_s, self._round)
                return
            queues = [name for name in some if name.startswith("queue/")]
            for name, (length, size_bytes) in zip(queues, self._source.depths(queues), strict=True):
                if name.endswith("/dead"):
                    sums[3] += length
                else:
                    sums[1] += length
                    sums[2] += size_bytes
            sums[0] += len(queues)
        took_s += time.perf_counter() - start
        self._round_timer = loop.call_later(
            _SLICE_PAUSE_S, self._continue_round, names, sums, took_s
        )

    # The disk, on a thread.

    def _measure_disk(self) -> None:
        loop = asyncio.get_running_loop()
        store, lake = self._folders
        self._measuring = loop.run_in_executor(None, _disk_use, store, lake)
        self._measuring.add_done_callback(self._on_measured)

    def _on_measured(self, done: asyncio.Future[tuple[int, int, int]]) -> None:
        self._measuring = None
        if not done.cancelled() and done.exception() is None:
            self._disk = done.result()


def _disk_use(store: Path, lake: Path) -> tuple[int, int, int]:
    free = shutil.disk_usage(store).free if store.is_dir() else 0
    return folder_bytes(store), folder_bytes(lake), free


def folder_bytes(folder: Path, pause: Callable[[float], None] = time.sleep) -> int:
    """On a thread: the size of all files below a folder; 0 if there is none."""
    size_bytes = 0
    folders = [str(folder)]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except (FileNotFoundError, NotADirectoryError):
            # A folder of the lake that a compaction replaced.
            continue
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    size_bytes += entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue
        pause(0.0)
    return size_bytes


def _percentile(bounds: Sequence[float], counts: Sequence[int], part: float) -> float:
    """The bound that this part of the values is below; 0 without values."""
    total = sum(counts)
    seen = 0
    for index, count in enumerate(counts):
        seen += count
        if total and seen >= part * total:
            return bounds[min(index, len(bounds) - 1)]
    return 0.0
