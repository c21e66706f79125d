"""bronze.wire: a run of bytes in one direction of a connection.

Computed with the columns of the lake's `wire/`, whether the bytes come from there or from capture
files. Rows of a connection are in the order of `seq`, both directions together.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from crosswire.lake.schemas import WIRE

__all__ = ["COLUMNS"]

COLUMNS: Final[StructType] = from_arrow_schema(WIRE)
