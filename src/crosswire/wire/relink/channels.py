"""The two ends of a channel: what its sender and its receiver know of every message.

Messages are numbered by counting; the numbers are not sent with them (specification 3.1). In here
the count does not wrap; a sequence number on the wire does, at 2^32. A *mark* is the number of the
first message that something does not hold for yet, so that marks only grow:

    sender's end      settled ≤ decided ≤ next      consumed ≤ received ≤ next
    receiver's end    consumed ≤ received ≤ arrived      consumed ≤ decided ≤ arrived

`received` and `consumed` are the cursors of the acknowledgements of that name. Commit and rollback
share the cursor `decided`, committed and uncommitted the cursor `settled`: a message is decided
once, and has one outcome.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

import msgspec

from crosswire.errors import LimitExceeded, LocalProtocolError, UnexpectedFrame
from crosswire.wire.relink.frames import (
    Acknowledgement,
    Buffer,
    ChannelOperation,
    Message,
    Operation,
    SequenceAcknowledgement,
    SequenceOperation,
    Zeros,
)
from crosswire.wire.relink.layout import SEQUENCES

__all__ = [
    "Decision",
    "NumberedPacket",
    "Outcome",
    "Parts",
    "ReceivingChannel",
    "SendingChannel",
    "ahead",
    "checked_count",
    "count_named",
    "forget_oldest",
    "operation",
    "sequence_of",
    "targets",
]

_HALF: Final = SEQUENCES // 2

Parts = tuple[Buffer, ...]
NumberedPacket = tuple[int, Message | SequenceOperation | ChannelOperation]
"""A packet to be repeated, with its number in the order of first sending."""


def sequence_of(number: int) -> int:
    """The sequence number on the wire of a message's number."""
    return number % SEQUENCES


def ahead(sequence: int, mark: int) -> int:
    """How many messages a sequence number names from `mark` on: 0 if it is before the mark.

    Serial arithmetic: half of all numbers are before a mark, half after it. Raises UnexpectedFrame
    for the one exactly between, which could be either.
    """
    distance = (sequence - mark + 1) % SEQUENCES
    if distance == _HALF:
        raise UnexpectedFrame(f"sequence number {sequence} is exactly 2^31 away")
    return distance if distance < _HALF else 0


def checked_count(sequence: int, mark: int, end: int) -> int:
    """`ahead`, for the caller's numbers. Raises LocalProtocolError for one from `end` on."""
    try:
        count = ahead(sequence, mark)
    except UnexpectedFrame as error:
        raise LocalProtocolError(error.reason) from None
    if mark + count > end:
        raise LocalProtocolError(f"there is no message {sequence} to which that applies")
    return count


def count_named(packet: Any, mark: int) -> int:
    """How many messages from `mark` on an operation or acknowledgement names.

    Without a sequence number it names the one after the last that was named so (2.3.1).
    """
    return ahead(packet.sequence, mark) if hasattr(packet, "sequence") else 1


def targets(packet: Any) -> Sequence[int]:
    """The channels of an operation or acknowledgement.

    A multicast to ids of no bytes can name channel 0 up to 65,536 times. Repeating a sequence
    number or a close changes nothing, so that one time is enough for those.
    """
    channels: Sequence[int] = packet.channels
    if isinstance(channels, Zeros):
        closes = isinstance(packet, ChannelOperation) and packet.operation == "close"
        if closes or hasattr(packet, "sequence"):
            return (0,)
    return channels


def forget_oldest(memory: dict[int, Any], count: int) -> None:
    """Keep the `count` newest entries."""
    while len(memory) > count:
        del memory[next(iter(memory))]


