"""eMQP's rules: registration, slots, heartbeats, strangers, goodbyes, and what is ignored."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.errors import (
    CrosswireError,
    LocalProtocolError,
    MalformedFrame,
    PeerTimeout,
    ServiceUnavailable,
    UnexpectedFrame,
    UnknownFrame,
)
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, Event, Frame
from crosswire.wire.emqp.connection import EmqpConnection
from crosswire.wire.emqp.decoder import EmqpDecoder
from crosswire.wire.emqp.events import (
    Acknowledged,
    AdminRequested,
    CommandIgnored,
    PeerInformed,
    PeerLeaving,
    PeerReady,
    PublicationReceived,
    PublishReceived,
    Registered,
    ReplyReceived,
    RequestReceived,
    ScheduleReceived,
    ShutdownRequested,
    SlotOffered,
    UnscheduleReceived,
)
from crosswire.wire.emqp.frames import (
    Ack,
    Admin,
    DeliveryFrame,
    Disconnect,
    EmqpLimits,
    Heartbeat,
    Inform,
    Kbai,
    Publish,
    Ready,
    Reply,
    Request,
    ScheduleFrame,
    UnscheduleFrame,
    serialize,
)
from crosswire.wire.emqp.states import (
    LISTENERS,
    RECEIVES,
    ROLES,
    SENDS,
    SOCKETS,
    TRANSITIONS,
    State,
)
from crosswire.wire.zmtp.events import Subscribed, Unsubscribed
from crosswire.wire.zmtp.frames import Message, serialize_command, serialize_message
from crosswire.wire.zmtp.mechanisms import PlainClient, PlainServer
from tests.wire.emqp.strategies import commands, deliveries, handshake, opened, wire
from tests.wire.stream import pump
from tests.wire.vectors import load

DOORS = [
    ("client", "emqp-clients"),
    ("scheduler", "emqp-clients"),
    ("worker", "emqp-workers"),
    ("admin", "emqp-admin"),
    ("publisher", "emqp-publishers"),
]


def receive(connection: EmqpConnection, *frames: Frame, now: float = 0.0) -> list[Event]:
    connection.receive_data(b"".join(map(wire, frames)), now)
    return connection.events()


def sent(connection: EmqpConnection) -> list[Any]:
    """The commands that were sent, without those of ZMTP."""
    decoder = EmqpDecoder("broker")
    decoder.feed(handshake(SOCKETS[connection.side]))
    data = b"".join(connection.data_to_send())
    if data[:1] == b"\xff":
        decoder = EmqpDecoder("broker")
    return [item for _, _, item in decoder.feed(data) if isinstance(item, Frame) and item.layer]


def kinds(frames: list[Any]) -> list[type]:
    return [type(frame) for frame in frames]


def failure(events: list[Event]) -> CrosswireError:
    event = events[-1]
    assert isinstance(event, ConnectionFailed)
    return event.error


def ignored(events: list[Event]) -> CrosswireError:
    (event,) = events
    assert isinstance(event, CommandIgnored)
    return event.error


def broker(listener: str, **options: Any) -> EmqpConnection:
    """The broker's end, with a peer after ZMTP's handshake."""
    connection = EmqpConnection("broker", 0.0, listener=listener, **options)
    other = "SUB" if listener == "emqp-subscribers" else "DEALER"
    connection.receive_data(handshake(other, b"me"), 0.0)
    connection.events()
    sent(connection)
    return connection


def registered(**options: Any) -> EmqpConnection:
    """The broker's end of a worker that was let in."""
    connection = broker("emqp-workers", **options)
    receive(connection, Inform("1", '[[10, "default"]]', "worker"))
    connection.send_ack("1")
    sent(connection)
    return connection


class TestHandshake:
    def test_identifies_the_peer(self) -> None:
        connection = EmqpConnection("broker", 0.0)
        connection.receive_data(handshake("DEALER", b"\xffme"), 0.0)
        (event,) = connection.events()
        assert isinstance(event, PeerReady)
        assert (event.socket_type, event.identity) == ("DEALER", b"\xffme")
        assert connection.peer == event and connection.state is State.OPEN

    def test_is_bounded_in_time(self) -> None:
        connection = EmqpConnection("broker", 100.0)
        assert connection.next_deadline() == 105.0
        connection.handle_deadline(105.0)
        assert isinstance(failure(connection.events()), PeerTimeout)

    def test_a_wrong_socket_type_is_refused(self) -> None:
        connection = EmqpConnection("broker", 0.0, listener="emqp-subscribers")
        connection.receive_data(handshake("DEALER"), 0.0)
        failure(connection.events())
        assert b"ERROR" in b"".join(connection.data_to_send())

    def test_nothing_may_be_sent_before_it(self) -> None:
        with pytest.raises(LocalProtocolError, match="handshake"):
            EmqpConnection("client", 0.0).send_request("q", "", b"")

    def test_a_failure_right_after_it_is_not_answered(self) -> None:
        connection = EmqpConnection("worker", 0.0)
        connection.receive_data(handshake("ROUTER") + b"\xff\xff", 0.0)
        failure(connection.events())
        assert sent(connection) == []

    def test_mechanisms_are_those_of_zmtp(self) -> None:
        peer = EmqpConnection("client", 0.0, mechanism=PlainClient("ann", "secret"))
        accepting = PlainServer(lambda user, password: (user, password) == ("ann", "secret"))
        connection = EmqpConnection("broker", 0.0, mechanism=accepting)
        pump(peer, connection)
        (event,) = connection.events()
        assert isinstance(event, PeerReady) and event.user == "ann"

    @pytest.mark.parametrize(("role", "listener"), [("nobody", "emqp-clients"), ("broker", "x")])
    def test_roles_and_listeners_that_do_not_exist(self, role: str, listener: str) -> None:
        with pytest.raises(ValueError, match="eMQP has no role"):
            EmqpConnection(role, 0.0, listener=listener)


