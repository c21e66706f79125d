"""Reads a capture file packet by packet, or TCP segment by TCP segment, in plain Python.

For programs without numba: a few MB/s. The pipeline reads the same formats with compiled kernels.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import BinaryIO, NamedTuple

from crosswire.capture.fragments import Fragments
from crosswire.capture.headers import (
    CaptureLayout,
    damaged,
    decompressed,
    describe_block,
    describe_file,
    open_capture,
    refused,
    truncated,
)
from crosswire.capture.layout import (
    BLOCK_BODY,
    BLOCK_ENVELOPE_BYTES,
    ENHANCED_PACKET_BLOCK,
    FILE_HEADER_BYTES,
    INTERFACE_BLOCK,
    LINK_RAW,
    MOST_BLOCK_BYTES,
    MOST_CAPTURED_BYTES,
    MOST_DESCRIPTION_BYTES,
    OLD_PACKET_BLOCK,
    PACKET_BLOCK_BYTES,
    PACKET_CAPTURED,
    PACKET_DATA,
    PACKET_TIME,
    RECORD_CAPTURED,
    RECORD_FRACTION,
    RECORD_HEADER_BYTES,
    SECTION_BLOCK,
    SIMPLE_BLOCK_BYTES,
    SIMPLE_DATA,
    SIMPLE_PACKET_BLOCK,
)
from crosswire.capture.packet_counts import (
    CUT_PAYLOAD,
    FRAGMENT,
    SEGMENT,
    PacketCounts,
)
from crosswire.capture.packets import FlowSegment, innermost_packet, segment_in
from crosswire.errors import InvalidInput

__all__ = ["CapturedPacket", "nanoseconds", "read_packets", "read_segments"]

_READ_BYTES = 1 << 20
_SECOND_NS = 1_000_000_000


class CapturedPacket(NamedTuple):
    """A packet as it was captured: `data` begins with the header of the link layer."""

    time_ns: int
    link: int
    data: bytes


def read_segments(
    path: str, counts: PacketCounts | None = None, *, skip_damaged: bool = False
) -> Iterator[FlowSegment]:
    """The TCP segments of a capture in the order of the file, fragmented ones when their last
    fragment was captured; `counts` shows what became of every packet. Raises InvalidInput as
    `read_packets` does."""
    counted, fragments = counts or PacketCounts(), Fragments()
    for packet in read_packets(path, counted, skip_damaged=skip_damaged):
        size = len(packet.data)
        counted.at(packet.time_ns)
        kind, datagram = innermost_packet(packet.data, packet.link)
        found = None
        if kind == SEGMENT:
            kind, found = segment_in(datagram, packet.time_ns)
        counted.add(kind, size)
        if kind == FRAGMENT:
            found = _joined(fragments, datagram, packet, counted)
        if found is not None:
            segment = found.segment
            if segment.length > len(segment.payload):
                counted.add(CUT_PAYLOAD, segment.length - len(segment.payload))
            yield found


def _joined(
    fragments: Fragments, datagram: bytes, packet: CapturedPacket, counts: PacketCounts
) -> FlowSegment | None:
    """The segment that a fragment completes."""
    whole = fragments.add(datagram, packet.time_ns, len(packet.data))
    if whole is None:
        return None
    # All of its fragments are counted as what the datagram turns out to be.
    kind, datagram = innermost_packet(whole, LINK_RAW)
    found = None
    if kind == SEGMENT:
        kind, found = segment_in(datagram, packet.time_ns)
    counts.move(FRAGMENT, kind, *fragments.last_joined)
    return found


def read_packets(
    path: str, counts: PacketCounts | None = None, *, skip_damaged: bool = False
) -> Iterator[CapturedPacket]:
    """All packets of a capture, plain or compressed. Raises InvalidInput, also if it ends in the
    middle of a packet, as a killed capture program leaves it: with `skip_damaged` what precedes is
    read, and the rest is counted."""
    with open_capture(path) as file:
        source = _Buffer(decompressed(file, path), path)
        head = bytes(source.peek(FILE_HEADER_BYTES))
        if not head:
            raise source.fault or InvalidInput(f"{path} is empty")
        try:
            if source.fault is not None and len(head) < FILE_HEADER_BYTES:
                raise source.fault
            layout, start = describe_file(head, path)
            source.skip(start)
            yield from _blocks(source, layout) if layout.ng else _records(source, layout)
            if source.fault is not None:
                raise source.fault
            if source.peek(1):
                raise truncated(path, source.position)
        except InvalidInput as fault:
            # What is no capture at all is none that was damaged.
            if source.position == 0 and len(head) == FILE_HEADER_BYTES:
                raise
            if not skip_damaged:
                raise refused(fault) from fault
            (counts or PacketCounts()).add_fault(str(fault), source.skip_all())


class _Buffer:
    """Bytes of a file ahead of the reader, and their position in it. It ends where the file does,
    or with a `fault` where that can't be read on."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        # Of a compressed file a call at a time: one that fails would take along what the calls
        # before it have decompressed.
        self._read = getattr(file, "read1", None) or file.read
        self.path = path
        self.position = 0
        self.fault: InvalidInput | None = None
        self._data = b""
        self._start = 0

    def peek(self, count: int) -> memoryview:
        """The next bytes without taking them; fewer at the end of the file."""
        while len(self._data) - self._start < count and self.fault is None:
            try:
                more = self._read(max(count, _READ_BYTES))
            except (EOFError, OSError, ValueError, zlib.error) as error:
                self.fault = InvalidInput(f"can't read {self.path}: {error}")
                break
            if not more:
                break
            # Only here are the remaining bytes copied: skipping costs nothing.
            self._data, self._start = self._data[self._start :] + more, 0
        return memoryview(self._data)[self._start : self._start + count]

    def skip(self, count: int) -> None:
        """Continue after bytes that were peeked at."""
        self._start += count
        self.position += count

    def skip_all(self) -> int:
        """Skip what is left; gives the number of bytes."""
        before = self.position
        while rest := len(self.peek(_READ_BYTES)):
            self.skip(rest)
        return self.position - before


