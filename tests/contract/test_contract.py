"""What every registered protocol promises, by any author."""

from __future__ import annotations

import importlib
import inspect
import tracemalloc
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.errors import DecoderStateError, LocalProtocolError
from crosswire.wire import PROTOCOL_NAMES, protocol
from crosswire.wire.contract import (
    Connection,
    ConnectionClosed,
    ConnectionFailed,
    Decoder,
    Row,
)
from crosswire.wire.registry import sniff
from tests.wire.stream import Stream

SENDERS = [(name, sender) for name in PROTOCOL_NAMES for sender in protocol(name).roles]
ENDS = [(name, end) for name in PROTOCOL_NAMES for end in (0, 1)]
senders = pytest.mark.parametrize(("name", "sender"), SENDERS)
ends = pytest.mark.parametrize(("name", "end"), ENDS)
fewer = settings(max_examples=40)


def offered(name: str) -> Any:
    return importlib.import_module(f"tests.wire.{name}.strategies")


def decoder_of(name: str, sender: str, stream: Stream) -> Decoder:
    entry = protocol(name)
    peer = None
    if stream.peer:
        other = entry.roles[-1] if sender != entry.roles[-1] else entry.roles[0]
        peer = entry.decoder(other)
        peer.feed(stream.peer)
    return entry.decoder(sender, hints=stream.hints or None, peer=peer)


def cut(data: bytes, indexes: list[int]) -> list[bytes]:
    marks = sorted({0, len(data), *(index % (len(data) + 1) for index in indexes)})
    return [data[start:end] for start, end in pairwise(marks)]


def in_words(rows: list[Row]) -> list[bytes]:
    return [msgspec.json.encode(row) for row in rows]


cuts = st.lists(st.integers(0, 10_000), max_size=6)


@senders
@fewer
@given(data=st.data(), positions=cuts, noise=st.binary(max_size=20))
def test_any_cut_gives_the_same_rows(
    name: str, sender: str, data: st.DataObject, positions: list[int], noise: bytes
) -> None:
    stream = data.draw(offered(name).streams(sender))
    whole, pieces = decoder_of(name, sender, stream), decoder_of(name, sender, stream)
    expected = in_words(whole.rows(stream.data + noise))
    rows = [row for piece in cut(stream.data + noise, positions) for row in pieces.rows(piece)]
    assert in_words(rows) == expected


@senders
@fewer
@given(data=st.data(), noise=st.binary(max_size=20))
def test_every_byte_is_accounted_for(
    name: str, sender: str, data: st.DataObject, noise: bytes
) -> None:
    stream = data.draw(offered(name).streams(sender))
    decoder = decoder_of(name, sender, stream)
    rows = decoder.rows(stream.data + noise)
    placed = sum(row.length for row in rows if row.layer == 0)
    assert placed + decoder.pending + decoder.unread == len(stream.data + noise)


@senders
@fewer
@given(data=st.data())
def test_a_valid_stream_has_no_errors_and_no_rest(
    name: str, sender: str, data: st.DataObject
) -> None:
    stream = data.draw(offered(name).streams(sender))
    decoder = decoder_of(name, sender, stream)
    rows = decoder.rows(stream.data)
    assert [row.reason for row in rows if row.error] == []
    assert decoder.pending == 0


@senders
@fewer
@given(data=st.data(), position=st.integers(0, 10_000), noise=st.binary(max_size=20))
def test_state_survives_dump_and_load_anywhere(
    name: str, sender: str, data: st.DataObject, position: int, noise: bytes
) -> None:
    stream = data.draw(offered(name).streams(sender))
    wire = stream.data + noise
    position %= len(wire) + 1
    whole, before, after = (decoder_of(name, sender, stream) for _ in range(3))
    expected = in_words(whole.rows(wire))
    rows = before.rows(wire[:position])
    state = before.dump()
    assert len(state) <= 65536 + before.pending
    after.load(state)
    assert in_words(rows + after.rows(wire[position:])) == expected


