"""Runs: what is read in one pass is what is read part by part, wherever the bytes are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from crosswire.wire.contract import Event
from crosswire.wire.emqp.connection import EmqpConnection
from crosswire.wire.emqp.events import RequestReceived
from crosswire.wire.emqp.frames import EmqpLimits, Heartbeat, Inform, Ready, Reply, Request
from crosswire.wire.zmtp.frames import serialize_message
from tests.wire.emqp.strategies import handshake, wire

names = st.sampled_from(["", "a", "jobs", "ß" * 130])
bodies = st.sampled_from([b"", b"x", b"\xff\x00", b"y" * 255, b"z" * 256, b"w" * 3000])
oddities = st.sampled_from(
    [
        serialize_message((b"", b"eMQP/1.0", b"REQUEST", b"\xff", b"q", b"", b"m")),
        serialize_message((b"", b"eMQP/1.0", b"REQUEST", b"1", b"q", b"")),
        serialize_message((b"", b"eMQP/1.0", b"REQUEST", b"1", b"q", b"", b"m", b"more")),
        serialize_message((b"", b"eMQP/1.0", b"READY", b"\xfe")),
        serialize_message((b"", b"eMQP/1.0", b"READY")),
        serialize_message((b"", b"eMQP/1.0", b"REPLY", b"1", b"m")),
        serialize_message((b"", b"eMQP/1.0", b"REPLY", b"1", b"m", b"\xff")),
        serialize_message((b"", b"eMQP/2.0", b"READY", b"1")),
        wire(Heartbeat("h", "1")),
    ]
)
requests = st.builds(Request, names, names, names, bodies).map(wire)
answers = st.one_of(st.builds(Ready, names), st.builds(Reply, names, bodies, names)).map(wire)


def connect(listener: str, *, plain: bool) -> EmqpConnection:
    connection = EmqpConnection("broker", 0.0, listener=listener)
    if plain:
        connection._zmtp.decoder.take = None
    connection.receive_data(handshake("DEALER", b"peer"), 0.0)
    if listener == "emqp-workers":
        connection.receive_data(wire(Inform("i", "", "worker")), 0.0)
        connection.send_ack("i")
    connection.events()
    return connection


def events_of(connection: EmqpConnection, data: bytes, cuts: list[int]) -> list[Event]:
    events: list[Event] = []
    start = 0
    for stop in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        connection.receive_data(data[start:stop], 1.0)
        events += connection.events()
        start = stop
    return events


def compare(listener: str, messages: list[bytes], cuts: list[int]) -> None:
    data = b"".join(messages)
    quick, plain = connect(listener, plain=False), connect(listener, plain=True)
    assert str(events_of(quick, data, cuts)) == str(events_of(plain, data, []))
    assert quick.free_slots == plain.free_slots
    assert quick.ignored == plain.ignored
    assert quick.last_received_at == plain.last_received_at
    assert quick._decoder.offset == plain._decoder.offset


@given(st.lists(requests | oddities, max_size=8), st.lists(st.integers(0, 1 << 16), max_size=4))
def test_requests_are_the_same(messages: list[bytes], cuts: list[int]) -> None:
    compare("emqp-clients", messages, cuts)


@given(st.lists(answers | oddities, max_size=8), st.lists(st.integers(0, 1 << 16), max_size=4))
def test_answers_of_workers_are_the_same(messages: list[bytes], cuts: list[int]) -> None:
    compare("emqp-workers", messages, cuts)


def test_a_run_of_requests_keeps_the_content_of_each() -> None:
    connection = connect("emqp-clients", plain=False)
    asked = [Request(str(each), "q", "guarantee", b"%d" % each) for each in range(5)]
    connection.receive_data(b"".join(wire(each) for each in asked), 1.0)
    assert connection.events() == [
        RequestReceived(each.msgid, each.queue, each.headers, each.message) for each in asked
    ]


def test_what_is_too_long_is_refused_as_ever() -> None:
    limits = EmqpLimits(frame_bytes=1024)
    connection = EmqpConnection("broker", 0.0, listener="emqp-clients", limits=limits)
    connection.receive_data(handshake("DEALER"), 0.0)
    connection.receive_data(wire(Request("1", "q", "", bytes(2000))), 1.0)
    assert connection.closed


def test_what_comes_too_early_is_ignored_one_by_one() -> None:
    connection = EmqpConnection("broker", 0.0, listener="emqp-workers")
    connection.receive_data(handshake("DEALER"), 0.0)
    connection.receive_data(wire(Ready("1")) * 3, 1.0)
    assert connection.ignored == 3 and connection.free_slots == 0
