"""From a captured packet to the TCP segment in it: link layer, tunnels, IP, TCP.

Each function gives a number of `packet_counts` too: why a packet is left out, or SEGMENT. The
compiled kernels of the pipeline read the same headers for many packets at once; both refer to
`layout`, and tests compare them.
"""

from __future__ import annotations

from typing import NamedTuple

from crosswire.capture import layout, tcp
from crosswire.capture.flows import IPV4_PREFIX
from crosswire.capture.packet_counts import (
    ACKNOWLEDGEMENT,
    CUT_HEADERS,
    ENCAPSULATED,
    FRAGMENT,
    MALFORMED,
    NOT_IP,
    NOT_TCP,
    SEGMENT,
    UNREADABLE_LINK_TYPE,
)
from crosswire.capture.reassembly import Segment

__all__ = ["FlowSegment", "innermost_packet", "segment_in"]


class FlowSegment(NamedTuple):
    """A TCP segment and the key of its flow."""

    flow: bytes
    segment: Segment


class _IpHeader(NamedTuple):
    """An IP header: the protocol inside, where its header begins, where it ends on the wire (the
    capture may end before), and whether this is only a fragment of it."""

    protocol: int
    start: int
    stop: int
    is_fragment: bool


def innermost_packet(data: bytes, link: int) -> tuple[int, bytes]:
    """The captured bytes from the IP header on that carries TCP, be it inside of tunnels, with
    SEGMENT, or with FRAGMENT if it has to be joined first; empty with any other number."""
    for _ in range(layout.MOST_TUNNELS + 1):
        kind, at = _ip_offset(data, link)
        if kind != SEGMENT:
            return kind, b""
        packet = data[at:]
        header = _ip_header(packet)
        if header is None:
            return MALFORMED if packet[0] >> 4 not in (4, 6) else CUT_HEADERS, b""
        if header.protocol == layout.PROTOCOL_TCP and not header.is_fragment:
            return SEGMENT, packet
        if header.is_fragment:
            is_joined = header.protocol in layout.PROTOCOLS_JOINED
            return (FRAGMENT, packet) if is_joined else (NOT_TCP, b"")
        kind, at, link = _tunnel(packet, header)
        if kind != SEGMENT:
            return kind, b""
        # What follows the packet is no part of what it carries.
        data = packet[at : header.stop]
    return ENCAPSULATED, b""


def segment_in(packet: bytes, time_ns: int) -> tuple[int, FlowSegment | None]:
    """The TCP segment of a packet that `innermost_packet` found; None, with the reason, for headers
    that are cut or wrong, and for segments that neither carry bytes nor open, end or abort a
    connection."""
    header = _ip_header(packet)
    assert header is not None
    at, stop = header.start, header.stop
    if at + tcp.HEADER_BYTES > stop:
        return MALFORMED, None
    if at + tcp.HEADER_BYTES > len(packet):
        return CUT_HEADERS, None
    body = at + (packet[at + tcp.SIZE_AT] >> 4) * 4
    if body < at + tcp.HEADER_BYTES or body > stop:
        return MALFORMED, None
    flags, length = packet[at + tcp.FLAGS_AT] & tcp.FLAGS, stop - body
    # Captures are full of bare acknowledgements, which carry nothing of the sender's own direction.
    # They are cumulative: a later segment with bytes repeats what they acknowledge.
    if not length and not flags & (tcp.SYN | tcp.FIN | tcp.RST):
        return ACKNOWLEDGEMENT, None
    sender, receiver = _addresses(packet)
    sender, receiver = sender + packet[at : at + 2], receiver + packet[at + 2 : at + 4]
    forward = sender <= receiver
    segment = Segment(
        forward,
        time_ns,
        int.from_bytes(packet[at + tcp.SEQUENCE_AT : at + tcp.ACKNOWLEDGEMENT_AT]),
        int.from_bytes(packet[at + tcp.ACKNOWLEDGEMENT_AT : at + tcp.SIZE_AT]),
        flags,
        length,
        packet[body:stop],
    )
    return SEGMENT, FlowSegment(sender + receiver if forward else receiver + sender, segment)


def _ip_offset(data: bytes, link: int) -> tuple[int, int]:
    """Where IP begins, with SEGMENT; else why it does not."""
    if link in (layout.LINK_NULL, layout.LINK_LOOP):
        return (SEGMENT if len(data) > layout.LOOPBACK_IP else CUT_HEADERS), layout.LOOPBACK_IP
    if link == layout.LINK_ETHERNET:
        at, ip = layout.ETHERNET_TYPE, layout.ETHERNET_TYPE + 2
    elif link == layout.LINK_COOKED:
        at, ip = layout.COOKED_TYPE, layout.COOKED_TYPE + 2
    elif link == layout.LINK_COOKED_2:
        at, ip = layout.COOKED_2_TYPE, layout.COOKED_2_IP
    elif link in layout.LINKS:
        return (SEGMENT if data else CUT_HEADERS), 0
    else:
        return UNREADABLE_LINK_TYPE, 0
    if at + 2 > len(data):
        return CUT_HEADERS, 0
    kind = int.from_bytes(data[at : at + 2])
    while kind in layout.ETHERTYPES_VLAN:
        if ip + layout.VLAN_TAG_BYTES > len(data):
            return CUT_HEADERS, 0
        kind = int.from_bytes(data[ip + 2 : ip + 4])
        ip += layout.VLAN_TAG_BYTES
    if kind in layout.ETHERTYPES_IP:
        return (SEGMENT if ip < len(data) else CUT_HEADERS), ip
    return (ENCAPSULATED if kind in layout.ETHERTYPES_TUNNEL else NOT_IP), 0


