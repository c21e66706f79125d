"""Connections over the batches of a stream: what is final never changes, and is what the oracle
gives for all rows at once."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.lake.schemas import WIRE
from crosswire.pipeline.decode.decoded_connection import WIRE_COLUMNS
from crosswire.pipeline.sources.flow_rows import NODE
from crosswire.pipeline.stream.columns import STATES
from crosswire.pipeline.stream.stream_decoder import StreamDecoder
from crosswire.pipeline.stream.watermarks import CompleteUpTo
from crosswire.pipeline.tables.finality import KEPT
from crosswire.wire import PROTOCOL_NAMES
from tests.pipeline.decode.test_columnar import (
    Captured,
    Wire,
    cut,
    interleaved,
    row_by_row,
    spoil,
    talk,
)

Row = dict[str, Any]
SCHEMA = pa.schema(
    [
        *(WIRE.field(name).with_nullable(True) for name in WIRE_COLUMNS),
        pa.field(KEPT, pa.bool_()),
        pa.field("state", pa.binary()),
    ]
)
_FIRST = -1


class Stream:
    """What Spark does around the decoder: each connection's rows in order, its state before them,
    in Arrow batches of any size."""

    def __init__(self, arrow_rows: int, *, now: CompleteUpTo | None = None) -> None:
        self._arrow_rows = arrow_rows
        self._now = now or CompleteUpTo()
        self.states: dict[tuple[str, str], bytes] = {}
        self.final: list[str] = []
        self.provisional: list[str] = []

    def add(self, wire: Wire, provisional: Wire | None = None) -> None:
        rows = [{**row, KEPT: True} for row in wire]
        rows += [{**row, KEPT: False} for row in provisional or []]
        rows += [
            {"connection": connection, "node": node, "seq": _FIRST, "state": state}
            for (connection, node), state in self.states.items()
        ]
        rows.sort(key=lambda row: (row["node"], row["connection"], row["seq"]))
        self.states, self.provisional = {}, []
        for row in self._decoded(rows):
            kept = row.pop(KEPT)
            if row["table"] == STATES:
                assert kept
                self.states[row["connection"], row["node"]] = row["payload"]
            else:
                (self.final if kept else self.provisional).append(repr(row))

    def _decoded(self, rows: list[Row]) -> Iterator[Row]:
        decoder = StreamDecoder(payloads=True, now=self._now)
        for start in range(0, len(rows), self._arrow_rows):
            batch = pa.RecordBatch.from_pylist(rows[start : start + self._arrow_rows], SCHEMA)
            for made in decoder.add(batch):
                yield from made.to_pylist()
        for made in decoder.finish():
            yield from made.to_pylist()


@pytest.mark.parametrize("name", [*PROTOCOL_NAMES, "all"])
@settings(max_examples=20)
@given(
    seed=st.integers(0, 1 << 32),
    cuts=st.lists(st.integers(0, 500), max_size=5),
    arrow_rows=st.sampled_from((1, 7, 1000)),
)
def test_every_batch_ends_with_what_a_whole_run_gives(
    name: str, seed: int, cuts: list[int], arrow_rows: int
) -> None:
    random = Random(seed)
    names = PROTOCOL_NAMES if name == "all" else (name,)
    connections = [
        spoil(talk(random.choice(names), number, random.randrange(20)), random)
        for number in range(random.randrange(1, 6))
    ]
    wire = interleaved(connections, random)
    stream = Stream(arrow_rows)
    so_far: Wire = []
    for batch in cut(wire, cuts):
        stream.add(batch)
        so_far += batch
        assert sorted(stream.final + stream.provisional) == row_by_row(so_far)


def test_a_connection_that_is_over_has_no_state() -> None:
    wire = interleaved([talk("emp", 0, 1)], Random(1))
    stream = Stream(5)
    stream.add(wire[:10])
    assert len(stream.states) == 1 and any("directions" in row for row in stream.provisional)
    stream.add(wire[10:])
    assert not stream.states and not stream.provisional
    assert sorted(stream.final) == row_by_row(wire)


def test_a_connection_without_new_rows_keeps_its_state_as_it_is() -> None:
    captured = talk("relink", 0, 1)
    captured.ended = False
    wire = interleaved([captured], Random(1))
    stream = Stream(100)
    stream.add(wire)
    states, shown = dict(stream.states), list(stream.provisional)
    stream.add([])
    assert stream.states == states and stream.provisional == shown


@pytest.mark.parametrize("name", PROTOCOL_NAMES)
@pytest.mark.parametrize("arrow_rows", [1, 1000])
def test_provisional_rows_leave_nothing_behind(name: str, arrow_rows: int) -> None:
    """In a capture, what waits after a hole is shown, and read again when the hole is filled."""
    both = [talk(name, 0, 1), talk(name, 1, 2)]
    wire = [{**row, "node": NODE} for row in interleaved(both, Random(3))]
    stream = Stream(arrow_rows)
    for start in range(0, len(wire), 9):
        batch = wire[start : start + 9]
        waiting = [row for row in wire[start + 11 : start + 17] if row["kind"] == "data"]
        stream.add(batch, [{**row, "offset": row["offset"] + 50_000} for row in waiting])
        shown = [row for row in stream.provisional if "'gap'" in row]
        assert shown or not waiting
    stream.add([])
    assert sorted(stream.final + stream.provisional) == row_by_row(wire)


def test_a_captured_connection_is_over_when_the_watermark_has_passed_it() -> None:
    wire = [{**row, "node": NODE} for row in interleaved([talk("emp", 0, 1)], Random(1))]
    for now_us, is_over in ((0, False), (10**12, True)):
        stream = Stream(100, now=CompleteUpTo(captures_us=now_us))
        stream.add(wire)
        assert bool(stream.states) is not is_over
        assert bool(stream.provisional) is not is_over


def test_what_no_scanner_reads() -> None:
    pieces = [(True, "data", 5, b"hello"), (False, "gap", 3, None), (False, "data", 1, b"x")]
    wire = interleaved([Captured("a", None, pieces), Captured("b", "tls", pieces)], Random(2))
    stream = Stream(2)
    for batch in cut(wire, [3, 5]):
        stream.add(batch)
    assert sorted(stream.final + stream.provisional) == row_by_row(wire)
