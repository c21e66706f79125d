"""Columns that rows have on their way to their tables: whether they are final, where they go."""

from __future__ import annotations

from functools import reduce
from typing import Final

from pyspark.sql import DataFrame

__all__ = ["KEPT", "PART", "TARGET_TABLE", "Split", "union_of"]

KEPT: Final = "kept"
"""True for final rows: they are appended once, and no later batch touches them. False for
provisional rows: they are what the tables would have if the input ended here (a frame that is cut
off, a session without an end), are shown until the next batch, and are computed again by it. All
rows of a batch over the whole input are final."""

PART: Final = "part"
"""Which of several kinds of rows in one file of state a row belongs to."""

TARGET_TABLE: Final = "target_table"
"""The table that a row is written to, where one write makes several: `gold.sessions`."""

Split = tuple[DataFrame, DataFrame | None]
"""Final rows of a table, and the provisional ones if there are any."""


def union_of(*parts: DataFrame | None) -> DataFrame:
    """The rows of all parts that are not None, columns by name; absent columns are null."""
    there = [part for part in parts if part is not None]
    return reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), there)
