"""Compiled kernels: walking the records of a capture, and finding TCP in its packets.

A record's packet is looked at where it lies. What comes out for each one:

    status    SKIP nothing of ours · SEGMENT of TCP, whole · FRAGMENT of an IP datagram
    flow      address 16, port 2 of the lower end, then of the higher one: 36 bytes
    forward   sent by the lower end
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from crosswire.pipeline.compiled import compiled
from crosswire.pipeline.sources.tcp import FIN, RST, SYN

__all__ = [
    "BLOCK",
    "CORRUPT",
    "FRAGMENT",
    "FULL",
    "LINKS",
    "MORE",
    "RAW",
    "SEGMENT",
    "SKIP",
    "copy_slices",
    "find_segments",
    "gather",
    "walk_classic",
    "walk_ng",
]

Bytes = npt.NDArray[np.uint8]

SKIP: Final = 0
SEGMENT: Final = 1
FRAGMENT: Final = 2

# Why a walk stopped.
MORE: Final = 0
"""At the end of the buffer, or in front of a record that is not whole."""
FULL: Final = 1
"""Enough for one batch."""
BLOCK: Final = 2
"""At a block that describes the section or an interface: for others to read."""
CORRUPT: Final = 3
"""At what is no record."""

NULL, ETHERNET, RAW_12, RAW_14, RAW, LOOP, COOKED, IPV4, IPV6, COOKED_2 = (
    0,
    1,
    12,
    14,
    101,
    108,
    113,
    228,
    229,
    276,
)
LINKS: Final = frozenset((NULL, ETHERNET, RAW_12, RAW_14, RAW, LOOP, COOKED, IPV4, IPV6, COOKED_2))
"""Link types that we can read."""

_MOST_CAPTURED = 16 * 1024 * 1024
_TCP = 6


@compiled
def _u16(data: Bytes, at: int) -> int:
    return np.int64(data[at]) << 8 | np.int64(data[at + 1])  # type: ignore[return-value]


@compiled
def _u32(data: Bytes, at: int, little: bool) -> int:
    a, b = np.int64(data[at]), np.int64(data[at + 1])
    c, d = np.int64(data[at + 2]), np.int64(data[at + 3])
    if little:
        return d << 24 | c << 16 | b << 8 | a  # type: ignore[return-value]
    return a << 24 | b << 16 | c << 8 | d  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------ walk


@compiled
def walk_classic(
    data: Bytes,
    position: int,
    end: int,
    little: bool,
    nanoseconds: bool,
    most_bytes: int,
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    times: npt.NDArray[np.int64],
) -> tuple[int, int, int]:
    """Records from `position` on: how many, where the next one begins, why it stopped.

    A record: seconds 4 · µs or ns 4 · captured 4 · original 4 · packet.
    """
    count = 0
    total = 0
    unit = 1 if nanoseconds else 1000
    while position + 16 <= end:
        if count == len(starts) or total >= most_bytes:
            return count, position, FULL
        size = _u32(data, position + 8, little)
        if size > _MOST_CAPTURED:
            return count, position, CORRUPT
        if position + 16 + size > end:
            break
        starts[count] = position + 16
        sizes[count] = size
        times[count] = (
            _u32(data, position, little) * 1_000_000_000 + _u32(data, position + 4, little) * unit
        )
        count += 1
        total += size
        position += 16 + size
    return count, position, MORE


@compiled
def walk_ng(
    data: Bytes,
    position: int,
    end: int,
    little: bool,
    interface_links: npt.NDArray[np.int64],
    interface_units: npt.NDArray[np.int64],
    interface_offsets: npt.NDArray[np.int64],
    snap_length: int,
    most_bytes: int,
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    times: npt.NDArray[np.int64],
    links: npt.NDArray[np.int64],
) -> tuple[int, int, int]:
    """Like `walk_classic`, for the blocks of pcapng.

    A block: type 4 · length 4 · body · length 4. A unit above 0 is a power of ten per second,
    below 0 a power of two.
    """
    count = 0
    total = 0
    while position + 12 <= end:
        if count == len(starts) or total >= most_bytes:
            return count, position, FULL
        kind = _u32(data, position, little)
        if kind == 0x0A0D0D0A or kind == 1:
            return count, position, BLOCK
        length = _u32(data, position + 4, little)
        if length < 12 or length % 4 or length > _MOST_CAPTURED + 65536:
            return count, position, CORRUPT
        if position + length > end:
            break
        if kind == 6 or kind == 2:
            if length < 32:
                return count, position, CORRUPT
            # The obsolete packet block has a 16 bit interface and a count of drops.
            interface = _u32(data, position + 8, little)
            if kind == 2:
                interface = interface & 0xFFFF if little else interface >> 16
            size = _u32(data, position + 20, little)
            if interface >= len(interface_links) or size > length - 32:
                return count, position, CORRUPT
            starts[count] = position + 28
            sizes[count] = size
            stamp = _u32(data, position + 12, little) << 32 | _u32(data, position + 16, little)
            times[count] = _nanoseconds(stamp, interface_units[interface]) + (
                interface_offsets[interface] * 1_000_000_000
            )
            links[count] = interface_links[interface]
            count += 1
            total += size
        elif kind == 3:
            if len(interface_links) == 0 or length < 16:
                return count, position, CORRUPT
            size = min(_u32(data, position + 8, little), length - 16)
            if snap_length:
                size = min(size, snap_length)
            starts[count] = position + 12
            sizes[count] = size
            times[count] = times[count - 1] if count else 0
            links[count] = interface_links[0]
            count += 1
            total += size
        position += length
    return count, position, MORE


@compiled
def _nanoseconds(stamp: int, unit: int) -> int:
    if unit >= 0:
        if unit <= 9:
            return stamp * 10 ** (9 - unit)  # type: ignore[no-any-return]
        return stamp // 10 ** (unit - 9)  # type: ignore[no-any-return]
    bits = -unit
    seconds = stamp >> bits
    rest = stamp - (seconds << bits)
    return seconds * 1_000_000_000 + int(rest * 1e9 / 2.0**bits)


# ---------------------------------------------------------------------------------- link and IP


@compiled
def _ip_at(data: Bytes, start: int, end: int, link: int) -> int:
    """Where the IP header is, -1 if there is none."""
    if link == ETHERNET:
        at = start + 12
    elif link == COOKED:
        at = start + 14
    elif link == COOKED_2:
        at = start
    elif link in (NULL, LOOP):
        return start + 4 if start + 4 < end else -1
    else:
        return start if start < end else -1
    if at + 2 > end:
        return -1
    ether = _u16(data, at)
    at = start + 20 if link == COOKED_2 else at + 2
    while ether in (0x8100, 0x88A8, 0x9100):
        if at + 4 > end:
            return -1
        ether = _u16(data, at + 2)
        at += 4
    return at if ether in (0x0800, 0x86DD) and at < end else -1


@compiled
def _copy(target: Any, to: int, data: Bytes, start: int, count: int) -> None:
    for place in range(count):
        target[to + place] = data[start + place]


@compiled
def find_segments(
    data: Bytes,
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    links: npt.NDArray[np.int64],
    count: int,
    status: npt.NDArray[np.uint8],
    ip_starts: npt.NDArray[np.int64],
    flows: npt.NDArray[np.uint8],
    forwards: npt.NDArray[np.bool_],
    numbers: npt.NDArray[np.int64],
    acknowledgements: npt.NDArray[np.int64],
    flags: npt.NDArray[np.int16],
    lengths: npt.NDArray[np.int32],
    payload_starts: npt.NDArray[np.int64],
    payload_sizes: npt.NDArray[np.int64],
) -> int:
    """Fill the columns for `count` records; how many segments and fragments there are.

    `lengths` is the size that a payload had on the wire, `payload_sizes` what was captured of it.
    """
    found = 0
    ends = np.zeros(36, np.uint8)
    size: Any
    for index in range(count):
        status[index] = SKIP
        end = starts[index] + sizes[index]
        ip = _ip_at(data, starts[index], end, links[index])
        if ip < 0:
            continue
        ip_starts[index] = ip
        ends[:] = 0
        version = data[ip] >> 4
        fragment = False
        if version == 4:
            if ip + 20 > end:
                continue
            header = (data[ip] & 15) * 4
            total = _u16(data, ip + 2)
            stop = ip + total if total else end  # 0 where the card cuts it up later
            fragment = (_u16(data, ip + 6) & 0x3FFF) != 0
            protocol = np.int64(data[ip + 9])
            at = ip + header
            ends[10] = ends[11] = ends[28] = ends[29] = 255
            _copy(ends, 12, data, ip + 12, 4)
            _copy(ends, 30, data, ip + 16, 4)
        elif version == 6:
            if ip + 40 > end:
                continue
            size = _u16(data, ip + 4)
            stop = ip + 40 + size if size else end
            protocol = np.int64(data[ip + 6])
            at = ip + 40
            _copy(ends, 0, data, ip + 8, 16)
            _copy(ends, 18, data, ip + 24, 16)
            while protocol in (0, 43, 44, 51, 60) and at + 8 <= end:
                if protocol == 44:
                    fragment = (_u16(data, at + 2) & 0xFFF9) != 0
                    size = 8
                elif protocol == 51:
                    size = (np.int64(data[at + 1]) + 2) * 4
                else:
                    size = (np.int64(data[at + 1]) + 1) * 8
                protocol = np.int64(data[at])
                at += size
                if fragment:
                    break
        else:
            continue
        if fragment:
            if protocol == _TCP:
                status[index] = FRAGMENT
                found += 1
            continue
        if protocol != _TCP or at + 20 > end or at + 20 > stop:
            continue
        body = at + (data[at + 12] >> 4) * 4
        if body < at + 20 or body > stop:
            continue
        bits = data[at + 13] & 31
        length = stop - body
        if not length and not bits & (SYN | FIN | RST):
            continue
        _copy(ends, 16, data, at, 2)
        _copy(ends, 34, data, at + 2, 2)
        forward = True
        for place in range(18):
            if ends[place] != ends[18 + place]:
                forward = ends[place] < ends[18 + place]
                break
        for place in range(18):
            flows[index, place] = ends[place if forward else 18 + place]
            flows[index, 18 + place] = ends[18 + place if forward else place]
        status[index] = SEGMENT
        forwards[index] = forward
        numbers[index] = _u32(data, at + 4, False)
        acknowledgements[index] = _u32(data, at + 8, False)
        flags[index] = bits
        lengths[index] = length
        payload_starts[index] = body
        payload_sizes[index] = max(0, min(stop, end) - body)
        found += 1
    return found


@compiled
def gather(
    data: Bytes,
    chosen: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int32],
    target: Bytes,
) -> None:
    """Copy the chosen slices behind one another, as Arrow wants binary columns."""
    at = 0
    for place in range(len(chosen)):
        index = chosen[place]
        offsets[place] = at
        target[at : at + sizes[index]] = data[starts[index] : starts[index] + sizes[index]]
        at += sizes[index]
    offsets[len(chosen)] = at


@compiled
def copy_slices(
    data: Bytes,
    chosen: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int32],
    target: Bytes,
) -> None:
    """Copy the slices of the chosen rows to where `offsets` has a place for each."""
    for row in chosen:
        size = offsets[row + 1] - offsets[row]
        target[offsets[row] : offsets[row + 1]] = data[starts[row] : starts[row] + size]
