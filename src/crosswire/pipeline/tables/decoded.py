"""What decoding gives, before it is sorted into tables: rows of frames, violations, directions.

One crossing into Python makes all three. The columns are those of silver.frames, and behind them
what only a message has. A violation uses `status` and `fields` for its error and reason; a
direction's summary stands in `fields`.
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
"""What only silver.messages and what is made of it need, and is left out where nobody asks."""


def columns_of(*, payloads: bool) -> StructType:
    """What comes out of Python: without `payloads`, not what only messages have."""
    if payloads:
        return COLUMNS
    return StructType([field for field in COLUMNS.fields if field.name not in OF_MESSAGES])


def completed(rows: DataFrame) -> DataFrame:
    """With all columns; what did not come out of Python is null."""
    return rows.select(
        *(
            F.col(field.name)
            if field.name in rows.columns
            else F.lit(None).cast(field.dataType).alias(field.name)
            for field in COLUMNS.fields
        )
    )
