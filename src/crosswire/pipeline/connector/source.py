"""The data source `crosswire`: the messages of a running hub, read as a batch or as a stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from crosswire.envelope import MICROSECONDS
from crosswire.errors import InvalidInput
from crosswire.pipeline.connector.columns import schema
from crosswire.pipeline.connector.options import (
    EARLIEST,
    OTHERS,
    Offsets,
    ReadOptions,
    known_columns,
    read_options,
)
from crosswire.pipeline.connector.ranges import FilteredRange, HubLog, LogPartition, fetch
from crosswire.pipeline.connector.sink import CrosswireStreamWriter, CrosswireWriter
from crosswire.pipeline.spark_features import (
    HAS_LIMITS,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

__all__ = ["CrosswireDataSource"]

_MOST_LAG: Final = 1_000_000
"""A longer lag is reported as about this: counting takes time."""
_MOST_SIZED: Final = 250_000
"""Of a batch with more messages, neither rows nor bytes are reported: for their sizes, the hub has
to read them."""
_MOST_DESTINATIONS: Final = 32
"""With more of them only the end of the log is reported: progress is written by Spark again and
again."""
EVERYTHING: Final = {OTHERS: EARLIEST}
_QUIET_S: Final = 0.1
"""How long a stream waits when nothing is new: Spark asks again at once, and would send the hub a
hundred requests a second."""


class CrosswireDataSource(DataSource):
    """`spark.read.format("crosswire").option("subscribe", "queue/orders").load()`; docs/spark.md
    has all options. Raises InvalidInput for options that are wrong."""

    @classmethod
    def name(cls) -> str:
        """For `format("crosswire")`."""
        return "crosswire"

    def schema(self) -> str:
        """The columns that the options choose."""
        return schema(known_columns(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        """For `spark.read`."""
        return LogReader(read_options(self.options, stream=False))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802
        """For `spark.readStream`."""
        options = read_options(self.options, stream=True)
        if options.limit and not HAS_LIMITS:
            raise InvalidInput("this version of Spark knows no maxOffsetsPerTrigger")
        return LogStreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """For `df.write`."""
        return CrosswireWriter(schema, self.options, overwrite)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """For `df.writeStream`."""
        return CrosswireStreamWriter(schema, self.options, overwrite)


class UnregisteredDataSource(CrosswireDataSource):
    """The source for sessions without `register`, found as `pyspark_crosswire.DefaultSource`.

    It pushes no filters down: Spark refuses sources that do so, unless its setting is changed.
    """

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        """For `spark.read`."""
        return UnfilteredReader(read_options(self.options, stream=False))


# ------------------------------------------------------------------------------------------- batch


class LogReader(DataSourceReader):
    """Reads the messages between two positions of the log."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._narrowed = FilteredRange()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Filters on destination, offset and time restrict what is fetched. All are given back, so
        that Spark applies them to every row too: the restriction may be wider than they are."""
        self._narrowed = narrow(filters)
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the range. Raises PipelineError for messages that are gone."""
        options, narrowed = self._options, self._narrowed
        log = HubLog(options)
        seen = log.look(narrowed.topics)
        # startingTimestamp replaces startingOffsets, as in Kafka.
        by_time = options.since_us is not None
        since = [each for each in (options.since_us, narrowed.since_us) if each is not None]
        planned = log.plan(
            seen.destinations,
            starts=EVERYTHING if by_time else log.at_node(options.starts, seen.node),
            ends=log.at_node(options.ends, seen.node),
            first=narrowed.first,
            end=narrowed.end,
            since=max(since, default=None),
            until=narrowed.until_us,
            parts=options.parts,
        )
        return log.partitions(planned, seen.destinations)

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """The messages of a partition. Runs on an executor."""
        return _read(partition, self._options)


