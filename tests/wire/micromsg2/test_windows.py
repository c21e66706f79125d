"""Windows: two ends that send, acknowledge and wrap, against a simple model."""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from functools import cache

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from crosswire.errors import (
    LimitExceeded,
    LocalProtocolError,
    MalformedFrame,
    UnexpectedFrame,
)
from crosswire.wire.micromsg2.connection import MicroMsg2Connection
from crosswire.wire.micromsg2.events import MessageReceived, MessagesAcknowledged
from crosswire.wire.micromsg2.extensions import Offer, batch_ack
from crosswire.wire.micromsg2.frames import Extension, MicroMsg2Limits
from crosswire.wire.micromsg2.windows import ReceiveWindow, SendWindow
from tests.wire.stream import pump

FRAME_BYTES = 16
LIMITS = MicroMsg2Limits(frame_bytes=FRAME_BYTES)


def advance(connection: MicroMsg2Connection, peer: MicroMsg2Connection, count: int) -> None:
    """Move one direction's numbers on, honestly: sent, received and acknowledged."""
    while count:
        sent = [connection.send_message("q", b"") for _ in range(min(count, connection.credit))]
        count -= len(sent)
        pump(connection, peer)
        for number in sent:
            peer.acknowledge(number)
        pump(connection, peer)
        connection.events()
        peer.events()


@cache
def near_the_wrap(name: str, count: int) -> list[MicroMsg2Connection]:
    """Two ends that have three numbers left in each direction; made once, to be copied."""
    extension = batch_ack(count) if name == "batch-ack" else Extension(name, {})
    offer = Offer(required=(extension,))
    client = MicroMsg2Connection("client", 0.0, limits=LIMITS, offer=offer)
    server = MicroMsg2Connection("server", 0.0, limits=LIMITS)
    pump(client, server)
    client.events()
    server.events()
    advance(client, server, 65535 - 3)
    advance(server, client, 65535 - 3)
    return [client, server]


class TwoEnds(RuleBasedStateMachine):
    """The model: what was sent and not yet read, what was read and not yet acknowledged, what was
    acknowledged and not yet reported to the sender. The order is that of sending; nothing is lost
    or doubled."""

    window = 5
    extension = "batch-ack"

    def __init__(self) -> None:
        super().__init__()
        self.ends = deepcopy(near_the_wrap(self.extension, self.window))
        self.sent: list[deque[tuple[int, bytes]]] = [deque(), deque()]
        self.held: list[list[int]] = [[], []]
        self.order: list[deque[int]] = [deque(), deque()]
        self.safe: list[set[int]] = [set(), set()]
        self.counter = 0

    @rule(side=st.sampled_from([0, 1]), frames=st.integers(1, 12))
    def send(self, side: int, frames: int) -> None:
        end = self.ends[side]
        if not end.credit:
            with pytest.raises(LocalProtocolError):
                end.send_message("q", b"")
            return
        self.counter += 1
        payload = self.counter.to_bytes(4) + b"." * (FRAME_BYTES * frames - 4)
        number = end.send_message("q", payload, {"n": self.counter})
        self.sent[side].append((number, payload))
        self.order[side].append(number)

    @rule(side=st.sampled_from([0, 1]), crumbs=st.booleans())
    def carry(self, side: int, crumbs: bool) -> None:
        data = b"".join(self.ends[side].data_to_send())
        size = 7 if crumbs else max(len(data), 1)
        for start in range(0, len(data), size):
            self.ends[1 - side].receive_data(data[start : start + size], 0.0)
        self._take_events(1 - side)

    def _take_events(self, side: int) -> None:
        for event in self.ends[side].events():
            if isinstance(event, MessageReceived):
                assert (event.sequence, event.payload) == self.sent[1 - side].popleft()
                self.held[side].append(event.sequence)
            else:
                assert isinstance(event, MessagesAcknowledged)
                for number in event.sequences:
                    assert number == self.order[side].popleft()
                    self.safe[side].remove(number)

    @precondition(lambda self: self.held[0] or self.held[1])
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        side = 0 if self.held[0] and (not self.held[1] or data.draw(st.booleans())) else 1
        number = data.draw(st.sampled_from(self.held[side]))
        self.held[side].remove(number)
        self.ends[side].acknowledge(number)
        self.safe[1 - side].add(number)
        with pytest.raises(LocalProtocolError):
            self.ends[side].acknowledge(number)

    @invariant()
    def nobody_failed_and_no_window_is_passed(self) -> None:
        for end in self.ends:
            assert not end.closed
            assert 0 <= end.credit <= self.window

    def teardown(self) -> None:
        """Everything drains once everybody acknowledges."""
        while any(self.order):
            for side in (0, 1):
                self.carry(side, False)
                for number in self.held[side]:
                    self.ends[side].acknowledge(number)
                    self.safe[1 - side].add(number)
                self.held[side].clear()
        assert not any(self.sent)
        assert [end.credit for end in self.ends] == [self.window] * 2


class TwoEndsWithAck(TwoEnds):
    window = 1
    extension = "ack"


TestTwoEnds = TwoEnds.TestCase
TestTwoEndsWithAck = TwoEndsWithAck.TestCase
TestTwoEnds.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTwoEndsWithAck.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


