"""How the sink divides rows into requests."""

from __future__ import annotations

import pyarrow as pa

from crosswire.hub.ingest.staging import PART_NAMES
from crosswire.pipeline.connector import sink

ROWS = 25_000


def test_a_request_has_as_many_destinations_as_the_hub_takes() -> None:
    names = [f"queue/{number}" for number in range(ROWS)]
    batch = pa.record_batch({"destination": names, "value": ["x"] * ROWS})
    same = pa.record_batch({"destination": ["queue/q"] * ROWS, "value": ["x"] * ROWS})
    parts = list(sink._parts(iter([batch, same])))
    sent = [each for part in parts for batch in part for each in batch["destination"].to_pylist()]
    assert sent == names + ["queue/q"] * ROWS
    for part in parts:
        assert len({each for batch in part for each in batch["destination"].to_pylist()}) <= (
            PART_NAMES
        )
    assert len(parts) == 4
