"""Capture files: classic pcap and pcapng, plain or compressed, record by record.

The header and the descriptions of interfaces are read in Python, records by the compiled kernels. A
plain file is walked once from end to end, exactly, to find places where it can be split: between
two records, where no fragmented datagram is open, with all that the records behind it need to know.
"""

from __future__ import annotations

import gzip
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from crosswire.errors import InvalidInput
from crosswire.pipeline.sources.fragments import Fragments
from crosswire.pipeline.sources.packets import (
    BLOCK,
    CORRUPT,
    FRAGMENT,
    FULL,
    LINKS,
    RAW,
    SEGMENT,
    find_segments,
    walk_classic,
    walk_ng,
)

__all__ = [
    "Layout",
    "Segments",
    "Split",
    "advance",
    "is_capture",
    "mapped",
    "read",
    "read_mapped",
    "splits",
    "whole",
]

_CLASSIC: Final = {
    b"\xa1\xb2\xc3\xd4": (False, False),
    b"\xd4\xc3\xb2\xa1": (True, False),
    b"\xa1\xb2\x3c\x4d": (False, True),
    b"\x4d\x3c\xb2\xa1": (True, True),
}
_NG: Final = b"\x0a\x0d\x0d\x0a"
_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"

_BATCH_RECORDS: Final = 16_384
_BATCH_BYTES: Final = 8 * 1024 * 1024
_CHUNK_BYTES: Final = 16 * 1024 * 1024
_MOST_INTERFACES: Final = 65_536


@dataclass(frozen=True)
class Interface:
    """`unit` above 0 is a power of ten per second, below 0 a power of two."""

    link: int
    unit: int = 6
    offset_s: int = 0
    snap_length: int = 0


@dataclass(frozen=True)
class Layout:
    """What a reader in the middle of a file must know of its beginning."""

    ng: bool
    little: bool
    nanoseconds: bool = False
    interfaces: tuple[Interface, ...] = ()


@dataclass(frozen=True)
class Split:
    """A part of a file: the bytes [start, end), or all of it where it is compressed."""

    path: str
    start: int = 0
    end: int | None = None
    layout: Layout | None = None

    @property
    def size_bytes(self) -> int:
        """Of a part whose end is known."""
        assert self.end is not None
        return self.end - self.start


@dataclass(frozen=True)
class Segments:
    """TCP segments of a batch of records, column by column.

    `records` is the place of each in the file, `chosen` the rows of the columns that are segments,
    `data` what payloads are slices of.
    """

    data: npt.NDArray[np.uint8]
    chosen: npt.NDArray[np.int64]
    records: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]
    flows: npt.NDArray[np.uint8]
    forwards: npt.NDArray[np.bool_]
    numbers: npt.NDArray[np.int64]
    acknowledgements: npt.NDArray[np.int64]
    flags: npt.NDArray[np.int16]
    lengths: npt.NDArray[np.int32]
    payload_starts: npt.NDArray[np.int64]
    payload_sizes: npt.NDArray[np.int64]


def is_capture(path: Path) -> bool:
    """Does this file begin like a capture, or like something compressed that could be one?"""
    with path.open("rb") as file:
        magic = file.read(4)
    return magic in _CLASSIC or magic in (_NG, _ZSTD) or magic[:2] == _GZIP


# ---------------------------------------------------------------------------------------- splits


def splits(path: str, split_bytes: int) -> list[Split]:
    """The parts in which a file can be read. Raises InvalidInput for what is no capture."""
    with _opened(path) as file:
        if file.read(4)[:2] == _GZIP or _magic(file) == _ZSTD:
            return [Split(path)]
        size = file.seek(0, 2)
        if size <= split_bytes:
            return [Split(path)]
        # Unmapped when nobody looks at it any more: batches are views of it.
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        walk = _Walk(path, min(split_bytes, _BATCH_BYTES))
        return _split(walk, data, walk.begin(data), split_bytes)[0]


