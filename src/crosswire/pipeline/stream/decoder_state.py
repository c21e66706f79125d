"""Reassembly and decoding that continue where an earlier batch stopped.

The saved state of a TCP flow or a connection goes into a task together with the new rows of it,
and the new state comes out with the decoded rows. Rows are final (`kept`) or provisional: the
latter show how the flow or connection looks if nothing follows, and the next batch replaces them.

The order within a flow or connection makes that possible:

    1. its state, with which the decoder is loaded
    2. new rows, in the order of the wire: all that is decoded of them is final
    3. provisional rows: the state is saved before the first of them, so they never get into it

State is saved only for what may continue. A flow or connection that is over has none, and what
its last batch wrote of it is final. `stream_decoder` does this for connections, many at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BinaryType

from crosswire.capture.classify import PortMap
from crosswire.lake.schemas import LOST, WIRE
from crosswire.pipeline.decode.arrow_batches import Batches
from crosswire.pipeline.decode.decoded_connection import WIRE_COLUMNS
from crosswire.pipeline.sources.flow_rows import FlowRows
from crosswire.pipeline.sources.pcap import STEADY, segment_rows, steady
from crosswire.pipeline.stream.columns import DECODED
from crosswire.pipeline.stream.watermarks import CompleteUpTo
from crosswire.pipeline.tables.finality import KEPT

__all__ = ["FLOWS", "decode_on", "reassemble_on"]

FLOWS: Final = "flows"
"""Value of the column `kind` for the rows of `reassemble_on` that are states of flows."""

_FIRST: Final = -1
"""Sorts a state before the rows that follow it: times and sequence numbers are never negative."""
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


# ------------------------------------------------------------------------------------ reassembly


def reassemble_on(
    segments: DataFrame,
    states: DataFrame | None,
    ports: PortMap,
    *,
    now: CompleteUpTo,
    written: Sequence[int] | None = None,
) -> DataFrame:
    """bronze.wire with `kept`, and the new states of flows, from TCP segments and the states
    (flow, state) that the last batch saved.

    Flows that ended longer before the watermark `now` than a segment may be late are over.
    `written` is for captures during which the clock was set back: see `pcap.steady`.
    """
    names = [*segments.columns, "state"]
    rows = segments.repartition("flow") if states is None else segments
    rows = rows.withColumn(STEADY, F.col("time_ns")) if written is None else steady(rows, written)
    rows = rows.withColumn("state", F.lit(None).cast(BinaryType()))
    if states is not None:
        first = F.lit(_FIRST).cast("bigint")
        known = states.select("flow", "state", first.alias("time_ns"), first.alias(STEADY))
        # Flows with a state and no new segments go through as well: they may be over by now.
        rows = rows.unionByName(known, allowMissingColumns=True).repartition("flow")
    arranged = rows.sortWithinPartitions("flow", STEADY, "file", "record").select(*names)

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
        # Only workers decode: the driver, which imports this module too, does without the kernels.
        from crosswire.pipeline.stream.stream_decoder import StreamDecoder

        decoder = StreamDecoder(payloads=payloads, now=now)
        for batch in batches:
            yield from decoder.add(batch)
        yield from decoder.finish()

    return arranged.mapInArrow(run, from_arrow_schema(DECODED))
