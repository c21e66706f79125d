"""Epoxy's rules: handshake, conversations, errors, the ways to end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosswire.errors import (
    ConnectionRejected,
    CrosswireError,
    ErrorInError,
    IdentifiersExhausted,
    InvalidIdentifier,
    LocalProtocolError,
    PeerError,
    PeerTimeout,
    ServiceUnavailable,
    UnexpectedFrame,
)
from crosswire.wire.contract import (
    ConnectionClosed,
    ConnectionFailed,
    ConnectionOpened,
    Event,
    Frame,
)
from crosswire.wire.epoxy.comm import Error, ErrorCode, marshal_error, unmarshal_error
from crosswire.wire.epoxy.connection import TRANSITIONS, EpoxyConnection, State
from crosswire.wire.epoxy.decoder import EpoxyDecoder
from crosswire.wire.epoxy.events import (
    EventReceived,
    PeerFinished,
    RequestReceived,
    ResponseReceived,
)
from crosswire.wire.epoxy.frames import (
    ConfigFrame,
    EpoxyLimits,
    Message,
    MessageType,
    ProtocolError,
    ProtocolErrorCode,
    serialize,
)
from tests.wire.epoxy.strategies import frames, open_pair
from tests.wire.stream import pump

PAYLOAD = bytes.fromhex("4342010000")
LAYER = bytes.fromhex("4342010001")
REQUEST = Message(1, MessageType.REQUEST, "s", "m", payload=PAYLOAD)
EVENT = Message(3, MessageType.EVENT, "s", "m", payload=PAYLOAD)
RESPONSE = Message(2, MessageType.RESPONSE, payload=PAYLOAD)
EXAMPLES: list[Frame] = [ConfigFrame(), REQUEST, ProtocolError(0)]


def opened(limits: EpoxyLimits | None = None) -> EpoxyConnection:
    connection = EpoxyConnection("server", 0.0, limits=limits)
    receive(connection, ConfigFrame())
    sent(connection)
    return connection


def receive(connection: EpoxyConnection, *frames: Frame, now: float = 0.0) -> list[Event]:
    connection.receive_data(b"".join(map(serialize, frames)), now)
    return connection.events()


def sent(connection: EpoxyConnection) -> list[Any]:
    data = b"".join(connection.data_to_send())
    return [item for _, _, item in EpoxyDecoder("server").feed(data)]


def goodbye(connection: EpoxyConnection) -> str:
    (frame,) = sent(connection)
    assert frame.details.message
    name: str = frame.error_name
    return name


def failure(events: list[Event]) -> CrosswireError:
    (event,) = events
    assert isinstance(event, ConnectionFailed)
    return event.error


def pair() -> tuple[EpoxyConnection, EpoxyConnection]:
    client, server = open_pair()
    assert isinstance(client, EpoxyConnection) and isinstance(server, EpoxyConnection)
    return client, server


class TestHandshake:
    def test_a_client_speaks_first(self) -> None:
        assert sent(EpoxyConnection("client", 0.0)) == [ConfigFrame()]

    def test_a_server_waits(self) -> None:
        assert sent(EpoxyConnection("server", 0.0)) == []

    def test_a_server_answers_a_config_with_its_own(self) -> None:
        connection = EpoxyConnection("server", 0.0)
        assert receive(connection, ConfigFrame()) == [ConnectionOpened()]
        assert sent(connection) == [ConfigFrame()]

    def test_a_client_is_open_with_the_servers_config(self) -> None:
        connection = EpoxyConnection("client", 0.0)
        sent(connection)
        assert receive(connection, ConfigFrame()) == [ConnectionOpened()]
        assert sent(connection) == []

    def test_a_request_right_behind_the_config_is_taken(self) -> None:
        connection = EpoxyConnection("server", 0.0)
        assert receive(connection, ConfigFrame(), REQUEST) == [
            ConnectionOpened(),
            RequestReceived(1, "s", "m", PAYLOAD, None),
        ]

    @pytest.mark.parametrize(
        ("role", "said"), [("server", "client-bad-handshake"), ("client", "server-bad-handshake")]
    )
    def test_a_message_instead_of_a_config(self, role: str, said: str) -> None:
        connection = EpoxyConnection(role, 0.0)
        sent(connection)
        assert isinstance(failure(receive(connection, REQUEST)), UnexpectedFrame)
        assert goodbye(connection) == said

    def test_a_protocol_error_is_answered_by_closing_only(self) -> None:
        connection = EpoxyConnection("server", 0.0)
        error = failure(receive(connection, ProtocolError(11, Error(5, "nope"))))
        assert isinstance(error, PeerError)
        assert (error.code, error.reason) == (11, "connection-rejected: nope")
        assert sent(connection) == []

    @pytest.mark.parametrize("role", ["server", "client"])
    def test_silence_is_ended(self, role: str) -> None:
        connection = EpoxyConnection(role, 100.0)
        sent(connection)
        assert connection.next_deadline() == 105.0
        connection.handle_deadline(105.0)
        assert isinstance(failure(connection.events()), PeerTimeout)
        assert goodbye(connection) == "timeout"

    def test_crumbs_do_not_extend_it(self) -> None:
        connection = EpoxyConnection("server", 0.0)
        connection.receive_data(b"\1\0C", 4.9)
        assert connection.next_deadline() == 5.0

    def test_an_open_connection_waits_for_nothing(self) -> None:
        assert opened().next_deadline() is None

    def test_nothing_may_be_asked_before_it(self) -> None:
        with pytest.raises(LocalProtocolError, match="handshake"):
            EpoxyConnection("client", 0.0).send_request("s", "m", PAYLOAD)

    @pytest.mark.parametrize("error", [ConnectionRejected("no"), ServiceUnavailable("full")])
    def test_a_peer_may_be_rejected(self, error: CrosswireError) -> None:
        connection = EpoxyConnection("server", 0.0)
        connection.fail(error)
        assert goodbye(connection) == "connection-rejected"


def _in_state(state: State) -> EpoxyConnection:
    connection = EpoxyConnection("server", 0.0)
    if state is not State.HANDSHAKE:
        receive(connection, ConfigFrame())
    if state is State.ANSWERING:
        receive(connection, REQUEST)
    if state in (State.ANSWERING, State.LEAVING):
        connection.close()
    sent(connection)
    assert connection.state is state
    return connection


@pytest.mark.parametrize("state", [state for state in State if state is not State.CLOSED])
@pytest.mark.parametrize("frame", EXAMPLES, ids=lambda frame: frame.frame_name)
def test_what_is_not_in_the_table_is_a_violation(state: State, frame: Frame) -> None:
    connection = _in_state(state)
    events = receive(connection, frame)
    if (state, type(frame)) in TRANSITIONS:
        assert (connection.state,) == TRANSITIONS[state, type(frame)]
    else:
        assert isinstance(failure(events), UnexpectedFrame)


def test_a_second_config_violates_the_protocol() -> None:
    connection = opened()
    failure(receive(connection, ConfigFrame()))
    assert goodbye(connection) == "protocol-violated"


class TestConversations:
    def test_requests_go_both_ways(self) -> None:
        for asking, answering in (pair(), reversed(pair())):
            conversation = asking.send_request("s", "m", PAYLOAD, layer_data=LAYER)
            pump(asking, answering)
            assert answering.events() == [RequestReceived(conversation, "s", "m", PAYLOAD, LAYER)]
            answering.send_response(conversation, b"reply", layer_data=LAYER)
            pump(asking, answering)
            assert asking.events() == [ResponseReceived(conversation, b"reply", None, LAYER)]
            assert asking.pending == 0

    def test_events_go_both_ways(self) -> None:
        for telling, told in (pair(), reversed(pair())):
            conversation = telling.send_event("s", "m", PAYLOAD)
            pump(telling, told)
            assert told.events() == [EventReceived(conversation, "s", "m", PAYLOAD, None)]

    def test_an_error_as_the_answer(self) -> None:
        client, server = pair()
        conversation = client.send_request("s", "m", PAYLOAD)
        pump(client, server)
        server.send_error(conversation, Error(1234, "Divide by zero"))
        pump(client, server)
        wire = bytes.fromhex("4342010010a413290e446976696465206279207a65726f00")
        assert client.events() == [ResponseReceived(conversation, None, wire, None)]

    def test_a_client_counts_odd_and_a_server_even(self) -> None:
        client, server = pair()
        assert [
            client.send_request("s", "m", PAYLOAD),
            client.send_event("s", "m", PAYLOAD),
            client.send_request("s", "m", PAYLOAD),
        ] == [1, 3, 5]
        assert [
            server.send_event("s", "m", PAYLOAD),
            server.send_request("s", "m", PAYLOAD),
            server.send_request("s", "m", PAYLOAD),
        ] == [2, 4, 6]

    def test_responses_carry_no_names(self) -> None:
        connection = opened()
        receive(connection, REQUEST)
        connection.send_response(1, PAYLOAD)
        assert sent(connection) == [Message(1, MessageType.RESPONSE, payload=PAYLOAD)]

    def test_responses_come_in_any_order(self) -> None:
        client, server = pair()
        asked = [client.send_request("s", "m", PAYLOAD) for _ in range(3)]
        pump(client, server)
        for conversation in reversed(asked):
            server.send_response(conversation, PAYLOAD)
        pump(client, server)
        events = [event for event in client.events() if isinstance(event, ResponseReceived)]
        assert [event.conversation_id for event in events] == [5, 3, 1]

    @pytest.mark.parametrize("unknown", [9, 1, 2**64 - 1])
    def test_a_response_to_nothing_is_dropped(self, unknown: int) -> None:
        connection = opened()
        response = Message(unknown, MessageType.RESPONSE, payload=PAYLOAD)
        assert receive(connection, response, EVENT) == [EventReceived(3, "s", "m", PAYLOAD, None)]
        assert connection.dropped == 1

    def test_a_response_that_nobody_waits_for_is_dropped(self) -> None:
        connection = opened()
        connection.forget_request(connection.send_request("s", "m", PAYLOAD))
        assert receive(connection, RESPONSE) == []

    def test_a_response_is_taken_once(self) -> None:
        connection = opened()
        connection.send_request("s", "m", PAYLOAD)
        assert receive(connection, RESPONSE, RESPONSE) == [ResponseReceived(2, PAYLOAD, None, None)]

    @pytest.mark.parametrize("conversation", [0, 2, 2**63 + 1, 2**64 - 1])
    def test_any_received_id_is_taken(self, conversation: int) -> None:
        connection = opened()
        request = Message(conversation, MessageType.REQUEST, "s", "m", payload=PAYLOAD)
        receive(connection, request)
        connection.send_response(conversation, PAYLOAD)
        assert [frame.conversation_id for frame in sent(connection)] == [conversation]

    def test_an_id_that_is_used_twice_is_answered_twice(self) -> None:
        connection = opened()
        receive(connection, REQUEST, REQUEST)
        connection.send_response(1, b"a")
        connection.send_response(1, b"b")
        assert [frame.payload for frame in sent(connection)] == [b"a", b"b"]
        with pytest.raises(LocalProtocolError, match="request 1"):
            connection.send_response(1, b"c")

    @pytest.mark.parametrize(
        "frame",
        [
            Message(2, MessageType.REQUEST, payload=b"x"),
            Message(2, MessageType.EVENT, payload=b"x"),
        ],
    )
    def test_parity_is_checked_when_strict(self, frame: Message) -> None:
        connection = opened(EpoxyLimits(strict=True))
        assert isinstance(failure(receive(connection, frame)), InvalidIdentifier)
        assert goodbye(connection) == "bad-conversation-id"

    def test_strict_takes_what_is_right(self) -> None:
        assert len(receive(opened(EpoxyLimits(strict=True)), REQUEST, EVENT)) == 2

    def test_error_data_in_a_request_is_answered_with_an_internal_server_error(self) -> None:
        connection = opened()
        error = marshal_error(Error(1))
        assert receive(connection, Message(1, MessageType.REQUEST, "s", "m", error=error)) == []
        (answer,) = sent(connection)
        assert unmarshal_error(answer.error).error_code == ErrorCode.INTERNAL_SERVER_ERROR
        assert not connection.closed

    def test_error_data_in_an_event_is_dropped(self) -> None:
        connection = opened()
        assert receive(connection, Message(1, MessageType.EVENT, "s", "m", error=PAYLOAD)) == []
        assert (sent(connection), connection.dropped, connection.closed) == ([], 1, False)

    def test_reading_pauses_while_too_much_is_owed(self) -> None:
        connection = opened(EpoxyLimits(pending_requests=2))
        receive(connection, REQUEST)
        assert connection.wants_data
        receive(connection, Message(3, MessageType.REQUEST, "s", "m", payload=PAYLOAD))
        assert not connection.wants_data
        connection.send_response(1, PAYLOAD)
        assert connection.wants_data

    def test_reading_pauses_while_what_is_owed_is_too_large(self) -> None:
        """A conversation that is asked twice counts until both are answered."""
        connection = opened(EpoxyLimits(pending_bytes=4096))
        receive(connection, Message(1, MessageType.REQUEST, "s", "m", payload=bytes(3000)))
        assert connection.wants_data
        for conversation in (3, 3):
            receive(
                connection, Message(conversation, MessageType.REQUEST, "s", "m", payload=PAYLOAD)
            )
        assert not connection.wants_data
        connection.send_response(1, PAYLOAD)
        assert connection.wants_data
        for _ in range(2):
            connection.send_response(3, PAYLOAD)
        assert connection._owed_bytes == 0

    def test_the_last_id_is_used_and_then_they_are_exhausted(self) -> None:
        connection = EpoxyConnection("client", 0.0)
        receive(connection, ConfigFrame())
        connection._next_id = 2**64 - 1
        assert connection.send_event("s", "m", PAYLOAD) == 2**64 - 1
        sent(connection)
        with pytest.raises(IdentifiersExhausted):
            connection.send_request("s", "m", PAYLOAD)
        assert goodbye(connection) == "conversation-ids-exhausted"
        assert isinstance(failure(connection.events()), IdentifiersExhausted)

    @pytest.mark.parametrize("payload", [b"", b"x" * 1001])
    def test_what_a_peer_must_refuse_is_not_sent(self, payload: bytes) -> None:
        connection = opened(EpoxyLimits(framelet_bytes=1000))
        with pytest.raises(LocalProtocolError, match="bytes can't be sent"):
            connection.send_event("s", "m", payload)
        assert sent(connection) == []

    def test_a_name_that_is_no_text_is_not_sent(self) -> None:
        with pytest.raises(LocalProtocolError, match="name"):
            opened().send_event("\ud800", "m", PAYLOAD)

    def test_a_frame_that_a_peer_must_refuse_is_not_sent(self) -> None:
        connection = opened(EpoxyLimits(frame_bytes=2048))
        with pytest.raises(LocalProtocolError, match="a frame of"):
            connection.send_event("s", "m", b"x" * 2048)
        assert connection.send_event("s", "m", PAYLOAD) == 2


class TestEnding:
    def test_closing_ends_our_half_and_waits_for_the_peers(self) -> None:
        connection = opened()
        connection.close()
        assert (connection.send_closed, connection.closed, connection.events()) == (True, False, [])
        connection.receive_eof()
        assert connection.events() == [ConnectionClosed(clean=True)]
        assert sent(connection) == []

    def test_the_peer_has_five_seconds(self) -> None:
        connection = opened()
        connection.close()
        connection.handle_deadline(100.0)
        assert connection.next_deadline() == 105.0
        connection.handle_deadline(104.9)
        assert connection.events() == []
        connection.handle_deadline(105.0)
        assert connection.events() == [ConnectionClosed(clean=True)]

    def test_what_is_in_flight_is_answered_first(self) -> None:
        connection = opened()
        receive(connection, REQUEST)
        connection.close()
        assert not connection.send_closed
        connection.send_response(1, PAYLOAD)
        assert (len(sent(connection)), connection.send_closed) == (1, True)

    def test_but_not_for_ever(self) -> None:
        connection = opened()
        receive(connection, REQUEST)
        connection.close()
        connection.handle_deadline(10.0)
        connection.handle_deadline(40.0)
        assert connection.send_closed
        with pytest.raises(LocalProtocolError, match="request 1"):
            connection.send_response(1, PAYLOAD)

    def test_nothing_new_is_begun_while_closing(self) -> None:
        connection = opened()
        receive(connection, REQUEST)
        connection.close()
        with pytest.raises(LocalProtocolError, match="answering"):
            connection.send_request("s", "m", PAYLOAD)

    def test_responses_that_still_come_are_told(self) -> None:
        client, server = pair()
        client.send_request("s", "m", PAYLOAD)
        pump(client, server)
        client.close()
        server.receive_eof()
        server.send_response(1, PAYLOAD)
        pump(client, server)
        assert client.events() == [ResponseReceived(1, PAYLOAD, None, None)]
        client.receive_eof()
        assert client.events() == [ConnectionClosed(clean=True)]
        assert server.events()[-1:] == [ConnectionClosed(clean=True)]

    def test_requests_that_still_come_are_dropped(self) -> None:
        connection = opened()
        connection.close()
        assert receive(connection, REQUEST) == []
        assert connection.dropped == 1

    def test_a_peer_that_half_closes_gets_its_answers(self) -> None:
        connection = opened()
        receive(connection, REQUEST)
        connection.receive_eof()
        assert connection.events() == [PeerFinished()]
        connection.send_response(1, PAYLOAD)
        assert len(sent(connection)) == 1
        assert connection.events() == [ConnectionClosed(clean=True)]

    def test_a_peer_that_closes_ends_it(self) -> None:
        connection = opened()
        connection.receive_eof()
        assert connection.events() == [ConnectionClosed(clean=True)]

    def test_an_end_within_a_frame_is_not_clean(self) -> None:
        connection = opened()
        receive(connection, REQUEST)
        connection.receive_data(b"\2\0", 0.0)
        connection.receive_eof()
        assert connection.events() == [ConnectionClosed(clean=False)]

    def test_an_end_with_our_requests_unanswered_is_not_clean(self) -> None:
        connection = opened()
        connection.send_request("s", "m", PAYLOAD)
        connection.receive_eof()
        assert connection.events() == [ConnectionClosed(clean=False)]

    def test_an_end_within_the_handshake_is_not_clean(self) -> None:
        connection = EpoxyConnection("server", 0.0)
        connection.receive_data(b"\1\0C", 0.0)
        connection.receive_eof()
        assert connection.events() == [ConnectionClosed(clean=False)]

    def test_closing_in_the_handshake_is_closing_only(self) -> None:
        connection = EpoxyConnection("server", 0.0)
        connection.close()
        assert (connection.events(), sent(connection)) == ([ConnectionClosed(clean=True)], [])

    @pytest.mark.parametrize("code", [*ProtocolErrorCode, 77])
    def test_the_peers_error_is_told_and_not_answered(self, code: int) -> None:
        connection = opened()
        error = failure(receive(connection, ProtocolError(code)))
        assert isinstance(error, PeerError) and error.code == code
        assert sent(connection) == []

    @pytest.mark.parametrize(
        "wire", ["01004552020000001000", "02004552010000000045520100000000", "01004552ffffffff"]
    )
    def test_nor_is_one_that_is_malformed(self, wire: str) -> None:
        connection = opened()
        connection.receive_data(bytes.fromhex(wire), 0.0)
        assert isinstance(failure(connection.events()), ErrorInError)
        assert sent(connection) == []

    def test_no_goodbye_is_said_once_our_half_is_closed(self) -> None:
        connection = opened()
        connection.close()
        connection.receive_data(b"\0\0", 0.0)
        failure(connection.events())
        assert sent(connection) == []

    def test_our_own_trouble(self) -> None:
        connection = opened()
        connection.fail(CrosswireError("internal error"))
        (error,) = sent(connection)
        assert error == ProtocolError(
            ProtocolErrorCode.INTERNAL_ERROR, Error(ErrorCode.TRANSPORT_ERROR, "internal error")
        )

    def test_nothing_follows_the_end(self) -> None:
        connection = opened()
        connection.fail(CrosswireError("internal error"))
        connection.events()
        sent(connection)
        assert receive(connection, REQUEST) == []
        connection.close()
        connection.receive_eof()
        connection.handle_deadline(1e9)
        assert (connection.events(), sent(connection), connection.next_deadline()) == ([], [], None)


@given(st.lists(frames, max_size=5), st.sampled_from([*State][:-1]), st.binary(max_size=12))
def test_whatever_comes_is_legal_or_ends_the_connection(
    received: list[Frame], state: State, rest: bytes
) -> None:
    connection = _in_state(state)
    connection.receive_data(b"".join(map(serialize, received)) + rest, 0.0)
    connection.receive_eof()
    events = connection.events()
    ends = [event for event in events if isinstance(event, ConnectionClosed | ConnectionFailed)]
    assert len(ends) == connection.closed
    assert not ends or events[-1] is ends[0]