def _tunnel(packet: bytes, header: _IpHeader) -> tuple[int, int, int]:
    """Where the packet begins that this one carries, and its link type, with SEGMENT; else why
    there is none that can be read."""
    protocol, at = header.protocol, header.start
    end = min(len(packet), header.stop)
    if protocol in layout.PROTOCOLS_IP:
        return SEGMENT, at, layout.LINK_RAW
    if protocol == layout.PROTOCOL_GRE:
        return _inside_gre(packet, at, end)
    if protocol == layout.PROTOCOL_UDP:
        return _inside_udp(packet, at, end)
    if protocol in layout.IPV6_EXTENSIONS and packet[0] >> 4 == 6:
        return CUT_HEADERS, 0, 0
    return (ENCAPSULATED if protocol in layout.PROTOCOLS_TUNNEL else NOT_TCP), 0, 0


def _inside_gre(packet: bytes, at: int, end: int) -> tuple[int, int, int]:
    if at + layout.GRE_HEADER_BYTES > end:
        return CUT_HEADERS, 0, 0
    flags, kind = int.from_bytes(packet[at : at + 2]), int.from_bytes(packet[at + 2 : at + 4])
    if flags & (layout.GRE_ROUTING | layout.GRE_VERSION):
        return ENCAPSULATED, 0, 0
    at += layout.GRE_HEADER_BYTES
    for option in (layout.GRE_CHECKSUM, layout.GRE_KEY, layout.GRE_SEQUENCE):
        at += layout.GRE_OPTION_BYTES if flags & option else 0
    if kind in layout.ETHERTYPES_IP:
        return SEGMENT, at, layout.LINK_RAW
    if kind == layout.GRE_ERSPAN and flags & layout.GRE_SEQUENCE:
        at += layout.ERSPAN_HEADER_BYTES
    if kind in (layout.GRE_ETHERNET, layout.GRE_ERSPAN):
        return SEGMENT, at, layout.LINK_ETHERNET
    return ENCAPSULATED, 0, 0


def _inside_udp(packet: bytes, at: int, end: int) -> tuple[int, int, int]:
    if at + layout.UDP_HEADER_BYTES > end:
        return CUT_HEADERS, 0, 0
    port = int.from_bytes(packet[at + layout.UDP_TARGET : at + layout.UDP_TARGET + 2])
    at += layout.UDP_HEADER_BYTES
    if port in layout.VXLAN_PORTS:
        if at + layout.VXLAN_HEADER_BYTES > end:
            return CUT_HEADERS, 0, 0
        if packet[at] & layout.VXLAN_HAS_NETWORK:
            return SEGMENT, at + layout.VXLAN_HEADER_BYTES, layout.LINK_ETHERNET
    return (ENCAPSULATED if port in layout.UDP_TUNNEL_PORTS else NOT_TCP), 0, 0


def _ip_header(packet: bytes) -> _IpHeader | None:
    """By IP's own version, which all link layers have, unlike an EtherType."""
    version = packet[0] >> 4 if packet else 0
    if version == 4 and len(packet) >= layout.IPV4_HEADER_BYTES:
        total = int.from_bytes(packet[layout.IPV4_LENGTH : layout.IPV4_LENGTH + 2])
        fragment = int.from_bytes(packet[layout.IPV4_FRAGMENT : layout.IPV4_FRAGMENT + 2])
        return _IpHeader(
            packet[layout.IPV4_PROTOCOL],
            (packet[0] & 15) * 4,
            # 0 where the network card cuts a large segment up after it was captured.
            total or len(packet),
            bool(fragment & layout.IPV4_IS_FRAGMENT),
        )
    if version == 6 and len(packet) >= layout.IPV6_HEADER_BYTES:
        return _ipv6_header(packet)
    return None


def _ipv6_header(packet: bytes) -> _IpHeader:
    size = int.from_bytes(packet[layout.IPV6_LENGTH : layout.IPV6_LENGTH + 2])
    stop = layout.IPV6_HEADER_BYTES + size if size else len(packet)
    protocol, at = packet[layout.IPV6_NEXT], layout.IPV6_HEADER_BYTES
    while protocol in layout.IPV6_EXTENSIONS and at + layout.IPV6_EXTENSION_BYTES <= len(packet):
        kind, units = protocol, packet[at + 1]
        protocol = packet[at]
        if kind == layout.IPV6_FRAGMENT:
            fragment = int.from_bytes(packet[at + 2 : at + 4])
            at += layout.IPV6_EXTENSION_BYTES
            if fragment & layout.IPV6_IS_FRAGMENT:
                return _IpHeader(protocol, at, stop, True)
        elif kind == layout.IPV6_AUTHENTICATION:
            at += (units + 2) * 4
        else:
            at += (units + 1) * 8
    return _IpHeader(protocol, at, stop, False)


def _addresses(packet: bytes) -> tuple[bytes, bytes]:
    """The sender's and the receiver's, of 16 bytes each."""
    if packet[0] >> 4 == 4:
        sender, middle, end = layout.IPV4_SOURCE, layout.IPV4_DESTINATION, layout.IPV4_HEADER_BYTES
        return IPV4_PREFIX + packet[sender:middle], IPV4_PREFIX + packet[middle:end]
    return (
        packet[layout.IPV6_SOURCE : layout.IPV6_DESTINATION],
        packet[layout.IPV6_DESTINATION : layout.IPV6_HEADER_BYTES],
    )