def advance(
    path: str, split_bytes: int, start: int = 0, layout: Layout | None = None
) -> tuple[list[Split], int, Layout | None]:
    """The parts of what a file that may still grow has from `start` on, as far as its records are
    whole; where the last one ends, and the layout that whoever goes on there must know.

    A compressed file has no parts: no layout is given back. Raises InvalidInput.
    """
    with _opened(path) as file:
        if file.read(4)[:2] == _GZIP or _magic(file) == _ZSTD:
            return [Split(path)], file.seek(0, 2), None
        if not file.seek(0, 2):
            return [], 0, None
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        walk = _Walk(path, min(split_bytes, _BATCH_BYTES))
        if layout is None:
            start = walk.begin(data)
        else:
            walk.layout = layout
        parts, end = _split(walk, data, start, split_bytes)
        return parts, end, walk.layout


def _split(
    walk: _Walk, data: npt.NDArray[np.uint8], start: int, split_bytes: int
) -> tuple[list[Split], int]:
    """The parts from `start` on, and where the last whole record ends."""
    parts: list[Split] = []
    layout, end = walk.layout, start
    fragments = Fragments()
    for records, end in walk.batches(data, start, len(data), 0):
        columns = _find(data, records)
        _join_fragments(data, columns, records, fragments)
        last_time = int(records.times[-1]) if len(records.times) else 0
        if end - start >= split_bytes and not fragments.open(last_time):
            parts.append(Split(walk.path, start, end, layout))
            start, layout = end, walk.layout
    if end > start:
        parts.append(Split(walk.path, start, end, layout))
    return parts, end


# ------------------------------------------------------------------------------------------ read


def read(split: Split) -> Iterator[Segments]:
    """The TCP segments of a part of a file, batch by batch; those that came in fragments are behind
    the others of their batch. Raises InvalidInput.

    A last record that is not whole, as a capture that was killed leaves it, is left out.
    """
    if split.layout is not None:
        mapping, base = mapped(split)
        yield from read_mapped(split, np.frombuffer(mapping, np.uint8), base)
        return
    with _opened(split.path) as file:
        yield from _read_stream(_Walk(split.path), _decompressed(file, split.path), Fragments())


def whole(path: str) -> Split | None:
    """A plain file as far as it goes now, None for a compressed one. Raises InvalidInput."""
    with _opened(path) as file:
        head = file.read(24)
        if head[:2] == _GZIP or head[:4] == _ZSTD:
            return None
        if not head:
            raise InvalidInput(f"{path} is empty")
        walk = _Walk(path)
        start = walk.begin(np.frombuffer(head, np.uint8))
        return Split(path, start, file.seek(0, 2), walk.layout)


def mapped(split: Split) -> tuple[mmap.mmap, int]:
    """A part of a plain file in memory, and the place of its first byte in the file.

    It is unmapped when nobody looks at it any more: batches are views of it. Raises InvalidInput.
    """
    assert split.end is not None
    page = split.start - split.start % mmap.ALLOCATIONGRANULARITY
    with _opened(split.path) as file:
        size = split.end - page
        try:
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ, offset=page), page
        except (OSError, ValueError) as error:
            raise InvalidInput(
                f"can't read {split.path} up to byte {split.end}: {error}"
            ) from error


def read_mapped(split: Split, data: npt.NDArray[np.uint8], base: int) -> Iterator[Segments]:
    """Like `read`, of what `mapped` gave."""
    assert split.layout is not None
    walk = _Walk(split.path)
    walk.layout = split.layout
    fragments = Fragments()
    for records, _ in walk.batches(data, split.start - base, len(data), base):
        yield from _segments(data, records, fragments)


def _read_stream(walk: _Walk, file: BinaryIO, fragments: Fragments) -> Iterator[Segments]:
    rest = b""
    base = 0
    begun = False
    try:
        while chunk := file.read(_CHUNK_BYTES):
            whole = rest + chunk if rest else chunk
            data = np.frombuffer(whole, np.uint8)
            position = 0
            if not begun:
                position, begun = walk.begin(data), True
            for records, following in walk.batches(data, position, len(data), base):
                yield from _segments(data, records, fragments)
                position = following
            rest = whole[position:]
            base += position
    except (EOFError, OSError, ValueError) as error:
        raise InvalidInput(f"can't read {walk.path}: {error}") from error
    if not begun:
        raise InvalidInput(f"{walk.path} is empty")


