"""A batch: reads all of its input once and writes the tables of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.errors import InvalidInput
from crosswire.lake.schemas import LEDGER, MESSAGES, OPEN
from crosswire.pipeline.decode.row_schema import TABLE
from crosswire.pipeline.output import Output
from crosswire.pipeline.progress import Progress
from crosswire.pipeline.sources.decoded import decode, decode_captures, decode_tap
from crosswire.pipeline.sources.inputs import Inputs
from crosswire.pipeline.sources.lake import from_records
from crosswire.pipeline.sources.lake_input import LakeInput, inspect_lake
from crosswire.pipeline.sources.pcap import Captures
from crosswire.pipeline.sources.tap import from_tap
from crosswire.pipeline.spark import plain_errors
from crosswire.pipeline.summary import (
    DELIVERY_FAULTS,
    LEDGER_TABLES,
    NO_LEDGER,
    NO_WIRE,
    ONLY_RECORDS,
    Summary,
)
from crosswire.pipeline.tables.accounting import accounting, check_sums, summed
from crosswire.pipeline.tables.conversations import conversations
from crosswire.pipeline.tables.deliveries import LATE_US, deliveries
from crosswire.pipeline.tables.directions import directions
from crosswire.pipeline.tables.frames import frames
from crosswire.pipeline.tables.messages import from_hub, messages
from crosswire.pipeline.tables.reconciliation import reconciliation
from crosswire.pipeline.tables.sessions import sessions
from crosswire.pipeline.tables.tallies import tallies
from crosswire.pipeline.tables.topology import topology
from crosswire.pipeline.tables.traffic import traffic
from crosswire.pipeline.tables.violations import violations

__all__ = ["BatchJob", "run_batch"]


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


def run_batch(spark: SparkSession, batch: BatchJob, *, quiet: bool = False) -> Summary:
    """Write the tables. Raises PipelineError; the output then has the tables it had before."""
    start = time.monotonic()
    with plain_errors():
        lake = inspect_lake(batch.inputs, since_us=batch.since_us, skip_damaged=batch.skip_damaged)
        batch = replace(batch, inputs=lake.inputs)
        output = Output(spark, batch.output)
        try:
            run = _BatchRun(spark, batch, output, Progress(spark, quiet=quiet), lake)
            accounts = run.all()
            output.commit()
        finally:
            output.close()
    rows = {name.replace("/", "."): count for name, count in output.rows.items()}
    return Summary(rows, accounts, time.monotonic() - start, run.findings, run.notes)


class _BatchRun:
    """The steps of a batch, in the order in which each needs the tables of the earlier ones.

    Every table is read back from disk by the steps after it: Spark would otherwise compute it, and
    decode the input, again for each of them.
    """

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

    def all(self) -> list[dict[str, Any]]:
        """Write every table that is wanted; returns the byte accounting of each protocol."""
        inputs = self._batch.inputs
        if not inputs.captures and not inputs.taps:
            self._from_records_only()
            return []
        decoded = self._decoded()
        frame_rows = self._write("silver", "frames", frames(decoded), dated_by="time")
        violation_rows = self._write("silver", "violations", violations(decoded), dated_by="time")
        direction_rows = self._write("silver", "directions", directions(decoded))
        tally_rows = tallies(frame_rows, violation_rows).persist(StorageLevel.DISK_ONLY)
        message_rows = self._from_wire(decoded, direction_rows, tally_rows)
        self._from_ledger(message_rows, frame_rows, direction_rows)
        return self._account(direction_rows, tally_rows)

    def _wants(self, *names: str) -> bool:
        chosen = self._batch.tables
        return not chosen or not chosen.isdisjoint(names)

    def _decoded(self) -> DataFrame:
        """Write bronze.wire if it is wanted, and decode the input."""
        inputs, since_us = self._batch.inputs, self._batch.since_us
        payloads = self._wants("messages", *LEDGER_TABLES)
        captures: Captures | None = None
        parts = []
        if inputs.captures:
            captures = Captures(
                self._spark, inputs.captures, ports=self._batch.ports, since_us=since_us
            )
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
            return self._output.write_work(
                "decoded", reduce(DataFrame.unionByName, parts), split_by=TABLE
            )

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
        wire = reduce(DataFrame.unionByName, parts)
        return self._write("bronze", "wire", wire, dated_by="time")

    def _from_wire(
        self, decoded: DataFrame, direction_rows: DataFrame, tally_rows: DataFrame
    ) -> DataFrame:
        """Write what is made of messages and directions; returns silver.messages."""
        message_rows = messages(decoded)
        if self._wants("messages"):
            message_rows = self._write("silver", "messages", message_rows, dated_by="time")
        if self._wants("sessions"):
            session_rows = sessions(direction_rows, tally_rows)
            self._write_split("sessions", session_rows, F.col("ended") == OPEN, dated_by="opened")
        if self._wants("conversations", "traffic"):
            conversation_rows = conversations(message_rows, direction_rows)
            if self._wants("conversations"):
                conversation_rows = self._write_split(
                    "conversations", conversation_rows, F.col("is_open"), dated_by="asked"
                )
            if self._wants("traffic"):
                self._write(
                    "gold",
                    "traffic",
                    traffic(message_rows, conversation_rows, direction_rows),
                    dated_by="minute",
                )
        if self._wants("topology"):
            self._write("gold", "topology", topology(message_rows, direction_rows))
        return message_rows

    def _from_records_only(self) -> None:
        """Write the tables of a hub that did not tap its connections."""
        if not self._wants("messages", "deliveries"):
            raise InvalidInput(ONLY_RECORDS)
        if self._batch.inputs.messages:
            envelopes = self._read("messages", MESSAGES)
            self._write("silver", "messages", from_hub(envelopes), dated_by="time")
        self._from_ledger()

    def _read(self, name: str, schema: pa.Schema) -> DataFrame:
        inputs = self._batch.inputs
        folders = inputs.ledgers if name == "ledger" else inputs.messages
        return from_records(self._spark, folders, schema, since_us=self._batch.since_us)

    def _from_ledger(
        self,
        message_rows: DataFrame | None = None,
        frame_rows: DataFrame | None = None,
        direction_rows: DataFrame | None = None,
    ) -> None:
        """Write gold.deliveries and, if the hub's connections were tapped, gold.reconciliation."""
        inputs = self._batch.inputs
        if not self._wants(*LEDGER_TABLES):
            return
        if not inputs.ledgers:
            self.notes.append(NO_LEDGER)
            return
        ledger, envelopes = self._read("ledger", LEDGER), self._read("messages", MESSAGES)
        reconciled: DataFrame | None = None
        if (
            message_rows is not None
            and frame_rows is not None
            and direction_rows is not None
            and inputs.taps
        ):
            reconciled = reconciliation(
                message_rows, frame_rows, direction_rows, ledger, envelopes, self._missing
            )
            reconciled = self._write("gold", "reconciliation", reconciled, dated_by="time")
            with self._progress.step("comparing"):
                counts = reconciled.groupBy("verdict").count().collect()
            self.findings |= {row["verdict"]: row["count"] for row in counts}
        elif self._wants("reconciliation"):
            self.notes.append(NO_WIRE)
        if self._wants("deliveries"):
            rows = deliveries(
                ledger,
                envelopes,
                reconciled,
                late_us=self._batch.late_us,
                missing=self._missing,
            )
            self._write_split(
                "deliveries",
                rows,
                F.col("is_open"),
                dated_by="accepted",
                faults=DELIVERY_FAULTS,
            )

    def _account(self, direction_rows: DataFrame, tally_rows: DataFrame) -> list[dict[str, Any]]:
        """Write gold.accounting; returns its sums by protocol. Raises BytesMissing."""
        accounts = self._write("gold", "accounting", accounting(direction_rows, tally_rows))
        with self._progress.step("adding up"):
            totals = summed(accounts).orderBy("protocol").collect()
        return [{"protocol": row.protocol, **check_sums(row)} for row in totals]

    # Writing.

    def _write_split(
        self,
        name: str,
        rows: DataFrame,
        is_open: Column,
        *,
        dated_by: str,
        faults: Mapping[str, str] | None = None,
    ) -> DataFrame:
        """Write finished rows to gold and open ones to open; returns the finished ones.

        Rows that meet the SQL conditions of `faults` are counted as findings.
        """
        saved = rows.persist(StorageLevel.DISK_ONLY)
        if faults:
            counted = [F.count_if(F.expr(sql)).alias(fault) for fault, sql in faults.items()]
            self.findings |= saved.agg(*counted).collect()[0].asDict()
        finished = self._write("gold", name, saved.where(~is_open), dated_by=dated_by)
        self._write("open", name, saved.where(is_open))
        saved.unpersist()
        return finished

    def _write(
        self, layer: str, name: str, rows: DataFrame, *, dated_by: str | None = None
    ) -> DataFrame:
        """Write a table and return it as read back; one that is not wanted is not written."""
        if not self._wants(name) and name != "wire":
            return rows
        with self._progress.step(f"{layer}.{name}"):
            return self._output.write(f"{layer}/{name}", rows, dated_by=dated_by)
