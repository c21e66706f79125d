"""The messages of one node in a lake as a log: which ids are there, and reading ranges of ids.

The names of files have their first and last `seq`, which has no holes, and ids grow with it. So
files that follow one another cover every id in between, although ids do have holes: an id between
two of them was never stored. A footer is read only where a range of files begins or ends.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from crosswire.errors import LakeError
from crosswire.lake.columns import numbers
from crosswire.lake.files import LakeFile, counting, find, parse_name
from crosswire.lake.row_groups import RowGroupFile, RowGroupFiles

__all__ = ["CoveredIds", "History", "IdShare", "LakeExtent", "SealedGroup"]

_BATCH_BYTES: Final = 4 << 20
_BATCH_ROWS: Final = 16_384
_SHARES: Final = 256
_SETTLED_NS: Final = 50_000_000


class LakeExtent(NamedTuple):
    """How far a lake that a hub is writing to has come: ids up to `upto`, rows up to `last_seq`.

    `gaps` are ranges of ids that are not in files and not yet in the table `gaps`.
    """

    upto: int
    last_seq: int
    gaps: tuple[tuple[int, int], ...] = ()


class CoveredIds(NamedTuple):
    """Ids that the lake covers: one of them that is not in its files was never stored."""

    first: int
    last: int


class IdShare(NamedTuple):
    """A range of ids, and the approximate number of messages in it, and of their bytes."""

    first: int
    last: int
    rows: int
    size_bytes: int


class SealedGroup(NamedTuple):
    """A row group: its file, its number in it, its rows, and its first and last id."""

    file: LakeFile
    number: int
    rows: int
    first: int
    last: int


class _RowGroup(NamedTuple):
    """A row group, as the footer describes it."""

    rows: int
    size_bytes: int
    first_id: int
    last_id: int
    first_time: int
    last_time: int


_Footer = tuple[_RowGroup, ...]


class History:
    """Reads the messages of a node. May be used by several threads.

    Raises LakeError for files that can't be read. Files are added, removed and compacted meanwhile:
    FileNotFoundError means that one is gone or was joined into another; call `forget` and try
    again.
    """

    def __init__(self, lake: Path, node: str) -> None:
        self._lake = lake
        self._node = node
        self._lock = Lock()
        self._folders: dict[Path, tuple[tuple[int, int] | None, list[LakeFile]]] = {}
        self._files: list[LakeFile] = []
        self._footers: dict[Path, _Footer] = {}
        self._gaps: dict[Path, list[tuple[int, int]]] = {}
        self._known: tuple[list[LakeFile], LakeExtent | None, list[CoveredIds]] | None = None
        self._group_files = RowGroupFiles()

    # Covered ids.

    def segments(self, extent: LakeExtent | None) -> list[CoveredIds]:
        """The ids that the lake covers, in order. `extent` is what the hub that writes to the lake
        knows; None where no hub does, and the files alone decide."""
        with self._lock:
            files = self._listed(extent)
            if self._known is not None and self._known[0] is files and self._known[1] == extent:
                return self._known[2]
            found = self._segments(files, extent)
            self._known = (files, extent, found)
            return found

    def forget(self) -> None:
        """List all files again at the next call."""
        with self._lock:
            self._folders.clear()
            self._known = None

    def _segments(self, files: list[LakeFile], extent: LakeExtent | None) -> list[CoveredIds]:
        found: list[CoveredIds] = []
        start = 0
        for index, file in enumerate(files):
            is_last = index + 1 == len(files)
            # A segment ends only where the seq of the next file does not continue.
            if not is_last and files[index + 1].first == file.last + 1:
                continue
            # The very first row: no id was stored before, whatever its own id is.
            first = 1 if files[start].first == 1 else self._footer(files[start])[0].first_id
            last = self._footer(file)[-1].last_id
            # The hub has used ids after its last stored message for what is not stored: they are
            # covered too.
            if is_last and extent is not None and file.last >= extent.last_seq:
                last = max(last, extent.upto)
            found.append(CoveredIds(first, last))
            start = index + 1
        # A hub that has not sealed a message yet: there are no files, and none are missing.
        if not files and extent is not None and not extent.last_seq:
            found = [CoveredIds(1, extent.upto)]
        if extent is not None:
            # A file may be visible before the hub has noted that it is.
            found = [CoveredIds(first, min(last, extent.upto)) for first, last in found]
        for gap in (*self._recorded(), *(extent.gaps if extent is not None else ())):
            found = [rest for each in found for rest in _without(each, gap)]
        return [each for each in found if each.first <= each.last]

    def _listed(self, extent: LakeExtent | None) -> list[LakeFile]:
        """All files in order. Folders that have not changed since the last call are not listed."""
        if self._list_changed():
            self._arrange()
        if extent is not None and (not self._files or self._files[-1].last < extent.last_seq):
            # On a network file system time stamps may be old.
            self._folders.clear()
            if self._list_changed():
                self._arrange()
        return self._files

    def _list_changed(self) -> bool:
        seen: set[Path] = set()
        changed = False
        for folder in _subfolders(self._lake / "messages"):
            try:
                status = folder.stat()
                # A folder that changes twice within the resolution of its time stamp (some ms)
                # looks unchanged. So one that has just changed is listed again.
                is_settled = time.time_ns() - status.st_mtime_ns > _SETTLED_NS
                mark = (status.st_ino, status.st_mtime_ns) if is_settled else None
                known = self._folders.get(folder)
                if known is None or mark is None or known[0] != mark:
                    paths = list(folder.iterdir())
                    self._folders[folder] = (mark, list(self._own(folder, paths)))
                    changed = True
            except (FileNotFoundError, NotADirectoryError):
                continue
            seen.add(folder)
        for folder in [each for each in self._folders if each not in seen]:
            del self._folders[folder]
            changed = True
        return changed

    def _own(self, folder: Path, paths: Sequence[Path]) -> Iterator[LakeFile]:
        for path in paths:
            file = parse_name("messages", folder.name.removeprefix("date="), path)
            if file is not None and file.node == self._node:
                yield file

    def _arrange(self) -> None:
        listed = [file for _, each in self._folders.values() for file in each]
        files = counting(self._lake, "messages", listed)
        files.sort(key=lambda file: (file.first, -file.last))
        arranged: list[LakeFile] = []
        for file in files:
            # A file within a larger one: a compaction has exchanged the folder while we listed.
            if not arranged or file.last > arranged[-1].last:
                arranged.append(file)
        self._files = arranged
        present = {file.path for file in arranged}
        self._footers = {path: each for path, each in self._footers.items() if path in present}

    def _recorded(self) -> Iterator[tuple[int, int]]:
        """Ranges of ids that the table `gaps` has for messages."""
        for file in find(self._lake, ("gaps",)):
            if file.node != self._node:
                continue
            if file.path not in self._gaps:
                self._gaps[file.path] = list(_message_gaps(file.path))
            yield from self._gaps[file.path]

    def _footer(self, file: LakeFile) -> _Footer:
        footer = self._footers.get(file.path)
        if footer is None:
            metadata = _reading(file.path, lambda: pq.read_metadata(file.path))
            footer = self._footers[file.path] = tuple(_groups(metadata, file.path))
        return footer

    # Positions in the files.

    def _file_index(self, files: list[LakeFile], identifier: int) -> int:
        """The index of the file that has this id, or the next higher one."""
        return bisect_left(
            range(len(files)), identifier, key=lambda index: self._footer(files[index])[-1].last_id
        )

    def shares(self, first: int, last: int) -> list[IdShare]:
        """How the messages of a range are distributed, for splitting it into tasks: row groups of
        single files, or several files together where there are many."""
        with self._lock:
            files = self._files
            begin, end = self._file_index(files, first), self._file_index(files, last) + 1
            files = files[begin:end]
            width = max(len(files) // _SHARES, 1)
            found: list[IdShare] = []
            for start in range(0, len(files), width):
                run = files[start : start + width]
                if len(run) == 1:
                    found += [
                        IdShare(group.first_id, group.last_id, group.rows, group.size_bytes)
                        for group in self._footer(run[0])
                    ]
                else:
                    rows = run[-1].last - run[0].first + 1
                    ends = self._footer(run[0])[0].first_id, self._footer(run[-1])[-1].last_id
                    # As if those in between were like the first and the last file.
                    known = (*self._footer(run[0]), *self._footer(run[-1]))
                    size_bytes = sum(group.size_bytes for group in known) * rows
                    size_bytes //= max(sum(group.rows for group in known), 1)
                    found.append(IdShare(*ends, rows, size_bytes))
        return [each for each in found if each.first <= last and each.last >= first]

    def first_since(self, time_us: int, first: int, last: int) -> int | None:
        """The first id of a range whose time is this one or later; None if there is none."""
        with self._lock:
            files = self._files
            # Times grow with ids, but for clocks that were set back: the search finds a file that
            # reaches this time, and its rows are compared one by one.
            index = bisect_left(
                range(len(files)),
                time_us,
                key=lambda file_index: max(
                    group.last_time for group in self._footer(files[file_index])
                ),
            )
            index = max(index, self._file_index(files, first))
            files = files[index : index + 2]
        for file in files:
            for batch in self._read_file(file, first, last, ["id", "time"], time_us):
                ids, times = _integers(batch, "id"), _integers(batch, "time")
                fits = ((times >= time_us) & (ids >= first) & (ids <= last)).nonzero()[0]
                if len(fits):
                    return int(ids[fits[0]])
        return None

    # Reading.

    def read(
        self, first: int, last: int, names: Sequence[str], *, since_us: int = 0
    ) -> Iterator[tuple[pa.RecordBatch | None, int]]:
        """Batches with the messages of a range, each with the id up to which the range is complete
        then; None for a batch where only that id has changed. `id` must be among the columns.

        A batch may have messages outside the range, which the caller has to filter. Messages before
        `since_us` may be left out."""
        with self._lock:
            files = self._files
            index = self._file_index(files, first)
        for file in files[index:]:
            with self._lock:
                footer = self._footer(file)
            if footer[0].first_id > last:
                break
            for batch in self._read_file(file, first, last, names, since_us):
                upto = int(_integers(batch, "id")[-1]) if len(batch) else 0
                if upto >= first:
                    yield batch, min(upto, last)
            yield None, min(footer[-1].last_id, last)
        yield None, last

    def group_at(self, first: int, last: int) -> SealedGroup | None:
        """The first row group with ids of a range; None if there is none."""
        with self._lock:
            files = self._files
            index = self._file_index(files, first)
            if index == len(files):
                return None
            for number, group in enumerate(self._footer(files[index])):
                if group.last_id >= first:
                    if group.first_id > last:
                        return None
                    return SealedGroup(
                        files[index], number, group.rows, group.first_id, group.last_id
                    )
        return None

    def open_group(self, group: SealedGroup, names: Sequence[str]) -> RowGroupFile | None:
        """A row group as a file of its own; None where it can't be given away as it is."""
        path = group.file.path
        opened: RowGroupFile | None = _reading(
            path, lambda: self._group_files.open(path, group.number, names)
        )
        return opened

    def groups(
        self, first: int, last: int, since_us: int, until_us: int, *, oldest_first: bool
    ) -> Iterator[tuple[LakeFile, int, int, int]]:
        """Row groups that may have messages of these ids and times, in order: file, index, and
        their first and last id."""
        with self._lock:
            files = list(self._files)
        if oldest_first:
            files = files[self._file_index(files, first) :]
        for file in files if oldest_first else reversed(files):
            with self._lock:
                footer = self._footer(file)
            if footer[0].first_id > last if oldest_first else footer[-1].last_id < first:
                return
            found = [
                (file, index, group.first_id, group.last_id)
                for index, group in enumerate(footer)
                if group.first_id <= last
                and group.last_id >= first
                and group.last_time >= since_us
                and group.first_time < until_us
            ]
            yield from found if oldest_first else reversed(found)

    def read_group(
        self, file: LakeFile, index: int, names: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """The rows of one row group."""
        with self._lock:
            group = self._footer(file)[index]
        count = min(max(_BATCH_BYTES * group.rows // max(group.size_bytes, 1), 1), _BATCH_ROWS)
        opened = _reading(
            file.path, lambda: pq.ParquetFile(file.path, page_checksum_verification=True)
        )
        with opened:
            batches = opened.iter_batches(count, [index], list(names), use_threads=False)
            while (batch := _reading(file.path, lambda: next(batches, None))) is not None:
                yield batch

    def _read_file(
        self, file: LakeFile, first: int, last: int, names: Sequence[str], since_us: int
    ) -> Iterator[pa.RecordBatch]:
        with self._lock:
            footer = self._footer(file)
        chosen = [
            index
            for index, group in enumerate(footer)
            if group.first_id <= last and group.last_id >= first and group.last_time >= since_us
        ]
        if not chosen:
            return
        rows = sum(footer[index].rows for index in chosen)
        size_bytes = sum(footer[index].size_bytes for index in chosen)
        count = min(max(_BATCH_BYTES * rows // max(size_bytes, 1), 1), _BATCH_ROWS)
        opened = _reading(
            file.path, lambda: pq.ParquetFile(file.path, page_checksum_verification=True)
        )
        with opened:
            batches = opened.iter_batches(count, chosen, list(names), use_threads=False)
            while (batch := _reading(file.path, lambda: next(batches, None))) is not None:
                yield batch


def _groups(metadata: Any, path: Path) -> Iterator[_RowGroup]:
    names = metadata.schema.names
    identifier, moment = names.index("id"), names.index("time")
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        ids, times = group.column(identifier).statistics, group.column(moment).statistics
        if ids is None or times is None or not (ids.has_min_max and times.has_min_max):
            raise LakeError(f"{path} has no statistics")
        yield _RowGroup(
            group.num_rows, group.total_byte_size, ids.min, ids.max, times.min, times.max
        )


def _message_gaps(path: Path) -> Iterator[tuple[int, int]]:
    rows = _reading(path, lambda: pq.read_table(path, partitioning=None))
    for row in rows.to_pylist():
        if row["table"] == "messages":
            yield row["first"], row["last"]


def _reading(path: Path, work: Callable[[], Any]) -> Any:
    """Raises FileNotFoundError for what was moved, LakeError for what can't be read."""
    try:
        return work()
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise LakeError(f"{path} can't be read: {reason}") from error


def _without(segment: CoveredIds, gap: tuple[int, int]) -> Iterator[CoveredIds]:
    first, last = gap
    if first > segment.last or last < segment.first:
        yield segment
        return
    if segment.first < first:
        yield CoveredIds(segment.first, first - 1)
    if segment.last > last:
        yield CoveredIds(last + 1, segment.last)


def _integers(batch: pa.RecordBatch, name: str) -> Any:
    return numbers(pa.chunked_array([batch.column(name)]))


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(folder.glob("date=*"))
    except FileNotFoundError:
        return []