class TestRegistration:
    def test_a_worker_introduces_itself_at_once(self) -> None:
        worker = EmqpConnection("worker", 0.0, queues=((20, "heavy"), (10, "default")))
        worker.receive_data(handshake("ROUTER"), 0.0)
        assert sent(worker) == [Inform("1", '[[20,"heavy"],[10,"default"]]', "worker")]
        assert worker.state is State.INFORMED

    def test_a_scheduler_too(self) -> None:
        scheduler = EmqpConnection("scheduler", 0.0)
        scheduler.receive_data(handshake("ROUTER"), 0.0)
        assert sent(scheduler) == [Inform("1", "", "scheduler")]

    def test_the_broker_is_notified_and_registers_it(self) -> None:
        connection = broker("emqp-workers")
        events = receive(connection, Inform("7", "[40, 'email']", "worker"))
        assert events == [PeerInformed("7", "worker", ((40, "email"),))]
        connection.send_ack("7")
        assert connection.state is State.REGISTERED

    def test_the_first_heartbeat_follows_at_once(self) -> None:
        """A deployed job manager starts its processes when it receives it."""
        connection = broker("emqp-workers", unix_offset_s=1.7e9)
        receive(connection, Inform("7", "", "worker"), now=5.5)
        connection.send_ack("7")
        assert sent(connection) == [Ack("1", "7"), Heartbeat("2", "1700000005.5")]

    def test_the_worker_learns_that_it_is_known(self) -> None:
        worker = EmqpConnection("worker", 0.0)
        worker.receive_data(handshake("ROUTER"), 0.0)
        worker.events()
        assert receive(worker, Ack("x", "1")) == [Registered()]

    def test_an_ack_for_something_else_does_not_register(self) -> None:
        worker = EmqpConnection("worker", 0.0)
        worker.receive_data(handshake("ROUTER"), 0.0)
        worker.events()
        assert receive(worker, Ack("x", "other")) == [Acknowledged("other")]
        with pytest.raises(LocalProtocolError, match="informed"):
            worker.send_ready()

    def test_no_ack_in_time_ends_it(self) -> None:
        worker = EmqpConnection("worker", 0.0)
        worker.receive_data(handshake("ROUTER"), 1.0)
        worker.events()
        assert worker.next_deadline() == 16.0
        worker.handle_deadline(16.0)
        assert isinstance(failure(worker.events()), PeerTimeout)

    def test_introducing_oneself_again_starts_anew(self) -> None:
        connection = registered()
        receive(connection, Ready("2"), Ready("3"))
        assert connection.free_slots == 2
        assert receive(connection, Inform("4", "", "worker")) == [PeerInformed("4", "worker", ())]
        assert connection.free_slots == 0 and connection.state is State.INFORMED
        connection.send_ack("4")
        assert kinds(sent(connection)) == [Ack, Heartbeat]

    def test_slots_offered_before_the_ack_count(self) -> None:
        connection = broker("emqp-workers")
        receive(connection, Inform("1", "", "worker"), Ready("2"))
        connection.send_ack("1")
        assert connection.free_slots == 1

    @pytest.mark.parametrize(
        ("listener", "frame"),
        [
            ("emqp-clients", Inform("1", "", "worker")),
            ("emqp-clients", Inform("1", "", "weird")),
            ("emqp-workers", Inform("1", "", "scheduler")),
            ("emqp-workers", Inform("1", "", "weird")),
        ],
    )
    def test_only_at_its_own_door(self, listener: str, frame: Inform) -> None:
        connection = broker(listener)
        assert isinstance(ignored(receive(connection, frame)), UnexpectedFrame)
        assert connection.state is State.OPEN and sent(connection) == []

    def test_queues_that_can_not_be_read_are_ignored(self) -> None:
        connection = broker("emqp-workers")
        assert isinstance(
            ignored(receive(connection, Inform("1", "what", "worker"))), MalformedFrame
        )

    def test_a_scheduler_has_no_queues_to_be_wrong(self) -> None:
        connection = broker("emqp-clients")
        events = receive(connection, Inform("1", "what", "scheduler"))
        assert events == [PeerInformed("1", "scheduler", ())]


