"""Compiled kernels: walking the records of a capture, and finding TCP in its packets.

A record's packet is looked at where it lies. Of each one that is a TCP segment with bytes, SYN, FIN
or RST there comes out a row of `PACKET`, and a row of

    flow      address 16, port 2 of the lower end, then of the higher one: 36 bytes
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from crosswire.pipeline.decode.compiled import compiled
from crosswire.pipeline.sources.tcp import FIN, RST, SYN

__all__ = [
    "BLOCK",
    "CORRUPT",
    "FLOW_BYTES",
    "FULL",
    "LINKS",
    "MORE",
    "PACKET",
    "RAW",
    "Packets",
    "copy_slices",
    "find_segments",
    "walk_classic",
    "walk_ng",
]

Bytes = npt.NDArray[np.uint8]
Packets = npt.NDArray[np.void]
"""Rows of `PACKET`."""

PACKET: Final = np.dtype(
    [
        ("time_ns", np.int64),
        # Where its payload begins in `source`, and how much of it was captured.
        ("start", np.int64),
        ("size", np.int32),
        # What it had on the wire.
        ("length", np.int32),
        ("number", np.uint32),
        ("acknowledgement", np.uint32),
        ("flow", np.int32),
        ("source", np.int32),
        ("flags", np.uint8),
        # Sent by the lower end.
        ("forward", np.bool_),
    ],
    align=True,
)
"""A TCP segment. Who puts segments together numbers `flow` and `source`; here they are 0."""
FLOW_BYTES: Final = 36

# Why a walk stopped.
MORE: Final = 0
"""At the end of the buffer, or in front of a record that is not whole."""
FULL: Final = 1
"""There is no room for more records."""
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


# What is read and written at places without a sign needs no look at whether they count from the
# end: four bytes are one load.
_1, _2, _3 = np.uint64(1), np.uint64(2), np.uint64(3)


@compiled
def _u16(data: Bytes, at: Any) -> int:
    index = np.uint64(at)
    return np.int64(data[index]) << 8 | np.int64(data[index + _1])  # type: ignore[return-value]


@compiled
def _u32(data: Bytes, at: Any, little: bool) -> int:
    index = np.uint64(at)
    a, b = np.int64(data[index]), np.int64(data[index + _1])
    c, d = np.int64(data[index + _2]), np.int64(data[index + _3])
    if little:
        return d << 24 | c << 16 | b << 8 | a  # type: ignore[return-value]
    return a << 24 | b << 16 | c << 8 | d  # type: ignore[return-value]


@compiled
def _copy(target: Bytes, to: Any, data: Bytes, start: Any, count: Any) -> None:
    first, source = np.uint64(to), np.uint64(start)
    for index in range(np.uint64(count)):
        target[first + index] = data[source + index]


# ------------------------------------------------------------------------------------------ walk


@compiled
def walk_classic(
    data: Bytes,
    position: int,
    little: bool,
    nanoseconds: bool,
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    times: npt.NDArray[np.int64],
) -> tuple[int, int, int]:
    """Records from `position` on: how many, where the next one begins, why it stopped.

    A record: seconds 4 · µs or ns 4 · captured 4 · original 4 · packet.
    """
    count = 0
    end = len(data)
    unit = 1 if nanoseconds else 1000
    while position + 16 <= end:
        if count == len(starts):
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
        position += 16 + size
    return count, position, MORE


@compiled
def walk_ng(
    data: Bytes,
    position: int,
    little: bool,
    interface_links: npt.NDArray[np.int64],
    interface_units: npt.NDArray[np.int64],
    interface_offsets: npt.NDArray[np.int64],
    snap_length: int,
    time_ns: int,
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    times: npt.NDArray[np.int64],
    links: npt.NDArray[np.int64],
) -> tuple[int, int, int]:
    """Like `walk_classic`, for the blocks of pcapng; `time_ns` is that of the record before.

    A block: type 4 · length 4 · body · length 4. A unit above 0 is a power of ten per second,
    below 0 a power of two.
    """
    count = 0
    end = len(data)
    while position + 12 <= end:
        if count == len(starts):
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
            time_ns = _nanoseconds(stamp, interface_units[interface]) + (
                interface_offsets[interface] * 1_000_000_000
            )
            times[count] = time_ns
            links[count] = interface_links[interface]
            count += 1
        elif kind == 3:
            if len(interface_links) == 0 or length < 16:
                return count, position, CORRUPT
            size = min(_u32(data, position + 8, little), length - 16)
            if snap_length:
                size = min(size, snap_length)
            starts[count] = position + 12
            sizes[count] = size
            times[count] = time_ns
            links[count] = interface_links[0]
            count += 1
        position += length
    return count, position, MORE


@compiled
def _nanoseconds(stamp: int, unit: int) -> int:
    if unit >= 0:
        if unit <= 9:
            return stamp * 10 ** (9 - unit)  # type: ignore[no-any-return]
        # No number of 64 bits has more than 19 digits.
        return stamp // 10 ** (unit - 9) if unit < 28 else 0
    bits = -unit
    if bits >= 63:
        return int(stamp * 1e9 / 2.0**bits)
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
def _inside_ipv4(data: Bytes, ip: int, end: int) -> tuple[int, int, int, bool]:
    """The protocol inside (-1: none can be told), where it begins and ends on the wire, and whether
    this is a fragment of it."""
    if ip + 20 > end:
        return -1, 0, 0, False
    total = _u16(data, ip + 2)
    stop = ip + total if total else end  # 0 where the card cuts it up later
    is_fragment = (_u16(data, ip + 6) & 0x3FFF) != 0
    protocol, size = np.int64(data[ip + 9]), (np.int64(data[ip]) & 15) * 4
    return protocol, ip + size, stop, is_fragment  # type: ignore[return-value]


@compiled
def _inside_ipv6(data: Bytes, ip: int, end: int) -> tuple[int, int, int, bool]:
    """Like `_inside_ipv4`."""
    size: Any
    if ip + 40 > end:
        return -1, 0, 0, False
    size = _u16(data, ip + 4)
    stop = ip + 40 + size if size else end
    protocol = np.int64(data[ip + 6])
    at = ip + 40
    while protocol in (0, 43, 44, 51, 60) and at + 8 <= end:
        is_fragment = False
        if protocol == 44:
            is_fragment = (_u16(data, at + 2) & 0xFFF9) != 0
            size = 8
        elif protocol == 51:
            size = (np.int64(data[at + 1]) + 2) * 4
        else:
            size = (np.int64(data[at + 1]) + 1) * 8
        protocol = np.int64(data[at])
        at += size
        if is_fragment:
            return protocol, at, stop, True  # type: ignore[return-value]
    return protocol, at, stop, False  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------- TCP


@compiled
def _is_forward(data: Bytes, ip: int, at: int, is_ipv4: bool) -> bool:
    """Is the sender's end the lower one?"""
    here, there = _u16(data, at), _u16(data, at + 2)
    if is_ipv4:
        here |= _u32(data, ip + 12, False) << 16
        there |= _u32(data, ip + 16, False) << 16
        return here <= there
    for index in range(ip + 8, ip + 24):
        if data[index] != data[index + 16]:
            return data[index] < data[index + 16]  # type: ignore[no-any-return]
    return here <= there


