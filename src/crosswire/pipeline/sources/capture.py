"""Capture files: classic pcap and pcapng, plain or compressed, record by record.

The header and the descriptions of interfaces are read in Python, records by the compiled kernels,
block by block into one buffer that stays in the processor's cache. A plain file is walked once from
end to end, exactly, to find places where it can be split: between two records, where no fragmented
datagram is open, with all that the records behind it need to know.
"""

from __future__ import annotations

import gzip
import zlib
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
    FLOW_BYTES,
    FULL,
    LINKS,
    MORE,
    PACKET,
    RAW,
    Packets,
    find_segments,
    walk_classic,
    walk_ng,
)
from crosswire.pipeline.sources.reassembly import Segment

__all__ = [
    "CaptureLayout",
    "Segments",
    "Split",
    "advance",
    "is_capture",
    "read",
    "segment_of",
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

_HEAD_BYTES: Final = 24
_BLOCK_RECORDS: Final = 16_384
_BLOCK_BYTES: Final = 8 * 1024 * 1024
_MOST_INTERFACES: Final = 65_536


@dataclass(frozen=True)
class Interface:
    """`unit` above 0 is a power of ten per second, below 0 a power of two."""

    link: int
    unit: int = 6
    offset_s: int = 0
    snap_length: int = 0


@dataclass(frozen=True)
class CaptureLayout:
    """What a reader in the middle of a file must know of its beginning."""

    ng: bool
    little: bool
    nanoseconds: bool = False
    interfaces: tuple[Interface, ...] = ()
    time_ns: int = 0
    """Of the record before: pcapng has packets without a time of their own."""


@dataclass(frozen=True)
class Split:
    """A part of a file: the bytes [start, end), or all of it where it is compressed."""

    path: str
    start: int = 0
    end: int | None = None
    layout: CaptureLayout | None = None

    @property
    def size_bytes(self) -> int:
        """Of a part whose end is known."""
        assert self.end is not None
        return self.end - self.start


@dataclass(frozen=True)
class Segments:
    """TCP segments of a block of records, in the order of these, with a flow for each.

    Payloads are slices of `data`, whose first byte is at the place `base` of the file.
    """

    data: npt.NDArray[np.uint8]
    base: int
    packets: Packets
    flows: npt.NDArray[np.uint8]
    is_joined: bool = False
    """It came in fragments: `data` is not the file's."""

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Where they are in the file: none before one that was captured earlier."""
        offsets: npt.NDArray[np.int64] = self.packets["start"] + self.base
        return offsets


def segment_of(packet: Any, data: npt.NDArray[np.uint8]) -> Segment:
    """One alone; its payload is a slice of `data`."""
    start, size = int(packet["start"]), int(packet["size"])
    return Segment(
        bool(packet["forward"]),
        int(packet["time_ns"]),
        int(packet["number"]),
        int(packet["acknowledgement"]),
        int(packet["flags"]),
        int(packet["length"]),
        data[start : start + size].tobytes(),
    )


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
        return _split(_Walk(path), file, 0, size, split_bytes)[0]


def advance(
    path: str, split_bytes: int, start: int = 0, layout: CaptureLayout | None = None
) -> tuple[list[Split], int, CaptureLayout | None]:
    """The parts of what a file that may still grow has from `start` on, as far as its records are
    whole; where the last one ends, and the layout that whoever goes on there must know.

    A compressed file has no parts: no layout is given back. Raises InvalidInput.
    """
    with _opened(path) as file:
        if file.read(4)[:2] == _GZIP or _magic(file) == _ZSTD:
            return [Split(path)], file.seek(0, 2), None
        size = file.seek(0, 2)
        if not size:
            return [], 0, None
        walk = _Walk(path, layout)
        parts, end = _split(walk, file, start if layout is not None else 0, size, split_bytes)
        return parts, end, walk.layout


def _split(
    walk: _Walk, file: BinaryIO, start: int, stop: int, split_bytes: int
) -> tuple[list[Split], int]:
    """The parts from `start` to `stop`, and where the last whole record ends."""
    parts: list[Split] = []
    room, fragments = _BlockBuffers(_BLOCK_RECORDS), Fragments()
    file.seek(start)
    layout, end = walk.layout, start
    block_bytes = min(split_bytes // 4 + 64, _BLOCK_BYTES)
    for records in walk.records(file, start, stop, block_bytes):
        if layout is None:
            start, layout = records.start, records.layout
        *_, pieces = room.find(records)
        for _ in _joined(records, pieces, fragments):
            pass  # what matters is which ones are still open
        end = records.end
        last_time = int(records.times[-1]) if len(records.times) else 0
        if end - start >= split_bytes and not fragments.open(last_time):
            parts.append(Split(walk.path, start, end, layout))
            start, layout = end, walk.layout
    if end > start:
        parts.append(Split(walk.path, start, end, layout))
    return parts, end


# ------------------------------------------------------------------------------------------ read


def read(split: Split, *, block_bytes: int = _BLOCK_BYTES) -> Iterator[Segments]:
    """The TCP segments of a part of a file, in order; each lot is there until the next one is asked
    for. Raises InvalidInput.

    A last record that is not whole, as a capture that was killed leaves it, is left out.
    """
    walk = _Walk(split.path, split.layout)
    room, fragments = _BlockBuffers(_BLOCK_RECORDS), Fragments()
    with _opened(split.path) as file:
        source = file if split.layout is not None else _decompressed(file, split.path)
        if split.start:
            source.seek(split.start)
        for records in walk.records(source, split.start, split.end, block_bytes):
            yield from _segments(records, room, fragments)


def whole(path: str) -> Split | None:
    """A plain file as far as it goes now, None for a compressed one. Raises InvalidInput."""
    with _opened(path) as file:
        head = file.read(_HEAD_BYTES)
        if head[:2] == _GZIP or head[:4] == _ZSTD:
            return None
        if not head:
            raise InvalidInput(f"{path} is empty")
        walk = _Walk(path)
        start = walk.begin(np.frombuffer(head, np.uint8))
        return Split(path, start, file.seek(0, 2), walk.layout)


def _opened(path: str) -> BinaryIO:
    try:
        return Path(path).open("rb", buffering=0)
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
    """Records in `data`, which begins at the place `base` of the file; in the file they go from
    `start` to `end`, and `layout` is what whoever begins there must know."""

    data: npt.NDArray[np.uint8]
    base: int
    start: int
    end: int
    layout: CaptureLayout
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]
    links: npt.NDArray[np.int64]


class _Walk:
    """Goes over the records of a file, and keeps what it learns on the way in `layout`: None before
    the head was read."""

    def __init__(self, path: str, layout: CaptureLayout | None = None) -> None:
        self.path = path
        self.layout = layout
        self._columns = np.zeros((4, _BLOCK_RECORDS), np.int64)

    def records(
        self, file: BinaryIO, base: int, stop: int | None, block_bytes: int
    ) -> Iterator[_Records]:
        """From `base`, where the file stands, to `stop`, or to its end. They are there until the
        next ones are asked for. Raises InvalidInput."""
        buffer = np.empty(max(block_bytes, _HEAD_BYTES), np.uint8)
        held = 0
        while True:
            if stop is not None and len(buffer) > stop - base:
                buffer = buffer[: stop - base]
            filled = self._fill(file, buffer, held)
            if stop is not None and filled < len(buffer):
                raise InvalidInput(f"can't read {self.path} up to byte {stop}: it is shorter now")
            data = buffer[:filled]
            position = 0
            if filled > held:
                if self.layout is None:
                    position = self.begin(data)
                for found in self._batches(data, position, base):
                    yield found
                    position = found.end - base
            elif self.layout is None:
                raise InvalidInput(f"{self.path} is empty")
            if filled < len(buffer) or (stop is not None and base + filled == stop):
                return
            held = filled - position
            if not position:
                # A record that is larger than all there is room for: the limits are the walk's.
                buffer = np.concatenate((buffer, np.empty_like(buffer)))
            else:
                buffer[:held] = buffer[position:filled].copy()
            base += position

    def _fill(self, file: BinaryIO, buffer: npt.NDArray[np.uint8], held: int) -> int:
        """Read behind what is held; how much is there, less than there is room for at the end."""
        room = buffer.data
        try:
            while held < len(buffer):
                count = file.readinto(room[held:])  # type: ignore[attr-defined]
                if not count:
                    break
                held += count
        except (EOFError, OSError, ValueError, zlib.error) as error:
            raise InvalidInput(f"can't read {self.path}: {error}") from error
        return held

    def begin(self, data: npt.NDArray[np.uint8]) -> int:
        """Read the file's head; the position behind it."""
        head = data[:_HEAD_BYTES].tobytes()
        if head[:4] == _NG:
            self.layout = CaptureLayout(ng=True, little=True)
            return 0
        if head[:4] not in _CLASSIC or len(head) < _HEAD_BYTES:
            raise InvalidInput(f"{self.path} is no capture file: neither pcap nor pcapng")
        little, nanoseconds = _CLASSIC[head[:4]]
        link = int.from_bytes(head[20:24], "little" if little else "big") & 0xFFFF
        if link not in LINKS:
            raise InvalidInput(f"{self.path} has packets of link type {link}, which we can't read")
        self.layout = CaptureLayout(
            ng=False, little=little, nanoseconds=nanoseconds, interfaces=(Interface(link),)
        )
        return _HEAD_BYTES

    def _batches(self, data: npt.NDArray[np.uint8], position: int, base: int) -> Iterator[_Records]:
        """All whole records from `position` on."""
        why = FULL
        while why in (FULL, BLOCK):
            start, layout = position, self.layout
            assert layout is not None
            count, position, why = self._walked(data, position, layout)
            if why == CORRUPT:
                raise InvalidInput(f"{self.path} is damaged at byte {base + position}")
            if count and layout.ng:
                self.layout = replace(layout, time_ns=int(self._columns[2, count - 1]))
            if why == BLOCK:
                end = self._read_block(data, position, base)
                why = MORE if end == position else BLOCK
                position = end
            columns = self._columns[:, :count]
            yield _Records(data, base, base + start, base + position, layout, *columns)

    def _walked(
        self, data: npt.NDArray[np.uint8], position: int, layout: CaptureLayout
    ) -> tuple[int, int, int]:
        starts, sizes, times, links = self._columns
        if not layout.ng:
            links[:] = layout.interfaces[0].link
            order = layout.little, layout.nanoseconds
            return walk_classic(data, position, *order, starts, sizes, times)
        described = layout.interfaces
        return walk_ng(
            data,
            position,
            layout.little,
            np.array([each.link for each in described], np.int64),
            np.array([each.unit for each in described], np.int64),
            np.array([each.offset_s for each in described], np.int64),
            described[0].snap_length if described else 0,
            layout.time_ns,
            starts,
            sizes,
            times,
            links,
        )

    def _read_block(self, data: npt.NDArray[np.uint8], position: int, base: int) -> int:
        """A section header or the description of an interface: the position behind it, or the same
        one if it is not whole."""
        assert self.layout is not None
        head = data[position : position + 12].tobytes()
        is_section = head[:4] == _NG
        if is_section and len(head) == 12:
            order = {b"\x4d\x3c\x2b\x1a": True, b"\x1a\x2b\x3c\x4d": False}.get(head[8:12])
            if order is None:
                raise InvalidInput(f"{self.path} is damaged at byte {base + position}")
            self.layout = CaptureLayout(ng=True, little=order, time_ns=self.layout.time_ns)
        byte_order: Any = "little" if self.layout.little else "big"
        length = int.from_bytes(head[4:8], byte_order)
        if length < 16 or length % 4 or length > 1 << 20:
            raise InvalidInput(f"{self.path} is damaged at byte {base + position}")
        if position + length > len(data):
            return position
        if not is_section:
            body = data[position + 8 : position + length - 4].tobytes()
            described = (*self.layout.interfaces, _interface(body, byte_order))
            if len(described) > _MOST_INTERFACES:
                raise InvalidInput(f"{self.path} describes too many interfaces")
            self.layout = replace(self.layout, interfaces=described)
        return position + length


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


class _BlockBuffers:
    """For what is found in a block: used again for the next one."""

    def __init__(self, most: int) -> None:
        self._packets = np.empty(most, PACKET)
        self._flows = np.empty(most * FLOW_BYTES, np.uint8)
        self._fragments = np.empty((most, 3), np.int64)

    def find(
        self, records: _Records
    ) -> tuple[Packets, npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Segments, their flows, and fragments."""
        columns = records.starts, records.sizes, records.times, records.links
        room = self._packets, self._flows, self._fragments
        found, pieces = find_segments(records.data, *columns, *room)
        flows = self._flows[: found * FLOW_BYTES].reshape(found, FLOW_BYTES)
        return self._packets[:found], flows, self._fragments[:pieces]


def _segments(records: _Records, room: _BlockBuffers, fragments: Fragments) -> Iterator[Segments]:
    packets, flows, pieces = room.find(records)
    given = 0
    for packet, index, before in _joined(records, pieces, fragments):
        found = _alone(packet, int(records.times[index]), records)
        if found is None:
            continue
        if given < before:
            yield Segments(records.data, records.base, packets[given:before], flows[given:before])
            given = before
        offset = records.base + int(records.starts[index])
        own, flow = found
        yield Segments(packet, offset - int(own["start"][0]), own, flow, is_joined=True)
    if given < len(packets):
        yield Segments(records.data, records.base, packets[given:], flows[given:])


def _joined(
    records: _Records, pieces: npt.NDArray[np.int64], fragments: Fragments
) -> Iterator[tuple[npt.NDArray[np.uint8], int, int]]:
    """Whole packets that these records complete, the record that brought the last piece of each,
    and how many segments came before it."""
    for index, start, before in pieces.tolist():
        end = int(records.starts[index] + records.sizes[index])
        packet = records.data[start:end].tobytes()
        joined = fragments.add(packet, int(records.times[index]))
        if joined is not None:
            yield np.frombuffer(joined, np.uint8), index, before


def _alone(
    packet: npt.NDArray[np.uint8], time_ns: int, records: _Records
) -> tuple[Packets, npt.NDArray[np.uint8]] | None:
    """The segment in an IP packet, if there is one."""
    columns = np.array([[0], [len(packet)], [time_ns], [RAW]], np.int64)
    own, flow, _ = _BlockBuffers(1).find(
        _Records(packet, 0, 0, len(packet), records.layout, *columns)
    )
    return (own, flow) if len(own) else None
