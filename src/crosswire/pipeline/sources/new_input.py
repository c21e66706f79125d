"""What is new in the input of a stream: rows of a lake by their numbers, captures by their bytes.

A lake's rows are numbered without holes, node by node, and the names of its files contain the first
and the last number. So a stream stores the last number of each node, not file names: files may be
compacted while it runs or is stopped. Captures may grow: of each one it stores how far it was read.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from crosswire.capture.headers import CaptureLayout
from crosswire.errors import InvalidInput
from crosswire.lake.files import LakeFile, parse_name
from crosswire.lake.terms import counted
from crosswire.pipeline.sources.capture_reader import Split, advance, capture_state, open_at
from crosswire.pipeline.sources.inputs import Inputs, search
from crosswire.pipeline.sources.lake_input import check_contents, foreign_name, hole_before
from crosswire.pipeline.sources.rotation import in_rotation
from crosswire.pipeline.tables.missing_rows import MissingLakeRows

__all__ = [
    "CaptureRead",
    "InputPosition",
    "LakeRows",
    "NewInput",
    "NewInputFinder",
    "check_files",
    "files_of",
]

_HEAD_BYTES: Final = 64
_SETTLED_S: Final = 10.0
_LAKE_TABLES: Final = {"taps": "wire", "messages": "messages", "ledgers": "ledger"}
"""The fields of InputPosition, and the tables of a lake."""

Listing = Callable[[str], Iterable[tuple[str, int]]]
"""Of a folder of a lake: the path and the size of each of its files."""


class CaptureRead(msgspec.Struct, frozen=True):
    """How far a capture was read. `head` is a checksum of its first bytes: if these change, another
    capture has got the same name."""

    size_bytes: int
    changed_ns: int
    head: int
    end: int
    layout: CaptureLayout | None


class InputPosition(msgspec.Struct, frozen=True):
    """How far the input was read: the last `seq` by folder and node, captures by path.

    `alone`: there is no wire at all, so silver.messages is made of the hub's own messages.
    """

    taps: dict[str, dict[str, int]] = {}
    messages: dict[str, dict[str, int]] = {}
    ledgers: dict[str, dict[str, int]] = {}
    captures: dict[str, CaptureRead] = {}
    alone: bool = False

    def with_rows(self, table: str, rows: LakeRows) -> InputPosition:
        """The position after reading these rows of `taps`, `messages` or `ledgers`."""
        folders = dict(getattr(self, table))
        folders[rows.folder] = {**folders.get(rows.folder, {}), rows.node: rows.last}
        return msgspec.structs.replace(self, **{table: folders})

    def with_capture(self, path: str, read: CaptureRead) -> InputPosition:
        """The position after reading a capture that far."""
        return msgspec.structs.replace(self, captures={**self.captures, path: read})

    def rows(self, table: str) -> list[LakeRows]:
        """All rows of a table that were read, by folder and node."""
        folders: dict[str, dict[str, int]] = getattr(self, table)
        return [
            LakeRows(folder, node, 0, last)
            for folder, nodes in folders.items()
            for node, last in nodes.items()
        ]


class LakeRows(NamedTuple):
    """Rows of a lake's folder: those of a node from `first` to `last`."""

    folder: str
    node: str
    first: int
    last: int


class NewInput(msgspec.Struct, frozen=True):
    """The input of one batch, and the position after it; `lagging` are the tables that have more
    input than the batch takes in, `missing` rows that should be in it and are nowhere."""

    position: InputPosition
    taps: tuple[LakeRows, ...] = ()
    messages: tuple[LakeRows, ...] = ()
    ledgers: tuple[LakeRows, ...] = ()
    captures: tuple[Split, ...] = ()
    files: int = 0
    size_bytes: int = 0
    lagging: frozenset[str] = frozenset()
    missing: tuple[MissingLakeRows, ...] = ()

    @property
    def rows(self) -> tuple[LakeRows, ...]:
        """The rows of all tables of lakes."""
        return (*self.taps, *self.messages, *self.ledgers)


