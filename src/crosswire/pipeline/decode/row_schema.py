"""The schema of decoded rows: frames, violations and directions, before they are split into tables.

One crossing from Spark into Python makes all three, because the crossing costs more than the
decoding. The columns are those of silver.frames, followed by those that only messages have. A
violation has its error and reason in `status` and `fields`, a direction its summary in `fields`.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

__all__ = [
    "ARROW",
    "COLUMNS",
    "DIRECTIONS",
    "FRAMES",
    "FRAME_COLUMNS",
    "OF_MESSAGES",
    "TABLE",
    "VIOLATIONS",
    "columns_of",
    "completed",
]

TABLE: Final = "table"
FRAMES: Final = "frames"
VIOLATIONS: Final = "violations"
DIRECTIONS: Final = "directions"

_FRAME: Final = [
    pa.field("node", pa.string(), nullable=False),
    pa.field("connection", pa.string(), nullable=False),
    pa.field("direction", pa.string(), nullable=False),
    pa.field("layer", pa.int32(), nullable=False),
    pa.field("offset", pa.int64(), nullable=False),
    pa.field("length", pa.int64(), nullable=False),
    pa.field("time", pa.int64(), nullable=False),
    pa.field("protocol", pa.string()),
    pa.field("frame", pa.string()),
    pa.field("identifier", pa.string()),
    pa.field("kind", pa.string()),
    pa.field("destination", pa.string()),
    pa.field("status", pa.string()),
    pa.field("sequence", pa.int64()),
    pa.field("payload_offset", pa.int64()),
    pa.field("payload_length", pa.int64()),
    pa.field("fields", pa.string()),
]
FRAME_COLUMNS: Final = tuple(field.name for field in _FRAME)

ARROW: Final = pa.schema(
    [
        pa.field(TABLE, pa.string(), nullable=False),
        *_FRAME,
        pa.field("begun_at", pa.int64()),
        pa.field("content_type", pa.string()),
        pa.field("properties", pa.string()),
        pa.field("reply_to", pa.string()),
        pa.field("message_id", pa.int64()),
        pa.field("payload", pa.binary()),
    ]
)
COLUMNS: Final[StructType] = from_arrow_schema(ARROW)
OF_MESSAGES: Final = ("content_type", "properties", "reply_to", "message_id", "payload")
"""Columns that only silver.messages and its dependents need: left out if those are not wanted."""


def columns_of(*, payloads: bool) -> StructType:
    """The columns that come out of Python; without `payloads`, OF_MESSAGES are left out."""
    if payloads:
        return COLUMNS
    return StructType([field for field in COLUMNS.fields if field.name not in OF_MESSAGES])


def completed(rows: DataFrame) -> DataFrame:
    """Rows with all columns; those that did not come out of Python are null."""
    return rows.select(
        *(
            F.col(field.name)
            if field.name in rows.columns
            else F.lit(None).cast(field.dataType).alias(field.name)
            for field in COLUMNS.fields
        )
    )
