"""Capture files block by block with compiled kernels, and parts of them for several tasks.

File headers and descriptions of interfaces are read in Python (`capture.headers`), records by the
kernels, into one buffer that stays in the processor's cache. A plain file is walked once from
beginning to end to find positions where it can be split: between two records, where no fragmented
datagram is open. Guessing a boundary in the middle of a file would fail on captures that contain
captures. Each part carries the layout that its reader needs to know of what precedes it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from pyarrow import fs

from crosswire.capture.flows import FLOW_BYTES
from crosswire.capture.fragments import Fragments
from crosswire.capture.headers import (
    CaptureLayout,
    Interface,
    damaged,
    decompressed,
    describe_block,
    describe_file,
    is_compressed,
    open_capture,
    refused,
    truncated,
)
from crosswire.capture.layout import FILE_HEADER_BYTES, LINK_RAW, MOST_INTERFACES
from crosswire.capture.packet_counts import (
    CLOCK_STEP,
    CLOCK_STEP_NS,
    FRAGMENT,
    NAMES,
    TRUNCATED,
    PacketCounts,
)
from crosswire.capture.reassembly import Segment
from crosswire.errors import InvalidInput
from crosswire.pipeline.sources.packet_kernels import (
    BLOCK,
    CORRUPT,
    FULL,
    MORE,
    PACKET,
    Packets,
    find_segments,
    walk_classic,
    walk_ng,
)
from crosswire.pipeline.stores import TableStore, is_local, local_path, open_store

__all__ = [
    "CaptureState",
    "Segments",
    "Split",
    "advance",
    "capture_state",
    "open_at",
    "plain_file",
    "read",
    "segment_of",
    "splits",
]

_BLOCK_RECORDS: Final = 16_384
_BLOCK_BYTES: Final = 8 * 1024 * 1024


@dataclass(frozen=True)
class Split:
    """A part of a file: the bytes [start, end), or all of it where it is compressed.

    With `skip_damaged` it is read up to where it can't be read on. `counts` is what became of its
    packets, if they were counted already. It is sent to tasks as JSON.
    """

    path: str
    start: int = 0
    end: int | None = None
    layout: CaptureLayout | None = None
    skip_damaged: bool = False
    counts: PacketCounts | None = field(default=None, compare=False)

    @property
    def size_bytes(self) -> int:
        """The length of a part whose end is known."""
        assert self.end is not None
        return self.end - self.start


@dataclass(frozen=True)
class Segments:
    """TCP segments of a block of records, in their order, with the flow's key for each.

    Payloads are slices of `data`, whose first byte is the file's byte `base`.
    """

    data: npt.NDArray[np.uint8]
    base: int
    packets: Packets
    flows: npt.NDArray[np.uint8]
    is_joined: bool = False
    """The one segment was joined from fragments: `data` is not the file's."""

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Positions in the file, or for a joined one that of its last fragment: they grow in the
        order of capture."""
        offsets: npt.NDArray[np.int64] = self.packets["start"] + self.base
        return offsets


def segment_of(packet: Any, data: npt.NDArray[np.uint8]) -> Segment:
    """A row of PACKET as the Python reassembly takes it; its payload is copied out of `data`."""
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


class CaptureState(NamedTuple):
    """The size of a file, and when it was changed."""

    size_bytes: int
    changed_ns: int


def capture_state(path: str) -> CaptureState | None:
    """The state of a capture file, by path or URL; None if there is none. Raises InvalidInput."""
    if is_local(path):
        try:
            state = Path(local_path(path)).stat()
        except FileNotFoundError:
            return None
        return CaptureState(state.st_size, state.st_mtime_ns)
    files, name = _stored(path)
    try:
        found = files.get_file_info(name)
    except OSError as error:
        raise InvalidInput(f"can't read {path}: {str(error).splitlines()[0]}") from error
    if found.type == fs.FileType.NotFound:
        return None
    return CaptureState(found.size or 0, found.mtime_ns or 0)


def open_at(path: str) -> BinaryIO:
    """A capture file, by path or URL. Raises InvalidInput."""
    if is_local(path):
        return open_capture(local_path(path))
    files, name = _stored(path)
    try:
        return files.open_input_file(name)  # type: ignore[no-any-return]
    except OSError as error:
        raise InvalidInput(f"can't read {path}: {str(error).splitlines()[0]}") from error


def _stored(path: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    folder, _, name = path.rpartition("/")
    files, base = _store_of(folder).arrow()
    return files, f"{base}/{name}"


@lru_cache(maxsize=16)
def _store_of(folder: str) -> TableStore:
    # Opened once: a stream looks every second, and a task opens many files.
    return open_store(folder)


# ---------------------------------------------------------------------------------------- splits


def splits(path: str, split_bytes: int, *, skip_damaged: bool = False) -> list[Split]:
    """Parts of about `split_bytes` in which a file can be read. Raises InvalidInput for what is no
    capture, or damaged."""
    whole = Split(path, skip_damaged=skip_damaged)
    with open_at(path) as file:
        if is_compressed(file.read(FILE_HEADER_BYTES)):
            return [whole]
        size = file.seek(0, 2)
        if size <= split_bytes:
            return [whole]
        walk = _Walk(path, skip_damaged=skip_damaged)
        return _split(walk, file, 0, size, split_bytes)[0]


def advance(
    path: str, split_bytes: int, start: int = 0, layout: CaptureLayout | None = None
) -> tuple[list[Split], int, CaptureLayout | None]:
    """The parts of a file that may still grow, from `start` to its last whole record; where that
    ends, and the layout that the next call needs in order to continue there.

    A compressed file is one part and has no layout: it can't be continued. Raises InvalidInput.
    """
    with open_at(path) as file:
        if is_compressed(file.read(FILE_HEADER_BYTES)):
            return [Split(path)], file.seek(0, 2), None
        size = file.seek(0, 2)
        if not size:
            return [], 0, None
        walk = _Walk(path, layout, may_grow=True)
        parts, end = _split(walk, file, start if layout is not None else 0, size, split_bytes)
        return parts, end, walk.layout


def _split(
    walk: _Walk, file: BinaryIO, start: int, stop: int, split_bytes: int
) -> tuple[list[Split], int]:
    """The parts from `start` to `stop`, each with its counts, and where the last whole record
    ends."""
    parts: list[Split] = []
    buffers, fragments = _BlockBuffers(_BLOCK_RECORDS), Fragments()
    file.seek(start)
    layout, end = walk.layout, start

    def part() -> Split:
        made = Split(walk.path, start, end, layout, walk.skip_damaged, walk.counts)
        walk.counts = PacketCounts()
        return made

    # A part ends where a block does: blocks are smaller than parts, so that these get their size.
    block_bytes = min(split_bytes // 4 + 64, _BLOCK_BYTES)
    for records in walk.records(file, start, stop, block_bytes):
        if layout is None:
            start, layout = records.start, records.layout
        for _ in _segments(records, buffers, fragments, walk.counts):
            pass  # only what is counted, and which datagrams are still open, matters here
        end = records.end
        last_time = int(records.times[-1]) if len(records.times) else 0
        # The reader of a part sees only its own fragments: a datagram must not span two parts.
        if end - start >= split_bytes and not fragments.open(last_time):
            parts.append(part())
            start, layout = end, walk.layout
    if end > start or (walk.counts.packets[TRUNCATED] and layout is not None):
        parts.append(part())
    return parts, end


# ------------------------------------------------------------------------------------------ read


def read(
    split: Split, counts: PacketCounts | None = None, *, block_bytes: int = _BLOCK_BYTES
) -> Iterator[Segments]:
    """The TCP segments of a part of a file, in order; what became of its packets is added to
    `counts`. Raises InvalidInput.

    Each item is valid until the next one is asked for: buffers are reused.
    """
    walk = _Walk(split.path, split.layout, skip_damaged=split.skip_damaged)
    walk.counts = counts or PacketCounts()
    buffers, fragments = _BlockBuffers(_BLOCK_RECORDS), Fragments()
    with open_at(split.path) as file:
        source = file if split.layout is not None else decompressed(file, split.path)
        if split.start:
            source.seek(split.start)
        for records in walk.records(source, split.start, split.end, block_bytes):
            yield from _segments(records, buffers, fragments, walk.counts)


def plain_file(path: str, *, skip_damaged: bool = False) -> Split | None:
    """A plain file up to its present end, None for a compressed one. Raises InvalidInput."""
    with open_at(path) as file:
        head = file.read(FILE_HEADER_BYTES)
        if is_compressed(head):
            return None
        if not head:
            raise InvalidInput(f"{path} is empty")
        size = file.seek(0, 2)
        if len(head) < FILE_HEADER_BYTES and skip_damaged:
            return Split(path, 0, size, None, skip_damaged)
        layout, start = describe_file(head, path)
        return Split(path, start, size, layout, skip_damaged)


@dataclass(frozen=True)
class _Records:
    """Records in `data`, whose first byte is the file's byte `base`. They are the file's bytes from
    `start` to `end`; `layout` holds at `start`."""

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
    """Walks over the records of a file. `layout` holds at its current position; None before the
    file's header was read.

    A record that the file ends in is left for later if it `may_grow`. Else that is damage, like
    bytes that are no record: an error, or with `skip_damaged` the end, which is counted.
    """

    def __init__(
        self,
        path: str,
        layout: CaptureLayout | None = None,
        *,
        skip_damaged: bool = False,
        may_grow: bool = False,
    ) -> None:
        self.path = path
        self.layout = layout
        self.skip_damaged = skip_damaged
        self.counts = PacketCounts()
        self._may_grow = may_grow
        self._columns = np.zeros((4, _BLOCK_RECORDS), np.int64)
        self._described: tuple[Interface, ...] = ()
        self._interfaces = np.zeros((3, MOST_INTERFACES), np.int64)
        self._fault: InvalidInput | None = None

    def records(
        self, file: BinaryIO, base: int, stop: int | None, block_bytes: int
    ) -> Iterator[_Records]:
        """The records from `base`, the file's current position, to `stop`, or to its end, in blocks
        that are valid until the next one is asked for. Raises InvalidInput."""
        buffer = np.empty(max(block_bytes, FILE_HEADER_BYTES), np.uint8)
        held = 0
        while True:
            # Never beyond the part: what follows is another task's, or was appended since.
            if stop is not None and len(buffer) > stop - base:
                buffer = buffer[: stop - base]
            filled = self._fill(file, buffer, held)
            if stop is not None and filled < len(buffer) and self._fault is None:
                raise InvalidInput(f"can't read {self.path} up to byte {stop}: it is shorter now")
            data = buffer[:filled]
            position = 0
            if filled > held:
                if self.layout is None:
                    head = data[:FILE_HEADER_BYTES].tobytes()
                    if not self._is_whole(head):
                        self._end(filled, base)
                        return
                    self.layout, position = describe_file(head, self.path)
                for found in self._batches(data, position, base):
                    yield found
                    position = found.end - base
            elif self.layout is None:
                raise self._fault or InvalidInput(f"{self.path} is empty")
            if filled < len(buffer) or (stop is not None and base + filled == stop):
                self._end(filled - position, base + position)
                return
            if self._fault is not None:
                rest = self._unread(file) if stop is None else stop - base - filled
                self._end(filled - position + rest, base + position)
                return
            held = filled - position
            if not position:
                # A record that is larger than the buffer. It can't grow without end: the kernels
                # refuse a record of more than MOST_CAPTURED_BYTES when they read its header.
                buffer = np.concatenate((buffer, np.empty_like(buffer)))
            else:
                # Copied twice, since the two ranges may overlap.
                buffer[:held] = buffer[position:filled].copy()
            base += position

    def _is_whole(self, head: bytes) -> bool:
        """Whether these first bytes are a file's header; one that is cut is damage."""
        if len(head) == FILE_HEADER_BYTES:
            return True
        if self._fault is None:
            try:
                describe_file(head, self.path)
            except InvalidInput as error:
                self._fault = error
        return False

    def _end(self, rest: int, position: int) -> None:
        """After the last record that can be read; `rest` bytes are left. Raises InvalidInput."""
        if self._fault is None and rest and not self._may_grow:
            self._fault = truncated(self.path, position)
        if self._fault is None:
            return
        if not self.skip_damaged:
            raise refused(self._fault)
        self.counts.add_fault(str(self._fault), rest)

    def _unread(self, file: BinaryIO) -> int:
        """How many bytes follow."""
        buffer, total = np.empty(_BLOCK_BYTES, np.uint8), 0
        while self.skip_damaged and (count := self._fill(file, buffer, 0)):
            total += count
        return total

    def _fill(self, file: BinaryIO, buffer: npt.NDArray[np.uint8], held: int) -> int:
        """Fill the buffer after its first `held` bytes; how many it has then: not all at the end of
        the file, or where it can't be read on."""
        view = buffer.data
        # Of a compressed file a call at a time: one that fails would take along what the calls
        # before it have decompressed.
        readinto = getattr(file, "readinto1", None) or file.readinto  # type: ignore[attr-defined]
        try:
            while held < len(buffer):
                count = readinto(view[held:])
                if not count:
                    break
                held += count
        except (EOFError, OSError, ValueError, zlib.error) as error:
            self._fault = InvalidInput(f"can't read {self.path}: {error}")
        return held

    def _batches(self, data: npt.NDArray[np.uint8], position: int, base: int) -> Iterator[_Records]:
        """All whole records of `data` from `position` on."""
        reason = FULL
        while reason in (FULL, BLOCK):
            start, layout = position, self.layout
            assert layout is not None
            count, position, reason = self._walked(data, position, layout)
            if reason == CORRUPT:
                self._fault = damaged(self.path, base + position)
            after = layout
            if count:
                after = replace(layout, time_ns=int(self._columns[2, count - 1]))
            if reason == BLOCK:
                rest = data[position:].data
                try:
                    after, length = describe_block(after, rest, self.path, base + position)
                except InvalidInput as error:
                    self._fault, length = error, 0
                position += length
                if not length:
                    reason = MORE
            self.layout = after
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
        links_of, units, offsets = self._columns_of(described)
        return walk_ng(
            data,
            position,
            layout.little,
            links_of,
            units,
            offsets,
            described[0].snap_length if described else 0,
            layout.time_ns,
            starts,
            sizes,
            times,
            links,
        )

    def _columns_of(self, described: tuple[Interface, ...]) -> npt.NDArray[np.int64]:
        """Link types, units and offsets of the interfaces.

        Those that were there before are not converted again: a file may describe one more after
        every packet.
        """
        known = self._described
        if described is not known:
            start = len(known) if described[: len(known)] == known else 0
            for index, each in enumerate(described[start:], start):
                self._interfaces[:, index] = each.link, each.unit, each.offset_s
            self._described = described
        return self._interfaces[:, : len(described)]