class TestSlots:
    def test_are_counted(self) -> None:
        connection = registered()
        assert receive(connection, Ready("2"), Ready("3")) == [SlotOffered(), SlotOffered()]
        connection.send_request("q", "", b"1", msgid="j1")
        assert connection.free_slots == 1

    def test_none_free_none_sent(self) -> None:
        connection = registered()
        with pytest.raises(LocalProtocolError, match="no free slot"):
            connection.send_request("q", "", b"1", msgid="j1")

    def test_a_job_goes_out_as_it_came_in(self) -> None:
        connection = registered()
        receive(connection, Ready("2"))
        connection.send_request("q", "timeout:5,x:y", b"\xff", msgid="j1")
        assert sent(connection) == [Request("j1", "q", "timeout:5,x:y", b"\xff")]

    def test_as_the_worker_sees_them(self) -> None:
        worker, connection = opened("worker", "emqp-workers")
        worker.send_ready()
        worker.send_ready()
        pump(worker, connection)
        assert (worker.free_slots, connection.free_slots) == (2, 2)
        connection.send_request("default", "", b"x", msgid="j1")
        pump(worker, connection)
        assert worker.events() == [RequestReceived("j1", "default", "", b"x")]
        assert (worker.free_slots, connection.free_slots) == (1, 1)

    def test_the_result_comes_back(self) -> None:
        worker, connection = opened("worker", "emqp-workers")
        worker.send_reply(b'{"value": 3}', "j1")
        pump(worker, connection)
        (event,) = connection.events()
        assert isinstance(event, ReplyReceived)
        assert (event.message, event.request) == (b'{"value": 3}', "j1")

    def test_a_result_for_nothing_is_ignored(self) -> None:
        connection = registered()
        assert isinstance(ignored(receive(connection, Reply("1", b"x"))), MalformedFrame)


class TestStrangers:
    @pytest.mark.parametrize(
        "frame", [Ready("1"), Heartbeat("1", "0"), Reply("1", b"", "2")], ids=lambda f: f.frame_name
    )
    def test_a_worker_that_nobody_knows_is_sent_away(self, frame: Frame) -> None:
        connection = broker("emqp-workers")
        assert isinstance(ignored(receive(connection, frame)), UnexpectedFrame)
        assert sent(connection) == [Disconnect("1")]

    def test_once(self) -> None:
        connection = broker("emqp-workers")
        receive(connection, Ready("1"), Ready("2"), Ready("3"))
        assert sent(connection) == [Disconnect("1")]

    def test_and_may_come_back(self) -> None:
        connection = broker("emqp-workers")
        receive(connection, Ready("1"), Inform("2", "", "worker"))
        connection.send_ack("2")
        assert kinds(sent(connection)) == [Disconnect, Ack, Heartbeat]

    def test_a_client_needs_no_introduction(self) -> None:
        connection = broker("emqp-clients")
        assert receive(connection, Request("1", "q", "", b"x")) == [
            RequestReceived("1", "q", "", b"x")
        ]

    def test_a_heartbeat_of_a_stranger_at_the_clients_door_is_harmless(self) -> None:
        """A deployed scheduler would not survive being sent away."""
        connection = broker("emqp-clients")
        assert receive(connection, Heartbeat("1", "0")) == []
        assert sent(connection) == []


