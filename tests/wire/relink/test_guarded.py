"""A guarded link: the peer receives no acknowledgement before its owner has stored it."""

from __future__ import annotations

import pytest

from crosswire.wire.contract import Frame
from crosswire.wire.relink.connection import RelinkConnection
from crosswire.wire.relink.events import (
    CloseReceived,
    CommitReceived,
    HandshakeReceived,
    MessageReceived,
    RollbackReceived,
)
from crosswire.wire.relink.frames import (
    ChannelAcknowledgement,
    Message,
    Ping,
    SequenceAcknowledgement,
    serialize,
    serialize_all,
)
from crosswire.wire.relink.handshake import LinkTerms
from crosswire.wire.relink.layout import packet_layout
from crosswire.wire.relink.link import Link
from tests.wire.stream import pump


def linked(*, transactions: bool = False) -> tuple[Link, Link]:
    """A connector's link, and the guarded one that it talks to."""
    terms = LinkTerms(endpoint="e", connector_transactions=transactions)
    links = Link("connector", terms), Link("listener", terms)
    for link in links:
        link.attach(resumed=False)
    links[1].guarded = True
    return links


def transfer(sender: Link, receiver: Link) -> list[object]:
    events: list[object] = []
    for packet in sender.packets():
        receiver.receive(packet, events)  # type: ignore[arg-type]
    return events


def test_marks_made_on_a_copy_are_not_reported() -> None:
    connector, guarded = linked()
    connector.send(0, [b"m"])
    transfer(connector, guarded)
    tried = guarded.copy_channel(0)
    assert tried is not None
    tried.consume(0)
    assert guarded.packets() == []
    guarded.adopt(0, tried)
    assert guarded.packets() == [SequenceAcknowledgement("consumed", (0,), 0)]


def test_what_comes_meanwhile_is_not_adopted() -> None:
    connector, guarded = linked()
    connector.send(0, [b"1"])
    transfer(connector, guarded)
    tried = guarded.copy_channel(0)
    assert tried is not None
    tried.consume(0)
    connector.send(0, [b"2"])
    assert [type(event) for event in transfer(connector, guarded)] == [MessageReceived]
    guarded.adopt(0, tried)
    assert guarded.packets() == [SequenceAcknowledgement("consumed", (0,), 0)]
    assert guarded.held_bytes == 1


def test_a_rollback_waits_for_the_owner() -> None:
    connector, guarded = linked(transactions=True)
    connector.send(0, [b"m"])
    connector.rollback(0)
    assert [type(event) for event in transfer(connector, guarded)] == [
        MessageReceived,
        RollbackReceived,
    ]
    assert guarded.packets() == []
    tried = guarded.copy_channel(0)
    assert tried is not None
    tried.pass_rollbacks()
    guarded.adopt(0, tried)
    assert guarded.packets() == [SequenceAcknowledgement("consumed", (0,), 0)]


def test_a_later_decision_stays_open() -> None:
    connector, guarded = linked(transactions=True)
    connector.send(0, [b"1"])
    connector.commit(0)
    transfer(connector, guarded)
    tried = guarded.copy_channel(0)
    assert tried is not None
    tried.settle(0, True)
    connector.send(0, [b"2"])
    connector.commit(0)
    assert CommitReceived(0, 1, 1) in transfer(connector, guarded)
    guarded.adopt(0, tried)
    assert guarded.packets() == [SequenceAcknowledgement("committed", (0,), 0)]
    guarded.settle(0, 1, committed=False)
    assert guarded.packets() == [SequenceAcknowledgement("uncommitted", (0,), 1)]


def test_a_close_waits_for_the_owner() -> None:
    connector, guarded = linked()
    connector.send(0, [b"m"])
    connector.close(0)
    assert transfer(connector, guarded)[-1] == CloseReceived(0)
    tried = guarded.copy_channel(0)
    assert tried is not None
    tried.finish()
    assert guarded.packets() == []
    guarded.adopt(0, tried)
    assert guarded.packets() == [
        SequenceAcknowledgement("consumed", (0,), 0),
        ChannelAcknowledgement("closed", (0,)),
    ]
    assert guarded.copy_channel(0) is None


def test_a_run_is_sent_like_one_after_the_other() -> None:
    (one, _), (other, _) = linked(), linked()
    messages = [(b"1",), (b"2", b"3"), ()]
    one.send_run(5, messages)
    for parts in messages:
        other.send(5, parts)
    assert one.packets() == other.packets()
    assert one.save() == other.save()


def test_a_run_is_received_like_one_after_the_other() -> None:
    packets = [Message((1,), False, (b"a",))] * 3 + [Message((1, 2), True, (b"b",))]
    packets += [Message((2,), False, (b"c", b"d"))] * 2
    (_, one), (_, other) = linked(), linked()
    together: list[object] = []
    apart: list[object] = []
    one.receive_run(packets, together)  # type: ignore[arg-type]
    for packet in packets:
        other.receive(packet, apart)  # type: ignore[arg-type]
    assert together == apart
    assert (one.held_bytes, one.copy_channel(1), one.copy_channel(2)) == (
        other.held_bytes,
        other.copy_channel(1),
        other.copy_channel(2),
    )


@pytest.mark.parametrize("id_size", [0, 1, 2, 3, 8])
def test_packets_together_are_the_bytes_of_each(id_size: int) -> None:
    shape = packet_layout("connector", id_size, id_size)
    packets: list[Frame] = [
        Message((0,), False, (b"x" * size,)) for size in (0, 1, 8, 9, 9, 8192, 8193, 70_000)
    ]
    packets += [
        Ping(),
        Message((0, 0), True, (b"m",)),
        Message((0,), False, (b"m", b"n")),
        SequenceAcknowledgement("consumed", (0,), 7),
        Message((0,), False, ()),
    ]
    apart = b"".join(b"".join(serialize(packet, shape)) for packet in packets)
    assert b"".join(serialize_all(packets, shape)) == apart


def test_a_listener_that_is_held_reads_nothing_and_pings_nobody() -> None:
    connector = RelinkConnection("connector", 0.0, link=Link("connector", LinkTerms(endpoint="e")))
    listener = RelinkConnection("listener", 0.0)
    pump(connector, listener)
    (asked,) = listener.events()
    assert isinstance(asked, HandshakeReceived)
    listener.accept(Link("listener", LinkTerms(endpoint="e"), epoch=1, id=1))
    pump(connector, listener)
    listener.hold(True)
    assert (listener.wants_data, listener.next_deadline()) == (False, None)
    listener.hold(False)
    listener.handle_deadline(1000.0)
    assert listener.next_deadline() == 1000.0 + listener.limits.ping_interval_s
