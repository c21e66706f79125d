"""The kernel that finds TCP in packets against a plain reading of the same headers."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from struct import unpack_from

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.capture.flows import FLOW_BYTES
from crosswire.capture.packet_counts import CUT_PAYLOAD, NAMES, SEGMENT, PacketCounts
from crosswire.capture.packets import innermost_packet, segment_in
from crosswire.capture.reassembly import Segment
from crosswire.pipeline.sources.capture_reader import segment_of
from crosswire.pipeline.sources.packet_kernels import PACKET, find_segments
from tests.pipeline.captures import (
    COOKED,
    COOKED_2,
    ETHERNET,
    LOOP,
    NULL,
    RAW,
    fragments_v4,
    fragments_v6,
    gre,
    ipv4,
    ipv6,
    linked,
    tcp,
    vxlan,
)

LINKS = (ETHERNET, COOKED, COOKED_2, NULL, LOOP, RAW, -1)
Found = tuple[bytes, Segment]


def plainly(packet: bytes, link: int, time: int, depth: int = 0) -> Found | str | None:
    """Flow and segment, `fragment`, or nothing of ours."""
    if depth > 4:
        return None
    at = {ETHERNET: 12, COOKED: 14, COOKED_2: 0}.get(link)
    if at is None:
        packet = packet[4 if link in (NULL, LOOP) else 0 :]
    else:
        ether = packet[at : at + 2]
        packet = packet[20 if link == COOKED_2 else at + 2 :]
        while ether in (b"\x81\x00", b"\x88\xa8", b"\x91\x00"):
            ether, packet = packet[2:4], packet[4:]
        if ether not in (b"\x08\x00", b"\x86\xdd"):
            return None
    if link < 0 or not packet:
        return None
    if packet[0] >> 4 == 4 and len(packet) >= 20:
        total, index = unpack_from(">H2xH", packet, 2)
        kind, at, is_fragment = packet[9], (packet[0] & 15) * 4, bool(index & 0x3FFF)
        stop = total or len(packet)
        ends = [bytes(10) + b"\xff\xff" + packet[start : start + 4] for start in (12, 16)]
    elif packet[0] >> 4 == 6 and len(packet) >= 40:
        kind, at, is_fragment = packet[6], 40, False
        stop = 40 + int.from_bytes(packet[4:6]) if any(packet[4:6]) else len(packet)
        while kind in (0, 43, 44, 51, 60) and at + 8 <= len(packet) and not is_fragment:
            units = packet[at + 1]
            size = {44: 8, 51: (units + 2) * 4}.get(kind, (units + 1) * 8)
            is_fragment = kind == 44 and bool(unpack_from(">H", packet, at + 2)[0] & 0xFFF9)
            kind, at = packet[at], at + size
        ends = [packet[start : start + 16] for start in (8, 24)]
    else:
        return None
    if is_fragment:
        return "fragment" if kind in (4, 6, 41, 47) else None
    if kind != 6:
        found = carried(kind, packet[at:stop])
        return found and plainly(*found, time, depth + 1)
    if at + 20 > min(len(packet), stop):
        return None
    body, flags = at + (packet[at + 12] >> 4) * 4, packet[at + 13] & 31
    if not at + 20 <= body <= stop or not (stop - body or flags & 7):
        return None
    sender, receiver = ends[0] + packet[at : at + 2], ends[1] + packet[at + 2 : at + 4]
    number, acknowledged = unpack_from(">II", packet, at + 4)
    payload = packet[body : min(stop, len(packet))]
    fields = (number, acknowledged, flags, stop - body, payload)
    segment = Segment(sender <= receiver, time, *fields)
    return min(sender, receiver) + max(sender, receiver), segment


def carried(kind: int, body: bytes) -> tuple[bytes, int] | None:
    """What a tunnel carries, and its link type."""
    if kind in (4, 41):
        return body, RAW
    if kind == 47 and len(body) >= 4:
        flags, ether = unpack_from(">HH", body)
        if flags & 0x4007:
            return None
        body = body[4 + 4 * sum(bool(flags & each) for each in (0x8000, 0x2000, 0x1000)) :]
        if ether == 0x88BE:
            return body[8 if flags & 0x1000 else 0 :], ETHERNET
        return {0x0800: (body, RAW), 0x86DD: (body, RAW), 0x6558: (body, ETHERNET)}.get(ether)
    if kind == 17 and len(body) >= 16 and unpack_from(">H", body, 2)[0] in (4789, 8472):
        return (body[16:], ETHERNET) if body[8] & 8 else None
    return None


def tunnelled(random: Random, packet: bytes) -> bytes:
    """In one to five tunnels."""
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        shape, flags = random.randrange(5), random.choice((0, 0, 0x8000, 0x3000, 0xB000, 0x4000))
        frame = linked(packet, ETHERNET, random.choice(((), (7,))))
        inner = 0x0800 if packet[0] >> 4 == 4 else 0x86DD
        if shape == 0:
            body, kind = vxlan(frame, port=random.choice((4789, 8472, 6081))), 17
        elif shape == 1:
            body, kind = gre(packet, inner, flags=flags), 47
        elif shape == 2:
            body, kind = gre(frame, 0x6558, flags=flags), 47
        elif shape == 3:
            header = bytes(8) if flags & 0x1000 else b""
            body, kind = gre(header + frame, 0x88BE, flags=flags), 47
        else:
            body, kind = packet, 4 if packet[0] >> 4 == 4 else 41
        packet = ipv4(body, kind=kind) if random.random() < 0.6 else ipv6(body, kind=kind)
    return packet


def some_packet(random: Random) -> bytes:
    payload = random.randbytes(random.choice((0, 0, 1, 30, 200)))
    segment = tcp(
        payload,
        number=random.randrange(1 << 32),
        flags=random.choice((16, 24, 2, 1, 4, 255)),
        source=random.choice((1, 5040, 65535)),
        target=random.choice((1, 5040, 65535)),
        acknowledged=random.randrange(1 << 32),
        options=bytes(random.choice((0, 0, 12, 40))),
    )
    last = random.choice("12")
    shape = random.randrange(8)
    if shape == 0:
        return random.choice(fragments_v4(segment, 16))
    if shape == 1:
        return random.choice(fragments_v6(segment, 16))
    if shape == 2:
        return ipv4(segment, kind=17)
    if shape < 5:
        return ipv4(segment, f"10.0.0.{last}", options=bytes(random.choice((0, 0, 8))))
    if shape == 5:
        header = random.choice((bytes([60, 0]), bytes([51, 4]), bytes([44, 0]))) + bytes(22)
        return ipv6(segment, f"fd00::{last}", kind=random.choice((0, 43, 51)), extensions=header)
    return ipv6(segment, f"fd00::{last}")


def some_records(random: Random) -> Iterator[tuple[bytes, int]]:
    """Packets and their link types, some of them spoiled or cut."""
    for _ in range(random.randrange(1, 12)):
        link = random.choice(LINKS)
        vlans = random.choice(((), (), (5,), (5, 6)))
        made = some_packet(random)
        if random.random() < 0.4:
            made = tunnelled(random, made)
        packet = bytearray(linked(made, link, vlans))
        if random.random() < 0.3:
            for _ in range(random.randrange(1, 4)):
                packet[random.randrange(len(packet))] = random.choice(
                    (0, 255, random.randrange(256))
                )
        if random.random() < 0.3:
            del packet[random.randrange(len(packet)) :]
        yield bytes(packet), link


@settings(max_examples=300)
@given(st.randoms(use_true_random=False))
def test_the_same_segments_as_read_plainly(random: Random) -> None:
    records = list(some_records(random))
    # Nothing after the last one: what is read beyond a record belongs to no record.
    data = np.frombuffer(b"".join(packet for packet, _ in records), np.uint8)
    sizes = np.array([len(packet) for packet, _ in records], np.int64)
    starts = np.cumsum(sizes) - sizes
    count = len(records)
    times = np.arange(count) + 5
    links = np.array([link for _, link in records], np.int64)
    packets = np.empty(count, PACKET)
    flows = np.empty(count * FLOW_BYTES, np.uint8)
    fragments = np.empty((count, 4), np.int64)
    counts = np.zeros((len(NAMES), 2), np.int64)
    found, pieces = find_segments(
        data, starts, sizes, times, links, packets, flows, fragments, counts
    )
    keys = [flow.tobytes() for flow in flows.reshape(-1, FLOW_BYTES)[:found]]
    segments = [segment_of(packet, data) for packet in packets[:found]]
    expected = [plainly(packet, link, time) for time, (packet, link) in enumerate(records, 5)]
    assert list(zip(keys, segments, strict=True)) == [
        each for each in expected if isinstance(each, tuple)
    ]
    assert fragments[:pieces, 0].tolist() == [
        index for index, each in enumerate(expected) if each == "fragment"
    ]
    assert counts.tolist() == counted_plainly(records)


def counted_plainly(records: list[tuple[bytes, int]]) -> list[list[int]]:
    """What the reader without kernels counts."""
    counts = PacketCounts()
    for packet, link in records:
        kind, inner = innermost_packet(packet, link)
        if kind == SEGMENT:
            kind, found = segment_in(inner, 0)
            if found is not None and found.segment.length > len(found.segment.payload):
                segment = found.segment
                counts.add(CUT_PAYLOAD, segment.length - len(segment.payload))
        counts.add(kind, len(packet))
    return [list(each) for each in zip(counts.packets, counts.size_bytes, strict=True)]