class Decision(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Commit or rollback of the messages before the mark `bound` that were not decided before."""

    bound: int
    is_commit: bool
    order: int = 0


class Outcome(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The outcome of the commits before the mark `bound` that had none before."""

    bound: int
    is_success: bool


class SendingChannel(msgspec.Struct, array_like=True):
    """Our end of a channel that we send on.

    `kept` has the messages that the peer has not acknowledged as received, `decisions` the commits
    and rollbacks that it has not settled: they may have to be repeated. `close_order` is set when
    the channel is being closed. `reopened` channels had an earlier life on this link. `rolled_back`
    is true while the last decision that is done with was a rollback: see `settle`.
    """

    start: int
    next: int
    received: int
    consumed: int
    decided: int
    settled: int
    kept: list[tuple[int, tuple[bytes, ...]]]
    decisions: list[Decision]
    close_order: int | None = None
    reopened: bool = False
    rolled_back: bool = False

    @classmethod
    def open(cls, start: int, *, reopened: bool) -> SendingChannel:
        """A channel without messages."""
        return cls(start, start, start, start, start, start, [], [], reopened=reopened)

    @property
    def outstanding(self) -> int:
        """How many messages fill the window: those that the peer hasn't consumed."""
        return self.next - self.consumed

    @property
    def close_waits(self) -> bool:
        """The close of a reopened channel waits until the peer is known to have reopened it too.

        Else a `closed` that the peer repeats after a reconnection could mean either life of the
        channel.
        """
        return self.reopened and self.received == self.start

    def add(self, order: int, parts: Parts) -> int:
        """Keep a new message; gives its number."""
        self.kept.append((order, cast(tuple[bytes, ...], parts)))  # a view is saved as bytes
        self.next += 1
        return self.next - 1

    def add_run(self, order: int, run: Sequence[Parts]) -> int:
        """`add`, for many, with orders from `order` + 1 on; gives the last one's order."""
        first = order + 1
        order += len(run)
        self.kept += cast(
            list[tuple[int, tuple[bytes, ...]]],
            list(zip(range(first, order + 1), run, strict=True)),
        )
        self.next += len(run)
        return order

    def decide(self, bound: int, is_commit: bool, order: int) -> None:
        """Commit or roll back the messages before the mark `bound` that are undecided."""
        self.decisions.append(Decision(bound, is_commit, order))
        self.decided = bound

    def mark(self, kind: Acknowledgement, count: int) -> list[tuple[int, int]]:
        """Apply `received` or `consumed` of the next `count` messages; gives the range it names."""
        before = self.received if kind == "received" else self.consumed
        bound = before + count
        if bound > self.next:
            raise UnexpectedFrame(f"{kind} for a message that was never sent")
        if kind == "consumed":
            self.consumed = bound
            self._forget_rollbacks()
        self._mark_received(max(self.received, bound))
        return [(before, bound)] if count else []

    def settle(self, count: int, is_success: bool, explicit: bool) -> list[tuple[int, int]]:
        """Apply the outcome of the next `count` messages; gives the ranges of commits it names.

        The rolled back ones among them have no outcome. A rollback need not be acknowledged, and
        may have been missed in a reconnection, so that the outcome after one has to name its
        message by number (specification 3.2): without it, `explicit` is false, and both sides could
        mean different messages.
        """
        if not count:
            return []
        bound = self.settled + count
        if bound > self.decided:
            raise UnexpectedFrame("an outcome for a message that was never committed")
        first = self.decisions[0] if self.decisions else None
        after_rollback = self.rolled_back or (first is not None and not first.is_commit)
        if after_rollback and not explicit and (is_success or self.rolled_back):
            raise UnexpectedFrame("an outcome after a rollback without a sequence number")
        ranges = []
        while self.settled < bound:
            decision = self.decisions[0]
            end = min(decision.bound, bound)
            if decision.is_commit:
                ranges.append((self.settled, end))
            self.settled = end
            if end == decision.bound:
                self.decisions.pop(0)
        self.rolled_back = False
        self.consumed = max(self.consumed, bound)
        self._forget_rollbacks()
        self._mark_received(max(self.received, bound))
        return ranges

    def closed(self) -> list[tuple[int, int]]:
        """Apply `closed`: everything was consumed. Gives the range that was not known to be."""
        if self.close_order is None:
            raise UnexpectedFrame("closed for a channel that was not closed")
        if any(decision.is_commit for decision in self.decisions):
            raise UnexpectedFrame("closed before the outcome of a commit")
        left = (self.consumed, self.next)
        self.consumed = self.next
        self._mark_received(self.next)
        return [left] if left[0] < left[1] else []

    def repeated(self, channel: int, *, close_only: bool) -> Iterator[NumberedPacket]:
        """The packets that the peer hasn't acknowledged, to be sent again after a reconnection."""
        if not close_only:
            for order, parts in self.kept:
                yield order, Message((channel,), False, parts)
            for decision in self.decisions:
                yield decision.order, operation(channel, decision)
        if self.close_order is not None and not self.close_waits:
            yield self.close_order, ChannelOperation("close", (channel,))

    def _mark_received(self, bound: int) -> None:
        del self.kept[: bound - self.received]
        self.received = bound

    def _forget_rollbacks(self) -> None:
        """A rollback is acknowledged by the consumption of its messages: to a receiver, ignoring
        them on a rollback is the only way to consume what was not committed."""
        while self.decisions and not self.decisions[0].is_commit:
            if self.decisions[0].bound > self.consumed:
                return
            self.settled = self.decisions.pop(0).bound
            self.rolled_back = True


def operation(channel: int, decision: Decision) -> SequenceOperation:
    """The packet of a decision, always with a sequence number.

    It can be repeated, and means the same to a peer that has missed earlier ones.
    """
    name: Operation = "commit" if decision.is_commit else "rollback"
    return SequenceOperation(name, (channel,), sequence_of(decision.bound - 1))


class ReceivingChannel(msgspec.Struct, array_like=True):
    """Our end of a channel that the peer sends on.

    Four marks are about the link: `arrived`, `received` (stored by the owner), `consumed`,
    `decided`. Others are about this connection: `expected` and `cursor` are the next message and
    the next decision that the peer will send, `closing` is set when it has closed the channel, and
    `acknowledged_…` is what we have reported to it. After a reconnection `expected` and `cursor`
    return to what the peer knows to have arrived, and what it repeats below `arrived` and `decided`
    is ignored.

    `held_sizes` has the sizes of unconsumed messages, `undecided_sizes` those of undecided ones.
    `outcomes` are kept after they were reported, since a report can be lost with its connection.
    """

    start: int
    arrived: int
    expected: int
    received: int
    consumed: int
    decided: int
    cursor: int
    settled: int
    acknowledged_received: int
    acknowledged_consumed: int
    acknowledged_settled: int
    held_sizes: list[int] = []
    undecided_sizes: list[int] = []
    decisions: list[Decision] = []
    outcomes: list[Outcome] = []
    closing: bool = False
    close_reported: bool = False
    closed: bool = False
    held_bytes: int = 0
    undecided_bytes: int = 0

    @classmethod
    def open(cls, start: int) -> ReceivingChannel:
        """A channel on which nothing has arrived."""
        first = (start,) * 11
        return cls(*first)

    def arrive(self, size: int, window: int) -> bool:
        """Count the next message; false if it had arrived before the reconnection."""
        self.expected += 1
        if self.expected <= self.arrived:
            return False
        if self.closing:
            raise UnexpectedFrame("a message on a channel that is being closed")
        if self.arrived - self.consumed >= window:
            raise LimitExceeded(f"more than {window} unconsumed messages on a channel")
        self.arrived = self.expected
        self.held_sizes.append(size)
        self.held_bytes += size
        # The peer's window let it send this message only because it knows the outcomes of those
        # further back than a window: they need never be reported again.
        while self.outcomes and self.outcomes[0].bound <= self.arrived - window:
            self.outcomes.pop(0)
        return True

    def arrive_run(self, sizes: list[int], window: int) -> int | None:
        """`arrive`, for many; gives the first one's number. None, with nothing changed, if some of
        them are repeated, exceed the window or follow a close: then each has to be checked."""
        first = self.arrived
        count = len(sizes)
        if self.expected != first or self.closing or first + count - self.consumed > window:
            return None
        self.arrived = self.expected = first + count
        self.held_sizes += sizes
        self.held_bytes += sum(sizes)
        return first

    def decide(
        self, count: int, is_commit: bool, *, guarded: bool = False
    ) -> tuple[int, int] | None:
        """Apply a commit or rollback of the next `count` messages; gives the range that is new.

        On a guarded link, rolled back messages are not consumed before the owner has stored that.
        """
        if self.cursor + count > self.expected:
            raise UnexpectedFrame("an operation on a message that was never sent")
        self.cursor += count
        if self.cursor <= self.decided:
            return None
        before, self.decided = self.decided, self.cursor
        self.undecided_bytes -= sum(self.undecided_sizes[: self.decided - before])
        del self.undecided_sizes[: self.decided - before]
        self.decisions.append(Decision(self.decided, is_commit))
        if not guarded:
            self.pass_rollbacks()
        return before, self.decided

    def receive(self, sequence: int) -> None:
        """Everything up to `sequence` is stored."""
        self.received += checked_count(sequence, self.received, self.arrived)

    def consume(self, sequence: int) -> None:
        """The application has processed everything up to `sequence`."""
        bound = self.consumed + checked_count(sequence, self.consumed, self.arrived)
        self._free(bound)

    def settle(self, sequence: int, is_success: bool) -> None:
        """Like `consume`, for messages that the peer committed."""
        bound = self.settled + checked_count(sequence, self.settled, self.decided)
        if bound == self.settled:
            return
        while self.decisions and self.decisions[0].bound <= bound:
            self.decisions.pop(0)
        if self.outcomes and self.outcomes[-1].is_success == is_success:
            self.outcomes.pop()
        self.outcomes.append(Outcome(bound, is_success))
        self.settled = bound
        self._free(bound)
        self.pass_rollbacks()

    def copy(self) -> ReceivingChannel:
        """A copy that shares no list with this channel."""
        return msgspec.structs.replace(
            self,
            held_sizes=list(self.held_sizes),
            undecided_sizes=list(self.undecided_sizes),
            decisions=list(self.decisions),
            outcomes=list(self.outcomes),
        )

    def finish(self) -> None:
        """Mark everything as consumed, and the channel as closed."""
        self._free(self.arrived)
        self.closed = True

    def adopt(self, changed: ReceivingChannel) -> None:
        """Apply the marks that were made on a copy. What has arrived since the copy is kept."""
        self.settled = changed.settled
        self.outcomes = list(changed.outcomes)
        self.decisions = [each for each in self.decisions if each.bound > changed.settled]
        self._free(changed.consumed)
        self.received = max(self.received, changed.received)

    def resume(self) -> None:
        """A new connection: the peer knows what we report on it, and nothing else for certain.

        It repeats messages from the mark `received` on and decisions from `consumed` on.
        """
        self.expected = self.received
        self.cursor = self.consumed
        self.closing = False
        self.acknowledged_received = self.acknowledged_consumed = self.acknowledged_settled = (
            self.start
        )

    def report(self, channel: int, *, fully: bool) -> Iterator[SequenceAcknowledgement]:
        """What has not been reported on this connection yet.

        An outcome implies consumed, and that implies received. After a reconnection (`fully`) each
        is reported by its own name, as specification 3.5 asks for.
        """
        outcomes = [
            outcome for outcome in self.outcomes if outcome.bound > self.acknowledged_settled
        ]
        settled = outcomes[-1].bound if outcomes else self.acknowledged_settled
        implied = max(self.consumed, settled)
        if self.received > self.acknowledged_received and (fully or self.received > implied):
            yield SequenceAcknowledgement("received", (channel,), sequence_of(self.received - 1))
        for outcome in outcomes:
            name: Acknowledgement = "committed" if outcome.is_success else "uncommitted"
            yield SequenceAcknowledgement(name, (channel,), sequence_of(outcome.bound - 1))
        if self.consumed > self.acknowledged_consumed and (fully or self.consumed > settled):
            yield SequenceAcknowledgement("consumed", (channel,), sequence_of(self.consumed - 1))
        self.acknowledged_received, self.acknowledged_consumed = self.received, self.consumed
        self.acknowledged_settled = settled

    def durable(self) -> ReceivingChannel:
        """The channel as it is after a restart.

        What was not marked as received is lost, and will be repeated together with its decisions.
        """
        safe = self.received
        decisions: list[Decision] = []
        begin = self.settled
        for decision in self.decisions:
            if begin < safe:
                decisions.append(Decision(min(decision.bound, safe), decision.is_commit))
            begin = decision.bound
        held_sizes = self.held_sizes[: safe - self.consumed]
        undecided_sizes = self.undecided_sizes[: max(0, safe - self.decided)]
        return ReceivingChannel(
            start=self.start,
            arrived=safe,
            expected=safe,
            received=safe,
            consumed=self.consumed,
            decided=min(self.decided, safe),
            cursor=self.consumed,
            settled=self.settled,
            held_sizes=held_sizes,
            undecided_sizes=undecided_sizes,
            decisions=decisions,
            outcomes=list(self.outcomes),
            acknowledged_received=self.start,
            acknowledged_consumed=self.start,
            acknowledged_settled=self.start,
            close_reported=self.close_reported and safe == self.arrived,
            closed=self.closed,
            held_bytes=sum(held_sizes),
            undecided_bytes=sum(undecided_sizes),
        )

    def pass_rollbacks(self) -> None:
        """Consume rolled back messages, as soon as all before them are consumed."""
        while self.decisions and not self.decisions[0].is_commit:
            self.settled = self.decisions.pop(0).bound
            self._free(self.settled)

    def _free(self, bound: int) -> None:
        if bound > self.consumed:
            self.held_bytes -= sum(self.held_sizes[: bound - self.consumed])
            del self.held_sizes[: bound - self.consumed]
            self.consumed = bound
            self.received = max(self.received, bound)
