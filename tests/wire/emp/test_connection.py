"""EMP's rules: handshake, order, identifiers, ping, the ways to end."""

from __future__ import annotations

from typing import Any

import pytest

from crosswire.errors import (
    CrosswireError,
    InvalidIdentifier,
    InvalidRequest,
    LocalProtocolError,
    PeerError,
    PeerTimeout,
    ServiceUnavailable,
    UnexpectedFrame,
    UnsupportedVersion,
)
from crosswire.wire.contract import (
    ConnectionClosed,
    ConnectionFailed,
    ConnectionOpened,
    Event,
    Frame,
)
from crosswire.wire.emp.connection import TRANSITIONS, EmpConnection, State
from crosswire.wire.emp.decoder import EmpDecoder
from crosswire.wire.emp.events import RequestReceived, ResponseReceived
from crosswire.wire.emp.frames import (
    Bye,
    EmpLimits,
    Error,
    Hello,
    Ping,
    Pong,
    Request,
    Response,
    serialize,
    serialize_call,
)
from tests.wire.emp.strategies import open_pair
from tests.wire.stream import pump

SUCCESS = b'{"status":"success","data":{}}'
EXAMPLES: list[Frame] = [
    Hello(1),
    Bye(),
    Ping(),
    Pong(),
    Error(0, "oops"),
    Request(1, serialize_call("x")),
    Response(1, SUCCESS),
]


def opened(limits: EmpLimits | None = None) -> EmpConnection:
    connection = EmpConnection("server", 0.0, limits=limits)
    receive(connection, Hello(1))
    sent(connection)
    connection.events()
    return connection


def receive(connection: EmpConnection, *frames: Frame, now: float = 0.0) -> list[Event]:
    connection.receive_data(b"".join(map(serialize, frames)), now)
    return connection.events()


def sent(connection: EmpConnection) -> list[Any]:
    data = b"".join(connection.data_to_send())
    return [item for _, _, item in EmpDecoder("server").feed(data)]


def failure(events: list[Event]) -> CrosswireError:
    (event,) = events
    assert isinstance(event, ConnectionFailed)
    return event.error


class TestHandshake:
    def test_both_send_hello_at_once(self) -> None:
        assert sent(EmpConnection("client", 0.0)) == [Hello(1)]

    def test_opens_with_the_peers_hello(self) -> None:
        assert receive(EmpConnection("server", 0.0), Hello(1)) == [ConnectionOpened()]

    @pytest.mark.parametrize("version", [0, 2, 255])
    def test_another_version_is_refused(self, version: int) -> None:
        connection = EmpConnection("server", 0.0)
        error = failure(receive(connection, Hello(version)))
        assert isinstance(error, UnsupportedVersion)
        assert sent(connection) == [Hello(1), Error(1, "unsupported version")]

    def test_a_bye_is_answered_by_closing_only(self) -> None:
        connection = EmpConnection("server", 0.0)
        assert receive(connection, Bye()) == [ConnectionClosed(clean=True)]
        assert sent(connection) == [Hello(1)]

    def test_an_error_is_answered_by_closing_only(self) -> None:
        connection = EmpConnection("server", 0.0)
        error = failure(receive(connection, Error(2, "full")))
        assert isinstance(error, PeerError) and error.code == 2
        assert sent(connection) == [Hello(1)]

    def test_silence_is_ended(self) -> None:
        connection = EmpConnection("server", 100.0)
        assert connection.next_deadline() == 105.0
        connection.handle_deadline(105.0)
        assert isinstance(failure(connection.events()), PeerTimeout)
        assert sent(connection) == [Hello(1), Error(1, "no hello in time")]

    def test_crumbs_do_not_extend_it(self) -> None:
        connection = EmpConnection("server", 0.0)
        connection.receive_data(b"\0\0\0", 4.9)
        assert connection.next_deadline() == 5.0

    def test_nothing_may_be_asked_before_it(self) -> None:
        with pytest.raises(LocalProtocolError, match="handshake"):
            EmpConnection("client", 0.0).send_request("x")


