"""Reassembly and decoding that continue where an earlier batch stopped.

The saved state of a TCP flow or a connection goes into a task together with the new rows of it,
and the new state comes out with the decoded rows. Rows are final (`kept`) or provisional: the
latter show how the flow or connection looks if nothing follows, and the next batch replaces them.

The order within a flow or connection makes that possible:

    1. its state, with which the decoder is loaded
    2. new rows, in the order of the wire: all that is decoded of them is final
    3. provisional rows: the state is saved before the first of them, so they never get into it

State is saved only for what may continue. A flow or connection that is over has none, and what
its last batch wrote of it is final.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

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
from crosswire.pipeline.decode.row_schema import ARROW
from crosswire.pipeline.sources.flow_rows import NODE, FlowRows
from crosswire.pipeline.sources.pcap import segment_rows
from crosswire.pipeline.stream.columns import KEPT
from crosswire.pipeline.stream.watermarks import CompleteUpTo

__all__ = ["FLOWS", "STATES", "decode_on", "reassemble_on"]

STATES: Final = "states"
"""Value of the column `table` for the rows of `decode_on` that are states of connections."""
FLOWS: Final = "flows"
"""Value of the column `kind` for the rows of `reassemble_on` that are states of flows."""

_FIRST: Final = -1
"""Sorts a state before the rows that follow it: times and sequence numbers are never negative."""
_LINGER_US: Final = LINGER_NS // 1000 + MICROSECONDS
"""A second longer than the reassembly waits: the state of a connection must not be dropped while
its flow may still give bytes."""

_ON_WIRE: Final = pa.schema(
    [
        # The states of flows are rows of the same schema, with all columns of the wire empty.
        *(field.with_nullable(True) for field in WIRE),
        pa.field(KEPT, pa.bool_()),
        pa.field("flow", pa.binary()),
        pa.field("state", pa.binary()),
    ]
)
_NO_WIRE: Final = (None,) * len(WIRE)
_KIND: Final = WIRE.get_field_index("kind")
_DATA_LENGTH: Final = WIRE.get_field_index("length")
_DECODED: Final = pa.schema([*ARROW, pa.field(KEPT, pa.bool_(), nullable=False)])


# ------------------------------------------------------------------------------------ reassembly


def reassemble_on(
    segments: DataFrame, states: DataFrame | None, ports: PortMap, *, now: CompleteUpTo
) -> DataFrame:
    """bronze.wire with `kept`, and the new states of flows, from TCP segments and the states
    (flow, state) that the last batch saved.

    Flows that ended longer before the watermark `now` than a segment may be late are over.
    """
    rows = segments.withColumn("state", F.lit(None).cast(BinaryType()))
    if states is not None:
        known = states.select("flow", "state").withColumn("time_ns", F.lit(_FIRST).cast("bigint"))
        rows = rows.unionByName(known, allowMissingColumns=True)
    # Flows with a state and no new segments go through as well: they may be over by now.
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
                    collected.add((*row, True, None, None), row[_DATA_LENGTH])
                if collected.full:
                    yield collected.take()
        if flow is not None and current is not None:
            _leave(flow, current, now.captures_us * 1000, collected)
        yield collected.take()

    return arranged.mapInArrow(assemble, from_arrow_schema(_ON_WIRE))


def _leave(flow: FlowRows, key: bytes, now_ns: int, collected: Batches) -> None:
    """Save the state of a flow that is not over, then write the rows of its end."""
    over = flow.is_settled(now_ns)
    if not over:
        row: list[Any] = list(_NO_WIRE)
        row[_KIND] = FLOWS
        state = flow.dump()
        collected.add((*row, True, key, state), len(state))
    # Finishing turns what waits after a hole into a gap and bytes: true only if nothing follows.
    for made in flow.finish():
        collected.add((*made, over, None, None), made[_DATA_LENGTH])


# -------------------------------------------------------------------------------------- decoding


class _FlaggedRows(Batches):
    """Adds the column `kept` to every row: the value that the attribute has at the time."""

    def __init__(self, schema: pa.Schema) -> None:
        super().__init__(schema)
        self.kept = True

    def add(self, row: tuple[Any, ...], size_bytes: int = 0) -> None:
        """Add a row of ARROW; `kept` is appended."""
        super().add((*row, self.kept), size_bytes)


def decode_on(
    wire: DataFrame, states: DataFrame | None, *, payloads: bool, now: CompleteUpTo
) -> DataFrame:
    """Decoded rows (`decode.row_schema`) with `kept`, and the new states of connections, from
    bronze.wire with `kept` and the states (node, connection, payload) that the last batch saved.

    The summary of a direction is final when its connection is over; it then has no state.
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
        collected = _FlaggedRows(_DECODED)
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
    """One connection (name, node) in one batch: its saved state, its new and provisional rows."""

    def __init__(
        self, key: tuple[str, str], collected: _FlaggedRows, *, payloads: bool, now: CompleteUpTo
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
        """Load the state, or decode a row of bronze.wire; the order is the one explained above."""
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
        """Save the state unless the connection is over, then write what its end looks like."""
        assert self._rows is not None
        if not self._saved and not self._is_over:
            self._save()
        self._rows.finish()

    @property
    def _is_over(self) -> bool:
        """Nothing of this connection can follow.

        A hub's tap records nothing after both ends of a connection. In a capture, late copies of
        segments may follow, so there the connection is over only when the watermark has passed it.
        """
        assert self._rows is not None
        captured = self.key[1] == NODE
        if self._rows.is_closed and not captured:
            return True
        now_us = self._now.captures_us if captured else self._now.taps_us
        return self._rows.is_over and self._rows.last_time < now_us - _LINGER_US

    def _save(self) -> None:
        """Write the state; every row that follows is provisional."""
        self._saved = True
        if self._rows is not None:
            connection, node = self.key
            # Most open connections have no new bytes in a batch: their state is passed on as it
            # came, which saves encoding it again.
            state = self._state or self._rows.dump()
            nothing = (None,) * (len(ARROW) - 9)
            location = (0, 0, 0, self._rows.last_time)
            head = (STATES, node, connection, "", *location, *nothing)
            self._collected.add((*head, state), len(state))
        self._collected.kept = False
