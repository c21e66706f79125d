"""Decoding a connection's rows without Spark: the very rows that the plain decoders give."""

from __future__ import annotations

import importlib
import json
from itertools import pairwise
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.lake.schemas import WIRE
from crosswire.pipeline.decode.columnar import ColumnarDecoder
from crosswire.pipeline.decode.decoded_connection import WIRE_COLUMNS
from crosswire.testing.traffic import SampleTraffic
from crosswire.wire import PROTOCOL_NAMES, protocol
from crosswire.wire.contract import Row

ENDS = ("10.0.0.1", 4000, "10.0.0.2", 5040)
PAYLOADS = {"data", "message", "parts", "payload"}
SECRETS = {"layer_data", "required", "optional"}

WireRows = list[tuple[bool, str, int, bytes | None, int]]
"""Rows of a connection: forward, kind, offset, data, length."""


def decoded(
    rows: WireRows, name: str | None = "emp", *, late: bool = False
) -> list[dict[str, Any]]:
    """The rows that they become, in the order of offsets."""
    wire = []
    for seq, (forward, kind, offset, data, length) in enumerate(rows):
        way = "forward" if forward else "backward"
        row = ("n", "c", seq, way, kind, offset, length, seq, data, late, name, "emp", *ENDS)
        wire.append(dict(zip(WIRE_COLUMNS, row, strict=True)))
    decoder = ColumnarDecoder(payloads=True)
    made = [*decoder.add(pa.RecordBatch.from_pylist(wire, WIRE)), *decoder.finish()]
    found = [row for batch in made for row in batch.to_pylist()]
    return sorted(found, key=lambda row: (row["direction"], row["offset"], row["layer"]))


def in_pieces(data: bytes, cuts: list[int], forward: bool = True) -> WireRows:
    marks = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [(forward, "data", low, data[low:high], high - low) for low, high in pairwise(marks)]


def accounted(rows: list[dict[str, Any]], direction: str) -> tuple[int, int]:
    """Bytes seen, and bytes that a row accounts for."""
    own = [row for row in rows if row["direction"] == direction]
    placed = sum(row["length"] for row in own if row["table"] != "directions" and not row["layer"])
    (end,) = (row for row in own if row["table"] == "directions")
    summary = json.loads(end["fields"])
    return end["length"], placed + summary["tail"] + summary["unread"]


def public(row: Row) -> dict[str, Any]:
    """A decoder's row as JSON has it, without what the tables leave out."""
    fields = json.loads(msgspec.json.encode(row.fields or {}))
    return {name: value for name, value in fields.items() if name not in PAYLOADS | SECRETS}


SENDERS = [(name, forward) for name in PROTOCOL_NAMES for forward in (True, False)]
cuts = st.lists(st.integers(0, 5000), max_size=4)


@pytest.mark.parametrize(("name", "forward"), SENDERS)
@settings(max_examples=40)
@given(data=st.data(), cut_at=cuts, noise=st.binary(max_size=12))
def test_the_same_rows_as_the_plain_decoder(
    name: str, forward: bool, data: st.DataObject, cut_at: list[int], noise: bytes
) -> None:
    entry = protocol(name)
    sender = entry.roles[0] if forward else entry.roles[-1]
    stream = data.draw(importlib.import_module(f"tests.wire.{name}.strategies").streams(sender))
    wire = stream.data + noise
    peer = None
    wire_rows: WireRows = []
    if not forward:
        peer = entry.decoder(entry.roles[0])
        if stream.peer:
            peer.feed(stream.peer)
            wire_rows = [(True, "data", 0, stream.peer, len(stream.peer))]
    if stream.hints and not stream.peer:
        return  # a capture of one direction only, without what it takes to read it
    decoder = entry.decoder(sender, peer=peer)
    expected = sorted(decoder.rows(wire), key=lambda row: (row.offset, row.layer))
    rows = decoded(wire_rows + in_pieces(wire, cut_at, forward), name)
    way = "forward" if forward else "backward"
    own = [row for row in rows if row["direction"] == way and row["table"] != "directions"]
    found = [
        (row["offset"], row["length"], row["layer"], row["frame"], row["status"]) for row in own
    ]
    assert [(*index[:4], index[4] if index[3] is None else None) for index in found] == [
        (row.offset, row.length, row.layer, row.frame, row.error) for row in expected if row.length
    ]
    for row, theirs in zip(own, (row for row in expected if row.length), strict=True):
        if theirs.error is None:
            ours = json.loads(row["fields"])
            assert {key: ours.get(key) for key in public(theirs)} == public(theirs)
        else:
            assert json.loads(row["fields"])["reason"] == theirs.reason
    if wire:
        seen, found = accounted(rows, way)
        assert seen == found == len(wire)


