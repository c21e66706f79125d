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
)
from crosswire.capture.layout import (
    BLOCK_BODY,
    BLOCK_ENVELOPE_BYTES,
    ENHANCED_PACKET_BLOCK,
    FILE_HEADER_BYTES,
    INTERFACE_BLOCK,
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
from crosswire.capture.packets import FlowSegment, ip_packet, is_fragment, segment_in
from crosswire.errors import InvalidInput

__all__ = ["CapturedPacket", "nanoseconds", "read_packets", "read_segments"]

_READ_BYTES = 1 << 20
_SECOND_NS = 1_000_000_000


class CapturedPacket(NamedTuple):
    """A packet as it was captured: `data` begins with the header of the link layer."""

    time_ns: int
    link: int
    data: bytes


def read_segments(path: str) -> Iterator[FlowSegment]:
    """The TCP segments of a capture in the order of the file, fragmented ones when their last
    fragment was captured. Raises InvalidInput for what is no capture, or damaged."""
    fragments = Fragments()
    for packet in read_packets(path):
        datagram = ip_packet(packet.data, packet.link)
        if datagram is not None and is_fragment(datagram):
            datagram = fragments.add(datagram, packet.time_ns)
        found = None if datagram is None else segment_in(datagram, packet.time_ns)
        if found is not None:
            yield found


def read_packets(path: str) -> Iterator[CapturedPacket]:
    """All packets of a capture, plain or compressed. Raises InvalidInput.

    A last packet that is not whole, as a killed capture program leaves it, is left out.
    """
    with open_capture(path) as file:
        source = _Buffer(decompressed(file, path), path)
        head = source.peek(FILE_HEADER_BYTES)
        if not head:
            raise InvalidInput(f"{path} is empty")
        layout, start = describe_file(bytes(head), path)
        source.skip(start)
        yield from _blocks(source, layout) if layout.ng else _records(source, layout)


class _Buffer:
    """Bytes of a file ahead of the reader, and their position in it."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file = file
        self.path = path
        self.position = 0
        self._data = b""
        self._start = 0

    def peek(self, count: int) -> memoryview:
        """The next bytes without taking them; fewer at the end of the file."""
        while len(self._data) - self._start < count:
            try:
                more = self._file.read(max(count, _READ_BYTES))
            except (EOFError, OSError, ValueError, zlib.error) as error:
                raise InvalidInput(f"can't read {self.path}: {error}") from error
            if not more:
                break
            # Only here are the remaining bytes copied: skipping costs nothing.
            self._data, self._start = self._data[self._start :] + more, 0
        return memoryview(self._data)[self._start : self._start + count]

    def skip(self, count: int) -> None:
        """Continue after bytes that were peeked at."""
        self._start += count
        self.position += count


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
