"""Files of the lake: what they are called, how one is written, how one is found."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from crosswire.errors import CrosswireError
from crosswire.lake.columns import numbers
from crosswire.lake.schemas import SCHEMAS

__all__ = [
    "FinishedFile",
    "LakeFile",
    "clear",
    "date_of",
    "discard",
    "find",
    "is_covered",
    "parse_name",
    "prepare",
    "publish",
    "sync_folder",
    "write",
]

_ROW_GROUP: Final = 65_536
_NAME: Final = re.compile(r"(.+)-(\d{20})-(\d{20})\.parquet")
_DATE: Final = re.compile(r"date=(\d{4}-\d{2}-\d{2})")
_PARTS: Final = ".parts"
_UNIQUE: Final = frozenset({"seq", "id", "time", "offset", "data", "payload", "crc", "correlation"})
"""Columns whose values hardly repeat: a dictionary of them would only be in the way."""


def date_of(time_us: int) -> str:
    """The partition that a time belongs to."""
    return datetime.fromtimestamp(time_us / 1e6, UTC).strftime("%Y-%m-%d")


class LakeFile(NamedTuple):
    """A file, as far as its path tells."""

    table: str
    date: str
    node: str
    first: int
    last: int
    path: Path


class FinishedFile(NamedTuple):
    """A file that is complete and on disk, but not in its place yet."""

    unfinished: Path
    file: Path


# Writing.


def write(lake: Path, name: str, rows: pa.Table) -> list[Path]:
    """Write rows of one node, in the order of `seq`, into `lake/name`: a file for each date.

    A file appears whole or not at all. Raises CrosswireError for rows that are not of the schema,
    of several nodes, or out of order.
    """
    parts = prepare(lake, name, rows)
    publish(parts)
    return [part.file for part in parts]


def prepare(lake: Path, name: str, rows: pa.Table) -> list[FinishedFile]:
    """The files that `write` would make, on disk, but where nobody looks for them.

    Raises what `write` raises, and OSError; then nothing is left behind.
    """
    try:
        rows = rows.cast(SCHEMAS[name])
    except (pa.ArrowInvalid, ValueError) as error:
        raise CrosswireError(f"these are no rows of {name}: {error}") from error
    if not len(rows):
        return []
    if len(pc.unique(rows["node"])) != 1:
        raise CrosswireError("a file of the lake holds the rows of one node")
    seq = numbers(rows["seq"])
    if not (seq[1:] > seq[:-1]).all():
        raise CrosswireError("the rows of a file are in the order of their seq")
    days = numbers(rows["time"]) // 86_400_000_000
    ends = [*((days[1:] != days[:-1]).nonzero()[0] + 1).tolist(), len(days)]
    parts: list[FinishedFile] = []
    start = 0
    try:
        for end in ends:
            parts.append(_prepare_one(lake, name, rows.slice(start, end - start)))
            start = end
    except BaseException:
        discard(parts)
        raise
    return parts


def _prepare_one(lake: Path, name: str, rows: pa.Table) -> FinishedFile:
    first, last = _at(rows, "seq", 0), _at(rows, "seq", len(rows) - 1)
    folder = lake / name / f"date={date_of(_at(rows, 'time', 0))}"
    file = folder / f"{_at(rows, 'node', 0)}-{first:020}-{last:020}.parquet"
    # Not in the folder of the date: that may be exchanged for a compacted one meanwhile.
    unfinished = lake / _PARTS / f"{name}-{file.name}.part"
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    try:
        with unfinished.open("wb") as out:
            pq.write_table(
                rows,
                out,
                compression="zstd",
                row_group_size=_ROW_GROUP,
                write_page_checksum=True,
                use_dictionary=[each for each in rows.column_names if each not in _UNIQUE],
            )
            out.flush()
            os.fsync(out.fileno())
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return FinishedFile(unfinished, file)


def publish(parts: Iterable[FinishedFile]) -> None:
    """Put complete files into their places. May be tried again if it fails with OSError."""
    folders: dict[Path, None] = {}
    for part in parts:
        if part.unfinished.exists() or not part.file.exists():
            part.file.parent.mkdir(parents=True, exist_ok=True)
            part.unfinished.replace(part.file)
        folders[part.file.parent] = None
    for folder in folders:
        sync_folder(folder)
        sync_folder(folder.parent)
        sync_folder(folder.parent.parent)


def discard(parts: Iterable[FinishedFile]) -> None:
    for part in parts:
        part.unfinished.unlink(missing_ok=True)


def clear(lake: Path, name: str, node: str) -> None:
    """Throw away what an earlier life prepared for a table and did not publish."""
    for part in (lake / _PARTS).glob(f"{name}-{node}-*.part"):
        part.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """So that what was renamed into it is there after a power cut too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _at(rows: pa.Table, column: str, index: int) -> Any:
    return rows[column][index].as_py()


# Finding.


def find(lake: Path, tables: Sequence[str] = tuple(SCHEMAS)) -> Iterator[LakeFile]:
    """Every file of the lake, by table, date and name. A lake that is not there has none."""
    for table in tables:
        for folder in sorted(_folders(lake / table)):
            found = _DATE.fullmatch(folder.name)
            for path in sorted(_folders(folder)) if found else ():
                file = parse_name(table, found[1] if found else "", path)
                if file is not None:
                    yield file


def parse_name(table: str, date: str, path: Path) -> LakeFile | None:
    """None for what is no file of the lake."""
    name = _NAME.fullmatch(path.name)
    if name is None:
        return None
    return LakeFile(table, date, name[1], int(name[2]), int(name[3]), path)


def is_covered(lake: Path, table: str, node: str, first: int, last: int) -> bool:
    """Are the rows first … last of a node in files already? Told by their names alone."""
    own = sorted((each.first, each.last) for each in find(lake, (table,)) if each.node == node)
    for begin, end in own:
        if begin <= first <= end:
            first = end + 1
    return first > last


def _folders(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []
