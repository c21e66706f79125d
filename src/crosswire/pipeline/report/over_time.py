"""Figures over time: messages, bytes, errors and latencies in equal intervals.

gold.traffic counts by the minute. If the recording is shorter than 20 minutes, messages and
conversations are counted instead, if those tables exist, so that plots have enough columns.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from crosswire.envelope import MICROSECONDS
from crosswire.pipeline.report.facts import Latencies, LatencyRow, TimeBuckets, Traffic
from crosswire.pipeline.report.histogram import buckets_of, percentiles
from crosswire.pipeline.report.table_reader import ReportTables, Tally
from crosswire.pipeline.tables.names import CALLER, PROVIDER

__all__ = [
    "LatencyHistogram",
    "clock_of",
    "latencies",
    "leg_shown",
    "of_leg",
    "piece_of",
    "traffic",
]

_MINUTE_US: Final = 60 * MICROSECONDS
_DAY_US: Final[int] = 86_400 * MICROSECONDS
_SHORT_US: Final = 20 * _MINUTE_US
_MOST_PIECES: Final = 96
_WIDTHS_US: Final[tuple[int, ...]] = (
    *(number * 10**power for power in range(3, 6) for number in (1, 2, 5)),
    *(number * MICROSECONDS for number in (1, 2, 5, 10, 15, 30)),
    *(number * _MINUTE_US for number in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720)),
)
_DESTINATIONS: Final = 40
_KINDS: Final = {
    "sends": "send",
    "publishes": "publish",
    "requests": "request",
    "responses": "response",
}
_COUNTS: Final = ("messages", "bytes", "errors")


def clock_of(tables: ReportTables) -> TimeBuckets | None:
    """The intervals for all plots; None if no table has a time."""
    spans = [_span(tables, "gold.traffic", "time", _MINUTE_US - 1)]
    if spans[0] is None or spans[0][1] - spans[0][0] <= _SHORT_US:
        fine = _span(tables, "silver.messages", "time")
        spans = [fine] if fine else spans
    if spans[0] is None:
        spans = [
            _span(tables, name, column)
            for name in ("gold.sessions", "open.sessions")
            for column in ("time", "last_time")
        ]
    known = [span for span in spans if span is not None]
    if not known:
        return None
    first, last = min(span[0] for span in known), max(span[1] for span in known)
    least = 1000 if _is_fine(tables, first, last) else _MINUTE_US
    width = _width(last - first, least)
    start = first - first % width
    return TimeBuckets(first, last, start, width, (last - start) // width + 1)


def _span(tables: ReportTables, name: str, column: str, more: int = 0) -> tuple[int, int] | None:
    found: list[int] = []
    for batch in tables.scan(name, column):
        ends = pc.min_max(batch[column]).as_py()
        if ends["min"] is not None:
            found = [min([*found, ends["min"]]), max([*found, ends["max"]])]
    return (found[0], found[1] + more) if found else None


def _is_fine(tables: ReportTables, first_us: int, last_us: int) -> bool:
    """Whether messages are counted instead of minutes."""
    if not tables.has("silver.messages"):
        return False
    return not tables.has("gold.traffic") or last_us - first_us <= _SHORT_US


def _width(span_us: int, least_us: int) -> int:
    for width in _WIDTHS_US:
        if width >= least_us and span_us / width <= _MOST_PIECES - 1:
            return width
    return _DAY_US * (span_us // (_DAY_US * (_MOST_PIECES - 1)) + 1)


def piece_of(clock: TimeBuckets, times: Any) -> Any:
    """The number of the interval that each time falls into; the first or last one if outside."""
    number = pc.divide(pc.subtract(times, clock.start_us), clock.width_us)
    return pc.min_element_wise(pc.max_element_wise(number, 0), clock.count - 1)


# Messages, bytes and errors.


def traffic(tables: ReportTables, clock: TimeBuckets) -> Traffic | None:
    """Messages by time, kind and destination; None if there is no table of them."""
    if not tables.has("gold.traffic") and not tables.has("silver.messages"):
        return None
    by_time = Tally(("piece", "protocol"), _COUNTS)
    by_destination = Tally(("protocol", "destination"), (*_COUNTS, *_KINDS))
    names = Tally(("destination",), ("messages",))
    kinds: Counter[str] = Counter()
    is_fine = _is_fine(tables, clock.first_us, clock.last_us)
    for batch in _messages(tables) if is_fine else _minutes(tables):
        by_time.add(batch.append_column("piece", piece_of(clock, batch["time"])))
        by_destination.add(batch)
        names.add(batch)
        for name in _KINDS:
            kinds[name] += pc.sum(batch[name]).as_py() or 0
    series: dict[str, dict[str | None, list[int]]] = {name: {} for name in _COUNTS}
    for row in by_time.rows():
        for name in _COUNTS:
            values = series[name].setdefault(row["protocol"], [0] * clock.count)
            values[row["piece"]] += row[name] or 0
    destinations = by_destination.rows(_DESTINATIONS)
    return Traffic(
        **{name: _in_order(series[name]) for name in _COUNTS},
        kinds=dict(kinds),
        destinations=destinations,
        more_destinations=len(by_destination) - len(destinations),
        destination_count=len(names),
        is_fine=is_fine,
    )


def _in_order(series: dict[str | None, list[int]]) -> dict[str | None, list[int]]:
    return dict(sorted(series.items(), key=lambda item: (item[0] is None, item[0] or "")))


def _minutes(tables: ReportTables) -> Iterator[pa.RecordBatch]:
    columns = ("time", "protocol", "destination", *_COUNTS, *_KINDS)
    yield from tables.scan("gold.traffic", *columns)


def _messages(tables: ReportTables) -> Iterator[pa.RecordBatch]:
    """A row per message, in the columns of `_minutes`."""
    columns = ("time", "protocol", "destination", "kind", "payload_length", "status")
    for batch in tables.scan("silver.messages", *columns):
        is_error = pc.fill_null(pc.not_equal(batch["status"], "success"), False)
        made = {
            "time": batch["time"],
            "protocol": batch["protocol"],
            "destination": batch["destination"],
            "messages": pa.repeat(pa.scalar(1, pa.int64()), batch.num_rows),
            "bytes": pc.fill_null(batch["payload_length"], 0),
            "errors": pc.cast(is_error, pa.int64()),
        }
        for name, kind in _KINDS.items():
            made[name] = pc.fill_null(pc.cast(pc.equal(batch["kind"], kind), pa.int64()), 0)
        yield pa.RecordBatch.from_pydict(made)


# Latencies.


def leg_shown(tables: ReportTables) -> str:
    """The leg of which calls are counted: that of the callers, unless only providers were
    recorded. A call through the hub has both, and must not be counted twice."""
    table = next(
        (name for name in ("gold.conversations", "gold.traffic") if tables.has(name)), None
    )
    if table is None:
        return CALLER
    found = {
        leg for batch in tables.scan(table, "leg") for leg in pc.unique(batch["leg"]).to_pylist()
    }
    return PROVIDER if PROVIDER in found and CALLER not in found else CALLER


def of_leg(batches: Iterator[pa.RecordBatch], leg: str) -> Iterator[pa.RecordBatch]:
    """The rows of one leg."""
    for batch in batches:
        yield batch.filter(pc.fill_null(pc.equal(batch["leg"], leg), False))


class LatencyHistogram:
    """Counts by bucket, and the longest value."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.longest: int | None = None

    def add(self, row: dict[str, Any]) -> None:
        """Add a row with `bucket`, `count` and `longest`."""
        self.counts[row["bucket"]] += row["count"]
        if row["longest"] is not None:
            self.longest = max(self.longest or 0, row["longest"])

    def row(self) -> LatencyRow:
        """Count, percentiles and maximum of what was added; there must be something."""
        p50, p90, p95, p99 = percentiles(self.counts, self.longest)
        return LatencyRow(self.counts.total(), p50, p90, p95, p99, self.longest)


