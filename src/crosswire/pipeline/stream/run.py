"""A stream: new input into the same tables, batch by batch, each of them exactly once.

After every batch the tables are those that `run_batch` would make of all the input so far. The
position in the input, the states of decoders and the new rows become valid with one commit (see
`journal`), which Spark's own checkpoint could not give: it knows nothing of the files that a batch
replaces, and would need a second log beside it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.capture.classify import PortMap
from crosswire.errors import BytesMissing, InvalidInput
from crosswire.lake.schemas import MESSAGES, OPEN, WIRE
from crosswire.pipeline.batch import OF_RECORDS, Summary
from crosswire.pipeline.output import LAYERS
from crosswire.pipeline.sources.flow_rows import NODE
from crosswire.pipeline.sources.inputs import find_inputs
from crosswire.pipeline.sources.new_input import (
    InputPosition,
    LakeRows,
    NewInput,
    NewInputFinder,
    files_of,
)
from crosswire.pipeline.sources.pcap import SPLIT_BYTES, segments_of
from crosswire.pipeline.spark import plain_errors
from crosswire.pipeline.stream.carry_over import PART, CarriedCalls, Counts, Edges, together
from crosswire.pipeline.stream.commits import (
    DAYS,
    Journal,
    StreamCommit,
    StreamStaging,
    StreamStart,
)
from crosswire.pipeline.stream.decoder_state import (
    FLOWS,
    KEPT,
    STATES,
    CompleteUpTo,
    decode_on,
    reassemble_on,
)
from crosswire.pipeline.stream.ledger_tables import DecodedBatch, LedgerBatch
from crosswire.pipeline.tables import tallies as counts
from crosswire.pipeline.tables import topology as graph
from crosswire.pipeline.tables import traffic as minutes
from crosswire.pipeline.tables.accounting import PARTS, accounting
from crosswire.pipeline.tables.conversations import conversations
from crosswire.pipeline.tables.decoded import FRAMES, TABLE, VIOLATIONS
from crosswire.pipeline.tables.deliveries import LATE_US
from crosswire.pipeline.tables.directions import directions
from crosswire.pipeline.tables.frames import frames
from crosswire.pipeline.tables.messages import from_hub, messages
from crosswire.pipeline.tables.reconciliation import VERDICTS
from crosswire.pipeline.tables.sessions import by_session
from crosswire.pipeline.tables.violations import violations

__all__ = ["BatchDone", "Stream", "run_stream"]

BATCH_BYTES: Final = 1 << 30
_POLL_S: Final = 1.0
_WRITERS: Final = 3
_ATTEMPTS: Final = 3
_PLACE: Final = "place"
_SUMS: Final = ("seen", *PARTS, "missing")


@dataclass(frozen=True)
class Stream:
    """What to do. `once`: what is there now, then end; `batch_bytes` is about how much input a
    batch takes in, at least a file."""

    paths: tuple[str, ...]
    output: str
    once: bool = False
    tables: frozenset[str] = frozenset()
    since_us: int = 0
    ports: Mapping[int, str] = field(default_factory=dict)
    late_us: int = LATE_US
    batch_bytes: int = BATCH_BYTES


@dataclass(frozen=True)
class BatchDone:
    """A batch that was committed."""

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
    notify: Callable[[BatchDone], None] | None = None,
) -> Summary:
    """Go on with a stream, until all is read or `stop` is set. Raises PipelineError; what was
    committed stays, and the next run goes on behind it."""
    stop = stop or threading.Event()
    start = time.monotonic()
    with plain_errors():
        journal = Journal(spark, stream.output)
        try:
            return _Loop(spark, stream, journal, stop, notify).run(start)
        finally:
            journal.close()


class _Loop:
    def __init__(
        self,
        spark: SparkSession,
        stream: Stream,
        journal: Journal,
        stop: threading.Event,
        notify: Callable[[BatchDone], None] | None,
    ) -> None:
        self._spark = spark
        self._journal = journal
        self._once = stream.once
        self._paths = stream.paths
        self._late_us = stream.late_us
        self._stop = stop
        self._notify = notify
        wanted = StreamStart(sorted(stream.tables), stream.since_us, dict(stream.ports))
        self._begun = journal.begin(wanted)
        self._finder = NewInputFinder(
            stream.paths,
            journal.listing,
            batch_bytes=stream.batch_bytes,
            split_bytes=SPLIT_BYTES,
            patient=not stream.once,
            records=self._wants_records,
        )

    def run(self, start: float) -> Summary:
        if self._once and self._journal.last is None:
            find_inputs(self._paths)
        while not self._stop.is_set():
            for arrived in self._finder.look(self._position):
                if self._stop.is_set():
                    break
                self._process(arrived)
            if self._once:
                break
            self._stop.wait(_POLL_S)
        return replace(self._summary(start), notes=self._notes())

    @property
    def _wants_records(self) -> bool:
        chosen = self._begun.tables
        return not chosen or any(name in chosen for name in OF_RECORDS)

    def _notes(self) -> list[str]:
        if not self._wants_records:
            return []
        if not self._position.ledgers:
            return ["no deliveries and no reconciliation: there is no ledger/"]
        wanted = not self._begun.tables or "reconciliation" in self._begun.tables
        if wanted and not self._position.taps:
            return ["no reconciliation: there is no wire/ beside the ledger"]
        return []

    @property
    def _position(self) -> InputPosition:
        return InputPosition() if self._journal.last is None else self._journal.last.position

    def _process(self, arrived: NewInput) -> None:
        for attempt in range(_ATTEMPTS):
            start = time.monotonic()
            batch = _StreamBatch(self._spark, self._begun, self._journal, arrived, self._late_us)
            before = batch.inputs()
            try:
                commit = batch.run()
            except Exception as error:
                self._journal.discard(batch.staging)
                if self._stop.is_set():
                    return  # workers were interrupted too: the next run takes it up again
                # Files may be compacted while they are read.
                if attempt + 1 < _ATTEMPTS and batch.inputs() != before:
                    continue
                raise error
            self._journal.commit(
                commit,
                batch.staging,
                replaced_days=batch.replaced,
                replaced_files=batch.replaced_files,
                retained=batch.retained,
            )
            if self._notify is not None:
                rows = {name: sum(each) for name, each in batch.staging.rows.items()}
                seconds = time.monotonic() - start
                done = BatchDone(commit.batch, arrived.files, arrived.size_bytes, rows, seconds)
                self._notify(done)
            return

    def _summary(self, start: float) -> Summary:
        last = self._journal.last
        if last is None:
            return Summary({}, [], time.monotonic() - start)
        rows = {path: sum(each) for path, each in last.rows.items() if path.split(".")[0] in LAYERS}
        for table in rows.keys() & last.days.keys():
            files = [file for each in last.days[table].values() for file in each]
            rows[table] = self._journal.read_files(files, last.schemas[table]).count()
        totals: dict[str, dict[str, int]] = {}
        for part in (last.accounts, last.open_accounts):
            for name, sums in part.items():
                total = totals.setdefault(name, dict.fromkeys(_SUMS, 0))
                for each in _SUMS:
                    total[each] += sums[each]
        found: list[dict[str, Any]] = [
            {"protocol": name or None, **totals[name]} for name in sorted(totals)
        ]
        findings = {
            name: count + last.open_findings.get(name, 0) for name, count in last.findings.items()
        }
        counts = {name: n for name, n in findings.items() if n or name not in VERDICTS}
        return Summary(rows, found, time.monotonic() - start, counts)


class _StreamBatch:
    """One batch, from what arrived to its commit."""

    def __init__(
        self,
        spark: SparkSession,
        begun: StreamStart,
        journal: Journal,
        arrived: NewInput,
        late_us: int,
    ) -> None:
        self._spark = spark
        self._begun = begun
        self._journal = journal
        self._arrived = arrived
        self._last = journal.last
        self._now = CompleteUpTo() if self._last is None else self._last.reached
        self.staging: StreamStaging = journal.stage()
        self.replaced: dict[str, set[str]] = {}
        self._accounts: dict[bool, dict[str, dict[str, int]]] = {True: {}, False: {}}
        self._unsettled: list[str] = []
        self._has_wire = bool(arrived.taps or arrived.captures)
        self._recorded: LedgerBatch | None = None
        position = arrived.position
        if self._wants(*OF_RECORDS) and (position.taps or position.ledgers):
            self._recorded = LedgerBatch(
                spark,
                journal,
                self.staging,
                arrived,
                self._rows_of,
                chosen=begun.tables,
                late_us=late_us,
            )

    @property
    def replaced_files(self) -> list[str]:
        return [] if self._recorded is None else self._recorded.replaced

    @property
    def retained(self) -> frozenset[str]:
        """Tables that are not looked at where nothing new was on a wire."""
        if self._has_wire or self._last is None:
            return frozenset()
        return frozenset(self._last.files) - self.staging.rows.keys()

    def inputs(self) -> list[str]:
        """The files of lakes that will be read."""
        listing = self._journal.listing
        return files_of(self._arrived.rows, listing)

    def run(self) -> StreamCommit:
        if self._arrived.position.alone:
            self._from_hub()
        if self._has_wire:
            self._from_wire()
        elif self._recorded is not None:
            self._recorded.run(None)
        return self._commit()

    def _commit(self) -> StreamCommit:
        last, recorded = self._last, self._recorded
        rows = dict(last.rows) if last is not None else {}
        for name, (kept, passing) in self.staging.rows.items():
            rows[name] = (rows.get(name, (0, 0))[0] + kept, passing)
        sums = dict(last.accounts) if last is not None else {}
        for name, added in self._accounts[True].items():
            before = sums.get(name, {})
            sums[name] = {each: before.get(each, 0) + added[each] for each in _SUMS}
        findings = dict(last.findings) if last is not None else {}
        for name, count in recorded.findings[True].items() if recorded is not None else ():
            findings[name] = findings.get(name, 0) + count
        if last is not None and not self._has_wire:
            self._accounts[False] = last.open_accounts
            self._unsettled = last.unsettled_days
        return StreamCommit(
            batch=self.staging.batch,
            position=self._arrived.position,
            reached=self._now,
            schemas={**(last.schemas if last is not None else {}), **self.staging.schemas},
            rows=rows,
            accounts=sums,
            open_accounts=self._accounts[False],
            unsettled_days=self._unsettled,
            clocks=recorded.clocks if recorded is not None else {},
            findings=findings,
            open_findings=recorded.findings[False] if recorded is not None else {},
        )

    def _wants(self, *names: str) -> bool:
        chosen = self._begun.tables
        return not chosen or any(name in chosen for name in names)

    # From the hub's own record.

    def _from_hub(self) -> None:
        if not self._wants("messages", "deliveries"):
            raise InvalidInput("a lake without wire/ gives the tables messages and deliveries only")
        if not self._wants("messages") or not self._arrived.messages:
            return
        envelopes = self._rows_of(self._arrived.messages, MESSAGES)
        rows = from_hub(envelopes).withColumn(KEPT, F.lit(True))
        self.staging.write("messages", rows, tables=("silver.messages",), dated_by="time")

    def _rows_of(self, ranges: Iterable[LakeRows], schema: Any) -> DataFrame:
        from pyspark.sql.pandas.types import from_arrow_schema

        ranges = list(ranges)
        wanted = F.lit(False)
        for each in ranges:
            between = F.col("seq").between(each.first, each.last)
            wanted = wanted | ((F.col("node") == each.node) & between)
        files = files_of(ranges, self._journal.listing)
        rows = self._spark.read.schema(from_arrow_schema(schema)).parquet(*files).where(wanted)
        since_us = self._begun.since_us
        return rows.where(F.col("time") >= since_us) if since_us else rows

    # From the wire.

    def _from_wire(self) -> None:
        seen = Observation()
        captured = F.col("node") == NODE
        wire = self._wire().observe(
            seen,
            F.max(F.when(captured, F.col("time"))).alias("captures_us"),
            F.max(F.when(~captured, F.col("time"))).alias("taps_us"),
        )
        decoded, passing, refused = self._decoded(wire)
        self._now = CompleteUpTo(
            max(self._now.captures_us, seen.get["captures_us"] or 0),
            max(self._now.taps_us, seen.get["taps_us"] or 0),
        )
        tables = _BatchTables(decoded, passing)
        tables.directions = self._directions(tables.directions)
        # Much of the time of a small batch goes into planning: the longest first, side by side.
        work: list[Callable[[], None]] = [lambda: self._counted(tables)]
        if self._wants("conversations", "traffic"):
            work.append(lambda: self._conversations(tables))
        if self._wants("topology"):
            work.append(lambda: self._topology(tables))
        if self._wants("frames"):
            work.append(lambda: self._silver("frames", tables.frames, "time"))
        if self._wants("messages"):
            work.append(lambda: self._silver("messages", tables.messages, "time"))
        if self._wants("violations") and (refused or not self.staging.batch):
            work.append(lambda: self._silver("violations", tables.violations, "time"))
        with ThreadPoolExecutor(_WRITERS) as pool:
            for done in [pool.submit(each) for each in work]:
                done.result()

    def _wire(self) -> DataFrame:
        """bronze.wire of what arrived, with `kept`."""
        parts: list[DataFrame] = []
        states = self._journal.state(FLOWS)
        if self._arrived.captures or states is not None:
            parts.append(self._captured(states))
        if self._arrived.taps:
            taps = self._rows_of(self._arrived.taps, WIRE)
            parts.append(taps.withColumn(KEPT, F.lit(True)))
        wire = together(*parts)
        chosen = self._begun.tables
        if "wire" in chosen or (not chosen and (self._arrived.captures or states is not None)):
            self.staging.write("wire", wire, tables=("bronze.wire",), dated_by="time")
        return wire

    def _captured(self, states: DataFrame | None) -> DataFrame:
        splits, since_us = list(self._arrived.captures), self._begun.since_us
        segments = segments_of(self._spark, splits, since_us=since_us)
        rows = reassemble_on(segments, states, PortMap(self._begun.ports), now=self._now)
        is_state = F.when(F.col("kind") == FLOWS, FLOWS).otherwise("wire")
        made = self.staging.work("captured", rows.withColumn(PART, is_state), split_by=(PART,))
        self.staging.leave(FLOWS, "captured", made, part=f"{PART}={FLOWS}")
        return made.where(F.col(PART) == "wire").drop("flow", "state", PART)

    def _decoded(self, wire: DataFrame) -> tuple[DataFrame, bool, bool]:
        """Rows of `tables.decoded`, whether some of them may be taken back, and whether there are
        violations."""
        payloads = self._wants("messages", *OF_RECORDS)
        states = self._journal.state(STATES)
        rows = decode_on(wire, states, payloads=payloads, now=self._now)
        made = Observation()
        is_row = F.col(TABLE).isin(FRAMES, VIOLATIONS)
        rows = rows.observe(
            made,
            F.count_if(is_row & ~F.col(KEPT)).alias("passing"),
            F.count_if(F.col(TABLE) == VIOLATIONS).alias("violations"),
        )
        decoded = self.staging.work("decoded", rows, split_by=(TABLE, KEPT))
        self.staging.leave(STATES, "decoded", decoded, part=f"{TABLE}={STATES}")
        return decoded, made.get["passing"] > 0, made.get["violations"] > 0

    def _directions(self, direction_rows: DataFrame) -> DataFrame:
        if self._wants("directions"):
            self._silver("directions", direction_rows)
            return self.staging.read("directions", "silver.directions")
        return self.staging.work("ways", direction_rows, split_by=(KEPT,))

    def _carry(self, name: str, rows: DataFrame) -> DataFrame:
        """Hand it on to the next batch, and give it back as it stands on disk."""
        # Each kind of rows has its own tasks, and each task would write its own files.
        tasks = int(self._spark.conf.get("spark.sql.shuffle.partitions") or 1)
        made = self.staging.work(name, rows.coalesce(tasks))
        self.staging.leave(name, name, made)
        return made

    # Tables.

    def _silver(self, name: str, rows: DataFrame, dated_by: str | None = None) -> None:
        self.staging.write(name, rows, tables=(f"silver.{name}",), dated_by=dated_by)

    def _counted(self, tables: _BatchTables) -> None:
        before = self._journal.state("counts")
        split = tables.split(frames), tables.split(violations)
        rows = Counts.carry(before, tables.directions, *split, now_us=max(self._now))
        carried = Counts(self._carry("counts", rows))
        self._account(tables, carried)
        if self._wants("sessions"):
            self._sessions(carried)
        if self._recorded is not None:
            self._recorded.run(
                DecodedBatch(tables.messages, split[0][0], tables.directions, carried)
            )

    def _account(self, tables: _BatchTables, carried: Counts) -> None:
        """Raises BytesMissing if bytes don't add up."""
        tallied = carried.tallies
        fresh, passing = tables.split(frames), tables.split(violations)
        if fresh[1] is not None and passing[1] is not None:
            tallied = counts.combined(together(tallied, counts.tallies(fresh[1], passing[1])))
        parts = [
            accounting(tables.directions.where(F.col(KEPT) == kept), tallied).withColumn(
                KEPT, F.lit(kept)
            )
            for kept in (True, False)
        ]
        rows = together(*parts)
        if self._wants("accounting"):
            self.staging.write("accounting", rows, tables=("gold.accounting",))
            rows = self.staging.read("accounting", "gold.accounting")
        sums = [F.sum(name).alias(name) for name in _SUMS]
        wrong = F.max_by(F.struct("connection", "direction", "missing"), F.abs("missing"))
        for row in rows.groupBy("protocol", KEPT).agg(*sums, wrong.alias("wrong")).collect():
            if row.wrong.missing:
                raise BytesMissing(
                    f"{row.wrong.missing} bytes are not accounted for in connection "
                    f"{row.wrong.connection}, {row.wrong.direction}"
                )
            self._accounts[row[KEPT]][row.protocol or ""] = {name: row[name] for name in _SUMS}

    def _sessions(self, carried: Counts) -> None:
        held = by_session(carried.connections, F.bool_and("final").alias(KEPT))
        table = F.when(F.col("ended") == OPEN, "open.sessions").otherwise("gold.sessions")
        self.staging.write(
            "sessions",
            held.withColumn(_PLACE, table),
            tables=("gold.sessions", "open.sessions"),
            dated_by="opened",
        )

    def _conversations(self, tables: _BatchTables) -> None:
        """Those with both sides, and the unanswered ones of connections that are over, stay; the
        others are looked at again with what may be taken back."""
        message_rows, passing = tables.split(messages)
        before = self._journal.state("said")
        carried = CarriedCalls(
            self._carry("said", CarriedCalls.carry(before, tables.directions, message_rows))
        )
        waiting = together(carried.waiting, passing)
        rows = together(
            conversations(carried.settled, tables.directions).withColumn(KEPT, F.lit(True)),
            conversations(waiting, tables.directions).withColumn(KEPT, F.lit(False)),
        )
        table = F.when(F.col("is_open"), "open.conversations").otherwise("gold.conversations")
        if self._wants("conversations"):
            self.staging.write(
                "conversations",
                rows.withColumn(_PLACE, table),
                tables=("gold.conversations", "open.conversations"),
                dated_by="asked",
            )
            rows = self.staging.read("conversations", "gold.conversations")
        if self._wants("traffic"):
            self._traffic(tables, rows)

    def _traffic(self, tables: _BatchTables, conversation_rows: DataFrame) -> None:
        """The days that something is added to are written anew: with what may be taken back for
        who reads, without it for the next batch."""
        message_rows = tables.split(messages)
        fresh = minutes.partials(message_rows[0], conversation_rows.where(KEPT))
        passing = None
        if message_rows[1] is not None:
            passing = minutes.partials(message_rows[1], conversation_rows.where(~F.col(KEPT)))
        before = set(self._last.unsettled_days) if self._last is not None else set()
        answered = conversation_rows.where(F.col("latency_us").isNotNull())
        if passing is not None:
            self._unsettled = _days(message_rows[1], answered.where(~F.col(KEPT)))
        days = sorted({*_days(message_rows[0], answered.where(KEPT)), *self._unsettled, *before})
        for table in ("gold.traffic", f"{DAYS}.traffic"):
            self.replaced[table] = set(days)
        if not days:
            return
        known = self._journal.days(f"{DAYS}.traffic", days)
        kept = together(None if known is None else minutes.unfolded(known), fresh)
        both = F.explode(F.array(F.lit("gold.traffic"), F.lit(f"{DAYS}.traffic")))
        if passing is None:
            rows = minutes.folded(kept).withColumn(_PLACE, both)
        else:
            rows = together(
                minutes.folded(together(kept, passing)).withColumn(_PLACE, F.lit("gold.traffic")),
                minutes.folded(kept).withColumn(_PLACE, F.lit(f"{DAYS}.traffic")),
            )
        self.staging.write(
            "traffic",
            rows.withColumn(KEPT, F.lit(True)),
            tables=("gold.traffic", f"{DAYS}.traffic"),
            dated_by="minute",
            by_day=True,
        )

    def _topology(self, tables: _BatchTables) -> None:
        message_rows, passing = tables.split(messages)
        before = self._journal.state("edges")
        carried = Edges(self._carry("edges", Edges.carry(before, tables.directions, message_rows)))
        held = carried.held
        if passing is not None:
            held = graph.combined(together(held, graph.edges(passing, tables.directions)))
        held = held.withColumn("connections", F.lit(1).cast("bigint"))
        rows = graph.by_edge(together(carried.totals, held)).withColumn(KEPT, F.lit(False))
        self.staging.write("topology", rows, tables=("gold.topology",))


