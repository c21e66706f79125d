"""The two ends of a channel: what its sender and its receiver know of every message.

Messages are numbered by counting, without a word about it on the wire (specification 3.1). In here
the count does not wrap; on the wire it does, at 2^32. A *mark* is the number of the first message
that something does not hold for yet, so that marks only grow:

    sender's end      settled ≤ decided ≤ next      consumed ≤ received ≤ next
    receiver's end    consumed ≤ received ≤ arrived      consumed ≤ decided ≤ arrived

`received` and `consumed` are the cursors of the acknowledgements of that name. `decided` is the
one cursor of commit and rollback, `settled` the one of committed and uncommitted: a message is
decided once, and its outcome is told once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, cast

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
)
from crosswire.wire.relink.layout import SEQUENCES

__all__ = [
    "Kept",
    "Parts",
    "ReceivingChannel",
    "SendingChannel",
    "ahead",
    "named",
    "on_the_wire",
    "operation",
]

_HALF: Final = SEQUENCES // 2

Parts = tuple[Buffer, ...]
Kept = tuple[int, Message | SequenceOperation | ChannelOperation]
"""A packet to be repeated, behind its place in the order in which the link first sent them all."""


def on_the_wire(number: int) -> int:
    return number % SEQUENCES


def ahead(sequence: int, mark: int) -> int:
    """How many messages a sequence number names from `mark` on: none if it is behind.

    Raises UnexpectedFrame for the one number of which nobody can say whether it is behind.
    """
    distance = (sequence - mark + 1) % SEQUENCES
    if distance == _HALF:
        raise UnexpectedFrame(f"sequence number {sequence} is exactly 2^31 away")
    return distance if distance < _HALF else 0


def named(sequence: int, mark: int, end: int) -> int:
    """`ahead`, for our own side. Raises LocalProtocolError for what lies beyond the mark `end`."""
    try:
        count = ahead(sequence, mark)
    except UnexpectedFrame as error:
        raise LocalProtocolError(error.reason) from None
    if mark + count > end:
        raise LocalProtocolError(f"there is no message {sequence} of which that could be said")
    return count


class Decision(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Commit or rollback of the messages before the mark `bound` that were not decided before."""

    bound: int
    is_commit: bool
    order: int = 0


