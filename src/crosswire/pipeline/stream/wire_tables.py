"""The tables that one batch of a stream makes of captured and tapped bytes.

Every table is written in two parts: final rows, and provisional ones that show how the tables look
if the input ends here (`columns.KEPT`). Tables that add up over all input (sessions, conversations,
traffic, topology) take the earlier part of it from the state that `carry_over` keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.capture.classify import PortMap
from crosswire.lake.schemas import OPEN, WIRE
from crosswire.pipeline.decode.row_schema import FRAMES, TABLE, VIOLATIONS
from crosswire.pipeline.sources.flow_rows import NODE
from crosswire.pipeline.sources.new_input import NewInput
from crosswire.pipeline.sources.pcap import segments_of
from crosswire.pipeline.stream.carry_over import (
    CALLS,
    COUNTS,
    EDGES,
    CarriedCalls,
    Counts,
    Edges,
    Split,
)
from crosswire.pipeline.stream.columns import KEPT, PART, STATES, TARGET_TABLE, union_of
from crosswire.pipeline.stream.commits import DAYS, StreamOutput, StreamStaging, StreamStart
from crosswire.pipeline.stream.decoder_state import FLOWS, decode_on, reassemble_on
from crosswire.pipeline.stream.ledger_tables import DecodedBatch, LedgerTables, ReadRows
from crosswire.pipeline.stream.watermarks import CompleteUpTo
from crosswire.pipeline.summary import LEDGER_TABLES
from crosswire.pipeline.tables import tallies as tally_table
from crosswire.pipeline.tables import topology as topology_table
from crosswire.pipeline.tables import traffic as traffic_table
from crosswire.pipeline.tables.accounting import accounting, check_sums, summed
from crosswire.pipeline.tables.conversations import conversations
from crosswire.pipeline.tables.directions import directions
from crosswire.pipeline.tables.frames import frames
from crosswire.pipeline.tables.messages import messages
from crosswire.pipeline.tables.sessions import by_session
from crosswire.pipeline.tables.violations import violations

__all__ = ["WireTables"]

_WRITERS: Final = 3
"""Tables that are written side by side."""


class WireTables:
    """Decodes the new bytes of a batch and writes their tables into its staging folder.

    After `run`: `reached` is the watermark, `accounts` the sums of gold.accounting by protocol
    (True: of final rows, False: of provisional ones), `replaced_days` the days that were written
    again, `unsettled_days` those of them with provisional rows.
    """

    def __init__(
        self,
        spark: SparkSession,
        output: StreamOutput,
        staging: StreamStaging,
        new_input: NewInput,
        read: ReadRows,
        *,
        begun: StreamStart,
        ledger_tables: LedgerTables | None,
    ) -> None:
        self._spark = spark
        self._output = output
        self._staging = staging
        self._new_input = new_input
        self._read = read
        self._begun = begun
        self._ledger_tables = ledger_tables
        self._last = output.last
        self.reached = CompleteUpTo() if self._last is None else self._last.reached
        self.accounts: dict[bool, dict[str, dict[str, int]]] = {True: {}, False: {}}
        self.replaced_days: dict[str, set[str]] = {}
        self.unsettled_days: list[str] = []

    def run(self) -> None:
        """Write all tables that are wanted. Raises BytesMissing if bytes don't add up."""
        seen = Observation()
        captured = F.col("node") == NODE
        # The watermark is observed while the rows are decoded: they are not read twice for it.
        wire = self._wire().observe(
            seen,
            F.max(F.when(captured, F.col("time"))).alias("captures_us"),
            F.max(F.when(~captured, F.col("time"))).alias("taps_us"),
        )
        tables, has_violations = self._decode(wire)
        self.reached = CompleteUpTo(
            max(self.reached.captures_us, seen.get["captures_us"] or 0),
            max(self.reached.taps_us, seen.get["taps_us"] or 0),
        )
        tables.directions = self._directions(tables.directions)
        # A small batch spends most of its time in the planning of queries, not in tasks: several
        # are planned at a time, the longest first.
        work: list[Callable[[], None]] = [lambda: self._counted(tables)]
        if self._begun.wants("conversations", "traffic"):
            work.append(lambda: self._conversations(tables))
        if self._begun.wants("topology"):
            work.append(lambda: self._topology(tables))
        if self._begun.wants("frames"):
            work.append(lambda: self._silver("frames", tables.frames, "time"))
        if self._begun.wants("messages"):
            work.append(lambda: self._silver("messages", tables.messages, "time"))
        # The first batch creates the table, even if it is empty.
        if self._begun.wants("violations") and (has_violations or not self._staging.batch):
            work.append(lambda: self._silver("violations", tables.violations, "time"))
        with ThreadPoolExecutor(_WRITERS) as pool:
            for done in [pool.submit(each) for each in work]:
                done.result()

    # Decoding.

    def _wire(self) -> DataFrame:
        """bronze.wire of the new input, with `kept`; written if it is wanted."""
        parts: list[DataFrame] = []
        states = self._output.state(FLOWS)
        # Flows that wait for more segments have provisional rows in every batch, also in one
        # without new captures.
        if self._new_input.captures or states is not None:
            parts.append(self._reassembled(states))
        if self._new_input.taps:
            taps = self._read(self._new_input.taps, WIRE)
            parts.append(taps.withColumn(KEPT, F.lit(True)))
        wire = union_of(*parts)
        chosen = self._begun.tables
        if "wire" in chosen or (not chosen and (self._new_input.captures or states is not None)):
            self._staging.write("wire", wire, tables=("bronze.wire",), dated_by="time")
        return wire

    def _reassembled(self, states: DataFrame | None) -> DataFrame:
        splits, since_us = list(self._new_input.captures), self._begun.since_us
        segments = segments_of(self._spark, splits, since_us=since_us)
        rows = reassemble_on(segments, states, PortMap(self._begun.ports), now=self.reached)
        # One pass gives bytes and states; written in two partitions, each is read alone.
        is_state = F.when(F.col("kind") == FLOWS, FLOWS).otherwise("wire")
        made = self._staging.work("captured", rows.withColumn(PART, is_state), split_by=(PART,))
        self._staging.save(FLOWS, "captured", made, part=f"{PART}={FLOWS}")
        return made.where(F.col(PART) == "wire").drop("flow", "state", PART)

    def _decode(self, wire: DataFrame) -> tuple[_DecodedTables, bool]:
        """The decoded rows, and whether there are violations among them."""
        payloads = self._begun.wants("messages", *LEDGER_TABLES)
        rows = decode_on(wire, self._output.state(STATES), payloads=payloads, now=self.reached)
        made = Observation()
        is_row = F.col(TABLE).isin(FRAMES, VIOLATIONS)
        rows = rows.observe(
            made,
            F.count_if(is_row & ~F.col(KEPT)).alias("provisional"),
            F.count_if(F.col(TABLE) == VIOLATIONS).alias("violations"),
        )
        decoded = self._staging.work("decoded", rows, split_by=(TABLE, KEPT))
        self._staging.save(STATES, "decoded", decoded, part=f"{TABLE}={STATES}")
        return _DecodedTables(decoded, made.get["provisional"] > 0), made.get["violations"] > 0

    def _directions(self, direction_rows: DataFrame) -> DataFrame:
        if self._begun.wants("directions"):
            self._silver("directions", direction_rows)
            return self._staging.read("directions", "silver.directions")
        return self._staging.work("directions", direction_rows, split_by=(KEPT,))

    # Tables.

    def _silver(self, name: str, rows: DataFrame, dated_by: str | None = None) -> None:
        self._staging.write(name, rows, tables=(f"silver.{name}",), dated_by=dated_by)

    def _counted(self, tables: _DecodedTables) -> None:
        """What needs the counts of connections: accounting, sessions, and the ledger's tables."""
        before = self._output.state(COUNTS)
        frame_rows, violation_rows = tables.split(frames), tables.split(violations)
        rows = Counts.carry(
            before, tables.directions, frame_rows, violation_rows, now_us=max(self.reached)
        )
        counts = Counts(self._staging.save_state(COUNTS, rows))
        self._account(tables.directions, counts, frame_rows, violation_rows)
        if self._begun.wants("sessions"):
            self._sessions(counts)
        if self._ledger_tables is not None:
            self._ledger_tables.run(
                DecodedBatch(tables.messages, frame_rows[0], tables.directions, counts)
            )

    def _account(
        self, direction_rows: DataFrame, counts: Counts, frame_rows: Split, violation_rows: Split
    ) -> None:
        """Write gold.accounting and check its sums. Raises BytesMissing."""
        tallies = counts.tallies
        if frame_rows[1] is not None and violation_rows[1] is not None:
            provisional = tally_table.tallies(frame_rows[1], violation_rows[1])
            tallies = tally_table.combined(union_of(tallies, provisional))
        parts = [
            accounting(direction_rows.where(F.col(KEPT) == kept), tallies).withColumn(
                KEPT, F.lit(kept)
            )
            for kept in (True, False)
        ]
        rows = union_of(*parts)
        if self._begun.wants("accounting"):
            self._staging.write("accounting", rows, tables=("gold.accounting",))
            rows = self._staging.read("accounting", "gold.accounting")
        for row in summed(rows, KEPT).collect():
            self.accounts[row[KEPT]][row.protocol or ""] = check_sums(row)

    def _sessions(self, counts: Counts) -> None:
        sessions = by_session(counts.connections, F.bool_and("final").alias(KEPT))
        table = F.when(F.col("ended") == OPEN, "open.sessions").otherwise("gold.sessions")
        self._staging.write(
            "sessions",
            sessions.withColumn(TARGET_TABLE, table),
            tables=("gold.sessions", "open.sessions"),
            dated_by="opened",
        )

    def _conversations(self, tables: _DecodedTables) -> None:
        """Write gold.conversations, and gold.traffic with their latencies.

        Conversations with both sides, and unanswered ones of connections that are over, are final.
        The others are paired again in each batch, together with the provisional messages.
        """
        message_rows, provisional = tables.split(messages)
        before = self._output.state(CALLS)
        rows = CarriedCalls.carry(before, tables.directions, message_rows)
        calls = CarriedCalls(self._staging.save_state(CALLS, rows))
        waiting = union_of(calls.waiting, provisional)
        rows = union_of(
            conversations(calls.settled, tables.directions).withColumn(KEPT, F.lit(True)),
            conversations(waiting, tables.directions).withColumn(KEPT, F.lit(False)),
        )
        table = F.when(F.col("is_open"), "open.conversations").otherwise("gold.conversations")
        if self._begun.wants("conversations"):
            self._staging.write(
                "conversations",
                rows.withColumn(TARGET_TABLE, table),
                tables=("gold.conversations", "open.conversations"),
                dated_by="asked",
            )
            rows = self._staging.read("conversations", "gold.conversations")
        if self._begun.wants("traffic"):
            self._traffic((message_rows, provisional), rows, tables.directions)

    def _traffic(
        self, message_rows: Split, conversation_rows: DataFrame, direction_rows: DataFrame
    ) -> None:
        """Write the days of gold.traffic that change.

        A row is a minute, to which later batches may add: rows can't be appended once, so whole
        days are replaced. Each day is written twice, with the provisional rows for readers and
        without them as state for the next batch. The two are the same if there are none.
        """
        fresh = traffic_table.partials(
            message_rows[0], conversation_rows.where(KEPT), direction_rows
        )
        provisional = None
        # Days with provisional rows change with every batch, even if it has no rows of them.
        before = set(self._last.unsettled_days) if self._last is not None else set()
        answered = conversation_rows.where(F.col("latency_us").isNotNull())
        if message_rows[1] is not None:
            not_final = ~F.col(KEPT)
            provisional = traffic_table.partials(
                message_rows[1], conversation_rows.where(not_final), direction_rows
            )
            self.unsettled_days = _days(message_rows[1], answered.where(not_final))
        fresh_days = _days(message_rows[0], answered.where(KEPT))
        days = sorted({*fresh_days, *self.unsettled_days, *before})
        state_table = f"{DAYS}.traffic"
        for table in ("gold.traffic", state_table):
            self.replaced_days[table] = set(days)
        if not days:
            return
        known = self._output.days(state_table, days)
        kept = union_of(None if known is None else traffic_table.unfolded(known), fresh)
        if provisional is None:
            both = F.explode(F.array(F.lit("gold.traffic"), F.lit(state_table)))
            rows = traffic_table.folded(kept).withColumn(TARGET_TABLE, both)
        else:
            shown = traffic_table.folded(union_of(kept, provisional))
            rows = union_of(
                shown.withColumn(TARGET_TABLE, F.lit("gold.traffic")),
                traffic_table.folded(kept).withColumn(TARGET_TABLE, F.lit(state_table)),
            )
        self._staging.write(
            "traffic",
            rows.withColumn(KEPT, F.lit(True)),
            tables=("gold.traffic", state_table),
            dated_by="minute",
            by_day=True,
        )

    def _topology(self, tables: _DecodedTables) -> None:
        """Write gold.topology: all of it each time, since any edge may have grown."""
        message_rows, provisional = tables.split(messages)
        before = self._output.state(EDGES)
        rows = Edges.carry(before, tables.directions, message_rows)
        carried = Edges(self._staging.save_state(EDGES, rows))
        edges = carried.of_connections
        if provisional is not None:
            new = topology_table.edges(provisional, tables.directions)
            edges = topology_table.combined(union_of(edges, new))
        edges = edges.withColumn("connections", F.lit(1).cast("bigint"))
        topology = topology_table.by_edge(union_of(carried.totals, edges))
        self._staging.write(
            "topology", topology.withColumn(KEPT, F.lit(False)), tables=("gold.topology",)
        )


