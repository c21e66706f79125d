"""Relink's producers: messages on any channel go to the endpoint's queue or topic.

One batch of a link is being committed at a time; what arrives meanwhile is the next. The state of
the channels after the batch, which the acknowledgements are made from, is in the same commit group:
after a crash both are there, or neither is and the peer repeats the messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, cast

from crosswire.commitlog.contract import Receipt
from crosswire.envelope import Envelope, encode
from crosswire.errors import HubError, InvalidEnvelope, InvalidRequest
from crosswire.gateways.gateway import guarded
from crosswire.gateways.relink.link_end import LinkEnd
from crosswire.gateways.relink.link_records import LoadedLink, Parts
from crosswire.gateways.relink.messages import count_of, from_parts
from crosswire.hub.queues import Queue
from crosswire.hub.topics import Topic
from crosswire.wire.contract import Event
from crosswire.wire.relink.channels import ReceivingChannel
from crosswire.wire.relink.events import (
    CloseReceived,
    CommitReceived,
    MessageReceived,
    RollbackReceived,
    ShutdownReceived,
)
from crosswire.wire.relink.frames import Buffer

__all__ = ["ProduceEnd", "TransactEnd"]

_RETRY_FIRST_S: Final = 0.02
_RETRY_LONGEST_S: Final = 0.5
_STAMP_BYTES: Final = 48
"""The most that the hub's stamp adds to a record."""

_States = dict[int, ReceivingChannel]
_Step = tuple[int, int, Sequence[Buffer] | None]
"""Channel, sequence number and message; without one the channel is closed."""
_BATCH: Final = 512
"""Steps that are taken in one turn of the event loop: a multicast of 132 KiB has 65,536."""