def _records(source: _Buffer, layout: CaptureLayout) -> Iterator[CapturedPacket]:
    """The packets of a classic pcap file."""
    (interface,) = layout.interfaces
    order, unit = layout.byte_order, 1 if layout.nanoseconds else 1000
    while len(head := source.peek(RECORD_HEADER_BYTES)) == RECORD_HEADER_BYTES:
        seconds = int.from_bytes(head[:RECORD_FRACTION], order)
        fraction = int.from_bytes(head[RECORD_FRACTION:RECORD_CAPTURED], order)
        size = int.from_bytes(head[RECORD_CAPTURED : RECORD_CAPTURED + 4], order)
        if size > MOST_CAPTURED_BYTES:
            raise damaged(source.path, source.position)
        record = source.peek(RECORD_HEADER_BYTES + size)
        if len(record) < RECORD_HEADER_BYTES + size:
            return
        data = bytes(record[RECORD_HEADER_BYTES:])
        source.skip(len(record))
        yield CapturedPacket(seconds * _SECOND_NS + fraction * unit, interface.link, data)


def _blocks(source: _Buffer, layout: CaptureLayout) -> Iterator[CapturedPacket]:
    """The packets of a pcapng file; its other blocks describe them or are skipped."""
    while len(head := source.peek(BLOCK_ENVELOPE_BYTES)) == BLOCK_ENVELOPE_BYTES:
        kind = int.from_bytes(head[:4], layout.byte_order)
        # Before its length is read: a section header defines the byte order for that, too.
        if kind in (SECTION_BLOCK, INTERFACE_BLOCK):
            data = source.peek(MOST_DESCRIPTION_BYTES)
            layout, length = describe_block(layout, data, source.path, source.position)
            if not length:
                return
            source.skip(length)
            continue
        length = int.from_bytes(head[4:BLOCK_BODY], layout.byte_order)
        if length < BLOCK_ENVELOPE_BYTES or length % 4 or length > MOST_BLOCK_BYTES:
            raise damaged(source.path, source.position)
        block = source.peek(length)
        if len(block) < length:
            return
        packet = _packet(kind, block, layout, source)
        source.skip(length)
        if packet is not None:
            layout = replace(layout, time_ns=packet.time_ns)
            yield packet


def _packet(
    kind: int, block: memoryview, layout: CaptureLayout, source: _Buffer
) -> CapturedPacket | None:
    """The packet of a block; None for a block of another kind. Raises InvalidInput."""

    def number(at: int, size: int = 4) -> int:
        return int.from_bytes(block[at : at + size], layout.byte_order)

    interfaces = layout.interfaces
    if kind == SIMPLE_PACKET_BLOCK:
        if not interfaces or len(block) < SIMPLE_BLOCK_BYTES:
            raise damaged(source.path, source.position)
        size = min(number(BLOCK_BODY), len(block) - SIMPLE_BLOCK_BYTES)
        if interfaces[0].snap_length:
            size = min(size, interfaces[0].snap_length)
        data = bytes(block[SIMPLE_DATA : SIMPLE_DATA + size])
        return CapturedPacket(layout.time_ns, interfaces[0].link, data)
    if kind not in (ENHANCED_PACKET_BLOCK, OLD_PACKET_BLOCK):
        return None
    if len(block) < PACKET_BLOCK_BYTES:
        raise damaged(source.path, source.position)
    index = number(BLOCK_BODY, 4 if kind == ENHANCED_PACKET_BLOCK else 2)
    size = number(PACKET_CAPTURED)
    if index >= len(interfaces) or size > len(block) - PACKET_BLOCK_BYTES:
        raise damaged(source.path, source.position)
    interface = interfaces[index]
    stamp = number(PACKET_TIME) << 32 | number(PACKET_TIME + 4)
    time_ns = nanoseconds(stamp, interface.unit) + interface.offset_s * _SECOND_NS
    return CapturedPacket(time_ns, interface.link, bytes(block[PACKET_DATA : PACKET_DATA + size]))


def nanoseconds(stamp: int, unit: int) -> int:
    """A time of pcapng in ns: `unit` above 0 is a power of ten per second, below 0 one of two."""
    # Whole numbers only: a time in ns has more digits than a float holds.
    return stamp * _SECOND_NS // 10**unit if unit >= 0 else (stamp * _SECOND_NS) >> -unit
