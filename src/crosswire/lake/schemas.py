"""Arrow schemas of the lake's tables, column by column.

    wire/date=2026-11-15/NODE-FIRST-LAST.parquet        raw bytes, both directions of a connection
    messages/date=…/NODE-FIRST-LAST.parquet             envelopes, as the hub accepted them
    ledger/date=…/NODE-FIRST-LAST.parquet               the steps of every message
    gaps/date=…/NODE-FIRST-LAST.parquet                 rows that the other tables will never have

FIRST and LAST are the first and last `seq` in the file: each table is numbered on its own, node by
node, without holes. `date` is in the path only. Times are µs since 1970, UTC.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from crosswire.wire.runs import BACKWARD, DATA, FIN, FORWARD, GAP, LOST, OPEN, RESET

__all__ = [
    "BACKWARD",
    "DATA",
    "FIN",
    "FORWARD",
    "GAP",
    "GAPS",
    "LEDGER",
    "LOST",
    "MESSAGES",
    "OPEN",
    "RESET",
    "SCHEMAS",
    "START_OF_CONNECTION",
    "WIRE",
]

START_OF_CONNECTION: Final = r"-(?P<start>[0-9a-f]{1,15})-[0-9a-f]+$"
"""In the name of a hub's connection: which start of the hub on its data it was accepted after. They
are counted up."""


def _column(name: str, kind: pa.DataType, *, optional: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=optional)


WIRE: Final = pa.schema(
    [
        _column("node", pa.string()),
        _column("seq", pa.int64()),
        _column("connection", pa.string()),
        _column("direction", pa.string()),
        _column("kind", pa.string()),
        _column("offset", pa.int64()),
        _column("length", pa.int64()),
        _column("time", pa.int64()),
        _column("data", pa.binary(), optional=True),
        _column("late", pa.bool_()),
        _column("protocol", pa.string(), optional=True),
        _column("listener", pa.string(), optional=True),
        _column("connector_address", pa.string()),
        _column("connector_port", pa.int32()),
        _column("acceptor_address", pa.string()),
        _column("acceptor_port", pa.int32()),
    ]
)
"""A run of bytes in one direction of a connection.

`offset` is its first byte's in that direction. Rows of a connection are in the order of `seq`, both
directions together. `late` is true where the connection's beginning was not recorded.
"""

MESSAGES: Final = pa.schema(
    [
        _column("node", pa.string()),
        _column("seq", pa.int64()),
        _column("id", pa.int64()),
        _column("time", pa.int64()),
        _column("protocol", pa.string()),
        _column("connection", pa.string()),
        _column("principal", pa.string()),
        _column("kind", pa.string()),
        _column("destination", pa.string()),
        _column("key", pa.string()),
        _column("correlation", pa.string()),
        _column("reply_to", pa.string()),
        _column("durable", pa.bool_()),
        _column("expires", pa.int64()),
        _column("properties", pa.string()),
        _column("native", pa.map_(pa.string(), pa.binary())),
        _column("content_type", pa.string()),
        _column("payload", pa.binary()),
        _column("crc", pa.int64()),
    ]
)
"""An envelope. `properties` is a JSON object, so that numbers stay numbers; `crc` is unsigned."""

LEDGER: Final = pa.schema(
    [
        _column("node", pa.string()),
        _column("seq", pa.int64()),
        _column("id", pa.int64()),
        _column("time", pa.int64()),
        _column("step", pa.string()),
        _column("destination", pa.string()),
        _column("protocol", pa.string()),
        _column("connection", pa.string()),
        _column("principal", pa.string()),
        _column("attempt", pa.int32()),
        _column("detail", pa.string()),
        _column("count", pa.int64()),
        _column("subscription", pa.string()),
    ]
)
"""A step of a message. `count` is above 1 where one row stands for many deliveries;
`subscription` is the named subscription that took the step, empty for all others."""

GAPS: Final = pa.schema(
    [
        _column("node", pa.string()),
        _column("seq", pa.int64()),
        _column("time", pa.int64()),
        _column("table", pa.string()),
        _column("first", pa.int64()),
        _column("last", pa.int64()),
        _column("reason", pa.string()),
    ]
)
"""Rows that `table` will never have, and the reason: `ledger` by seq, `messages` by id."""

SCHEMAS: Final = {"wire": WIRE, "messages": MESSAGES, "ledger": LEDGER, "gaps": GAPS}