Order = tuple[str, str, float]


class _InputPiece(NamedTuple):
    """A file, or a part of it; `table` is its field of InputPosition and NewInput; `order` sorts
    the pieces of all tables by their time; `hole` are rows that are missing before it."""

    order: Order
    size_bytes: int
    table: str
    rows: LakeRows | None = None
    splits: tuple[Split, ...] = ()
    path: str = ""
    read: CaptureRead | None = None
    hole: MissingLakeRows | None = None


class NewInputFinder:
    """Finds new input, and cuts it into batches of about `batch_bytes`, at least a file.

    `patient`: captures that are still being written are left for later if they are compressed or
    very short. `records`: read ledger and messages of hubs too, where there is a wire.
    """

    def __init__(
        self,
        paths: Iterable[str],
        listing: Listing,
        *,
        batch_bytes: int,
        split_bytes: int,
        patient: bool,
        records: bool,
    ) -> None:
        self._paths = list(paths)
        self._listing = listing
        self._batch_bytes = batch_bytes
        self._split_bytes = split_bytes
        self._patient = patient
        self._records = records

    def look(self, position: InputPosition) -> Iterator[NewInput]:
        """All input after the position, batch by batch. Raises InvalidInput."""
        inputs = search(self._paths)
        wired = [*self._captured(inputs, position), *self._rows("taps", inputs.taps, position)]
        if position.alone and wired:
            raise InvalidInput(
                "the stream was begun with the messages of a hub, and now there is a wire: start a "
                "new folder"
            )
        pieces = wired
        ledgers, messages = inputs.ledgers, inputs.messages
        if not (wired or position.captures or position.taps):
            ledgers = tuple(filter(_is_untapped, ledgers))
            messages = tuple(filter(_is_untapped, messages))
            position = msgspec.structs.replace(position, alone=True)
        if self._records:
            pieces += self._rows("ledgers", ledgers, position)
        if self._records or position.alone:
            pieces += self._rows("messages", messages, position)
        # Rows of a message in wire, ledger and messages should be in the same batch, or the next
        # one: else a stream that catches up carries a lot of state.
        pieces.sort(key=lambda piece: piece.order)
        yield from self._batches(pieces, position)

    def _batches(self, pieces: list[_InputPiece], position: InputPosition) -> Iterator[NewInput]:
        last = {piece.table: piece_index for piece_index, piece in enumerate(pieces)}
        start, size_bytes = 0, 0
        for index, piece in enumerate([*pieces, None]):
            full = piece is None or size_bytes + piece.size_bytes > self._batch_bytes
            if full and index > start:
                lagging = frozenset(table for table in last if last[table] >= index)
                new_input = _joined_pieces(position, pieces[start:index], lagging)
                yield new_input
                position, start, size_bytes = new_input.position, index, 0
            if piece is not None:
                size_bytes += piece.size_bytes

    def _rows(
        self, table: str, folders: Iterable[str], position: InputPosition
    ) -> Iterator[_InputPiece]:
        for folder in folders:
            last = getattr(position, table).get(folder, {})
            name = _LAKE_TABLES[table]
            for rows, size, order, hole in _following(name, folder, last, self._listing):
                yield _InputPiece(order, size, table, rows, hole=hole)

    def _captured(self, inputs: Inputs, position: InputPosition) -> Iterator[_InputPiece]:
        for number, path in enumerate(in_rotation(inputs.captures)):
            state = capture_state(path)
            if state is None:
                continue  # removed since it was listed
            before = position.captures.get(path)
            if before is not None and state == (before.size_bytes, before.changed_ns):
                continue
            with open_at(path) as file:
                head = zlib.crc32(file.read(_HEAD_BYTES))
            if state.size_bytes < _HEAD_BYTES and self._patient:
                continue  # its header may not be complete
            # A capture that shrank, or begins with other bytes, is another one: start over.
            same = before is not None and before.head == head and state.size_bytes >= before.end
            start = before.end if before is not None and same else 0
            layout = before.layout if before is not None and same else None
            if same and layout is None and start:
                raise InvalidInput(f"{path} is compressed, and has changed after it was read")
            splits, end, layout = advance(path, self._split_bytes, start, layout)
            unchanged_s = time.time() - state.changed_ns / 1e9
            if layout is None and self._patient and unchanged_s < _SETTLED_S:
                continue
            read = CaptureRead(*state, head, end, layout)
            if splits:
                size = state.size_bytes - start
                order = ("", "", float(number))
                yield _InputPiece(order, size, "captures", None, tuple(splits), path, read)


