"""The driver of the registry for a batch of a stream: decodes the new bytes, takes what earlier
batches have handed on, and writes into the staging folder of the batch.

Every table is written in two parts: final rows, and provisional ones that show how the tables look
if the input ends here (`finality.KEPT`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.capture.classify import PortMap
from crosswire.capture.packet_counts import CLOCK_STEP, PacketCounts
from crosswire.lake.schemas import WIRE
from crosswire.pipeline.decode.row_schema import FRAMES, TABLE, VIOLATIONS
from crosswire.pipeline.sources.flow_rows import NODE
from crosswire.pipeline.sources.new_input import NewInput
from crosswire.pipeline.sources.pcap import count_packets, segments_of
from crosswire.pipeline.sources.rotation import rotations
from crosswire.pipeline.stream.columns import STATES
from crosswire.pipeline.stream.commits import DAYS, StreamOutput, StreamStaging, StreamStart
from crosswire.pipeline.stream.decoder_state import FLOWS, decode_on, reassemble_on
from crosswire.pipeline.stream.ledger_tables import LedgerTables, ReadRows
from crosswire.pipeline.stream.watermarks import CompleteUpTo
from crosswire.pipeline.summary import COMPARED_TABLES
from crosswire.pipeline.tables.accounting import packet_rows
from crosswire.pipeline.tables.carry_over import (
    CALLS,
    COUNTS,
    EDGES,
    PRINCIPALS,
    UNDECIDED,
    CarriedCalls,
    Counts,
    Edges,
)
from crosswire.pipeline.tables.finality import KEPT, PART, TARGET_TABLE, Split, union_of
from crosswire.pipeline.tables.principals import (
    MINUTE_US,
    is_decided,
    minute_of,
    principals,
)
from crosswire.pipeline.tables.principals import combined as combined_principals
from crosswire.pipeline.tables.registry import DayTotals, DecodedBatch, DecodedTables
from crosswire.pipeline.tables.traffic import TRAFFIC_COLUMNS

__all__ = ["StreamDriver"]

_WRITERS: Final = 3
"""Tables that are written side by side."""


class StreamDriver:
    """One batch. After its run: `reached` is the watermark, `packets` what became of all packets so
    far, `replaced_days` the days that were written again, `unsettled_days` those of them with
    provisional rows."""

    silver_first = False

    def __init__(
        self,
        spark: SparkSession,
        output: StreamOutput,
        staging: StreamStaging,
        new_input: NewInput,
        read: ReadRows,
        *,
        begun: StreamStart,
        ledger: LedgerTables | None,
    ) -> None:
        self._spark = spark
        self._output = output
        self._staging = staging
        self._new_input = new_input
        self._read = read
        self._begun = begun
        self._ledger = ledger
        self._last = output.last
        self.is_first = not staging.batch
        self.reached = CompleteUpTo() if self._last is None else self._last.reached
        self.replaced_days: dict[str, set[str]] = {}
        self.unsettled_days: list[str] = []
        self._principals: DataFrame | None = None
        self._after_step_us: int | None = None
        """The last time of captures whose clock was set back during this batch."""
        self.packets = PacketCounts()
        if self._last is not None:
            self.packets.merge(self._last.packets)

    # Decoding.

    def decode(self) -> DecodedTables:
        """Decode the new bytes. Afterwards `reached` includes them."""
        seen = Observation()
        captured = F.col("node") == NODE
        # The watermark is observed while the rows are decoded: they are not read twice for it.
        wire = self._wire().observe(
            seen,
            F.max(F.when(captured, F.col("time"))).alias("captures_us"),
            F.max(F.when(~captured, F.col("time"))).alias("taps_us"),
        )
        tables = self._decoded(wire)
        captures_us = max(self.reached.captures_us, seen.get["captures_us"] or 0)
        self.reached = CompleteUpTo(
            # After a step back the clock's new time counts: by the old one, all would be over.
            captures_us if self._after_step_us is None else self._after_step_us,
            max(self.reached.taps_us, seen.get["taps_us"] or 0),
        )
        return tables

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
            self._staging.write("wire", wire)
        return wire

    def _reassembled(self, states: DataFrame | None) -> DataFrame:
        splits, since_us = list(self._new_input.captures), self._begun.since_us
        known = {} if self._last is None else self._last.position.captures
        earlier = {
            path: read.layout.time_ns for path, read in known.items() if read.layout is not None
        }
        counts = count_packets(self._spark, splits, earlier)
        self.packets.merge(counts)
        written: list[int] | None = None
        if counts.packets[CLOCK_STEP]:
            written = rotations(list(dict.fromkeys(split.path for split in splits)))
            self._after_step_us = counts.last_ns // 1000
        segments = segments_of(self._spark, splits, since_us=since_us)
        ports = PortMap(self._begun.ports)
        rows = reassemble_on(segments, states, ports, now=self.reached, written=written)
        # One pass gives bytes and states; written in two partitions, each is read alone.
        is_state = F.when(F.col("kind") == FLOWS, FLOWS).otherwise("wire")
        made = self._staging.work("captured", rows.withColumn(PART, is_state), split_by=(PART,))
        self._staging.save(FLOWS, "captured", made, part=f"{PART}={FLOWS}")
        return made.where(F.col(PART) == "wire").drop("flow", "state", PART)

    def _decoded(self, wire: DataFrame) -> DecodedTables:
        payloads = self._begun.wants("messages", *COMPARED_TABLES)
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
        return DecodedTables(
            decoded,
            has_provisional=made.get["provisional"] > 0,
            has_violations=made.get["violations"] > 0,
        )

    # What the registry asks for.

    def wants(self, *names: str) -> bool:
        """Whether any of these tables is to be written."""
        return self._begun.wants(*names)

    def run(self, work: Sequence[Callable[[], None]]) -> None:
        """Side by side: a small batch spends most of its time in the planning of queries, not in
        tasks."""
        with ThreadPoolExecutor(_WRITERS) as pool:
            for done in [pool.submit(each) for each in work]:
                done.result()

    def step(self, _name: str) -> AbstractContextManager[None]:
        """A stream shows batches, not their steps."""
        return nullcontext()

    def write(self, name: str, rows: DataFrame) -> DataFrame:
        """Write rows into the staging folder."""
        self._staging.write(name, rows)
        return self._staging.read(name)

    def keep(self, name: str, rows: DataFrame) -> DataFrame:
        """Write rows that only this batch needs."""
        return self._staging.work(name, rows, split_by=(KEPT,))

    def counts(self, directions: DataFrame, frames: Split, violations: Split) -> Counts:
        """The counts of all connections that are not over, carried on."""
        rows = Counts.carry(
            self._output.state(COUNTS),
            directions,
            frames,
            violations,
            of_ledger=self._principals,
            now_us=max(self.reached),
        )
        return Counts.carried(self._staging.save_state(COUNTS, rows))

    def packet_rows(self) -> DataFrame | None:
        """All of them each time: the counts of all batches are one row a category."""
        if not self.packets.rows():
            return None
        return packet_rows(self._spark, NODE, self.packets).withColumn(KEPT, F.lit(False))

    def begin(self, directions: DataFrame | None) -> None:
        """Find the watermark of the hubs' tables, and the principals that are known now."""
        if self._ledger is None:
            return
        self._ledger.begin(directions)
        new = None if self._ledger.ledger is None else principals(self._ledger.ledger)
        before = self._output.state(PRINCIPALS)
        if before is not None and directions is not None:
            # Once the ledger was read beyond the row that names it, a connection that was tapped is
            # among the directions; if it is not, it is over or was not tapped.
            is_young = F.col("named_at") >= self._ledger.settled
            open_ones = directions.select("node", "connection").distinct()
            kept = before.where(~is_young).join(open_ones, ["node", "connection"], "left_semi")
            before = before.where(is_young).unionByName(kept)
        if before is not None or new is not None:
            rows = combined_principals(union_of(before, new))
            self._principals = self._staging.save_state(PRINCIPALS, rows)

    def principals(self) -> DataFrame | None:
        """Those of connections that are not over."""
        return self._principals

    def for_traffic(self, messages: DataFrame) -> Split:
        """Messages whose principal is decided; the others are carried on."""
        before = self._output.state(UNDECIDED)
        if before is None and (self._ledger is None or not self._new_input.position.taps):
            return messages, None
        rows = union_of(before, messages.select(*TRAFFIC_COLUMNS))
        seen = Observation()
        rows = self._decided(rows, minute_of(F.col("time"))).observe(
            seen, F.count_if(~F.col("decided")).alias("undecided")
        )
        made = self._staging.work("for_traffic", rows, split_by=("decided",))
        self._staging.save(UNDECIDED, "for_traffic", made, part="decided=false")
        decided = made.where("decided").drop("decided")
        if not seen.get["undecided"]:
            return decided, None
        return decided, made.where(~F.col("decided")).drop("decided")

    def _decided(self, rows: DataFrame, minute: Column) -> DataFrame:
        """Rows with `decided`: their principal is known, or will never be."""
        if self._ledger is None:
            return rows.withColumn("decided", F.lit(True))
        captured = F.col("node") == NODE
        settled = self._ledger.settled
        if self._principals is None:
            return rows.withColumn("decided", captured | (minute + MINUTE_US < settled))
        made = is_decided(rows, self._principals, minute, settled)
        return made.withColumn("decided", captured | F.col("decided"))

    def calls(self, directions: DataFrame, messages: DataFrame) -> CarriedCalls:
        """The new requests and responses, and those that waited."""
        minute = minute_of(F.col("time"))
        before = self._output.state(CALLS)
        rows = CarriedCalls.carry(
            before, directions, messages, lambda rows: self._decided(rows, minute)
        )
        return CarriedCalls.carried(self._staging.save_state(CALLS, rows))

    def edges(self, directions: DataFrame, messages: DataFrame) -> Edges:
        """The edges of connections that are not over, and the totals of the others."""
        rows = Edges.carry(self._output.state(EDGES), directions, messages)
        return Edges.carried(self._staging.save_state(EDGES, rows))

    def add_to_days(
        self, totals: DayTotals, fresh: DataFrame, provisional: DataFrame | None
    ) -> None:
        """Write the days of a table that change.

        A row is a sum to which later batches may add: rows can't be appended once, so whole days
        are replaced. Each day is written twice, with the provisional sums for readers and without
        them as state for the next batch. The two are the same if there are none.
        """
        table, state_table = f"gold.{totals.name}", f"{DAYS}.{totals.name}"
        fresh = self._staging.work(f"fresh_{totals.name}", fresh)
        # Days with provisional rows change with every batch, even if it has no rows of them.
        before = set(self._last.unsettled_days) if self._last is not None else set()
        if provisional is not None:
            provisional = self._staging.work(f"provisional_{totals.name}", provisional)
            self.unsettled_days = _days(provisional, totals.minute)
        days = sorted({*_days(fresh, totals.minute), *self.unsettled_days, *before})
        for each in (table, state_table):
            self.replaced_days[each] = set(days)
        if not days and not self.is_first:
            return
        known = self._output.days(state_table, days)
        kept = union_of(None if known is None else totals.unfold(known), fresh)
        if provisional is None:
            both = F.explode(F.array(F.lit(table), F.lit(state_table)))
            rows = totals.fold(kept).withColumn(TARGET_TABLE, both)
        else:
            shown = totals.fold(union_of(kept, provisional))
            rows = union_of(
                shown.withColumn(TARGET_TABLE, F.lit(table)),
                totals.fold(kept).withColumn(TARGET_TABLE, F.lit(state_table)),
            )
        rows = rows.withColumn(KEPT, F.lit(True))
        self._staging.write(totals.name, rows, more=(state_table,), by_day=True)

    def ledger_tables(self, wire: DecodedBatch | None) -> None:
        """Write the tables of the ledger, as far as the new rows decide."""
        if self._ledger is not None:
            self._ledger.run(wire)


def _days(partials: DataFrame, minute: str) -> list[str]:
    """The days of partial sums. One or two, unless a stream catches up."""
    day = F.to_date(F.timestamp_micros(minute)).cast("string").alias("day")
    return sorted(row.day for row in partials.select(day).distinct().collect())