# -------------------------------------------------------------------------------------- segments


class _BlockBuffers:
    """Arrays for what is found in a block, reused for the next one."""

    def __init__(self, most: int) -> None:
        self._packets = np.empty(most, PACKET)
        self._flows = np.empty(most * FLOW_BYTES, np.uint8)
        self._fragments = np.empty((most, 4), np.int64)
        self.counts = np.zeros((len(NAMES), 2), np.int64)

    def find(
        self, records: _Records
    ) -> tuple[Packets, npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """The segments of records, their flows, and rows of `fragments` as `find_segments` has;
        `counts` are those of these records."""
        self.counts[:] = 0
        columns = records.starts, records.sizes, records.times, records.links
        buffers = self._packets, self._flows, self._fragments, self.counts
        found, pieces = find_segments(records.data, *columns, *buffers)
        flows = self._flows[: found * FLOW_BYTES].reshape(found, FLOW_BYTES)
        return self._packets[:found], flows, self._fragments[:pieces]


def _segments(
    records: _Records, buffers: _BlockBuffers, fragments: Fragments, counts: PacketCounts
) -> Iterator[Segments]:
    packets, flows, pieces = buffers.find(records)
    _add(counts, buffers.counts)
    if len(records.times):
        times = np.append(records.layout.time_ns, records.times)
        counts.add(CLOCK_STEP, 0, int((np.diff(times) < -CLOCK_STEP_NS).sum()))
        # Packets at the beginning of a pcapng file may have no time: 0.
        counts.first_ns = counts.first_ns or next(filter(None, records.times.tolist()), 0)
        counts.last_ns = int(times[-1])
    given = 0
    for packet, index, before in _joined(records, pieces, fragments):
        own, flow, counted = _segment_in(packet, int(records.times[index]), records)
        # All fragments are counted as what the datagram turns out to be.
        kind = int(counted[: FRAGMENT + 1, 0].argmax())
        counts.move(FRAGMENT, kind, *fragments.last_joined)
        counted[: FRAGMENT + 1] = 0
        _add(counts, counted)
        if not len(own):
            continue
        # In the order of capture: the segments before the last fragment, then the joined one.
        if given < before:
            yield Segments(records.data, records.base, packets[given:before], flows[given:before])
            given = before
        offset = records.base + int(records.starts[index])
        yield Segments(packet, offset - int(own["start"][0]), own, flow, is_joined=True)
    if given < len(packets):
        yield Segments(records.data, records.base, packets[given:], flows[given:])


def _add(counts: PacketCounts, found: npt.NDArray[np.int64]) -> None:
    for kind, (packets, size_bytes) in enumerate(found.tolist()):
        counts.add(kind, size_bytes, packets)


def _joined(
    records: _Records, pieces: npt.NDArray[np.int64], fragments: Fragments
) -> Iterator[tuple[npt.NDArray[np.uint8], int, int]]:
    """The packets that these records complete, the record of the last fragment of each, and the
    number of segments before it."""
    for index, start, end, before in pieces.tolist():
        packet = records.data[start:end].tobytes()
        size = int(records.sizes[index])
        joined = fragments.add(packet, int(records.times[index]), size)
        if joined is not None:
            yield np.frombuffer(joined, np.uint8), index, before


def _segment_in(
    packet: npt.NDArray[np.uint8], time_ns: int, records: _Records
) -> tuple[Packets, npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The segment in an IP packet that was joined, or none, its flow, and what it is counted as."""
    columns = np.array([[0], [len(packet)], [time_ns], [LINK_RAW]], np.int64)
    buffers = _BlockBuffers(1)
    own, flow, _ = buffers.find(_Records(packet, 0, 0, len(packet), records.layout, *columns))
    return own, flow, buffers.counts
