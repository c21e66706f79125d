"""eMQP's columnar scanner gives what its decoder gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.pipeline.decode.arrays import NONE
from crosswire.pipeline.decode.scanners.emqp import EmqpScanner
from crosswire.pipeline.decode.scanners.scanner import DECODER_ONLY, STOP_REASON, UNSURE
from crosswire.wire.contract import Frame
from crosswire.wire.emqp.decoder import EmqpDecoder
from crosswire.wire.emqp.frames import (
    Ack,
    Admin,
    DeliveryFrame,
    EmqpLimits,
    Heartbeat,
    Inform,
    Publish,
    Ready,
    Reply,
    Request,
    ScheduleFrame,
    UnscheduleFrame,
)
from crosswire.wire.emqp.layout import VERSION
from crosswire.wire.zmtp.frames import (
    Command,
    Greeting,
    Message,
    serialize_command,
    serialize_message,
    serialize_metadata,
)
from crosswire.wire.zmtp.frames import serialize as serialize_zmtp
from tests.pipeline.decode.scanned import Noisy, Slices, Typed, check, check_alone, noisy
from tests.wire.emqp.strategies import handshake, streams, wire
from tests.wire.stream import Stream

SCANNER = EmqpScanner()

senders = pytest.mark.parametrize("sender", ["client", "subscriber", "broker"])


def typed(frame: Frame, raw: bytes) -> Typed:
    match frame:
        case Message(parts=parts):
            return len(parts), NONE, NONE, {}
        case Greeting():
            name = {"name": frame.mechanism.encode()}
            return raw[10] << 8 | raw[11], frame.as_server, NONE, name
        case Command():
            return 0, NONE, NONE, {"name": frame.name.encode(), "about": frame.body}
        case DeliveryFrame(topic=topic, message=message):
            return 0, NONE, NONE, {"name": topic.encode(), "payload": message}
    found = {name: value for name, value in _slices(frame).items() if value is not None}
    return (
        0,
        NONE,
        NONE,
        {
            name: value.encode() if isinstance(value, str) else value
            for name, value in found.items()
        },
    )


def _slices(frame: Frame) -> Slices:
    slices: Slices = {"msgid": getattr(frame, "msgid", None)}
    match frame:
        case Request():
            more = {"name": frame.queue, "headers": frame.headers, "payload": frame.message}
        case Publish():
            more = {"name": frame.topic, "headers": frame.headers, "payload": frame.message}
        case Reply():
            more = {"payload": frame.message, "about": frame.request}
        case Ack():
            more = {"about": frame.acknowledged}
        case Heartbeat():
            more = {"about": frame.timestamp}
        case Inform():
            more = {"about": frame.queues, "last": frame.peer}
        case Admin():
            more = {"about": frame.command}
        case ScheduleFrame() | UnscheduleFrame():
            more = {
                "name": frame.queue,
                "headers": frame.headers,
                "payload": frame.message,
                "about": frame.interval,
                "last": frame.cron,
            }
        case _:
            more = {}
    return slices | more


@senders
@settings(max_examples=50)
@given(data=st.data(), step=st.integers(1, 64))
def test_scanner_and_decoder_give_the_decoders_rows(
    sender: str, data: st.DataObject, step: int
) -> None:
    cases = data.draw(st.lists(noisy(streams(sender), 3), min_size=1, max_size=3))
    check(SCANNER, "emqp", sender, cases, typed, step_bytes=step)


@senders
@settings(max_examples=20)
@given(data=st.data())
def test_valid_streams_need_no_decoder(sender: str, data: st.DataObject) -> None:
    sent = data.draw(st.lists(streams(sender), min_size=1, max_size=4))
    check_alone(SCANNER, "emqp", sender, sent, typed)


@senders
@settings(max_examples=20)
@given(data=st.data())
def test_a_decoder_that_joined_late_gives_back(sender: str, data: st.DataObject) -> None:
    cases = [data.draw(noisy(streams(sender), 2))]
    check(SCANNER, "emqp", sender, cases, typed, late=True)


words = st.sampled_from(
    [b"", VERSION, b"REQUEST", b"PUBLISH", b"SCHEDULE", b"REPLY", b"STATUS", b"\xff", b"\0t", b"x"]
)
messages = st.lists(words, min_size=1, max_size=10).map(serialize_message)
commands = st.lists(words, min_size=2, max_size=8).map(
    lambda parts: serialize_message([b"", VERSION, *parts])
)
between = st.just(serialize_command("PING", b"\0\0hi"))


def judged_alike(sender: str, sent_bytes: bytes) -> None:
    case = Stream(sent_bytes)
    check(SCANNER, "emqp", sender, [Noisy(case, sent_bytes, (sent_bytes,))], typed)


@settings(max_examples=100)
@given(
    sender=st.sampled_from(["client", "broker"]),
    socket=st.sampled_from(["DEALER", "ROUTER", "PUB", "XSUB", ""]),
    sent=st.lists(messages | commands | between, max_size=4),
)
def test_what_is_no_command_is_left_to_the_decoder(
    sender: str, socket: str, sent: list[bytes]
) -> None:
    judged_alike(sender, handshake(socket) + b"".join(sent))


names = st.sampled_from(["Socket-Type", "socket-type", "SOCKET-TYPE", "Identity", "x", "é", ""])
metadata = st.lists(st.tuples(names, st.sampled_from([b"SUB", b"DEALER", b"PUB", b""])), max_size=3)


@settings(max_examples=100)
@given(
    mechanism=st.sampled_from(["NULL", "PLAIN", "CURVE", "CURVES"]),
    properties=metadata,
    last=st.sampled_from(["READY", "INITIATE", "WELCOME"]),
    cut_short=st.booleans(),
)
def test_handshakes_are_judged_alike(
    mechanism: str, properties: list[tuple[str, bytes]], last: str, cut_short: bool
) -> None:
    chunks = []
    for name, value in properties:
        spelled = name.encode()
        chunks += [bytes((len(spelled),)), spelled, len(value).to_bytes(4), value]
    body = b"".join(chunks)
    opening = serialize_command("HELLO", b"\1u\1p") + serialize_command(
        last, body[:-1] if cut_short else body
    )
    sent_bytes = serialize_zmtp(Greeting(mechanism)) + opening + wire(Ready("1")) + wire(Ready("2"))
    judged_alike("client", sent_bytes)


def test_a_second_ready_changes_what_messages_hold() -> None:
    again = serialize_command("READY", serialize_metadata({"Socket-Type": b"SUB"}))
    judged_alike("client", handshake("DEALER") + wire(Ready("1")) + again + wire(Ready("2")))


def test_a_command_between_the_parts_of_a_message() -> None:
    message = wire(Request("1", "q", "", b"body"))
    inside = message[:2] + serialize_command("PING", b"\0\0") + message[2:]
    judged_alike("client", handshake("DEALER") + message + inside + message)


def test_libzmqs_slip_of_the_pen_is_left_to_the_decoder() -> None:
    judged_alike("client", serialize_zmtp(Greeting("PLAIN")) + b"\4\7^RROR\1x")


def test_curve_is_not_for_the_scanner() -> None:
    decoder = EmqpDecoder("client")
    decoder.feed(serialize_zmtp(Greeting("CURVE")))
    assert SCANNER.state_of(decoder)[STOP_REASON] == DECODER_ONLY


@pytest.mark.parametrize("limits", [EmqpLimits(parts=6), EmqpLimits(frame_bytes=40)])
def test_it_stops_before_what_passes_a_limit(limits: EmqpLimits) -> None:
    start = handshake("DEALER") + wire(Ready("1"))
    sent_bytes = start + wire(Request("1", "q", "", b"x" * 20))
    scanner = EmqpScanner(limits)
    at, states = np.zeros(1, np.int64), scanner.new_states("client", 1)
    scanner.scan(np.frombuffer(sent_bytes, np.uint8), at, np.array([len(sent_bytes)]), states)
    assert (at[0], states[0, STOP_REASON]) == (len(start), UNSURE)