def _days(message_rows: DataFrame | None, answered: DataFrame) -> list[str]:
    """The days of messages, and of requests that were answered: few, but for who catches up."""
    times = together(
        message_rows and message_rows.select("time"), answered.select(F.col("asked").alias("time"))
    )
    day = F.to_date(F.timestamp_micros("time")).cast("string").alias("day")
    return sorted(row.day for row in times.select(day).distinct().collect())


class _BatchTables:
    """What was decoded in a batch, with `kept`; `passing`: some of it may be taken back."""

    def __init__(self, decoded: DataFrame, passing: bool) -> None:
        self._decoded = decoded
        self._passing = passing
        self.directions = self._with_kept(directions, all_=True)
        """The directions of all connections that are known of, whether they said something new or
        not."""

    def split(self, table: Callable[[DataFrame], DataFrame]) -> tuple[DataFrame, DataFrame | None]:
        """The rows of a table that are kept, and those that are not, if there are any."""
        kept = table(self._decoded.where(KEPT))
        return kept, table(self._decoded.where(~F.col(KEPT))) if self._passing else None

    def _with_kept(self, table: Callable[[DataFrame], DataFrame], *, all_: bool) -> DataFrame:
        kept, passing = table(self._decoded.where(KEPT)), None
        if self._passing or all_:
            passing = table(self._decoded.where(~F.col(KEPT))).withColumn(KEPT, F.lit(False))
        return together(kept.withColumn(KEPT, F.lit(True)), passing)

    @property
    def frames(self) -> DataFrame:
        return self._with_kept(frames, all_=False)

    @property
    def violations(self) -> DataFrame:
        return self._with_kept(violations, all_=False)

    @property
    def messages(self) -> DataFrame:
        return self._with_kept(messages, all_=False)