def _opened(path: str) -> BinaryIO:
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise InvalidInput(f"can't read {path}: {error.strerror}") from error


def _magic(file: BinaryIO) -> bytes:
    file.seek(0)
    magic = file.read(4)
    file.seek(0)
    return magic


def _decompressed(file: BinaryIO, path: str) -> BinaryIO:
    magic = _magic(file)
    if magic[:2] == _GZIP:
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    if magic == _ZSTD:
        import pyarrow as pa

        return pa.CompressedInputStream(path, "zstd")  # type: ignore[no-any-return]
    return file


@dataclass(frozen=True)
class _Records:
    """`base` is the place of the buffer's first byte in the file."""

    base: int
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]
    links: npt.NDArray[np.int64]


class _Walk:
    """Goes over the records of a file, and keeps what it learns on the way in `layout`."""

    def __init__(self, path: str, batch_bytes: int = _BATCH_BYTES) -> None:
        self.path = path
        self._batch_bytes = batch_bytes
        self.layout = Layout(ng=False, little=False)

    def begin(self, data: npt.NDArray[np.uint8]) -> int:
        """Read the file's head; the position behind it."""
        head = data[:24].tobytes()
        if head[:4] == _NG:
            self.layout = Layout(ng=True, little=True)
            return 0
        if head[:4] not in _CLASSIC or len(head) < 24:
            raise InvalidInput(f"{self.path} is no capture file: neither pcap nor pcapng")
        little, nanoseconds = _CLASSIC[head[:4]]
        link = int.from_bytes(head[20:24], "little" if little else "big") & 0xFFFF
        if link not in LINKS:
            raise InvalidInput(f"{self.path} has packets of link type {link}, which we can't read")
        self.layout = Layout(
            ng=False, little=little, nanoseconds=nanoseconds, interfaces=(Interface(link),)
        )
        return 24

    def batches(
        self, data: npt.NDArray[np.uint8], position: int, end: int, base: int
    ) -> Iterator[tuple[_Records, int]]:
        """Records and the position behind them, batch by batch."""
        while True:
            starts, sizes, times, links = np.zeros((4, _BATCH_RECORDS), np.int64)
            layout = self.layout
            if layout.ng:
                described = layout.interfaces
                count, position, why = walk_ng(
                    data,
                    position,
                    end,
                    layout.little,
                    np.array([each.link for each in described], np.int64),
                    np.array([each.unit for each in described], np.int64),
                    np.array([each.offset_s for each in described], np.int64),
                    described[0].snap_length if described else 0,
                    self._batch_bytes,
                    starts,
                    sizes,
                    times,
                    links,
                )
            else:
                links[:] = layout.interfaces[0].link
                count, position, why = walk_classic(
                    data,
                    position,
                    end,
                    layout.little,
                    layout.nanoseconds,
                    self._batch_bytes,
                    starts,
                    sizes,
                    times,
                )
            if why == CORRUPT:
                raise InvalidInput(f"{self.path} is damaged at byte {base + position}")
            whole = True
            if why == BLOCK:
                position, whole = self._read_block(data, position, end, base)
            yield (
                _Records(base, starts[:count], sizes[:count], times[:count], links[:count]),
                position,
            )
            if why not in (FULL, BLOCK) or not whole:
                return

    def _read_block(
        self, data: npt.NDArray[np.uint8], position: int, end: int, base: int
    ) -> tuple[int, bool]:
        """A section header or the description of an interface: the position behind it, and
        whether it was whole."""
        head = data[position : position + 12].tobytes()
        is_section = head[:4] == _NG
        if is_section and len(head) == 12:
            order = {b"\x4d\x3c\x2b\x1a": True, b"\x1a\x2b\x3c\x4d": False}.get(head[8:12])
            if order is None:
                raise InvalidInput(f"{self.path} is damaged at byte {base + position}")
            self.layout = Layout(ng=True, little=order)
        byte_order: Any = "little" if self.layout.little else "big"
        length = int.from_bytes(head[4:8], byte_order)
        if length < 16 or length % 4 or length > 1 << 20:
            raise InvalidInput(f"{self.path} is damaged at byte {base + position}")
        if position + length > end:
            return position, False
        if not is_section:
            body = data[position + 8 : position + length - 4].tobytes()
            described = (*self.layout.interfaces, _interface(body, byte_order))
            if len(described) > _MOST_INTERFACES:
                raise InvalidInput(f"{self.path} describes too many interfaces")
            self.layout = replace(self.layout, interfaces=described)
        return position + length, True