@senders
@fewer
@given(state=st.binary(max_size=60))
def test_damaged_state_is_refused(name: str, sender: str, state: bytes) -> None:
    decoder = protocol(name).decoder(sender)
    with pytest.raises(DecoderStateError):
        decoder.load(state)


@senders
@settings(max_examples=150)
@given(data=st.binary(max_size=300))
def test_garbage_is_decoded_without_an_exception(name: str, sender: str, data: bytes) -> None:
    decoder = protocol(name).decoder(sender)
    rows = decoder.rows(data)
    placed = sum(row.length for row in rows if row.layer == 0)
    assert placed + decoder.pending + decoder.unread == len(data)


@senders
@fewer
@given(data=st.data(), position=st.integers(0, 10_000))
def test_a_late_decoder_reports_what_it_skipped(
    name: str, sender: str, data: st.DataObject, position: int
) -> None:
    stream = data.draw(offered(name).streams(sender))
    wire = stream.data[position % (len(stream.data) + 1) :]
    decoder = protocol(name).decoder(sender, late=True, hints=stream.hints or None)
    rows = decoder.rows(wire)
    assert not rows or rows[0].frame == "unsynchronized" or rows[0].error
    placed = sum(row.length for row in rows if row.layer == 0)
    assert placed + decoder.pending + decoder.unread == len(wire)


@senders
@fewer
@given(data=st.data(), position=st.integers(0, 10_000), missing=st.integers(1, 1000))
def test_a_gap_is_placed_and_decoding_never_breaks(
    name: str, sender: str, data: st.DataObject, position: int, missing: int
) -> None:
    stream = data.draw(offered(name).streams(sender))
    position %= len(stream.data) + 1
    decoder = decoder_of(name, sender, stream)
    rows = decoder.rows(stream.data[:position])
    rows += [decoder.describe(*item) for item in decoder.skip(missing)]
    rows += decoder.rows(stream.data[position:])
    placed = sum(row.length for row in rows if row.layer == 0)
    assert placed + decoder.pending + decoder.unread == len(stream.data) + missing
    assert [row.length for row in rows if row.frame == "gap"] == [missing]


# ----------------------------------------------------------------------------------- connections


def ending(events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, ConnectionClosed | ConnectionFailed)]


@ends
@settings(max_examples=150)
@given(data=st.binary(max_size=300), positions=cuts)
def test_garbage_after_the_handshake_never_raises(
    name: str, end: int, data: bytes, positions: list[int]
) -> None:
    connection: Connection = offered(name).open_pair()[end]
    for piece in cut(data, positions):
        connection.receive_data(piece, 1.0)
    connection.receive_eof()
    connection.handle_deadline(1e6)
    connection.handle_deadline(2e6)
    events = connection.events()
    assert len(ending(events)) <= 1
    assert bool(ending(events)) == connection.closed


@ends
@settings(max_examples=150)
@given(data=st.binary(min_size=1, max_size=300))
def test_garbage_instead_of_a_handshake_never_raises(name: str, end: int, data: bytes) -> None:
    entry = protocol(name)
    connection = entry.connection(entry.roles[-end], 0.0)
    connection.receive_data(data, 0.0)
    for late in (1e6, 2e6):
        # Some bytes are a handshake after all: then it is the ping that nobody answers.
        connection.handle_deadline(late)
    assert connection.closed
    assert len(ending(connection.events())) == 1


@ends
def test_a_silent_peer_is_not_waited_for_forever(name: str, end: int) -> None:
    entry = protocol(name)
    connection = entry.connection(entry.roles[-end], 0.0)
    deadline = connection.next_deadline()
    assert deadline is not None and deadline <= entry.limits.handshake_s
    connection.handle_deadline(deadline)
    assert connection.closed


@ends
def test_the_end_comes_once_and_is_the_last_event(name: str, end: int) -> None:
    connection: Connection = offered(name).open_pair()[end]
    connection.fail(LocalProtocolError("for the test"))
    connection.fail(LocalProtocolError("again"))
    connection.close()
    connection.receive_eof()
    events = connection.events()
    assert len(ending(events)) == 1 and events[-1] in ending(events)