def _days(message_rows: DataFrame | None, answered: DataFrame) -> list[str]:
    """The days of messages and of answered requests. One or two, unless a stream catches up."""
    times = union_of(
        message_rows and message_rows.select("time"), answered.select(F.col("asked").alias("time"))
    )
    day = F.to_date(F.timestamp_micros("time")).cast("string").alias("day")
    return sorted(row.day for row in times.select(day).distinct().collect())


class _DecodedTables:
    """The silver tables of a batch, with `kept`."""

    def __init__(self, decoded: DataFrame, has_provisional: bool) -> None:
        self._decoded = decoded
        self._has_provisional = has_provisional
        self.directions = self._with_kept(directions, always=True)
        """The directions of all connections that were not over before the batch, whether it has
        new rows of them or not."""

    def split(self, table: Callable[[DataFrame], DataFrame]) -> Split:
        """The final rows of a table, and the provisional ones: None spares queries without rows."""
        final = table(self._decoded.where(KEPT))
        return final, table(self._decoded.where(~F.col(KEPT))) if self._has_provisional else None

    def _with_kept(self, table: Callable[[DataFrame], DataFrame], *, always: bool) -> DataFrame:
        final, provisional = table(self._decoded.where(KEPT)), None
        if self._has_provisional or always:
            provisional = table(self._decoded.where(~F.col(KEPT))).withColumn(KEPT, F.lit(False))
        return union_of(final.withColumn(KEPT, F.lit(True)), provisional)

    @property
    def frames(self) -> DataFrame:
        """silver.frames."""
        return self._with_kept(frames, always=False)

    @property
    def violations(self) -> DataFrame:
        """silver.violations."""
        return self._with_kept(violations, always=False)

    @property
    def messages(self) -> DataFrame:
        """silver.messages."""
        return self._with_kept(messages, always=False)
