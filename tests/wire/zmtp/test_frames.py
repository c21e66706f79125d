"""ZMTP's frames against recorded bytes, and round trips."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.errors import FrameError, FrameTooLarge, MalformedFrame, UnknownFrame
from crosswire.wire.contract import Frame
from crosswire.wire.registry import Sniff
from crosswire.wire.zmtp import (
    Command,
    Greeting,
    Message,
    NestedCommand,
    ZmtpDecoder,
    ZmtpLimits,
    serialize,
    serialize_message,
    sniff,
)
from crosswire.wire.zmtp.frames import (
    Partial,
    parse_command,
    parse_metadata,
    scan_messages,
    serialize_metadata,
)
from tests.wire.vectors import load
from tests.wire.zmtp.strategies import READY, bodies, commands, greetings, names, traffic, wire

VECTORS = load("zmtp")
OPENING = wire(Greeting("NULL"), READY)


def before(vector: dict[str, Any]) -> bytes:
    """What a decoder must have seen to read a vector that is a single frame."""
    return wire(Greeting("NULL")) if vector.get("frame") == "zmtp-command" else b""


def expected(vector: dict[str, Any]) -> list[dict[str, Any]]:
    listed = vector.get("frames")
    if listed:
        return list(listed)
    index = {"offset": len(before(vector)), "length": len(vector["wire"]) // 2}
    return [index | {name: vector[name] for name in ("frame", "fields")}]


def decoder_for(vector: dict[str, Any]) -> ZmtpDecoder:
    decoder = ZmtpDecoder("connector")
    decoder.feed(before(vector))
    return decoder


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
class TestVectors:
    def test_whole(self, vector: dict[str, Any]) -> None:
        rows = decoder_for(vector).rows(bytes.fromhex(vector["wire"]))
        assert [row.public() for row in rows] == expected(vector)

    def test_byte_by_byte(self, vector: dict[str, Any]) -> None:
        decoder = decoder_for(vector)
        rows = [row for o in bytes.fromhex(vector["wire"]) for row in decoder.rows(bytes([o]))]
        assert [row.public() for row in rows] == expected(vector)

    def test_with_bytes_after_it(self, vector: dict[str, Any]) -> None:
        decoder = decoder_for(vector)
        rows = decoder.rows(bytes.fromhex(vector["wire"]) + b"\x04\x09\x04")
        assert ([row.public() for row in rows], decoder.pending) == (expected(vector), 3)

    def test_serialized(self, vector: dict[str, Any]) -> None:
        data = bytes.fromhex(vector["wire"])
        items = [item for _, _, item in decoder_for(vector).feed(data)]
        assert b"".join(serialize(item) for item in items if isinstance(item, Frame)) == data


@given(st.lists(traffic, max_size=10))
def test_round_trip(sent: list[Frame]) -> None:
    decoder = ZmtpDecoder("connector")
    decoder.feed(OPENING)
    assert [item for _, _, item in decoder.feed(wire(*sent))] == sent


@given(greetings)
def test_greeting_round_trip(greeting: Greeting) -> None:
    ((_, length, item),) = ZmtpDecoder("binder").feed(serialize(greeting))
    assert (item, length) == (greeting, 64)


@given(st.dictionaries(names, bodies))
def test_metadata_round_trip(properties: dict[str, bytes]) -> None:
    assert parse_metadata(serialize_metadata(properties)) == properties


@given(st.binary(max_size=40))
def test_metadata_is_read_or_malformed(data: bytes) -> None:
    try:
        found = parse_metadata(data)
    except MalformedFrame:
        return
    assert parse_metadata(serialize_metadata(found)) == found


@pytest.mark.parametrize("size", [0, 255, 256, 65536])
def test_the_size_decides_how_it_is_written(size: int) -> None:
    head = serialize_message((bytes(size), bytes(size)))[: 2 if size < 256 else 9]
    assert head == (bytes((1, size)) if size < 256 else b"\x03" + size.to_bytes(8))
    assert serialize_message((bytes(size),))[0] == (0 if size < 256 else 2)


def test_a_long_size_for_a_short_part_is_read() -> None:
    decoder = ZmtpDecoder("connector")
    decoder.feed(OPENING)
    ((_, _, item),) = decoder.feed(b"\x02" + (1).to_bytes(8) + b"x")
    assert item == Message((b"x",))


# --------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("data", "error", "length"),
    [
        (b"GET / HTTP/1.1\r\n", MalformedFrame, 1),
        (b"\x16\x03\x01", MalformedFrame, 1),
        (b"\xff" + bytes(9), MalformedFrame, 10),
        (b"\xff" + bytes(8) + b"\x7f\x01", UnknownFrame, 11),
        (b"\xff" + bytes(8) + b"\x7f\x03\x01" + bytes(52), MalformedFrame, 64),
        (b"\xff" + bytes(8) + b"\x7f\x03\x01\xe9" + bytes(51), MalformedFrame, 64),
        (b"\xff" + bytes(8) + b"\x7f\x03\x01A\0B" + bytes(49), MalformedFrame, 64),
    ],
)
def test_what_is_no_greeting(data: bytes, error: type[FrameError], length: int) -> None:
    ((offset, seen, item),) = ZmtpDecoder("connector").feed(data)
    assert (offset, type(item), seen) == (0, error, length)


@pytest.mark.parametrize(
    ("data", "error", "length"),
    [
        (b"\x05\x00", MalformedFrame, 1),
        (b"\x07\x00", MalformedFrame, 1),
        (b"\x08\x00", MalformedFrame, 1),
        (b"\xff\x00", MalformedFrame, 1),
        (b"\x04\x00", MalformedFrame, 2),
        (b"\x04\x01\x00", MalformedFrame, 3),
        (b"\x04\x03\x05AB", MalformedFrame, 5),
        (b"\x04\x02\x01\xff", MalformedFrame, 4),
        (b"\x02" + b"\xff" * 8, FrameTooLarge, 9),
        (b"\x06" + (65536).to_bytes(8), FrameTooLarge, 9),
        (b"\x01\x01a\x02" + b"\xff" * 8, FrameTooLarge, 12),
        (b"\x01\x01a\x04\x00", MalformedFrame, 5),
        (b"\x01\x01a\x09\x00", MalformedFrame, 4),
    ],
)
def test_what_is_no_frame(data: bytes, error: type[FrameError], length: int) -> None:
    decoder = ZmtpDecoder("connector")
    decoder.feed(OPENING)
    ((offset, seen, item),) = decoder.feed(data)
    assert (offset, type(item), seen) == (len(OPENING), error, length)


def test_decoding_continues_after_a_malformed_command() -> None:
    decoder = ZmtpDecoder("connector")
    decoder.feed(OPENING)
    rows = decoder.rows(b"\x04\x01\x00" + serialize(Message((b"x",))))
    assert [(row.error, row.frame) for row in rows] == [
        ("malformed", None),
        (None, "zmtp-message"),
    ]


def test_a_message_in_the_handshake_is_an_error() -> None:
    rows = ZmtpDecoder("connector").rows(wire(Greeting("NULL"), Message((b"x",)), READY))
    assert [(row.error, row.frame) for row in rows] == [
        (None, "zmtp-greeting"),
        ("malformed", None),
        (None, "zmtp-command"),
    ]


@pytest.mark.parametrize("cut", range(8))
def test_metadata_that_is_cut_short_is_an_error_of_the_row(cut: int) -> None:
    whole = serialize_metadata({"a": b"bc"})
    body = whole[:cut] or b"\x01"
    (_, row) = ZmtpDecoder("connector").rows(wire(Greeting("NULL"), Command("READY", body)))
    assert (row.error is None) == (body == whole)


def test_libzmqs_misspelt_error_is_read() -> None:
    assert parse_command(b"^RROR\x03400") == Command("ERROR", b"\x03400")


# ---------------------------------------------------------------------------------------- limits


def opened(**limits: int) -> ZmtpDecoder:
    decoder = ZmtpDecoder("connector", limits=ZmtpLimits(**limits))
    decoder.feed(OPENING)
    return decoder


def only(items: list[Any]) -> Any:
    ((_, _, item),) = items
    return item


def test_a_message_of_exactly_the_limit_passes() -> None:
    message = Message((b"x" * 40, b"y" * 56))
    assert only(opened(frame_bytes=100).feed(serialize(message))) == message


def test_one_byte_over_the_limit_is_refused_by_its_header_alone() -> None:
    data = serialize(Message((b"x" * 40, b"y" * 57)))[:44]
    assert isinstance(only(opened(frame_bytes=100).feed(data)), FrameTooLarge)


def test_the_limit_holds_across_reads() -> None:
    decoder = opened(frame_bytes=100)
    assert decoder.feed(serialize_message((b"x" * 40, b""))[:42]) == []
    assert isinstance(only(decoder.feed(b"\x00\x39")), FrameTooLarge)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5, 6])
def test_the_number_of_parts_is_limited(cut: int) -> None:
    assert only(opened(parts=2).feed(serialize_message((b"", b"")))) == Message((b"", b""))
    data = serialize_message((b"", b"", b""))
    decoder = opened(parts=2)
    ((offset, length, item),) = decoder.feed(data[:cut]) + decoder.feed(data[cut:])
    assert (offset, length, type(item)) == (len(OPENING), 4, FrameTooLarge)


def test_a_frame_in_the_handshake_is_small() -> None:
    data = wire(Greeting("NULL")) + b"\x02" + (65536).to_bytes(8)
    (_, (_, _, item)) = ZmtpDecoder("connector").feed(data)
    assert isinstance(item, FrameTooLarge)


def test_a_long_message_in_small_steps_is_read_once() -> None:
    """Were it read again, or joined again, for every part, this would take minutes."""
    decoder = opened(parts=40_000)
    step = serialize_message((b"x", b""))[:3]
    for _ in range(39_999):
        assert decoder.feed(step) == []
    assert decoder.pending == 3 * 39_999
    item = only(decoder.feed(b"\x00\x00"))
    assert len(item.parts) == 40_000


def test_an_announced_part_is_not_allocated() -> None:
    decoder = opened()
    tracemalloc.start()
    try:
        decoder.feed(b"\x03" + (60_000_000).to_bytes(8) + b"x")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


# ----------------------------------------------------------------------------- nested commands


@given(st.lists(bodies, min_size=2, max_size=5), commands, st.data())
def test_a_command_inside_a_message_is_on_a_layer_of_its_own(
    parts: list[bytes], command: Command, data: st.DataObject
) -> None:
    """So does libzmq with its heartbeats."""
    heads = [serialize_message((part, b""))[:-2] for part in parts[:-1]]
    heads.append(serialize_message((parts[-1],)))
    index = data.draw(st.integers(1, len(parts) - 1))
    heads.insert(index, serialize(command))
    stream = b"".join(heads)
    cut = data.draw(st.integers(0, len(stream)))
    decoder = ZmtpDecoder("connector")
    decoder.feed(OPENING)
    nested, message = decoder.feed(stream[:cut]) + decoder.feed(stream[cut:])
    start = len(OPENING)
    inside = start + sum(map(len, heads[:index]))
    assert nested == (inside, len(heads[index]), NestedCommand(command.name, command.body))
    assert message == (start, len(stream), Message(tuple(parts)))
    assert nested[2].layer == 1


# ------------------------------------------------------------------------------------------ rest


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_scanning_never_raises_anything_else(data: bytes) -> None:
    placed: list[Any] = []
    try:
        position, need = scan_messages(data, 0, 0, ZmtpLimits(parts=5), Partial(), placed)
    except FrameError as error:
        assert 0 <= error.offset <= error.offset + error.length <= len(data)
    else:
        assert position <= len(data) < position + need


def test_sniffing() -> None:
    greeting = serialize(Greeting("NULL"))
    assert [sniff(greeting[:size]) for size in (0, 1, 10, 11, 64)] == [
        Sniff.MORE,
        Sniff.MORE,
        Sniff.MORE,
        Sniff.YES,
        Sniff.YES,
    ]
    assert sniff(b"GET") is Sniff.NO
    assert sniff(b"\xff" + bytes(10)) is Sniff.NO
