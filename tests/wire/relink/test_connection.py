"""A Relink connection: handshake, health, and every violation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.errors import (
    ConnectionRejected,
    InvalidHandshake,
    LimitExceeded,
    LocalProtocolError,
    PeerTimeout,
    RemoteProtocolError,
    UnexpectedFrame,
    UnsupportedVersion,
)
from crosswire.wire.contract import Event, Frame
from crosswire.wire.relink.connection import TRANSITIONS, RelinkConnection, State
from crosswire.wire.relink.decoder import RelinkDecoder
from crosswire.wire.relink.events import (
    Acknowledged,
    CommitReceived,
    ConnectionClosed,
    ConnectionFailed,
    HandshakeReceived,
    LinkForgotten,
    LinkOpened,
    LinkResumed,
    MessageReceived,
    ShutdownReceived,
)
from crosswire.wire.relink.frames import (
    ChannelAcknowledgement,
    ChannelOperation,
    Message,
    Nop,
    Ping,
    Pong,
    RelinkLimits,
    Resume,
    SequenceAcknowledgement,
    SequenceOperation,
    Shutdown,
    serialize,
)
from crosswire.wire.relink.handshake import (
    ConnectorHello,
    ConnectorVersion,
    LinkTerms,
    ListenerHello,
    ListenerVersion,
    serialize_handshake,
)
from crosswire.wire.relink.link import Link, Phase
from tests.wire.relink.strategies import EPOCH, Ends, connector_start, layout_of, open_ends
from tests.wire.stream import pump

TERMS = LinkTerms(endpoint="e")


def give(connection: RelinkConnection, *packets: Frame, now: float = 0.0) -> list[Event]:
    """Packets as the peer of this connection would send them."""
    terms = connection.link.terms
    peer = "listener" if connection.role == "connector" else "connector"
    at = layout_of(peer, (terms.connector_id_size, terms.listener_id_size))
    for packet in packets:
        connection.receive_data(b"".join(serialize(packet, at)), now)
    return connection.events()


def packets_sent(connection: RelinkConnection) -> list[Frame]:
    """Packets that this connection wants to be sent."""
    terms = connection.link.terms
    hints = {
        "connector_id_size": terms.connector_id_size,
        "listener_id_size": terms.listener_id_size,
    }
    decoder = RelinkDecoder(connection.role, hints=hints)
    decoder.feed(connector_start((hints["connector_id_size"], hints["listener_id_size"])))
    if connection.role == "listener":
        decoder = RelinkDecoder("listener", hints=hints)
        decoder.feed(bytes(16) + b"\1" + bytes(7))
    placed = decoder.feed(b"".join(connection.data_to_send()))
    return [item for _, _, item in placed if isinstance(item, Frame)]


def failure(events: list[Event]) -> Exception:
    last = events[-1]
    assert isinstance(last, ConnectionFailed), events
    return last.error


def message(channel: int = 0, *parts: bytes) -> Message:
    return Message((channel,), False, parts)


def old_link(role: str) -> Link:
    return Link(role, TERMS, epoch=EPOCH, id=7)


# ------------------------------------------------------------------------------------- handshake


def test_the_handshake_byte_by_byte() -> None:
    link = Link("connector", LinkTerms(endpoint="queue/q", connector_id_size=2))
    connector = RelinkConnection("connector", 0.0, link=link)
    listener = RelinkConnection("listener", 0.0)
    assert b"".join(connector.data_to_send()) == bytes(8)
    assert listener.data_to_send() == []
    listener.receive_data(bytes(8), 0.0)
    connector.receive_data(b"".join(listener.data_to_send()), 0.0)
    hello = b"".join(connector.data_to_send())
    assert hello.hex() == "0771756575652f71020100" + "00" * 21
    for octet in hello:
        listener.receive_data(bytes([octet]), 0.0)
    (asked,) = listener.events()
    assert isinstance(asked, HandshakeReceived) and asked.hello.endpoint == "queue/q"
    listener.accept(Link("listener", LinkTerms.of(asked.hello), epoch=EPOCH, id=7))
    answer = b"".join(listener.data_to_send())
    assert answer == EPOCH.to_bytes(8, "little") + b"\7" + bytes(7)
    connector.receive_data(answer, 0.0)
    assert connector.events() == listener.events() == [LinkOpened(EPOCH, 7, False)]
    assert (link.epoch, link.id) == (EPOCH, 7)


@pytest.mark.parametrize("theirs", [0, 1, 255])
def test_a_listener_answers_the_lower_version(theirs: int) -> None:
    listener = RelinkConnection("listener", 0.0)
    listener.receive_data(serialize_handshake(ConnectorVersion(theirs)), 0.0)
    assert listener.data_to_send() == [bytes(8)]
    assert not listener.closed


def test_a_connector_does_not_take_a_higher_version_than_it_offered() -> None:
    connector = RelinkConnection("connector", 0.0)
    connector.receive_data(serialize_handshake(ListenerVersion(1)), 0.0)
    assert isinstance(failure(connector.events()), UnsupportedVersion)


def asked(hello: ConnectorHello) -> RelinkConnection:
    listener = RelinkConnection("listener", 0.0)
    listener.receive_data(bytes(8) + serialize_handshake(hello), 0.0)
    listener.events()
    listener.data_to_send()
    return listener


def test_an_endpoint_that_nobody_knows_is_hung_up_on() -> None:
    listener = asked(ConnectorHello(endpoint="nope"))
    listener.refuse("no endpoint is named nope")
    assert isinstance(failure(listener.events()), ConnectionRejected)
    assert listener.data_to_send() == [] and listener.closed


def test_an_old_link_that_is_required_and_unknown_gets_the_zero_id() -> None:
    listener = asked(ConnectorHello(endpoint="e", require_old_link=True, epoch=EPOCH, link=7))
    with pytest.raises(LocalProtocolError, match="old link or none"):
        listener.accept(Link("listener", TERMS, epoch=EPOCH, id=8))
    listener.deny_link(EPOCH)
    assert listener.data_to_send() == [EPOCH.to_bytes(8, "little") + bytes(8)]
    assert listener.events() == [ConnectionClosed(clean=True)]


def answered(hello: ListenerHello, **options: bool) -> tuple[RelinkConnection, Link]:
    link = old_link("connector")
    connector = RelinkConnection("connector", 0.0, link=link, **options)  # type: ignore[arg-type]
    connector.receive_data(bytes(8) + serialize_handshake(hello), 0.0)
    return connector, link


def test_the_zero_id_means_that_the_link_is_lost() -> None:
    connector, link = answered(ListenerHello(EPOCH, 0), require_old_link=True)
    assert connector.events() == [LinkForgotten(EPOCH, 7), ConnectionClosed(clean=True)]
    assert link.ended


@pytest.mark.parametrize("hello", [ListenerHello(EPOCH, 8), ListenerHello(EPOCH + 1, 7)])
def test_another_id_or_epoch_discards_the_old_link(hello: ListenerHello) -> None:
    connector, link = answered(hello)
    assert connector.events() == [
        LinkForgotten(EPOCH, 7),
        LinkOpened(hello.epoch, hello.link, False),
    ]
    assert link.ended and connector.link is not link and connector.state is State.OPEN


def test_the_zero_id_without_being_asked_for_it_is_a_violation() -> None:
    connector, link = answered(ListenerHello(EPOCH, 0))
    assert isinstance(failure(connector.events()), InvalidHandshake)
    assert not link.ended


def test_a_new_link_where_the_old_one_was_required_is_a_violation() -> None:
    connector, link = answered(ListenerHello(EPOCH, 8), require_old_link=True)
    assert isinstance(failure(connector.events()), InvalidHandshake)
    assert not link.ended


@pytest.mark.parametrize(
    "other",
    [
        ConnectorHello(endpoint="other", epoch=EPOCH, link=7),
        ConnectorHello(endpoint="e", connector_id_size=2, epoch=EPOCH, link=7),
        ConnectorHello(endpoint="e", listener_id_size=0, epoch=EPOCH, link=7),
        ConnectorHello(endpoint="e", connector_transactions=True, epoch=EPOCH, link=7),
        ConnectorHello(endpoint="e", listener_transactions=True, epoch=EPOCH, link=7),
    ],
)
def test_an_old_link_on_other_terms_is_not_accepted(other: ConnectorHello) -> None:
    with pytest.raises(LocalProtocolError, match="another endpoint"):
        asked(other).accept(old_link("listener"))


def test_a_link_with_a_connection_is_taken_over_by_closing_that() -> None:
    ends = Ends.fresh()
    _, first = ends.connect()
    ends.connector.detach()
    second = asked(ConnectorHello(endpoint="e", epoch=EPOCH, link=7))
    with pytest.raises(LocalProtocolError, match="has a connection"):
        second.accept(ends.listener)
    first.close()
    assert not ends.listener.ended
    second.accept(ends.listener)
    assert second.events() == [LinkOpened(EPOCH, 7, True)]


def test_packets_before_the_answer_are_a_violation() -> None:
    listener = asked(ConnectorHello(endpoint="e"))
    listener.receive_data(serialize(Ping(), layout_of("connector", (1, 1)))[0], 0.0)
    assert isinstance(failure(listener.events()), UnexpectedFrame)


@pytest.mark.parametrize("role", ["connector", "listener"])
def test_the_handshake_has_five_seconds_in_all(role: str) -> None:
    connection = RelinkConnection(role, 10.0)
    connection.receive_data(bytes(8), 14.0)
    assert connection.next_deadline() == 15.0
    connection.handle_deadline(15.0)
    assert isinstance(failure(connection.events()), PeerTimeout)


def test_the_owner_has_no_longer_than_that() -> None:
    listener = asked(ConnectorHello(endpoint="e"))
    listener.handle_deadline(5.0)
    assert isinstance(failure(listener.events()), PeerTimeout)
    link = old_link("listener")
    listener.accept(link)
    listener.refuse("too late")
    listener.deny_link(1)
    assert link.phase is Phase.DETACHED
    assert listener.data_to_send() == [] and listener.events() == []


def test_there_is_no_link_before_the_handshake() -> None:
    with pytest.raises(LocalProtocolError):
        RelinkConnection("listener", 0.0).send_message(0, b"x")


# ---------------------------------------------------------------------------------------- health


def test_ping_after_ten_seconds_of_silence_and_the_link_survives_the_lack_of_a_pong() -> None:
    connector, _ = open_ends()
    give(connector, Nop(), now=3.0)
    assert connector.next_deadline() == 13.0
    connector.handle_deadline(13.0)
    assert packets_sent(connector) == [Ping()]
    assert connector.next_deadline() == 23.0
    give(connector, Nop(), now=20.0)
    connector.handle_deadline(23.0)
    assert isinstance(failure(connector.events()), PeerTimeout)
    assert not connector.link.ended


def test_a_pong_in_time() -> None:
    connector, listener = open_ends()
    connector.handle_deadline(10.0)
    pump(connector, listener, 11.0)
    assert connector.next_deadline() == 21.0
    assert connector.events() == listener.events() == []


def test_a_pong_may_follow_a_large_packet() -> None:
    connector, _ = open_ends()
    connector.handle_deadline(10.0)
    connector.receive_data(bytes.fromhex("5101070000000000") + b"\0\0\1" + bytes(5), 15.0)
    assert connector.next_deadline() == 25.0


def test_a_ping_is_answered_and_an_unasked_pong_ignored() -> None:
    connector, _ = open_ends()
    assert give(connector, Ping(), Pong(), Ping()) == []
    assert packets_sent(connector) == [Pong(), Pong()]


def test_a_pong_is_not_kept_for_the_next_connection() -> None:
    ends = Ends.fresh()
    connector, listener = ends.connect()
    give(connector, Ping())
    connector.receive_eof()
    listener.receive_eof()
    connector = RelinkConnection("connector", 0.0, link=ends.connector)
    connector.receive_data(bytes(8) + serialize_handshake(ListenerHello(EPOCH, 7)), 0.0)
    connector.data_to_send()
    assert packets_sent(connector) == []


def test_reading_stops_while_too_much_is_unconsumed() -> None:
    link = Link("listener", TERMS, epoch=EPOCH, id=7)
    listener = RelinkConnection("listener", 0.0, limits=RelinkLimits(unconsumed_bytes=100))
    listener.receive_data(bytes(8) + serialize_handshake(ConnectorHello(endpoint="e")), 0.0)
    listener.accept(link)
    give(listener, message(0, bytes(60)), message(0, bytes(60)))
    assert not listener.wants_data and listener.next_deadline() is None
    listener.send_consumed(0, 0)
    assert listener.wants_data and listener.next_deadline() == 10.0
    listener.handle_deadline(500.0)
    assert not listener.closed and listener.next_deadline() == 510.0


# ------------------------------------------------------------------------------------ violations


def marked(connection: RelinkConnection, count: int) -> None:
    """Let this connection have sent messages on channel 0."""
    for _ in range(count):
        connection.send_message(0, b"x")
    connection.data_to_send()


@pytest.mark.parametrize(
    "packets",
    [
        [Resume()],
        [Shutdown(), Shutdown()],
        [Shutdown(), message(0)],
        [ChannelOperation("commit", (0,))],
        [message(0), ChannelOperation("commit", (0,))],
        [message(0), SequenceOperation("rollback", (0,), 0)],
        [ChannelAcknowledgement("received", (1,))],
        [ChannelAcknowledgement("closed", (1,))],
        [ChannelAcknowledgement("closed", (0,))],
        [SequenceAcknowledgement("received", (0,), 3)],
        [SequenceAcknowledgement("consumed", (0,), 2)],
        [ChannelAcknowledgement("consumed", (0,))] * 3,
        [SequenceAcknowledgement("received", (0,), 2**31 - 1)],
        [SequenceAcknowledgement("committed", (0,), 0)],
        [ChannelAcknowledgement("uncommitted", (0,))],
        [message(0), ChannelOperation("close", (0,)), message(0)],
        [message(3), SequenceAcknowledgement("received", (3,), 0)],
    ],
    ids=repr,
)
def test_a_violation_ends_the_connection_and_the_link(packets: list[Frame]) -> None:
    connector, _ = open_ends()
    marked(connector, 2)
    assert isinstance(failure(give(connector, *packets)), UnexpectedFrame)
    assert connector.closed and connector.link.ended and connector.data_to_send() == []


@pytest.mark.parametrize(
    "packets",
    [
        [ChannelOperation("commit", (1,))],
        [SequenceOperation("commit", (0,), 2)],
        [message(0), SequenceOperation("commit", (0,), 1)],
        [message(0), SequenceOperation("commit", (0,), 2**31 - 1)],
        [message(0), *[ChannelOperation("rollback", (0,))] * 2],
    ],
    ids=repr,
)
def test_a_violation_by_a_sender_with_transactions(packets: list[Frame]) -> None:
    connector, _ = open_ends(listener_transactions=True)
    assert isinstance(failure(give(connector, *packets)), UnexpectedFrame)


@pytest.mark.parametrize(
    "packets",
    [
        [SequenceAcknowledgement("committed", (0,), 2)],
        [*[ChannelAcknowledgement("committed", (0,))] * 3],
        [ChannelAcknowledgement("committed", (0,)), ChannelAcknowledgement("committed", (0,))],
        [ChannelAcknowledgement("closed", (0,))],
    ],
    ids=repr,
)
def test_a_violation_by_a_receiver_with_transactions(packets: list[Frame]) -> None:
    """Message 0 was committed, message 1 rolled back, message 2 not decided; closing."""
    connector, _ = open_ends(connector_transactions=True)
    marked(connector, 3)
    connector.send_commit(0, 0)
    connector.send_rollback(0, 1)
    connector.send_close(0)
    connector.data_to_send()
    assert isinstance(failure(give(connector, *packets)), UnexpectedFrame)


def limited(**limits: int) -> RelinkConnection:
    chosen = RelinkLimits(**limits)
    listener = RelinkConnection("listener", 0.0, limits=chosen)
    hello = ConnectorHello(endpoint="e", connector_transactions=True)
    listener.receive_data(bytes(8) + serialize_handshake(hello), 0.0)
    listener.accept(Link("listener", LinkTerms.of(hello), epoch=EPOCH, id=7, limits=chosen))
    return listener


@pytest.mark.parametrize(
    ("limits", "packets"),
    [
        ({"window": 2}, [message(0)] * 3),
        ({"window": 2}, [Message((0, 0, 0), True, ())]),
        ({"channels": 2}, [message(0), message(1), message(2)]),
        ({"unconsumed_bytes": 10}, [message(0, bytes(6)), message(0, bytes(6))]),
    ],
    ids=repr,
)
def test_passing_a_limit_ends_the_connection(limits: dict[str, int], packets: list[Frame]) -> None:
    listener = limited(**limits)
    assert isinstance(failure(give(listener, *packets)), LimitExceeded)
    assert listener.link.ended


def test_1024_unconsumed_messages_are_allowed_on_each_channel() -> None:
    _, listener = open_ends()
    events = give(listener, *[message(0)] * 1024, *[message(1)] * 1024)
    assert len(events) == 2048
    assert isinstance(failure(give(listener, message(1))), LimitExceeded)


@pytest.mark.parametrize(
    "packet",
    [message(0), ChannelOperation("close", (0,)), SequenceOperation("commit", (0,), 0)],
    ids=repr,
)
def test_nothing_new_before_the_resume(packet: Frame) -> None:
    ends = Ends.fresh(listener_transactions=True)
    first, second = ends.connect()
    first.close()
    second.close()
    connector = RelinkConnection("connector", 0.0, link=ends.connector)
    connector.receive_data(bytes(8) + serialize_handshake(ListenerHello(EPOCH, 7)), 0.0)
    assert connector.state is State.RESUMING
    assert isinstance(failure(give(connector, packet)), UnexpectedFrame)


@pytest.mark.parametrize("state", [State.RESUMING, State.OPEN])
@settings(max_examples=60)
@given(data=st.data())
def test_what_is_not_in_the_table_is_a_violation(state: State, data: st.DataObject) -> None:
    kinds: list[Frame] = [Nop(), Ping(), Pong(), Resume(), Shutdown()]
    kinds += [message(0), ChannelOperation("close", (0,)), SequenceOperation("rollback", (0,), 0)]
    kinds += [ChannelAcknowledgement("received", (0,))]
    packet = data.draw(st.sampled_from(kinds))
    ends = Ends.fresh(listener_transactions=True)
    connections = ends.connect()
    if state is State.RESUMING:
        for connection in connections:
            connection.close()
        connector = RelinkConnection("connector", 0.0, link=ends.connector)
        connector.receive_data(bytes(8) + serialize_handshake(ListenerHello(EPOCH, 7)), 0.0)
    else:
        connector = connections[0]
    assert connector.state is state
    connector.send_message(0, b"x")
    events = give(connector, packet)
    expected = TRANSITIONS.get((state, type(packet)))
    if expected is None:
        assert isinstance(failure(events), RemoteProtocolError)
    elif not connector.closed:
        assert connector.state in expected


# ---------------------------------------------------------------------------------------- ending


def test_closing_keeps_the_link() -> None:
    ends = Ends.fresh()
    connector, listener = ends.connect()
    connector.send_message(0, b"x")
    connector.close()
    pump(connector, listener)
    listener.receive_eof()
    assert connector.events()[-1] == listener.events()[-1] == ConnectionClosed(clean=False)
    assert not ends.connector.ended and not ends.listener.ended
    connector, listener = ends.connect()
    assert LinkResumed() in connector.events()
    assert MessageReceived(0, 0, (b"x",)) not in listener.events()


def test_shutdown_by_both_ends_the_link_when_all_is_consumed() -> None:
    connector, listener = open_ends()
    connector.send_message(0, b"x")
    connector.send_shutdown()
    pump(connector, listener)
    assert listener.events() == [MessageReceived(0, 0, (b"x",)), ShutdownReceived()]
    listener.send_shutdown()
    pump(connector, listener)
    assert connector.events() == [ShutdownReceived()] and not connector.closed
    assert listener.events() == [] and not listener.closed
    listener.send_consumed(0, 0)
    assert listener.events() == [ConnectionClosed(clean=True)]
    pump(connector, listener)
    assert connector.events() == [Acknowledged("consumed", 0, 0, 0), ConnectionClosed(clean=True)]
    assert connector.link.ended and listener.link.ended


def test_a_peer_that_shuts_down_with_deliveries_unconsumed_is_not_waited_for() -> None:
    connector, listener = open_ends()
    listener.send_message(0, b"delivery")
    pump(connector, listener)
    connector.send_shutdown()
    pump(connector, listener)
    listener.send_shutdown()
    assert ConnectionClosed(clean=True) in listener.events()
    assert listener.link.ended and listener.link.unconsumed == 1


def test_after_a_shutdown_the_open_channels_may_still_be_used_by_the_peer() -> None:
    _, listener = open_ends()
    events = give(listener, message(0, b"1"), Shutdown(), message(0, b"2"))
    assert [type(event) for event in events] == [
        MessageReceived,
        ShutdownReceived,
        MessageReceived,
    ]


def test_a_commit_is_handed_on_with_its_range() -> None:
    connector, listener = open_ends(connector_transactions=True)
    for _ in range(3):
        connector.send_message(4, b"x")
    connector.send_commit(4, 1)
    pump(connector, listener)
    assert listener.events()[-1] == CommitReceived(4, 0, 1)
    listener.send_committed(4, 0)
    listener.send_uncommitted(4, 1)
    pump(connector, listener)
    assert connector.events() == [
        Acknowledged("committed", 4, 0, 0),
        Acknowledged("uncommitted", 4, 1, 1),
    ]