class ProduceEnd(LinkEnd):
    """Without transactions: a message is acknowledged as consumed when it is durable.

    A full queue can't be reported: the messages wait here, and the peer is not read from.
    """

    _todo: list[_Step]

    def attach(self) -> None:
        """Nothing of the hub is needed before a message arrives."""
        self._todo = []
        self._batch: tuple[list[_Step], _States] | None = None
        """Steps that are being committed, and the states of their channels after it."""
        self._retry: asyncio.TimerHandle | None = None
        self._retry_s = _RETRY_FIRST_S

    @property
    def is_busy(self) -> bool:
        """Whether a batch is being committed."""
        return self._batch is not None

    def left(self) -> None:
        """Go on: what was received is produced without the connection, unless the hub stops."""
        if self.context.draining:
            self._stop_retrying()

    def ended(self) -> None:
        """Drop what waits for room: it was never acknowledged."""
        self._stop_retrying()

    def receive(self, events: list[Event]) -> None:
        """Produce the messages of one read, after those that wait."""
        todo = self._todo
        for event in events:
            if type(event) is MessageReceived:
                todo.append((event.channel, event.sequence, event.parts))
            elif type(event) is CloseReceived:
                todo.append((event.channel, 0, None))
            elif type(event) is ShutdownReceived:
                self.link.shutdown()
        self._advance()

    def _advance(self) -> None:
        """Begin the next batch, unless one is being committed or waits for room."""
        if self._batch is not None or self._retry is not None or not self._todo:
            return
        todo, self._todo = self._todo[:_BATCH], self._todo[_BATCH:]
        origin = self.origin
        try:
            envelopes = [from_parts(step[2], origin) for step in todo if step[2] is not None]
        except InvalidEnvelope as error:
            self.end(InvalidRequest(str(error)))
            return
        try:
            target = self.hub.target(self.endpoint.destination, self.peer)
        except HubError as error:
            # It is new, and there may not be another one: Relink can refuse only by disconnecting.
            self.end(error)
            return
        # Worked out before: if the hub refused one message in the middle, those after it would
        # overtake it.
        count = QueueCapacity(target).take(envelopes)
        if count < len(envelopes):
            todo, rest = _split(todo, count)
            self._wait(rest)
            if not todo:
                return
            envelopes = envelopes[:count]
        receipt: Receipt | None = None
        if envelopes:
            self.context.count("produced", "relink", by=len(envelopes))
            receipt = self.hub.produce(envelopes, self.context.now())
            if receipt.refused:
                # The target had room: it is the whole batch that the store can't take.
                self._wait(todo)
                return
        states = self._save_states(todo)
        self._batch = (todo, states)
        if receipt is None or receipt.done:
            # A close, or messages that need no commit: the states are written without fsync.
            self.once_written(self._written)
        else:
            receipt.add_done_callback(guarded(self._committed, self.broken))
        if self._retry is None:
            self._retry_s = _RETRY_FIRST_S
            self.hold(len(self._todo) >= _BATCH)

    def _save_states(self, todo: list[_Step]) -> _States:
        """Save, and give, the states of channels that the peer may know after the commit."""
        last = {step[0]: step[1] for step in todo if step[2] is not None}
        closed = [step[0] for step in todo if step[2] is None]
        states: _States = {}
        for channel in dict.fromkeys([*last, *closed]):
            state = self.link.copy_channel(channel)
            if state is not None:
                # One mark covers all messages before it: acknowledgements name a range.
                if channel in last:
                    state.consume(last[channel])
                state.closed = channel in closed
                states[channel] = state
                self.save_receiving(channel, state)
        return states

    def _committed(self, receipt: Receipt) -> None:
        if self.forgotten:
            return
        if receipt.error is None:
            self._written()
            return
        assert self._batch is not None
        todo, states = self._batch
        self._batch = None
        for channel in states:
            # The saved state is in the next group, but acknowledges messages that are not stored:
            # overwrite it.
            state = self.link.copy_channel(channel)
            if state is not None:
                self.save_receiving(channel, state)
        self._wait(todo)

    def _written(self) -> None:
        """Acknowledge the batch: it is stored together with the states of its channels."""
        assert self._batch is not None
        _, states = self._batch
        self._batch = None
        self.adopt(states)
        self.wake()
        self._advance()

    # Full queues.

    def _wait(self, todo: list[_Step]) -> None:
        """Retry these steps later; don't read from the peer until then."""
        self._todo = todo + self._todo
        self.hold(True)
        if self._retry is None:
            again = guarded(self._try_again, self.broken)
            self._retry = asyncio.get_running_loop().call_later(self._retry_s, again)
            self._retry_s = min(2 * self._retry_s, _RETRY_LONGEST_S)

    def _try_again(self) -> None:
        self._retry = None
        self._advance()

    def _stop_retrying(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None


class _OpenTransaction:
    """The messages of a channel that are not decided, in order, and the rows that keep them."""

    __slots__ = ("messages", "rows")

    def __init__(self) -> None:
        self.messages: deque[Parts] = deque()
        self.rows: deque[tuple[int, int]] = deque()
        """The first number, and the number after the last, of each row."""

    def take(self, count: int) -> list[Parts]:
        """The oldest messages, which were decided."""
        return [self.messages.popleft() for _ in range(count)]


class TransactEnd(LinkEnd):
    """With transactions: stored while undecided, produced on commit, all or none.

    `received` is acknowledged when a message is stored, so that a restarted hub need not ask for
    it again; `committed` or `uncommitted` when the outcome of its transaction is durable.
    """

    def attach(self) -> None:
        """Nothing of the hub is needed before a commit arrives."""
        self._todo: list[Event] = []
        self._is_writing = False
        self._undecided: dict[int, _OpenTransaction] = {}
        self.closing: set[int] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a batch is being committed."""
        return self._is_writing

    def restored(self, loaded: LoadedLink) -> None:
        """Restore the messages of transactions that were open before the restart."""
        for channel, rows in loaded.undecided.items():
            state = loaded.receiving[channel]
            undecided = self._undecided[channel] = _OpenTransaction()
            for first, messages in rows:
                # A row is dropped with its last message: the first ones may be decided already.
                undecided.messages += messages[max(0, state.settled - first) :]
                undecided.rows.append((first, first + len(messages)))

    def receive(self, events: list[Event]) -> None:
        """Store messages and carry out decisions, after those that are being committed."""
        for event in events:
            if type(event) is ShutdownReceived:
                self.link.shutdown()
            elif isinstance(
                event, MessageReceived | CommitReceived | RollbackReceived | CloseReceived
            ):
                self._todo.append(event)
        self._advance()

    def _advance(self) -> None:
        if self._is_writing or not self._todo:
            return
        todo, self._todo = self._todo[:_BATCH], self._todo[_BATCH:]
        try:
            batch = _ReadBatch(self, todo)
        except HubError as error:
            self.end(error)
            return
        self._is_writing = True
        self.hold(len(self._todo) >= _BATCH)
        if batch.envelopes:
            self.context.count("produced", "relink", by=len(batch.envelopes))
            receipt = self.hub.produce(batch.envelopes, self.context.now())
            if receipt.refused:
                # There was room in the queue, so the store took none of the batch.
                batch.fail()
        self._save(batch)

    def _save(self, batch: _ReadBatch) -> None:
        batch.save()
        # In one group with the messages that were produced: all of it is durable, or nothing.
        self.hub.committed().add_done_callback(
            guarded(lambda receipt: self._committed(batch, receipt), self.broken)
        )

    def _committed(self, batch: _ReadBatch, receipt: Receipt) -> None:
        if self.forgotten:
            return
        if receipt.error is not None:
            # Nothing was produced: the peer gets `uncommitted`, once that is durable.
            batch.fail()
            self._save(batch)
            return
        self._is_writing = False
        self.adopt(batch.states)
        for channel, state in batch.states.items():
            if state.closed:
                self.closing.discard(channel)
                self._undecided.pop(channel, None)
        self.wake()
        self._advance()

    def undecided(self, channel: int) -> _OpenTransaction:
        """The open transaction of a channel."""
        found = self._undecided.get(channel)
        if found is None:
            found = self._undecided[channel] = _OpenTransaction()
        return found


class _ReadBatch:
    """Messages of one or more reads, and decisions about these and earlier ones."""

    def __init__(self, end: TransactEnd, todo: list[Event]) -> None:
        self._end = end
        self.envelopes: list[Envelope] = []
        self.states: _States = {}
        self._arrived: dict[int, list[Parts]] = {}
        self._last: dict[int, int] = {}
        self._outcomes: list[tuple[int, int, bool]] = []
        self._channels: dict[int, None] = {}
        self._capacity = QueueCapacity(end.hub.target(end.endpoint.destination, end.peer))
        for event in todo:
            self._take(event)

    def _take(self, event: Event) -> None:
        if isinstance(event, MessageReceived):
            channel, parts = event.channel, cast(Parts, tuple(event.parts))
            self._end.undecided(channel).messages.append(parts)
            self._arrived.setdefault(channel, []).append(parts)
            self._last[channel] = event.sequence
        elif isinstance(event, CommitReceived):
            channel = event.channel
            messages = self._end.undecided(channel).take(count_of(event))
            self._outcomes.append((channel, event.last, self._accept(messages)))
        elif isinstance(event, RollbackReceived):
            channel = event.channel
            self._end.undecided(channel).take(count_of(event))
        else:
            assert isinstance(event, CloseReceived)
            channel = event.channel
            self._end.closing.add(channel)
        self._channels[channel] = None

    def _accept(self, messages: list[Parts]) -> bool:
        """Add the messages of a transaction to the batch, if all are valid and there is room."""
        try:
            envelopes = [from_parts(parts, self._end.origin) for parts in messages]
        except InvalidEnvelope:
            # `uncommitted` is the refusal of a transaction: the connection goes on.
            return False
        if not self._capacity.take(envelopes, whole=True):
            return False
        self.envelopes += envelopes
        return True

    def fail(self) -> None:
        """Make all outcomes `uncommitted`: the batch could not be produced."""
        self._outcomes = [(channel, last, False) for channel, last, _ in self._outcomes]

    def save(self) -> None:
        """Save the states of the channels after the batch, and the messages still undecided."""
        for channel in self._channels:
            state = self._end.link.copy_channel(channel)
            if state is None:
                continue
            if channel in self._last:
                state.receive(self._last[channel])
            # Rollbacks need nothing of the hub: those before the next commit are passed at once.
            state.pass_rollbacks()
            for each, last, committed in self._outcomes:
                if each == channel:
                    state.settle(last, committed)
            # `closed` is answered after all messages before the close are decided.
            state.closed = channel in self._end.closing and state.consumed == state.arrived
            self.states[channel] = state
            self._end.save_receiving(channel, state)
            self._save_undecided(channel, state)

    def _save_undecided(self, channel: int, state: ReceivingChannel) -> None:
        undecided = self._end.undecided(channel)
        rows = self._end.rows
        # Of the messages of this batch only those that it did not decide need a row.
        new = self._arrived.pop(channel, [])
        new = new[len(new) - min(len(new), len(undecided.messages)) :]
        if new:
            first = state.received - len(new)
            rows.save_undecided(channel, first, new)
            undecided.rows.append((first, state.received))
        while undecided.rows and undecided.rows[0][1] <= state.settled:
            rows.drop_undecided(channel, undecided.rows.popleft()[0])


class QueueCapacity:
    """How much more the limits of a queue allow; a topic has none.

    The hub would refuse single messages of a batch, but a transaction is all or nothing, and
    messages without one must keep their order: so the room is worked out before.
    """

    def __init__(self, target: Queue | Topic) -> None:
        self._count: int | None = None
        self._bytes: int | None = None
        self._most_bytes = 0
        if isinstance(target, Queue):
            policy = target.policy
            self._most_bytes = policy.max_bytes
            if policy.overflow == "refuse":
                if policy.max_length:
                    self._count = max(policy.max_length - target.length, 0)
                if policy.max_bytes:
                    self._bytes = policy.max_bytes - target.size_bytes

    def take(self, envelopes: Sequence[Envelope], *, whole: bool = False) -> int:
        """Take room for the first of these, or with `whole` for all or none; gives the number."""
        count = len(envelopes)
        if self._count is not None:
            count = min(count, self._count)
        size_bytes = 0
        if self._most_bytes:
            for index, envelope in enumerate(envelopes[:count]):
                size = len(encode(envelope)) + _STAMP_BYTES
                left = self._most_bytes if self._bytes is None else self._bytes - size_bytes
                if size > left:
                    count = index
                    break
                size_bytes += size
        if whole and count < len(envelopes):
            return 0
        if self._count is not None:
            self._count -= count
        if self._bytes is not None:
            self._bytes -= size_bytes
        return count


def _split(todo: list[_Step], count: int) -> tuple[list[_Step], list[_Step]]:
    """The steps up to the message number `count`, which is the first of the rest."""
    for index, step in enumerate(todo):
        if step[2] is not None:
            if not count:
                return todo[:index], todo[index:]
            count -= 1
    return todo, []
