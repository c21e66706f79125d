"""What the hub counts and measures, in Prometheus' text format.

Nothing is counted per message: a commit listener goes through the ledger's runs, each of which is
about many messages, once per commit group. No peer's text becomes a label, so the number of series
is bounded: protocols, kinds of destinations, steps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from crosswire.commitlog.contract import CommitGroup
from crosswire.errors import StoreError
from crosswire.hub.commits import CommitStage
from crosswire.hub.hub import Hub
from crosswire.hub.ledger import LedgerPeer, LedgerRun, Step
from crosswire.server.activity import BUCKET_S, Activities, Activity

__all__ = ["Histogram", "Metrics", "render"]

_LATENCIES_S: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
    60.0,
)
_SIZES: Final = (0.0, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0)
_TIMED: Final = (Step.DELIVERED, Step.SETTLED, Step.ANSWERED)
_SAMPLES: Final = 4
_REMEMBERED: Final = 50_000
_SERIES: Final = 1_000
_FEW_RUNS: Final = 8
_UNCOUNTED: Final = 32
"""Groups of a few runs that are counted together."""
_MANY_RUNS: Final = 256
"""Of a larger group this many runs are counted at once, in less than half a millisecond."""
_KIND: Final = slice(6)
"""What kinds of destinations differ in."""
_ACTIVITIES: Final = 20_000
"""Destinations and subscriptions, and as many connections, of which rates are known."""


class Histogram:
    """Counts in buckets with upper bounds, and a sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, weight: int = 1) -> None:
        """Count a value `weight` times."""
        self.counts[bisect_left(self.bounds, value)] += weight
        self.total += value * weight

    def lines(self, name: str, labels: str = "") -> Iterator[str]:
        """The samples of the histogram; `labels` are formatted already."""
        comma = "," if labels else ""
        running = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            running += count
            text = bound if isinstance(bound, str) else f"{bound:g}"
            yield f'{name}_bucket{{{labels}{comma}le="{text}"}} {running}'
        braces = f"{{{labels}}}" if labels else ""
        yield f"{name}_sum{braces} {self.total:.6f}"
        yield f"{name}_count{braces} {running}"


