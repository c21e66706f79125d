"""Files of the lake: their names, writing one in two steps, and finding them.

A file is prepared under `.parts/`, complete and synced, and published by one rename. So readers see
a file whole or not at all, and a hub can commit that a file *will* appear between the two steps:
the commit comes first, because a file without a commit could appear twice (the rows would be sealed
again after a restart), while a commit without its file is redone from the store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from crosswire.durable_files import make_folder, sync_folder
from crosswire.errors import CrosswireError
from crosswire.lake.columns import numbers
from crosswire.lake.schemas import SCHEMAS
from crosswire.lake.terms import LakeFile, TermGap, counted, outside_gaps

__all__ = [
    "PARTS",
    "FinishedFile",
    "LakeFile",
    "clear",
    "counting",
    "date_of",
    "discard",
    "file_name",
    "find",
    "find_all",
    "is_covered",
    "parse_name",
    "prepare",
    "publish",
    "sequence_breaks",
    "write",
]

PARTS: Final = ".parts"
"""The folder of a lake for files that are not published. It is on the same file system, so that
publishing is a rename; readers skip names that begin with a dot."""

_TOKEN_BYTES: Final = 4
"""Of a random part in the name of an unfinished file: the process of an earlier hub may still be
writing the same rows, and must not write into the file that this one publishes."""
_ROW_GROUP: Final = 65_536
_DAY_US: Final = 86_400_000_000
_NAME: Final = re.compile(r"(.+)-(\d{20})-(\d{20})(?:-t([1-9]\d{0,19}))?\.parquet")
_WITH_GAPS: Final = ("messages", "ledger")
_DATE: Final = re.compile(r"date=(\d{4}-\d{2}-\d{2})")
_UNIQUE: Final = frozenset({"seq", "id", "time", "offset", "data", "payload", "crc", "correlation"})
"""Columns whose values hardly repeat: a dictionary would make them larger, not smaller."""


def date_of(time_us: int) -> str:
    """The date partition of a time, in UTC."""
    return datetime.fromtimestamp(time_us / 1e6, UTC).strftime("%Y-%m-%d")


class FinishedFile(NamedTuple):
    """A file that is complete and on disk as `unfinished`, and is to be published as `file`."""

    unfinished: Path
    file: Path


# ----------------------------------------------------------------------------------------- writing


def write(lake: Path, name: str, rows: pa.Table) -> list[Path]:
    """Write rows of one node, in the order of `seq`, into `lake/name`: a file for each date.

    A file appears whole or not at all. Raises CrosswireError for rows that are not of the schema,
    of several nodes, or out of order.
    """
    parts = prepare(lake, name, rows)
    publish(parts)
    return [part.file for part in parts]


def prepare(
    lake: Path, name: str, rows: pa.Table, *, term: int = 0, writer: str = ""
) -> list[FinishedFile]:
    """The files that `write` would make, complete and synced, but not visible to readers.

    `term` is that of the leader, 0 for a hub without replicas; `writer` the replica's name, by
    which `clear` finds what it left.

    Raises what `write` raises, and OSError; then no unpublished file is left.
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
    # Rows stay in the order of seq. Where the clock was set back over midnight a date so comes
    # twice, in two files.
    days = numbers(rows["time"]) // _DAY_US
    ends = [*((days[1:] != days[:-1]).nonzero()[0] + 1).tolist(), len(days)]
    parts: list[FinishedFile] = []
    start = 0
    try:
        for end in ends:
            parts.append(_prepare_one(lake, name, rows.slice(start, end - start), term, writer))
            start = end
    except BaseException:
        discard(parts)
        raise
    return parts


def _prepare_one(lake: Path, name: str, rows: pa.Table, term: int, writer: str) -> FinishedFile:
    first, last = _at(rows, "seq", 0), _at(rows, "seq", len(rows) - 1)
    folder = lake / name / f"date={date_of(_at(rows, 'time', 0))}"
    file = folder / file_name(_at(rows, "node", 0), first, last, term)
    # Not in the folder of the date: a compaction may exchange that for another one meanwhile.
    unfinished = lake / PARTS / f"{name}-{file.name}.{token_hex(_TOKEN_BYTES)}{_unfinished(writer)}"
    if not unfinished.parent.is_dir():
        make_folder(unfinished.parent)
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
            # Before the rename: otherwise a power cut could leave the name without the content.
            os.fsync(out.fileno())
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return FinishedFile(unfinished, file)


def publish(parts: Iterable[FinishedFile]) -> None:
    """Make prepared files visible, each by a rename.

    Raises OSError, and may then be called again with the same parts: those that are published
    already are skipped.
    """
    folders: list[Path] = []
    for part in parts:
        # If both are missing the rename fails loudly: a file that was promised is gone.
        if part.unfinished.exists() or not part.file.exists():
            part.file.parent.mkdir(parents=True, exist_ok=True)
            part.unfinished.replace(part.file)
        folders.append(part.file.parent)
    _sync_dates(folders)