class TestClients:
    def test_everything_that_they_may_ask(self) -> None:
        client, connection = opened("client", "emqp-clients")
        first = client.send_request("q", "guarantee", b"1")
        client.send_publish("t", b"2")
        client.send_publish("t", b"3", "a:1")
        client.send_schedule("q", "", b"4", interval_s=60)
        client.send_schedule("q", "", b"5", cron="* * * * *")
        client.send_unschedule("q", "", b"6")
        pump(client, connection)
        assert connection.events() == [
            RequestReceived(first, "q", "guarantee", b"1"),
            PublishReceived("2", "t", "", b"2"),
            PublishReceived("3", "t", "a:1", b"3"),
            ScheduleReceived("4", "q", "", 60.0, None, b"4"),
            ScheduleReceived("5", "q", "", None, "* * * * *", b"5"),
            UnscheduleReceived("6", "q", "", None, None, b"6"),
        ]

    def test_schedules_are_written_as_deployed(self) -> None:
        client, _ = opened("client", "emqp-clients")
        client.send_schedule("q", "h", b"m", interval_s=1234567)
        client.send_schedule("q", "h", b"m", interval_s=0.5)
        client.send_unschedule("q", "h", b"m", cron="@daily")
        assert sent(client) == [
            ScheduleFrame("1", "q", "h", "1234567", b"m", ""),
            ScheduleFrame("2", "q", "h", "0.5", b"m", ""),
            UnscheduleFrame("3", "q", "h", "-1", b"m", "@daily"),
        ]

    @pytest.mark.parametrize("when", [{}, {"interval_s": 1, "cron": "* * * * *"}])
    def test_a_schedule_is_of_one_kind(self, when: dict[str, Any]) -> None:
        client, _ = opened("client", "emqp-clients")
        with pytest.raises(LocalProtocolError, match="either"):
            client.send_schedule("q", "", b"", **when)

    @pytest.mark.parametrize(
        ("headers", "interval", "cron", "expected"),
        [
            ("", "5", "", (5.0, None)),
            ("", "2.5", "", (2.5, None)),
            ("", "-1", "* * * * *", (None, "* * * * *")),
            ("", "5", "* * * * *", (5.0, None)),
            ("interval:7", None, None, (7.0, None)),
            ("cron:0%200%20*%20*%20*", None, None, (None, "0 0 * * *")),
        ],
    )
    def test_when(
        self, headers: str, interval: str | None, cron: str | None, expected: Any
    ) -> None:
        connection = broker("emqp-clients")
        (event,) = receive(connection, ScheduleFrame("1", "q", headers, interval, b"m", cron))
        assert isinstance(event, ScheduleReceived)
        assert (event.interval_s, event.cron) == expected

    @pytest.mark.parametrize(
        ("headers", "interval", "cron"),
        [
            ("", "-1", ""),
            ("", "0", ""),
            ("", "soon", ""),
            ("", None, None),
            ("interval:x", None, None),
        ],
    )
    def test_never(self, headers: str, interval: str | None, cron: str | None) -> None:
        connection = broker("emqp-clients")
        events = receive(connection, ScheduleFrame("1", "q", headers, interval, b"m", cron))
        assert isinstance(ignored(events), MalformedFrame)

    def test_receipt_and_result(self) -> None:
        client, connection = opened("client", "emqp-clients")
        connection.send_receipt("r1")
        connection.send_result(b"\xff", "r1")
        pump(client, connection)
        assert client.events() == [
            ReplyReceived("1", b"r1", None),
            ReplyReceived("2", b"\xff", "r1"),
        ]

    def test_no_heartbeats_are_asked_of_them(self) -> None:
        client, connection = opened("client", "emqp-clients")
        assert (client.next_deadline(), connection.next_deadline()) == (None, None)

    def test_a_scheduler_may_send_requests_and_receives_schedules(self) -> None:
        scheduler, connection = opened("scheduler", "emqp-clients")
        connection.send_schedule("q", "", b"1", interval_s=5, msgid="s1")
        connection.send_unschedule("q", "", b"1", msgid="s2")
        connection.send_receipt("r")
        scheduler.send_request("q", "reply-requested", b"2")
        pump(scheduler, connection)
        assert kinds(scheduler.events()) == [ScheduleReceived, UnscheduleReceived, ReplyReceived]
        assert kinds(connection.events()) == [RequestReceived]


class TestAdministration:
    def test_questions_and_answers(self) -> None:
        admin, connection = opened("admin", "emqp-admin")
        msgid = admin.send_admin("STATUS")
        pump(admin, connection)
        assert connection.events() == [AdminRequested(msgid, "STATUS")]
        connection.send_answer(b"{}")
        pump(admin, connection)
        assert admin.events() == [ReplyReceived("1", b"{}", None)]

    def test_stopping_the_broker_is_for_its_owner_to_decide(self) -> None:
        admin, connection = opened("admin", "emqp-admin")
        admin.send_disconnect()
        pump(admin, connection)
        assert connection.events() == [ShutdownRequested("1")] and not connection.closed
        connection.send_ack("1")
        pump(admin, connection)
        assert admin.events() == [Acknowledged("1")]


class TestPublications:
    def test_a_publisher_publishes(self) -> None:
        publisher, connection = opened("publisher", "emqp-publishers")
        publisher.send_publish("t", b"\xff")
        pump(publisher, connection)
        assert connection.events() == [PublishReceived("1", "t", "", b"\xff")]

    def test_a_subscriber_subscribes_and_is_given_topic_and_message(self) -> None:
        subscriber, connection = opened("subscriber", "emqp-subscribers")
        subscriber.send_subscribe("to")
        pump(subscriber, connection)
        assert connection.events() == [Subscribed(b"to")]
        connection.send_publication("topic", b"\xff")
        pump(subscriber, connection)
        assert subscriber.events() == [PublicationReceived("topic", b"\xff")]
        subscriber.send_unsubscribe("to")
        pump(subscriber, connection)
        assert connection.events() == [Unsubscribed(b"to")]

    def test_only_a_subscriber_subscribes(self) -> None:
        client, _ = opened("client", "emqp-clients")
        with pytest.raises(LocalProtocolError, match="subscribe"):
            client.send_subscribe("t")
        with pytest.raises(LocalProtocolError, match="unsubscribe"):
            client.send_unsubscribe("t")

    def test_something_else_than_a_publication_is_ignored(self) -> None:
        subscriber, _ = opened("subscriber", "emqp-subscribers")
        subscriber.receive_data(serialize_message([b"\xff", b""]), 0.0)
        assert isinstance(ignored(subscriber.events()), MalformedFrame)


