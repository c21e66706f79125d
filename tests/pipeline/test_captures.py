"""Captures shuffled, lossy, cut, encapsulated and truncated, and what is found then.

The same conversations are in one file for each kind of mishap, between other addresses; one run
reads them all.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession

from crosswire.capture.classify import PortMap
from crosswire.capture.packet_counts import NAMES
from crosswire.errors import PipelineError
from crosswire.pipeline.batch import BatchJob, run_batch
from crosswire.pipeline.sources.capture_reader import plain_file
from crosswire.pipeline.sources.flow_shares import survey
from crosswire.pipeline.sources.inputs import find_inputs
from crosswire.pipeline.sources.pcap import Captures, wire_of_share
from crosswire.pipeline.stream.run import BatchDone, Stream, run_stream
from crosswire.testing.traffic import SampleTraffic, packets
from tests.pipeline import tshark
from tests.pipeline.captures import (
    ETHERNET,
    Packets,
    classic,
    gre,
    ipv4,
    ipv6,
    linked,
    tcp,
    udp,
    vxlan,
)
from tests.pipeline.conftest import Made
from tests.pipeline.stream.test_run import few_tasks

__all__ = ["few_tasks"]

TRAFFIC = SampleTraffic(seed=3, connections=10, messages=8, payload_bytes=200)
SNAP_BYTES = 120
HOUR_US = 3_600_000_000
TABLES = frozenset({"frames", "messages", "violations", "directions", "accounting"})

Mishap = Callable[[Packets], Packets]


def shuffled(given: Packets) -> Packets:
    """Packets change places with their neighbours, and get the times of their new places."""
    random = Random(4)
    places = sorted(range(len(given)), key=lambda index: index + random.uniform(0, 12))
    return [(time, given[place][1]) for (time, _), place in zip(given, places, strict=True)]


def quiet(given: Packets) -> Packets:
    """Shuffled, and the times that are written are so far apart that neighbours are seconds away:
    SYN comes after bytes, FIN before them."""
    start = given[0][0]
    return [(start + 1000 * (time - start), frame) for time, frame in shuffled(given)]


def stepped(given: Packets) -> Packets:
    """The clock is set back by an hour in the middle."""
    half = len(given) // 2
    return [*given[:half], *((time - HOUR_US, frame) for time, frame in given[half:])]


def lossy(given: Packets) -> Packets:
    random = Random(2)
    return [packet for packet in given if random.random() >= 0.02]


def in_vxlan(given: Packets) -> Packets:
    return [(time, linked(ipv4(vxlan(frame), kind=17), ETHERNET)) for time, frame in given]


def in_gre(given: Packets) -> Packets:
    return [
        (time, linked(ipv6(gre(frame[14:], 0x0800), kind=47), ETHERNET)) for time, frame in given
    ]


MISHAPS: dict[str, Mishap] = {
    "clean": lambda given: given,
    "shuffled": shuffled,
    "stepped": stepped,
    "vxlan": in_vxlan,
    "gre": in_gre,
    "lossy": lossy,
    "cut": lambda given: given,
    "quiet": quiet,
}
SAME = ("shuffled", "quiet", "stepped", "vxlan", "gre")
OTHERS: Packets = [
    (0, linked(ipv4(udp(b"name?", 53), kind=17), ETHERNET)),
    (0, bytes(12) + b"\x08\x06" + bytes(28)),
    (0, linked(ipv4(udp(bytes(40), 6081), kind=17), ETHERNET)),
]
"""A question for a name, one for an address, and a tunnel that is not read."""


def between(mishap: str, frame: bytes) -> bytes:
    """The packet between the addresses of a mishap: 10.… becomes 20.…, 21.… and so on."""
    octet = bytes([20 + list(MISHAPS).index(mishap)])
    return frame[:26] + octet + frame[27:30] + octet + frame[31:]


def capture_packets(name: str) -> Packets:
    made = sorted(
        (packet for each in TRAFFIC.conversations() for packet in packets(each, segment_bytes=300)),
        key=lambda packet: packet[0],
    )
    return MISHAPS[name]([(time, between(name, frame)) for time, frame in made])


def capture(name: str) -> bytes:
    own = capture_packets(name)
    if name == "clean":
        own += [(own[-1][0], frame) for _, frame in OTHERS]
        own += refused(own[-1][0])
    if name == "cut":
        return classic([(time, frame[:SNAP_BYTES]) for time, frame in own])
    return classic(own)


def refused(time: int) -> Packets:
    """A connection that nobody accepts, between addresses of its own."""
    opening = ipv4(tcp(flags=2, number=5), "9.0.0.1", "9.0.0.2")
    answer = tcp(flags=20, number=0, source=5040, target=40_000, acknowledged=6)
    return [
        (time, linked(opening, ETHERNET)),
        (time, linked(ipv4(answer, "9.0.0.2", "9.0.0.1"), ETHERNET)),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captures")
    for name in MISHAPS:
        (folder / f"{name}.pcap").write_bytes(capture(name))
    return folder


@pytest.fixture(scope="module")
def made(spark: SparkSession, folder: Path) -> Made:
    inputs = find_inputs([str(folder)])
    out = folder.parent / "captures-out"
    return Made(out, run_batch(spark, BatchJob(inputs, str(out), TABLES), quiet=True))


def of(made: Made, table: str, mishap: str) -> list[dict[str, Any]]:
    prefix = f"{20 + list(MISHAPS).index(mishap)}."
    return [row for row in made.rows(table) if (row["connection"] or "").startswith(prefix)]


def content(made: Made, mishap: str) -> list[tuple[Any, ...]]:
    """Frames by connection and offset, without addresses and times."""
    return sorted(
        (
            row["connection"].split("-")[0].split(".", 1)[1],
            *(row[name] for name in ("direction", "layer", "byte_offset", "length", "frame")),
        )
        for row in of(made, "silver/frames", mishap)
    )


def seen(made: Made, mishap: str) -> int:
    return sum(row["seen"] for row in of(made, "gold/accounting", mishap))


@pytest.mark.parametrize("mishap", SAME)
def test_what_only_looks_different_is_the_same(made: Made, mishap: str) -> None:
    """Also the number of connections: packets out of order make no second one."""
    assert len({row["connection"] for row in of(made, "silver/directions", mishap)}) == 10
    assert seen(made, mishap) == seen(made, "clean")
    # Bytes that were acknowledged long before they come are a gap.
    if mishap != "quiet":
        assert content(made, mishap) == content(made, "clean")
    # An answer that was captured before its request is none to who reads in that order.
    if mishap not in ("shuffled", "quiet"):
        count = len(of(made, "silver/messages", "clean"))
        assert len(of(made, "silver/messages", mishap)) == count


def test_a_clock_that_is_set_back_where_segments_are_shuffled(
    spark: SparkSession, folder: Path
) -> None:
    captures = Captures(spark, [str(folder / "stepped.pcap")], shuffle=True)
    rows = captures.wire().select("connection", "length").toArrow()
    assert len(set(rows["connection"].to_pylist())) == 10
    whole = Captures(spark, [str(folder / "stepped.pcap")]).wire().select("length").toArrow()
    assert sum(rows["length"].to_pylist()) == sum(whole["length"].to_pylist())


def test_a_clock_that_is_set_back_in_a_stream(spark: SparkSession, tmp_path: Path) -> None:
    """Within a file, and from one rotated file to the next, in another batch: the tables are those
    of a batch, which reads connections on."""
    folder = tmp_path / "captures"
    folder.mkdir()
    whole = capture_packets("clean")
    third = len(whole) // 3
    once = [*whole[:third], *((time - HOUR_US, frame) for time, frame in whole[third : 2 * third])]
    twice = [(time - 2 * HOUR_US, frame) for time, frame in whole[2 * third :]]
    (folder / "trace.pcap").write_bytes(classic(once))
    (folder / "trace.pcap1").write_bytes(classic(twice))
    tables = frozenset({"frames", "directions", "accounting"})
    job = BatchJob(find_inputs([str(folder)]), str(tmp_path / "batch"), tables)
    batch = Made(tmp_path / "batch", run_batch(spark, job, quiet=True))
    stream = Stream(
        (f"file://{folder}",), str(tmp_path / "stream"), once=True, tables=tables, batch_bytes=1
    )
    batches: list[BatchDone] = []
    streamed = Made(tmp_path / "stream", run_stream(spark, stream, notify=batches.append))
    assert len(batches) == 2
    for made in (batch, streamed):
        assert ("clock steps", 2, 0) in made.summary.packets
        rows = made.rows("silver/directions")
        assert len({row["connection"] for row in rows}) == TRAFFIC.connections
    assert streamed.summary.packets == batch.summary.packets
    assert content(streamed, "clean") == content(batch, "clean") != []


def test_what_was_lost_is_a_gap_and_nothing_else(made: Made) -> None:
    rows = of(made, "gold/accounting", "lossy")
    assert sum(row["gaps"] for row in rows) > 0
    assert seen(made, "lossy") == seen(made, "clean")
    assert not of(made, "silver/violations", "lossy")
    assert len({row["connection"] for row in rows}) == 10
    lossy_kinds, kinds = (
        [row["kind"] for row in of(made, "silver/messages", name)] for name in ("lossy", "clean")
    )
    for kind in set(kinds):
        assert lossy_kinds.count(kind) <= kinds.count(kind)


def test_answers_without_their_request_are_no_messages(made: Made) -> None:
    kinds = {
        name: [row["kind"] for row in of(made, "silver/frames", name)]
        for name in ("lossy", "clean")
    }
    assert "unmatched" in kinds["lossy"] and "unmatched" not in kinds["clean"]
    assert kinds["lossy"].count("response") <= kinds["clean"].count("response")
    assert not [row for row in of(made, "silver/messages", "lossy") if row["kind"] == "unmatched"]


def test_bytes_that_the_snap_length_cut_are_seen(made: Made) -> None:
    assert seen(made, "cut") == seen(made, "clean")
    cut = sum(row["gaps"] for row in of(made, "gold/accounting", "cut"))
    assert counted(made)["cut payloads"][1] == cut > 0


def test_every_packet_is_counted(made: Made, folder: Path) -> None:
    counts = counted(made)
    assert counts.keys() <= set(NAMES)
    assert (counts["not TCP"], counts["not IP"], counts["encapsulated"]) == (
        (1, len(OTHERS[0][1])),
        (1, len(OTHERS[1][1])),
        (1, len(OTHERS[2][1])),
    )
    classes = [counts.get(name, (0, 0)) for name in NAMES[: NAMES.index("cut payloads")]]
    files = [path.read_bytes() for path in sorted(folder.glob("*.pcap"))]
    total = sum(count for count, _ in classes)
    assert sum(size for _, size in classes) == sum(len(data) - 24 for data in files) - 16 * total


def counted(made: Made) -> dict[str, tuple[int, int]]:
    """By category; the summary has what gold.accounting has."""
    rows = [row for row in made.rows("gold/accounting") if row["packets"] is not None]
    found = {row["category"]: (row["packets"], row["bytes"]) for row in rows}
    assert found == {name: (count, size) for name, count, size in made.summary.packets}
    assert all((row["node"], row["connection"], row["seen"]) == ("pcap", None, 0) for row in rows)
    return found


def test_a_refused_connection_is_counted(made: Made) -> None:
    (row,) = (r for r in made.rows("gold/accounting") if r["category"] == "refused connection")
    assert row["connection"].startswith("9.0.0.1:40000-9.0.0.2:5040@")
    assert made.summary.refused == 1


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_truncated_capture(
    spark: SparkSession, folder: Path, tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    """Both are refused alike, and skipping what is missing is reported alike."""
    data = (folder / "clean.pcap").read_bytes()
    file = tmp_path / "cut.pcap"
    file.write_bytes(pack(data[:-100]) if pack is bytes else pack(data)[:-200])
    inputs, out = find_inputs([str(file)]), str(tmp_path / "out")
    tables = frozenset({"accounting"})
    with pytest.raises(PipelineError, match=r"cut\.pcap.*--skip-damaged"):
        run_batch(spark, BatchJob(inputs, out, tables), quiet=True)
    summary = run_batch(spark, BatchJob(inputs, out, tables, skip_damaged=True), quiet=True)
    assert [files for name, files, _ in summary.packets if name == "truncated files"] == [1]
    assert summary.seen > 0
    assert any("cut.pcap" in note for note in summary.notes)


# ------------------------------------------------------------------------------------------ tshark

ASKED = ("clean", "vxlan", "gre")
"""Of the shuffled one tshark misses bytes that come before their SYN."""


def bytes_of(file: Path) -> dict[tshark.Way, bytes]:
    """The bytes of each direction that has some."""
    split = plain_file(str(file))
    assert split is not None
    (share,) = survey([split]).shares(1)
    found: dict[tshark.Way, bytes] = {}
    for batch in wire_of_share([split], share, PortMap(), 0):
        for row in batch.to_pylist():
            connector = f"{row['connector_address']}:{row['connector_port']}"
            acceptor = f"{row['acceptor_address']}:{row['acceptor_port']}"
            is_forward = row["direction"] == "forward"
            way = (connector, acceptor) if is_forward else (acceptor, connector)
            found[way] = found.get(way, b"") + (row["data"] or b"")
    return {way: data for way, data in found.items() if data}


@pytest.mark.parametrize("mishap", ASKED)
def test_the_same_bytes_as_tshark_once_found(folder: Path, mishap: str) -> None:
    recorded = json.loads(tshark.RECORDED.read_text())["captures"][mishap]
    file = folder / f"{mishap}.pcap"
    assert tshark.checksum(file.read_bytes()) == recorded["sha256"], (
        "the capture has changed: run `python -m tests.pipeline.tshark`"
    )
    assert tshark.digests(bytes_of(file)) == recorded["directions"]


@pytest.mark.long
@pytest.mark.parametrize("mishap", ASKED)
def test_the_same_bytes_as_tshark(folder: Path, mishap: str) -> None:
    file = folder / f"{mishap}.pcap"
    assert tshark.bytes_by_tshark(file) == bytes_of(file)
