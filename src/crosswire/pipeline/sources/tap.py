"""The hub's tap: the lake's `wire/` files as bronze.wire, read by Spark or directly with Arrow.

Read directly, each of a few tasks reads all files in order and keeps its share of the connections:
no row has to be shuffled to another task, or sent from the JVM to Python and back. That costs
reading every file once per task, and is faster as long as tasks are few.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from sys import intern
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.errors import InvalidInput
from crosswire.lake.files import date_of, parse_name
from crosswire.lake.schemas import WIRE
from crosswire.pipeline.tables.wire import COLUMNS

__all__ = ["BATCH_BYTES", "from_tap", "grouped", "read_tap", "tap_files"]

BATCH_BYTES: Final = 8 * 1024 * 1024
_BATCH_ROWS: Final = 65_536
_DATED: Final = "date="
_FILE: Final = ".parquet"
_ANY_DATE: Final = "9999"
_REPEATED: Final = [
    "node",
    "connection",
    "direction",
    "kind",
    "protocol",
    "listener",
    "connector_address",
    "acceptor_address",
]
_SHARED_EVENLY: Final = 4096
"""The number of connections that are assigned by size; all others by hash."""


def from_tap(spark: SparkSession, folders: Iterable[str], *, since_us: int = 0) -> DataFrame:
    """bronze.wire of `wire/` folders of one lake or several, or single files of them, from
    `since_us` on, read by Spark."""
    wire: DataFrame | None = None
    for paths in grouped(folders):
        schema = type(COLUMNS)([*COLUMNS.fields]).add("date", "date")
        rows = spark.read.schema(schema).parquet(*paths)
        if since_us:
            # A file that is given on its own, outside a folder `date=…`, has no date. The date is
            # compared too, so that Spark skips whole folders.
            day = F.coalesce("date", F.lit(date_of(since_us)).cast("date"))
            rows = rows.where(day >= F.lit(date_of(since_us)).cast("date"))
            rows = rows.where(F.col("time") >= since_us)
        rows = rows.select(*COLUMNS.names)
        wire = rows if wire is None else wire.unionByName(rows)
    assert wire is not None
    return wire


def grouped(paths: Iterable[str]) -> list[list[str]]:
    """Paths that Spark can read at once: a folder alone, since its dates are columns; all single
    files together, since there may be very many."""
    ordered = list(paths)
    files = [path for path in ordered if path.endswith(_FILE)]
    return [*([path] for path in ordered if not path.endswith(_FILE)), *([files] if files else [])]


def tap_files(folders: Iterable[str], *, since_us: int = 0) -> list[str] | None:
    """The files of `wire/` folders, or single files of them, in the order of their rows, node by
    node. Only paths are kept, since there may be very many.

    None if that order is unknown: a folder is not in the local file system, or has files with other
    names than a hub gives. Raises InvalidInput if two files hold the same rows.
    """
    since = date_of(since_us) if since_us else ""
    found: list[tuple[str, int, int, str]] = []
    for folder in folders:
        if "://" in folder:
            return None
        alone = Path(folder).is_file()
        for path in [Path(folder)] if alone else Path(folder).glob(f"{_DATED}*/[!._]*"):
            date = _ANY_DATE if alone else path.parent.name.removeprefix(_DATED)
            file = parse_name("wire", date, path)
            if file is None:
                return None
            if date >= since:
                found.append((intern(file.node), file.first, file.last, str(path)))
    found.sort()
    for (node, _, last, before), (next_node, first, _, after) in pairwise(found):
        if node == next_node and last >= first:
            raise InvalidInput(f"{before} and {after} hold the same rows")
    return [path for *_, path in found]


def read_tap(
    paths: Iterable[str],
    *,
    since_us: int = 0,
    part: int = 0,
    parts: int = 1,
    batch_bytes: int = BATCH_BYTES,
) -> Iterator[pa.RecordBatch]:
    """Rows of files, in the order of the files, of the connections of one `part` of several.

    All parts must be given the same files: each computes on its own which connections are whose.
    Checksums are verified by the first part only, since all read the same bytes. Raises
    InvalidInput for a file that can't be read.
    """
    shares = _Shares(parts)
    waiting: list[pa.RecordBatch] = []
    size = rows = 0
    for path in paths:
        for batch in _batches_of(path, batch_bytes, verify=part == 0):
            mine = shares.are_of(part, batch)
            if since_us:
                mine &= batch.column("time").to_numpy() >= since_us
            if not mine.any():
                continue
            waiting.append(batch if mine.all() else batch.filter(pa.array(mine)))
            size += waiting[-1].column("data").nbytes
            rows += len(waiting[-1])
            if size >= batch_bytes or rows >= _BATCH_ROWS:
                yield _joined(waiting)
                waiting, size, rows = [], 0, 0
    if waiting:
        yield _joined(waiting)


def _batches_of(path: str, batch_bytes: int, *, verify: bool) -> Iterator[pa.RecordBatch]:
    try:
        with pq.ParquetFile(
            path, read_dictionary=_REPEATED, page_checksum_verification=verify
        ) as file:
            metadata = file.metadata
            held = sum(
                metadata.row_group(index).total_byte_size
                for index in range(metadata.num_row_groups)
            )
            rows = max(min(_BATCH_ROWS, metadata.num_rows * batch_bytes // max(held, 1)), 64)
            yield from file.iter_batches(rows, columns=WIRE.names, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise InvalidInput(f"can't read {path}: {error}") from error


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    whole = pa.Table.from_batches(batches).unify_dictionaries().combine_chunks()
    (batch,) = whole.to_batches()
    return batch


class _Shares:
    """Which part reads which connection: the same in every part that has seen the same rows.

    The first connections go to the part with the fewest bytes so far. Of very many connections it
    does not matter which goes where: the rest is distributed by hash, and no list of all is kept.
    Connections are identified by a hash of their names; two with the same hash go to the same part,
    which is no error.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._known = np.empty(0, np.uint64)
        self._part_of = np.empty(0, np.int64)
        self._bytes_of = np.zeros(parts)

    def are_of(self, part: int, batch: pa.RecordBatch) -> NDArray[np.bool_]:
        """Which rows of a batch belong to connections of a part."""
        # Imported here, since numba takes a second to load and the driver reads nothing.
        from crosswire.pipeline.decode.text import hashes

        if self._parts == 1:
            return np.ones(len(batch), np.bool_)
        column = batch.column("connection")
        codes = column.indices.to_numpy()
        names = hashes(column.dictionary)
        sizes = np.bincount(codes, batch.column("length").to_numpy(), len(names))
        used = np.zeros(len(names), np.bool_)
        used[codes] = True
        index, is_known = self._find(names)
        if len(self._known) < _SHARED_EVENLY and not is_known[used].all():
            new = used & ~is_known
            self._assign(names[new], sizes[new].astype(np.float64))
            index, is_known = self._find(names)
        parts = (names % np.uint64(self._parts)).astype(np.int64)
        parts[is_known] = self._part_of[index[is_known]]
        self._bytes_of += np.bincount(parts[used], sizes[used], self._parts)
        mine: NDArray[np.bool_] = (parts == part)[codes]
        return mine

    def _find(self, names: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        index = np.searchsorted(self._known, names)
        if not len(self._known):
            return index, np.zeros(len(names), np.bool_)
        index = np.minimum(index, len(self._known) - 1)
        return index, self._known[index] == names

    def _assign(self, names: NDArray[np.uint64], sizes: NDArray[np.float64]) -> None:
        """Assign connections to parts, the largest first: the parts then have about the same
        number of bytes."""
        names, first = np.unique(names, return_index=True)
        order = np.argsort(-sizes[first], kind="stable")[: _SHARED_EVENLY - len(self._known)]
        sizes_of, chosen = self._bytes_of.copy(), []
        for size in sizes[first][order].tolist():
            chosen.append(int(sizes_of.argmin()))
            sizes_of[chosen[-1]] += size
        known = np.append(self._known, names[order])
        indexes = np.argsort(known)
        self._part_of = np.append(self._part_of, chosen).astype(np.int64)[indexes]
        self._known = known[indexes]