class TestHeartbeats:
    @pytest.mark.parametrize("end", [0, 1])
    @pytest.mark.parametrize(
        ("role", "listener"), [("worker", "emqp-workers"), ("scheduler", "emqp-clients")]
    )
    def test_every_three_seconds_both_ways(self, role: str, listener: str, end: int) -> None:
        connection = opened(role, listener)[end]
        times = []
        for now in [0.5 * step for step in range(20)]:
            connection.handle_deadline(now)
            times += [now] * len(sent(connection))
        assert times == [3.0, 6.0, 9.0]

    def test_even_when_there_is_other_traffic(self) -> None:
        """Deployed job managers replace their dead processes only when they receive one."""
        connection = registered()
        receive(connection, Ready("2"))
        connection.send_request("q", "", b"", msgid="j")
        connection.handle_deadline(3.0)
        assert kinds(sent(connection)) == [Request, Heartbeat]

    @pytest.mark.parametrize("end", [0, 1])
    def test_silence_for_three_times_five_seconds_is_the_end(self, end: int) -> None:
        connection = opened("worker", "emqp-workers")[end]
        for now in (3.0, 6.0, 9.0, 12.0, 14.9):
            connection.handle_deadline(now)
        assert not connection.closed
        sent(connection)
        connection.handle_deadline(15.0)
        assert isinstance(failure(connection.events()), PeerTimeout)
        assert sent(connection) == []

    @pytest.mark.parametrize(
        "frame", [Heartbeat("1", "0"), Ready("1"), Reply("1", b"", "2")], ids=lambda f: f.frame_name
    )
    def test_any_command_counts(self, frame: Frame) -> None:
        connection = registered()
        receive(connection, frame, now=10.0)
        connection.handle_deadline(24.9)
        assert not connection.closed
        connection.handle_deadline(25.0)
        assert connection.closed

    def test_nonsense_does_not(self) -> None:
        connection = registered()
        connection.receive_data(serialize_message([b"x"]), 10.0)
        connection.handle_deadline(15.0)
        assert connection.closed

    def test_a_peer_that_we_do_not_read_is_not_taken_for_silent(self) -> None:
        connection = registered()
        connection.paused = True
        assert not connection.wants_data
        connection.handle_deadline(15.0)
        connection.paused = False
        connection.handle_deadline(29.9)
        assert connection.wants_data and not connection.closed
        connection.handle_deadline(30.0)
        assert connection.closed

    def test_two_that_beat_live_for_ever(self) -> None:
        worker, connection = opened("worker", "emqp-workers")
        for now in range(1, 100):
            worker.handle_deadline(float(now))
            connection.handle_deadline(float(now))
            pump(worker, connection, float(now))
        assert not worker.closed and not connection.closed

    def test_the_limits_are_ours(self) -> None:
        limits = EmqpLimits(heartbeat_interval_s=1, silence_s=4)
        worker, _ = opened("worker", "emqp-workers", limits=limits)
        assert worker.next_deadline() == 1.0
        worker.handle_deadline(4.0)
        assert worker.closed


