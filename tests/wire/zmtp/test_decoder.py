"""ZMTP's decoder in captures: state, late joining, gaps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.errors import DecoderStateError
from crosswire.wire.contract import Row
from crosswire.wire.zmtp import Command, Greeting, Message, ZmtpDecoder, serialize_message
from crosswire.wire.zmtp.frames import Sealed
from tests.wire.stream import Stream
from tests.wire.zmtp.strategies import READY, streams, wire

REQUEST = (b"", b"eMQP/1.0", b"REQUEST", b"id", b"default", b"", b"{}")
MANY = serialize_message(REQUEST) * 5


def in_words(rows: list[Row]) -> list[dict[str, Any]]:
    return [row.public() for row in rows]


def accounted(rows: list[Row], decoder: ZmtpDecoder) -> int:
    return sum(row.length for row in rows if not row.layer) + decoder.pending + decoder.unread


@settings(max_examples=100)
@given(streams("connector"), st.lists(st.integers(0, 2000), max_size=6), st.binary(max_size=20))
def test_any_cut_with_state_saved_at_every_one(
    stream: Stream, positions: list[int], noise: bytes
) -> None:
    data = stream.data + noise
    expected = in_words(ZmtpDecoder("connector").rows(data))
    marks = sorted({0, len(data), *(index % (len(data) + 1) for index in positions)})
    decoder, rows = ZmtpDecoder("connector"), []
    for start, end in pairwise(marks):
        rows += decoder.rows(data[start:end])
        state = decoder.dump()
        assert len(state) <= 65536 + decoder.pending
        decoder = ZmtpDecoder("connector")
        decoder.load(state)
    assert in_words(rows) == expected
    assert accounted(rows, decoder) == len(data)


@pytest.mark.parametrize("own", [None, [], ["NULL", "nowhere", [], 0, 0], [1, "rest", [], 0, 0]])
def test_damaged_state_is_refused(own: Any) -> None:
    decoder, other = ZmtpDecoder("connector"), ZmtpDecoder("connector")
    other._save = lambda: own  # type: ignore[method-assign]
    with pytest.raises(DecoderStateError):
        decoder.load(other.dump())


@pytest.mark.parametrize("cut", range(len(serialize_message(REQUEST))))
def test_joining_late_finds_the_next_message_and_reports_what_it_skipped(cut: int) -> None:
    decoder = ZmtpDecoder("connector", late=True)
    rows = decoder.rows(MANY[cut:])
    frames = [row for row in rows if row.frame == "zmtp-message"]
    assert rows[0].frame == "unsynchronized"
    assert len(frames) >= 3
    whole = {"parts": [part.hex() for part in REQUEST]}
    assert all(row.fields == whole for row in frames)
    assert accounted(rows, decoder) == len(MANY) - cut


@given(st.integers(1, 2000), st.binary(min_size=0, max_size=30))
def test_joining_late_any_cut_gives_the_same(cut: int, noise: bytes) -> None:
    data = noise + MANY
    whole, pieces = (ZmtpDecoder("connector", late=True) for _ in range(2))
    expected = in_words(whole.rows(data))
    assert in_words(pieces.rows(data[:cut]) + pieces.rows(data[cut:])) == expected


def test_a_command_is_a_start() -> None:
    data = wire(Command("PING", bytes(2))) + MANY
    rows = ZmtpDecoder("connector", late=True).rows(data)
    assert [row.frame for row in rows] == ["unsynchronized", "zmtp-command"] + ["zmtp-message"] * 5


SECRET = wire(*[Sealed(bytes([number]) * 60) for number in range(6)])


def test_joining_encrypted_traffic_late_is_noticed() -> None:
    rows = ZmtpDecoder("connector", late=True).rows(SECRET[5:])
    assert [row.frame for row in rows] == ["unsynchronized"] + ["encrypted"] * 5


def test_the_other_direction_has_the_mechanism() -> None:
    """What looks sealed is a message where the peer greeted with NULL."""
    peer = ZmtpDecoder("binder")
    peer.feed(wire(Greeting("NULL"), READY))
    rows = ZmtpDecoder("connector", late=True, peer=peer).rows(SECRET)
    assert "encrypted" not in {row.frame for row in rows}
    assert {row.frame for row in rows[2:]} == {"zmtp-message"}


@pytest.mark.parametrize("cut", range(1, len(serialize_message(REQUEST))))
def test_a_gap_inside_a_message(cut: int) -> None:
    decoder = ZmtpDecoder("connector")
    opening = wire(Greeting("NULL"), READY)
    rows = decoder.rows(opening + MANY[:cut])
    rows += [decoder.describe(*item) for item in decoder.skip(7)]
    rows += decoder.rows(MANY)
    placed = [(row.offset, row.length, row.frame) for row in rows]
    assert (len(opening), cut, "unsynchronized") in placed
    assert (len(opening) + cut, 7, "gap") in placed
    assert placed[-1][2] == "zmtp-message"
    assert accounted(rows, decoder) == len(opening) + cut + 7 + len(MANY)


def test_a_run_of_zeros_is_not_a_run_of_frames() -> None:
    decoder = ZmtpDecoder("connector", late=True)
    assert decoder.rows(bytes(500)) == []
    assert decoder.pending == 500


def test_a_message_is_a_message() -> None:
    decoder = ZmtpDecoder("connector")
    decoder.feed(wire(Greeting("NULL"), READY))
    text = b"\x07MESSAGE" + bytes(40)
    ((_, _, item),) = decoder.feed(serialize_message((text,)))
    assert item == Message((text,))
