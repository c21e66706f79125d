"""The tables of a lake at a glance: a summary of each, and removing files by retention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from crosswire.errors import LakeError
from crosswire.lake.files import LakeFile, date_of, find, find_all
from crosswire.lake.schemas import SCHEMAS

__all__ = ["TableSummary", "expire", "files_by_node", "require_lake", "summarize"]


class TableSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A table of a node. Times are µs since 1970, 0 where no file can be read."""

    table: str
    node: str
    files: int
    rows: int
    bytes: int
    first_seq: int
    last_seq: int
    first_time: int
    last_time: int


def summarize(lake: Path) -> list[TableSummary]:
    """A summary of each table of each node, from file names and footers alone.

    Files that can't be read count with their size only. Raises LakeError if there is no lake.
    """
    require_lake(lake)
    return [_summarize(files) for files in files_by_node(lake)]


def files_by_node(lake: Path, tables: Sequence[str] = tuple(SCHEMAS)) -> Iterator[list[LakeFile]]:
    """The files of each table and node, in the order of their seq."""
    groups: dict[tuple[str, str], list[LakeFile]] = {}
    for file in find(lake, tables):
        groups.setdefault((file.table, file.node), []).append(file)
    for _, files in sorted(groups.items()):
        yield sorted(files, key=lambda file: (file.first, file.last))


def require_lake(lake: Path) -> None:
    """Raises LakeError if the folder does not exist: a mistyped path must not look like an empty,
    faultless lake."""
    if not lake.is_dir():
        raise LakeError(f"there is no lake in {lake}")


def _summarize(files: Sequence[LakeFile]) -> TableSummary:
    rows = size_bytes = 0
    times: list[int] = []
    for file in files:
        size_bytes += file.path.stat().st_size
        try:
            metadata = pq.read_metadata(file.path)
        except (OSError, pa.ArrowException):
            # `verify` reports what is wrong with it.
            continue
        rows += metadata.num_rows
        times += _times(metadata)
    return TableSummary(
        table=files[0].table,
        node=files[0].node,
        files=len(files),
        rows=rows,
        bytes=size_bytes,
        first_seq=min(file.first for file in files),
        last_seq=max(file.last for file in files),
        first_time=min(times, default=0),
        last_time=max(times, default=0),
    )


def _times(metadata: Any) -> Iterator[int]:
    """The smallest and the largest `time` of every row group."""
    index = metadata.schema.names.index("time")
    for group in range(metadata.num_row_groups):
        statistics = metadata.row_group(group).column(index).statistics
        if statistics is not None and statistics.has_min_max:
            yield statistics.min
            yield statistics.max


def expire(lake: Path, node: str, oldest_us: int, most_bytes: int) -> int:
    """Remove a node's files of dates that ended before `oldest_us`, and its oldest files while all
    together exceed `most_bytes`; 0 means no limit. Gives the number of files that were removed."""
    oldest = date_of(oldest_us) if oldest_us else ""
    # Oldest first over all tables, so that they end at about the same time in the past.
    files = sorted(
        (file for file in find_all(lake) if file.node == node),
        key=lambda file: (file.date, file.first),
    )
    sizes = [file.path.stat().st_size for file in files]
    excess_bytes = sum(sizes) - most_bytes if most_bytes else 0
    removed = 0
    for file, size in zip(files, sizes, strict=True):
        if file.date < oldest or excess_bytes > 0:
            file.path.unlink(missing_ok=True)
            excess_bytes -= size
            removed += 1
    return removed
