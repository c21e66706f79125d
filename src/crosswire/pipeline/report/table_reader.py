"""Reads the pipeline's tables in batches and adds them up in bounded memory, without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from crosswire.errors import InvalidInput
from crosswire.pipeline.visible_tables import VisibleTables

__all__ = ["Highest", "ReportTables", "Tally"]

_BATCH_ROWS: Final = 1 << 16
_MOST_KEYS: Final = 50_000

Order = Sequence[tuple[str, str]]


class ReportTables:
    """The tables in the output of the pipeline; `names` are those that exist, as `gold.traffic`.

    `root` is a folder, or a URL that Arrow can open. Raises InvalidInput if it has no tables.
    """

    def __init__(self, root: str) -> None:
        self._given = root
        try:
            self._tables = VisibleTables(root)
            self._files, self._root = self._tables.arrow()
            self.names = self._find()
        except (OSError, pa.ArrowException) as error:
            raise InvalidInput(f"can't read {root}: {_in_a_line(error)}") from error
        if not self.names:
            raise InvalidInput(self._nothing())

    def _find(self) -> tuple[str, ...]:
        if self._files.get_file_info(self._root).type == fs.FileType.NotFound:
            raise InvalidInput(f"{self._given} does not exist")
        return self._tables.names

    def _nothing(self) -> str:
        advice = "'crosswire pipeline run --input … --output DIR' makes them"
        for name in ("wire", "messages", "lake", "store"):
            if self._files.get_file_info(f"{self._root}/{name}").type == fs.FileType.Directory:
                return f"{self._given} is the lake of a hub; a report needs tables: {advice}"
        return f"there are no tables in {self._given}: {advice}"

    def has(self, name: str) -> bool:
        """Whether there is a table of this name; it may have no rows."""
        return name in self.names

    def columns(self, name: str) -> frozenset[str]:
        """The names of a table's columns."""
        return frozenset(self._dataset(name).schema.names)

    def count(self, name: str) -> int:
        """The number of rows of a table; 0 if it does not exist."""
        if not self.has(name):
            return 0
        with_errors = self._reading(name, iter([None]))
        return sum(self._dataset(name).count_rows() for _ in with_errors)

    def scan(self, name: str, *columns: str, where: Any = None) -> Iterator[pa.RecordBatch]:
        """Some columns, batch by batch; nothing if the table does not exist or has no rows. Times
        are numbers: µs since 1970.

        Raises InvalidInput for a column that the table lacks, and for damaged files.
        """
        if not self.has(name):
            return
        dataset = self._dataset(name)
        if not dataset.files:
            return
        for column in columns:
            if column not in dataset.schema.names:
                raise InvalidInput(
                    f"{name} in {self._given} has no column {column!r}: run the pipeline again"
                )
        scanner = dataset.scanner(
            columns=list(columns),
            filter=where,
            batch_size=_BATCH_ROWS,
            batch_readahead=2,
            fragment_readahead=2,
        )
        for batch in self._reading(name, scanner.to_batches()):
            if batch.num_rows:
                yield _with_numbers(batch)

    def _dataset(self, name: str) -> Any:
        (dataset,) = self._reading(name, (self._tables.dataset(name) for _ in (None,)))
        return dataset

    def _reading(self, name: str, pieces: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from pieces
        except (OSError, pa.ArrowException) as error:
            raise InvalidInput(f"can't read {name}: {_in_a_line(error)}") from error


def _with_numbers(batch: pa.RecordBatch) -> pa.RecordBatch:
    for index, field in enumerate(batch.schema):
        if pa.types.is_timestamp(field.type):
            micros = pc.cast(pc.cast(batch.column(index), pa.timestamp("us", "UTC")), pa.int64())
            batch = batch.set_column(index, field.name, micros)
    return batch


def _in_a_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


class Tally:
    """Sums (maxima: `most`, minima: `least`) per key, of at most `limit` keys: those with the
    highest first sum.

    `others` counts the keys that were dropped. A key that was dropped and comes again starts from
    0, so sums may then be a little too low, never too high.
    """

    def __init__(
        self,
        keys: Sequence[str],
        sums: Sequence[str],
        *,
        most: Sequence[str] = (),
        least: Sequence[str] = (),
        limit: int = _MOST_KEYS,
    ) -> None:
        self._keys = list(keys)
        self._columns = [*keys, *sums, *most, *least]
        self._how = [
            *((name, "sum") for name in sums),
            *((name, "max") for name in most),
            *((name, "min") for name in least),
        ]
        self._order: Order = [(sums[0], "descending"), *((key, "ascending") for key in keys)]
        self._limit = limit
        self._parts: list[pa.Table] = []
        self._pending = 0
        self.others = 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows that have the columns of the keys and sums."""
        self._parts.append(self._added_up(pa.Table.from_batches([rows])))
        self._pending += self._parts[-1].num_rows
        if self._pending > 2 * self._limit:
            self._merge()

    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """The `count` keys with the highest first sum, in that order (default: all)."""
        self._merge()
        if not self._parts:
            return []
        best = self._parts[0].sort_by(self._order)
        return best.slice(0, count).to_pylist()  # type: ignore[no-any-return]

    def __len__(self) -> int:
        self._merge()
        return self.others + (self._parts[0].num_rows if self._parts else 0)

    def _added_up(self, rows: pa.Table) -> pa.Table:
        grouped = rows.group_by(self._keys, use_threads=False).aggregate(self._how)
        names = [*self._keys, *(f"{column}_{how}" for column, how in self._how)]
        return grouped.select(names).rename_columns(self._columns)

    def _merge(self) -> None:
        if not self._parts:
            return
        merged = self._added_up(pa.concat_tables(self._parts, promote_options="permissive"))
        if merged.num_rows > self._limit:
            # Half of the limit: else the next few keys would make it sort again.
            kept = self._limit // 2
            self.others += merged.num_rows - kept
            merged = merged.sort_by(self._order).slice(0, kept)
        self._parts = [merged]
        self._pending = merged.num_rows


class Highest:
    """The first `count` rows in an order."""

    def __init__(self, count: int, *order: tuple[str, str]) -> None:
        self._count = count
        self._order = list(order)
        self._best: pa.Table | None = None

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows; all must have the same columns."""
        table = pa.Table.from_batches([rows])
        both = table if self._best is None else pa.concat_tables([self._best, table])
        # Only the best rows so far are kept, so memory does not grow with the table.
        chosen = pc.select_k_unstable(both, self._count, self._order)
        self._best = both.take(chosen)

    def rows(self) -> list[dict[str, Any]]:
        """The rows, in order."""
        return [] if self._best is None else self._best.to_pylist()
