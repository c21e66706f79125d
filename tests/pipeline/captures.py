"""Capture files made by hand: every link type, byte order and wrapping that we say we can read."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from struct import pack

from crosswire.testing.traffic import SampleTraffic, packets, write_pcap

ETHERNET, RAW, NULL, LOOP, COOKED, COOKED_2 = 1, 101, 0, 108, 113, 276

LATE = 5
"""Number of the connection whose beginning is missing in `write_captures`."""

Packets = list[tuple[int, bytes]]
"""Times in ns, packets."""


def tcp(
    payload: bytes = b"",
    *,
    number: int = 1,
    flags: int = 24,
    source: int = 40_000,
    target: int = 5040,
    acknowledged: int = 0,
    options: bytes = b"",
) -> bytes:
    size = (20 + len(options)) // 4
    head = pack(">HHIIBBHHH", source, target, number, acknowledged, size << 4, flags, 1000, 0, 0)
    return head + options + payload


def ipv4(
    body: bytes,
    source: str = "10.0.0.1",
    target: str = "10.0.0.2",
    *,
    fragment: int = 0,
    identifier: int = 7,
    kind: int = 6,
    options: bytes = b"",
) -> bytes:
    size = 20 + len(options)
    head = pack(
        ">BBHHHBBH", 0x40 | size // 4, 0, size + len(body), identifier, fragment, 64, kind, 0
    )
    return head + ip_address(source).packed + ip_address(target).packed + options + body


def ipv6(
    body: bytes,
    source: str = "fd00::1",
    target: str = "fd00::2",
    *,
    kind: int = 6,
    extensions: bytes = b"",
) -> bytes:
    head = pack(">IHBB", 6 << 28, len(extensions) + len(body), kind, 64)
    return head + ip_address(source).packed + ip_address(target).packed + extensions + body


def fragments_v4(body: bytes, size: int, identifier: int = 9) -> list[bytes]:
    starts = range(0, len(body), size)
    return [
        ipv4(
            body[start : start + size],
            identifier=identifier,
            fragment=start // 8 | (0x2000 if start + size < len(body) else 0),
        )
        for start in starts
    ]


def fragments_v6(body: bytes, size: int, identifier: int = 9) -> list[bytes]:
    made = []
    for start in range(0, len(body), size):
        more = start + size < len(body)
        extension = pack(">BBHI", 6, 0, start | more, identifier)
        made.append(ipv6(body[start : start + size], kind=44, extensions=extension))
    return made


def udp(body: bytes, target: int, source: int = 50_000) -> bytes:
    return pack(">HHHH", source, target, 8 + len(body), 0) + body


def vxlan(frame: bytes, *, port: int = 4789, network: int = 42) -> bytes:
    """An Ethernet frame in UDP."""
    return udp(b"\x08\0\0\0" + pack(">I", network << 8) + frame, port)


def gre(body: bytes, kind: int, *, flags: int = 0) -> bytes:
    """With a checksum, a key and a sequence number as the flags have them."""
    options = bytes(4 * sum(bool(flags & each) for each in (0x8000, 0x2000, 0x1000)))
    return pack(">HH", flags, kind) + options + body


def linked(packet: bytes, link: int, vlans: tuple[int, ...] = ()) -> bytes:
    ether = b"\x08\x00" if packet[0] >> 4 == 4 else b"\x86\xdd"
    family = 2 if packet[0] >> 4 == 4 else 30
    if link == ETHERNET:
        tags = b"".join(b"\x81\x00" + pack(">H", vlan) for vlan in vlans)
        return bytes(12) + tags + ether + packet
    if link == COOKED:
        return bytes(14) + ether + packet
    if link == COOKED_2:
        return ether + bytes(18) + packet
    if link == NULL:
        return pack("<I", family) + packet
    if link == LOOP:
        return pack(">I", family) + packet
    return packet


def classic(
    packets: Packets, link: int = ETHERNET, *, order: str = "<", nanoseconds: bool = False
) -> bytes:
    magic = 0xA1B23C4D if nanoseconds else 0xA1B2C3D4
    made = [pack(f"{order}IHHIIII", magic, 2, 4, 0, 0, 65535, link)]
    for time, packet in packets:
        seconds, rest = divmod(time, 10**9)
        rest = rest if nanoseconds else rest // 1000
        made.append(pack(f"{order}IIII", seconds, rest, len(packet), len(packet)) + packet)
    return b"".join(made)


def block(kind: int, body: bytes, order: str = "<") -> bytes:
    body += bytes(-len(body) % 4)
    size = 12 + len(body)
    return pack(f"{order}II", kind, size) + body + pack(f"{order}I", size)


def section(order: str = "<") -> bytes:
    return block(0x0A0D0D0A, pack(f"{order}IHHq", 0x1A2B3C4D, 1, 0, -1), order)


def interface(link: int, order: str = "<", *, unit: int | None = None, offset: int = 0) -> bytes:
    options = b""
    if unit is not None:
        options += pack(f"{order}HHB3x", 9, 1, unit)
    if offset:
        options += pack(f"{order}HHq", 14, 8, offset)
    return block(1, pack(f"{order}HHI", link, 0, 0) + options + bytes(4), order)


def enhanced(stamp: int, packet: bytes, order: str = "<", number: int = 0) -> bytes:
    head = pack(f"{order}IIIII", number, stamp >> 32, stamp & 0xFFFFFFFF, len(packet), len(packet))
    return block(6, head + packet, order)


def simple(packet: bytes, order: str = "<") -> bytes:
    return block(3, pack(f"{order}I", len(packet)) + packet, order)


def write_captures(folder: Path, traffic: SampleTraffic) -> None:
    """The traffic in two files, cut in the middle: packets doubled, swapped, one connection on a
    port that nobody knows, one whose beginning is missing."""
    folder.mkdir()
    made: Packets = []
    for conversation in traffic.conversations():
        if conversation.number == 2:
            conversation = replace(conversation, port=9999)
        own = packets(conversation, segment_bytes=100, isn=(2**32 - 50, 9))
        if conversation.number == LATE:
            own = own[8:]
        own = own[:5] + own[4:5] + own[5:]
        made += [packet for pair in swapped(own) for packet in pair]
    made.sort(key=lambda packet: packet[0])
    half = len(made) // 2
    write_pcap(folder / "a.pcap", made[:half])
    (folder / "b.pcap.gz").write_bytes(gzip.compress(classic(made[half:], nanoseconds=True)))


def swapped(packets_: Packets) -> Iterator[Packets]:
    """Every tenth packet comes after the one behind it, at the same time."""
    for start in range(0, len(packets_), 10):
        ten = packets_[start : start + 10]
        if len(ten) == 10:
            (time, first), (_, second) = ten[8:]
            ten[8:] = [(time, second), (time, first)]
        yield ten