def _is_untapped(folder: str) -> bool:
    """Whether the hub of this folder has no tap: no wire files, and none being spooled."""
    path = Path(folder)
    lake = path.parents[2] if path.suffix else path.parent
    return not (lake / "wire").is_dir() and not any((lake / ".spool").glob("*"))


def check_files(new_input: NewInput, listing: Listing) -> None:
    """Look at the files of a batch before any table is made of them. Raises InvalidInput for one
    that does not hold what its name promises."""
    for table, name in _LAKE_TABLES.items():
        parsed = map(_parsed, files_of(getattr(new_input, table), listing))
        files = [each._replace(table=name) for each in parsed if each is not None]
        for file, reason in check_contents(files):
            raise _refused(str(file.path), reason)


def _refused(path: str, reason: str) -> InvalidInput:
    return InvalidInput(
        f"{path} {reason}; remove what does not belong there, and the stream goes on"
    )


def files_of(rows: Iterable[LakeRows], listing: Listing) -> list[str]:
    """The files that hold any of these rows, each row in one of them.

    A copy of a file is left out, however it came there. Raises InvalidInput if two files share only
    a part of their rows.
    """
    found: dict[str, None] = {}
    reached: dict[tuple[str, str], LakeFile] = {}
    wanted: dict[str, list[LakeRows]] = {}
    for each in rows:
        wanted.setdefault(each.folder, []).append(each)
    for folder, parts in wanted.items():
        for file, _ in _in_order(list(_files(folder, listing))):
            if not any(
                file.node == part.node and file.first <= part.last and file.last >= part.first
                for part in parts
            ):
                continue
            key = (folder, file.node)
            before = reached.get(key)
            if before is None or file.first > before.last:
                reached[key] = file
                found[str(file.path)] = None
            elif file.last > before.last:
                raise InvalidInput(
                    f"{before.path} and {file.path} both hold rows {file.first} to {before.last}: "
                    "remove the wrong one"
                )
    return list(found)


def _joined_pieces(
    position: InputPosition, pieces: list[_InputPiece], lagging: frozenset[str]
) -> NewInput:
    found: dict[str, list[LakeRows]] = {"taps": [], "messages": [], "ledgers": []}
    splits: list[Split] = []
    for piece in pieces:
        if piece.rows is not None:
            found[piece.table].append(piece.rows)
            position = position.with_rows(piece.table, piece.rows)
        elif piece.read is not None:
            splits += piece.splits
            position = position.with_capture(piece.path, piece.read)
    return NewInput(
        position,
        **{table: _joined(rows) for table, rows in found.items()},
        captures=tuple(splits),
        files=len(pieces),
        size_bytes=sum(piece.size_bytes for piece in pieces),
        lagging=lagging,
        missing=tuple(piece.hole for piece in pieces if piece.hole is not None),
    )


def _joined(rows: list[LakeRows]) -> tuple[LakeRows, ...]:
    """Ranges that follow one another, joined to one."""
    joined: dict[tuple[str, str], LakeRows] = {}
    for each in rows:
        key = (each.folder, each.node)
        before = joined.get(key)
        joined[key] = each if before is None else each._replace(first=before.first)
    return tuple(joined.values())


# ------------------------------------------------------------------------------------------ lake