class TestGoodbye:
    def test_is_kbye_until_the_peer_has_sent_one(self) -> None:
        connection = registered()
        connection.close()
        assert sent(connection) == [Kbai("3", "KBYE")]

    @pytest.mark.parametrize("spelling", ["KBAI", "KBYE"])
    def test_is_spelled_as_the_peer_spelled_it(self, spelling: str) -> None:
        connection = registered()
        receive(connection, Kbai("2", spelling), Inform("3", "", "worker"))
        connection.send_ack("3")
        sent(connection)
        connection.close()
        assert sent(connection) == [Kbai("5", spelling)]

    @pytest.mark.parametrize("spelling", ["KBAI", "KBYE"])
    def test_of_who_has_not_registered_has_no_effect(self, spelling: str) -> None:
        """Whatever could be asked before can be asked after it, and is answered."""
        for door in ("emqp-clients", "emqp-publishers", "emqp-admin"):
            role = {"emqp-clients": "client", "emqp-publishers": "publisher"}.get(door, "admin")
            _, connection = opened(role, door)
            accepts, sends = connection._receives, connection._sends
            assert receive(connection, Kbai("1", spelling), Kbai("2", spelling)) == []
            assert (connection._receives, connection._sends) == (accepts, sends)
            connection.handle_deadline(1000.0)
            assert not connection.closed
            connection.receive_eof()
            assert connection.events() == [ConnectionClosed(clean=True)]

    def test_of_a_scheduler_makes_it_a_client(self) -> None:
        _, connection = opened("scheduler", "emqp-clients")
        connection.events()
        got = receive(connection, Kbai("3"), Request("4", "q", "", b"m"))
        assert kinds(got) == [PeerLeaving, RequestReceived]
        with pytest.raises(LocalProtocolError):
            connection.send_schedule("q", "", b"m", interval_s=1.0)
        connection.send_result(b"{}", "4")
        connection.receive_eof()
        assert connection.events() == [ConnectionClosed(clean=True)]

    def test_of_a_worker_lets_its_jobs_finish(self) -> None:
        connection = registered()
        assert receive(connection, Ready("2"), Kbai("3")) == [SlotOffered(), PeerLeaving()]
        assert connection.free_slots == 0
        with pytest.raises(LocalProtocolError):
            connection.send_request("q", "", b"", msgid="j")
        assert receive(connection, Reply("4", b"1", "j"), now=100.0) == [
            ReplyReceived("4", b"1", "j")
        ]
        assert sent(connection) == []
        connection.receive_eof()
        assert connection.events() == [ConnectionClosed(clean=True)]

    def test_of_a_worker_is_not_answered_and_silence_is_then_normal(self) -> None:
        connection = registered()
        receive(connection, Kbai("3"), now=1.0)
        connection.handle_deadline(300.0)
        assert not connection.closed and sent(connection) == []
        connection.handle_deadline(331.0)
        assert connection.events() == [ConnectionClosed(clean=True)]

    def test_of_our_worker(self) -> None:
        worker, connection = opened("worker", "emqp-workers")
        worker.leave()
        worker.leave()
        worker.send_reply(b"1", "j")
        with pytest.raises(LocalProtocolError):
            worker.send_ready()
        pump(worker, connection)
        assert kinds(connection.events()) == [PeerLeaving, ReplyReceived]
        worker.close()
        assert sent(worker) == [] and worker.events() == [ConnectionClosed(clean=True)]

    def test_a_job_that_crossed_it_is_still_taken(self) -> None:
        worker, _ = opened("worker", "emqp-workers")
        worker.leave()
        assert receive(worker, Request("j", "q", "", b"")) == [RequestReceived("j", "q", "", b"")]

    def test_of_the_broker_lets_results_through(self) -> None:
        worker, connection = opened("worker", "emqp-workers")
        connection.leave()
        pump(worker, connection)
        assert worker.events() == [PeerLeaving()]
        worker.send_reply(b"1", "j")
        pump(worker, connection)
        assert kinds(connection.events()) == [ReplyReceived]

    @pytest.mark.parametrize(("role", "listener"), [DOORS[1], DOORS[2]])
    def test_is_sent_when_closing(self, role: str, listener: str) -> None:
        for connection in opened(role, listener):
            connection.close()
            assert kinds(sent(connection)) == [Kbai]
            assert connection.events() == [ConnectionClosed(clean=True)]

    def test_leaving_is_harmless_where_nobody_registered(self) -> None:
        connection = broker("emqp-workers")
        receive(connection, Inform("1", "", "worker"))
        connection.leave()
        client, _ = opened("client", "emqp-clients")
        client.leave()
        assert sent(connection) == [] == sent(client)

    def test_is_not_sent_to_clients(self) -> None:
        for connection in opened("client", "emqp-clients"):
            connection.close()
            assert sent(connection) == []
            assert connection.events() == [ConnectionClosed(clean=True)]

    def test_without_one_a_worker_did_not_part_cleanly(self) -> None:
        connection = registered()
        connection.receive_eof()
        assert connection.events() == [ConnectionClosed(clean=False)]

    def test_a_client_just_goes(self) -> None:
        connection = broker("emqp-clients")
        connection.receive_eof()
        assert connection.events() == [ConnectionClosed(clean=True)]

    def test_is_sent_when_we_have_to_stop(self) -> None:
        connection = registered()
        connection.fail(ServiceUnavailable("draining"))
        assert kinds(sent(connection)) == [Kbai]

    def test_is_not_sent_after_a_violation_of_zmtp(self) -> None:
        connection = registered()
        connection.receive_data(b"\xff\xff", 0.0)
        failure(connection.events())
        assert sent(connection) == []


class TestDisconnect:
    @pytest.mark.parametrize("listener", ["emqp-clients", "emqp-workers", "emqp-publishers"])
    def test_ends_the_connection_of_its_sender(self, listener: str) -> None:
        connection = broker(listener)
        assert receive(connection, Disconnect("1")) == [ConnectionClosed(clean=True)]

    def test_a_known_worker_gets_a_goodbye(self) -> None:
        connection = registered()
        assert receive(connection, Disconnect("1")) == [ConnectionClosed(clean=True)]
        assert kinds(sent(connection)) == [Kbai]

    @pytest.mark.parametrize(("role", "listener"), DOORS)
    def test_from_the_broker_ends_the_conversation(self, role: str, listener: str) -> None:
        peer, _ = opened(role, listener)
        assert receive(peer, Disconnect("1")) == [ConnectionClosed(clean=True)]

    def test_nothing_after_it_is_processed(self) -> None:
        connection = broker("emqp-clients")
        events = receive(connection, Disconnect("1"), Request("2", "q", "", b""))
        assert events == [ConnectionClosed(clean=True)]


