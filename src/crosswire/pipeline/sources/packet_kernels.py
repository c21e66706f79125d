"""Compiled kernels: walking the records of a capture, and finding TCP segments in its packets.

Packets are read where they are in the buffer and not copied. Each TCP segment that has bytes, SYN,
FIN or RST gives a row of `PACKET` and the key of its flow, FLOW_BYTES long, as `capture.flows`
describes it. The offsets and codes are those of `capture.layout`; `capture.reader` reads the same
without numba.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from crosswire.capture.flows import ADDRESS_BYTES, END_BYTES, FLOW_BYTES
from crosswire.capture.layout import (
    BLOCK_BODY,
    BLOCK_ENVELOPE_BYTES,
    COOKED_2_IP,
    COOKED_2_TYPE,
    COOKED_TYPE,
    ENHANCED_PACKET_BLOCK,
    ERSPAN_HEADER_BYTES,
    ETHERNET_TYPE,
    ETHERTYPES_IP,
    ETHERTYPES_TUNNEL,
    ETHERTYPES_VLAN,
    GRE_CHECKSUM,
    GRE_ERSPAN,
    GRE_ETHERNET,
    GRE_HEADER_BYTES,
    GRE_KEY,
    GRE_OPTION_BYTES,
    GRE_ROUTING,
    GRE_SEQUENCE,
    GRE_VERSION,
    INTERFACE_BLOCK,
    IPV4_DESTINATION,
    IPV4_FRAGMENT,
    IPV4_HEADER_BYTES,
    IPV4_IS_FRAGMENT,
    IPV4_LENGTH,
    IPV4_PROTOCOL,
    IPV4_SOURCE,
    IPV6_AUTHENTICATION,
    IPV6_DESTINATION,
    IPV6_EXTENSION_BYTES,
    IPV6_EXTENSIONS,
    IPV6_FRAGMENT,
    IPV6_HEADER_BYTES,
    IPV6_IS_FRAGMENT,
    IPV6_LENGTH,
    IPV6_NEXT,
    IPV6_SOURCE,
    LINK_COOKED,
    LINK_COOKED_2,
    LINK_ETHERNET,
    LINK_LOOP,
    LINK_NULL,
    LINK_RAW,
    LOOPBACK_IP,
    MOST_BLOCK_BYTES,
    MOST_CAPTURED_BYTES,
    MOST_TUNNELS,
    OLD_PACKET_BLOCK,
    PACKET_BLOCK_BYTES,
    PACKET_CAPTURED,
    PACKET_DATA,
    PACKET_TIME,
    PROTOCOL_GRE,
    PROTOCOL_TCP,
    PROTOCOL_UDP,
    PROTOCOLS_IP,
    PROTOCOLS_JOINED,
    PROTOCOLS_TUNNEL,
    RECORD_CAPTURED,
    RECORD_FRACTION,
    RECORD_HEADER_BYTES,
    SECTION_BLOCK,
    SIMPLE_BLOCK_BYTES,
    SIMPLE_DATA,
    SIMPLE_PACKET_BLOCK,
    UDP_HEADER_BYTES,
    UDP_TARGET,
    UDP_TUNNEL_PORTS,
    VLAN_TAG_BYTES,
    VXLAN_HAS_NETWORK,
    VXLAN_HEADER_BYTES,
    VXLAN_PORTS,
)
from crosswire.capture.packet_counts import (
    ACKNOWLEDGEMENT,
    CUT_HEADERS,
    CUT_PAYLOAD,
    ENCAPSULATED,
    FRAGMENT,
    MALFORMED,
    NOT_IP,
    NOT_TCP,
    SEGMENT,
    UNREADABLE_LINK_TYPE,
)
from crosswire.capture.tcp import (
    ACKNOWLEDGEMENT_AT,
    FIN,
    FLAGS,
    FLAGS_AT,
    HEADER_BYTES,
    RST,
    SEQUENCE_AT,
    SIZE_AT,
    SYN,
)
from crosswire.pipeline.decode.kernels import lazy_kernel

__all__ = [
    "BLOCK",
    "CORRUPT",
    "FULL",
    "MORE",
    "PACKET",
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
        # Where its payload begins in `source`, and how many bytes of it were captured.
        ("start", np.int64),
        ("size", np.int32),
        # The payload's length on the wire: more than `size` where the capture cut the packet.
        ("length", np.int32),
        ("number", np.uint32),
        ("acknowledgement", np.uint32),
        ("flow", np.int32),
        ("source", np.int32),
        ("flags", np.uint8),
        # Sent by the lower end of the flow.
        ("forward", np.bool_),
    ],
    align=True,
)
"""A TCP segment. `flow` and `source` are 0 here; the collector of many blocks numbers them."""

# Why a walk stopped.
MORE: Final = 0
"""At the end of the buffer, or before a record that is not whole in it."""
FULL: Final = 1
"""There is no room for more records in the arrays."""
BLOCK: Final = 2
"""At a block that describes the section or an interface: `capture.headers` reads it."""
CORRUPT: Final = 3
"""At bytes that are no record."""

_SECOND_NS: Final = 1_000_000_000
_MAPPED_ZEROS: Final = 10
"""An IPv4 address is mapped into IPv6: ten zeros, two bytes 0xFF, four of the address."""


# An index without a sign can't count from the end of an array, so numba leaves out that check, and
# LLVM merges the four loads of a number into one.
_1, _2, _3 = np.uint64(1), np.uint64(2), np.uint64(3)


@lazy_kernel
def _u16(data: Bytes, at: Any) -> int:
    index = np.uint64(at)
    return np.int64(data[index]) << 8 | np.int64(data[index + _1])  # type: ignore[return-value]


@lazy_kernel
def _u32(data: Bytes, at: Any, little: bool) -> int:
    index = np.uint64(at)
    a, b = np.int64(data[index]), np.int64(data[index + _1])
    c, d = np.int64(data[index + _2]), np.int64(data[index + _3])
    if little:
        return d << 24 | c << 16 | b << 8 | a  # type: ignore[return-value]
    return a << 24 | b << 16 | c << 8 | d  # type: ignore[return-value]


@lazy_kernel
def _copy(target: Bytes, to: Any, data: Bytes, start: Any, count: Any) -> None:
    first, source = np.uint64(to), np.uint64(start)
    for index in range(np.uint64(count)):
        target[first + index] = data[source + index]


# ------------------------------------------------------------------------------------------ walk


@lazy_kernel
def walk_classic(
    data: Bytes,
    position: int,
    little: bool,
    nanoseconds: bool,
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    times: npt.NDArray[np.int64],
) -> tuple[int, int, int]:
    """Find records from `position` on: their number, where the next one begins, why it stopped."""
    count = 0
    end = len(data)
    unit = 1 if nanoseconds else 1000
    while position + RECORD_HEADER_BYTES <= end:
        if count == len(starts):
            return count, position, FULL
        size = _u32(data, position + RECORD_CAPTURED, little)
        if size > MOST_CAPTURED_BYTES:
            return count, position, CORRUPT
        if position + RECORD_HEADER_BYTES + size > end:
            break
        starts[count] = position + RECORD_HEADER_BYTES
        sizes[count] = size
        seconds = _u32(data, position, little)
        fraction = _u32(data, position + RECORD_FRACTION, little)
        times[count] = seconds * _SECOND_NS + fraction * unit
        count += 1
        position += RECORD_HEADER_BYTES + size
    return count, position, MORE


@lazy_kernel
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
    """Like `walk_classic`, for the blocks of pcapng; `time_ns` is the previous packet's.

    A unit above 0 is a power of ten per second, below 0 a power of two.
    """
    count = 0
    end = len(data)
    while position + BLOCK_ENVELOPE_BYTES <= end:
        if count == len(starts):
            return count, position, FULL
        kind = _u32(data, position, little)
        if kind in (SECTION_BLOCK, INTERFACE_BLOCK):
            return count, position, BLOCK
        length = _u32(data, position + 4, little)
        if length < BLOCK_ENVELOPE_BYTES or length % 4 or length > MOST_BLOCK_BYTES:
            return count, position, CORRUPT
        if position + length > end:
            break
        if kind in (ENHANCED_PACKET_BLOCK, OLD_PACKET_BLOCK):
            if length < PACKET_BLOCK_BYTES:
                return count, position, CORRUPT
            interface = _u32(data, position + BLOCK_BODY, little)
            if kind == OLD_PACKET_BLOCK:
                # Two bytes of interface, then a count of drops.
                interface = interface & 0xFFFF if little else interface >> 16
            size = _u32(data, position + PACKET_CAPTURED, little)
            if interface >= len(interface_links) or size > length - PACKET_BLOCK_BYTES:
                return count, position, CORRUPT
            starts[count] = position + PACKET_DATA
            sizes[count] = size
            upper = _u32(data, position + PACKET_TIME, little)
            stamp = upper << 32 | _u32(data, position + PACKET_TIME + 4, little)
            time_ns = _nanoseconds(stamp, interface_units[interface]) + (
                interface_offsets[interface] * _SECOND_NS
            )
            times[count] = time_ns
            links[count] = interface_links[interface]
            count += 1
        elif kind == SIMPLE_PACKET_BLOCK:
            if len(interface_links) == 0 or length < SIMPLE_BLOCK_BYTES:
                return count, position, CORRUPT
            # It has the original length only; the captured one is that, or the interface's snap
            # length where that is less. The block's own length includes padding.
            size = min(_u32(data, position + BLOCK_BODY, little), length - SIMPLE_BLOCK_BYTES)
            if snap_length:
                size = min(size, snap_length)
            starts[count] = position + SIMPLE_DATA
            sizes[count] = size
            times[count] = time_ns
            links[count] = interface_links[0]
            count += 1
        position += length
    return count, position, MORE


@lazy_kernel
def _nanoseconds(stamp: int, unit: int) -> int:
    if unit >= 0:
        if unit <= 9:
            return stamp * 10 ** (9 - unit)  # type: ignore[no-any-return]
        # A number of 64 bits has at most 19 digits: a power above 27 leaves nothing of it.
        return stamp // 10 ** (unit - 9) if unit < 28 else 0
    bits = -unit
    if bits >= 63:
        return int(stamp * 1e9 / 2.0**bits)
    seconds = stamp >> bits
    rest = stamp - (seconds << bits)
    return seconds * _SECOND_NS + int(rest * 1e9 / 2.0**bits)


# ---------------------------------------------------------------------------------- link and IP


@lazy_kernel
def _ip_at(data: Bytes, start: int, end: int, link: int) -> tuple[int, int]:
    """Where the IP header begins, with SEGMENT; else why there is none."""
    if link < 0:
        return UNREADABLE_LINK_TYPE, 0
    if link == LINK_ETHERNET:
        at = start + ETHERNET_TYPE
    elif link == LINK_COOKED:
        at = start + COOKED_TYPE
    elif link == LINK_COOKED_2:
        at = start + COOKED_2_TYPE
    else:
        at = start + LOOPBACK_IP if link in (LINK_NULL, LINK_LOOP) else start
        return SEGMENT if at < end else CUT_HEADERS, at
    if at + 2 > end:
        return CUT_HEADERS, 0
    ether = _u16(data, at)
    at = start + COOKED_2_IP if link == LINK_COOKED_2 else at + 2
    while ether in ETHERTYPES_VLAN:
        if at + VLAN_TAG_BYTES > end:
            return CUT_HEADERS, 0
        ether = _u16(data, at + 2)
        at += VLAN_TAG_BYTES
    if ether in ETHERTYPES_IP:
        return SEGMENT if at < end else CUT_HEADERS, at
    return ENCAPSULATED if ether in ETHERTYPES_TUNNEL else NOT_IP, 0


@lazy_kernel
def _inside_ipv4(data: Bytes, ip: int, end: int) -> tuple[int, int, int, bool]:
    """The protocol inside (-1 where the header is cut), where its header begins, where it ends on
    the wire, and whether this is a fragment of it."""
    if ip + IPV4_HEADER_BYTES > end:
        return -1, 0, 0, False
    total = _u16(data, ip + IPV4_LENGTH)
    # 0 where the network card cuts a large segment up after it was captured.
    stop = ip + total if total else end
    is_fragment = (_u16(data, ip + IPV4_FRAGMENT) & IPV4_IS_FRAGMENT) != 0
    protocol, size = np.int64(data[ip + IPV4_PROTOCOL]), (np.int64(data[ip]) & 15) * 4
    return protocol, ip + size, stop, is_fragment  # type: ignore[return-value]


@lazy_kernel
def _inside_ipv6(data: Bytes, ip: int, end: int) -> tuple[int, int, int, bool]:
    """Like `_inside_ipv4`."""
    size: Any
    if ip + IPV6_HEADER_BYTES > end:
        return -1, 0, 0, False
    size = _u16(data, ip + IPV6_LENGTH)
    stop = ip + IPV6_HEADER_BYTES + size if size else end
    protocol = np.int64(data[ip + IPV6_NEXT])
    at = ip + IPV6_HEADER_BYTES
    while protocol in IPV6_EXTENSIONS and at + IPV6_EXTENSION_BYTES <= end:
        is_fragment = False
        if protocol == IPV6_FRAGMENT:
            is_fragment = (_u16(data, at + 2) & IPV6_IS_FRAGMENT) != 0
            size = IPV6_EXTENSION_BYTES
        elif protocol == IPV6_AUTHENTICATION:
            # The only one that counts its length in units of 4 bytes, less 2.
            size = (np.int64(data[at + 1]) + 2) * 4
        else:
            size = (np.int64(data[at + 1]) + 1) * 8
        protocol = np.int64(data[at])
        at += size
        if is_fragment:
            return protocol, at, stop, True  # type: ignore[return-value]
    return protocol, at, stop, False  # type: ignore[return-value]


# --------------------------------------------------------------------------------------- tunnels


@lazy_kernel
def _inside_gre(data: Bytes, at: int, end: int) -> tuple[int, int, int]:
    """Where the packet begins that GRE carries, and its link type, with SEGMENT; else why none can
    be read."""
    if at + GRE_HEADER_BYTES > end:
        return CUT_HEADERS, 0, 0
    flags, ether = _u16(data, at), _u16(data, at + 2)
    if flags & (GRE_ROUTING | GRE_VERSION):
        return ENCAPSULATED, 0, 0
    at += GRE_HEADER_BYTES
    for option in (GRE_CHECKSUM, GRE_KEY, GRE_SEQUENCE):
        if flags & option:
            at += GRE_OPTION_BYTES
    if ether in ETHERTYPES_IP:
        return SEGMENT, at, LINK_RAW
    if ether == GRE_ERSPAN and flags & GRE_SEQUENCE:
        at += ERSPAN_HEADER_BYTES
    if ether in (GRE_ETHERNET, GRE_ERSPAN):
        return SEGMENT, at, LINK_ETHERNET
    return ENCAPSULATED, 0, 0


@lazy_kernel
def _inside_udp(data: Bytes, at: int, end: int) -> tuple[int, int, int]:
    """Like `_inside_gre`, for VXLAN."""
    if at + UDP_HEADER_BYTES > end:
        return CUT_HEADERS, 0, 0
    port = _u16(data, at + UDP_TARGET)
    at += UDP_HEADER_BYTES
    if port in VXLAN_PORTS:
        if at + VXLAN_HEADER_BYTES > end:
            return CUT_HEADERS, 0, 0
        if data[at] & VXLAN_HAS_NETWORK:
            return SEGMENT, at + VXLAN_HEADER_BYTES, LINK_ETHERNET
    return ENCAPSULATED if port in UDP_TUNNEL_PORTS else NOT_TCP, 0, 0


@lazy_kernel
def _innermost(data: Bytes, start: int, end: int, link: int) -> tuple[int, int, int, int, int]:
    """Where IP begins that carries TCP, where TCP begins, where it ends on the wire, and where the
    capture of it ends; with SEGMENT, or FRAGMENT if it has to be joined first. Any other number is
    why there is none."""
    for _ in range(MOST_TUNNELS + 1):
        kind, ip = _ip_at(data, start, end, link)
        if kind != SEGMENT:
            return kind, 0, 0, 0, 0
        version = data[ip] >> 4
        if version == 4:
            protocol, at, stop, is_fragment = _inside_ipv4(data, ip, end)
        elif version == 6:
            protocol, at, stop, is_fragment = _inside_ipv6(data, ip, end)
        else:
            return MALFORMED, 0, 0, 0, 0
        if protocol < 0:
            return CUT_HEADERS, 0, 0, 0, 0
        if protocol == PROTOCOL_TCP and not is_fragment:
            return SEGMENT, ip, at, stop, end
        if is_fragment:
            return FRAGMENT if protocol in PROTOCOLS_JOINED else NOT_TCP, ip, at, stop, end
        # What follows the packet is no part of what it carries.
        end = min(end, stop)
        if protocol in PROTOCOLS_IP:
            start, link = at, LINK_RAW
        elif protocol == PROTOCOL_GRE:
            kind, start, link = _inside_gre(data, at, end)
        elif protocol == PROTOCOL_UDP:
            kind, start, link = _inside_udp(data, at, end)
        elif version == 6 and protocol in IPV6_EXTENSIONS:
            kind = CUT_HEADERS
        else:
            kind = ENCAPSULATED if protocol in PROTOCOLS_TUNNEL else NOT_TCP
        if kind != SEGMENT:
            return kind, 0, 0, 0, 0
    return ENCAPSULATED, 0, 0, 0, 0


# ------------------------------------------------------------------------------------------- TCP


@lazy_kernel
def _is_forward(data: Bytes, ip: int, at: int, is_ipv4: bool) -> bool:
    """Whether the sender has the lower address, or the lower port at the same address."""
    here, there = _u16(data, at), _u16(data, at + 2)
    if is_ipv4:
        here |= _u32(data, ip + IPV4_SOURCE, False) << 16
        there |= _u32(data, ip + IPV4_DESTINATION, False) << 16
        return here <= there
    for index in range(ip + IPV6_SOURCE, ip + IPV6_DESTINATION):
        other = index + ADDRESS_BYTES
        if data[index] != data[other]:
            return data[index] < data[other]  # type: ignore[no-any-return]
    return here <= there


@lazy_kernel
def _write_end(flows: Bytes, to: int, data: Bytes, address: int, port: int, is_ipv4: bool) -> None:
    if is_ipv4:
        first = np.uint64(to)
        for index in range(np.uint64(_MAPPED_ZEROS)):
            flows[first + index] = 0
        flows[to + _MAPPED_ZEROS] = flows[to + _MAPPED_ZEROS + 1] = 255
        _copy(flows, to + _MAPPED_ZEROS + 2, data, address, 4)
    else:
        _copy(flows, to, data, address, ADDRESS_BYTES)
    _copy(flows, to + ADDRESS_BYTES, data, port, 2)


@lazy_kernel
def find_segments(
    data: Bytes,
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    times: npt.NDArray[np.int64],
    links: npt.NDArray[np.int64],
    packets: Packets,
    flows: npt.NDArray[np.uint8],
    fragments: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
) -> tuple[int, int]:
    """Find the TCP segments in records: the number of segments and the number of fragments.

    A row of `fragments` has a fragment's record, where its IP header begins, where its capture
    ends, and the number of segments before it: so that a joined packet is put where its last
    fragment was captured. `counts` has the packets and the bytes of each kind of `packet_counts`,
    to which those of these records are added.
    """
    found = 0
    pieces = 0
    for index in range(len(starts)):
        end = starts[index] + sizes[index]
        kind, ip, at, stop, end = _innermost(data, starts[index], end, links[index])
        if kind == FRAGMENT:
            fragments[pieces, 0], fragments[pieces, 1] = index, ip
            fragments[pieces, 2], fragments[pieces, 3] = end, found
            pieces += 1
        bits, body, length = np.uint8(0), np.int64(0), np.int64(0)
        if kind == SEGMENT:
            if at + HEADER_BYTES > stop:
                kind = MALFORMED
            elif at + HEADER_BYTES > end:
                kind = CUT_HEADERS
            else:
                body = at + (np.int64(data[at + SIZE_AT]) >> 4) * 4
                bits, length = data[at + FLAGS_AT] & np.uint8(FLAGS), stop - body
                if body < at + HEADER_BYTES or body > stop:
                    kind = MALFORMED
                # A bare acknowledgement carries nothing of its own direction; it is cumulative, so
                # a later segment with bytes repeats it.
                elif not length and not bits & (SYN | FIN | RST):
                    kind = ACKNOWLEDGEMENT
        counts[kind, 0] += 1
        counts[kind, 1] += sizes[index]
        if kind != SEGMENT:
            continue
        is_ipv4 = data[ip] >> 4 == 4
        forward = _is_forward(data, ip, at, is_ipv4)
        if is_ipv4:
            sender, receiver = ip + IPV4_SOURCE, ip + IPV4_DESTINATION
        else:
            sender, receiver = ip + IPV6_SOURCE, ip + IPV6_DESTINATION
        lower = found * FLOW_BYTES
        higher = lower + END_BYTES
        _write_end(flows, lower if forward else higher, data, sender, at, is_ipv4)
        _write_end(flows, higher if forward else lower, data, receiver, at + 2, is_ipv4)
        packet = packets[found]
        packet.time_ns = times[index]
        packet.start = body
        packet.size = max(0, min(stop, end) - body)
        packet.length = length
        if packet.length > packet.size:
            counts[CUT_PAYLOAD, 0] += 1
            counts[CUT_PAYLOAD, 1] += packet.length - packet.size
        packet.number = _u32(data, at + SEQUENCE_AT, False)
        packet.acknowledgement = _u32(data, at + ACKNOWLEDGEMENT_AT, False)
        packet.flow = 0
        packet.source = 0
        packet.flags = bits
        packet.forward = forward
        found += 1
    return found, pieces


@lazy_kernel
def copy_slices(
    data: Bytes,
    chosen: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int32],
    target: Bytes,
) -> None:
    """Copy the slices of the chosen rows to the `offsets` of these rows in `target`."""
    for row in chosen:
        _copy(target, offsets[row], data, starts[row], offsets[row + 1] - offsets[row])