class UnfilteredReader(LogReader):
    """Reads as LogReader does; only Spark applies the filters."""

    # Spark compares by identity: it takes any other function for a pushdown.
    pushFilters = getattr(DataSourceReader, "pushFilters", None)  # type: ignore[assignment]  # noqa: N815


def _read(partition: InputPartition | None, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    """The messages of a partition; Spark calls it with None if there are no partitions."""
    if isinstance(partition, LogPartition):
        yield from fetch(options.address, partition, options.columns, strict=options.strict)


_COMPARISONS: Final = (EqualTo, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)


def narrow(filters: Iterable[Filter]) -> FilteredRange:
    """A range that has every row for which all of these filters are true. Filters that it does not
    know restrict nothing."""
    topics: frozenset[str] | None = None
    first: list[int] = []
    ends: list[int] = []
    since: list[int] = []
    until: list[int] = []
    for each in filters:
        if isinstance(each, EqualTo | In) and each.attribute == ("topic",):
            values = each.value if isinstance(each, In) else (each.value,)
            named = frozenset(values)
            topics = named if topics is None else topics & named
        elif isinstance(each, _COMPARISONS) and each.attribute == ("offset",):
            _bound(each, each.value, first, ends)
        elif isinstance(each, _COMPARISONS) and each.attribute == ("timestamp",):
            _bound(each, _microseconds(each.value), since, until)
    return FilteredRange(
        topics=topics,
        first=max(first, default=None),
        end=min(ends, default=None),
        since_us=max(since, default=None),
        until_us=min(until, default=None),
    )


def _bound(filter_: Filter, value: Any, at_least: list[int], below: list[int]) -> None:
    if isinstance(filter_, EqualTo | GreaterThanOrEqual):
        at_least.append(value)
    if isinstance(filter_, GreaterThan):
        at_least.append(value + 1)
    if isinstance(filter_, EqualTo | LessThanOrEqual):
        below.append(value + 1)
    if isinstance(filter_, LessThan):
        below.append(value)


def _microseconds(moment: datetime) -> int:
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    since = aware - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * MICROSECONDS + since.microseconds


# ------------------------------------------------------------------------------------------ stream


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a stream. An offset is an id on a node: everything before it has been read.

    `*` stands for all destinations. One whose start is later has an offset of its own until the
    common one has passed it. Spark stores offsets in its checkpoint before a batch runs, and runs a
    batch again with the same offsets after a failure.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._log = HubLog(options)
        self._target: Offsets | None = None
        self._batch: tuple[Offsets, Offsets] | None = None
        """Start and end of the batch that begins."""
        self._quiet: tuple[Offsets, int] | None = None

    def initialOffset(self) -> Offsets:  # noqa: N802
        """Where a new stream starts: by the options, with `earliest` and `latest` as ids."""
        options, seen = self._options, self._log.look()
        starts = self._log.at_node(options.starts, seen.node)
        if options.since_us is not None:
            starts = EVERYTHING
        planned = self._log.plan(seen.destinations, starts=starts, since=options.since_us)
        return {name: {seen.node: position} for name, position in planned.starts.items()}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The option `maxOffsetsPerTrigger`."""
        limit = self._options.limit
        return ReadMaxRows(limit) if limit else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the end: messages that come from now on are for the next run."""
        seen = self._log.look()
        self._target = {OTHERS: {seen.node: seen.end}}

    def reportLatestOffset(self) -> Offsets:  # noqa: N802
        """The end of the log, and for each subscribed destination what the hub counts: `rows` and
        `bytes` of the batch that begins, and as `lag` the messages after it. For Spark's progress
        reports."""
        seen = self._log.look()
        report = {OTHERS: {seen.node: seen.end}}
        if self._batch is None or len(seen.destinations) > _MOST_DESTINATIONS:
            return report
        start, end = self._batch
        if start == end:
            # Nothing is new, as the hub has just found out: Spark asks ten times a second.
            nothing = dict.fromkeys(seen.destinations, 0)
            return report | dict.fromkeys(("rows", "bytes", "lag"), nothing)
        if seen.node not in start.get(OTHERS, ()) or seen.node not in end.get(OTHERS, ()):
            return report
        after = self._from(end, seen.node)
        unread = self._log.plan(
            seen.destinations, starts=after, end=seen.end, limit=_MOST_LAG, tally="messages"
        )
        report["lag"] = {name: each.messages for name, each in unread.tallies.items()}
        read = self._log.plan(
            seen.destinations,
            starts=self._from(start, seen.node),
            ends=after,
            limit=_MOST_SIZED,
            tally="bytes",
        )
        if read.end >= after[OTHERS]:
            report["rows"] = {name: each.messages for name, each in read.tallies.items()}
            report["bytes"] = {name: each.bytes for name, each in read.tallies.items()}
        return report

    def latestOffset(  # noqa: N802
        self, start: Offsets | None = None, limit: ReadLimit | None = None
    ) -> Offsets:
        """The offset after the last message, or after as many as the limit allows."""
        end = self._latest(start, limit)
        self._batch = None if start is None else (start, end)
        return end

    def _latest(self, start: Offsets | None, limit: ReadLimit | None) -> Offsets:
        """Without new messages of the subscribed destinations it is the start itself, so that Spark
        runs no empty batch, although other destinations have moved the log's end.

        Spark 4.0 gives no start: then it is the end of the log."""
        seen = self._log.look()
        target = seen.end
        if start is None:
            return {OTHERS: {seen.node: target}}
        if self._target is not None:
            target = self._target[OTHERS].get(seen.node, seen.end)
        starts = self._from(start, seen.node)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else 0
        # Up to here the last call has searched from the same start and found nothing.
        searched = self._quiet[1] if self._quiet is not None and self._quiet[0] == start else 1
        # A plan ends early after some seconds of searching: it continues where it stopped.
        while True:
            planned = self._log.plan(
                seen.destinations, starts=starts, first=searched, end=target, limit=most
            )
            if planned.found:
                return _moved(starts, planned.end, seen.node)
            if searched >= planned.end or planned.end >= target:
                break
            searched = planned.end
        self._log.check_missing(planned.missing)
        self._quiet = (start, planned.end)
        # With availableNow the same start ends the query: there is nothing to wait for.
        if self._target is None:
            time.sleep(_QUIET_S)
        return start

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        """Plan a batch: the same messages for the same offsets, whenever it is called."""
        seen = self._log.look()
        ends = {
            name: positions[seen.node] for name, positions in end.items() if seen.node in positions
        }
        # The checkpoint's offsets are of another node: the hub's data was replaced.
        if OTHERS not in ends:
            self._log.report_loss(f"the batch is of another hub: this one is node {seen.node}")
            return []
        planned = self._log.plan(
            seen.destinations,
            starts=self._from(start, seen.node),
            ends=ends,
            parts=self._options.parts,
        )
        return self._log.partitions(planned, seen.destinations)

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """The messages of a partition. Runs on an executor."""
        return _read(partition, self._options)

    def _from(self, start: Offsets, node: str) -> dict[str, int]:
        """Offsets on this node. Another node has a log of its own, in which they mean nothing: with
        failOnDataLoss off it is read from its start."""
        starts = {name: positions[node] for name, positions in start.items() if node in positions}
        if OTHERS not in starts:
            others = ", ".join(sorted({each for positions in start.values() for each in positions}))
            self._log.report_loss(
                f"this is the hub of node {node}, the stream has read that of node {others}"
            )
            return EVERYTHING
        return starts


def _moved(starts: dict[str, int], end: int, node: str) -> Offsets:
    """Offsets of a node moved to `end` where they are before it; those of single destinations that
    the common one has reached are dropped."""
    positions = {name: max(position, end) for name, position in starts.items()}
    return {
        name: {node: position}
        for name, position in positions.items()
        if name == OTHERS or position != positions[OTHERS]
    }