class Outcome(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What became of the commits before the mark `bound` that had no outcome before."""

    bound: int
    is_success: bool


class SendingChannel(msgspec.Struct, array_like=True):
    """Our end of a channel that we send on. `kept` holds what may have to be repeated."""

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
        return cls(start, start, start, start, start, start, [], [], reopened=reopened)

    @property
    def outstanding(self) -> int:
        """Messages that fill the window."""
        return self.next - self.consumed

    @property
    def close_waits(self) -> bool:
        """The close of a reopened channel waits until the peer is known to have reopened it too.

        Else a `closed` that the peer repeats after a reconnection could mean either life of the
        channel.
        """
        return self.reopened and self.received == self.start

    def add(self, order: int, parts: Parts) -> int:
        self.kept.append((order, cast(tuple[bytes, ...], parts)))  # a view is saved as bytes
        self.next += 1
        return self.next - 1

    def add_run(self, order: int, run: Sequence[Parts]) -> int:
        """Like `add`, for many; gives the last one's order."""
        first = order + 1
        order += len(run)
        self.kept += cast(
            list[tuple[int, tuple[bytes, ...]]],
            list(zip(range(first, order + 1), run, strict=True)),
        )
        self.next += len(run)
        return order

    def decide(self, bound: int, is_commit: bool, order: int) -> None:
        self.decisions.append(Decision(bound, is_commit, order))
        self.decided = bound

    def mark(self, kind: Acknowledgement, count: int) -> list[tuple[int, int]]:
        """Take `received` or `consumed` of the next `count` messages; give the range it names."""
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
        """Take the outcome of the next `count` messages; give the ranges of commits it names.

        The rolled back ones among them have no outcome: an outcome behind a rollback names its
        message by number, since the peer may have missed the rollback (specification 3.2).
        """
        if not count:
            return []
        bound = self.settled + count
        if bound > self.decided:
            raise UnexpectedFrame("an outcome for a message that was never committed")
        first = self.decisions[0] if self.decisions else None
        after_rollback = self.rolled_back or (first is not None and not first.is_commit)
        if after_rollback and not explicit and (is_success or self.rolled_back):
            raise UnexpectedFrame("an outcome behind a rollback without a sequence number")
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
        """Take `closed`, which says that everything was consumed."""
        if self.close_order is None:
            raise UnexpectedFrame("closed for a channel that was not closed")
        if any(decision.is_commit for decision in self.decisions):
            raise UnexpectedFrame("closed before the outcome of a commit was told")
        left = (self.consumed, self.next)
        self.consumed = self.next
        self._mark_received(self.next)
        return [left] if left[0] < left[1] else []

    def repeated(self, channel: int, *, close_only: bool) -> Iterator[Kept]:
        """What the peer hasn't acknowledged: to be sent again after a reconnection."""
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
        """A rollback need not be acknowledged, but a message that it named can be consumed only
        by heeding it."""
        while self.decisions and not self.decisions[0].is_commit:
            if self.decisions[0].bound > self.consumed:
                return
            self.settled = self.decisions.pop(0).bound
            self.rolled_back = True


def operation(channel: int, decision: Decision) -> SequenceOperation:
    """Always with a number: it can be repeated, and means the same to whoever missed others."""
    name: Operation = "commit" if decision.is_commit else "rollback"
    return SequenceOperation(name, (channel,), on_the_wire(decision.bound - 1))


class ReceivingChannel(msgspec.Struct, array_like=True):
    """Our end of a channel that the peer sends on.

    `expected` and `cursor` are where the peer stands on this connection with its messages and
    its operations; `closing` says that it closed the channel on this connection. After a
    reconnection they go back to what it knows to have arrived, and what is repeated below `arrived`
    and `decided` is passed over. `said_…` is what the peer has been told on this connection.
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
        first = (start,) * 11
        return cls(*first)

    def arrive(self, size: int, window: int) -> bool:
        """Take the next message; false if it had arrived before the reconnection."""
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
        # The peer's window lets it send this message only if it knows what became of those that
        # many before it: their outcomes need never be repeated.
        while self.outcomes and self.outcomes[0].bound <= self.arrived - window:
            self.outcomes.pop(0)
        return True

    def arrive_run(self, sizes: list[int], window: int) -> int | None:
        """Take the next messages, if nothing is special about any of them; give the first's
        number."""
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
        """Take a commit or rollback of the next `count` messages; give the range that is new.

        Where the owner guards the channel, what was rolled back stays until it says so.
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
        """Everything up to `sequence` is safe with us."""
        self.received += named(sequence, self.received, self.arrived)

    def consume(self, sequence: int) -> None:
        """The application is done with everything up to `sequence`."""
        bound = self.consumed + named(sequence, self.consumed, self.arrived)
        self._free(bound)

    def settle(self, sequence: int, is_success: bool) -> None:
        """Like `consume`, for messages that the peer committed."""
        bound = self.settled + named(sequence, self.settled, self.decided)
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
        """Another one, on which marks can be tried."""
        return msgspec.structs.replace(
            self,
            held_sizes=list(self.held_sizes),
            undecided_sizes=list(self.undecided_sizes),
            decisions=list(self.decisions),
            outcomes=list(self.outcomes),
        )

    def finish(self) -> None:
        """All that arrived is consumed, and the channel is closed."""
        self._free(self.arrived)
        self.closed = True

    def adopt(self, tried: ReceivingChannel) -> None:
        """Make the marks that were tried on a copy; what has come since stays as it is."""
        self.settled = tried.settled
        self.outcomes = list(tried.outcomes)
        self.decisions = [each for each in self.decisions if each.bound > tried.settled]
        self._free(tried.consumed)
        self.received = max(self.received, tried.received)

    def resume(self) -> None:
        """A new connection: the peer knows what it will be told now, and nothing else for sure."""
        self.expected = self.received
        self.cursor = self.consumed
        self.closing = False
        self.acknowledged_received = self.acknowledged_consumed = self.acknowledged_settled = (
            self.start
        )

    def report(self, channel: int, *, fully: bool) -> Iterator[SequenceAcknowledgement]:
        """What the peer wasn't told yet. An outcome implies consumed, and that implies received;
        after a reconnection each is told by its own name."""
        outcomes = [
            outcome for outcome in self.outcomes if outcome.bound > self.acknowledged_settled
        ]
        settled = outcomes[-1].bound if outcomes else self.acknowledged_settled
        implied = max(self.consumed, settled)
        if self.received > self.acknowledged_received and (fully or self.received > implied):
            yield SequenceAcknowledgement("received", (channel,), on_the_wire(self.received - 1))
        for outcome in outcomes:
            name: Acknowledgement = "committed" if outcome.is_success else "uncommitted"
            yield SequenceAcknowledgement(name, (channel,), on_the_wire(outcome.bound - 1))
        if self.consumed > self.acknowledged_consumed and (fully or self.consumed > settled):
            yield SequenceAcknowledgement("consumed", (channel,), on_the_wire(self.consumed - 1))
        self.acknowledged_received, self.acknowledged_consumed = self.received, self.consumed
        self.acknowledged_settled = settled

    def durable(self) -> ReceivingChannel:
        """As it would be after a restart: what was not marked as received is gone, and will be
        repeated together with what was said about it."""
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
        """A message that was rolled back is done with as soon as those before it are."""
        while self.decisions and not self.decisions[0].is_commit:
            self.settled = self.decisions.pop(0).bound
            self._free(self.settled)

    def _free(self, bound: int) -> None:
        if bound > self.consumed:
            self.held_bytes -= sum(self.held_sizes[: bound - self.consumed])
            del self.held_sizes[: bound - self.consumed]
            self.consumed = bound
            self.received = max(self.received, bound)
