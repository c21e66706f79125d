"""Every share of the flows out of the files themselves: together they are all there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosswire.capture.classify import PortMap
from crosswire.capture.reassembly import Segment
from crosswire.errors import InvalidInput
from crosswire.pipeline.sources.capture_reader import Split, plain_file, read, segment_of
from crosswire.pipeline.sources.flow_rows import FlowRows
from crosswire.pipeline.sources.flow_shares import BUCKETS, survey
from crosswire.pipeline.sources.pcap import wire_of_share
from crosswire.testing.traffic import SampleTraffic, packets, write_pcap
from tests.pipeline.captures import RAW, Packets, classic, fragments_v4, ipv4, swapped, tcp

PORTS = PortMap()
TALKS = SampleTraffic(connections=40, messages=10, payload_bytes=64)

Rows = list[tuple[Any, ...]]


def expected(files: list[Split], since_ns: int = 0) -> Rows:
    """Segment by segment, sorted in Python."""
    flows: dict[bytes, list[tuple[int, int, int, Segment]]] = {}
    for number, file in enumerate(files):
        for batch in read(file):
            for packet, flow, index in zip(batch.packets, batch.flows, batch.offsets, strict=True):
                segment = segment_of(packet, batch.data)
                if segment.time_ns >= since_ns:
                    at = (segment.time_ns, number, int(index), segment)
                    flows.setdefault(flow.tobytes(), []).append(at)
    found: Rows = []
    for flow, own in flows.items():
        rows = FlowRows(flow, PORTS)
        for *_, segment in sorted(own, key=lambda each: each[:3]):
            found += rows.add(segment)
        found += rows.finish()
    return sorted(found, key=lambda row: (row[2], row[1]))


def made(files: list[Split], count: int, since_ns: int = 0) -> list[Rows]:
    """What each of `count` shares gives."""
    return [
        [
            tuple(row.values())
            for batch in wire_of_share(files, share, PORTS, since_ns)
            for row in batch.to_pylist()
        ]
        for share in survey(files).shares(count)
    ]


def together(parts: list[Rows]) -> Rows:
    return sorted((row for part in parts for row in part), key=lambda row: (row[2], row[1]))


def files_of(folder: Path, *captures: Packets) -> list[Split]:
    found = []
    for number, capture in enumerate(captures):
        write_pcap(folder / f"{number}.pcap", capture)
        file = plain_file(str(folder / f"{number}.pcap"))
        assert file is not None
        found.append(file)
    return found


def talks(traffic: SampleTraffic = TALKS) -> Packets:
    return sorted(
        packet for talk in traffic.conversations() for packet in packets(talk, segment_bytes=50)
    )


@pytest.mark.parametrize("count", [1, 3])
def test_shares_are_all_there_is(tmp_path: Path, count: int) -> None:
    files = files_of(tmp_path, talks())
    parts = made(files, count)
    assert all(parts)
    assert together(parts) == expected(files)


def test_shares_are_of_about_the_same_size(tmp_path: Path) -> None:
    capture = talks()
    surveyed = survey(files_of(tmp_path, capture))
    parts = surveyed.shares(4)
    loads = np.bincount(parts[0].owners, surveyed.size_bytes, 4)
    assert loads.min() > 0.7 * loads.max()
    assert sum(part.packets for part in parts) == surveyed.packets.sum()
    # Those with bytes, SYN, FIN or RST.
    counted = [packet for _, packet in capture if len(packet) > 54 or packet[47] & 7]
    assert surveyed.packets.sum() == len(counted)


def test_files_that_overlap_in_time_are_merged(tmp_path: Path) -> None:
    """One for each direction, and packets that are not in the order of their times."""
    made_: Packets = [packet for ten in swapped(talks()) for packet in ten]
    forward = [each for each in made_ if each[1][34:36] >= b"\x9c"]
    backward = [each for each in made_ if each[1][34:36] < b"\x9c"]
    files = files_of(tmp_path, backward, forward[::-1])
    assert together(made(files, 2)) == expected(files)
    assert {row[3] for row in expected(files)} == {"forward", "backward"}


def test_fragments_are_where_they_belong(tmp_path: Path) -> None:
    """A datagram is whole with its last fragment, between the packets around that one."""
    pieces = fragments_v4(tcp(b"z" * 900, number=2), 400)
    around = [ipv4(tcp(b"a", number=1)), ipv4(tcp(b"c", number=902))]
    file = tmp_path / "a"
    file.write_bytes(classic([(5000, each) for each in (around[0], *pieces, around[1])], RAW))
    split = plain_file(str(file))
    assert split is not None
    rows = together(made([split], 2))
    assert [row[8] for row in rows] == [b"a", b"z" * 900, b"c"]
    assert rows == expected([split])


def test_since(tmp_path: Path) -> None:
    capture = talks()
    files = files_of(tmp_path, capture)
    since_ns = capture[len(capture) // 2][0]
    assert together(made(files, 2, since_ns)) == expected(files, since_ns)


def test_more_flows_than_there_is_room_for_at_first(tmp_path: Path) -> None:
    many = SampleTraffic(protocols=("emp",), connections=3000, messages=1, payload_bytes=8)
    files = files_of(tmp_path, talks(many))
    rows = made(files, 1)[0]
    assert len({row[2] for row in rows}) == 3000
    assert (survey(files).packets > 0).sum() > BUCKETS // 2


def test_nothing_of_ours(tmp_path: Path) -> None:
    assert made(files_of(tmp_path, []), 2) == [[], []]


def test_a_file_that_is_cut_short_meanwhile_is_an_error(tmp_path: Path) -> None:
    """And not the end of the process, which has it in memory."""
    (file,) = files_of(tmp_path, talks())
    (share,) = survey([file]).shares(1)
    batches = wire_of_share([file], share, PORTS, 0)
    next(batches)
    with Path(file.path).open("r+b") as opened:
        opened.truncate(100)
    with pytest.raises(InvalidInput, match="was truncated while it was read"):
        next(batches)


def test_what_is_added_later_is_not_read(tmp_path: Path) -> None:
    capture = talks()
    files = files_of(tmp_path, capture[:500])
    before = expected(files)
    write_pcap(tmp_path / "0.pcap", capture)
    assert together(made(files, 2)) == before


def test_a_changed_capture_is_reported(tmp_path: Path) -> None:
    capture = talks()
    (share,) = survey(files_of(tmp_path, capture[:100])).shares(1)
    with pytest.raises(InvalidInput, match="changed"):
        list(wire_of_share(files_of(tmp_path, capture), share, PORTS, 0))


def test_a_truncated_capture_is_reported(tmp_path: Path) -> None:
    files = files_of(tmp_path, talks())
    (tmp_path / "0.pcap").write_bytes(b"")
    with pytest.raises(InvalidInput, match="can't read"):
        survey(files)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"GET / HTTP/1.1\r\n\r\n and more", "no capture file"),
        (classic([(1, ipv4(tcp(b"a")))], RAW) + b"\xff" * 16, "damaged at byte 81"),
    ],
)
def test_damage_is_reported(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(InvalidInput, match=message):
        survey([file for file in [plain_file(str(tmp_path / "a"))] if file is not None])