SAMPLES: dict[str, Any] = {
    "args": (),
    "channel": 0,
    "channels": [0],
    "code": "c",
    "command": "STATUS",
    "context": b"c",
    "conversation": 1,
    "data": b"{}",
    "description": "d",
    "destination": "queue/q",
    "error": b"CB\x01\x00\x00",
    "headers": "",
    "identifier": 1,
    "interval_s": 60.0,
    "message": b"m",
    "messages": [(b"p", b"m")],
    "method": "m",
    "msgid": "1",
    "name": "x-vendor",
    "op": "op",
    "payload": b"{}",
    "queue": "q",
    "request": "1",
    "requests": [],
    "sequence": 0,
    "service": "s",
    "topic": "t",
}
"""Arguments of what connections send, by name."""


def sends_of(connection: Connection) -> list[tuple[str, bool, dict[str, Any]]]:
    """Every send of a connection: its name, whether it gives anything, and arguments for it."""
    found = []
    for name, method in inspect.getmembers(connection, inspect.ismethod):
        if not (name.startswith("send_") or name == "acknowledge"):
            continue
        signature = inspect.signature(method)
        arguments = {
            each.name: SAMPLES[each.name]
            for each in signature.parameters.values()
            if each.kind is not each.VAR_POSITIONAL
            and (each.default is each.empty or (name, each.name) == ("send_schedule", "interval_s"))
        }
        found.append((name, signature.return_annotation != "None", arguments))
    return found


@ends
@pytest.mark.parametrize("how", ["violation", "eof"])
def test_sends_after_the_end_are_ignored_unless_somebody_would_wait_for_them(
    name: str, end: int, how: str
) -> None:
    connection: Connection = offered(name).open_pair()[end]
    if how == "violation":
        connection.receive_data(b"\xff" * 64, 1.0)
    elif name == "relink":
        return  # the link goes on, and keeps what is sent until there is a connection again
    else:
        connection.receive_eof()
    assert connection.closed
    connection.events()
    connection.data_to_send()
    sends = sends_of(connection)
    assert sends
    for method, gives, arguments in sends:
        if gives:
            with pytest.raises(LocalProtocolError):
                getattr(connection, method)(**arguments)
        else:
            getattr(connection, method)(**arguments)
    assert connection.data_to_send() == []
    assert connection.events() == []


@ends
def test_closing_ends_the_connection_or_sends_a_closing_message(name: str, end: int) -> None:
    connection: Connection = offered(name).open_pair()[end]
    connection.close()
    assert connection.closed or connection.send_closed or connection.data_to_send()


@senders
def test_an_announced_size_is_not_allocated(name: str, sender: str) -> None:
    """Feeds the largest numbers a header can hold, in many shapes, and watches the memory."""
    entry = protocol(name)
    tracemalloc.start()
    try:
        for size in range(1, 40):
            for filling in (b"\x7f", b"\xff", b"\x01", b"\x03"):
                for start in (b"", b"\x00", b"\x03\xff", b"\x02\x7f\xff", b"\x10\x51\x73"):
                    entry.decoder(sender).feed(start + filling * size)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


# ----------------------------------------------------------------------------------------- sniff


@senders
@fewer
@given(data=st.data())
def test_a_stream_is_recognised_or_left_open_never_taken_for_another(
    name: str, sender: str, data: st.DataObject
) -> None:
    stream = data.draw(offered(name).streams(sender))
    for size in (1, 4, 9, 16, 64, len(stream.data)):
        assert sniff(stream.data[:size]) in (name, None)


@pytest.mark.parametrize(
    "data",
    [b"", b"GET / HTTP/1.1\r\n\r\n", bytes.fromhex("1603010200010001fc0303"), b"SSH-2.0-x\r\n"],
)
def test_other_protocols_are_unknown(data: bytes) -> None:
    assert sniff(data) is None
