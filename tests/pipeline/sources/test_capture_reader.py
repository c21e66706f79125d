"""Capture files read without Spark: formats, link types, fragments, splits, damage."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

import dpkt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.capture.packet_counts import PacketCounts
from crosswire.capture.reader import read_segments
from crosswire.errors import InvalidInput
from crosswire.pipeline.sources.capture_reader import (
    Segments,
    read,
    segment_of,
    splits,
)
from crosswire.testing.traffic import SampleTraffic, packets, write_pcap
from tests.pipeline.captures import (
    COOKED,
    COOKED_2,
    ETHERNET,
    LOOP,
    NULL,
    RAW,
    Packets,
    block,
    classic,
    enhanced,
    fragments_v4,
    fragments_v6,
    gre,
    interface,
    ipv4,
    ipv6,
    linked,
    section,
    simple,
    tcp,
    udp,
    vxlan,
)

TIME = 1_700_000_000_123_456_000
Row = tuple[int, int, bytes]


def rows_of(batches: Iterable[Segments]) -> list[Row]:
    """Time, sequence number and payload of each segment."""
    return [
        (segment.time_ns, segment.number, segment.payload)
        for batch in batches
        for segment in (segment_of(packet, batch.data) for packet in batch.packets)
    ]


def rows_in(
    file: Path, split_bytes: int = 1 << 30, counts: PacketCounts | None = None, **options: bool
) -> list[Row]:
    return [
        row
        for split in splits(str(file), split_bytes, **options)
        for row in rows_of(read(split, counts))
    ]


def rows_without_kernels(
    file: Path, counts: PacketCounts | None = None, **options: bool
) -> list[Row]:
    return [
        (segment.time_ns, segment.number, segment.payload)
        for _, segment in read_segments(str(file), counts, **options)
    ]


def rows(tmp_path: Path, data: bytes, **options: bool) -> list[Row]:
    """Both readers give the same, errors and counts included."""
    return counted(tmp_path, data, **options)[0]


def counted(
    tmp_path: Path, data: bytes, **options: bool
) -> tuple[list[Row], dict[str, tuple[int, int]]]:
    """The rows, and packets and bytes by name."""
    file = tmp_path / "capture"
    file.write_bytes(data)
    counts, plain_counts = PacketCounts(), PacketCounts()
    try:
        found = rows_in(file, counts=counts, **options)
    except InvalidInput as error:
        with pytest.raises(InvalidInput, match=re.escape(str(error))):
            rows_without_kernels(file, **options)
        raise
    assert rows_without_kernels(file, plain_counts, **options) == found
    assert counts == plain_counts
    return found, {name: (packets, size) for name, packets, size in counts.rows()}


HELLO = [(TIME, 1, b"hello")]


@pytest.mark.parametrize("link", [ETHERNET, RAW, NULL, LOOP, COOKED, COOKED_2])
@pytest.mark.parametrize("packet", [ipv4(tcp(b"hello")), ipv6(tcp(b"hello"))], ids=["v4", "v6"])
def test_every_link_type(tmp_path: Path, link: int, packet: bytes) -> None:
    assert rows(tmp_path, classic([(TIME, linked(packet, link))], link)) == HELLO


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("nanoseconds", [False, True])
def test_both_byte_orders_and_units(tmp_path: Path, order: str, nanoseconds: bool) -> None:
    time = TIME + (789 if nanoseconds else 0)
    data = classic([(time, ipv4(tcp(b"hello")))], RAW, order=order, nanoseconds=nanoseconds)
    assert rows(tmp_path, data) == [(time, 1, b"hello")]


@pytest.mark.parametrize("vlans", [(5,), (5, 6)])
def test_vlan_tags(tmp_path: Path, vlans: tuple[int, ...]) -> None:
    packet = linked(ipv4(tcp(b"hello")), ETHERNET, vlans)
    assert rows(tmp_path, classic([(TIME, packet)])) == HELLO


@pytest.mark.parametrize("order", ["<", ">"])
def test_pcapng(tmp_path: Path, order: str) -> None:
    packet = linked(ipv4(tcp(b"hello")), ETHERNET)
    data = section(order) + interface(ETHERNET, order) + block(5, b"statistics..", order)
    data += enhanced(TIME // 1000, packet, order)
    assert rows(tmp_path, data) == HELLO


@pytest.mark.parametrize(
    ("unit", "stamp"),
    [(6, TIME // 1000), (9, TIME), (3, TIME // 10**6), (0x80 | 20, (TIME << 20) // 10**9)],
)
def test_pcapng_units_of_time(tmp_path: Path, unit: int, stamp: int) -> None:
    data = section() + interface(RAW, unit=unit) + enhanced(stamp, ipv4(tcp(b"hello")))
    ((time, _, _),) = rows(tmp_path, data)
    assert abs(time - TIME) <= 10**6


@pytest.mark.parametrize("unit", [27, 28, 80, 127, 0x80 | 62, 0x80 | 63, 0xFF])
def test_pcapng_units_too_small_for_any_time(tmp_path: Path, unit: int) -> None:
    data = section() + interface(RAW, unit=unit) + enhanced(5, ipv4(tcp(b"hello")))
    assert rows(tmp_path, data) == [(0, 1, b"hello")]


def test_pcapng_sections_interfaces_and_simple_packets(tmp_path: Path) -> None:
    data = section("<") + interface(RAW) + interface(ETHERNET, offset=100) + interface(249)
    data += enhanced(0, ipv4(tcp(b"a")), number=0)
    data += enhanced(0, linked(ipv4(tcp(b"b")), ETHERNET), number=1)
    data += enhanced(0, ipv4(tcp(b"of a link that we can't read")), number=2)
    data += simple(ipv4(tcp(b"c")))
    data += (
        section(">") + interface(COOKED, ">") + enhanced(5, linked(ipv4(tcp(b"d")), COOKED), ">")
    )
    found = rows(tmp_path, data)
    assert [payload for _, _, payload in found] == [b"a", b"b", b"c", b"d"]
    assert [found[0][0], found[1][0], found[3][0]] == [0, 100 * 10**9, 5000]


def test_padding_and_options_are_no_payload(tmp_path: Path) -> None:
    packet = linked(ipv4(tcp(b"hello", options=bytes(12)), options=bytes(8)), ETHERNET) + b"pad!"
    assert rows(tmp_path, classic([(TIME, packet)])) == HELLO


def test_ipv6_extension_headers_are_passed_over(tmp_path: Path) -> None:
    hop_by_hop = bytes([60, 0]) + bytes(6) + bytes([6, 1]) + bytes(14)
    packet = ipv6(tcp(b"hello"), kind=0, extensions=hop_by_hop)
    assert rows(tmp_path, classic([(TIME, packet)], RAW)) == HELLO


def test_what_is_not_tcp_is_counted(tmp_path: Path) -> None:
    hello = ipv4(tcp(b"hello"))
    others = {
        "not TCP": [ipv4(udp(b"name?", 53), kind=17), ipv4(b"\x08\0", kind=1)],
        "acknowledgements": [ipv4(tcp(b"", flags=16))],
        "malformed": [b"\x00" * 40, ipv4(tcp(b"")[:16])],
        "cut headers": [b"\x45\x00", hello[:30], b""],
        "encapsulated": [
            ipv4(udp(hello, 6081), kind=17),
            ipv4(hello, kind=50),
            ipv4(gre(hello, 0x880B), kind=47),
        ],
        "incomplete fragments": fragments_v4(tcp(b"x" * 100), 64)[:1],
    }
    packets = [hello, *(each for group in others.values() for each in group)]
    found, counts = counted(tmp_path, classic([(TIME, packet) for packet in packets], RAW))
    assert found == HELLO
    assert counts == {
        "segments": (1, len(hello)),
        **{name: (len(group), sum(map(len, group))) for name, group in others.items()},
    }


def test_other_link_layers_are_counted(tmp_path: Path) -> None:
    hello, arp = linked(ipv4(tcp(b"hello")), ETHERNET), bytes(12) + b"\x08\x06" + bytes(28)
    mpls = bytes(12) + b"\x88\x47" + bytes(30)
    data = section() + interface(ETHERNET) + interface(147)
    data += enhanced(TIME // 1000, hello) + enhanced(0, b"?", number=1)
    data += enhanced(TIME // 1000, arp) + enhanced(TIME // 1000, mpls)
    found, counts = counted(tmp_path, data)
    assert found == HELLO
    assert counts == {
        "segments": (1, len(hello)),
        "unreadable link type": (1, 1),
        "not IP": (1, len(arp)),
        "encapsulated": (1, len(mpls)),
        # The packet of the interface that can't be read has a time all the same.
        "clock steps": (1, 0),
    }


TUNNELS = {
    "vxlan": lambda packet: ipv4(vxlan(linked(packet, ETHERNET)), kind=17),
    "vxlan of Linux, over IPv6": lambda packet: ipv6(
        vxlan(linked(packet, ETHERNET, (3,)), port=8472), kind=17
    ),
    "gre": lambda packet: ipv4(gre(packet, 0x0800), kind=47),
    "gre with options": lambda packet: ipv4(gre(packet, 0x0800, flags=0xB000), kind=47),
    "gre with Ethernet": lambda packet: ipv6(gre(linked(packet, ETHERNET), 0x6558), kind=47),
    "erspan": lambda packet: ipv4(
        gre(bytes(8) + linked(packet, ETHERNET), 0x88BE, flags=0x1000), kind=47
    ),
    "ip in ip": lambda packet: ipv6(packet, kind=4),
    "gre in vxlan": lambda packet: ipv4(
        vxlan(linked(ipv4(gre(packet, 0x0800), kind=47), ETHERNET)), kind=17
    ),
}


@pytest.mark.parametrize("name", TUNNELS)
def test_tunnels_are_read(tmp_path: Path, name: str) -> None:
    packet = linked(TUNNELS[name](ipv4(tcp(b"hello"))), ETHERNET) + b"trailer"
    found, counts = counted(tmp_path, classic([(TIME, packet)]))
    assert found == HELLO
    assert counts == {"segments": (1, len(packet))}


def test_fragments_of_a_tunnel_and_in_a_tunnel(tmp_path: Path) -> None:
    payload = bytes(range(256)) * 4
    inside = [TUNNELS["gre"](each) for each in fragments_v4(tcp(payload), 400)]
    body = gre(ipv4(tcp(payload)), 0x0800)
    outside = [
        ipv4(body[:800], kind=47, fragment=0x2000, identifier=3),
        ipv4(body[800:], kind=47, fragment=100, identifier=3),
    ]
    for pieces in (inside, outside):
        found, counts = counted(tmp_path, classic([(TIME, each) for each in pieces], RAW))
        assert found == [(TIME, 1, payload)]
        assert counts == {"segments": (len(pieces), sum(map(len, pieces)))}


def test_tunnels_without_end_are_left_out(tmp_path: Path) -> None:
    packet = ipv4(tcp(b"hello"))
    for _ in range(5):
        packet = ipv4(packet, kind=4)
    found, counts = counted(tmp_path, classic([(TIME, packet)], RAW))
    assert (found, counts) == ([], {"encapsulated": (1, len(packet))})


def test_what_the_snap_length_cut_is_counted(tmp_path: Path) -> None:
    packet = ipv4(tcp(b"hello and more"))
    found, counts = counted(tmp_path, classic([(TIME, packet[:45])], RAW))
    assert found == HELLO
    assert counts == {"segments": (1, 45), "cut payloads": (1, 9)}


def test_a_clock_that_is_set_back_is_counted(tmp_path: Path) -> None:
    packet = ipv4(tcp(b"hello"))
    times = [TIME, TIME - 10**9, TIME, TIME - 3 * 10**9, TIME - 2 * 10**9, TIME - 10**10]
    _, counts = counted(tmp_path, classic([(each, packet) for each in times], RAW))
    assert counts["clock steps"] == (2, 0)


@pytest.mark.parametrize("cut", [fragments_v4, fragments_v6])
@pytest.mark.parametrize("reverse", [False, True])
def test_fragments(tmp_path: Path, cut: object, reverse: bool) -> None:
    payload = bytes(range(256)) * 10
    pieces = cut(tcp(payload), 800)  # type: ignore[operator]
    other = ipv4(tcp(b"between", number=77))
    order = [*pieces[:1], other, *pieces[1:]]
    found = rows(tmp_path, classic([(TIME, each) for each in order[:: -1 if reverse else 1]], RAW))
    assert (TIME, 1, payload) in found and (TIME, 77, b"between") in found and len(found) == 2


@pytest.mark.parametrize("compress", ["gzip", "zstd"])
def test_compressed_files(tmp_path: Path, compress: str) -> None:
    data = classic([(TIME, ipv4(tcp(b"hello")))], RAW)
    if compress == "gzip":
        assert rows(tmp_path, gzip.compress(data)) == HELLO
    else:
        buffer = pa.BufferOutputStream()
        with pa.CompressedOutputStream(buffer, "zstd") as stream:
            stream.write(data)
        assert rows(tmp_path, buffer.getvalue().to_pybytes()) == HELLO


TWO = classic([(TIME, ipv4(tcp(b"hello"))), (TIME, ipv4(tcp(b"again")))], RAW)


def zipped(data: bytes) -> bytes:
    """Each byte of it can be read before the end is missed."""
    compressor = zlib.compressobj(wbits=31)
    return compressor.compress(data) + compressor.flush(zlib.Z_SYNC_FLUSH)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (TWO[:-3], "ends in the middle of a record, at byte 85"),
        (zipped(TWO[:-3]), "can't read"),
        (gzip.compress(TWO[:-3]), "ends in the middle of a record, at byte 85"),
        (TWO[:85] + b"\xff" * 58, "damaged at byte 85"),
        (gzip.compress(TWO[:85] + b"\xff" * 58), "damaged at byte 85"),
    ],
    ids=["plain", "gzip", "packed when it was cut", "damaged", "damaged and packed"],
)
def test_a_truncated_capture_is_refused_or_read_up_to_there(
    tmp_path: Path, data: bytes, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        rows(tmp_path, data)
    found, counts = counted(tmp_path, data, skip_damaged=True)
    assert found == HELLO
    assert counts["truncated files"] == (1, 58)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"GET / HTTP/1.1\r\n\r\n and more", "no capture file"),
        (classic([], 147), "link type 147"),
        (classic([(TIME, ipv4(tcp(b"a")))], RAW) + b"\xff" * 16, "damaged at byte 81"),
        (section() + interface(RAW) + b"\x06\0\0\0\x0d\0\0\0" + bytes(8), "damaged"),
        (section() + enhanced(1, b"before any interface"), "damaged"),
        (gzip.compress(classic([], RAW), mtime=0)[:-9], "can't read"),
        (gzip.compress(bytes(1000), mtime=0)[:12] + b"\xff" * 50, "no capture file"),
    ],
)
def test_damage_is_reported(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        rows(tmp_path, data)


@pytest.mark.parametrize("pack", [bytes, zipped])
def test_a_header_that_is_cut(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    with pytest.raises(InvalidInput):
        rows(tmp_path, pack(TWO[:20]))
    assert counted(tmp_path, pack(TWO[:20]), skip_damaged=True) == (
        [],
        {"truncated files": (1, 20)},
    )


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        splits(str(tmp_path / "nothing"), 10)


def test_the_same_segments_as_dpkt(tmp_path: Path) -> None:
    file = tmp_path / "a.pcap"
    conversations = SampleTraffic(protocols=("emp",), connections=3, messages=10).conversations()
    write_pcap(file, [packet for each in conversations for packet in packets(each)])
    expected = []
    with file.open("rb") as stream:
        for time, packet in dpkt.pcap.Reader(stream):
            segment = dpkt.ethernet.Ethernet(packet).ip.tcp
            if segment.data or segment.flags & 7:
                expected.append((round(float(time) * 1e6), segment.seq, bytes(segment.data)))
    assert [(round(time / 1000), *rest) for time, *rest in rows_in(file)] == expected
    assert rows_without_kernels(file) == rows_in(file)


def capture_of(kinds: list[str], *, ng: bool) -> bytes:
    """A capture with segments of some kinds, some of which hold captures themselves."""
    made: Packets = []
    for number, kind in enumerate(kinds):
        inner = classic([(TIME, ipv4(tcp(b"inner")))], RAW)
        payload = {"plain": b"x", "large": b"y" * 1000, "fragmented": b"z" * 900}.get(kind, inner)
        segment = tcp(payload, number=number)
        whole = fragments_v4(segment, 400, number) if kind == "fragmented" else [ipv4(segment)]
        made += [(TIME + number, packet) for packet in whole]
    if not ng:
        return classic(made, RAW, nanoseconds=True)
    body = [
        simple(packet) if number % 5 == 4 else enhanced(time, packet)
        for number, (time, packet) in enumerate(made)
    ]
    again = section() + interface(RAW, unit=9)
    return again + b"".join(body) + again


KINDS = st.lists(st.sampled_from(["plain", "large", "fragmented", "inside"]), max_size=40)


@settings(max_examples=30)
@given(KINDS, st.integers(1, 3000), st.booleans())
def test_any_block_gives_the_same_segments(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], block_bytes: int, ng: bool
) -> None:
    """In the order in which they were captured, and where they are in the file."""
    file = tmp_path_factory.mktemp("blocks") / "capture"
    file.write_bytes(capture_of(kinds, ng=ng))
    (split,) = splits(str(file), 1 << 30)
    assert rows_of(read(split, block_bytes=block_bytes)) == rows_of(read(split))
    indexes = [
        index for lot in read(split, block_bytes=block_bytes) for index in lot.offsets.tolist()
    ]
    assert indexes == sorted(set(indexes)) and len(indexes) == len(kinds)
    assert [number for _, number, _ in rows_of(read(split))] == list(range(len(kinds)))


@settings(max_examples=150)
@given(KINDS, st.randoms(use_true_random=False), st.booleans())
def test_what_is_spoiled_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], random: Random, ng: bool
) -> None:
    data = bytearray(capture_of([*kinds, "fragmented"], ng=ng))
    for _ in range(random.randrange(1, 30)):
        data[random.randrange(24, len(data))] = random.randrange(256)
    file = tmp_path_factory.mktemp("spoiled") / "capture"
    file.write_bytes(data)
    try:
        found = rows_in(file)
    except InvalidInput as error:
        assert any(each in str(error) for each in ("damaged", "interfaces", "ends in the middle"))
        with pytest.raises(InvalidInput, match=re.escape(str(error))):
            rows_without_kernels(file)
    else:
        assert all(len(payload) <= len(data) for _, _, payload in found)
        # A spoiled unit of time makes numbers that 64 bits don't hold: times are left out.
        assert [row[1:] for row in rows_without_kernels(file)] == [row[1:] for row in found]


@settings(max_examples=30)
@given(KINDS, st.integers(200, 3000), st.booleans())
def test_any_split_gives_the_same_segments(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], split_bytes: int, ng: bool
) -> None:
    """Captures that hold captures too: record boundaries are never guessed."""
    data = capture_of(kinds, ng=ng)
    file = tmp_path_factory.mktemp("split") / "capture"
    file.write_bytes(data)
    assert sorted(rows_in(file, split_bytes)) == sorted(rows_in(file))
    if len(data) > 2 * split_bytes + 3000 and "fragmented" not in kinds:
        assert len(splits(str(file), split_bytes)) > 1