def _interface(body: bytes, order: Any) -> Interface:
    """Link type 2 · reserved 2 · snap length 4 · options: code 2, length 2, value, padding to 4."""
    link, snap_length = int.from_bytes(body[:2], order), int.from_bytes(body[4:8], order)
    unit, offset_s, at = 6, 0, 8
    while at + 4 <= len(body):
        code = int.from_bytes(body[at : at + 2], order)
        size = int.from_bytes(body[at + 2 : at + 4], order)
        value = body[at + 4 : at + 4 + size]
        if code == 9 and size == 1:
            unit = -(value[0] & 0x7F) if value[0] & 0x80 else value[0]
        elif code == 14 and size == 8:
            offset_s = int.from_bytes(value, order, signed=True)
        elif code == 0:
            break
        at += 4 + (size + 3 & -4)
    # What we can't read is passed over: other interfaces of the file may be of use.
    return Interface(link if link in LINKS else -1, unit, offset_s, snap_length)


# -------------------------------------------------------------------------------------- segments

_Columns = dict[str, Any]


def _find(data: npt.NDArray[np.uint8], records: _Records) -> _Columns:
    count = len(records.starts)
    columns: _Columns = {
        "status": np.zeros(count, np.uint8),
        "ip_starts": np.zeros(count, np.int64),
        "flows": np.zeros((count, 36), np.uint8),
        "forwards": np.zeros(count, np.bool_),
        "numbers": np.zeros(count, np.int64),
        "acknowledgements": np.zeros(count, np.int64),
        "flags": np.zeros(count, np.int16),
        "lengths": np.zeros(count, np.int32),
        "payload_starts": np.zeros(count, np.int64),
        "payload_sizes": np.zeros(count, np.int64),
    }
    readable = np.where(records.links < 0, 0, records.sizes)
    find_segments(data, records.starts, readable, records.links, count, *columns.values())
    return columns


def _join_fragments(
    data: npt.NDArray[np.uint8], columns: _Columns, records: _Records, fragments: Fragments
) -> Iterator[tuple[bytes, int]]:
    """Whole packets that these records complete, and the record that brought the last piece."""
    whole = []
    for index in np.flatnonzero(columns["status"] == FRAGMENT).tolist():
        end = records.starts[index] + records.sizes[index]
        packet = data[columns["ip_starts"][index] : end].tobytes()
        joined = fragments.add(packet, int(records.times[index]))
        if joined is not None:
            whole.append((joined, index))
    return iter(whole)


def _segments(
    data: npt.NDArray[np.uint8], records: _Records, fragments: Fragments
) -> Iterator[Segments]:
    columns = _find(data, records)
    places = records.starts + records.base
    if (columns["status"] == SEGMENT).any():
        yield _chosen(data, columns, places, records.times)
    for packet, index in _join_fragments(data, columns, records, fragments):
        alone = np.frombuffer(packet, np.uint8)
        one = _Records(
            0,
            np.zeros(1, np.int64),
            np.array([len(packet)], np.int64),
            records.times[index : index + 1],
            np.array([RAW], np.int64),
        )
        found = _find(alone, one)
        if found["status"][0] == SEGMENT:
            yield _chosen(alone, found, places[index : index + 1], one.times)


def _chosen(
    data: npt.NDArray[np.uint8],
    columns: _Columns,
    places: npt.NDArray[np.int64],
    times: npt.NDArray[np.int64],
) -> Segments:
    names = (
        "flows",
        "forwards",
        "numbers",
        "acknowledgements",
        "flags",
        "lengths",
        "payload_starts",
        "payload_sizes",
    )
    return Segments(
        data=data,
        chosen=np.flatnonzero(columns["status"] == SEGMENT).astype(np.int64),
        records=places,
        times=times,
        **{name: columns[name] for name in names},
    )
