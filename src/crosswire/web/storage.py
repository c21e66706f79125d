"""Disk use of store and lake over HTTP, and the lake's files and gaps."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from crosswire.errors import LakeError, ServiceUnavailable
from crosswire.lake.files import LakeFile, find
from crosswire.server.log_reader import Log
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.paging import ListQuery, cursor_of, read_cursor
from crosswire.web.times import Moment, at_us

__all__ = ["STORAGE_OPERATIONS"]

_PAUSE_EVERY: Final = 200
_GAPS: Final = 10_000

LakeTable = Literal["", "messages", "ledger", "wire", "gaps"]


class FolderUse(msgspec.Struct, frozen=True, kw_only=True):
    """A folder and the file system that it is on."""

    path: str
    """Empty for who does not administer."""
    size_bytes: int
    files: int
    free_bytes: int
    """What is left on its file system."""
    total_bytes: int
    """The size of its file system."""


class DiskUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the hub has on disk."""

    store: FolderUse
    lake: FolderUse | None
    """Null if there is no lake."""
    spare_bytes: int
    """Below this the hub accepts no more messages; it is kept for the store's own work."""
    has_room: bool
    """Whether messages are accepted."""
    staged_bytes: int
    """Staged batches that are not committed, which are in the store."""


class LakeTableRow(msgspec.Struct, frozen=True, kw_only=True):
    """A table of the lake."""

    table: str
    node: str
    files: int
    size_bytes: int
    first_seq: int
    """The number of its first row that is left."""
    last_seq: int
    first_date: str
    last_date: str


class LakeState(msgspec.Struct, frozen=True, kw_only=True):
    """The lake: its tables, and how far the hub has written them."""

    path: str
    """Empty for who does not administer."""
    tables: list[LakeTableRow]
    sealed_id: int
    """Messages with ids up to this one are in files, or in `gaps`."""
    sealed_row: int
    """Rows of the ledger up to this one are in files, or in `gaps`."""
    committed_id: int
    """The newest id of the hub."""
    committed_row: int
    """The newest row of the ledger."""


class LakeFilesQuery(ListQuery, frozen=True, kw_only=True):
    """A page of the lake's files, by default the newest first."""

    sort: Literal["newest", "size"] = "newest"
    """By what the list is sorted: `size` begins with the largest."""
    table: LakeTable = ""
    """Only files of this table."""
    date: Annotated[str, msgspec.Meta(pattern=r"^(\d{4}-\d{2}-\d{2})?$")] = ""
    """Only files of this date, as `2026-11-16`."""


