"""Columns that decoded rows of a batch of a stream have."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from crosswire.pipeline.decode.row_schema import ARROW
from crosswire.pipeline.tables.finality import KEPT

__all__ = ["DECODED", "STATES"]

DECODED: Final = pa.schema([*ARROW, pa.field(KEPT, pa.bool_(), nullable=False)])
"""Rows of `decode.row_schema` with `kept`, and the states of connections."""

STATES: Final = "states"
"""Value of the column `table` for rows that are states of connections."""