def _sync_dates(folders: Iterable[Path]) -> None:
    """Sync the folders of dates, and the names of table and lake: each of them may be new."""
    for date in dict.fromkeys(folders):
        for folder in (date, *list(date.parents)[:3]):
            sync_folder(folder)


def discard(parts: Iterable[FinishedFile]) -> None:
    """Remove prepared files instead of publishing them."""
    for part in parts:
        part.unfinished.unlink(missing_ok=True)


def clear(lake: Path, name: str, node: str, writer: str = "") -> None:
    """Remove what an earlier process of a node prepared for a table and did not publish; of
    replicas, only what this writer did: another one may be about to publish its files."""
    token = "?" * 2 * _TOKEN_BYTES
    for part in (lake / PARTS).glob(f"{name}-{node}-*.parquet.{token}{_unfinished(writer)}"):
        part.unlink(missing_ok=True)


def _unfinished(writer: str) -> str:
    return f".{writer}.part" if writer else ".part"


def _at(rows: pa.Table, column: str, index: int) -> Any:
    return rows[column][index].as_py()


# ----------------------------------------------------------------------------------------- finding


def file_name(node: str, first: int, last: int, term: int = 0) -> str:
    """The name of a file with the rows first … last: in the order of text they are in that of seq,
    since 20 digits hold every number of 64 bits."""
    of_term = f"-t{term}" if term else ""
    return f"{node}-{first:020}-{last:020}{of_term}.parquet"


def parse_name(table: str, date: str, path: Path) -> LakeFile | None:
    """A file by its name; None for what is no file of the lake."""
    name = _NAME.fullmatch(path.name)
    if name is None:
        return None
    return LakeFile(table, date, name[1], int(name[2]), int(name[3]), path, term=int(name[4] or 0))


def find(lake: Path, tables: Sequence[str] = tuple(SCHEMAS)) -> Iterator[LakeFile]:
    """Every file of the lake that counts, by table, date and name. A lake that does not exist has
    none."""
    for table in tables:
        yield from counting(lake, table, list(find_all(lake, (table,))))


def find_all(lake: Path, tables: Sequence[str] = tuple(SCHEMAS)) -> Iterator[LakeFile]:
    """Like `find`, with the files that don't count because a later leader has written theirs."""
    for table in tables:
        for folder in sorted(_entries(lake / table)):
            found = _DATE.fullmatch(folder.name)
            for path in sorted(_entries(folder)) if found else ():
                file = parse_name(table, found[1] if found else "", path)
                if file is not None:
                    yield file


def counting(lake: Path, table: str, files: Sequence[LakeFile]) -> list[LakeFile]:
    """Those of all files of a table that count: see `lake.terms`."""
    files = counted(files)
    if table not in _WITH_GAPS or not any(each.term for each in files):
        return files
    recorded = counted([each for each in find_all(lake, ("gaps",)) if each.term])
    gaps = [gap for each in recorded for gap in _gaps_in(each)]
    return outside_gaps(files, gaps, _ids_in)


@lru_cache(maxsize=1024)
def _gaps_in(file: LakeFile) -> tuple[TermGap, ...]:
    """The gaps that a file of `gaps` records; none if it can't be read, which `verify` reports."""
    try:
        rows = pq.read_table(file.path, partitioning=None).to_pylist()
    except (OSError, pa.ArrowException):
        return ()
    return tuple(
        TermGap(row["table"], row["node"], row["first"], row["last"], file.term) for row in rows
    )


@lru_cache(maxsize=4096)
def _ids_in(file: LakeFile) -> tuple[int, int] | None:
    """The first and the last id of a file of `messages`; None if it does not show them."""
    try:
        footer = pq.read_metadata(file.path)
    except (OSError, pa.ArrowException):
        return None
    index = footer.schema.names.index("id")
    groups = [footer.row_group(each).column(index) for each in range(footer.num_row_groups)]
    found = [each.statistics for each in groups]
    if not found or any(each is None or not each.has_min_max for each in found):
        return None
    return found[0].min, found[-1].max


def is_covered(lake: Path, table: str, node: str, first: int, last: int) -> bool:
    """Whether published files hold all of the rows first … last of a node. Then they also do after
    a power cut: who published them may have been killed before it synced their folders."""
    own = sorted(
        (each.first, each.last, each.path.parent)
        for each in find(lake, (table,))
        if each.node == node
    )
    folders = []
    for begin, end, folder in own:
        if begin <= first <= end:
            first = end + 1
            folders.append(folder)
    if first <= last:
        return False
    _sync_dates(folders)
    return True


def sequence_breaks(seq: Any, due: int) -> Iterator[tuple[int, int, bool]]:
    """Where the numbers of an array don't continue from `due` on one by one: the first and the last
    number that is missing (True) or there twice (False)."""
    before = np.concatenate(([due - 1], seq[:-1]))
    for index in (seq != before + 1).nonzero()[0].tolist():
        last, here = int(before[index]), int(seq[index])
        yield (last + 1, here - 1, True) if here > last else (here, last, False)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []
