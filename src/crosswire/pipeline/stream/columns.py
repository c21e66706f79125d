"""Columns that rows of a batch have on their way to tables and to the state of the stream."""

from __future__ import annotations

from functools import reduce
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame

from crosswire.pipeline.decode.row_schema import ARROW

__all__ = ["DECODED", "KEPT", "PART", "STATES", "TARGET_TABLE", "union_of"]

KEPT: Final = "kept"
"""True for final rows: they are appended once, and no later batch touches them. False for
provisional rows: they are what the tables would have if the input ended here (a frame that is cut
off, a session without an end), are shown until the next batch, and are computed again by it."""

DECODED: Final = pa.schema([*ARROW, pa.field(KEPT, pa.bool_(), nullable=False)])
"""Rows of `decode.row_schema` with `kept`, and the states of connections."""

STATES: Final = "states"
"""Value of the column `table` for rows that are states of connections."""

PART: Final = "part"
"""Which of several kinds of rows in one file of state a row belongs to."""

TARGET_TABLE: Final = "target_table"
"""The table that a row is written to, where one write makes several: `gold.sessions`."""


def union_of(*parts: DataFrame | None) -> DataFrame:
    """The rows of all parts that are not None, columns by name; absent columns are null."""
    there = [part for part in parts if part is not None]
    return reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), there)
