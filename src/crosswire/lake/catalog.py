"""What is in a lake, whether it is whole, and making few large files of many small ones."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from crosswire.errors import LakeError
from crosswire.lake.files import LakeFile, date_of, find, is_covered, parse_name, sync_folder
from crosswire.lake.schemas import SCHEMAS

__all__ = ["Compaction", "LakeFault", "TableSummary", "compact", "expire", "summarize", "verify"]

_READ_ROWS: Final = 16_384
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


# -------------------------------------------------------------------------------------------- list


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
    """From names and footers alone. Raises LakeError for a lake that is not there."""
    _require(lake)
    return [_summarize(files) for files in _by_node(lake)]


def _summarize(files: Sequence[LakeFile]) -> TableSummary:
    rows = size_bytes = 0
    times: list[int] = []
    for file in files:
        size_bytes += file.path.stat().st_size
        try:
            metadata = pq.read_metadata(file.path)
        except (OSError, pa.ArrowException):
            # `verify` says what is wrong with it.
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
    """The bounds of `time` in every row group."""
    index = metadata.schema.names.index("time")
    for group in range(metadata.num_row_groups):
        statistics = metadata.row_group(group).column(index).statistics
        if statistics is not None and statistics.has_min_max:
            yield statistics.min
            yield statistics.max


def _by_node(lake: Path, tables: Sequence[str] = tuple(SCHEMAS)) -> Iterator[list[LakeFile]]:
    """The files of each table and node, in order of their seq."""
    groups: dict[tuple[str, str], list[LakeFile]] = {}
    for file in find(lake, tables):
        groups.setdefault((file.table, file.node), []).append(file)
    for _, files in sorted(groups.items()):
        yield sorted(files, key=lambda file: (file.first, file.last))


def _require(lake: Path) -> None:
    if not lake.is_dir():
        raise LakeError(f"there is no lake in {lake}")


# ------------------------------------------------------------------------------------------ verify


class LakeFault(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not as it should be: `damaged`, `gap`, `overlap`, or `recorded`: a gap that
    the hub knows of and told the reason."""

    kind: str
    table: str
    node: str
    first: int
    last: int
    detail: str
    file: str = ""


def verify(lake: Path) -> Iterator[LakeFault]:
    """Reads every page of every file, with its checksum. Raises LakeError for no lake."""
    _require(lake)
    known = list(_recorded(lake))
    yield from known
    for files in _by_node(lake):
        for file in files:
            yield from _inspect(file)
        yield from _unexplained(_between(files), known)


def _recorded(lake: Path) -> Iterator[LakeFault]:
    for file in find(lake, ("gaps",)):
        try:
            rows = pq.read_table(file.path, partitioning=None).to_pylist()
        except (OSError, pa.ArrowException):
            continue
        for row in rows:
            yield LakeFault(
                kind="recorded",
                table=row["table"],
                node=row["node"],
                first=row["first"],
                last=row["last"],
                detail=row["reason"],
            )


def _inspect(file: LakeFile) -> Iterator[LakeFault]:
    """One file against its name, its schema and its checksums."""

    def fault(kind: str, detail: str, first: int = file.first, last: int = file.last) -> LakeFault:
        return LakeFault(
            kind=kind,
            table=file.table,
            node=file.node,
            first=first,
            last=last,
            detail=detail,
            file=str(file.path),
        )

    try:
        opened = pq.ParquetFile(file.path, page_checksum_verification=True)
        if not opened.schema_arrow.equals(SCHEMAS[file.table]):
            yield fault("damaged", f"the columns are not those of {file.table}")
            return
        due = file.first
        for batch in opened.iter_batches(_READ_ROWS):
            if set(batch.column("node").unique().to_pylist()) != {file.node}:
                yield fault("damaged", "holds rows of another node")
                return
            days = {date_of(int(time)) for time in _bounds(batch.column("time").to_numpy())}
            if days != {file.date}:
                yield fault("damaged", "holds rows of another date")
                return
            seq = batch.column("seq").to_numpy()
            for first, last, following in _jumps(seq, due):
                kind = "gap" if following else "overlap"
                yield fault(kind, "in the file itself", first, last)
            due = int(seq[-1]) + 1
    except (OSError, pa.ArrowException) as error:
        yield fault("damaged", " ".join(str(error).split()))
        return
    if due != file.last + 1:
        yield fault("damaged", f"ends with seq {due - 1}, not where its name says")


def _bounds(values: Any) -> tuple[int, int]:
    return values.min(), values.max()


def _jumps(seq: Any, due: int) -> Iterator[tuple[int, int, bool]]:
    """Where numbers don't follow one another: what is missing, or (False) there twice."""
    before = np.concatenate(([due - 1], seq[:-1]))
    for index in (seq != before + 1).nonzero()[0].tolist():
        last, here = int(before[index]), int(seq[index])
        yield (last + 1, here - 1, True) if here > last else (here, last, False)


def _between(files: Sequence[LakeFile]) -> Iterator[LakeFault]:
    """The first file may begin anywhere: retention takes the oldest."""
    following = files[0].first
    for file in files:
        if file.first != following:
            is_gap = file.first > following
            first, last = (following, file.first - 1) if is_gap else (file.first, following - 1)
            yield LakeFault(
                kind="gap" if is_gap else "overlap",
                table=file.table,
                node=file.node,
                first=first,
                last=min(last, file.last) if not is_gap else last,
                detail="between files",
                file=str(file.path),
            )
        following = max(following, file.last + 1)


