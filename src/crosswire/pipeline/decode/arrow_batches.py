"""Rows collected into Arrow batches of a bounded size."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

__all__ = ["BATCH_BYTES", "BATCH_ROWS", "Batches"]

BATCH_ROWS: Final = 32_768
BATCH_BYTES: Final = 8 * 1024 * 1024


class Batches:
    """Collects rows, tuples in the order of the schema, until they fill a batch."""

    def __init__(
        self, schema: pa.Schema, *, rows: int = BATCH_ROWS, size_bytes: int = BATCH_BYTES
    ) -> None:
        self._schema = schema
        self._most_rows = rows
        self._most_bytes = size_bytes
        self._bytes = 0
        self.rows: list[tuple[Any, ...]] = []

    def add(self, row: tuple[Any, ...], size_bytes: int = 0) -> None:
        """Add a row; `size_bytes` is the size of its large columns."""
        self.rows.append(row)
        self._bytes += size_bytes

    @property
    def full(self) -> bool:
        """Whether it is time to `take` what was added."""
        return len(self.rows) >= self._most_rows or self._bytes >= self._most_bytes

    def take(self) -> pa.RecordBatch:
        """The rows that were added since the last call."""
        if self.rows:
            columns: Any = zip(*self.rows, strict=True)
        else:
            columns = ((),) * len(self._schema)
        arrays = [
            pa.array(column, field.type)
            for column, field in zip(columns, self._schema, strict=True)
        ]
        self.rows = []
        self._bytes = 0
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)
