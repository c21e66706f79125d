"""Capture files read without Spark: formats, link types, fragments, splits, damage."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable
from pathlib import Path
from random import Random

import dpkt
import pyarrow as pa
import pytest
from benchmarks.traffic import Traffic, packets, write_pcap
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.capture.headers import is_capture
from crosswire.capture.reader import read_segments
from crosswire.errors import InvalidInput
from crosswire.pipeline.sources.capture_reader import (
    Segments,
    read,
    segment_of,
    splits,
)
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
    interface,
    ipv4,
    ipv6,
    linked,
    section,
    simple,
    tcp,
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


def rows_in(file: Path, split_bytes: int = 1 << 30) -> list[Row]:
    return [row for split in splits(str(file), split_bytes) for row in rows_of(read(split))]


def rows_without_kernels(file: Path) -> list[Row]:
    return [
        (segment.time_ns, segment.number, segment.payload)
        for _, segment in read_segments(str(file))
    ]


def rows(tmp_path: Path, data: bytes) -> list[Row]:
    """Both readers give the same, errors included."""
    file = tmp_path / "capture"
    file.write_bytes(data)
    try:
        found = rows_in(file)
    except InvalidInput as error:
        with pytest.raises(InvalidInput, match=re.escape(str(error))):
            rows_without_kernels(file)
        raise
    assert rows_without_kernels(file) == found
    return found


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


def test_what_is_not_tcp_is_passed_over(tmp_path: Path) -> None:
    others = [
        ipv4(b"x" * 30, kind=17),
        ipv4(tcp(b"", flags=16)),
        b"\x00" * 40,
        b"\x45\x00",
        ipv4(tcp(b"hello"))[:30],
        b"",
    ]
    data = classic([(TIME, packet) for packet in [*others, ipv4(tcp(b"hello"))]], RAW)
    assert rows(tmp_path, data) == HELLO


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


def test_an_unfinished_last_record_is_left_out(tmp_path: Path) -> None:
    data = classic([(TIME, ipv4(tcp(b"hello"))), (TIME, ipv4(tcp(b"again")))], RAW)
    assert rows(tmp_path, data[:-3]) == HELLO


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
        (gzip.compress(bytes(1000), mtime=0)[:12] + b"\xff" * 50, "can't read"),
    ],
)
def test_damage_is_reported(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        rows(tmp_path, data)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        splits(str(tmp_path / "nothing"), 10)


def test_a_capture_is_known_by_its_content(tmp_path: Path) -> None:
    for name, data in (("a", classic([])), ("b", section()), ("c", gzip.compress(b""))):
        (tmp_path / name).write_bytes(data)
        assert is_capture(tmp_path / name)
    (tmp_path / "d").write_bytes(b"text")
    assert not is_capture(tmp_path / "d")


def test_the_same_segments_as_dpkt(tmp_path: Path) -> None:
    file = tmp_path / "a.pcap"
    conversations = Traffic(protocols=("emp",), connections=3, messages=10).conversations()
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
        assert "damaged" in str(error) or "interfaces" in str(error)
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
