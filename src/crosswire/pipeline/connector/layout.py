"""The columns of a DataFrame that the sink writes, and their conversion to what the hub takes.

| column | type | |
|---|---|---|
| `destination`, or Kafka's `topic` | string | not needed with the option of that name |
| `value` | string or binary | the payload |
| `key` | string or binary | |
| `headers` | array of struct (key string, value binary or string) | properties |
| `correlation`, `reply_to`, `content_type` | string | |
| `expires` | timestamp | |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.types import StructType

from crosswire.envelope import parse_destination
from crosswire.errors import InvalidDestination, InvalidInput

__all__ = ["SinkLayout"]

_TEXT: Final = ("string",)
_BYTES: Final = ("string", "binary")
_HEADERS: Final = (
    "array<struct<key:string,value:binary>>",
    "array<struct<key:string,value:string>>",
)
_TYPES: Final = {
    "destination": _TEXT,
    "topic": _TEXT,
    "value": _BYTES,
    "key": _BYTES,
    "headers": _HEADERS,
    "correlation": _TEXT,
    "reply_to": _TEXT,
    "content_type": _TEXT,
    "expires": ("timestamp",),
}
_READ_ONLY: Final = frozenset(
    ("partition", "offset", "timestamp", "protocol", "kind", "connection", "principal", "attempt")
)
"""Columns of the source that the hub sets itself. They are left out, so that what was read from a
hub can be written without choosing columns."""


@dataclass(frozen=True)
class SinkLayout:
    """`columns` are the indexes of the columns that are sent, by the names that the hub knows."""

    columns: Mapping[str, int]
    destination: str
    content_type: str

    @classmethod
    def of(cls, schema: StructType, options: Mapping[str, str]) -> SinkLayout:
        """The layout for a DataFrame's schema and the sink's options. Raises InvalidInput for a
        column or an option that can't be written."""
        columns: dict[str, int] = {}
        for index, field in enumerate(schema.fields):
            if field.name in _READ_ONLY:
                continue
            allowed = _TYPES.get(field.name)
            if allowed is None:
                raise InvalidInput(
                    f"a message has no column {field.name}; it has {', '.join(_TYPES)}"
                )
            if field.dataType.simpleString() not in allowed:
                raise InvalidInput(
                    f"the column {field.name} is {field.dataType.simpleString()}, and can be"
                    f" {' or '.join(allowed)}"
                )
            columns[field.name] = index
        if "value" not in columns:
            raise InvalidInput("there is no column value: it is the message's payload")
        destination = _destination(options, columns)
        content_type = options.get("contentType", "")
        if content_type and "content_type" in columns:
            raise InvalidInput("contentType is an option or the column content_type, not both")
        return cls(columns, destination, content_type)

    def convert(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of a batch with the columns that the hub takes."""
        arrays = {name: batch.column(index) for name, index in self.columns.items()}
        if self.destination:
            arrays["destination"] = pa.repeat(self.destination, batch.num_rows)
        if self.content_type:
            arrays["content_type"] = pa.repeat(self.content_type, batch.num_rows)
        return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))


def _destination(options: Mapping[str, str], columns: dict[str, int]) -> str:
    """The destination of all rows, empty where a column has it. A column `topic` is renamed to
    `destination`."""
    named = options.get("destination") or options.get("topic") or ""
    topic = columns.pop("topic", None)
    if named:
        columns.pop("destination", None)
        try:
            if parse_destination(named).kind == "service":
                raise InvalidInput(
                    f"{named!r} is a service: messages go to queue/NAME or topic/NAME"
                )
        except InvalidDestination as error:
            raise InvalidInput(str(error)) from None
        return named
    if "destination" not in columns:
        if topic is None:
            raise InvalidInput(
                "there is no destination: give the option destination (queue/NAME or topic/NAME)"
                " or a column of that name"
            )
        columns["destination"] = topic
    return ""
