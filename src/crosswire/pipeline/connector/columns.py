"""The columns of the source `crosswire`, Kafka's first, and how each is made of the hub's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["COLUMNS", "HEADERS", "needed", "schema", "to_spark"]

HEADERS: Final = "headers"
_ATTEMPTS: Final = "dead-attempts"
_PAIR: Final = pa.struct([("key", pa.string()), ("value", pa.binary())])


class _ColumnSource(NamedTuple):
    """A column's type in Spark, the hub's column that it is made of, and the function that makes it
    of that column and the hub's node."""

    kind: str
    source: str
    make: Callable[[pa.Array, str], pa.Array]


def schema(names: Sequence[str]) -> str:
    """Spark's schema of these columns, as DDL."""
    return ", ".join(f"{name} {COLUMNS[name].kind}" for name in names)


def needed(names: Sequence[str]) -> list[str]:
    """The hub's columns that these are made of: only they are requested from it."""
    return list(dict.fromkeys(COLUMNS[name].source for name in names))


def to_spark(batch: pa.RecordBatch, names: Sequence[str], node: str) -> pa.RecordBatch:
    """A batch of the hub's columns as Spark gets it."""
    arrays = [COLUMNS[name].make(batch.column(COLUMNS[name].source), node) for name in names]
    return pa.RecordBatch.from_arrays(arrays, names=list(names))


def _same(column: pa.Array, _node: str) -> pa.Array:
    return column


def _filled(column: pa.Array, _node: str) -> pa.Array:
    """Null where a text is empty: the hub has no null."""
    return pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)


def _key(column: pa.Array, node: str) -> pa.Array:
    return _filled(column, node).cast(pa.binary())


def _node_of(column: pa.Array, node: str) -> pa.Array:
    return pa.repeat(pa.scalar(node, pa.string()), len(column))


def _timestamp(column: pa.Array, _node: str) -> pa.Array:
    return column.cast(pa.timestamp("us", "UTC"))


def _headers(column: pa.Array, _node: str) -> pa.Array:
    return _for_each_text(column, _pairs, pa.list_(_PAIR))


def _for_each_text(column: pa.Array, make: Callable[[str], Any], kind: pa.DataType) -> pa.Array:
    """A column made of one of texts. Each different text is looked at once: many messages have the
    same properties."""
    coded = column.dictionary_encode()
    made = pa.array([make(each) for each in coded.dictionary.to_pylist()], kind)
    return made.take(coded.indices)


def _pairs(properties: str) -> list[dict[str, Any]] | None:
    """Headers as in Kafka: null where there are none; numbers and booleans as JSON text."""
    if properties == "{}":
        return None
    return [
        {"key": key, "value": (value if isinstance(value, str) else _text(value)).encode()}
        for key, value in msgspec.json.decode(properties).items()
    ]


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _attempt(column: pa.Array, _node: str) -> pa.Array:
    return _for_each_text(column, _attempts, pa.int32())


def _attempts(properties: str) -> int:
    """How often a dead letter was delivered; 0 for other messages. Most have no such property, and
    a search in the text is cheaper than parsing JSON."""
    if _ATTEMPTS not in properties:
        return 0
    value = msgspec.json.decode(properties).get(_ATTEMPTS)
    return value if isinstance(value, int) and 0 <= value < 1 << 31 else 0


COLUMNS: Final[dict[str, _ColumnSource]] = {
    "key": _ColumnSource("binary", "key", _key),
    "value": _ColumnSource("binary", "payload", _same),
    "topic": _ColumnSource("string", "destination", _same),
    "partition": _ColumnSource("string", "id", _node_of),
    "offset": _ColumnSource("bigint", "id", _same),
    "timestamp": _ColumnSource("timestamp", "time", _timestamp),
    HEADERS: _ColumnSource("array<struct<key: string, value: binary>>", "properties", _headers),
    "protocol": _ColumnSource("string", "protocol", _filled),
    "kind": _ColumnSource("string", "kind", _same),
    "correlation": _ColumnSource("string", "correlation", _filled),
    "content_type": _ColumnSource("string", "content_type", _same),
    "connection": _ColumnSource("string", "connection", _filled),
    "principal": _ColumnSource("string", "principal", _filled),
    "attempt": _ColumnSource("int", "properties", _attempt),
}
