"""A batch: reads all of its input once and writes the tables of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Final

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.capture.packet_counts import PacketCounts
from crosswire.lake.schemas import LEDGER, MESSAGES
from crosswire.pipeline.decode.row_schema import TABLE
from crosswire.pipeline.output import Output, setting_of
from crosswire.pipeline.progress import Progress
from crosswire.pipeline.sources.decoded import decode, decode_captures, decode_tap
from crosswire.pipeline.sources.flow_rows import NODE
from crosswire.pipeline.sources.inputs import Inputs
from crosswire.pipeline.sources.lake import from_records
from crosswire.pipeline.sources.lake_input import LakeInput, inspect_lake
from crosswire.pipeline.sources.lake_listing import LakeListing
from crosswire.pipeline.sources.pcap import Captures
from crosswire.pipeline.sources.tap import from_tap
from crosswire.pipeline.spark import WRITERS, in_one_task, plain_errors
from crosswire.pipeline.summary import (
    COMPARED_TABLES,
    DAMAGED_ANSWERS,
    DELIVERY_FAULTS,
    LEDGER_TABLES,
    MINUTE_TABLES,
    NO_LEDGER,
    NO_WIRE,
    OTHER_PAYLOAD,
    Summary,
)
from crosswire.pipeline.tables.accounting import packet_rows
from crosswire.pipeline.tables.carry_over import CarriedCalls, Counts, Edges
from crosswire.pipeline.tables.catalog import CATALOG
from crosswire.pipeline.tables.deliveries import LATE_US, deliveries
from crosswire.pipeline.tables.depth import depth
from crosswire.pipeline.tables.finality import KEPT, TARGET_TABLE, Split
from crosswire.pipeline.tables.lag import lag
from crosswire.pipeline.tables.minutes import minutes, with_leaving
from crosswire.pipeline.tables.names import VERDICTS
from crosswire.pipeline.tables.principals import principals
from crosswire.pipeline.tables.reconciliation import is_damaged_answer, reconciliation
from crosswire.pipeline.tables.registry import DayTotals, DecodedBatch, DecodedTables, TableRun
from crosswire.pipeline.tables.steps import gold_steps, seen_connections, with_messages
from crosswire.pipeline.tables.tallies import tallies
from crosswire.pipeline.tables.topology import edges

__all__ = ["BatchJob", "run_batch"]


_MADE_OF_SILVER: Final = ("conversations", "traffic", "topology", *LEDGER_TABLES)
"""Tables that read other tables back, not only sums of them."""


@dataclass(frozen=True)
class BatchJob:
    """Input, output and options of a batch.

    `tables` limits what is written (default: all; bronze.wire then only if there are captures,
    because the lake of a hub has it already). `ports` maps ports to protocols; input older than
    `since_us` is left out; `late_us` is the threshold of gold.deliveries. With `skip_damaged`,
    files that can't be trusted are left out and reported instead of ending the run.
    """

    inputs: Inputs
    output: str
    tables: frozenset[str] = frozenset()
    since_us: int = 0
    ports: Mapping[int, str] = field(default_factory=dict)
    late_us: int = LATE_US
    skip_damaged: bool = False


def run_batch(
    spark: SparkSession,
    batch: BatchJob,
    *,
    quiet: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Write the tables. Raises PipelineError; the output then has the tables it had before.

    Its steps are printed unless `quiet`; with `progress` they follow those that it has already.
    """
    if progress is None:
        progress = Progress(quiet=quiet)
    progress.watch(spark)
    with plain_errors():
        with progress.step("inspecting the input"):
            lake = _inspected(spark, batch)
        batch = replace(batch, inputs=lake.inputs)
        output = Output(spark, batch.output)
        try:
            run = _WholeInput(spark, batch, output, progress, lake)
            accounts = run.all()
            with progress.step("publishing"):
                output.commit()
        finally:
            output.close()
    # As in a stream: verdicts that no passage has are not listed.
    findings = {name: n for name, n in run.findings.items() if n or name not in VERDICTS}
    names = [path for table in CATALOG.values() for path in table.paths]
    return Summary(
        {name: output.rows[name] for name in names if name in output.rows},
        accounts,
        sum(progress.seconds.values()),
        findings,
        run.notes,
        run.packets.rows(),
        run.refused,
        dict(progress.seconds),
    )


