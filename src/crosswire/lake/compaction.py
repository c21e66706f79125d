"""Compaction: joining the many small files of a date into few large ones, in one visible step."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from crosswire.durable_files import sync_folder
from crosswire.errors import LakeError
from crosswire.lake.catalog import require_lake
from crosswire.lake.files import (
    PARTS,
    LakeFile,
    file_name,
    find,
    find_all,
    is_covered,
    parse_name,
    sequence_breaks,
)
from crosswire.lake.schemas import SCHEMAS

__all__ = ["Compaction", "compact"]

_TARGET_BYTES: Final = 256 * 1024 * 1024
_GROUP_ROWS: Final = 1 << 17
_GROUP_BYTES: Final = 64 << 20

# renameat2(2): paths are relative to the working directory; swap the two instead of replacing.
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


class Compaction(msgspec.Struct, frozen=True, kw_only=True):
    """What was done with one date of one table."""

    table: str
    date: str
    files_before: int
    files_after: int
    rows: int


def compact(lake: Path, *, before: str, target_bytes: int = _TARGET_BYTES) -> Iterator[Compaction]:
    """Join the files of each date before this one, up to about `target_bytes` each.

    The folder of a date is exchanged for the new one in a single step: a reader that lists it sees
    all old files or all new ones. Raises LakeError, and leaves a date as it was, if files are
    damaged or don't follow one another, or the system can't exchange folders.
    """
    require_lake(lake)
    dates = sorted({(file.table, file.date) for file in find(lake)})
    for table, date in dates:
        if date < before:
            files = [file for file in find(lake, (table,)) if file.date == date]
            plan = list(_plan(files, target_bytes))
            there = {file.path.name for file in find_all(lake, (table,)) if file.date == date}
            replaced = there - {file.path.name for file in files}
            if len(plan) < len(files) or replaced:
                yield _compact_date(lake, table, date, plan, replaced)


def _plan(files: Sequence[LakeFile], target_bytes: int) -> Iterator[list[LakeFile]]:
    """Which files become one: they follow one another and are small enough together. Never over a
    gap, since a file's name promises all rows from its first to its last."""
    run: list[LakeFile] = []
    size_bytes = 0
    for file in sorted(files, key=lambda file: (file.node, file.first)):
        own = file.path.stat().st_size
        follows = run and file.node == run[-1].node and file.first == run[-1].last + 1
        if run and (not follows or size_bytes + own > target_bytes):
            yield run
            run, size_bytes = [], 0
        run.append(file)
        size_bytes += own
    if run:
        yield run


def _compact_date(
    lake: Path, table: str, date: str, plan: Sequence[Sequence[LakeFile]], replaced: set[str]
) -> Compaction:
    """`replaced` are the names of files that don't count, because a later leader has written
    theirs: they go."""
    folder = lake / table / f"date={date}"
    fresh = lake / PARTS / f"compact-{table}-{date}"
    _recover(lake, table, fresh, folder)
    fresh.mkdir(parents=True)
    try:
        rows = sum(_join(run, fresh) for run in plan)
        # The new files must be on disk before the exchange can be: a power cut in between would
        # leave a folder of names without content.
        sync_folder(fresh)
        _exchange(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    # From here on `fresh` holds the old files. One that the hub published meanwhile is among them
    # and in none of the joined ones: it goes back.
    joined = {file.path.name for run in plan for file in run} | replaced
    for path in fresh.iterdir():
        if path.name not in joined:
            path.replace(folder / path.name)
    # The exchange must be on disk before the old files go, or they would be missing in the folder.
    for each in (folder, folder.parent, fresh.parent):
        sync_folder(each)
    shutil.rmtree(fresh)
    files = sum(len(run) for run in plan)
    return Compaction(table=table, date=date, files_before=files, files_after=len(plan), rows=rows)


def _recover(lake: Path, table: str, left: Path, folder: Path) -> None:
    """Clean up after a compaction that was killed.

    Before the exchange the folder holds copies, which are removed. After it, it holds the old
    files; one whose rows are nowhere else was published during the compaction and goes back.
    """
    if left.is_dir():
        for path in left.iterdir():
            file = parse_name(table, "", path)
            if file is not None and not is_covered(lake, table, file.node, file.first, file.last):
                path.replace(folder / path.name)
        for each in (folder, folder.parent, left.parent):
            sync_folder(each)
        shutil.rmtree(left)


def _join(run: Sequence[LakeFile], folder: Path) -> int:
    """Make one file of several, a row group at a time; gives the number of its rows. A single file
    is linked as it is."""
    first, last = run[0], run[-1]
    # The highest term: what is late of any of these leaders must not count beside it.
    term = max(file.term for file in run)
    target = folder / file_name(first.node, first.first, last.last, term)
    if len(run) == 1:
        target.hardlink_to(first.path)
        return int(pq.read_metadata(target).num_rows)
    schema = SCHEMAS[first.table]
    rows = 0
    due = first.first
    try:
        with (
            target.open("wb") as out,
            pq.ParquetWriter(out, schema, compression="zstd", write_page_checksum=True) as writer,
        ):
            for table in _regrouped(run):
                seq = table["seq"].to_numpy()
                if any(True for _ in sequence_breaks(seq, due)):
                    raise LakeError(f"the rows of {first.path.parent} don't follow one another")
                due = int(seq[-1]) + 1
                rows += len(table)
                writer.write_table(table)
            out.flush()
            os.fsync(out.fileno())
    except (OSError, pa.ArrowException) as error:
        raise LakeError(f"{first.path.parent} can't be compacted: {error}") from error
    if due != last.last + 1:
        raise LakeError(f"{last.path} ends with seq {due - 1}, its name promises {last.last}")
    # As old as the newest of its parts, for programs that go by the age of files.
    newest = max(file.path.stat().st_mtime_ns for file in run)
    os.utime(target, ns=(newest, newest))
    return rows


def _regrouped(run: Sequence[LakeFile]) -> Iterator[pa.Table]:
    """The rows of many files in tables of a good size for a row group; checksums are verified."""
    waiting: list[pa.Table] = []
    rows = size_bytes = 0
    for file in run:
        opened = pq.ParquetFile(file.path, page_checksum_verification=True)
        for group in range(opened.num_row_groups):
            waiting.append(opened.read_row_group(group))
            rows += len(waiting[-1])
            size_bytes += waiting[-1].nbytes
            if rows >= _GROUP_ROWS or size_bytes >= _GROUP_BYTES:
                yield pa.concat_tables(waiting)
                waiting, rows, size_bytes = [], 0, 0
    if rows:
        yield pa.concat_tables(waiting)


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders in one step. Python's `os` has no call for it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise LakeError("this system can't exchange two folders in one step")
    result = libc.renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    )
    if result:
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS):
            raise LakeError(f"the file system of {other} can't exchange two folders in one step")
        raise LakeError(f"{other} can't be exchanged: {os.strerror(code)}")
