"""Saved in the middle and loaded again, a flow and a connection go on as if nothing had been."""

from __future__ import annotations

import gzip
from collections import defaultdict
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from crosswire.capture.classify import PortMap
from crosswire.capture.reassembly import LINGER_NS, Flow, Segment
from crosswire.errors import DecoderStateError
from crosswire.lake.schemas import WIRE
from crosswire.pipeline.decode.arrow_batches import Batches
from crosswire.pipeline.decode.columnar import ColumnarDecoder
from crosswire.pipeline.decode.decoded_connection import WIRE_COLUMNS, DecodedConnection
from crosswire.pipeline.decode.meanings import memory_of
from crosswire.pipeline.decode.row_schema import ARROW
from crosswire.pipeline.sources.capture_reader import advance, read, segment_of
from crosswire.pipeline.sources.flow_rows import FlowRows
from crosswire.testing.traffic import SampleTraffic
from crosswire.wire import PROTOCOL_NAMES
from tests.capture.test_reassembly import opened, segment
from tests.pipeline.captures import write_captures
from tests.pipeline.conftest import TRAFFIC

PORTS = PortMap()
Row = tuple[Any, ...]


def wire(name: str, piece_bytes: int = 11) -> list[Row]:
    """A connection as `decode` gets it, both directions in small pieces, with a gap."""
    talk = SampleTraffic(seed=3, messages=8, payload_bytes=48).conversation(0, name)
    made: list[Row] = []
    offsets = {True: 0, False: 0}

    def add(forward: bool, kind: str, length: int, time: int, data: bytes | None) -> None:
        way = "forward" if forward else "backward"
        index = (kind, offsets[forward], length, time, data)
        made.append(("n", "c", len(made), way, *index, False, name, "l", "a", 1, "b", 2))
        offsets[forward] += length

    for number, (time, forward, data) in enumerate(talk.chunks):
        if number == len(talk.chunks) * 2 // 3:
            add(forward, "gap", 5, time, None)
        for start in range(0, len(data), piece_bytes):
            piece = data[start : start + piece_bytes]
            add(forward, "data", len(piece), time, piece)
    return made


def batch_of(row: Row) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([dict(zip(WIRE_COLUMNS, row, strict=True))], WIRE)


def decoded(rows: list[Row], *, saved: bool) -> list[str]:
    decoder = ColumnarDecoder(payloads=True)
    made: list[pa.RecordBatch] = []
    for row in rows:
        connection = decoder.take(("c", "n"))
        if saved and connection is not None:
            state = connection.dump()
            made += decoder.close([])
            decoder = ColumnarDecoder(payloads=True)
            decoder.resume(("c", "n"), state)
        elif connection is not None:
            decoder.keep(connection)
        made += decoder.add(batch_of(row))
    made += decoder.finish()
    return sorted(repr(row) for batch in made for row in batch.to_pylist())


@pytest.mark.parametrize("name", PROTOCOL_NAMES)
def test_a_connection_saved_at_every_row(name: str) -> None:
    rows = wire(name)
    plain = decoded(rows, saved=False)
    assert decoded(rows, saved=True) == plain
    assert "'handshake'" in "".join(plain) and len(plain) > 15


def state_of(name: str, piece_bytes: int = 100_000) -> bytes:
    decoder = ColumnarDecoder(payloads=True)
    for row in wire(name, piece_bytes):
        list(decoder.add(batch_of(row)))
    connection = decoder.take(("c", "n"))
    assert connection is not None
    return connection.dump()


def test_the_state_of_a_connection_is_small() -> None:
    assert len(state_of("emp")) < 250


@pytest.mark.parametrize("name", PROTOCOL_NAMES)
def test_damaged_memories_are_refused(name: str) -> None:
    memory = memory_of(name)()
    state = memory.dump()
    with pytest.raises(DecoderStateError, match="damaged"):
        memory.load(state[:-1])
    with pytest.raises(DecoderStateError, match="version 9"):
        memory.load(msgspec.msgpack.encode((9, None)))
    with pytest.raises(DecoderStateError, match="damaged"):
        memory.load(msgspec.msgpack.encode((1, 7)))


