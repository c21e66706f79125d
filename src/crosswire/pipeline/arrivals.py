"""What is new in the input of a stream: rows of a lake by their numbers, captures by their bytes.

A lake's rows are numbered without holes, node by node, and its files say in their names which ones
they hold. So a stream remembers the last number of each node, not names: files may be compacted
while it runs or stands still. Captures may grow: of each one it remembers how far it was read.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from crosswire.errors import InvalidInput
from crosswire.lake.files import LakeFile, parse_name
from crosswire.pipeline.inputs import Inputs, search
from crosswire.pipeline.sources.capture import Layout, Split, advance

__all__ = ["Arrivals", "Arrived", "CaptureRead", "Position", "Rows", "files_of"]

_HEAD_BYTES: Final = 64
_SETTLED_S: Final = 10.0

Listing = Callable[[str], Iterable[tuple[str, int]]]
"""Of a folder of a lake: the path and the size of each of its files."""


class CaptureRead(msgspec.Struct, frozen=True):
    """How far a capture was read. `head` is a checksum of its first bytes: where these change, the
    name was given to another capture."""

    size_bytes: int
    changed_ns: int
    head: int
    end: int
    layout: Layout | None


class Position(msgspec.Struct, frozen=True):
    """How far the input was read: the last `seq` by folder and node, captures by path."""

    taps: dict[str, dict[str, int]] = {}
    messages: dict[str, dict[str, int]] = {}
    captures: dict[str, CaptureRead] = {}

    def with_rows(self, table: str, rows: Rows) -> Position:
        folders = dict(getattr(self, table))
        folders[rows.folder] = {**folders.get(rows.folder, {}), rows.node: rows.last}
        return msgspec.structs.replace(self, **{table: folders})

    def with_capture(self, path: str, read: CaptureRead) -> Position:
        return msgspec.structs.replace(self, captures={**self.captures, path: read})


class Rows(NamedTuple):
    """Rows of a lake's folder: those of a node from `first` to `last`."""

    folder: str
    node: str
    first: int
    last: int


class Arrived(msgspec.Struct, frozen=True):
    """What one batch is made of, and the position behind it."""

    position: Position
    taps: tuple[Rows, ...] = ()
    messages: tuple[Rows, ...] = ()
    captures: tuple[Split, ...] = ()
    files: int = 0
    size_bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.taps or self.messages or self.captures)


class _Piece(NamedTuple):
    """A file, or a part of it, to be read next."""

    order: tuple[str, ...]
    size_bytes: int
    tap: Rows | None = None
    message: Rows | None = None
    splits: tuple[Split, ...] = ()
    path: str = ""
    read: CaptureRead | None = None


class Arrivals:
    """Looks for what is new. `batch_bytes` is about how much a batch takes in: at least a file.

    `patient`: a compressed capture is left alone until nothing has been written to it for a while.
    """

    def __init__(
        self,
        paths: Iterable[str],
        listing: Listing,
        *,
        batch_bytes: int,
        split_bytes: int,
        patient: bool,
    ) -> None:
        self._paths = list(paths)
        self._listing = listing
        self._batch_bytes = batch_bytes
        self._split_bytes = split_bytes
        self._patient = patient

    def look(self, position: Position) -> Iterator[Arrived]:
        """All that is there and was not read yet, batch by batch. Raises InvalidInput."""
        inputs = search(self._paths)
        pieces = list(self._captured(inputs, position))
        for folder in inputs.taps:
            rows = _following(folder, position.taps.get(folder, {}), self._listing)
            pieces += [_Piece(order, size, tap=each) for each, size, order in rows]
        if position.messages and pieces:
            raise InvalidInput(
                "the stream was begun with the messages of a hub, and now there is a wire to look "
                "at: start a new folder"
            )
        if not (pieces or position.captures or position.taps):
            for folder in filter(_is_untapped, inputs.messages):
                rows = _following(folder, position.messages.get(folder, {}), self._listing)
                pieces += [_Piece(order, size, message=each) for each, size, order in rows]
        pieces.sort(key=lambda piece: piece.order)
        batch: list[_Piece] = []
        for piece in pieces:
            if batch and sum(each.size_bytes for each in batch) + piece.size_bytes > (
                self._batch_bytes
            ):
                yield (arrived := _together(position, batch))
                position, batch = arrived.position, []
            batch.append(piece)
        if batch:
            yield _together(position, batch)

    def _captured(self, inputs: Inputs, position: Position) -> Iterator[_Piece]:
        for path in inputs.captures:
            try:
                state = Path(path).stat()
            except FileNotFoundError:
                continue  # taken away while we looked
            before = position.captures.get(path)
            if before is not None and (state.st_size, state.st_mtime_ns) == (
                before.size_bytes,
                before.changed_ns,
            ):
                continue
            with Path(path).open("rb") as file:
                head = zlib.crc32(file.read(_HEAD_BYTES))
            if state.st_size < _HEAD_BYTES and self._patient:
                continue  # hardly begun
            same = before is not None and before.head == head and state.st_size >= before.end
            start = before.end if before is not None and same else 0
            layout = before.layout if before is not None and same else None
            if same and layout is None and start:
                raise InvalidInput(f"{path} is compressed, and has changed after it was read")
            splits, end, layout = advance(path, self._split_bytes, start, layout)
            unchanged_s = time.time() - state.st_mtime
            if layout is None and self._patient and unchanged_s < _SETTLED_S:
                continue
            read = CaptureRead(state.st_size, state.st_mtime_ns, head, end, layout)
            if splits:
                size = state.st_size - start
                yield _Piece(("", path), size, splits=tuple(splits), path=path, read=read)


