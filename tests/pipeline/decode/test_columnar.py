"""Many connections at once: exactly the rows that each gives alone, read row by row."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from crosswire.errors import InvalidInput
from crosswire.lake.schemas import WIRE
from crosswire.pipeline.decode.arrow_batches import Batches
from crosswire.pipeline.decode.columnar import ColumnarDecoder
from crosswire.pipeline.decode.decoded_connection import WIRE_COLUMNS, DecodedConnection
from crosswire.pipeline.decode.protocols import columnar_protocol
from crosswire.pipeline.decode.row_schema import ARROW
from crosswire.testing.traffic import SampleTraffic
from crosswire.wire import PROTOCOL_NAMES, protocol
from tests.pipeline.decode.oracle.connection_rows import ConnectionRows

Wire = list[dict[str, Any]]
"""Rows of bronze.wire."""


@dataclass
class Captured:
    """A connection as it is captured: pieces of either direction, one after the other."""

    name: str
    protocol: str | None
    pieces: list[tuple[bool, str, int, bytes | None]]
    """Forward, kind, how many bytes, which."""
    late: bool = False
    ended: bool = True

    def rows(self) -> Wire:
        offsets = {True: 0, False: 0}
        if self.late:
            offsets = {True: 700, False: 40}
        rows = []
        pieces = list(self.pieces)
        if self.ended:
            pieces += [(True, "fin", 0, None), (False, "fin", 0, None)]
        for forward, kind, length, data in pieces:
            row = {
                "node": "n",
                "connection": self.name,
                "direction": "forward" if forward else "backward",
                "kind": kind,
                "offset": offsets[forward],
                "length": length,
                "data": data,
                "late": self.late,
                "protocol": self.protocol,
                "listener": self.protocol,
                "connector_address": "10.0.0.1",
                "connector_port": 4000,
                "acceptor_address": "10.0.0.2",
                "acceptor_port": 5040,
            }
            offsets[forward] += length
            rows.append(row)
        return rows


def interleaved(connections: list[Captured], random: Random) -> Wire:
    """The rows of all, each connection's in order, numbered and timed as they come."""
    left = [rows for captured in connections if (rows := captured.rows())]
    wire: Wire = []
    while left:
        rows = random.choice(left)
        wire.append({**rows.pop(0), "seq": len(wire), "time": 1000 + 10 * len(wire)})
        left = [rows for rows in left if rows]
    return wire


def table_of(wire: Wire) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(wire, WIRE)


def row_by_row(wire: Wire, *, payloads: bool = True) -> list[str]:
    collected = Batches(ARROW)
    connections: dict[str, ConnectionRows] = {}
    for each in wire:
        row = tuple(each[name] for name in WIRE_COLUMNS)
        if row[1] not in connections:
            connections[row[1]] = ConnectionRows(row, collected, payloads=payloads)
        connections[row[1]].add(row)
    for connection in connections.values():
        connection.finish()
    return sorted(map(repr, collected.take().to_pylist()))


def at_once(decoder: ColumnarDecoder, batches: list[Wire]) -> list[str]:
    made = [out for batch in batches for out in decoder.add(table_of(batch))]
    made += decoder.finish()
    return sorted(repr(row) for batch in made for row in batch.to_pylist())


def cut(wire: Wire, indexes: list[int]) -> list[Wire]:
    marks = [0, *sorted(index % (len(wire) + 1) for index in indexes), len(wire)]
    return [wire[low:high] for low, high in pairwise(marks)]


# ------------------------------------------------------------------------------------- generated


def talk(name: str, number: int, seed: int, messages: int = 6) -> Captured:
    """Plausible traffic, nothing wrong with it."""
    sent = (
        SampleTraffic(seed, messages=messages, payload_bytes=40).conversation(number, name).chunks
    )
    pieces = [(forward, "data", len(data), data) for _, forward, data in sent]
    return Captured(f"{name}-{number}", name, [(True, "open", 0, None), *pieces])


def spoil(captured: Captured, random: Random) -> Captured:
    """What captures do to it: other cuts, gaps, noise, a beginning or an end that is missing."""
    pieces: list[tuple[bool, str, int, bytes | None]] = []
    harm = random.choice(("none", "none", "changed", "gap", "jump", "late", "swapped", "noise"))
    victim = random.randrange(len(captured.pieces))
    for index, (forward, kind, length, data) in enumerate(captured.pieces):
        if data is None:
            if harm != "late":
                pieces.append((forward, kind, length, data))
            continue
        if harm in ("changed", "noise") and index == victim and data:
            spot = random.randrange(len(data))
            noise = random.randbytes(1 if harm == "changed" else random.randrange(1, 30))
            data = data[:spot] + noise + data[spot + (harm == "changed") :]
        if harm == "gap" and index >= victim and random.random() < 0.3:
            pieces.append((forward, "gap", random.randrange(1, 50), None))
        while data:
            size = len(data) if random.random() < 0.7 else random.randrange(1, len(data) + 1)
            pieces.append((forward, "data", size, data[:size]))
            data = data[size:]
    if harm == "swapped" and len(pieces) > 2:
        low = random.randrange(1, len(pieces) - 1)
        pieces[low], pieces[low + 1 :] = pieces[-1], [*pieces[low + 1 : -1], pieces[low]]
        pieces.sort(key=lambda piece: random.random() < 0.1 and not piece[0])
    if harm == "late":
        pieces = pieces[random.randrange(len(pieces)) :]
    if random.random() < 0.2:
        pieces = pieces[: random.randrange(len(pieces) + 1)]
    return Captured(captured.name, captured.protocol, pieces, harm == "late", random.random() < 0.7)