@pytest.mark.parametrize("name", PROTOCOL_NAMES)
@pytest.mark.parametrize(
    ("index", "value", "reason"), [(0, 9, "version 9"), (1, [1, 2], "numbers are missing")]
)
def test_states_of_other_scanners_are_refused(
    name: str, index: int, value: Any, reason: str
) -> None:
    decoder = ColumnarDecoder(payloads=True)
    list(decoder.add(batch_of(wire(name, 100_000)[0])))
    connection = decoder.take(("c", "n"))
    assert connection is not None
    saved = msgspec.msgpack.decode(connection.dump())
    scanned = saved[5][0][-1]
    scanned[index] = value
    with pytest.raises(DecoderStateError, match=reason):
        DecodedConnection.load(("c", "n"), msgspec.msgpack.encode(saved), Batches(ARROW))


@pytest.mark.parametrize("state", [b"", b"\x93", msgspec.msgpack.encode((7, [], None))])
def test_damaged_states_of_connections_are_refused(state: bytes) -> None:
    with pytest.raises(DecoderStateError, match="state of a connection is damaged"):
        DecodedConnection.load(("c", "n"), state, Batches(ARROW))


# ----------------------------------------------------------------------------------------- flows


@pytest.fixture(scope="module")
def flows(tmp_path_factory: pytest.TempPathFactory) -> dict[bytes, list[Segment]]:
    """The segments of each flow of captured traffic with mishaps, in order."""
    folder = tmp_path_factory.mktemp("flows") / "captures"
    write_captures(folder, TRAFFIC)
    (folder / "b.pcap").write_bytes(gzip.decompress((folder / "b.pcap.gz").read_bytes()))
    found: dict[bytes, list[Segment]] = defaultdict(list)
    for name in ("a.pcap", "b.pcap"):
        for split in advance(str(folder / name), 1 << 20)[0]:
            for segments in read(split):
                for packet, flow in zip(segments.packets, segments.flows, strict=True):
                    found[flow.tobytes()].append(segment_of(packet, segments.data))
    return {flow: sorted(own, key=lambda one: one.time_ns) for flow, own in found.items()}


def test_a_flow_saved_at_every_segment(flows: dict[bytes, list[Segment]]) -> None:
    for flow, segments in flows.items():
        plain = FlowRows(flow, PORTS)
        expected = [row for one in segments for row in plain.add(one)] + list(plain.finish())
        saved = FlowRows(flow, PORTS)
        found: list[Row] = []
        for one in segments:
            state = saved.dump()
            saved = FlowRows(flow, PORTS)
            saved.load(state)
            found += saved.add(one)
        assert found + list(saved.finish()) == expected
    assert len(flows) == 10


def test_a_damaged_state_of_a_flow_is_refused() -> None:
    flow = FlowRows(bytes(36), PORTS)
    state = flow.dump()
    with pytest.raises(DecoderStateError, match="state of a flow is damaged"):
        flow.load(state[:-1])
    with pytest.raises(DecoderStateError, match="version 2"):
        flow.load(b"\x96\x02" + state[2:])


def test_what_comes_long_after_the_end_is_of_another_connection() -> None:
    ended = [
        segment(True, 5, 101, b"ab", flags=1),
        segment(False, 6, 501, flags=1),
    ]
    for wait, connections in ((LINGER_NS, [0]), (LINGER_NS + 1, [0, 1])):
        flow = Flow()
        late = segment(True, 6 + wait, 101, b"abcd")
        runs = [run for one in (*opened(), *ended, late) for run in flow.add(one)]
        runs += flow.finish()
        assert [key for key, _ in groupby(run.connection for run in runs)] == connections


def test_a_flow_is_settled_when_its_end_is_long_past() -> None:
    flow = Flow()
    for one in (*opened(), segment(True, 5, 101, b"ab", flags=1)):
        list(flow.add(one))
    assert not flow.is_settled(10 * LINGER_NS)
    list(flow.add(segment(False, 6, 501, flags=1)))
    assert not flow.is_settled(6 + LINGER_NS) and flow.is_settled(7 + LINGER_NS)


# ------------------------------------------------------------------------------------ one by one


def test_a_growing_capture_is_read_from_where_it_was_left(tmp_path: Path) -> None:
    write_captures(tmp_path / "captures", TRAFFIC)
    whole = (tmp_path / "captures" / "a.pcap").read_bytes()
    file = tmp_path / "growing.pcap"
    end, layout = 0, None
    found: list[int] = []
    for size in range(100, len(whole) + 997, 997):
        file.write_bytes(whole[:size])
        splits, end, layout = advance(str(file), 1 << 20, end, layout)
        for one in chain.from_iterable(map(read, splits)):
            found += one.offsets.tolist()
    assert end == len(whole)
    (at_once,) = advance(str(file), 1 << 20)[0]
    assert found == [index for one in read(at_once) for index in one.offsets.tolist()]
