"""ZMTP's rules: greeting, handshake, socket types, subscriptions, heartbeats, the ways to end."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.errors import (
    CrosswireError,
    FrameTooLarge,
    IncompatiblePeer,
    InvalidRequest,
    LocalProtocolError,
    MalformedFrame,
    PeerError,
    PeerTimeout,
    UnexpectedFrame,
    UnknownFrame,
)
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, Event, Frame
from crosswire.wire.zmtp import (
    COMPATIBLE,
    Command,
    Greeting,
    Message,
    MessageReceived,
    PeerReady,
    PlainServer,
    PongReceived,
    Sealed,
    Subscribed,
    Unsubscribed,
    ZmtpConnection,
    ZmtpDecoder,
    ZmtpLimits,
)
from crosswire.wire.zmtp.connection import TRANSITIONS, State
from crosswire.wire.zmtp.frames import serialize_metadata
from crosswire.wire.zmtp.mechanisms import Sealer
from tests.wire.stream import pump
from tests.wire.zmtp.strategies import messages, open_pair, pair, wire


def ready(kind: str = "DEALER", **others: bytes) -> Command:
    return Command("READY", serialize_metadata({"Socket-Type": kind.encode(), **others}))


def fresh(kind: str = "ROUTER", **options: Any) -> ZmtpConnection:
    connection = ZmtpConnection("binder", 0.0, socket_type=kind, **options)
    connection.data_to_send()
    return connection


def opened(
    kind: str = "ROUTER", peer: str = "DEALER", version: str = "3.1", **options: Any
) -> ZmtpConnection:
    connection = fresh(kind, **options)
    receive(connection, Greeting("NULL", version=version), ready(peer))
    assert connection.state is State.OPEN
    connection.data_to_send()
    return connection


def receive(connection: ZmtpConnection, *frames: Frame, now: float = 0.0) -> list[Event]:
    connection.receive_data(wire(*frames), now)
    return connection.events()


def sent(connection: ZmtpConnection) -> list[Any]:
    """What was sent in the handshake, after the greeting."""
    decoder = ZmtpDecoder("binder")
    decoder.feed(wire(Greeting("NULL")))
    return [item for _, _, item in decoder.feed(b"".join(connection.data_to_send()))]


def sent_in_traffic(connection: ZmtpConnection) -> list[Any]:
    decoder = ZmtpDecoder("binder")
    decoder.feed(wire(Greeting("NULL"), ready()))
    return [item for _, _, item in decoder.feed(b"".join(connection.data_to_send()))]


def failure(events: list[Event]) -> CrosswireError:
    event = events[-1]
    assert isinstance(event, ConnectionFailed)
    return event.error


def error_sent(connection: ZmtpConnection) -> str:
    command = sent(connection)[-1]
    assert isinstance(command, Command) and command.name == "ERROR"
    assert command.body[0] == len(command.body) - 1
    return command.body[1:].decode()


class TestHandshake:
    def test_both_learn_who_the_other_is(self) -> None:
        connector = ZmtpConnection("connector", 0.0, socket_type="DEALER", identity=b"me")
        binder = ZmtpConnection("binder", 0.0, socket_type="ROUTER")
        pump(connector, binder)
        properties = {"Socket-Type": b"DEALER", "Identity": b"me"}
        assert binder.events() == [PeerReady("DEALER", b"me", properties, "3.1")]
        properties = {"Socket-Type": b"ROUTER", "Identity": b""}
        assert connector.events() == [PeerReady("ROUTER", b"", properties, "3.1")]

    def test_the_greeting_goes_out_at_once_and_ready_after_the_peers(self) -> None:
        connection = ZmtpConnection("binder", 0.0, socket_type="ROUTER", identity=b"me")
        ((_, _, greeting),) = ZmtpDecoder("binder").feed(b"".join(connection.data_to_send()))
        assert greeting == Greeting("NULL", False, "3.1", padding=3)
        receive(connection, Greeting("NULL"))
        assert [command.name for command in sent(connection)] == ["READY"]

    def test_a_subscriber_sends_no_identity(self) -> None:
        connection = fresh("SUB", identity=b"me")
        receive(connection, Greeting("NULL"))
        assert sent(connection)[0].properties() == {"Socket-Type": b"SUB"}

    @pytest.mark.parametrize("version", ["3.0", "3.1", "3.7", "4.0"])
    def test_versions_from_3_on_are_accepted(self, version: str) -> None:
        assert opened(version=version).peer_version == version

    def test_version_2_is_refused_without_a_word(self) -> None:
        connection = fresh()
        connection.receive_data(b"\xff" + bytes(8) + b"\x7f\x01\x00", 0.0)
        assert isinstance(failure(connection.events()), UnknownFrame)
        assert connection.data_to_send() == []

    def test_names_of_properties_are_read_in_any_case(self) -> None:
        connection = fresh()
        metadata = serialize_metadata({"socket-TYPE": b"DEALER", "IDENTITY": b"me"})
        (event,) = receive(connection, Greeting("NULL"), Command("READY", metadata))
        assert isinstance(event, PeerReady)
        assert (event.socket_type, event.identity) == ("DEALER", b"me")

    def test_another_mechanism_is_refused(self) -> None:
        connection = fresh()
        assert isinstance(failure(receive(connection, Greeting("PLAIN"))), IncompatiblePeer)
        assert error_sent(connection) == "the mechanism is NULL, not PLAIN"

    def test_two_servers_do_not_go_together(self) -> None:
        connection = fresh(mechanism=PlainServer(lambda user, password: True))
        events = receive(connection, Greeting("PLAIN", as_server=True))
        assert isinstance(failure(events), IncompatiblePeer)

    @pytest.mark.parametrize(
        ("ours", "theirs"),
        list(product(COMPATIBLE, [*COMPATIBLE, "REQ", "REP", "PUSH", "PAIR", "", "dealer"])),
    )
    def test_socket_types(self, ours: str, theirs: str) -> None:
        connection = fresh(ours)
        (event,) = receive(connection, Greeting("NULL"), ready(theirs))
        if theirs in COMPATIBLE[ours]:
            assert isinstance(event, PeerReady) and event.socket_type == theirs
        else:
            assert isinstance(failure([event]), IncompatiblePeer)
            assert repr(theirs) in error_sent(connection)

    def test_the_table_of_socket_types_is_symmetric(self) -> None:
        for ours, theirs in product(COMPATIBLE, COMPATIBLE):
            assert (theirs in COMPATIBLE[ours]) == (ours in COMPATIBLE[theirs])

    def test_the_owner_can_narrow_the_types(self) -> None:
        connection = fresh(peer_types=frozenset({"DEALER"}))
        events = receive(connection, Greeting("NULL"), ready("REQ"))
        assert isinstance(failure(events), IncompatiblePeer)

    def test_an_unknown_type_of_our_own_is_our_fault(self) -> None:
        with pytest.raises(ValueError, match="PUSH"):
            ZmtpConnection("binder", 0.0, socket_type="PUSH")

    def test_identities_have_255_bytes(self) -> None:
        with pytest.raises(ValueError, match="255"):
            ZmtpConnection("binder", 0.0, socket_type="ROUTER", identity=bytes(256))
        metadata = serialize_metadata({"Socket-Type": b"DEALER", "Identity": bytes(256)})
        events = receive(fresh(), Greeting("NULL"), Command("READY", metadata))
        assert isinstance(failure(events), MalformedFrame)

    def test_the_peers_error_is_not_answered(self) -> None:
        connection = fresh()
        receive(connection, Greeting("NULL"))
        sent(connection)
        error = failure(receive(connection, Command("ERROR", b"\x04nope")))
        assert isinstance(error, PeerError) and error.reason == "nope"
        assert connection.data_to_send() == []

    @pytest.mark.parametrize(
        "frame", [Command("HELLO"), Command("READY", b"\x05short"), Command("PING", bytes(2))]
    )
    def test_what_is_no_ready_is_answered_with_an_error(self, frame: Frame) -> None:
        connection = fresh()
        events = receive(connection, Greeting("NULL"), frame)
        assert isinstance(failure(events), UnexpectedFrame | MalformedFrame)
        assert error_sent(connection)

    def test_nothing_is_sent_to_a_peer_with_another_protocol(self) -> None:
        connection = fresh()
        connection.receive_data(b"GET / HTTP/1.1\r\n\r\n", 0.0)
        assert isinstance(failure(connection.events()), MalformedFrame)
        assert connection.data_to_send() == []

    @pytest.mark.parametrize("frames", [[], [Greeting("NULL")]])
    def test_it_must_be_done_in_time(self, frames: list[Frame]) -> None:
        connection = fresh()
        receive(connection, *frames, now=4.0)
        assert connection.next_deadline() == 5.0
        connection.handle_deadline(5.0)
        assert isinstance(failure(connection.events()), PeerTimeout)

    def test_sending_must_wait_for_it(self) -> None:
        with pytest.raises(LocalProtocolError):
            fresh().send_message((b"x",))


class Clear(Sealer):
    """Hides nothing."""

    def seal(self, body: bytes, *, more: bool = False, command: bool = False) -> bytes:
        return body

    def unseal(self, sealed: bytes) -> tuple[bytes, bool, bool]:
        return sealed[:0], False, False


def test_what_may_come_when() -> None:
    examples = (Greeting("NULL"), Command("PONG"), Message((b"x",)), Sealed(bytes(40)))
    for state, frame in product((State.GREETING, State.HANDSHAKE, State.OPEN), examples):
        connection = fresh()
        connection.state = state
        connection._handshake.receive = lambda command: b""  # type: ignore[method-assign]
        if isinstance(frame, Sealed):
            connection._handshake.sealer = Clear()
        try:
            connection._receive([(0, 1, frame)], 0.0)
        except UnexpectedFrame:
            assert (state, type(frame)) not in TRANSITIONS
        else:
            assert connection.state in TRANSITIONS[state, type(frame)]


class TestMessages:
    @given(st.lists(messages, max_size=6))
    @settings(max_examples=50)
    def test_they_arrive_as_they_were_sent(self, many: list[Message]) -> None:
        connector, binder = open_pair()
        for message in many:
            connector.send_message(message.parts)
        pump(connector, binder)
        assert binder.events() == [MessageReceived(message.parts) for message in many]

    def test_a_message_has_a_part(self) -> None:
        with pytest.raises(LocalProtocolError):
            opened().send_message(())

    def test_a_subscriber_sends_none(self) -> None:
        with pytest.raises(LocalProtocolError):
            opened("SUB", "PUB").send_message((b"x",))

    def test_too_large_ends_without_a_word(self) -> None:
        connection = opened(limits=ZmtpLimits(frame_bytes=100))
        assert isinstance(failure(receive(connection, Message((bytes(200),)))), FrameTooLarge)
        assert connection.data_to_send() == []

    def test_unknown_commands_are_passed_over(self) -> None:
        assert receive(opened(), Command("JOIN", b"group"), Message((b"x",))) == [
            MessageReceived((b"x",))
        ]

    @pytest.mark.parametrize("name", ["READY", "HELLO", "WELCOME", "INITIATE"])
    def test_the_handshake_does_not_come_twice(self, name: str) -> None:
        connection = opened()
        assert isinstance(failure(receive(connection, Command(name))), UnexpectedFrame)
        assert connection.data_to_send() == []

    def test_an_error_ends_the_traffic_too(self) -> None:
        assert isinstance(failure(receive(opened(), Command("ERROR", b""))), PeerError)


class TestSubscriptions:
    @pytest.mark.parametrize(
        ("subscribe", "cancel"),
        [
            (Command("SUBSCRIBE", b"a"), Command("CANCEL", b"a")),
            (Message((b"\x01a",)), Message((b"\x00a",))),
        ],
        ids=["3.1", "3.0"],
    )
    @pytest.mark.parametrize("kind", ["PUB", "XPUB"])
    def test_two_subscriptions_need_two_cancellations(
        self, kind: str, subscribe: Frame, cancel: Frame
    ) -> None:
        publisher = opened(kind, "SUB")
        assert receive(publisher, subscribe, subscribe) == [Subscribed(b"a")]
        assert receive(publisher, cancel) == []
        assert receive(publisher, cancel) == [Unsubscribed(b"a")]
        assert receive(publisher, cancel) == []
        assert publisher.subscriptions == {}

    @pytest.mark.parametrize("kind", ["PUB", "XPUB"])
    @pytest.mark.parametrize("parts", [(b"",), (b"\x02a",), (b"\x01a", b"b")])
    def test_other_messages_are_for_xpub_only(self, kind: str, parts: tuple[bytes, ...]) -> None:
        expected = [MessageReceived(parts)] if kind == "XPUB" else []
        assert receive(opened(kind, "XSUB"), Message(parts)) == expected

    @pytest.mark.parametrize(
        ("version", "expected"),
        [
            ("3.0", [Message((b"\x01a",)), Message((b"\x00a",))]),
            ("3.1", [Command("SUBSCRIBE", b"a"), Command("CANCEL", b"a")]),
        ],
    )
    def test_we_subscribe_in_the_peers_words(self, version: str, expected: list[Frame]) -> None:
        subscriber = opened("SUB", "PUB", version)
        subscriber.send_subscribe(b"a")
        subscriber.send_cancel(b"a")
        assert sent_in_traffic(subscriber) == expected

    def test_only_subscribers_subscribe(self) -> None:
        with pytest.raises(LocalProtocolError):
            opened().send_subscribe(b"a")

    @pytest.mark.parametrize("name", ["SUBSCRIBE", "CANCEL"])
    def test_only_publishers_are_subscribed_to(self, name: str) -> None:
        assert isinstance(failure(receive(opened(), Command(name, b"a"))), UnexpectedFrame)

    def test_they_are_limited(self) -> None:
        publisher = opened("PUB", "SUB", limits=ZmtpLimits(subscription_bytes=130))
        receive(publisher, Command("SUBSCRIBE", b"a"), Command("CANCEL", b"a"))
        assert len(receive(publisher, Command("SUBSCRIBE", b"b"), Command("SUBSCRIBE", b"c"))) == 2
        events = receive(publisher, Command("SUBSCRIBE", b"d"))
        assert isinstance(failure(events), InvalidRequest)


LIVELY = ZmtpLimits(ping_interval_s=10.0, ping_timeout_s=3.0, ping_ttl_s=30.0)


class TestHeartbeats:
    @pytest.mark.parametrize("context", [b"", b"0123456789abcdef"])
    def test_a_ping_is_answered_with_its_context(self, context: bytes) -> None:
        connection = opened()
        assert receive(connection, Command("PING", b"\0\0" + context)) == []
        assert sent_in_traffic(connection) == [Command("PONG", context)]
        assert connection.next_deadline() is None

    @pytest.mark.parametrize("body", [b"", b"\0", bytes(19)])
    def test_a_malformed_ping_ends_it(self, body: bytes) -> None:
        assert isinstance(failure(receive(opened(), Command("PING", body))), MalformedFrame)

    def test_a_peer_that_outlives_its_own_time_to_live_is_dead(self) -> None:
        connection = opened()
        receive(connection, Command("PING", (25).to_bytes(2)), now=1.0)
        assert connection.next_deadline() == 3.5
        connection.handle_deadline(3.5)
        assert isinstance(failure(connection.events()), PeerTimeout)

    def test_anything_it_sends_is_a_sign_of_life(self) -> None:
        connection = opened()
        receive(connection, Command("PING", (25).to_bytes(2)), now=1.0)
        connection.receive_data(b"\x00", 2.0)
        assert connection.next_deadline() is None

    def test_ours_go_out_by_the_clock(self) -> None:
        connection = opened(limits=LIVELY)
        assert connection.next_deadline() == 10.0
        connection.handle_deadline(10.0)
        assert sent_in_traffic(connection) == [Command("PING", (300).to_bytes(2))]
        assert connection.next_deadline() == 13.0
        receive(connection, Command("PONG"), now=11.0)
        assert connection.next_deadline() == 20.0

    def test_silence_after_ours_is_the_end(self) -> None:
        connection = opened(limits=LIVELY)
        connection.handle_deadline(10.0)
        connection.data_to_send()
        connection.handle_deadline(13.0)
        assert isinstance(failure(connection.events()), PeerTimeout)
        assert connection.data_to_send() == []

    def test_a_peer_of_3_0_knows_no_ping(self) -> None:
        assert opened(version="3.0", limits=LIVELY).next_deadline() is None

    def test_the_owner_may_send_its_own(self) -> None:
        connector, binder = open_pair()
        connector.send_ping(1.0, b"hello")
        pump(connector, binder)
        assert connector.events() == [PongReceived(b"hello")]
        assert binder.next_deadline() == 1.0

    @pytest.mark.parametrize(("ttl_s", "context"), [(-1.0, b""), (6554.0, b""), (0.0, bytes(17))])
    def test_ours_are_well_formed(self, ttl_s: float, context: bytes) -> None:
        with pytest.raises(LocalProtocolError):
            opened().send_ping(ttl_s, context)


class TestEnd:
    def test_closing_is_the_goodbye(self) -> None:
        connection = opened()
        connection.close()
        connection.close()
        assert connection.events() == [ConnectionClosed(clean=True)]
        assert connection.data_to_send() == []
        assert connection.next_deadline() is None

    @pytest.mark.parametrize(
        ("data", "clean"),
        [(b"", True), (b"\x00", False), (b"\x01\x01a", False), (b"\x00\x01a", True)],
    )
    def test_an_end_between_messages_is_clean(self, data: bytes, clean: bool) -> None:
        connection = opened()
        connection.receive_data(data, 0.0)
        connection.receive_eof()
        assert connection.events()[-1] == ConnectionClosed(clean=clean)

    def test_an_end_in_the_handshake_is_not(self) -> None:
        connection = fresh()
        connection.receive_eof()
        assert connection.events() == [ConnectionClosed(clean=False)]

    def test_nothing_is_taken_in_after_it(self) -> None:
        connection = opened()
        connection.close()
        connection.events()
        assert receive(connection, Message((b"x",))) == []


@pytest.mark.parametrize("kind", ["ROUTER", "XPUB", "SUB"])
@settings(max_examples=100)
@given(data=st.binary(max_size=100), cut=st.integers(0, 100))
def test_any_cut_gives_the_same_events(kind: str, data: bytes, cut: int) -> None:
    peer = {"ROUTER": "DEALER", "XPUB": "SUB", "SUB": "PUB"}[kind]
    whole, pieces = opened(kind, peer), opened(kind, peer)
    whole.receive_data(data, 0.0)
    pieces.receive_data(data[:cut], 0.0)
    pieces.receive_data(data[cut:], 0.0)
    assert list(map(repr, whole.events())) == list(map(repr, pieces.events()))
    assert b"".join(whole.data_to_send()) == b"".join(pieces.data_to_send())


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), messages), max_size=6))
def test_both_ways_at_once(plan: list[tuple[str, Message]]) -> None:
    ends = dict(zip("ab", open_pair("DEALER", "DEALER"), strict=True))
    for sender, message in plan:
        ends[sender].send_message(message.parts)
    pump(ends["a"], ends["b"])
    for sender, receiver in ("ab", "ba"):
        expected = [MessageReceived(message.parts) for who, message in plan if who == sender]
        assert ends[receiver].events() == expected


def test_pair_is_symmetric_before_it_opens() -> None:
    for end in pair():
        assert end.state is State.GREETING and end.next_deadline() == 5.0