@pytest.mark.parametrize("name", [*PROTOCOL_NAMES, "all"])
@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 32), cuts=st.lists(st.integers(0, 500), max_size=5))
# The opener's handshake is complete in a batch in which the acceptor sends nothing.
@example(seed=932, cuts=[14, 170])
def test_whatever_a_capture_holds(name: str, seed: int, cuts: list[int]) -> None:
    random = Random(seed)
    names = PROTOCOL_NAMES if name == "all" else (name,)
    connections = [
        spoil(talk(random.choice(names), number, random.randrange(20)), random)
        for number in range(random.randrange(1, 6))
    ]
    wire = interleaved(connections, random)
    decoder = ColumnarDecoder(payloads=True, most_open=random.choice((0, 1, 100)))
    assert at_once(decoder, cut(wire, cuts)) == row_by_row(wire)


@pytest.mark.parametrize("name", PROTOCOL_NAMES)
@settings(max_examples=30)
@given(data=st.data(), cuts=st.lists(st.integers(0, 300), max_size=4))
def test_streams_that_nobody_would_write(name: str, data: st.DataObject, cuts: list[int]) -> None:
    roles = protocol(name).roles
    streams = importlib.import_module(f"tests.wire.{name}.strategies").streams
    random = Random(data.draw(st.integers(0, 1 << 32)))
    connections = []
    for number in range(data.draw(st.integers(1, 3))):
        backward = data.draw(streams(roles[-1]))
        forward = backward.peer or data.draw(streams(roles[0])).data
        sides = [(True, forward), (False, backward.data)]
        if random.random() < 0.2:
            sides.reverse()
        pieces: list[tuple[bool, str, int, bytes | None]] = []
        for side, whole in sides:
            while whole:
                size = random.randrange(1, len(whole) + 1)
                pieces.append((side, "data", size, whole[:size]))
                whole = whole[size:]
        connections.append(Captured(f"c{number}", name, pieces))
    wire = interleaved(connections, random)
    assert at_once(ColumnarDecoder(payloads=True), cut(wire, cuts)) == row_by_row(wire)


# ------------------------------------------------------------------------------------ in particular


@pytest.mark.parametrize("name", PROTOCOL_NAMES)
def test_plain_traffic_needs_no_decoder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many batches: handshakes and frames are the scanner's alone."""

    def nobody(*_: Any) -> None:
        raise AssertionError("somebody asked for a decoder")

    each_ones = [talk(name, number, 3, 40).rows() for number in range(4)]
    together = [row for rows in zip(*each_ones, strict=False) for row in rows]
    wire = [{**row, "seq": seq, "time": seq} for seq, row in enumerate(together)]
    expected = row_by_row(wire)
    monkeypatch.setattr(DecodedConnection, "decoder", nobody)
    assert at_once(ColumnarDecoder(payloads=True), cut(wire, [40, 90])) == expected


@pytest.mark.parametrize("name", PROTOCOL_NAMES)
def test_connections_one_after_the_other(name: str) -> None:
    wire: Wire = []
    for number in range(6):
        captured = talk(name, number, 2)
        captured.ended = number % 2 == 0
        for row in captured.rows():
            wire.append({**row, "seq": len(wire), "time": len(wire)})
    batches = [wire[at : at + 25] for at in range(0, len(wire), 25)]
    decoder = ColumnarDecoder(payloads=True, grouped=True)
    assert at_once(decoder, batches) == row_by_row(wire)


def test_without_payloads() -> None:
    wire = interleaved([talk(name, 0, 1) for name in PROTOCOL_NAMES], Random(3))
    found = at_once(ColumnarDecoder(payloads=False), [wire])
    assert found == row_by_row(wire, payloads=False)


def test_what_no_scanner_reads_is_counted_all_the_same() -> None:
    pieces = [(True, "data", 5, b"hello"), (False, "gap", 3, None), (False, "data", 1, b"x")]
    wire = interleaved([Captured("a", None, pieces), Captured("b", "tls", pieces)], Random(2))
    assert columnar_protocol(None) is None and columnar_protocol("tls") is None
    assert at_once(ColumnarDecoder(payloads=True), cut(wire, [3])) == row_by_row(wire)


def test_rows_for_what_the_hub_lost_belong_to_no_connection() -> None:
    wire = interleaved([talk("emp", 0, 1)], Random(1))
    lost = {**wire[3], "kind": "lost", "connection": "", "direction": "", "data": None}
    assert at_once(ColumnarDecoder(payloads=True), [[*wire[:3], lost, *wire[3:]]]) == row_by_row(
        wire
    )


@pytest.mark.parametrize("cuts", [[], [5]])
def test_rows_that_are_there_twice_are_refused(cuts: list[int]) -> None:
    wire = interleaved([talk("emp", 0, 1)], Random(1))
    with pytest.raises(InvalidInput, match="twice"):
        at_once(ColumnarDecoder(payloads=True), cut([*wire[:5], *wire[4:]], cuts))


def test_a_connection_that_overlaps_itself_is_refused() -> None:
    wire = interleaved([talk("emp", 0, 1)], Random(1))
    wire[4]["offset"] -= 1
    with pytest.raises(InvalidInput, match="overlap"):
        at_once(ColumnarDecoder(payloads=True), [wire])


def test_nothing_gives_nothing() -> None:
    decoder = ColumnarDecoder(payloads=True)
    assert list(decoder.add(table_of([]))) == [] and list(decoder.finish()) == []