def latencies(
    tables: ReportTables, clock: TimeBuckets, destinations: list[dict[str, Any]]
) -> Latencies | None:
    """Latencies of answered requests: of all, and of each of the given destinations; None if there
    are none."""
    by_protocol = Tally(("protocol", "bucket"), ("count",), most=("longest",))
    by_time = Tally(("piece", "bucket"), ("count",), most=("longest",), limit=500_000)
    by_destination = Tally(("protocol", "destination", "bucket"), ("count",), most=("longest",))
    chosen = pa.array({row["destination"] for row in destinations}, pa.string())
    fine = _is_fine(tables, clock.first_us, clock.last_us) and tables.has("gold.conversations")
    leg = leg_shown(tables)
    for batch in _conversations(tables, leg) if fine else _histograms(tables, leg):
        by_protocol.add(batch)
        by_time.add(batch.append_column("piece", piece_of(clock, batch["time"])))
        by_destination.add(batch.filter(pc.is_in(batch["destination"], chosen)))
    everything = LatencyHistogram()
    protocols: defaultdict[str | None, LatencyHistogram] = defaultdict(LatencyHistogram)
    for row in by_protocol.rows():
        everything.add(row)
        protocols[row["protocol"]].add(row)
    if not everything.counts:
        return None
    pieces: defaultdict[int, LatencyHistogram] = defaultdict(LatencyHistogram)
    for row in by_time.rows():
        pieces[row["piece"]].add(row)
    by_key: defaultdict[tuple[str | None, str | None], LatencyHistogram] = defaultdict(
        LatencyHistogram
    )
    for row in by_destination.rows():
        by_key[row["protocol"], row["destination"]].add(row)
    return Latencies(
        all=everything.row(),
        by_protocol={name: each.row() for name, each in protocols.items()},
        by_destination={name: each.row() for name, each in by_key.items()},
        over_time=[
            pieces[number].row() if number in pieces else None for number in range(clock.count)
        ],
        counts={name: dict(each.counts) for name, each in protocols.items()},
    )


