"""EMP's messages against recorded bytes, and round trips."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosswire.errors import FrameError, FrameTooLarge, MalformedFrame, UnknownFrame
from crosswire.wire.contract import Frame, Row
from crosswire.wire.emp.decoder import EmpDecoder
from crosswire.wire.emp.frames import (
    EmpLimits,
    Error,
    Request,
    Response,
    scan,
    serialize,
    serialize_call,
)
from tests.wire.emp.strategies import frames
from tests.wire.vectors import load

VECTORS = load("emp")
VALID = [vector for vector in VECTORS if "frame" in vector or "frames" in vector]
WRITTEN_OTHERWISE = {"ping-body": bytes.fromhex("0000000402000000")}
REFUSED = [vector for vector in VECTORS if vector not in VALID]


def expected(vector: dict[str, Any]) -> list[tuple[str, Any]]:
    listed = vector.get("frames") or [vector]
    return [(item["frame"], item["fields"]) for item in listed]


def plain(rows: list[Row]) -> list[tuple[str | None, Any]]:
    return [(row.frame, json.loads(msgspec.json.encode(row.fields))) for row in rows]


@pytest.mark.parametrize("vector", VALID, ids=lambda vector: vector["name"])
class TestVectors:
    def test_whole(self, vector: dict[str, Any]) -> None:
        assert plain(EmpDecoder("client").rows(bytes.fromhex(vector["wire"]))) == expected(vector)

    def test_byte_by_byte(self, vector: dict[str, Any]) -> None:
        decoder = EmpDecoder("client")
        wire = bytes.fromhex(vector["wire"])
        rows = [row for octet in wire for row in decoder.rows(bytes([octet]))]
        assert plain(rows) == expected(vector)

    def test_with_bytes_after_it(self, vector: dict[str, Any]) -> None:
        decoder = EmpDecoder("client")
        rows = decoder.rows(bytes.fromhex(vector["wire"]) + b"\0\0\0\4\2")
        assert (plain(rows), decoder.pending) == (expected(vector), 5)

    def test_serialized(self, vector: dict[str, Any]) -> None:
        wire = bytes.fromhex(vector["wire"])
        written = WRITTEN_OTHERWISE.get(vector["name"], wire)
        items = [item for _, _, item in EmpDecoder("client").feed(wire)]
        assert b"".join(serialize(item) for item in items if isinstance(item, Frame)) == written


@pytest.mark.parametrize("vector", REFUSED, ids=lambda vector: vector["name"])
def test_what_is_no_message_is_an_error_at_its_first_byte(vector: dict[str, Any]) -> None:
    (row,) = EmpDecoder("client").rows(bytes.fromhex(vector["wire"]))
    assert row.error and row.reason and row.offset == 0


@given(st.lists(frames, max_size=10))
def test_round_trip(sent: list[Frame]) -> None:
    items = EmpDecoder("client").feed(b"".join(map(serialize, sent)))
    assert [item for _, _, item in items] == sent


@pytest.mark.parametrize(
    ("wire", "error", "length"),
    [
        ("00000000", MalformedFrame, 4),
        ("00000003020000", MalformedFrame, 7),
        ("0000000400000000", MalformedFrame, 8),
        ("00000009000000000100000000", MalformedFrame, 13),
        ("0000000407000000", UnknownFrame, 8),
        ("0000000b0500000000000000000001", MalformedFrame, 15),
        ("0000000804000000 01000000", MalformedFrame, 12),
        ("0000000b04000000010000000002ff", MalformedFrame, 15),
        ("0000000b040000000100000000 00ff", MalformedFrame, 15),
        ("0000000b040000000100000000 01ff", MalformedFrame, 15),
        ("04000001", FrameTooLarge, 4),
    ],
)
def test_refused(wire: str, error: type[FrameError], length: int) -> None:
    ((_, seen, item),) = EmpDecoder("client").feed(bytes.fromhex(wire))
    assert (type(item), seen) == (error, length)


def test_a_message_of_exactly_the_limit_passes() -> None:
    limits = EmpLimits(frame_bytes=100)
    wire = serialize(Request(1, b"x" * 88))
    ((_, _, item),) = EmpDecoder("client", limits=limits).feed(wire)
    assert item == Request(1, b"x" * 88)


def test_one_byte_over_the_limit_is_refused_by_its_length_alone() -> None:
    limits = EmpLimits(frame_bytes=100)
    wire = serialize(Request(1, b"x" * 89))[:4]
    ((_, _, item),) = EmpDecoder("client", limits=limits).feed(wire)
    assert isinstance(item, FrameTooLarge)


def test_decoding_continues_after_a_bad_message() -> None:
    rows = EmpDecoder("client").rows(bytes.fromhex("0000000407000000 0000000402000000"))
    assert [(row.offset, row.frame, row.error) for row in rows] == [
        (0, None, "unknown"),
        (8, "ping", None),
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"x"',
        b"{nope",
        b'{"data":{}}',
        b'{"op":1}',
        b'{"op":"x","data":[]}',
        b'{"op":"x","data":null}',
        b'{"op":"x","data":{"a":01}}',
        b'{"op":"x","data":{"a":NaN}}',
        b'{"op":"x","data":{"a":"\xff"}}',
        b'{"op":"x","other":"\xff"}',
        b'\xef\xbb\xbf{"op":"x"}',
        b'{"op":"x"} x',
        b'{"op":"x","data":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    ],
    ids=lambda body: body[:24].decode(errors="replace"),
)
def test_what_is_no_call(body: bytes) -> None:
    with pytest.raises(MalformedFrame):
        Request(1, body).call()


@pytest.mark.parametrize(
    "body",
    [b"{}", b'{"status":"maybe"}', b'{"status":"failure"}', b'{"status":"success","data":1}'],
)
def test_what_is_no_result(body: bytes) -> None:
    with pytest.raises(MalformedFrame):
        Response(1, body).result()


def test_data_is_optional_when_read() -> None:
    assert bytes(Request(1, b'{"op":"x"}').call().data) == b"{}"


def test_numbers_out_of_any_range_pass_untouched() -> None:
    data = b'{"a":123456789012345678901234567890,"b":1e999}'
    assert bytes(Request(1, serialize_call("x", data)).call().data) == data


def test_fields_stay_on_one_line() -> None:
    row = Request(1, b'{"op":"x","data":{\n"a": 1}}').fields()
    assert msgspec.json.encode(row) == b'{"id":1,"op":"x","data":{"a":1}}'


def test_a_long_description_is_cut_between_characters() -> None:
    wire = serialize(Error(1, "é" * 40_000))
    ((_, _, item),) = EmpDecoder("client").feed(wire)
    assert item == Error(1, "é" * 32_767)


@given(st.binary(max_size=200))
def test_scanning_never_raises_anything_else(data: bytes) -> None:
    placed: list[Any] = []
    try:
        position, need = scan(data, 0, 0, 1000, placed)
    except FrameError as error:
        assert error.offset == sum(length for _, length, _ in placed)
    else:
        assert position <= len(data) < position + need
