"""Links: sequence numbers, transactions, closing, resuming, saving."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosswire.errors import LimitExceeded, LinkStateError, LocalProtocolError, UnexpectedFrame
from crosswire.wire.contract import Event, Frame
from crosswire.wire.relink.channels import ahead
from crosswire.wire.relink.events import (
    Acknowledged,
    ChannelClosed,
    CloseReceived,
    CommitReceived,
    MessageReceived,
    RollbackReceived,
)
from crosswire.wire.relink.frames import (
    ChannelAcknowledgement,
    ChannelOperation,
    Message,
    RelinkLimits,
    Resume,
    SequenceAcknowledgement,
    SequenceOperation,
    Shutdown,
    Zeros,
)
from crosswire.wire.relink.handshake import LinkTerms
from crosswire.wire.relink.link import Link
from tests.wire.relink.strategies import Ends
from tests.wire.stream import pump


def attached(*, start: int = 0, limits: RelinkLimits | None = None, **terms: bool | int) -> Link:
    agreed = LinkTerms(endpoint="e", **terms)  # type: ignore[arg-type]
    link = Link("connector", agreed, epoch=1, id=7, start=start, limits=limits)
    link.attach(resumed=False)
    return link


def resumed(link: Link) -> list[Frame]:
    """What the link sends first on its next connection."""
    link.detach()
    link.attach(resumed=True)
    return link.packets()


def give(link: Link, *packets: Frame) -> list[Event]:
    events: list[Event] = []
    for packet in packets:
        link.receive(packet, events)
    return events


def message(*parts: bytes, channel: int = 0) -> Message:
    return Message((channel,), False, parts)


def acks(*names: str, channel: int = 0) -> list[Frame]:
    """`consumed 3` is a sequence acknowledgement, `consumed` a channel acknowledgement."""
    packets: list[Frame] = []
    for name in names:
        kind, _, sequence = name.partition(" ")
        if sequence:
            packets.append(SequenceAcknowledgement(kind, (channel,), int(sequence)))  # type: ignore[arg-type]
        else:
            packets.append(ChannelAcknowledgement(kind, (channel,)))  # type: ignore[arg-type]
    return packets


# ------------------------------------------------------------------------------ sequence numbers


@given(st.integers(0, 2**40), st.integers(0, 2**31 - 1))
def test_a_number_ahead_names_a_range(mark: int, count: int) -> None:
    assert ahead((mark + count - 1) % 2**32, mark) == count


@given(st.integers(0, 2**40), st.integers(1, 2**31 - 1))
def test_a_number_before_the_mark_names_nothing(mark: int, count: int) -> None:
    assert ahead((mark - 1 - count) % 2**32, mark) == 0


@given(st.integers(0, 2**40))
def test_a_number_exactly_half_way_round_is_a_violation(mark: int) -> None:
    with pytest.raises(UnexpectedFrame):
        ahead((mark - 1 + 2**31) % 2**32, mark)


def test_numbers_wrap_at_two_to_the_32() -> None:
    ends = Ends.fresh(start=2**32 - 2)
    connector, listener = ends.connect()
    assert [connector.send_message(0, b"x") for _ in range(4)] == [2**32 - 2, 2**32 - 1, 0, 1]
    pump(connector, listener)
    got = [event for event in listener.events() if isinstance(event, MessageReceived)]
    assert [event.sequence for event in got] == [2**32 - 2, 2**32 - 1, 0, 1]
    listener.send_consumed(0, 0)
    pump(connector, listener)
    assert connector.events()[-1] == Acknowledged("consumed", 0, 2**32 - 2, 0)
    assert ends.connector.unconsumed == 1


# ---------------------------------------------------------------------------------- cursors, window


def test_both_forms_of_an_acknowledgement_share_a_cursor() -> None:
    link = attached()
    for _ in range(5):
        link.send(0, [b"x"])
    assert give(link, *acks("received", "received 2", "received", "consumed 1", "consumed 1")) == [
        Acknowledged("received", 0, 0, 0),
        Acknowledged("received", 0, 1, 2),
        Acknowledged("received", 0, 3, 3),
        Acknowledged("consumed", 0, 0, 1),
    ]


def test_consumed_implies_received_and_a_kept_message_is_dropped() -> None:
    link = attached()
    link.send(0, [b"a"])
    link.send(0, [b"b"])
    give(link, *acks("consumed 0"))
    resumed(link)
    give(link, *acks("received 0", "consumed 0"), Resume())
    assert link.packets() == [message(b"b")]


def test_the_window_counts_unconsumed_messages() -> None:
    link = attached(limits=RelinkLimits(window=2))
    link.send(0, [b"a"])
    link.send(0, [b"b"])
    assert link.room(0) == 0 and link.room(1) == 2
    with pytest.raises(LocalProtocolError, match="no room"):
        link.send(0, [b"c"])
    with pytest.raises(LocalProtocolError, match="no room"):
        link.send_multicast([1, 1, 1], [b"c"])
    give(link, *acks("received 1"))
    assert link.room(0) == 0
    give(link, *acks("consumed 0"))
    assert link.room(0) == 1


def test_acknowledgements_are_reported_once_and_together() -> None:
    link = attached()
    give(link, *[message(b"x")] * 5)
    link.mark_received(0, 4)
    link.consume(0, 1)
    link.consume(0, 2)
    assert link.packets() == acks("received 4", "consumed 2")
    link.consume(0, 3)
    assert link.packets() == acks("consumed 3")
    link.mark_received(0, 2)
    assert link.packets() == []


@pytest.mark.parametrize("sequence", [1, 2**31 - 1])
def test_what_has_not_come_can_t_be_acknowledged(sequence: int) -> None:
    link = attached()
    give(link, message(b"x"))
    with pytest.raises(LocalProtocolError):
        link.consume(0, sequence)
    with pytest.raises(LocalProtocolError):
        link.mark_received(1, 0)


def test_a_multicast_to_nobody_and_a_message_without_parts() -> None:
    link = attached()
    assert link.send_multicast([], [b"x"]) == []
    assert link.send(0, []) == 0
    assert link.packets() == [Message((), True, (b"x",)), message()]
    assert give(link, Message((), True, (b"x",)), message()) == [MessageReceived(0, 0, ())]


def test_a_multicast_is_repeated_to_those_who_missed_it() -> None:
    link = attached()
    assert link.send_multicast([1, 2, 1], [b"x"]) == [0, 0, 1]
    resumed(link)
    give(link, *acks("received 0", channel=1), Resume())
    assert link.packets() == [message(b"x", channel=2), message(b"x", channel=1)]


@pytest.mark.parametrize(("size", "channel"), [(0, 1), (1, 256), (1, -1), (8, 2**64)])
def test_a_channel_must_fit_its_size(size: int, channel: int) -> None:
    with pytest.raises(LocalProtocolError, match="does not fit"):
        attached(connector_id_size=size).send(channel, [b"x"])


# ---------------------------------------------------------------------------------- transactions


def sender(*decisions: str) -> Link:
    """A link that sent a message for each decision on channel 0."""
    link = attached(connector_transactions=True)
    for decision in decisions:
        sequence = link.send(0, [decision.encode()])
        if decision == "commit":
            link.commit(0, sequence)
        elif decision == "rollback":
            link.rollback(0, sequence)
    link.packets()
    return link


def receiver(*packets: Frame) -> Link:
    link = attached(listener_transactions=True)
    give(link, *packets)
    return link


def test_commit_and_rollback_share_a_cursor() -> None:
    link = attached(listener_transactions=True)
    assert give(
        link,
        *[message(b"x")] * 5,
        ChannelOperation("commit", (0,)),
        SequenceOperation("rollback", (0,), 2),
        SequenceOperation("commit", (0,), 2),
        ChannelOperation("commit", (0,)),
    )[5:] == [
        CommitReceived(0, 0, 0),
        RollbackReceived(0, 1, 2),
        CommitReceived(0, 3, 3),
    ]


def test_a_commit_after_a_rollback_is_answered_with_its_number() -> None:
    link = receiver(
        *[message(b"x")] * 2, ChannelOperation("rollback", (0,)), ChannelOperation("commit", (0,))
    )
    assert link.packets() == acks("consumed 0")
    link.settle(0, 1)
    assert link.packets() == acks("committed 1")


def test_outcomes_of_different_kinds_are_distinguished() -> None:
    link = receiver(*[message(b"x")] * 4, SequenceOperation("commit", (0,), 3))
    for sequence, good in enumerate([True, True, False, True]):
        link.settle(0, sequence, committed=good)
    expected = acks("committed 1", "uncommitted 2", "committed 3")
    assert link.packets() == expected
    assert resumed(link) == [*acks("received 3"), *expected, *acks("consumed 3"), Resume()]


def test_outcomes_that_the_window_proves_known_are_forgotten() -> None:
    link = attached(listener_transactions=True, limits=RelinkLimits(window=2))
    for sequence in range(6):
        give(link, message(b"x"), ChannelOperation("commit", (0,)))
        link.settle(0, sequence, committed=sequence % 2 == 0)
    reported = acks("committed 4", "uncommitted 5")
    assert resumed(link) == [*acks("received 5"), *reported, *acks("consumed 5"), Resume()]


def test_a_range_of_outcomes_leaves_out_what_was_rolled_back() -> None:
    link = sender("commit", "rollback", "commit")
    assert give(link, *acks("committed 2")) == [
        Acknowledged("committed", 0, 0, 0),
        Acknowledged("committed", 0, 2, 2),
    ]
    assert link.unconsumed == 0


def test_a_rollback_may_be_acknowledged_by_uncommitted_or_consumed() -> None:
    assert give(sender("rollback"), *acks("uncommitted")) == []
    link = sender("rollback", "commit")
    assert give(link, *acks("consumed", "committed 1")) == [
        Acknowledged("consumed", 0, 0, 0),
        Acknowledged("committed", 0, 1, 1),
    ]
    with pytest.raises(UnexpectedFrame, match="without a sequence number"):
        give(sender("rollback", "commit"), *acks("consumed", "committed"))


def test_operations_not_acknowledged_are_repeated_after_their_messages() -> None:
    link = sender("commit", "rollback", "commit", "undecided")
    resumed(link)
    give(link, *acks("received 1"), *acks("committed 0"), Resume())
    assert link.packets() == [
        SequenceOperation("rollback", (0,), 1),
        message(b"commit"),
        SequenceOperation("commit", (0,), 2),
        message(b"undecided"),
    ]


def test_a_repeated_operation_names_nothing_new_in_either_form() -> None:
    link = receiver(*[message(b"x")] * 2, ChannelOperation("commit", (0,)))
    link.mark_received(0, 1)
    resumed(link)
    give(link, Resume())
    assert give(link, ChannelOperation("commit", (0,)), ChannelOperation("commit", (0,))) == [
        CommitReceived(0, 1, 1)
    ]


def test_what_is_reported_before_the_resume_is_bounded() -> None:
    link = attached(limits=RelinkLimits(window=2))
    link.send(0, [b"x"])
    resumed(link)
    with pytest.raises(LimitExceeded):
        give(link, *acks(*["received 0"] * 20))


@pytest.mark.parametrize(
    "packet",
    [
        SequenceAcknowledgement("received", Zeros(65536), 0, True),
        ChannelOperation("close", Zeros(65536), True),
    ],
    ids=repr,
)
def test_a_multicast_to_65536_times_the_same_channel_is_one_to_it(packet: Frame) -> None:
    link = attached(connector_id_size=0, listener_id_size=0)
    link.send(0, [b"x"])
    link.packets()
    assert len(give(link, packet)) + len(link.packets()) == 1


def test_our_own_mistakes_are_local_errors() -> None:
    plain, transactional = attached(), attached(connector_transactions=True)
    plain.send(0, [b"x"])
    give(plain, message(b"x"))
    transactional.send(0, [b"x"])
    for mistake in (
        lambda: plain.commit(0),
        lambda: plain.settle(0, 0),
        lambda: plain.close(1),
        lambda: transactional.commit(0, 1),
        lambda: transactional.commit(0, 2**31 - 1),
        lambda: transactional.commit(0, 2**32 - 1),
        lambda: transactional.rollback(1),
        transactional.shutdown,
        lambda: plain.attach(resumed=True),
    ):
        with pytest.raises(LocalProtocolError):
            mistake()
    with pytest.raises(LocalProtocolError):
        receiver(message(b"x"), ChannelOperation("commit", (0,))).consume(0, 0)


# --------------------------------------------------------------------------------------- closing


def test_closed_is_answered_when_all_was_consumed() -> None:
    link = attached()
    assert give(link, message(b"x"), ChannelOperation("close", (0,)))[-1] == CloseReceived(0)
    assert link.packets() == []
    link.consume(0, 0)
    assert link.packets() == acks("consumed 0", "closed")


def test_a_repeated_close_gets_closed() -> None:
    link = attached()
    assert give(link, ChannelOperation("close", (0,)), ChannelOperation("close", (0,))) == []
    assert link.packets() == acks("closed")


def test_a_channel_opened_again_starts_at_zero() -> None:
    link = attached()
    link.send(0, [b"a"])
    link.close(0)
    with pytest.raises(LocalProtocolError, match="being closed"):
        link.send(0, [b"b"])
    with pytest.raises(LocalProtocolError, match="already"):
        link.close(0)
    assert give(link, *acks("closed")) == [Acknowledged("consumed", 0, 0, 0), ChannelClosed(0)]
    assert link.send(0, [b"b"]) == 0
    give(link, message(b"1"), ChannelOperation("close", (0,)))
    link.consume(0, 0)
    assert give(link, message(b"2")) == [MessageReceived(0, 0, (b"2",))]


def test_messages_of_a_closed_channel_are_not_asked_for_again() -> None:
    """Message, close, consumed and closed: and the peer has received none of our answers."""
    link = attached()
    give(link, message(b"x"), ChannelOperation("close", (0,)))
    link.consume(0, 0)
    link.packets()
    assert resumed(link) == [*acks("received 0", "consumed 0", "closed"), Resume()]


def test_a_pong_proves_that_closed_was_received() -> None:
    link = attached()
    give(link, message(b"x"), ChannelOperation("close", (0,)))
    link.consume(0, 0)
    closures = link.closures
    give(link, message(b"y", channel=1), ChannelOperation("close", (1,)))
    link.consume(1, 0)
    link.confirm(closures)
    reported = acks("received 0", "consumed 0", "closed", channel=1)
    assert resumed(link) == [*reported, Resume()]


def test_closed_before_the_resume_answers_the_close_that_is_pending() -> None:
    link = attached()
    link.send(0, [b"x"])
    link.close(0)
    resumed(link)
    assert give(link, *acks("received 0", "consumed 0", "closed"))[-1] == ChannelClosed(0)
    give(link, Resume())
    assert link.packets() == []


def test_closed_before_the_resume_may_be_about_an_earlier_life() -> None:
    link = attached()
    link.send(0, [b"1"])
    link.close(0)
    give(link, *acks("closed"))
    link.send(0, [b"2"])
    link.close(0)
    assert ChannelOperation("close", (0,)) in link.packets()[:2]
    resumed(link)
    give(link, *acks("received 0", "consumed 0", "closed"), Resume())
    assert link.packets() == [message(b"2")]
    give(link, *acks("received 0"))
    assert link.packets() == [ChannelOperation("close", (0,))]


def test_a_channel_that_the_peer_is_silent_about_was_closed() -> None:
    link = attached()
    link.send(0, [b"1"])
    link.send(0, [b"2"])
    link.close(0)
    give(link, *acks("received 0"))
    resumed(link)
    give(link, Resume())
    assert link.packets() == [ChannelOperation("close", (0,))]


def test_a_commit_that_is_repeated_after_the_close_finds_the_channel_closed() -> None:
    link = receiver(
        message(b"x"), ChannelOperation("close", (0,)), SequenceOperation("commit", (0,), 0)
    )
    link.mark_received(0, 0)
    resumed(link)
    give(link, Resume())
    link.settle(0, 0)
    again = (ChannelOperation("close", (0,)), SequenceOperation("commit", (0,), 0))
    assert give(link, *again) == []
    assert link.packets() == acks("committed 0", "closed")
    with pytest.raises(UnexpectedFrame, match="never sent"):
        give(link, SequenceOperation("commit", (0,), 1))


# --------------------------------------------------------------------------------------- resuming


def test_everything_is_reported_before_the_resume_and_nothing_is_sent_before_the_peers() -> None:
    link = attached()
    give(link, *[message(b"x")] * 3, message(b"y", channel=9))
    link.consume(0, 1)
    link.mark_received(9, 0)
    assert resumed(link) == [
        *acks("received 1", "consumed 1"),
        *acks("received 0", channel=9),
        Resume(),
    ]
    link.send(0, [b"z"])
    assert link.packets() == []
    give(link, Resume())
    assert link.packets() == [message(b"z")]


def test_what_had_arrived_unmarked_is_passed_over_when_it_is_repeated() -> None:
    link = attached()
    give(link, message(b"1"), message(b"2"))
    link.mark_received(0, 0)
    resumed(link)
    give(link, Resume())
    assert give(link, message(b"2"), message(b"3")) == [MessageReceived(0, 2, (b"3",))]


def test_messages_of_several_channels_are_repeated_in_the_order_they_were_sent() -> None:
    link = attached()
    for channel in (2, 1, 2, 3):
        link.send(channel, [b"x"])
    link.shutdown()
    link.packets()
    resumed(link)
    give(link, Resume())
    sent = [message(b"x", channel=channel) for channel in (2, 1, 2, 3)]
    assert link.packets() == [*sent, Shutdown()]


def test_no_message_after_the_shutdown() -> None:
    link = attached()
    link.send(0, [b"x"])
    link.shutdown()
    link.shutdown()
    assert link.packets() == [message(b"x"), Shutdown()] and link.room(0) == 0
    with pytest.raises(LocalProtocolError, match="shut down"):
        link.send(0, [b"y"])


def test_an_ended_link_is_of_no_more_use() -> None:
    link = attached()
    link.detach(ended=True)
    with pytest.raises(LocalProtocolError, match="ended"):
        link.send(0, [b"x"])
    with pytest.raises(LocalProtocolError, match="ended"):
        link.send_multicast([], [b"x"])
    with pytest.raises(LocalProtocolError):
        link.attach(resumed=True)


# ----------------------------------------------------------------------------------------- saving


def test_a_saved_link_resumes_where_it_was() -> None:
    link = attached(connector_transactions=True, listener_transactions=True)
    link.send(0, [b"a", memoryview(b"b")])
    link.commit(0)
    give(link, *[message(b"x")] * 3, SequenceOperation("commit", (0,), 2))
    link.settle(0, 0, committed=False)
    link.mark_received(0, 1)
    link = Link.restore(link.save())
    assert (link.epoch, link.id, link.terms.endpoint) == (1, 7, "e")
    assert link.held_bytes == link.unconsumed_bytes == 1
    reported = acks("received 1", "uncommitted 0", "consumed 0")
    assert resumed(link) == [*reported, Resume()]
    give(link, Resume())
    assert link.packets() == [message(b"a", b"b"), SequenceOperation("commit", (0,), 0)]
    repeated = give(link, message(b"x"), SequenceOperation("commit", (0,), 2))
    assert repeated == [MessageReceived(0, 2, (b"x",)), CommitReceived(0, 2, 2)]


@pytest.mark.parametrize("data", [b"", b"\xc0", b"\x90", b"\x9f" + bytes(20)])
def test_a_damaged_link_is_refused(data: bytes) -> None:
    with pytest.raises(LinkStateError, match="damaged"):
        Link.restore(data)


def test_a_link_of_another_version_is_refused() -> None:
    data = bytearray(attached().save())
    data[1] = 99
    with pytest.raises(LinkStateError, match="version 99"):
        Link.restore(bytes(data))