@pytest.mark.parametrize("state", [State.HANDSHAKE, State.OPEN])
@pytest.mark.parametrize("frame", EXAMPLES, ids=lambda frame: frame.frame_name)
def test_what_is_not_in_the_table_is_a_violation(state: State, frame: Frame) -> None:
    connection = EmpConnection("server", 0.0)
    if state is State.OPEN:
        receive(connection, Hello(1))
        connection.send_request("x")
    sent(connection)
    events = receive(connection, frame)
    if (state, type(frame)) in TRANSITIONS:
        assert (connection.state,) == TRANSITIONS[state, type(frame)]
    else:
        assert isinstance(failure(events), UnexpectedFrame)
        (error,) = sent(connection)
        assert error.code == 1


class TestRequests:
    def test_both_ways(self) -> None:
        for asking, answering in (open_pair(), reversed(open_pair())):
            assert isinstance(asking, EmpConnection) and isinstance(answering, EmpConnection)
            identifier = asking.send_request("hello", b'{"name":"Bob"}')
            pump(asking, answering)
            assert answering.events() == [RequestReceived(1, "hello", b'{"name":"Bob"}')]
            answering.send_success(identifier, b'{"message":"Hello Bob!"}')
            pump(asking, answering)
            reply = ResponseReceived(1, True, "", "", b'{"message":"Hello Bob!"}')
            assert asking.events() == [reply]

    def test_a_failure(self) -> None:
        connection = opened()
        receive(connection, Request(7, serialize_call("x")))
        connection.send_failure(7, "unknown_job", "no such job", b'{"id":1}')
        (response,) = sent(connection)
        assert response.fields()["code"] == "unknown_job"

    def test_identifiers_count_from_one(self) -> None:
        connection = opened()
        assert [connection.send_request("x") for _ in range(3)] == [1, 2, 3]

    def test_responses_are_sent_in_order(self) -> None:
        connection = opened()
        receive(connection, Request(1, serialize_call("x")), Request(2, serialize_call("x")))
        with pytest.raises(LocalProtocolError, match="request 2"):
            connection.send_success(2)
        connection.send_success(1)
        connection.send_success(2)
        assert [frame.id for frame in sent(connection)] == [1, 2]

    def test_what_is_no_call_is_refused_in_its_turn_and_the_connection_kept(self) -> None:
        connection = opened()
        events = receive(
            connection,
            Request(1, serialize_call("x")),
            Request(2, b"{nope"),
            Request(3, b'{"op":1}'),
            Request(4, serialize_call("y")),
        )
        assert [event.id for event in events if isinstance(event, RequestReceived)] == [1, 4]
        assert sent(connection) == []
        connection.send_success(1)
        answers = sent(connection)
        assert [(frame.id, frame.fields()["status"]) for frame in answers] == [
            (1, "success"),
            (2, "failure"),
            (3, "failure"),
        ]
        assert answers[1].fields()["code"] == "invalid_request"
        assert not connection.closed

    @pytest.mark.parametrize("identifiers", [[0], [5, 5], [5, 6, 5]])
    def test_zero_or_a_pending_identifier_ends_with_error_4(self, identifiers: list[int]) -> None:
        connection = opened()
        events = receive(connection, *(Request(n, serialize_call("x")) for n in identifiers))
        assert isinstance(failure(events[-1:]), InvalidRequest)
        assert sent(connection)[-1].code == 4

    def test_an_identifier_may_come_again_once_answered(self) -> None:
        connection = opened()
        for _ in range(2):
            (event,) = receive(connection, Request(5, serialize_call("x")))
            assert event == RequestReceived(5, "x", b"{}")
            connection.send_success(5)

    @pytest.mark.parametrize("answered", [77, 2, 0])
    def test_a_response_out_of_turn_ends_with_error_3(self, answered: int) -> None:
        connection = opened()
        connection.send_request("x")
        connection.send_request("x")
        sent(connection)
        error = failure(receive(connection, Response(answered, SUCCESS)))
        assert isinstance(error, InvalidIdentifier)
        assert sent(connection) == [Error(3, f"invalid request id {answered}")]

    def test_a_response_that_is_none_ends_with_error_1(self) -> None:
        connection = opened()
        connection.send_request("x")
        sent(connection)
        receive(connection, Response(1, b'{"status":"maybe"}'))
        assert sent(connection)[0].code == 1

    def test_reading_pauses_while_too_much_is_owed(self) -> None:
        connection = opened(EmpLimits(pending_requests=2))
        receive(connection, Request(1, serialize_call("x")))
        assert connection.wants_data
        receive(connection, Request(2, serialize_call("x")))
        assert not connection.wants_data
        connection.send_success(1)
        assert connection.wants_data

    def test_reading_pauses_while_what_is_owed_is_too_large(self) -> None:
        connection = opened(EmpLimits(pending_bytes=4096))
        large = serialize_call("x", b'{"a":"%s"}' % bytes(3000).replace(b"\0", b"x"))
        receive(connection, Request(1, large))
        assert connection.wants_data
        receive(connection, Request(2, serialize_call("x")), Request(3, serialize_call("x")))
        assert not connection.wants_data
        connection.send_success(1)
        assert connection.wants_data
        for identifier in (2, 3):
            connection.send_success(identifier)
        assert connection._owed_bytes == 0

    def test_thousands_of_requests_keep_neither_pings_nor_responses_waiting(self) -> None:
        connection = opened()
        connection.send_request("x")
        sent(connection)
        receive(connection, *[Request(each, serialize_call("x")) for each in range(1, 5001)])
        assert connection.wants_data
        assert len(receive(connection, Ping(), Response(1, SUCCESS))) == 1
        assert sent(connection) == [Pong()]


