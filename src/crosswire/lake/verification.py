"""Verifying a lake: every page and every payload against its checksum, every row against its file's
name, the numbering of rows within and between files, and what is there against what the store of
the hub has sealed."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from crosswire.lake.catalog import files_by_node, require_lake
from crosswire.lake.files import LakeFile, date_of, find, find_all, sequence_breaks
from crosswire.lake.schemas import SCHEMAS

__all__ = ["LakeFault", "SealedRows", "verify"]

_READ_ROWS: Final = 16_384


class LakeFault(msgspec.Struct, frozen=True, kw_only=True):
    """A finding about the rows `first` … `last` of a table of a node.

    Kinds: `damaged`, `gap`, `overlap`, `foreign` (a file that no hub put there), and `recorded`,
    which is no error: a gap that the hub noted with its reason in the table `gaps`.
    """

    kind: str
    table: str
    node: str
    first: int
    last: int
    detail: str
    file: str = ""


class SealedRows(msgspec.Struct, frozen=True):
    """What the store of a node has sealed: by table, the last row that must be in the lake."""

    node: str
    last: dict[str, int]


def verify(lake: Path, sealed: SealedRows | None = None) -> Iterator[LakeFault]:
    """Read all of a lake and report what is wrong. Raises LakeError if there is no lake.

    Without `sealed` nobody can know whether the newest files are missing.
    """
    require_lake(lake)
    recorded = list(_recorded(lake))
    yield from recorded
    yield from _foreign(lake)
    newest: dict[str, int] = {}
    for files in files_by_node(lake):
        for file in files:
            yield from _inspect(file)
        yield from _unexplained(_between(files), recorded)
        if sealed is not None and files[0].node == sealed.node:
            newest[files[0].table] = max(file.last for file in files)
    if sealed is not None:
        yield from _unexplained(_unpublished(sealed, newest), recorded)


def _foreign(lake: Path) -> Iterator[LakeFault]:
    """Files in the folders of tables that have no name of a lake's file."""
    for table in SCHEMAS:
        known = {file.path for file in find_all(lake, (table,))}
        folder = lake / table
        for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
            # Names with a dot or an underscore are hidden from all readers of a table.
            hidden = any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
            if path.is_file() and not hidden and path not in known:
                yield LakeFault(
                    kind="foreign",
                    table=table,
                    node="",
                    first=0,
                    last=0,
                    detail="no name of a file of the lake: readers may take its rows for others",
                    file=str(path),
                )


def _unpublished(sealed: SealedRows, newest: Mapping[str, int]) -> Iterator[LakeFault]:
    """Rows that the store has sealed and no file has."""
    for table, last in sealed.last.items():
        if newest.get(table, 0) < last:
            yield LakeFault(
                kind="gap",
                table=table,
                node=sealed.node,
                first=newest.get(table, 0) + 1,
                last=last,
                detail="sealed by the store; a hub that was killed publishes it when it starts",
            )


def _recorded(lake: Path) -> Iterator[LakeFault]:
    for file in find(lake, ("gaps",)):
        try:
            rows = pq.read_table(file.path, partitioning=None).to_pylist()
        except (OSError, pa.ArrowException):
            # Reported as damaged when the files of `gaps` are inspected themselves.
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
            for first, last, is_gap in sequence_breaks(seq, due):
                yield fault("gap" if is_gap else "overlap", "in the file itself", first, last)
            due = int(seq[-1]) + 1
            if file.table == "messages":
                for identifier in _altered(batch):
                    yield fault("damaged", f"the payload of message {identifier} is another one")
    except (OSError, pa.ArrowException) as error:
        # Arrow's messages have several lines.
        yield fault("damaged", " ".join(str(error).split()))
        return
    if due != file.last + 1:
        yield fault("damaged", f"ends with seq {due - 1}, its name promises {file.last}")


def _altered(batch: pa.RecordBatch) -> Iterator[int]:
    """The ids of messages whose payload no longer has the checksum taken at the edge."""
    columns = (batch.column(name).to_pylist() for name in ("id", "payload", "crc"))
    for identifier, payload, crc in zip(*columns, strict=True):
        if zlib.crc32(payload) != crc:
            yield identifier


def _bounds(values: Any) -> tuple[int, int]:
    return values.min(), values.max()


def _between(files: Sequence[LakeFile]) -> Iterator[LakeFault]:
    """Gaps and overlaps between a node's files, by their names. The first file may begin anywhere:
    retention removes the oldest."""
    due = files[0].first
    for file in files:
        if file.first != due:
            is_gap = file.first > due
            first, last = (due, file.first - 1) if is_gap else (file.first, due - 1)
            yield LakeFault(
                kind="gap" if is_gap else "overlap",
                table=file.table,
                node=file.node,
                first=first,
                # A file may lie within the previous one: only its own rows are doubled.
                last=last if is_gap else min(last, file.last),
                detail="between files",
                file=str(file.path),
            )
        due = max(due, file.last + 1)


def _unexplained(faults: Iterable[LakeFault], recorded: Sequence[LakeFault]) -> Iterator[LakeFault]:
    """Without the gaps, or the beginnings of gaps, that are recorded.

    Gaps of `messages` are recorded by id, not by seq: a message that is left out takes no seq, so
    nothing has to be explained there.
    """
    for fault in faults:
        first = fault.first
        for each in sorted(recorded, key=lambda each: each.first):
            same = (each.table, each.node) == (fault.table, fault.node)
            if fault.kind == "gap" and same and each.first <= first <= each.last:
                first = each.last + 1
        if first <= fault.last:
            yield msgspec.structs.replace(fault, first=first)