class LakeFileRow(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the lake."""

    table: str
    date: str
    node: str
    first_seq: int
    last_seq: int
    size_bytes: int
    path: str
    """Below the lake's folder."""


class LakeFilePage(msgspec.Struct, frozen=True):
    """A page of the lake's files."""

    files: list[LakeFileRow]
    next: str
    """The cursor of the next page; empty after the last."""


class LakeGapsQuery(ListQuery, frozen=True, kw_only=True):
    """A page of the lake's gaps, by default the newest first."""

    sort: Literal["newest", "table", "rows"] = "newest"
    """By what the list is sorted: `rows` begins with the gap that has the most. All but `newest`
    sort the 10,000 newest gaps."""
    table: LakeTable = ""
    """Only gaps of this table."""


class LakeGapRow(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that a table of the lake will never have."""

    table: str
    first: int
    """The first that is missing: an id of a message, or a number of a row."""
    last: int
    time: Moment
    reason: str


class LakeGapPage(msgspec.Struct, frozen=True):
    """A page of the lake's gaps."""

    gaps: list[LakeGapRow]
    next: str
    """The cursor of the next page; empty after the last."""


async def show_disk(ask: OperationRequest) -> DiskUse:
    """Disk use of store and lake; measured on a thread."""
    server, log = ask.server, _log(ask)
    store_path, lake_path = Path(server.config.data) / "store", server.lake_path
    store, lake = await log.in_thread(
        lambda: (
            _use(store_path, ask.shown_path(store_path), log.pause),
            _use(lake_path, ask.shown_path(lake_path), log.pause),
        )
    )
    return DiskUse(
        store=store or _empty(ask.shown_path(store_path)),
        lake=lake,
        spare_bytes=ask.hub.store.limits.spare_bytes,
        has_room=ask.hub.store.has_room(ask.now()),
        staged_bytes=ask.hub.staging.staged_bytes,
    )


def _use(folder: Path, shown: str, pause: Callable[[float], None]) -> FolderUse | None:
    """On a thread. None if there is no such folder."""
    if not folder.is_dir():
        return None
    size_bytes = files = 0
    folders = [folder]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except FileNotFoundError:
            # A folder of the lake that a compaction replaced.
            continue
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                else:
                    size_bytes += entry.stat(follow_symlinks=False).st_size
                    files += 1
            except FileNotFoundError:
                continue
            if not files % _PAUSE_EVERY:
                pause(0.0)
    usage = shutil.disk_usage(folder)
    return FolderUse(
        path=shown,
        size_bytes=size_bytes,
        files=files,
        free_bytes=usage.free,
        total_bytes=usage.total,
    )


def _empty(shown: str) -> FolderUse:
    return FolderUse(path=shown, size_bytes=0, files=0, free_bytes=0, total_bytes=0)


def _log(ask: OperationRequest) -> Log:
    if ask.server.log is None:
        raise ServiceUnavailable("the hub is starting")
    return ask.server.log


async def show_lake(ask: OperationRequest) -> LakeState:
    """The tables of the lake by the names of their files, and how far they are written."""
    log, lake = _log(ask), ask.server.lake_path

    def summarize() -> list[LakeTableRow]:
        groups: dict[tuple[str, str], list[LakeFile]] = {}
        for file in find(lake):
            groups.setdefault((file.table, file.node), []).append(file)
        return [
            LakeTableRow(
                table=table,
                node=node,
                files=len(files),
                size_bytes=_size(files, log.pause),
                first_seq=min(file.first for file in files),
                last_seq=max(file.last for file in files),
                first_date=min(file.date for file in files),
                last_date=max(file.date for file in files),
            )
            for (table, node), files in sorted(groups.items())
        ]

    tables = await log.in_thread(summarize)
    sealed_id, sealed_row = ask.server.sealed()
    return LakeState(
        path=ask.shown_path(lake),
        tables=tables,
        sealed_id=sealed_id,
        sealed_row=sealed_row,
        committed_id=ask.hub.committed_id,
        committed_row=ask.hub.store.next_row - 1,
    )


def _size(files: list[LakeFile], pause: Callable[[float], None]) -> int:
    size_bytes = 0
    for number, file in enumerate(files, 1):
        size_bytes += _file_size(file.path)
        if not number % _PAUSE_EVERY:
            pause(0.0)
    return size_bytes


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        # Merged into another, or expired, since it was listed.
        return 0


async def list_lake_files(ask: OperationRequest) -> LakeFilePage:
    """A page of the lake's files; listed on a thread."""
    query: LakeFilesQuery = ask.query
    lake, log = ask.server.lake_path, _log(ask)
    before: tuple[int, str] | None = read_cursor(query.cursor, tuple[int, str])

    def listed() -> LakeFilePage:
        files = [
            file
            for file in (find(lake, (query.table,)) if query.table else find(lake))
            if query.date in ("", file.date)
        ]
        named = []
        for number, file in enumerate(files, 1):
            # The sizes of all files are looked up only if they decide the order.
            size_bytes = _file_size(file.path) if query.sort == "size" else 0
            named.append(((size_bytes, _file_key(file)), file))
            if not number % _PAUSE_EVERY:
                log.pause(0.0)
        named.sort(reverse=True)
        page = [each for each in named if before is None or each[0] < before]
        shown = page[: query.limit]
        following = cursor_of(*shown[-1][0]) if len(page) > len(shown) else ""
        return LakeFilePage([_file_row(file, lake) for _, file in shown], following)

    return await log.in_thread(listed)


def _file_key(file: LakeFile) -> str:
    return f"{file.date}/{file.table}/{file.path.name}"


def _file_row(file: LakeFile, lake: Path) -> LakeFileRow:
    return LakeFileRow(
        table=file.table,
        date=file.date,
        node=file.node,
        first_seq=file.first,
        last_seq=file.last,
        size_bytes=_file_size(file.path),
        path=str(file.path.relative_to(lake)),
    )


async def list_lake_gaps(ask: OperationRequest) -> LakeGapPage:
    """A page of what the lake will never have. Raises LakeError."""
    query: LakeGapsQuery = ask.query
    lake, log = ask.server.lake_path, _log(ask)
    after: tuple[float, str, int] | None = read_cursor(query.cursor, tuple[float, str, int])
    # In order of time, what was on the pages before need not be read again.
    upto = -after[2] if after is not None and query.sort == "newest" else None

    def key(seq: int, row: LakeGapRow) -> tuple[float, str, int]:
        rows = row.first - row.last - 1 if query.sort == "rows" else 0
        return rows, row.table if query.sort == "table" else "", -seq

    def read() -> list[tuple[tuple[float, str, int], LakeGapRow]]:
        found: list[tuple[tuple[float, str, int], LakeGapRow]] = []
        for file in sorted(find(lake, ("gaps",)), key=lambda each: -each.last):
            log.pause(0.0)
            if upto is not None and file.first >= upto:
                continue
            for seq, row in _gaps_of(file.path):
                if query.table in ("", row.table):
                    found.append((key(seq, row), row))
            if len(found) > _GAPS:
                break
        found.sort(key=lambda each: each[0])
        return [each for each in found if after is None or each[0] > after]

    rows = await log.in_thread(read)
    shown = rows[: query.limit]
    following = cursor_of(*shown[-1][0]) if len(rows) > len(shown) else ""
    return LakeGapPage([row for _, row in shown], following)


def _gaps_of(path: Path) -> list[tuple[int, LakeGapRow]]:
    try:
        rows = pq.read_table(path, partitioning=None).to_pylist()
    except FileNotFoundError:
        return []
    except (OSError, pa.ArrowException) as error:
        raise LakeError(f"{path} can't be read: {' '.join(str(error).split())}") from error
    return [
        (
            row["seq"],
            LakeGapRow(
                table=row["table"],
                first=row["first"],
                last=row["last"],
                time=at_us(row["time"]),
                reason=row["reason"],
            ),
        )
        for row in rows
    ]


STORAGE_OPERATIONS: Final = (
    Operation(
        name="show_disk",
        tag="storage",
        method="GET",
        path="/v1/disk",
        summary="Disk use of store and lake",
        handler=show_disk,
        answer=DiskUse,
        needs="observe",
    ),
    Operation(
        name="show_lake",
        tag="storage",
        method="GET",
        path="/v1/lake",
        summary="The tables of the lake, and how far they are written",
        handler=show_lake,
        answer=LakeState,
        needs="observe",
    ),
    Operation(
        name="list_lake_files",
        tag="storage",
        method="GET",
        path="/v1/lake/files",
        summary="The files of the lake",
        handler=list_lake_files,
        query=LakeFilesQuery,
        answer=LakeFilePage,
        needs="observe",
    ),
    Operation(
        name="list_lake_gaps",
        tag="storage",
        method="GET",
        path="/v1/lake/gaps",
        summary="What the lake will never have, and why",
        handler=list_lake_gaps,
        query=LakeGapsQuery,
        answer=LakeGapPage,
        needs="observe",
    ),
)