@compiled
def _write_end(flows: Bytes, to: int, data: Bytes, address: int, port: int, is_ipv4: bool) -> None:
    if is_ipv4:
        first = np.uint64(to)
        for index in range(np.uint64(10)):
            flows[first + index] = 0
        flows[to + 10] = flows[to + 11] = 255
        _copy(flows, to + 12, data, address, 4)
    else:
        _copy(flows, to, data, address, 16)
    _copy(flows, to + 16, data, port, 2)


@compiled
def find_segments(
    data: Bytes,
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    times: npt.NDArray[np.int64],
    links: npt.NDArray[np.int64],
    packets: Packets,
    flows: npt.NDArray[np.uint8],
    fragments: npt.NDArray[np.int64],
) -> tuple[int, int]:
    """Look through records: how many segments and how many fragments there are.

    Of a fragment there is its record, where its IP header is, and how many segments came before.
    """
    found = 0
    pieces = 0
    for index in range(len(starts)):
        if links[index] < 0:
            continue
        end = starts[index] + sizes[index]
        ip = _ip_at(data, starts[index], end, links[index])
        if ip < 0:
            continue
        version = data[ip] >> 4
        if version == 4:
            protocol, at, stop, is_fragment = _inside_ipv4(data, ip, end)
        elif version == 6:
            protocol, at, stop, is_fragment = _inside_ipv6(data, ip, end)
        else:
            continue
        if protocol != _TCP:
            continue
        if is_fragment:
            fragments[pieces, 0], fragments[pieces, 1], fragments[pieces, 2] = index, ip, found
            pieces += 1
            continue
        if at + 20 > end or at + 20 > stop:
            continue
        body = at + (np.int64(data[at + 12]) >> 4) * 4
        if body < at + 20 or body > stop:
            continue
        bits = data[at + 13] & 31
        length = stop - body
        if not length and not bits & (SYN | FIN | RST):
            continue
        is_ipv4 = version == 4
        forward = _is_forward(data, ip, at, is_ipv4)
        sender, receiver = (ip + 12, ip + 16) if is_ipv4 else (ip + 8, ip + 24)
        lower = found * FLOW_BYTES
        higher = lower + FLOW_BYTES // 2
        _write_end(flows, lower if forward else higher, data, sender, at, is_ipv4)
        _write_end(flows, higher if forward else lower, data, receiver, at + 2, is_ipv4)
        packet = packets[found]
        packet.time_ns = times[index]
        packet.start = body
        packet.size = max(0, min(stop, end) - body)
        packet.length = length
        packet.number = _u32(data, at + 4, False)
        packet.acknowledgement = _u32(data, at + 8, False)
        packet.flow = 0
        packet.source = 0
        packet.flags = bits
        packet.forward = forward
        found += 1
    return found, pieces


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
        _copy(target, offsets[row], data, starts[row], offsets[row + 1] - offsets[row])