def _inspected(spark: SparkSession, batch: BatchJob) -> LakeInput:
    return inspect_lake(
        batch.inputs,
        since_us=batch.since_us,
        skip_damaged=batch.skip_damaged,
        listing=LakeListing(setting_of(spark)).everything,
    )


class _WholeInput:
    """The driver of the registry for all input at once: every row is final, nothing is carried on.

    Every table is read back from disk by those that are made of it: Spark would otherwise compute
    it, and decode the input, again for each of them.
    """

    is_first = True

    def __init__(
        self,
        spark: SparkSession,
        batch: BatchJob,
        output: Output,
        progress: Progress,
        lake: LakeInput,
    ) -> None:
        self._spark = spark
        self._batch = batch
        self._output = output
        self._progress = progress
        self.findings: dict[str, int] = {}
        self.notes: list[str] = list(lake.notes)
        self._missing = lake.missing
        self.packets = PacketCounts()
        self.refused = 0
        self._writers = int(spark.conf.get(WRITERS, "1") or 1)
        # Sums alone read as little of decoded rows as of the tables, and need not wait for them.
        self.silver_first = self._writers == 1 or self.wants(*_MADE_OF_SILVER)
        self._slots = threading.Semaphore(self._writers)
        self._thread = threading.local()

    def all(self) -> list[dict[str, Any]]:
        """Write every table that is wanted; returns the byte accounting of each protocol."""
        inputs = self._batch.inputs
        tables = TableRun(self)
        if inputs.captures or inputs.taps:
            tables.from_wire(DecodedTables(self._decoded().withColumn(KEPT, F.lit(True))))
        else:
            tables.from_records(self._read("messages", MESSAGES) if inputs.messages else None)
        accounts = tables.accounts[True]
        self.refused = tables.refused[True]
        return [{"protocol": name or None, **accounts[name]} for name in sorted(accounts)]

    # Input.

    def _decoded(self) -> DataFrame:
        """Write bronze.wire if it is wanted, and decode the input."""
        inputs, since_us = self._batch.inputs, self._batch.since_us
        payloads = self.wants("messages", *COMPARED_TABLES)
        captures: Captures | None = None
        parts = []
        if inputs.captures:
            captures = Captures(
                self._spark,
                inputs.captures,
                ports=self._batch.ports,
                since_us=since_us,
                skip_damaged=self._batch.skip_damaged,
            )
            with self._progress.step("counting packets"):
                self.packets = captures.counts()
            self.notes += [f"skipped the rest: {fault}" for fault in self.packets.faults]
        wire = self._wire(captures)
        if captures is not None and captures.is_shuffled and wire is not None:
            # Reassembly needed a shuffle: reading its result back is cheaper than doing it twice.
            parts.append(decode(wire, payloads=payloads))
        else:
            if captures is not None:
                parts.append(decode_captures(captures, payloads=payloads))
            if inputs.taps:
                tapped = decode_tap(self._spark, inputs.taps, payloads=payloads, since_us=since_us)
                parts.append(tapped)
        with self._progress.step("decoding"):
            return self._output.write_work("decoded", reduce(DataFrame.unionByName, parts), TABLE)

    def _wire(self, captures: Captures | None) -> DataFrame | None:
        """Write bronze.wire and return it; None if it is not wanted."""
        inputs, since_us = self._batch.inputs, self._batch.since_us
        if "wire" not in self._batch.tables and (captures is None or self._batch.tables):
            return None
        parts = []
        if captures is not None:
            parts.append(captures.wire())
        if inputs.taps:
            parts.append(from_tap(self._spark, inputs.taps, since_us=since_us))
        return self.write("wire", reduce(DataFrame.unionByName, parts))

    def _read(self, name: str, schema: pa.Schema) -> DataFrame:
        inputs = self._batch.inputs
        folders = inputs.ledgers if name == "ledger" else inputs.messages
        rows = from_records(self._spark, folders, schema, since_us=self._batch.since_us)
        return in_one_task(rows)

    # What the registry asks for.

    def wants(self, *names: str) -> bool:
        """Whether any of these tables is to be written; no `tables` means all."""
        chosen = self._batch.tables
        return not chosen or not chosen.isdisjoint(names)

    def run(self, work: Sequence[Callable[[], None]]) -> None:
        """One after the other, if each needs all of the machine. Side by side, if so little is to
        be done that most of the time goes into the planning of queries, on one core."""
        if self._writers == 1 or len(work) <= 1:
            for each in work:
                each()
            return
        # Some of the work consists of further work: who waits for it leaves its slot to it. So the
        # first of each list gets on, and what only fills the other cores waits for a slot.
        is_inside = getattr(self._thread, "is_inside", False)
        if is_inside:
            self._slots.release()
        try:
            with self._progress.waiting(), ThreadPoolExecutor(len(work)) as pool:
                for done in [pool.submit(self._in_slot, each) for each in work]:
                    done.result()
        finally:
            if is_inside:
                self._slots.acquire()

    def _in_slot(self, work: Callable[[], None]) -> None:
        with self._slots:
            self._thread.is_inside = True
            self._progress.beside(work)

    def step(self, name: str) -> AbstractContextManager[None]:
        """Counts its time among the steps of the run."""
        return self._progress.step(name)

    def write(
        self, name: str, rows: DataFrame, counts: Mapping[str, Column] | None = None
    ) -> DataFrame:
        """Write a table, finished and open rows apart; returns the finished ones as read back.
        `counts` are conditions: how many rows meet each is added to the findings."""
        table = CATALOG[name]
        if not table.has_open:
            with self._progress.step(table.path):
                made = self._output.write(table.path, rows, counts)
                self._add_findings(table.path)
            return made.withColumn(KEPT, F.lit(True))
        saved = rows.persist(StorageLevel.DISK_ONLY)
        finished, waiting = table.paths
        target = F.col(TARGET_TABLE)
        seen = Observation(name)
        with self._progress.step(finished):
            watched = saved.observe(seen, F.count_if(target == waiting).alias("rows"))
            made = self._output.write(finished, watched.where(target == finished), counts)
            self._add_findings(finished)
        with self._progress.step(waiting):
            if seen.get["rows"]:
                self._output.write(waiting, saved.where(target == waiting), counts)
                self._add_findings(waiting)
            else:
                self._output.write_no_rows(waiting)
        saved.unpersist()
        return made.withColumn(KEPT, F.lit(True))

    def _add_findings(self, path: str) -> None:
        for name, count in self._output.counts[path].items():
            self.findings[name] = self.findings.get(name, 0) + count

    def keep(self, _name: str, rows: DataFrame) -> DataFrame:
        """As they are: decoded rows are on disk."""
        return rows

    def counts(self, directions: DataFrame, frames: Split, violations: Split) -> Counts:
        """The counts of all connections."""
        counted = tallies(frames[0], violations[0]).persist(StorageLevel.DISK_ONLY)
        return Counts.whole(directions, counted, self.principals())

    def packet_rows(self) -> DataFrame | None:
        """Rows about the packets of all captures."""
        if not self._batch.inputs.captures:
            return None
        return packet_rows(self._spark, NODE, self.packets).withColumn(KEPT, F.lit(True))

    def begin(self, _directions: DataFrame) -> None:
        """Nothing has to be known before."""

    def principals(self) -> DataFrame | None:
        """Those of the whole ledger."""
        return principals(self._read("ledger", LEDGER)) if self._batch.inputs.ledgers else None

    def for_traffic(self, messages: DataFrame) -> Split:
        """All of them."""
        return messages, None

    def calls(self, _directions: DataFrame, messages: DataFrame) -> CarriedCalls:
        """All of them."""
        return CarriedCalls(messages)

    def edges(self, directions: DataFrame, messages: DataFrame) -> Edges:
        """All of them."""
        return Edges(edges(messages, directions))

    def add_to_days(
        self, totals: DayTotals, fresh: DataFrame, _provisional: DataFrame | None
    ) -> None:
        """Write the whole table."""
        self.write(totals.name, totals.fold(fresh))

    def ledger_tables(self, wire: DecodedBatch | None) -> None:
        """Write what is made of the ledger; gold.reconciliation only if connections were tapped."""
        inputs = self._batch.inputs
        if not self.wants(*LEDGER_TABLES):
            return
        if not inputs.ledgers:
            self.notes.append(NO_LEDGER)
            return
        ledger, envelopes = self._read("ledger", LEDGER), self._read("messages", MESSAGES)
        steps = with_messages(ledger, envelopes).persist(StorageLevel.DISK_ONLY)
        work: list[Callable[[], None]] = []
        if self.wants(*COMPARED_TABLES):
            work.append(lambda: self._compared(steps, envelopes, wire))
        work.append(lambda: self._steps(steps, wire))
        self.run(work)
        steps.unpersist()

    def _compared(self, steps: DataFrame, envelopes: DataFrame, wire: DecodedBatch | None) -> None:
        reconciled: DataFrame | None = None
        if wire is not None and self._batch.inputs.taps:
            reconciled = reconciliation(
                wire.messages, wire.frames, wire.directions, steps, self._missing
            )
            if self.wants("reconciliation"):
                reconciled = self.write("reconciliation", reconciled, _verdicts())
            else:
                seen = Observation("comparing")
                counts = [F.count_if(each).alias(name) for name, each in _verdicts().items()]
                with self._progress.step("comparing"):
                    reconciled = self._output.write_work(
                        "reconciliation", reconciled.observe(seen, *counts)
                    )
                    self.findings |= seen.get
        elif self.wants("reconciliation"):
            self.notes.append(NO_WIRE)
        if self.wants("deliveries"):
            self._deliveries(steps, envelopes, reconciled)

    def _steps(self, steps: DataFrame, wire: DecodedBatch | None) -> None:
        if self.wants("steps"):
            connections = None if wire is None else seen_connections(wire.directions)
            self.write("steps", gold_steps(steps, connections))
        if self.wants(*MINUTE_TABLES):
            counted = minutes(with_leaving(steps)).persist(StorageLevel.DISK_ONLY)
            for name, table in (("depth", depth), ("lag", lag)):
                if self.wants(name):
                    self.write(name, table(counted))
            counted.unpersist()

    def _deliveries(
        self, steps: DataFrame, envelopes: DataFrame, reconciled: DataFrame | None
    ) -> None:
        rows = deliveries(
            steps, envelopes, reconciled, late_us=self._batch.late_us, missing=self._missing
        )
        target = F.when(F.col("is_open"), "open.deliveries").otherwise("gold.deliveries")
        faults = {name: F.expr(sql) for name, sql in DELIVERY_FAULTS.items()}
        self.write("deliveries", rows.withColumn(TARGET_TABLE, target), faults)


def _verdicts() -> dict[str, Column]:
    """What is counted in gold.reconciliation: each verdict, and payloads that differ."""
    return {
        **{name: F.col("verdict") == name for name in VERDICTS},
        OTHER_PAYLOAD: ~F.col("same_payload"),
        DAMAGED_ANSWERS: is_damaged_answer(F.col("kind"), F.col("intact")),
    }
