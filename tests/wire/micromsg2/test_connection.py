"""MicroMsg2's rules: negotiation, messages, acknowledgements, extensions, the ways to end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.errors import (
    ConnectionRejected,
    CrosswireError,
    DestinationFull,
    Forbidden,
    InvalidDestination,
    InvalidEnvelope,
    InvalidFilter,
    LocalProtocolError,
    MalformedFrame,
    PeerError,
    PeerTimeout,
    ServiceUnavailable,
    StoreFull,
    SubscriptionConflict,
    UnexpectedFrame,
)
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, Event, Frame
from crosswire.wire.micromsg2.connection import TRANSITIONS, MicroMsg2Connection, State
from crosswire.wire.micromsg2.decoder import MicroMsg2Decoder
from crosswire.wire.micromsg2.events import (
    ExtensionReceived,
    MessageReceived,
    MessagesAcknowledged,
    Opened,
    ServeReceived,
    SubscribeReceived,
    UnsubscribeReceived,
)
from crosswire.wire.micromsg2.extensions import Offer, VendorExtension, batch_ack, token
from crosswire.wire.micromsg2.frames import (
    Command,
    Error,
    Extension,
    ExtensionFrame,
    Handshake,
    Message,
    MicroMsg2Limits,
    message_prefix,
    serialize,
)
from tests.wire.micromsg2.strategies import frames, handshakes, pair
from tests.wire.stream import pump


def names(*listed: str) -> tuple[Extension, ...]:
    return tuple(Extension(name, {}) for name in listed)


def hello(*required: Extension | str, optional: Iterable[Extension] = ()) -> Handshake:
    listed = tuple(Extension(item, {}) if isinstance(item, str) else item for item in required)
    return Handshake(1, 0, 0, "c", listed, tuple(optional))


def opened(*agreed: Extension | str, **options: Any) -> MicroMsg2Connection:
    """A server whose client has agreed to these."""
    connection = MicroMsg2Connection("server", 0.0, **options)
    receive(connection, hello(*agreed), hello(*agreed))
    connection.data_to_send()
    return connection


def receive(connection: MicroMsg2Connection, *frames: Frame, now: float = 0.0) -> list[Event]:
    connection.receive_data(b"".join(map(serialize, frames)), now)
    return connection.events()


def sent(connection: MicroMsg2Connection, first: int = 1) -> list[Any]:
    """What an open connection sent."""
    decoder = MicroMsg2Decoder("server", hints={"next_sequence": first})
    return [item for _, _, item in decoder.feed(b"".join(connection.data_to_send()))]


def sent_in_handshake(connection: MicroMsg2Connection) -> list[Any]:
    decoder = MicroMsg2Decoder(connection.role)
    return [item for _, _, item in decoder.feed(b"".join(connection.data_to_send()))]


def failure(events: list[Event]) -> CrosswireError:
    event = events[-1]
    assert isinstance(event, ConnectionFailed)
    return event.error


def message(sequence: int, payload: bytes = b"x", destination: str = "q") -> Message:
    return Message(sequence, destination, b"", payload)


# ----------------------------------------------------------------------------------- negotiation


class TestHandshake:
    def test_the_three_messages_of_the_specification(self) -> None:
        client = MicroMsg2Connection(
            "client", 0.0, offer=Offer(identity="hulk", required=names("json", "dotnet"))
        )
        server = MicroMsg2Connection(
            "server", 0.0, offer=Offer(identity="srver", optional=names("batch-ack"))
        )
        sent_bytes = []
        for speaker, listener in ((client, server), (server, client), (client, server)):
            data = b"".join(speaker.data_to_send())
            sent_bytes.append(data.hex())
            listener.receive_data(data, 0.0)
        assert sent_bytes == [
            "0100000468756c6b000b6a736f6e3b646f746e65740000",
            "0100000573727665720000000962617463682d61636b",
            "0100000468756c6b000b6a736f6e3b646f746e6574000962617463682d61636b",
        ]
        agreed = names("json", "dotnet", "batch-ack")
        assert client.events() == [Opened((1, 0), "srver", agreed, 10)]
        assert server.events() == [Opened((1, 0), "hulk", agreed, 10)]

    def test_numbers_run_over_required_then_optional(self) -> None:
        client, server = pair(
            Offer(required=names("json"), optional=names("pub-sub", "ack")),
            Offer(required=names("dotnet")),
        )
        expected = ["json", "dotnet", "pub-sub", "ack"]
        for end in (client, server):
            assert [item.name for item in end.agreement.extensions] == expected

    def test_a_client_drops_what_the_server_did_not_take_up(self) -> None:
        client, _ = pair(
            Offer(optional=names("json", "pub-sub")), Offer(supported=frozenset({"pub-sub"}))
        )
        assert client.agreement.extensions == names("pub-sub")

    def test_a_client_does_not_take_up_what_it_does_not_support(self) -> None:
        client, _ = pair(Offer(supported=frozenset()), Offer(optional=names("json", "ack")))
        assert client.agreement.extensions == ()

    def test_names_are_read_in_any_case(self) -> None:
        connection = opened("BATCH-ACK", "Pub-Sub")
        assert connection.agreement.window == 10
        (event,) = receive(connection, Command("Subscribe", {"Destination": "topic/t"}))
        assert isinstance(event, SubscribeReceived)

    @pytest.mark.parametrize(
        ("theirs", "agreed"), [((1, 0), (1, 0)), ((1, 7), (1, 0)), ((9, 0), (1, 0))]
    )
    def test_the_lowest_version_is_used(
        self, theirs: tuple[int, int], agreed: tuple[int, int]
    ) -> None:
        connection = MicroMsg2Connection("server", 0.0)
        (event,) = receive(connection, Handshake(*theirs, 0, "c"), Handshake(*theirs, 0, "c"))
        assert isinstance(event, Opened) and event.version == agreed
        assert sent_in_handshake(connection)[0].major == 1

    def test_flags_are_ignored(self) -> None:
        connection = MicroMsg2Connection("server", 0.0)
        receive(connection, Handshake(1, 0, 255, "c"), Handshake(1, 0, 255, "c"))
        assert connection.state is State.OPEN

    @pytest.mark.parametrize(
        ("frame", "name"),
        [
            (Handshake(0, 9, 0, "c"), "version"),
            (Handshake(1, 0, 0, "é"), "handshake"),
            (hello("x-unknown"), "extension"),
            (hello("xml", "json"), "extension"),
            (hello(Extension("batch-ack", {"max-count": "0"})), "extension"),
            (hello(Extension("batch-ack", {"max-count": "32768"})), "extension"),
            (hello(Extension("batch-ack", {"count": "ten"})), "extension"),
            (hello(optional=[Extension("batch-ack", {"count": ""})]), "extension"),
        ],
    )
    @pytest.mark.parametrize("final", [False, True])
    def test_what_a_server_refuses(self, frame: Handshake, name: str, final: bool) -> None:
        connection = MicroMsg2Connection("server", 0.0)
        if final:
            receive(connection, hello())
            connection.data_to_send()
        assert isinstance(failure(receive(connection, frame)), CrosswireError)
        (sent_frame,) = sent_in_handshake(connection)
        assert sent_frame.name == name

    @pytest.mark.parametrize(
        ("frame", "name"),
        [
            (Handshake(0, 0, 0, "s"), "version"),
            (Handshake(1, 0, 0, "ÿ"), "handshake"),
            (hello("x-unknown"), "extension"),
        ],
    )
    def test_what_a_client_refuses(self, frame: Handshake, name: str) -> None:
        connection = MicroMsg2Connection("client", 0.0)
        receive(connection, frame)
        proposal, sent_frame = sent_in_handshake(connection)
        assert (proposal.frame_name, sent_frame.name) == ("handshake", name)

    def test_a_malformed_list_is_malformed(self) -> None:
        connection = MicroMsg2Connection("server", 0.0)
        connection.receive_data(bytes.fromhex("0100000000023b3b0000"), 0.0)
        (frame,) = sent_in_handshake(connection)
        assert frame.name == "malformed"

    def test_what_the_server_requires_must_be_in_the_final_handshake(self) -> None:
        connection = MicroMsg2Connection("server", 0.0, offer=Offer(required=names("pub-sub")))
        receive(connection, hello())
        connection.data_to_send()
        receive(connection, hello())
        (frame,) = sent_in_handshake(connection)
        assert (frame.name, frame.arguments["description"]) == (
            "extension",
            "required but left out: pub-sub",
        )

    @pytest.mark.parametrize("role", ["client", "server"])
    def test_an_error_instead_of_a_handshake(self, role: str) -> None:
        connection = MicroMsg2Connection(role, 0.0)
        connection.data_to_send()
        error = failure(receive(connection, Error("version", {"description": "too old!"})))
        assert isinstance(error, PeerError)
        assert (error.code, error.reason) == ("version", "too old!")
        assert connection.data_to_send() == []

    @pytest.mark.parametrize("role", ["client", "server"])
    def test_silence_is_ended(self, role: str) -> None:
        connection = MicroMsg2Connection(role, 100.0)
        connection.data_to_send()
        assert connection.next_deadline() == 105.0
        connection.handle_deadline(105.0)
        assert isinstance(failure(connection.events()), PeerTimeout)
        (frame,) = sent_in_handshake(connection)
        assert frame.name == "handshake"

    def test_five_seconds_in_all(self) -> None:
        connection = MicroMsg2Connection("server", 100.0)
        receive(connection, hello(), now=104.0)
        assert connection.next_deadline() == 105.0
        receive(connection, hello(), now=104.5)
        assert connection.next_deadline() is None

    @pytest.mark.parametrize(
        ("client", "server", "window"),
        [
            (batch_ack(7), None, 7),
            (Extension("batch-ack", {"count": "8"}), None, 8),
            (Extension("batch-ack", {}), None, 10),
            (batch_ack(100), batch_ack(5), 5),
            (batch_ack(5), batch_ack(100), 5),
            (Extension("ack", {}), None, 1),
            (None, None, None),
            (None, batch_ack(32767), 32767),
        ],
    )
    @pytest.mark.parametrize("required", [False, True])
    def test_windows(
        self,
        client: Extension | None,
        server: Extension | None,
        window: int | None,
        required: bool,
    ) -> None:
        mine = (client,) if client else ()
        offer = Offer(required=mine) if required else Offer(optional=mine)
        ends = pair(offer, Offer(optional=(server,) if server else ()))
        assert [end.agreement.window for end in ends] == [window, window]

    def test_batch_ack_wins(self) -> None:
        connection = opened("ack", batch_ack(3))
        receive(connection, message(1))
        connection.acknowledge(1)
        assert (connection.agreement.window, sent(connection)) == (
            3,
            [ExtensionFrame(2, b"\0\1")],
        )

    def test_a_token_reaches_the_server_and_is_not_sent_back(self) -> None:
        client = MicroMsg2Connection("client", 0.0, offer=Offer(optional=(token("a;b=c"),)))
        server = MicroMsg2Connection("server", 0.0)
        server.receive_data(b"".join(client.data_to_send()), 0.0)
        reply = b"".join(server.data_to_send())
        assert b"token" not in reply
        client.receive_data(reply, 0.0)
        server.receive_data(b"".join(client.data_to_send()), 0.0)
        (event,) = server.events()
        assert isinstance(event, Opened) and event.token == "a;b=c"
        assert "a;b=c" not in repr(event)

    def test_nothing_may_be_sent_before_it(self) -> None:
        with pytest.raises(LocalProtocolError, match="proposed"):
            MicroMsg2Connection("client", 0.0).send_message("q", b"")

    @pytest.mark.parametrize(
        "offer",
        [
            {"identity": "é"},
            {"identity": "x" * 256},
            {"required": names("JSON")},
            {"optional": (Extension("x-a", {"a_b": "c"}),)},
            {"optional": (batch_ack(0),)},
            {"optional": (Extension("x-a", {"a": "b" * 65536}),)},
        ],
    )
    def test_an_offer_that_could_not_be_written(self, offer: dict[str, Any]) -> None:
        with pytest.raises(ValueError):
            Offer(**offer)


EXAMPLES: list[Frame] = [
    hello(),
    message(1),
    Command("subscribe", {"destination": "topic/t"}),
    ExtensionFrame(2, b"type"),
    Error("internal", {}),
]


def in_state(state: State) -> MicroMsg2Connection:
    connection = MicroMsg2Connection("client" if state is State.PROPOSED else "server", 0.0)
    if state in (State.ANSWERED, State.OPEN):
        receive(connection, hello())
    if state is State.OPEN:
        receive(connection, hello("pub-sub", "dotnet"))
    connection.data_to_send()
    return connection


@pytest.mark.parametrize("state", [state for state in State if state is not State.CLOSED])
@pytest.mark.parametrize("frame", EXAMPLES, ids=lambda frame: frame.frame_name)
def test_what_is_not_in_the_table_is_a_violation(state: State, frame: Frame) -> None:
    """The decoder reads nothing but handshakes before the end of them, so only it can check."""
    connection = in_state(state)
    if (state, type(frame)) in TRANSITIONS:
        receive(connection, frame)
        assert (connection.state,) == TRANSITIONS[state, type(frame)]
    else:
        with pytest.raises(UnexpectedFrame):
            connection._receive([(0, 1, frame)], 0.0)


@settings(max_examples=150)
@given(st.sampled_from([state for state in State if state is not State.CLOSED]), st.data())
def test_any_input_in_any_state_is_legal_or_ends_it_cleanly(
    state: State, data: st.DataObject
) -> None:
    connection = in_state(state)
    drawn = data.draw(frames() | st.lists(handshakes, max_size=2))
    wire = b"".join(map(serialize, drawn)) + data.draw(st.binary(max_size=10))
    for index in range(0, len(wire), 50):
        connection.receive_data(wire[index : index + 50], 0.0)
    events = connection.events()
    ends = [event for event in events if isinstance(event, ConnectionFailed)]
    assert len(ends) == connection.closed
    if ends:
        frame = b"".join(connection.data_to_send())
        assert isinstance(ends[0].error, PeerError) or frame


# -------------------------------------------------------------------------------------- messages


class TestMessages:
    def test_both_ways(self) -> None:
        client, server = pair()
        for end, other in ((client, server), (server, client)):
            assert end.send_message("queue/q", b"hi", {"a": 1, "b": True, "c": 0.5}) == 1
            pump(client, server)
            assert other.events() == [
                MessageReceived(1, "queue/q", {"a": 1, "b": "true", "c": 0.5}, b"hi")
            ]

    def test_a_large_payload_is_split_and_put_together(self) -> None:
        client, server = pair()
        payload = bytes(range(256)) * 4096 * 3 + b"tail"
        assert client.send_message("queue/q", payload, {"a": 1}) == 4
        pump(client, server)
        assert server.events() == [MessageReceived(4, "queue/q", {"a": 1}, payload)]
        assert client.send_message("queue/q", b"") == 5

    def test_a_run_is_sent_like_single_messages(self) -> None:
        client, server = pair(Offer(required=(batch_ack(10),)))
        prefix = message_prefix(b"queue/q", b"a:N1;")
        payloads = [b"", b"x", b"y" * 255, b"z" * 256, b"w" * 65536]
        assert client.send_run([(prefix, payload) for payload in payloads]) == [1, 2, 3, 4, 5]
        pump(client, server)
        assert server.events() == [
            MessageReceived(number, "queue/q", {"a": 1}, payload)
            for number, payload in enumerate(payloads, 1)
        ]

    @pytest.mark.parametrize("agreed", [(batch_ack(2),), ("json",), ("dotnet",)])
    def test_a_run_that_can_not_be_sent(self, agreed: tuple[Any, ...]) -> None:
        connection = opened(*agreed)
        with pytest.raises(LocalProtocolError):
            connection.send_run([(message_prefix(b"q", b""), b"")] * 3)
        assert sent(connection) == []

    def test_exactly_a_mebibyte_is_one_frame(self) -> None:
        client, _ = pair()
        assert client.send_message("queue/q", bytes(1 << 20)) == 1
        assert client.send_message("queue/q", bytes((1 << 20) + 1)) == 3

    def test_other_frames_may_come_between(self) -> None:
        connection = opened("pub-sub", "dotnet")
        events = receive(
            connection,
            ExtensionFrame(2, b"First"),
            Message(1, "q", b"a:N1;", b"x", True),
            Command("subscribe", {"destination": "topic/t"}),
            ExtensionFrame(2, b"Second"),
            Message(2, "", b"", b"y"),
        )
        assert isinstance(events[0], SubscribeReceived)
        assert events[1] == MessageReceived(2, "q", {"a": 1, "dotnet-type": "First"}, b"xy")

    def test_a_message_has_a_limit(self) -> None:
        connection = opened(limits=MicroMsg2Limits(message_bytes=10))
        events = receive(
            connection,
            Message(1, "q", b"", b"x" * 6, True),
            Message(2, "", b"", b"x" * 4, True),
            Message(3, "", b"", b"", True),
        )
        assert events == []
        receive(connection, Message(4, "", b"", b"x", True))
        assert sent(connection)[0].name == "limit"

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (("", b""), "1 to 255"),
            (("q" * 256, b""), "1 to 255"),
            (("q", b"", {"a": "x" * 65536}), "65535"),
        ],
    )
    def test_what_has_no_room_in_a_frame(self, arguments: tuple[Any, ...], reason: str) -> None:
        connection = opened()
        with pytest.raises(LocalProtocolError, match=reason):
            connection.send_message(*arguments)
        assert (connection.data_to_send(), connection.send_message("q", b"")) == ([], 1)


@pytest.mark.parametrize(
    ("wire", "name"),
    [
        pytest.param("03", "malformed", id="two types"),
        pytest.param("20", "malformed", id="an undefined flag"),
        pytest.param("110973756273637269626500", "malformed", id="a continued command"),
        pytest.param("12010100", "malformed", id="a continued extension frame"),
        pytest.param("0000000171000000", "malformed", id="sequence 0"),
        pytest.param("0000020171000000", "malformed", id="a gap"),
        pytest.param("00000100000000", "malformed", id="no destination"),
        pytest.param("00000101ff000000", "malformed", id="a destination that is not UTF-8"),
        pytest.param("1000010171000000 0000020171000000", "malformed", id="a message between"),
        pytest.param("00000101710001610000", "malformed", id="properties that are none"),
        pytest.param("000001017100053a4e313b3b00", "malformed", id="an empty property name"),
        pytest.param("00000101710004613a543b00 00000201710005613a54257a00", "malformed", id="%"),
        pytest.param("0900100001", "limit", id="a large command"),
        pytest.param("0800010171000000100001", "limit", id="a large message"),
        pytest.param("020000", "malformed", id="extension number 0"),
        pytest.param("020900", "malformed", id="an extension number that was not agreed"),
        pytest.param("020100", "malformed", id="an ack without a number"),
        pytest.param("0201020001", "malformed", id="an ack of nothing outstanding"),
        pytest.param("0201020000", "malformed", id="an ack of 0"),
        pytest.param("020200", "malformed", id="a frame of an extension that has none"),
        pytest.param("0203 01ff", "malformed", id="a type name that is not UTF-8"),
        pytest.param("010461626364", "malformed", id="an unknown command"),
        pytest.param("0109737562736372696265", "malformed", id="no destination in a command"),
        pytest.param("0100", "malformed", id="a command without a name"),
        pytest.param(
            "00000101710000000000020171000000000003017100000000000401710000000000050171000000",
            "limit",
            id="more frames than the window",
        ),
    ],
)
def test_violations(wire: str, name: str) -> None:
    connection = opened(batch_ack(4), "pub-sub", "dotnet")
    connection.receive_data(bytes.fromhex(wire), 0.0)
    assert isinstance(connection.events()[-1], ConnectionFailed)
    (sent_frame,) = [frame for frame in sent(connection) if isinstance(frame, Error)]
    assert sent_frame.name == name and sent_frame.arguments["description"]
    assert connection.closed


def test_a_violation_in_the_content_has_an_offset() -> None:
    connection = opened()
    start = len(serialize(hello())) * 2
    error = failure(receive(connection, message(1), Message(2, "q", b"a", b"")))
    assert isinstance(error, MalformedFrame)
    assert error.offset == start + len(serialize(message(1)))


# ------------------------------------------------------------------------------------------ acks


class TestAcknowledgements:
    def test_one_ack_for_all_that_became_safe(self) -> None:
        client, server = pair(Offer(required=(batch_ack(10),)))
        for _ in range(3):
            client.send_message("q", b"")
        pump(client, server)
        for event in server.events():
            assert isinstance(event, MessageReceived)
            server.acknowledge(event.sequence)
        assert sent(server) == [ExtensionFrame(1, b"\0\3")]

    def test_the_sender_is_notified(self) -> None:
        client, server = pair(Offer(required=(batch_ack(10),)))
        numbers = [client.send_message("q", b"") for _ in range(3)]
        pump(client, server)
        server.acknowledge(numbers[0])
        server.acknowledge(numbers[1])
        pump(client, server)
        assert client.events() == [MessagesAcknowledged([1, 2])]

    def test_the_window_is_kept(self) -> None:
        client, _ = pair(Offer(required=(batch_ack(2),)))
        client.send_message("q", b"")
        client.send_message("q", b"")
        assert client.credit == 0
        with pytest.raises(LocalProtocolError, match="window"):
            client.send_message("q", b"")

    def test_a_large_message_passes_a_window_of_one(self) -> None:
        client, server = pair(Offer(required=names("ack")))
        number = client.send_message("q", bytes(5 << 20))
        assert (number, client.credit) == (5, 0)
        pump(client, server)
        assert server.events() == [MessageReceived(5, "q", {}, bytes(5 << 20))]
        assert (client.credit, client.unacknowledged) == (0, 1)
        server.acknowledge(5)
        pump(client, server)
        assert client.events() == [MessagesAcknowledged([5])]
        assert client.credit == 1

    def test_a_continued_frame_is_acknowledged_on_receipt_the_last_when_safe(self) -> None:
        connection = opened(batch_ack(10))
        receive(connection, Message(1, "q", b"", b"x", True))
        assert sent(connection) == [ExtensionFrame(1, b"\0\1")]
        receive(connection, Message(2, "", b"", b"x"))
        assert sent(connection) == []
        connection.acknowledge(2)
        assert sent(connection) == [ExtensionFrame(1, b"\0\2")]

    def test_an_ack_makes_room_for_the_peer(self) -> None:
        connection = opened(batch_ack(2))
        for number in range(1, 20):
            receive(connection, message(number))
            connection.acknowledge(number)
            connection.data_to_send()
        assert not connection.closed

    def test_one_that_is_answered_goes_with_the_answer(self) -> None:
        connection = opened(batch_ack(10))
        receive(connection, message(1), now=5.0)
        connection.acknowledge_soon(1)
        assert sent(connection) == []
        connection.send_message("reply/1", b"y")
        assert sent(connection) == [message(1, b"y", "reply/1"), ExtensionFrame(1, b"\0\1")]
        assert connection.next_deadline() is None

    def test_without_an_answer_it_goes_after_a_moment(self) -> None:
        connection = opened(batch_ack(10))
        receive(connection, message(1), now=5.0)
        connection.acknowledge_soon(1)
        due = connection.next_deadline()
        assert due is not None and 5.0 < due < 5.1
        connection.handle_deadline(due)
        assert sent(connection) == [ExtensionFrame(1, b"\0\1")]
        assert not connection.closed and connection.next_deadline() is None

    def test_it_does_not_wait_where_the_peer_may(self) -> None:
        connection = opened(batch_ack(4))
        receive(connection, message(1))
        connection.acknowledge_soon(1)
        assert sent(connection) == []
        receive(connection, message(2))
        connection.acknowledge_soon(2)
        assert sent(connection) == [ExtensionFrame(1, b"\0\2")]

    def test_a_window_of_one_is_acknowledged_at_once(self) -> None:
        connection = opened("ack")
        receive(connection, message(1))
        connection.acknowledge_soon(1)
        assert sent(connection) == [ExtensionFrame(1, b"\0\1")]

    @pytest.mark.parametrize("urgent_first", [True, False])
    def test_one_that_may_wait_delays_no_other(self, urgent_first: bool) -> None:
        connection = opened(batch_ack(100))
        receive(connection, message(1), message(2))
        first, second = connection.acknowledge, connection.acknowledge_soon
        if not urgent_first:
            first, second = second, first
        first(1)
        second(2)
        assert sent(connection) == [ExtensionFrame(1, b"\0\2")]

    def test_without_the_extension_nothing_is_acknowledged(self) -> None:
        connection = opened()
        receive(connection, message(1))
        connection.acknowledge(1)
        assert connection.data_to_send() == []
        assert connection.credit > 1000

    def test_what_is_safe_is_acknowledged_before_a_goodbye(self) -> None:
        connection = opened(batch_ack(10))
        receive(connection, message(1))
        connection.acknowledge(1)
        connection.fail(DestinationFull("full"))
        assert [frame.frame_name for frame in sent(connection)] == ["extension", "error"]


# ------------------------------------------------------------------------------------ extensions


class TestJson:
    @pytest.mark.parametrize(
        "payload", [b"", b"nope", b'{"a":', b"{} x", b'"\xff"', b"[" * 100_000 + b"]" * 100_000]
    )
    def test_what_is_not_json_is_refused(self, payload: bytes) -> None:
        connection = opened("json")
        with pytest.raises(LocalProtocolError, match="not JSON"):
            connection.send_message("q", payload)
        assert isinstance(failure(receive(connection, message(1, payload))), MalformedFrame)
        assert sent(connection)[0].name == "malformed"

    @pytest.mark.parametrize("payload", [b"{}", b" [1, 2]\n", b'"\xc3\xa9"', b"1e999"])
    def test_json_passes_unchanged(self, payload: bytes) -> None:
        (event,) = receive(opened("json"), message(1, payload))
        assert event == MessageReceived(1, "q", {}, payload)

    def test_the_whole_counts_not_the_frame(self) -> None:
        events = receive(
            opened("json"), Message(1, "q", b"", b'{"a"', True), Message(2, "", b"", b":1}")
        )
        assert events == [MessageReceived(2, "q", {}, b'{"a":1}')]


class TestDotnet:
    def test_a_type_holds_until_another_comes(self) -> None:
        client, server = pair(Offer(required=names("dotnet")))
        types = ["A", "A", "B", None, "B"]
        for name in types:
            client.send_message("q", b"", {"dotnet-type": name} if name else {})
        wire = b"".join(client.data_to_send())
        assert wire.count(b"dotnet-type") == 0
        server.receive_data(wire, 0.0)
        received = [event for event in server.events() if isinstance(event, MessageReceived)]
        assert [event.properties.get("dotnet-type") for event in received] == types

    def test_only_a_change_takes_a_frame(self) -> None:
        connection = opened("dotnet")
        for name in ("A", "A", "B"):
            connection.send_message("q", b"", {"dotnet-type": name})
        assert [frame.frame_name for frame in sent(connection)] == [
            "extension",
            "message",
            "message",
            "extension",
            "message",
        ]

    def test_without_the_extension_it_is_a_property(self) -> None:
        client, server = pair()
        client.send_message("q", b"", {"dotnet-type": "A.B, C"})
        pump(client, server)
        assert server.events() == [MessageReceived(1, "q", {"dotnet-type": "A.B, C"}, b"")]


class TestPubSub:
    def test_commands(self) -> None:
        client, server = pair(Offer(required=names("pub-sub")))
        client.send_subscribe(
            "topic/t", filter="price>N10;name&Ta b", name="n", start="earliest", window=5
        )
        client.send_subscribe("queue/q")
        client.send_unsubscribe("topic/t")
        client.send_serve("service/s")
        pump(client, server)
        full, short, gone, serve = server.events()
        assert isinstance(full, SubscribeReceived)
        assert (full.destination, full.filter, full.name, full.start, full.window) == (
            "topic/t",
            "price>N10;name&Ta b",
            "n",
            "earliest",
            5,
        )
        assert short == SubscribeReceived(
            "queue/q", None, None, None, None, {"destination": "queue/q"}
        )
        assert isinstance(gone, UnsubscribeReceived) and gone.destination == "topic/t"
        assert isinstance(serve, ServeReceived) and serve.destination == "service/s"

    def test_a_command_does_not_overtake_an_ack(self) -> None:
        client, server = pair(Offer(required=(*names("pub-sub"), batch_ack(5))))
        server.send_message("queue/q", b"")
        pump(client, server)
        client.acknowledge(1)
        client.send_unsubscribe("queue/q")
        assert [frame.frame_name for frame in sent(client)] == ["extension", "command"]

    @pytest.mark.parametrize("command", ["subscribe", "unsubscribe", "serve"])
    def test_they_need_the_extension(self, command: str) -> None:
        connection = opened()
        receive(connection, Command(command, {"destination": "topic/t"}))
        assert sent(connection)[0].name == "extension"
        client, _ = pair()
        with pytest.raises(LocalProtocolError, match="pub-sub"):
            getattr(client, f"send_{command}")("topic/t")

    def test_a_server_does_not_send_them(self) -> None:
        client, server = pair(Offer(required=names("pub-sub")))
        with pytest.raises(LocalProtocolError):
            server.send_subscribe("topic/t")
        error = failure(receive(client, Command("subscribe", {"destination": "t"})))
        assert isinstance(error, UnexpectedFrame)

    @pytest.mark.parametrize("window", ["0", "x", "", "-1", "1" * 10])
    def test_a_window_is_a_number(self, window: str) -> None:
        connection = opened("pub-sub")
        receive(connection, Command("subscribe", {"destination": "t", "window": window}))
        assert sent(connection)[0].name == "malformed"


class Rung(Event, frozen=True):
    times: int


class Bell(VendorExtension):
    name = "x-bell"

    def ring(self, times: int) -> None:
        self.send(bytes([times]))

    def receive(self, payload: bytes) -> Iterable[Event]:
        if len(payload) != 1:
            raise MalformedFrame("a bell rings a number of times")
        return [Rung(payload[0] * int(self.properties["loudness"]))]


class TestVendorExtensions:
    offer = Offer(optional=(Extension("x-bell", {"loudness": "3"}),), vendor=(Bell,))

    def test_one_that_is_plugged_in_owns_its_frames(self) -> None:
        client, server = pair(self.offer, Offer(vendor=(Bell,)))
        bell = client.vendor("x-bell")
        assert isinstance(bell, Bell)
        bell.ring(2)
        pump(client, server)
        assert server.events() == [Rung(6)]

    def test_what_it_refuses_ends_the_connection(self) -> None:
        client, server = pair(self.offer, Offer(vendor=(Bell,)))
        client.send_extension("x-bell", b"too long")
        pump(client, server)
        assert isinstance(failure(server.events()), MalformedFrame)
        assert isinstance(failure(client.events()), PeerError)

    def test_one_that_is_only_named_gives_events(self) -> None:
        client, server = pair(self.offer, Offer(supported=frozenset({"x-bell"})))
        client.send_extension("x-bell", b"\5")
        pump(client, server)
        assert server.events() == [ExtensionReceived("x-bell", b"\5")]

    def test_one_that_was_not_agreed_has_no_frames(self) -> None:
        client, _ = pair(self.offer)
        with pytest.raises(LocalProtocolError):
            client.send_extension("x-bell", b"\5")
        with pytest.raises(KeyError):
            client.vendor("x-bell")

    def test_its_name_starts_with_x(self) -> None:
        with pytest.raises(ValueError, match="x-"):
            Offer(vendor=(type("Odd", (Bell,), {"name": "bell"}),))


# ---------------------------------------------------------------------------------------- ending


class TestEnding:
    @pytest.mark.parametrize(
        ("error", "name"),
        [
            (InvalidDestination("x"), "unknown-destination"),
            (ConnectionRejected("x"), "forbidden"),
            (Forbidden("x"), "forbidden"),
            (SubscriptionConflict("x"), "forbidden"),
            (DestinationFull("x"), "limit"),
            (StoreFull("x"), "limit"),
            (ServiceUnavailable("x"), "limit"),
            (InvalidFilter("x"), "malformed"),
            (InvalidEnvelope("x"), "malformed"),
            (CrosswireError("x"), "internal"),
        ],
    )
    def test_the_owners_reason_has_a_name(self, error: CrosswireError, name: str) -> None:
        connection = opened()
        connection.fail(error)
        assert sent(connection) == [Error(name, {"description": str(error)})]
        assert connection.events() == [ConnectionFailed(error)]

    def test_a_long_description_is_cut(self) -> None:
        connection = opened()
        connection.fail(CrosswireError("é" * 5000))
        (frame,) = sent(connection)
        assert frame.arguments["description"] == "é" * 1000

    def test_the_peers_error_is_reported_and_not_answered(self) -> None:
        connection = opened()
        error = failure(receive(connection, Error("Forbidden", {}), message(1)))
        assert isinstance(error, PeerError) and error.code == "forbidden"
        assert connection.data_to_send() == []

    def test_closing_sends_nothing(self) -> None:
        connection = opened()
        connection.close()
        assert connection.data_to_send() == []
        assert connection.events() == [ConnectionClosed(clean=True)]

    def test_the_end_of_the_bytes(self) -> None:
        connection = opened()
        connection.receive_eof()
        assert connection.events() == [ConnectionClosed(clean=False)]

    def test_nothing_follows_the_end(self) -> None:
        connection = opened(batch_ack(5))
        receive(connection, message(1))
        connection.close()
        connection.events()
        connection.data_to_send()
        assert receive(connection, message(2)) == []
        connection.acknowledge(1)
        connection.close()
        connection.receive_eof()
        connection.handle_deadline(1e9)
        assert (connection.events(), connection.data_to_send(), connection.credit) == ([], [], 0)