EXAMPLES: list[Frame] = [
    Ack("1", "2"),
    Reply("1", b"x", "2"),
    Heartbeat("1", "0"),
    Disconnect("1"),
    Kbai("1"),
    Ready("1"),
    Request("1", "q", "", b"x"),
    Publish("1", "t", None, b"x"),
    ScheduleFrame("1", "q", "", "5", b"x", ""),
    UnscheduleFrame("1", "q", "", "5", b"x", ""),
    Inform("1", "", "worker"),
    Admin("1", "STATUS"),
]


KINDS = {type(frame): frame for frame in EXAMPLES}
ENDS = [(role, listener, end) for role, listener in DOORS for end in (0, 1)]


@pytest.mark.parametrize(("role", "listener", "end"), ENDS)
@pytest.mark.parametrize("frame", EXAMPLES, ids=lambda frame: frame.frame_name)
def test_what_is_not_in_the_table_is_ignored_and_counted(
    role: str, listener: str, end: int, frame: Frame
) -> None:
    connection = opened(role, listener)[end]
    before = connection.state
    expected = type(frame) in RECEIVES[connection.side, before]
    events = receive(connection, frame)
    if expected:
        assert connection.state in TRANSITIONS[connection.side][before, type(frame)]
        assert not any(
            isinstance(event, CommandIgnored) and "unexpected" in event.error.reason
            for event in events
        )
    else:
        assert isinstance(ignored(events), UnexpectedFrame)
        assert connection.ignored == 1 and not connection.closed


@pytest.mark.parametrize(
    ("side", "state", "kind"),
    [(side, *edge) for side, table in TRANSITIONS.items() for edge in table if edge[1] in KINDS],
)
def test_a_command_leads_to_a_state_of_the_table(
    side: str, state: State, kind: type[Frame]
) -> None:
    role, listener = next(each for each in DOORS if side in each)
    connection = opened(role, listener)[0 if side == role else 1]
    connection._enter(state)
    receive(connection, KINDS[kind])
    assert connection.state in TRANSITIONS[side][state, kind]


@pytest.mark.parametrize("vector", load("emqp"), ids=lambda vector: vector["name"])
@pytest.mark.parametrize("listener", [name for name in LISTENERS if name != "emqp-subscribers"])
def test_no_recorded_message_harms_the_broker(vector: dict[str, Any], listener: str) -> None:
    connection = broker(listener)
    connection.receive_data(serialize_message([bytes.fromhex(p) for p in vector["frames"]]), 0.0)
    assert not any(isinstance(event, ConnectionFailed) for event in connection.events())


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([b""], MalformedFrame),
        ([b"", b"eMQP/9.9", b"REQUEST", b"1", b"q", b"", b""], MalformedFrame),
        ([b"", b"eMQP/1.0", b"NOSUCH", b"1"], UnknownFrame),
        ([b"", b"eMQP/1.0", b"REQUEST", b"\xff", b"q", b"", b""], MalformedFrame),
    ],
)
def test_nonsense_is_ignored_and_the_next_command_is_processed(
    parts: list[bytes], error: type[CrosswireError]
) -> None:
    connection = broker("emqp-clients")
    connection.receive_data(serialize_message(parts), 0.0)
    assert isinstance(ignored(connection.events()), error)
    assert kinds(receive(connection, Request("1", "q", "", b""))) == [RequestReceived]


def test_what_may_not_be_sent_is_our_own_fault() -> None:
    _, connection = opened("client", "emqp-clients")
    with pytest.raises(LocalProtocolError, match="publish can't be sent by emqp-clients"):
        connection.send_publish("t", b"")
    with pytest.raises(LocalProtocolError, match="request can't be sent"):
        connection.send_request("q", "", b"")


def test_every_side_is_in_a_table() -> None:
    talking = {side for side, _ in RECEIVES} | {side for side, _ in SENDS}
    assert talking == (set(ROLES) - {"broker"}) | set(LISTENERS)


def test_ids_come_from_the_owner() -> None:
    client = EmqpConnection("client", 0.0, next_id=iter(["a", "b"]).__next__)
    client.receive_data(handshake("ROUTER"), 0.0)
    assert client.send_request("q", "", b"") == "a"
    assert client.send_publish("t", b"") == "b"


sides = st.sampled_from(
    [*((role, "emqp-clients") for role in ROLES), *(("broker", door) for door in LISTENERS)]
)


