"""What a real hub recorded in a moment, as if it had taken minutes: so not all of it is new."""

from __future__ import annotations

import asyncio
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests.pipeline.test_hub_lake import live

MINUTE: Final = 60_000_000
DURATION: Final = 6 * MINUTE
START: Final = 1_763_251_020_000_000
"""Three minutes before midnight."""
NEWS: Final = "topic/of-EMP"


@cache
def recorded() -> dict[str, pa.Table]:
    """wire, ledger and messages of traffic of all kinds."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(live(Path(folder) / "data"))
        found = {
            name: pa.concat_tables(
                pq.ParquetFile(file).read()
                for file in (Path(folder) / "data" / "lake" / name).rglob("*.parquet")
            ).sort_by("seq")
            for name in ("wire", "ledger", "messages")
        }
    start = min(pc.min(rows["time"]).as_py() for rows in found.values())
    end = max(pc.max(rows["time"]).as_py() for rows in found.values())
    made = {name: _slowly(rows, start, end) for name, rows in found.items()}
    return {**made, "ledger": _with_late_reader(_signed_in(made["ledger"]))}


@cache
def holed() -> dict[str, pa.Table]:
    """Some of what the hub should have noted is missing; rows are numbered without holes, as a hub
    does."""
    random = Random(7)
    made = dict(recorded())
    for name in ("ledger", "messages"):
        news = pc.equal(made[name]["destination"], NEWS).to_pylist()
        made[name] = made[name].filter(pa.array(each or random.random() < 0.9 for each in news))
    return {name: numbered(rows) for name, rows in made.items()}


def numbered(rows: pa.Table) -> pa.Table:
    """With `seq` from 1 on."""
    index = rows.schema.get_field_index("seq")
    numbers = pa.array(range(1, len(rows) + 1), pa.int64())
    return rows.set_column(index, rows.schema.field(index), numbers)


def until(rows: pa.Table, time_us: int) -> int:
    """How many rows there are until so long after the start."""
    return int(pc.sum(pc.less_equal(rows["time"], START + time_us)).as_py() or 0)


def _slowly(rows: pa.Table, start: int, end: int) -> pa.Table:
    index = rows.schema.get_field_index("time")
    share = pc.divide(pc.cast(pc.subtract(rows["time"], start), pa.float64()), end - start)
    time = pc.add(pc.cast(pc.multiply(share, DURATION), pa.int64(), safe=False), START)
    return rows.set_column(index, rows.schema.field(index), time)


def _signed_in(ledger: pa.Table) -> pa.Table:
    """As if the hub had users, and each connection were another one's."""
    index = ledger.schema.get_field_index("principal")
    names = pc.if_else(
        pc.equal(ledger["connection"], ""),
        "",
        pc.binary_join_element_wise("user of", ledger["connection"], " "),
    )
    return ledger.set_column(index, ledger.schema.field(index), names)


def _with_late_reader(ledger: pa.Table) -> pa.Table:
    """At the end, a durable subscription is given the first message of a topic."""
    rows = ledger.to_pylist()
    first = next(row for row in rows if row["destination"] == NEWS)
    late = {
        "seq": rows[-1]["seq"] + 1,
        "time": START + DURATION,
        "step": "delivered",
        "connection": "late",
        "attempt": 1,
    }
    return pa.Table.from_pylist([*rows, first | late], schema=ledger.schema)