class TestSendWindow:
    def test_an_ack_covers_all_before_it(self) -> None:
        window = SendWindow(5)
        assert [window.take(last=True) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert window.acknowledge(3) == [1, 2, 3]
        assert window.room == 3

    def test_the_example_of_the_specification(self) -> None:
        """65533 was the last acknowledged; 65534, 65535, 1, 2, 3 follow; an ack of 3 covers all."""
        window = SendWindow(65533)
        for _ in range(65533):
            window.take(last=True)
        window.acknowledge(65533)
        sent = [window.take(last=True) for _ in range(5)]
        assert sent == [65534, 65535, 1, 2, 3]
        assert window.acknowledge(3) == sent

    def test_only_the_last_frame_settles_a_message(self) -> None:
        window = SendWindow(5)
        window.take(last=False)
        window.take(last=True)
        assert window.acknowledge(1) == []
        assert window.acknowledge(2) == [2]

    @pytest.mark.parametrize("sequence", [1, 2, 5, 65535])
    def test_an_ack_of_nothing_outstanding(self, sequence: int) -> None:
        window = SendWindow(5)
        for _ in range(4):
            window.take(last=True)
        window.acknowledge(2)
        with pytest.raises(UnexpectedFrame):
            window.acknowledge(sequence)

    def test_zero(self) -> None:
        with pytest.raises(MalformedFrame):
            SendWindow(5).acknowledge(0)

    @pytest.mark.parametrize(
        ("sent", "frames", "last"), [(0, 1, 1), (65534, 1, 65535), (65534, 3, 2)]
    )
    def test_the_number_of_a_last_frame_is_known_before(
        self, sent: int, frames: int, last: int
    ) -> None:
        window = SendWindow(None)
        for _ in range(sent):
            window.take(last=True)
        assert window.last_of(frames) == last

    @pytest.mark.parametrize("sent", [0, 65533, 65534, 65535])
    def test_a_run_is_numbered_like_single_messages(self, sent: int) -> None:
        run, single = SendWindow(5), SendWindow(5)
        for window in (run, single):
            for _ in range(sent):
                window.acknowledge(window.take(last=True))
        numbers = run.take_run(3)
        assert numbers == [single.take(last=True) for _ in range(3)]
        assert run.acknowledge(numbers[-1]) == numbers
        assert run.take(last=True) == single.take(last=True)


class TestReceiveWindow:
    @pytest.mark.parametrize("first", [1, 65534])
    def test_a_run_is_acknowledged_at_once(self, first: int) -> None:
        window = ReceiveWindow(5)
        window.receive_run(first, 4)
        assert window.room == 1
        window.acknowledge(*[(first + index - 1) % 65535 + 1 for index in range(3)])
        assert (window.take_due(), window.waiting) == ((first + 1) % 65535 + 1, 1)

    def test_of_a_run_with_a_gap_only_the_beginning_is_due(self) -> None:
        window = ReceiveWindow(5)
        window.receive_run(1, 4)
        window.acknowledge(1, 3, 4)
        assert window.take_due() == 1
        window.acknowledge(2)
        assert (window.take_due(), window.waiting) == (4, 0)

    @pytest.mark.parametrize("sequences", [(1, 1), (1, 3), (2, 2)])
    def test_what_does_not_wait_is_not_among_others_either(self, sequences: tuple[int]) -> None:
        window = ReceiveWindow(5)
        window.receive_run(1, 2)
        with pytest.raises(LocalProtocolError):
            window.acknowledge(*sequences)

    def test_an_ack_waits_for_all_before_it(self) -> None:
        window = ReceiveWindow(5)
        for number in (1, 2, 3):
            window.receive(number, last=True)
        window.acknowledge(3)
        window.acknowledge(2)
        assert window.take_due() is None
        window.acknowledge(1)
        assert (window.take_due(), window.take_due()) == (3, None)

    def test_a_frame_to_be_continued_is_due_at_once(self) -> None:
        window = ReceiveWindow(5)
        window.receive(1, last=False)
        assert window.take_due() == 1

    def test_but_not_before_the_message_before_it(self) -> None:
        window = ReceiveWindow(5)
        window.receive(1, last=True)
        window.receive(2, last=False)
        assert window.take_due() is None
        window.acknowledge(1)
        assert window.take_due() == 2

    @pytest.mark.parametrize("sequence", [0, 2, 3, 65535])
    def test_what_does_not_wait_cannot_be_acknowledged(self, sequence: int) -> None:
        window = ReceiveWindow(5)
        window.receive(1, last=True)
        with pytest.raises(LocalProtocolError):
            window.acknowledge(sequence)


def test_an_acknowledgement_that_is_not_sent_gives_no_room() -> None:
    """A peer can't know of it: who sends more than its window gets away with it else, for as long
    as acknowledgements wait for answers."""
    window = ReceiveWindow(4)
    for sequence in range(1, 5):
        window.receive(sequence, last=True)
    window.acknowledge(1, 2)
    assert window.room == 0
    with pytest.raises(LimitExceeded):
        window.receive(5, last=True)
    assert window.take_due() == 2
    assert window.room == 2
    window.receive(5, last=True)
