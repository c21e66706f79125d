"""A lake with files of the ledger, for tests."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from crosswire.lake.files import write
from crosswire.lake.schemas import LEDGER

__all__ = ["fill", "ledger"]


def ledger(first: int, last: int, *, time: int = 5, node: str = "n1") -> pa.Table:
    rows = [
        {
            "node": node,
            "seq": seq,
            "id": seq * 10,
            "time": time,
            "step": "accepted",
            "destination": "queue/q",
            "protocol": "emp",
            "connection": "c",
            "principal": "",
            "attempt": 0,
            "detail": "",
            "count": 1,
            "subscription": "",
        }
        for seq in range(first, last + 1)
    ]
    return pa.Table.from_pylist(rows, schema=LEDGER)


def fill(lake: Path, *ranges: tuple[int, int], time: int = 5, node: str = "n1") -> list[Path]:
    files = []
    for first, last in ranges:
        files += write(lake, "ledger", ledger(first, last, time=time, node=node))
    return files