def _is_untapped(messages: str) -> bool:
    """Nothing says that the hub of this folder records its wire, now or later."""
    lake = Path(messages).parent
    return not (lake / "wire").is_dir() and not any((lake / ".spool").glob("*"))


def files_of(rows: Iterable[Rows], listing: Listing) -> list[str]:
    """The files that hold any of these rows."""
    found: dict[str, None] = {}
    wanted: dict[str, list[Rows]] = {}
    for each in rows:
        wanted.setdefault(each.folder, []).append(each)
    for folder, parts in wanted.items():
        for file, _ in _files(folder, listing):
            for part in parts:
                if file.node == part.node and file.first <= part.last and file.last >= part.first:
                    found[str(file.path)] = None
    return list(found)


def _together(position: Position, pieces: list[_Piece]) -> Arrived:
    taps: list[Rows] = []
    messages: list[Rows] = []
    splits: list[Split] = []
    for piece in pieces:
        if piece.tap is not None:
            taps.append(piece.tap)
            position = position.with_rows("taps", piece.tap)
        elif piece.message is not None:
            messages.append(piece.message)
            position = position.with_rows("messages", piece.message)
        elif piece.read is not None:
            splits += piece.splits
            position = position.with_capture(piece.path, piece.read)
    return Arrived(
        position,
        _joined(taps),
        _joined(messages),
        tuple(splits),
        len(pieces),
        sum(piece.size_bytes for piece in pieces),
    )


def _joined(rows: list[Rows]) -> tuple[Rows, ...]:
    """Those that follow one another as one."""
    joined: dict[tuple[str, str], Rows] = {}
    for each in rows:
        key = (each.folder, each.node)
        before = joined.get(key)
        joined[key] = each if before is None else each._replace(first=before.first)
    return tuple(joined.values())


# ------------------------------------------------------------------------------------------ lake


def _following(
    folder: str, last: dict[str, int], listing: Listing
) -> Iterator[tuple[Rows, int, tuple[str, ...]]]:
    """The rows of each file behind these, in order, with its size and its place among all."""
    files = list(_files(folder, listing))
    if _has_hole(files, last):
        # A folder is not listed in one moment: a file may be missing that was there before one
        # that was found. Files come in order, so now it is found, or gone for good.
        newest = {file.node: 0 for file, _ in files}
        for file, _ in files:
            newest[file.node] = max(newest[file.node], file.last)
        files = [each for each in _files(folder, listing) if _is_old(each[0], newest)]
    reached = dict(last)
    for file, size in _in_order(files):
        first = max(file.first, reached.get(file.node, -1) + 1)
        if first <= file.last:
            reached[file.node] = file.last
            place = (file.date, file.node, f"{file.first:020}")
            yield Rows(folder, file.node, first, file.last), size, place


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
    for name, size in listing(folder):
        path = Path(name)
        file = parse_name("", path.parent.name.removeprefix("date="), path)
        if file is not None:
            # A URL is no path: it is given back as it was found.
            yield file._replace(path=name), size  # type: ignore[arg-type]