@settings(max_examples=150)
@given(
    sides,
    st.lists(commands | deliveries, max_size=8),
    st.booleans(),
    st.lists(st.integers(0, 2000), max_size=4),
)
def test_any_commands_in_any_order_are_legal_or_ignored(
    side: tuple[str, str], frames: list[Frame], let_in: bool, cuts: list[int]
) -> None:
    def run(cuts: list[int]) -> list[Event]:
        connection = EmqpConnection(side[0], 0.0, listener=side[1])
        other = {"ROUTER": "DEALER", "DEALER": "ROUTER", "PUB": "SUB", "SUB": "PUB"}
        opening = handshake(other[SOCKETS[connection.side]])
        data = opening + b"".join(map(wire, frames))
        events: list[Event] = []
        marks = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
        for start, end in pairwise(marks):
            connection.receive_data(data[start:end], 0.0)
            for event in connection.events():
                events.append(event)
                if isinstance(event, PeerInformed) and let_in and not connection.closed:
                    connection.send_ack(event.msgid)
        assert not any(isinstance(event, ConnectionFailed) for event in events)
        return [event for event in events if not isinstance(event, CommandIgnored)]

    whole = run([])
    if not let_in:
        assert run(cuts) == whole


class TestDecoder:
    def test_shows_both_layers(self) -> None:
        decoder = EmqpDecoder("client")
        rows = decoder.rows(handshake("DEALER") + wire(Ready("1")))
        assert [(row.layer, row.frame) for row in rows] == [
            (0, "zmtp-greeting"),
            (0, "zmtp-command"),
            (0, "zmtp-message"),
            (1, "ready"),
        ]
        assert (rows[2].offset, rows[2].length) == (rows[3].offset, rows[3].length)

    def test_an_error_of_layer_1_keeps_the_layers_apart(self) -> None:
        rows = EmqpDecoder("client").rows(handshake("DEALER") + serialize_message([b"x"]))
        assert [(row.layer, row.error) for row in rows[2:]] == [(0, None), (1, "malformed")]

    def test_publications_are_known_by_the_socket(self) -> None:
        parts = serialize(DeliveryFrame("topic", b"1"))
        rows = EmqpDecoder("broker").rows(handshake("PUB") + serialize_message(parts))
        assert (rows[-1].frame, rows[-1].fields) == ("publish", {"topic": "topic", "message": "31"})

    def test_from_a_router_two_parts_are_no_publication(self) -> None:
        rows = EmqpDecoder("broker").rows(handshake("ROUTER") + serialize_message([b"a", b"b"]))
        assert rows[-1].error == "malformed"

    def test_subscriptions_are_zmtps_own(self) -> None:
        subscribing = serialize_message([b"\x01topic"]) + serialize_command("SUBSCRIBE", b"x")
        rows = EmqpDecoder("subscriber").rows(handshake("SUB") + subscribing)
        assert {row.layer for row in rows} == {0}

    def test_the_type_survives_a_dump(self) -> None:
        before, after = EmqpDecoder("broker"), EmqpDecoder("broker")
        before.feed(handshake("PUB"))
        after.load(before.dump())
        assert after.rows(serialize_message([b"t", b"m"]))[-1].frame == "publish"

    def test_who_joins_late_goes_by_looks(self) -> None:
        some = b"".join(serialize_message([b"topic", bytes([n])]) for n in range(20))
        rows = EmqpDecoder("broker", late=True).rows(some)
        assert {row.frame for row in rows if row.layer} == {"publish"}

    def test_a_plain_clients_type_is_in_its_initiate(self) -> None:
        peer = EmqpConnection("subscriber", 0.0, mechanism=PlainClient("a", "b"))
        door = EmqpConnection(
            "broker",
            0.0,
            listener="emqp-subscribers",
            mechanism=PlainServer(lambda user, password: True),
        )
        decoder = EmqpDecoder("subscriber")
        for _ in range(4):
            data = b"".join(peer.data_to_send())
            decoder.feed(data)
            door.receive_data(data, 0.0)
            peer.receive_data(b"".join(door.data_to_send()), 0.0)
        assert decoder.socket_type == "SUB"

    @pytest.mark.parametrize("vector", load("emqp"), ids=lambda vector: vector["name"])
    def test_vectors_in_any_pieces(self, vector: dict[str, Any]) -> None:
        sender = vector["direction"].split("->")[0]
        socket = "PUB" if vector["direction"] == "broker->subscriber" else "DEALER"
        parts = [bytes.fromhex(part) for part in vector["frames"]]
        data = serialize_message(parts)
        whole, crumbs = EmqpDecoder(sender), EmqpDecoder(sender)
        whole.feed(handshake(socket))
        crumbs.feed(handshake(socket))
        rows = whole.rows(data + b"\x01\x05")
        assert [row for octet in data for row in crumbs.rows(bytes([octet]))] == rows
        assert whole.pending == 2
        message, command = rows
        assert message.fields == Message(tuple(parts)).fields()
        if "frame" in vector:
            assert (command.frame, command.fields) == (vector["frame"], vector["fields"])