def _histograms(tables: ReportTables, leg: str) -> Iterator[pa.RecordBatch]:
    """A row per bucket of each row of gold.traffic.

    The longest value of a row is repeated for all of its buckets. Its maximum is still right for
    everything that these are grouped by, because no grouping separates buckets of a row.
    """
    columns = ("time", "protocol", "destination", "latency_max_us", "histogram", "leg")
    for batch in of_leg(tables.scan("gold.traffic", *columns), leg):
        parents = pc.list_parent_indices(batch["histogram"])
        entries = pc.list_flatten(batch["histogram"])
        rows = batch.select(columns[:4]).take(parents)
        yield pa.RecordBatch.from_pydict(
            {
                "time": rows["time"],
                "protocol": rows["protocol"],
                "destination": rows["destination"],
                "bucket": pc.cast(pc.struct_field(entries, "bucket"), pa.int64()),
                "count": pc.struct_field(entries, "count"),
                "longest": rows["latency_max_us"],
            }
        )


def _conversations(tables: ReportTables, leg: str) -> Iterator[pa.RecordBatch]:
    """A row per answered request, in the columns of `_histograms`."""
    columns = ("time", "answered", "protocol", "destination", "latency_us", "leg")
    for batch in of_leg(tables.scan("gold.conversations", *columns), leg):
        answered = batch.filter(pc.is_valid(batch["answered"]))
        yield pa.RecordBatch.from_pydict(
            {
                "time": answered["time"],
                "protocol": answered["protocol"],
                "destination": answered["destination"],
                "bucket": buckets_of(answered["latency_us"]),
                "count": pa.repeat(pa.scalar(1, pa.int64()), answered.num_rows),
                "longest": answered["latency_us"],
            }
        )
