"""A batch: from input to tables, once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Final

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.errors import BytesMissing, InvalidInput
from crosswire.lake.schemas import LEDGER, MESSAGES, OPEN
from crosswire.pipeline.decode.frames import decode, decode_captures, decode_tap
from crosswire.pipeline.output import Output
from crosswire.pipeline.progress import Progress
from crosswire.pipeline.sources.inputs import Inputs
from crosswire.pipeline.sources.lake import from_records
from crosswire.pipeline.sources.pcap import Captures
from crosswire.pipeline.sources.tap import from_tap
from crosswire.pipeline.spark import plain_errors
from crosswire.pipeline.tables.accounting import PARTS, accounting
from crosswire.pipeline.tables.conversations import conversations
from crosswire.pipeline.tables.decoded import TABLE
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

__all__ = ["OF_RECORDS", "WRONG", "BatchJob", "Summary", "run_batch"]

OF_RECORDS: Final = ("deliveries", "reconciliation")
WRONG: Final = {"late": "late", "lost": "lost", "doubled": "doubled", "damaged": "NOT intact"}


@dataclass(frozen=True)
class BatchJob:
    """What to do. `tables` empty: all; `wire` then only where it is not what the input is."""

    inputs: Inputs
    output: str
    tables: frozenset[str] = frozenset()
    since_us: int = 0
    ports: Mapping[int, str] = field(default_factory=dict)
    late_us: int = LATE_US


@dataclass(frozen=True)
class Summary:
    """Rows of each table, the byte accounting by protocol, how long it took, and what the hub's
    records say, in numbers: results of gold.reconciliation; late, lost, doubled and damaged
    messages. `notes` says which tables were left out, and why."""

    rows: dict[str, int]
    accounting: list[dict[str, Any]]
    seconds: float
    findings: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def seen(self) -> int:
        return sum(each["seen"] for each in self.accounting)


def run_batch(spark: SparkSession, batch: BatchJob, *, quiet: bool = False) -> Summary:
    """Write the tables. Raises PipelineError; what was in the output is then as it was."""
    start = time.monotonic()
    with plain_errors():
        output = Output(spark, batch.output)
        try:
            run = _BatchRun(spark, batch, output, Progress(spark, quiet=quiet))
            accounts = run.all()
            output.commit()
        finally:
            output.close()
    rows = {name.replace("/", "."): count for name, count in output.rows.items()}
    return Summary(rows, accounts, time.monotonic() - start, run.findings, run.notes)


class _BatchRun:
    def __init__(
        self, spark: SparkSession, batch: BatchJob, output: Output, progress: Progress
    ) -> None:
        self._spark = spark
        self._batch = batch
        self._output = output
        self._progress = progress
        self.findings: dict[str, int] = {}
        self.notes: list[str] = []

    def all(self) -> list[dict[str, Any]]:
        inputs = self._batch.inputs
        if not inputs.captures and not inputs.taps:
            self._from_hub_alone()
            return []
        decoded = self._decoded()
        frame_rows = self._write("silver", "frames", frames(decoded), dated_by="time")
        refused = self._write("silver", "violations", violations(decoded), dated_by="time")
        direction_rows = self._write("silver", "directions", directions(decoded))
        counts = tallies(frame_rows, refused).persist(StorageLevel.DISK_ONLY)
        message_rows = self._gold(decoded, direction_rows, counts)
        self._records(message_rows, frame_rows, direction_rows)
        return self._account(direction_rows, counts)

    def _wants(self, *names: str) -> bool:
        chosen = self._batch.tables
        return not chosen or not chosen.isdisjoint(names)

    def _decoded(self) -> DataFrame:
        """bronze.wire, where it is wanted, and what is in it."""
        inputs, since_us = self._batch.inputs, self._batch.since_us
        payloads = self._wants("messages", *OF_RECORDS)
        captures: Captures | None = None
        parts = []
        if inputs.captures:
            captures = Captures(
                self._spark, inputs.captures, ports=self._batch.ports, since_us=since_us
            )
        wire = self._wire(captures)
        if captures is not None and captures.is_shuffled and wire is not None:
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
        """bronze.wire, if it is to be written."""
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

    def _gold(self, decoded: DataFrame, direction_rows: DataFrame, counts: DataFrame) -> DataFrame:
        """Gives the messages."""
        message_rows = messages(decoded)
        if self._wants("messages"):
            message_rows = self._write("silver", "messages", message_rows, dated_by="time")
        if self._wants("sessions"):
            held = sessions(direction_rows, counts)
            self._in_two("sessions", held, F.col("ended") == OPEN, dated_by="opened")
        if self._wants("conversations", "traffic"):
            conversation_rows = conversations(message_rows, direction_rows)
            if self._wants("conversations"):
                conversation_rows = self._in_two(
                    "conversations", conversation_rows, F.col("is_open"), dated_by="asked"
                )
            if self._wants("traffic"):
                self._write(
                    "gold", "traffic", traffic(message_rows, conversation_rows), dated_by="minute"
                )
        if self._wants("topology"):
            self._write("gold", "topology", topology(message_rows, direction_rows))
        return message_rows

    def _from_hub_alone(self) -> None:
        """The hub's own records, where there is no wire to look at."""
        if not self._wants("messages", "deliveries"):
            raise InvalidInput("a lake without wire/ gives the tables messages and deliveries only")
        if self._batch.inputs.messages:
            envelopes = self._read("messages", MESSAGES)
            self._write("silver", "messages", from_hub(envelopes), dated_by="time")
        self._records()

    def _read(self, name: str, schema: pa.Schema) -> DataFrame:
        inputs = self._batch.inputs
        folders = inputs.ledgers if name == "ledger" else inputs.messages
        return from_records(self._spark, folders, schema, since_us=self._batch.since_us)

    def _records(
        self,
        message_rows: DataFrame | None = None,
        frame_rows: DataFrame | None = None,
        direction_rows: DataFrame | None = None,
    ) -> None:
        """What the hub recorded, against the wire if there is one."""
        inputs = self._batch.inputs
        if not self._wants(*OF_RECORDS):
            return
        if not inputs.ledgers:
            self.notes.append("no deliveries and no reconciliation: there is no ledger/")
            return
        ledger, envelopes = self._read("ledger", LEDGER), self._read("messages", MESSAGES)
        reconciled: DataFrame | None = None
        if (
            message_rows is not None
            and frame_rows is not None
            and direction_rows is not None
            and inputs.taps
        ):
            reconciled = reconciliation(message_rows, frame_rows, direction_rows, ledger, envelopes)
            reconciled = self._write("gold", "reconciliation", reconciled, dated_by="time")
            with self._progress.step("comparing"):
                counts = reconciled.groupBy("verdict").count().collect()
            self.findings |= {row["verdict"]: row["count"] for row in counts}
        elif self._wants("reconciliation"):
            self.notes.append("no reconciliation: there is no wire/ beside the ledger")
        if self._wants("deliveries"):
            hops = deliveries(ledger, envelopes, reconciled, late_us=self._batch.late_us)
            self._in_two("deliveries", hops, F.col("is_open"), dated_by="accepted", wrong=WRONG)

    def _account(self, direction_rows: DataFrame, counts: DataFrame) -> list[dict[str, Any]]:
        """Bytes by protocol. Raises BytesMissing if they don't add up."""
        accounts = self._write("gold", "accounting", accounting(direction_rows, counts))
        with self._progress.step("adding up"):
            wrong = accounts.where("missing != 0").limit(1).collect()
            sums = [F.sum(name).alias(name) for name in ("seen", *PARTS, "missing")]
            totals = accounts.groupBy("protocol").agg(*sums).orderBy("protocol").collect()
        if wrong:
            row = wrong[0]
            raise BytesMissing(
                f"{row.missing} of {row.seen} bytes are not accounted for in connection "
                f"{row.connection}, {row.direction}"
            )
        return [row.asDict() for row in totals]

    # Writing.

    def _in_two(
        self,
        name: str,
        rows: DataFrame,
        is_open: Any,
        *,
        dated_by: str,
        wrong: Mapping[str, str] | None = None,
    ) -> DataFrame:
        """Finished rows into gold, those that may still change into open. What is `wrong` by these
        conditions is counted."""
        kept = rows.persist(StorageLevel.DISK_ONLY)
        if wrong:
            counted = [F.count_if(F.expr(sql)).alias(what) for what, sql in wrong.items()]
            self.findings |= kept.agg(*counted).collect()[0].asDict()
        finished = self._write("gold", name, kept.where(~is_open), dated_by=dated_by)
        self._write("open", name, kept.where(is_open))
        kept.unpersist()
        return finished

    def _write(
        self, layer: str, name: str, rows: DataFrame, *, dated_by: str | None = None
    ) -> DataFrame:
        """A table that nobody asked for is left where its rows come from."""
        if not self._wants(name) and name != "wire":
            return rows
        with self._progress.step(f"{layer}.{name}"):
            return self._output.write(f"{layer}/{name}", rows, dated_by=dated_by)