class _AcceptTimes:
    """When messages were accepted. Ids grow with time, so one entry serves a whole run."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._times: list[int] = []
        self.latest = -1
        """The time of the last entry, which need not be added again: a batch for many queues has a
        run for each."""

    def add(self, first: int, time_us: int) -> None:
        # Not an older one again.
        if self._firsts and first <= self._firsts[-1]:
            return
        self._firsts.append(first)
        self._times.append(time_us)
        self.latest = time_us
        if len(self._firsts) > 2 * _REMEMBERED:
            del self._firsts[:_REMEMBERED], self._times[:_REMEMBERED]

    def time_of(self, identifier: int) -> int | None:
        index = bisect_right(self._firsts, identifier) - 1
        return self._times[index] if index >= 0 else None


class _StepSeries:
    """How many messages of a protocol and kind had a step, and for some steps after which time."""

    __slots__ = ("count", "histogram")

    def __init__(self, step: Step) -> None:
        self.count = 0
        self.histogram = Histogram(_LATENCIES_S) if step in _TIMED else None


class _UncountedGroup:
    """A group of which the first `counted` runs are counted, with `accepted` messages in them."""

    __slots__ = ("accepted", "counted", "ended", "runs", "took_s", "waited_s")

    def __init__(self, runs: list[LedgerRun], group: CommitGroup) -> None:
        self.runs = runs
        self.counted = 0
        self.accepted = 0
        self.took_s = group.ended_at - group.sealed_at
        self.waited_s = group.waited_s
        self.ended = group.ended_now


class Metrics:
    """A listener of a hub's commits, which counts the ledger's runs of each group.

    Small groups are counted some at a time, or when somebody looks: where messages come one by one,
    each would find the code and the counters in no cache of the processor. Large ones, of
    publications to thousands, are counted in parts: the turn of the event loop in which a commit
    ends has enough to do.
    """

    def __init__(self, hub: Hub) -> None:
        self.commits_failed = 0
        self._series: dict[tuple[str, str, Step], _StepSeries] = {}
        self._commit_seconds = Histogram(_LATENCIES_S)
        self._commit_messages = Histogram(_SIZES)
        self._disk_waits = Histogram(_LATENCIES_S)
        self._total = Activity(hub.now)
        self._destinations = Activities(_ACTIVITIES)
        self._connections = Activities(_ACTIVITIES)
        self._uncounted: deque[_UncountedGroup] = deque()
        self._is_deferred = False
        self._hub = hub
        self._accept_times = _AcceptTimes()
        self._steps: dict[tuple[str, str], list[_StepSeries | None]] = {}
        hub.commits.add_listener(CommitStage.METRICS, self._committed, self._failed)

    def _committed(self, group: CommitGroup) -> None:
        """Count what happened with the group. The ledger's stage is before this one."""
        runs = self._hub.ledger.committed_runs
        self._uncounted.append(_UncountedGroup(runs, group))
        if self._is_deferred:
            # After those before it.
            return
        if len(runs) > _MANY_RUNS:
            self._defer()
        elif len(runs) > _FEW_RUNS or len(self._uncounted) >= _UNCOUNTED:
            self._count_groups()

    def _defer(self) -> None:
        self._is_deferred = True
        self._hub.defer("metrics", self._count_part)

    def _count_part(self) -> None:
        self._is_deferred = False
        if self._uncounted:
            self._hub.callbacks.run("metrics", self._count_some)
        if self._uncounted:
            self._defer()

    def _count_groups(self) -> None:
        while self._uncounted:
            # Who looks at a figure must not get the exception of another one.
            self._hub.callbacks.run("metrics", self._count_some)

    def _count_some(self) -> None:
        """Count a part of the oldest group, and forget it when all of it is counted."""
        group = self._uncounted[0]
        start, group.counted = group.counted, group.counted + _MANY_RUNS
        is_last = group.counted >= len(group.runs)
        if is_last:
            self._uncounted.popleft()
        part = group.runs[start : group.counted] if start or not is_last else group.runs
        try:
            group.accepted += self.count(part, group.ended)
        except Exception:
            if not is_last:
                self._uncounted.popleft()
            raise
        if is_last:
            self._commit_seconds.add(group.took_s)
            self._disk_waits.add(group.waited_s)
            self._commit_messages.add(group.accepted)

    def _failed(self, _group: CommitGroup, _error: StoreError) -> None:
        """Count the failure; the steps are counted with the group that they are committed with."""
        self.commits_failed += 1

    @property
    def series(self) -> dict[tuple[str, str, Step], _StepSeries]:
        """By protocol, kind of destination, and step."""
        self._count_groups()
        return self._series

    @property
    def commit_seconds(self) -> Histogram:
        """How long commits took."""
        self._count_groups()
        return self._commit_seconds

    @property
    def commit_messages(self) -> Histogram:
        """How many messages each commit accepted."""
        self._count_groups()
        return self._commit_messages

    @property
    def disk_waits(self) -> Histogram:
        """For how long the event loop waited for the disk, in each commit."""
        self._count_groups()
        return self._disk_waits

    @property
    def total(self) -> Activity:
        """Of all destinations together."""
        self._count_groups()
        return self._total

    @property
    def destinations(self) -> Activities:
        """By destination; those of named subscriptions by what the ledger calls them, which has no
        slash."""
        self._count_groups()
        return self._destinations

    @property
    def connections(self) -> Activities:
        """By the name of the connection that produced, or got, the messages."""
        self._count_groups()
        return self._connections

    @property
    def callbacks_failed(self) -> Counter[str]:
        """How many callbacks raised, by kind."""
        return self._hub.callbacks.failed

    def count(self, runs: Iterable[LedgerRun], now: float) -> int:
        """Add the runs to the series; returns how many messages were accepted."""
        accepted = 0
        bucket = int(now // BUCKET_S)
        destinations, connections, total = self._destinations, self._connections, self._total
        if total.bucket != bucket:
            total.begin(bucket)
        peer: LedgerPeer | None = None
        connection: Activity | None = None
        series: _StepSeries | None = None
        series_step, series_kind = Step.ACCEPTED, ""
        totals, accept_times = total.totals, self._accept_times
        for run in runs:
            step, number, destination = run.step, len(run.ids), run.destination
            # A batch for many queues has a run for each, of the same peer.
            if run.peer is not peer:
                peer, series = run.peer, None
                connection = connections.by_name.get(peer.connection)
                if peer.connection and (connection is None or connection.bucket != bucket):
                    connection = connections.begin(peer.connection, now)
            if series is None or step is not series_step or destination[_KIND] != series_kind:
                series = self._find(peer.protocol, destination, step)
                series_step, series_kind = step, destination[_KIND]
            series.count += number
            totals[step] += number
            name = run.subscription or destination
            activity = destinations.by_name.get(name)
            if activity is None or activity.bucket != bucket:
                activity = destinations.begin(name, now)
            activity.totals[step] += number
            if run.attempt > 1 and step is Step.DELIVERED:
                activity.redelivered(number)
            elif step is Step.ANSWERED:
                self._measure_answer(run, number, activity, now)
            if connection is not None:
                connection.totals[step] += number
            if series.histogram is not None:
                self._measure(run, number, series.histogram)
            elif step is Step.ACCEPTED and number:
                accepted += number
                if run.time != accept_times.latest:
                    accept_times.add(run.ids[0], run.time)
                if run.counts is not None:
                    delivered = self._find("", destination, Step.DELIVERED)
                    delivered.count += sum(run.counts)
                    destinations.by_name[destination].totals[Step.DELIVERED] += sum(run.counts)
                    totals[Step.DELIVERED] += sum(run.counts)
        return accepted

    def _find(self, protocol: str, destination: str, step: Step) -> _StepSeries:
        kind = destination.partition("/")[0]
        # In two steps: the hash of a `Step` is computed by the interpreter.
        steps = self._steps.get((protocol, kind))
        if steps is None:
            steps = self._steps[protocol, kind] = [None] * (max(Step) + 1)
        series = steps[step]
        if series is None:
            series = steps[step] = self._series[protocol, kind, step] = _StepSeries(step)
        return series

    def _measure_answer(self, run: LedgerRun, number: int, activity: Activity, now: float) -> None:
        accepted = self._accept_times.time_of(run.ids[0])
        if accepted is not None:
            activity.answered(max(run.time - accepted, 0), now, number)

    def _measure(self, run: LedgerRun, number: int, histogram: Histogram) -> None:
        """Time a few messages of a run, each for a part of it: a run was delivered together."""
        ids, time_of = run.ids, self._accept_times.time_of
        if number == 1:
            accepted = time_of(ids[0])
            if accepted is not None:
                histogram.add(max(run.time - accepted, 0) / 1e6)
            return
        samples = min(number, _SAMPLES)
        for sample in range(samples):
            first, end = sample * number // samples, (sample + 1) * number // samples
            accepted = time_of(ids[first])
            if accepted is not None:
                histogram.add(max(run.time - accepted, 0) / 1e6, end - first)


def render(
    metrics: Metrics | None,
    counters: Counter[tuple[str, ...]],
    gauges: dict[str, tuple[str, float]],
    histograms: dict[str, tuple[str, Histogram]] | None = None,
) -> str:
    """All of it as text. `metrics` are those of a hub, which a standby does not have; `counters`
    those of gateways and feeds; a gauge or histogram comes with its help text."""
    lines: list[str] = []
    if metrics is not None:
        _render_hub(lines, metrics)
    _family(lines, "crosswire_events_total", "counter", "What gateways did or saw.")
    for what, number in sorted(counters.items())[:_SERIES]:
        event, protocol, detail = (*what, "", "")[:3]
        labels = _labels(event=event, protocol=protocol, detail=detail)
        lines.append(f"crosswire_events_total{{{labels}}} {number}")
    for name, (text, histogram) in (histograms or {}).items():
        _family(lines, name, "histogram", text)
        lines += histogram.lines(name)
    for gauge, (text, value) in gauges.items():
        _family(lines, gauge, "counter" if gauge.endswith("_total") else "gauge", text)
        lines.append(f"{gauge} {+value!r}")
    return "\n".join(lines) + "\n"


def _render_hub(lines: list[str], metrics: Metrics) -> None:
    _family(lines, "crosswire_messages_total", "counter", "Steps of messages, by outcome.")
    for (protocol, kind, step), series in sorted(metrics.series.items()):
        labels = _labels(protocol=protocol or "hub", kind=kind, outcome=step.name.lower())
        lines.append(f"crosswire_messages_total{{{labels}}} {series.count}")
    name = "crosswire_latency_seconds"
    _family(lines, name, "histogram", "From acceptance to this step.")
    for (protocol, kind, step), series in sorted(metrics.series.items()):
        if series.histogram is not None:
            labels = _labels(protocol=protocol or "hub", kind=kind, step=step.name.lower())
            lines += series.histogram.lines(name, labels)
    _family(lines, "crosswire_commit_seconds", "histogram", "Duration of a group commit.")
    lines += metrics.commit_seconds.lines("crosswire_commit_seconds")
    _family(lines, "crosswire_commit_messages", "histogram", "Messages accepted by a group commit.")
    lines += metrics.commit_messages.lines("crosswire_commit_messages")
    _family(lines, "crosswire_commits_failed_total", "counter", "Groups that were not written.")
    lines.append(f"crosswire_commits_failed_total {metrics.commits_failed}")
    name = "crosswire_callbacks_failed_total"
    _family(lines, name, "counter", "Callbacks that raised, by kind; the log has the errors.")
    for kind, number in sorted(metrics.callbacks_failed.items()):
        lines.append(f"{name}{{{_labels(kind=kind)}}} {number}")


def _family(lines: list[str], name: str, kind: str, text: str) -> None:
    lines.append(f"# HELP {name} {text}")
    lines.append(f"# TYPE {name} {kind}")


def _labels(**labels: str) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