def _unexplained(faults: Iterable[LakeFault], known: Sequence[LakeFault]) -> Iterator[LakeFault]:
    """Without the gaps that were recorded. Messages are recorded by id, and leave no hole."""
    for fault in faults:
        first = fault.first
        for each in sorted(known, key=lambda each: each.first):
            same = (each.table, each.node) == (fault.table, fault.node)
            if fault.kind == "gap" and same and each.first <= first <= each.last:
                first = each.last + 1
        if first <= fault.last:
            yield msgspec.structs.replace(fault, first=first)


# ----------------------------------------------------------------------------------------- compact


class Compaction(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one date of one table."""

    table: str
    date: str
    files_before: int
    files_after: int
    rows: int


def compact(
    lake: Path, *, before: str, target_bytes: int = 256 * 1024 * 1024
) -> Iterator[Compaction]:
    """Join files of the dates before this one, up to about `target_bytes` each.

    The folder of a date is exchanged for the new one in a single step: whoever lists it sees all
    old files or all new ones. Raises LakeError, and leaves a date as it was, if files are damaged
    or don't follow one another, or the system can't exchange folders.
    """
    _require(lake)
    dates = sorted({(file.table, file.date) for file in find(lake)})
    for table, date in dates:
        if date < before:
            files = [file for file in find(lake, (table,)) if file.date == date]
            plan = list(_plan(files, target_bytes))
            if len(plan) < len(files):
                yield _compact_date(lake, table, date, plan)


def _plan(files: Sequence[LakeFile], target_bytes: int) -> Iterator[list[LakeFile]]:
    """Runs of files that follow one another and are small enough together."""
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
    lake: Path, table: str, date: str, plan: Sequence[Sequence[LakeFile]]
) -> Compaction:
    folder = lake / table / f"date={date}"
    fresh = lake / ".parts" / f"compact-{table}-{date}"
    _rescue(lake, table, fresh, folder)
    fresh.mkdir(parents=True)
    try:
        rows = sum(_join(run, fresh) for run in plan)
        sync_folder(fresh)
        _exchange(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    # From here on `fresh` holds the old files. One that came meanwhile is moved over.
    joined = {file.path.name for run in plan for file in run}
    for path in fresh.iterdir():
        if path.name not in joined:
            path.replace(folder / path.name)
    sync_folder(folder)
    shutil.rmtree(fresh)
    files = sum(len(run) for run in plan)
    return Compaction(table=table, date=date, files_before=files, files_after=len(plan), rows=rows)


def _rescue(lake: Path, table: str, left: Path, folder: Path) -> None:
    """Clean up behind a compaction that was killed: what is nowhere else goes back."""
    if left.is_dir():
        for path in left.iterdir():
            file = parse_name(table, "", path)
            if file is not None and not is_covered(lake, table, file.node, file.first, file.last):
                path.replace(folder / path.name)
        shutil.rmtree(left)


def _join(run: Sequence[LakeFile], folder: Path) -> int:
    """One file of several, a row group at a time; one alone is linked as it is."""
    first, last = run[0], run[-1]
    target = folder / f"{first.node}-{first.first:020}-{last.last:020}.parquet"
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
                if any(True for _ in _jumps(seq, due)):
                    raise LakeError(f"the rows of {first.path.parent} don't follow one another")
                due = int(seq[-1]) + 1
                rows += len(table)
                writer.write_table(table)
            out.flush()
            os.fsync(out.fileno())
    except (OSError, pa.ArrowException) as error:
        raise LakeError(f"{first.path.parent} can't be compacted: {error}") from error
    if due != last.last + 1:
        raise LakeError(f"{last.path} does not end where its name says")
    newest = max(file.path.stat().st_mtime_ns for file in run)
    os.utime(target, ns=(newest, newest))
    return rows


def _regrouped(run: Sequence[LakeFile]) -> Iterator[pa.Table]:
    """The rows of many files in tables of a good size for a row group, checked on the way."""
    waiting: list[pa.Table] = []
    rows = size_bytes = 0
    for file in run:
        opened = pq.ParquetFile(file.path, page_checksum_verification=True)
        for group in range(opened.num_row_groups):
            waiting.append(opened.read_row_group(group))
            rows += len(waiting[-1])
            size_bytes += waiting[-1].nbytes
            if rows >= 1 << 17 or size_bytes >= 64 << 20:
                yield pa.concat_tables(waiting)
                waiting, rows, size_bytes = [], 0, 0
    if rows:
        yield pa.concat_tables(waiting)


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders in one step."""
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


# ---------------------------------------------------------------------------------------- retention


def expire(lake: Path, node: str, oldest_us: int, most_bytes: int) -> int:
    """Remove files of a node: those of dates that ended before `oldest_us`, and the oldest of what
    is more than `most_bytes`. Gives how many; 0 for either means no bound."""
    oldest = date_of(oldest_us) if oldest_us else ""
    files = sorted(
        (file for file in find(lake) if file.node == node),
        key=lambda file: (file.date, file.first),
    )
    sizes = [file.path.stat().st_size for file in files]
    too_much = sum(sizes) - most_bytes if most_bytes else 0
    gone = 0
    for file, size in zip(files, sizes, strict=True):
        if file.date < oldest or too_much > 0:
            file.path.unlink(missing_ok=True)
            too_much -= size
            gone += 1
    return gone