class TestPing:
    def test_every_ping_gets_its_pong(self) -> None:
        connection = opened()
        receive(connection, Ping(), Ping(), Ping())
        assert sent(connection) == [Pong(), Pong(), Pong()]

    def test_an_unasked_pong_is_ignored(self) -> None:
        connection = opened()
        assert receive(connection, Pong()) == []
        assert connection.next_deadline() == 10.0

    def test_one_is_sent_after_the_interval_and_one_only(self) -> None:
        connection = opened()
        connection.handle_deadline(9.9)
        assert sent(connection) == []
        connection.handle_deadline(10.0)
        assert sent(connection) == [Ping()]
        connection.handle_deadline(19.9)
        assert sent(connection) == []

    def test_a_pong_starts_the_next_interval(self) -> None:
        connection = opened()
        connection.handle_deadline(10.0)
        receive(connection, Pong(), now=12.0)
        assert connection.next_deadline() == 22.0

    def test_no_pong_ends_the_connection(self) -> None:
        connection = opened()
        connection.handle_deadline(10.0)
        sent(connection)
        connection.handle_deadline(20.0)
        assert isinstance(failure(connection.events()), PeerTimeout)
        assert sent(connection) == [Error(1, "ping timeout")]

    def test_who_is_not_read_has_as_long_as_it_takes(self) -> None:
        connection = opened()
        connection.handle_deadline(10.0)
        connection.unread = True
        for now in (20.0, 30.0, 40.0):
            connection.handle_deadline(now)
        connection.unread = False
        connection.handle_deadline(50.0)
        assert not connection.closed
        connection.handle_deadline(60.0)
        assert isinstance(failure(connection.events()), PeerTimeout)


class TestEnding:
    def test_closing_sends_bye(self) -> None:
        connection = opened()
        connection.close()
        assert sent(connection) == [Bye()]
        assert connection.events() == [ConnectionClosed(clean=True)]

    def test_the_peers_bye_is_a_clean_end(self) -> None:
        connection = opened()
        assert receive(connection, Bye(), Ping()) == [ConnectionClosed(clean=True)]
        assert sent(connection) == []

    def test_an_end_without_bye_is_not_clean(self) -> None:
        connection = opened()
        connection.receive_eof()
        assert connection.events() == [ConnectionClosed(clean=False)]

    def test_the_peers_error_is_reported_and_not_answered(self) -> None:
        connection = opened()
        error = failure(receive(connection, Error(99, "x")))
        assert isinstance(error, PeerError) and error.code == 99
        assert sent(connection) == []

    def test_no_room_is_error_2(self) -> None:
        connection = opened()
        connection.fail(ServiceUnavailable("draining"))
        assert sent(connection) == [Error(2, "draining")]

    def test_our_own_trouble_is_error_0(self) -> None:
        connection = opened()
        connection.fail(CrosswireError("internal error"))
        assert sent(connection) == [Error(0, "internal error")]

    def test_nothing_follows_the_end(self) -> None:
        connection = opened()
        connection.close()
        connection.events()
        sent(connection)
        assert receive(connection, Ping()) == []
        connection.close()
        connection.receive_eof()
        connection.handle_deadline(1e9)
        assert (connection.events(), sent(connection), connection.next_deadline()) == ([], [], None)
