"""From a captured packet to the TCP segment in it: link layer, IP, TCP.

The compiled kernels of the pipeline read the same headers for many packets at once; both refer to
`layout`, and tests compare them.
"""

from __future__ import annotations

from typing import NamedTuple

from crosswire.capture import layout, tcp
from crosswire.capture.flows import IPV4_PREFIX
from crosswire.capture.reassembly import Segment

__all__ = ["FlowSegment", "ip_packet", "is_fragment", "segment_in"]


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


def ip_packet(data: bytes, link: int) -> bytes | None:
    """The captured bytes from the IP header on; None if the link layer carries something else."""
    at = _ip_offset(data, link)
    return data[at:] if 0 <= at < len(data) else None


def is_fragment(packet: bytes) -> bool:
    """Whether an IP packet is one of several fragments of a TCP segment."""
    header = _ip_header(packet)
    return header is not None and header.is_fragment and header.protocol == layout.PROTOCOL_TCP


def segment_in(packet: bytes, time_ns: int) -> FlowSegment | None:
    """The TCP segment of an IP packet; None for other protocols, fragments, headers that are cut,
    and segments that neither carry bytes nor open, end or abort a connection."""
    header = _ip_header(packet)
    if header is None or header.is_fragment or header.protocol != layout.PROTOCOL_TCP:
        return None
    at, stop = header.start, header.stop
    if at + tcp.HEADER_BYTES > min(len(packet), stop):
        return None
    body = at + (packet[at + tcp.SIZE_AT] >> 4) * 4
    if body < at + tcp.HEADER_BYTES or body > stop:
        return None
    flags, length = packet[at + tcp.FLAGS_AT] & tcp.FLAGS, stop - body
    # Captures are full of bare acknowledgements, which carry nothing of the sender's own direction.
    # They are cumulative: a later segment with bytes repeats what they acknowledge.
    if not length and not flags & (tcp.SYN | tcp.FIN | tcp.RST):
        return None
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
    return FlowSegment(sender + receiver if forward else receiver + sender, segment)


def _ip_offset(data: bytes, link: int) -> int:
    """-1 if there is no IP."""
    if link in (layout.LINK_NULL, layout.LINK_LOOP):
        return layout.LOOPBACK_IP
    if link == layout.LINK_ETHERNET:
        at, ip = layout.ETHERNET_TYPE, layout.ETHERNET_TYPE + 2
    elif link == layout.LINK_COOKED:
        at, ip = layout.COOKED_TYPE, layout.COOKED_TYPE + 2
    elif link == layout.LINK_COOKED_2:
        at, ip = layout.COOKED_2_TYPE, layout.COOKED_2_IP
    elif link in layout.LINKS:
        return 0
    else:
        return -1
    kind = int.from_bytes(data[at : at + 2])
    while kind in layout.ETHERTYPES_VLAN and ip + layout.VLAN_TAG_BYTES <= len(data):
        kind = int.from_bytes(data[ip + 2 : ip + 4])
        ip += layout.VLAN_TAG_BYTES
    return ip if kind in layout.ETHERTYPES_IP else -1


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