def _following(
    table: str, folder: str, last: dict[str, int], listing: Listing
) -> Iterator[tuple[LakeRows, int, Order, MissingLakeRows | None]]:
    """The rows of each file after the `last` ones, in order, with the file's size, its order among
    the files of all tables, and the rows that are missing before it.

    The order within a day is the share of the day's rows before the file: file names have no times,
    and files of different tables that cover about the same time should be read together.
    """
    # What was read is left out before anything is sorted: a lake may have many thousand files. The
    # last one of it is kept, for what is missing after it.
    files = [each for each in _files(folder, listing) if _is_unread(each[0], last)]
    if _has_hole(files, last):
        # A listing is not atomic: it may lack a file that was there before another that it has.
        # Files appear in order, so a second listing has it, unless it was removed for good. What
        # appeared after the first listing is left for the next batch.
        newest = {file.node: 0 for file, _ in files}
        for file, _ in files:
            newest[file.node] = max(newest[file.node], file.last)
        files = [
            each
            for each in _files(folder, listing)
            if _is_unread(each[0], last) and _is_old(each[0], newest)
        ]
    ends: dict[tuple[str, str], tuple[int, int]] = {}
    for file, _ in files:
        low, high = ends.get((file.node, file.date), (file.first, file.last))
        ends[file.node, file.date] = min(low, file.first), max(high, file.last)
    reached = dict(last)
    dates: dict[str, str] = {}
    before: dict[str, LakeFile] = {}
    for file, size in _in_order(files):
        first = max(file.first, reached.get(file.node, -1) + 1)
        if first <= file.last:
            hole = None
            if file.node in reached and first > reached[file.node] + 1:
                named = file._replace(table=table)
                hole = hole_before(named, reached[file.node], before.get(file.node))
            reached[file.node] = file.last
            # A clock may have been set back over midnight: rows must stay in order of number.
            date = dates[file.node] = max(file.date, dates.get(file.node, ""))
            low, high = ends[file.node, file.date]
            share = (file.first - low) / (high - low + 1) if date == file.date else 1.0
            rows = LakeRows(folder, file.node, first, file.last)
            yield rows, size, (date, file.node, share), hole
        if file.last == reached.get(file.node):
            before[file.node] = file


def _is_unread(file: LakeFile, last: dict[str, int]) -> bool:
    return file.last >= last.get(file.node, -1)


def _is_old(file: LakeFile, newest: dict[str, int]) -> bool:
    return file.last <= newest.get(file.node, -1)


def _has_hole(files: list[tuple[LakeFile, int]], last: dict[str, int]) -> bool:
    reached = dict(last)
    for file, _ in _in_order(files):
        before = reached.get(file.node)
        if before is not None and file.first > before + 1:
            return True
        reached[file.node] = max(file.last, reached.get(file.node, -1))
    return False


def _in_order(files: list[tuple[LakeFile, int]]) -> list[tuple[LakeFile, int]]:
    return sorted(files, key=lambda each: (each[0].node, each[0].first, -each[0].last))


def _files(folder: str, listing: Listing) -> Iterator[tuple[LakeFile, int]]:
    """The files of a folder, but for those that a later leader of the hub has written again."""
    listed = list(_listed(folder, listing))
    chosen = set(counted([file for file, _ in listed]))
    yield from (each for each in listed if each[0] in chosen)


def _listed(folder: str, listing: Listing) -> Iterator[tuple[LakeFile, int]]:
    for name, size in listing(folder):
        file = _parsed(name)
        if file is None:
            raise _refused(name, foreign_name(folder.rstrip("/").rpartition("/")[2]))
        yield file, size


@lru_cache(maxsize=1 << 17)
def _parsed(name: str) -> LakeFile | None:
    # Remembered: a stream lists the same names every second.
    path = Path(name)
    file = parse_name("", path.parent.name.removeprefix("date="), path)
    # Path would damage a URL (`s3://`): the name is kept as it was listed.
    return None if file is None else file._replace(path=name)  # type: ignore[arg-type]
