"""A stream: adds new input to the tables, batch by batch, each of them exactly once.

After every batch the tables are those that `run_batch` would make of all the input so far. The
position in the input, the state of decoders and the new rows become valid with one commit (see
`commits`). Spark's own checkpoints could not do that: they know nothing of the files that a batch
replaces, so they would need a second log beside them, and the two could disagree after a crash.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema

from crosswire.lake.schemas import MESSAGES
from crosswire.pipeline.output import setting_of
from crosswire.pipeline.sources.inputs import find_inputs
from crosswire.pipeline.sources.lake_listing import LakeListing
from crosswire.pipeline.sources.new_input import (
    InputPosition,
    LakeRows,
    NewInput,
    NewInputFinder,
    check_files,
    files_of,
)
from crosswire.pipeline.sources.pcap import SPLIT_BYTES
from crosswire.pipeline.spark import is_connect, plain_errors
from crosswire.pipeline.stream.commits import StreamCommit, StreamOutput, StreamStaging, StreamStart
from crosswire.pipeline.stream.driver import StreamDriver
from crosswire.pipeline.stream.ledger_tables import LedgerTables
from crosswire.pipeline.summary import LEDGER_TABLES, NO_LEDGER, NO_WIRE, RECORD_TABLES, Summary
from crosswire.pipeline.tables.accounting import SUMS
from crosswire.pipeline.tables.deliveries import LATE_US
from crosswire.pipeline.tables.names import LAYERS, VERDICTS
from crosswire.pipeline.tables.registry import TableRun

__all__ = ["BatchBegun", "BatchDone", "Stream", "run_stream"]

BATCH_BYTES: Final = 1 << 30
_POLL_S: Final = 1.0
_ATTEMPTS: Final = 3
_CANCEL_S: Final = 0.3


@dataclass(frozen=True)
class Stream:
    """Input, output and options of a stream.

    `once`: end when all input that is there now was read. `batch_bytes` is about how much input a
    batch takes in, at least one file. `since` is the text that `since_us` was read from, if it
    was one: a stream that is continued may repeat it. The other options are those of `BatchJob`.
    """

    paths: tuple[str, ...]
    output: str
    once: bool = False
    tables: frozenset[str] = frozenset()
    since_us: int = 0
    since: str = ""
    ports: Mapping[int, str] = field(default_factory=dict)
    late_us: int = LATE_US
    batch_bytes: int = BATCH_BYTES


@dataclass(frozen=True)
class BatchBegun:
    """A batch that is processed now: its number and its input."""

    batch: int
    files: int
    size_bytes: int


@dataclass(frozen=True)
class BatchDone:
    """A batch that was committed: its number, its input, its rows by table, its duration."""

    batch: int
    files: int
    size_bytes: int
    rows: dict[str, int]
    seconds: float


def run_stream(
    spark: SparkSession,
    stream: Stream,
    *,
    stop: threading.Event | None = None,
    begin: Callable[[BatchBegun], None] | None = None,
    notify: Callable[[BatchDone], None] | None = None,
) -> Summary:
    """Continue a stream after its last commit, until all input is read or `stop` is set.

    That cancels a batch that is being processed: the next run reads its input again. `begin` is
    called before each batch, `notify` after its commit. Raises PipelineError; what was committed
    stays, and the next run continues after it.
    """
    stop = stop or threading.Event()
    start = time.monotonic()
    with plain_errors():
        output = StreamOutput(spark, stream.output)
        try:
            return _StreamLoop(spark, stream, output, stop, begin, notify).run(start)
        finally:
            output.close()


class _StreamLoop:
    """Looks for new input, and processes it batch by batch."""

    def __init__(
        self,
        spark: SparkSession,
        stream: Stream,
        output: StreamOutput,
        stop: threading.Event,
        begin: Callable[[BatchBegun], None] | None,
        notify: Callable[[BatchDone], None] | None,
    ) -> None:
        self._spark = spark
        self._output = output
        self._once = stream.once
        self._paths = stream.paths
        self._stop = stop
        self._begin = begin
        self._notify = notify
        self._ended = threading.Event()
        self._cancelling = threading.Lock()
        self._is_cancelled = False
        wanted = StreamStart(
            sorted(stream.tables),
            stream.since_us,
            dict(stream.ports),
            stream.late_us,
            stream.since,
        )
        self._begun = output.begin(wanted)
        self._listing = LakeListing(setting_of(spark))
        self._finder = NewInputFinder(
            stream.paths,
            self._listing,
            batch_bytes=stream.batch_bytes,
            split_bytes=SPLIT_BYTES,
            patient=not stream.once,
            records=self._begun.wants(*RECORD_TABLES),
        )

    def run(self, start: float) -> Summary:
        """All batches until the end of the input, or until the stop; `start` is monotonic time."""
        if self._once and self._output.last is None:
            # Nobody waits for input that comes later: raise InvalidInput if there is none.
            find_inputs(self._paths)
        threading.Thread(target=self._cancel, name="crosswire-stop", daemon=True).start()
        try:
            while not self._stop.is_set():
                for new_input in self._finder.look(self._position):
                    if self._stop.is_set():
                        break
                    self._process(new_input)
                if self._once:
                    break
                self._stop.wait(_POLL_S)
        finally:
            self._ended.set()
        return replace(self._summary(start), notes=self._notes())

    def _notes(self) -> list[str]:
        last = self._output.last
        notes = [each.note for each in (last.missing if last is not None else ())]
        if not self._begun.wants(*LEDGER_TABLES):
            return notes
        if not self._position.ledgers:
            return [*notes, NO_LEDGER]
        if self._begun.wants("reconciliation") and not self._position.taps:
            return [*notes, NO_WIRE]
        return notes

    @property
    def _position(self) -> InputPosition:
        return InputPosition() if self._output.last is None else self._output.last.position

    def _process(self, new_input: NewInput) -> None:
        """Run a batch and commit it. Retries if the lake was compacted meanwhile."""
        for attempt in range(_ATTEMPTS):
            start = time.monotonic()
            batch = _StreamBatch(self._spark, self._begun, self._output, new_input, self._listing)
            before = batch.input_files()
            if self._begin is not None:
                files, size_bytes = new_input.files, new_input.size_bytes
                self._begin(BatchBegun(batch.staging.batch, files, size_bytes))
            try:
                check_files(new_input, self._listing)
                with self._cancelled_by_stop():
                    commit = batch.run()
            except Exception as error:
                self._output.discard(batch.staging)
                if self._stop.is_set():
                    # It was cancelled, or SIGINT reached Spark's Python workers, and their tasks
                    # failed. The next run reads this input again.
                    return
                # A position counts rows, not files: compacted files hold the same rows under
                # other names, so the batch can be run again with those.
                if attempt + 1 < _ATTEMPTS and batch.input_files() != before:
                    continue
                raise error
            self._output.commit(
                commit,
                batch.staging,
                replaced_days=batch.replaced_days,
                replaced_files=batch.replaced_files,
                retained=batch.retained,
            )
            if self._notify is not None:
                rows = {name: sum(each) for name, each in batch.staging.rows.items()}
                seconds = time.monotonic() - start
                done = BatchDone(commit.batch, new_input.files, new_input.size_bytes, rows, seconds)
                self._notify(done)
            return

    @contextmanager
    def _cancelled_by_stop(self) -> Iterator[None]:
        """What Spark does meanwhile is cancelled when the stop comes: a batch may take minutes."""
        with self._cancelling:
            self._is_cancelled = True
        try:
            yield
        finally:
            # No job after this may be cancelled: the summary counts rows.
            with self._cancelling:
                self._is_cancelled = False

    def _cancel(self) -> None:
        """On a thread of its own: after the stop, cancel what may be cancelled, until the end."""
        while not self._ended.wait(_CANCEL_S):
            if self._stop.is_set():
                # Again and again: between two jobs of a batch there is none to cancel.
                with self._cancelling:
                    if self._is_cancelled and is_connect(self._spark):
                        self._spark.interruptAll()
                    elif self._is_cancelled:
                        # All at once: also those that another thread of ours has begun.
                        self._spark.sparkContext.cancelAllJobs()

    def _summary(self, start: float) -> Summary:
        """The state of all tables, not only what this run added."""
        last = self._output.last
        if last is None:
            return Summary({}, [], time.monotonic() - start)
        rows = {path: sum(each) for path, each in last.rows.items() if path.split(".")[0] in LAYERS}
        # Of tables that are replaced by day, `last.rows` counts a day each time it was written.
        for table in rows.keys() & last.days.keys():
            files = [file for each in last.days[table].values() for file in each]
            found_rows = self._output.rows_of(table, files)
            rows[table] = 0 if found_rows is None else found_rows.count()
        totals: dict[str, dict[str, int]] = {}
        for part in (last.accounts, last.open_accounts):
            for name, sums in part.items():
                total = totals.setdefault(name, dict.fromkeys(SUMS, 0))
                for each in SUMS:
                    total[each] += sums[each]
        found: list[dict[str, Any]] = [
            {"protocol": name or None, **totals[name]} for name in sorted(totals)
        ]
        findings = {
            name: count + last.open_findings.get(name, 0) for name, count in last.findings.items()
        }
        counts = {name: n for name, n in findings.items() if n or name not in VERDICTS}
        return Summary(
            rows,
            found,
            time.monotonic() - start,
            counts,
            packets=last.packets.rows(),
            refused=last.refused + last.open_refused,
        )


class _StreamBatch:
    """One batch, from its new input to its commit."""

    def __init__(
        self,
        spark: SparkSession,
        begun: StreamStart,
        output: StreamOutput,
        new_input: NewInput,
        listing: LakeListing,
    ) -> None:
        self._spark = spark
        self._listing = listing
        self._begun = begun
        self._output = output
        self._new_input = new_input
        self._last = output.last
        self.staging: StreamStaging = output.stage()
        self._has_wire = bool(new_input.taps or new_input.captures)
        self._ledger_tables: LedgerTables | None = None
        position = new_input.position
        if begun.wants(*RECORD_TABLES) and (position.taps or position.ledgers):
            self._ledger_tables = LedgerTables(
                spark,
                output,
                self.staging,
                new_input,
                self._read_rows,
                begun=begun,
            )
        self._driver = StreamDriver(
            spark,
            output,
            self.staging,
            new_input,
            self._read_rows,
            begun=begun,
            ledger=self._ledger_tables,
        )
        self._tables = TableRun(self._driver)

    @property
    def replaced_days(self) -> dict[str, set[str]]:
        """By table: days whose files this batch has written again."""
        of_ledger = {} if self._ledger_tables is None else self._ledger_tables.replaced_days
        return {**self._driver.replaced_days, **of_ledger}

    @property
    def replaced_files(self) -> list[str]:
        """Files with final rows that this batch has written again."""
        return [] if self._ledger_tables is None else self._ledger_tables.replaced_files

    @property
    def retained(self) -> frozenset[str]:
        """Tables whose provisional rows stay: the batch had no input that could change them."""
        if self._has_wire or self._last is None:
            return frozenset()
        return frozenset(self._last.files) - self.staging.rows.keys()

    def input_files(self) -> list[str]:
        """The files of lakes that have the new rows, as they are now."""
        return files_of(self._new_input.rows, self._listing)

    def run(self) -> StreamCommit:
        """Write the tables into the staging folder; returns what is to be committed."""
        new_input = self._new_input
        if self._has_wire:
            self._tables.from_wire(self._driver.decode())
        else:
            self._driver.begin(None)
            if new_input.position.alone:
                new = new_input.messages
                self._tables.from_records(self._read_rows(new, MESSAGES) if new else None)
            else:
                self._driver.ledger_tables(None)
        return self._commit()

    def _commit(self) -> StreamCommit:
        """The last commit, with what this batch adds."""
        last, driver, ledger = self._last, self._driver, self._ledger_tables
        rows = dict(last.rows) if last is not None else {}
        for name, (kept, provisional) in self.staging.rows.items():
            rows[name] = (rows.get(name, (0, 0))[0] + kept, provisional)
        sums = dict(last.accounts) if last is not None else {}
        for name, added in self._tables.accounts[True].items():
            before = sums.get(name, {})
            sums[name] = {each: before.get(each, 0) + added[each] for each in SUMS}
        findings = dict(last.findings) if last is not None else {}
        for name, count in ledger.findings[True].items() if ledger is not None else ():
            findings[name] = findings.get(name, 0) + count
        open_accounts = self._tables.accounts[False]
        unsettled_days = driver.unsettled_days
        refused, open_refused = self._tables.refused[True], self._tables.refused[False]
        if last is not None:
            refused += last.refused
        if last is not None and not self._has_wire:
            # Nothing was decoded: what was provisional still is.
            open_accounts, unsettled_days = last.open_accounts, last.unsettled_days
            open_refused = last.open_refused
        return StreamCommit(
            batch=self.staging.batch,
            begun=self._begun,
            position=self._new_input.position,
            reached=driver.reached,
            schemas={**(last.schemas if last is not None else {}), **self.staging.schemas},
            rows=rows,
            accounts=sums,
            open_accounts=open_accounts,
            packets=driver.packets,
            refused=refused,
            open_refused=open_refused,
            unsettled_days=unsettled_days,
            clocks=ledger.hub_times if ledger is not None else {},
            missing=[*(last.missing if last is not None else ()), *self._new_input.missing],
            findings=findings,
            open_findings=ledger.findings[False] if ledger is not None else {},
        )

    def _read_rows(self, ranges: Iterable[LakeRows], schema: pa.Schema) -> DataFrame:
        """Rows of lakes by their numbers, from whatever files hold them now."""
        ranges = list(ranges)
        wanted = F.lit(False)
        for each in ranges:
            between = F.col("seq").between(each.first, each.last)
            wanted = wanted | ((F.col("node") == each.node) & between)
        files = files_of(ranges, self._listing)
        columns = from_arrow_schema(schema)
        if not files:
            return self._spark.createDataFrame([], columns)  # removed by retention
        rows = self._spark.read.schema(columns).parquet(*files).where(wanted)
        since_us = self._begun.since_us
        return rows.where(F.col("time") >= since_us) if since_us else rows
