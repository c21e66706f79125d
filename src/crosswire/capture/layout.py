"""Codes, sizes and offsets of capture files and of the headers below TCP, stated once.

The reader here and the compiled kernels of the pipeline refer to these. All numbers of pcap and
pcapng are in the byte order of the machine that captured; those of IP and TCP are big-endian.
"""

from __future__ import annotations

from typing import Final

# ------------------------------------------------------------------------------- file formats

GZIP_MAGIC: Final = b"\x1f\x8b"
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"

MAGIC_BYTES: Final = 4
CLASSIC_MAGICS: Final = {
    b"\xa1\xb2\xc3\xd4": (False, False),
    b"\xd4\xc3\xb2\xa1": (True, False),
    b"\xa1\xb2\x3c\x4d": (False, True),
    b"\x4d\x3c\xb2\xa1": (True, True),
}
"""First bytes of a classic pcap file → little-endian, times in nanoseconds (else microseconds)."""

FILE_HEADER_BYTES: Final = 24
"""Classic pcap: magic 4 · version 4 · zone 4 · accuracy 4 · snap length 4 · link type 4."""
FILE_HEADER_LINK: Final = 20
LINK_MASK: Final = 0xFFFF
"""The upper half of the link type describes a checksum at the end of packets."""

RECORD_HEADER_BYTES: Final = 16
"""Classic pcap: seconds 4 · fraction 4 · captured length 4 · original length 4, then the packet."""
RECORD_FRACTION: Final = 4
RECORD_CAPTURED: Final = 8

MOST_CAPTURED_BYTES: Final = 16 * 1024 * 1024
"""Of one packet. A larger length means that the file is damaged: no network has such packets."""

# ------------------------------------------------------------------------------------- pcapng
# A block: type 4 · length 4 · body · length 4. The length counts all of it, in steps of 4 bytes.

SECTION_MAGIC: Final = b"\x0a\x0d\x0d\x0a"
"""The type of a section header. It reads the same in both byte orders, which it then defines."""
SECTION_BLOCK: Final = 0x0A0D0D0A
INTERFACE_BLOCK: Final = 1
OLD_PACKET_BLOCK: Final = 2
"""Obsolete: interface 2 · drops 2, where an enhanced packet has interface 4."""
SIMPLE_PACKET_BLOCK: Final = 3
"""Original length 4 · packet; of the first interface, without a time."""
ENHANCED_PACKET_BLOCK: Final = 6
"""Interface 4 · time, upper half 4 · lower half 4 · captured length 4 · original length 4 · packet,
then padding and options."""

BYTE_ORDER_MAGICS: Final = {b"\x4d\x3c\x2b\x1a": True, b"\x1a\x2b\x3c\x4d": False}
"""In a section header, after type and length → little-endian."""

BLOCK_ENVELOPE_BYTES: Final = 12
BLOCK_BODY: Final = 8
"""Where a block's body begins."""
PACKET_BLOCK_BYTES: Final = 32
"""The smallest length of an enhanced or obsolete packet block."""
PACKET_TIME: Final = 12
PACKET_CAPTURED: Final = 20
PACKET_DATA: Final = 28
SIMPLE_BLOCK_BYTES: Final = 16
SIMPLE_DATA: Final = 12
DESCRIPTION_BLOCK_BYTES: Final = 16
"""The smallest length of a section header or an interface description."""
MOST_DESCRIPTION_BYTES: Final = 1 << 20
MOST_BLOCK_BYTES: Final = MOST_CAPTURED_BYTES + 65_536
"""A packet and its options."""
MOST_INTERFACES: Final = 1_024
"""Of a section. Each description copies the list of those before it."""

OPTION_END: Final = 0
OPTION_TIME_UNIT: Final = 9
"""One byte: a power of ten per second, or of two where the highest bit is set."""
OPTION_TIME_OFFSET: Final = 14
"""Seconds to add to every time of the interface, 8 bytes, signed."""
MICROSECONDS: Final = 6
"""The time unit of an interface that names none."""

# -------------------------------------------------------------------------------- link layers

LINK_NULL: Final = 0
LINK_ETHERNET: Final = 1
LINK_RAW_12: Final = 12
LINK_RAW_14: Final = 14
LINK_RAW: Final = 101
LINK_LOOP: Final = 108
LINK_COOKED: Final = 113
LINK_IPV4: Final = 228
LINK_IPV6: Final = 229
LINK_COOKED_2: Final = 276
LINKS: Final = frozenset(
    (
        LINK_NULL,
        LINK_ETHERNET,
        LINK_RAW_12,
        LINK_RAW_14,
        LINK_RAW,
        LINK_LOOP,
        LINK_COOKED,
        LINK_IPV4,
        LINK_IPV6,
        LINK_COOKED_2,
    )
)
"""Link types whose packets can be read."""
UNREADABLE_LINK: Final = -1
"""Stands for all others: packets of such an interface are skipped."""