@pytest.mark.parametrize("name", PROTOCOL_NAMES)
@settings(max_examples=30)
@given(
    seed=st.integers(0, 50),
    gaps=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 500)), max_size=3),
    late=st.booleans(),
)
def test_bytes_add_up_whatever_is_missing(
    name: str, seed: int, gaps: list[tuple[int, int]], late: bool
) -> None:
    talk = SampleTraffic(seed, messages=8, payload_bytes=40).conversation(0, name)
    missing = dict(gaps)
    wire_rows: WireRows = []
    offsets = {True: 0, False: 0}
    for index, (_, forward, data) in enumerate(talk.chunks):
        if index in missing:
            wire_rows.append((forward, "gap", offsets[forward], None, missing[index]))
            offsets[forward] += missing[index]
        wire_rows.append((forward, "data", offsets[forward], data, len(data)))
        offsets[forward] += len(data)
    rows = decoded(wire_rows, name, late=late)
    for way, forward in (("forward", True), ("backward", False)):
        if offsets[forward]:
            seen, found = accounted(rows, way)
            assert seen == found == offsets[forward]


@pytest.mark.parametrize("name", PROTOCOL_NAMES)
def test_payloads_are_at_the_offset_of_the_row(name: str) -> None:
    talk = SampleTraffic(messages=30, payload_bytes=60).conversation(0, name)
    wire_rows: WireRows = []
    sent = {True: b"", False: b""}
    for _, forward, data in talk.chunks:
        wire_rows.append((forward, "data", len(sent[forward]), data, len(data)))
        sent[forward] += data
    looked_at = 0
    for row in decoded(wire_rows, name):
        if row["payload"] is None or row["begun_at"] not in (None, row["offset"]):
            continue
        start = row["payload_offset"]
        there = sent[row["direction"] == "forward"][start : start + row["payload_length"]]
        # The hub's own operations of EMP carry the payload inside their data.
        assert row["payload"] in there if name == "emp" else row["payload"] == there
        looked_at += 1
    assert looked_at > 20


def test_a_jump_of_the_offset_is_a_gap() -> None:
    ping = bytes.fromhex("0000000402000000")
    rows = decoded([(True, "data", 0, ping, 8), (True, "data", 20, ping * 2, 16)])
    assert [(row["frame"], row["length"]) for row in rows if row["table"] == "frames"] == [
        ("ping", 8),
        ("gap", 12),
        ("ping", 8),
        ("ping", 8),
    ]


def test_what_only_the_peers_can_read_is_encrypted() -> None:
    rows = decoded([(True, "data", 0, b"secret", 6), (True, "gap", 6, None, 4)], "tls")
    assert [(row["frame"], row["length"]) for row in rows if row["table"] == "frames"] == [
        ("encrypted", 6),
        ("gap", 4),
    ]


def test_the_beginning_of_a_direction_that_is_not_there() -> None:
    ping = bytes.fromhex("0000000402000000")
    rows = decoded([(True, "data", 1000, b"..." + ping * 3, 27)])
    frames = [(row["frame"], row["offset"]) for row in rows if row["table"] == "frames"]
    assert frames == [("unsynchronized", 1000), ("ping", 1003), ("ping", 1011), ("ping", 1019)]


def test_tokens_stay_out_of_the_tables() -> None:
    from crosswire.wire.emp.frames import Request, serialize, serialize_call

    call = serialize(Request(1, serialize_call("$authenticate", b'{"token":"s3cret"}')))
    (row,) = (row for row in decoded(in_pieces(call, [])) if row["table"] == "frames")
    assert row["payload"] is None and "s3cret" not in str(row)


def test_a_message_in_several_frames_is_one_message() -> None:
    from crosswire.wire.micromsg2.frames import Handshake, Message, serialize

    greeting = serialize(Handshake(1, 0, 0, "c")) * 2
    frames = [
        Message(1, "queue/a", b"n:N1;", b"one ", True),
        Message(2, "", b"", b"two", False),
    ]
    rows = decoded(in_pieces(greeting + b"".join(map(serialize, frames)), []), "micromsg2")
    (message,) = (row for row in rows if row["payload"] is not None)
    assert message["payload"] == b"one two" and message["kind"] == "send"
    assert message["begun_at"] == len(greeting) < message["offset"]
    assert json.loads(message["properties"]) == {"n": 1}
