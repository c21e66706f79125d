"""Reassembly and decoding that go on where an earlier batch stopped.

What they know of a flow or a connection goes in beside its new rows and comes out with what was
read. Rows that are `kept` are there for good; the others say what it looks like if nothing more
comes, and are made anew the next time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BinaryType

from crosswire.capture.classify import PortMap
from crosswire.capture.reassembly import LINGER_NS
from crosswire.envelope import MICROSECONDS
from crosswire.lake.schemas import LOST, WIRE
from crosswire.pipeline.decode.arrow_batches import Batches
from crosswire.pipeline.decode.connection_rows import WIRE_COLUMNS, ConnectionRows
from crosswire.pipeline.sources.flow_rows import NODE, FlowRows
from crosswire.pipeline.sources.pcap import segment_rows
from crosswire.pipeline.tables.decoded import ARROW

__all__ = ["FLOWS", "KEPT", "STATES", "CompleteUpTo", "HubTimes", "decode_on", "reassemble_on"]

KEPT: Final = "kept"
STATES: Final = "states"
"""Stands in the column `table` of what `decode_on` gives for connections that may go on."""
FLOWS: Final = "flows"
"""Stands in the column `kind` of what `reassemble_on` gives for flows that may go on."""

_FIRST: Final = -1
"""Sorts a state before all that comes after it."""
_LINGER_US: Final = LINGER_NS // 1000 + MICROSECONDS
"""A little longer than the reassembly: a connection is never given up before its flow is."""

_ON_WIRE: Final = pa.schema(
    [
        *(field.with_nullable(True) for field in WIRE),
        pa.field(KEPT, pa.bool_()),
        pa.field("flow", pa.binary()),
        pa.field("state", pa.binary()),
    ]
)
_NO_WIRE: Final = (None,) * len(WIRE)


class CompleteUpTo(NamedTuple):
    """Up to which time all that came before has told, µs."""

    captures_us: int = 0
    taps_us: int = 0


class HubTimes(NamedTuple):
    """The times of the newest rows of a hub that were read, µs; 0 where there are none."""

    taps: int = 0
    ledgers: int = 0
    messages: int = 0


_KIND: Final = WIRE.get_field_index("kind")
_DECODED: Final = pa.schema([*ARROW, pa.field(KEPT, pa.bool_(), nullable=False)])


# ------------------------------------------------------------------------------------ reassembly


def reassemble_on(
    segments: DataFrame, states: DataFrame | None, ports: PortMap, *, now: CompleteUpTo
) -> DataFrame:
    """Segments, and the states (flow, state) of flows → bronze.wire with `kept`, and new states.

    What ended long before `now` is over.
    """
    rows = segments.withColumn("state", F.lit(None).cast(BinaryType()))
    if states is not None:
        known = states.select("flow", "state").withColumn("time_ns", F.lit(_FIRST).cast("bigint"))
        rows = rows.unionByName(known, allowMissingColumns=True)
    arranged = rows.repartition("flow").sortWithinPartitions("flow", "time_ns", "file", "record")

    def assemble(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        collected = Batches(_ON_WIRE)
        current: bytes | None = None
        flow: FlowRows | None = None
        for batch in batches:
            saved = batch.column("state").to_pylist()
            for state, (key, segment) in zip(saved, segment_rows(batch), strict=True):
                if key != current:
                    if flow is not None and current is not None:
                        _leave(flow, current, now.captures_us * 1000, collected)
                    current, flow = key, FlowRows(key, ports)
                assert flow is not None
                if state is not None:
                    flow.load(state)
                    continue
                for row in flow.add(segment):
                    collected.add((*row, True, None, None), row[6])
                if collected.full:
                    yield collected.take()
        if flow is not None and current is not None:
            _leave(flow, current, now.captures_us * 1000, collected)
        yield collected.take()

    return arranged.mapInArrow(assemble, from_arrow_schema(_ON_WIRE))


def _leave(flow: FlowRows, key: bytes, now_ns: int, collected: Batches) -> None:
    over = flow.is_settled(now_ns)
    if not over:
        row: list[Any] = list(_NO_WIRE)
        row[_KIND] = FLOWS
        state = flow.dump()
        collected.add((*row, True, key, state), len(state))
    for made in flow.finish():
        collected.add((*made, over, None, None), made[6])


# -------------------------------------------------------------------------------------- decoding


class _FinalRowFlags(Batches):
    """Says of each row whether it is there for good."""

    def __init__(self, schema: pa.Schema) -> None:
        super().__init__(schema)
        self.kept = True

    def add(self, row: tuple[Any, ...], size_bytes: int = 0) -> None:
        super().add((*row, self.kept), size_bytes)


def decode_on(
    wire: DataFrame, states: DataFrame | None, *, payloads: bool, now: CompleteUpTo
) -> DataFrame:
    """bronze.wire with `kept`, and the states (node, connection, payload) of connections → rows of
    `tables.decoded` with `kept`, and new states.

    The summary of a direction is `kept` when its connection is over; there is no state then.
    """
    rows = wire.where(F.col("kind") != LOST).select(
        *WIRE_COLUMNS, KEPT, F.lit(None).cast(BinaryType()).alias("state")
    )
    if states is not None:
        known = states.select(
            "node",
            "connection",
            F.lit(_FIRST).cast("bigint").alias("seq"),
            F.col("payload").alias("state"),
        )
        rows = rows.unionByName(known, allowMissingColumns=True)
    arranged = rows.repartition("node", "connection").sortWithinPartitions(
        "node", "connection", "seq"
    )

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        collected = _FinalRowFlags(_DECODED)
        current: _ConnectionBatch | None = None
        for batch in batches:
            columns = [batch.column(name).to_pylist() for name in (*WIRE_COLUMNS, KEPT, "state")]
            for *row, kept, state in zip(*columns, strict=True):
                key = (row[1], row[0])
                if current is None or key != current.key:
                    if current is not None:
                        current.leave()
                    current = _ConnectionBatch(key, collected, payloads=payloads, now=now)
                current.add(tuple(row), kept, state)
                if collected.full:
                    yield collected.take()
        if current is not None:
            current.leave()
        yield collected.take()

    return arranged.mapInArrow(run, from_arrow_schema(_DECODED))


class _ConnectionBatch:
    """One connection in one batch: what is known of it, what is new, what may be taken back."""

    def __init__(
        self, key: tuple[str, str], collected: _FinalRowFlags, *, payloads: bool, now: CompleteUpTo
    ) -> None:
        self.key = key
        self._collected = collected
        self._payloads = payloads
        self._now = now
        self._rows: ConnectionRows | None = None
        self._state: bytes | None = None
        self._saved = False
        collected.kept = True

    def add(self, row: tuple[Any, ...], kept: bool, state: bytes | None) -> None:
        if state is not None:
            self._state = state
            self._rows = ConnectionRows.load(
                self.key, state, self._collected, payloads=self._payloads
            )
            return
        if not kept and not self._saved:
            self._save()
        if self._rows is None:
            self._rows = ConnectionRows(row, self._collected, payloads=self._payloads)
        self._state = None
        self._rows.add(row)

    def leave(self) -> None:
        assert self._rows is not None
        if not self._saved and not self._is_over:
            self._save()
        self._rows.finish()

    @property
    def _is_over(self) -> bool:
        """The hub records nothing of a connection behind both its ends; a capture may."""
        assert self._rows is not None
        captured = self.key[1] == NODE
        if self._rows.is_closed and not captured:
            return True
        now_us = self._now.captures_us if captured else self._now.taps_us
        return self._rows.is_over and self._rows.last_time < now_us - _LINGER_US

    def _save(self) -> None:
        """From here on all rows may be taken back."""
        self._saved = True
        if self._rows is not None:
            connection, node = self.key
            # Most connections say nothing in a batch.
            state = self._state or self._rows.dump()
            nothing = (None,) * (len(ARROW) - 9)
            location = (0, 0, 0, self._rows.last_time)
            head = (STATES, node, connection, "", *location, *nothing)
            self._collected.add((*head, state), len(state))
        self._collected.kept = False