# Where the EtherType is, and where IP begins if no VLAN tag follows.
ETHERNET_TYPE: Final = 12
COOKED_TYPE: Final = 14
COOKED_2_TYPE: Final = 0
COOKED_2_IP: Final = 20
LOOPBACK_IP: Final = 4
"""After the address family, which differs between systems and repeats IP's own version."""

ETHERTYPE_IPV4: Final = 0x0800
ETHERTYPE_IPV6: Final = 0x86DD
ETHERTYPES_IP: Final = (ETHERTYPE_IPV4, ETHERTYPE_IPV6)
ETHERTYPES_VLAN: Final = (0x8100, 0x88A8, 0x9100)
"""Each is followed by a tag of 2 bytes and another EtherType; tags may be nested."""
VLAN_TAG_BYTES: Final = 4
ETHERTYPES_TUNNEL: Final = (0x8847, 0x8848, 0x8863, 0x8864, 0x88E5, 0x88E7)
"""MPLS, PPPoE, MACsec and provider backbone bridges: what they carry is not read."""

# ----------------------------------------------------------------------------------------- IP

PROTOCOL_TCP: Final = 6
PROTOCOL_UDP: Final = 17
PROTOCOL_GRE: Final = 47
PROTOCOLS_IP: Final = (4, 41)
"""IPv4 and IPv6 in IP."""
PROTOCOLS_TUNNEL: Final = (50, 94, 97, 115, 137)
"""ESP, IP in IP of the other kind, EtherIP, L2TP and MPLS: what they carry is not read."""
PROTOCOLS_JOINED: Final = (PROTOCOL_TCP, PROTOCOL_GRE, *PROTOCOLS_IP)
"""Fragments of these are joined. VXLAN forbids them (RFC 7348, 4.3)."""

IPV4_HEADER_BYTES: Final = 20
"""Without options."""
IPV4_LENGTH: Final = 2
IPV4_IDENTIFICATION: Final = 4
IPV4_FRAGMENT: Final = 6
IPV4_PROTOCOL: Final = 9
IPV4_SOURCE: Final = 12
IPV4_DESTINATION: Final = 16
IPV4_IS_FRAGMENT: Final = 0x3FFF
"""The flag "more fragments" and the fragment's offset: a whole datagram has neither."""
IPV4_MORE: Final = 0x2000
IPV4_OFFSET: Final = 0x1FFF
"""In units of 8 bytes."""

IPV6_HEADER_BYTES: Final = 40
IPV6_LENGTH: Final = 4
IPV6_NEXT: Final = 6
IPV6_SOURCE: Final = 8
IPV6_DESTINATION: Final = 24
IPV6_FRAGMENT: Final = 44
IPV6_AUTHENTICATION: Final = 51
IPV6_EXTENSIONS: Final = (0, 43, IPV6_FRAGMENT, IPV6_AUTHENTICATION, 60)
"""Hop-by-hop options, routing, fragment, authentication, destination options."""
IPV6_EXTENSION_BYTES: Final = 8
"""The smallest, and the fragment header's."""
IPV6_IS_FRAGMENT: Final = 0xFFF9
IPV6_MORE: Final = 1
IPV6_OFFSET: Final = 0xFFF8
"""In bytes, since its lowest three bits are none of the offset's."""

# ------------------------------------------------------------------------------------ tunnels

MOST_TUNNELS: Final = 4
"""Inside each other. A packet of more is left out."""

UDP_HEADER_BYTES: Final = 8
UDP_TARGET: Final = 2
VXLAN_PORTS: Final = (4789, 8472)
"""IANA's, and the default of Linux."""
UDP_TUNNEL_PORTS: Final = (1701, 2152, 4754, 4790, 6081, 6635)
"""L2TP, GTP, GRE in UDP, VXLAN GPE, Geneve and MPLS in UDP: what they carry is not read."""
VXLAN_HEADER_BYTES: Final = 8
"""Flags 1 · reserved 3 · network 3 · reserved 1, then an Ethernet frame (RFC 7348)."""
VXLAN_HAS_NETWORK: Final = 8
"""The flag that every VXLAN packet has."""

GRE_HEADER_BYTES: Final = 4
"""Flags and version 2 · EtherType 2, then 4 bytes for each flag (RFC 2784, RFC 2890)."""
GRE_CHECKSUM: Final = 0x8000
GRE_ROUTING: Final = 0x4000
GRE_KEY: Final = 0x2000
GRE_SEQUENCE: Final = 0x1000
GRE_VERSION: Final = 0x0007
"""0. Version 1 is that of PPTP and carries PPP."""
GRE_OPTION_BYTES: Final = 4
GRE_ETHERNET: Final = 0x6558
GRE_ERSPAN: Final = 0x88BE
"""A mirrored Ethernet frame: of type II, with a header, where GRE has a sequence number."""
ERSPAN_HEADER_BYTES: Final = 8
