"""The channels of a Relink link: senders, with transactions, and receivers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from crosswire.client.native.dial import within
from crosswire.errors import LocalProtocolError, RequestFailed
from crosswire.plurals import plural
from crosswire.wire.relink.events import MessageReceived
from crosswire.wire.relink.frames import Buffer
from crosswire.wire.relink.link import Link

__all__ = ["Gate", "LinkUser", "Received", "Receiver", "Sender", "Transaction"]


class LinkUser(Protocol):
    """The client that channels belong to."""

    link: Link

    @property
    def was_shut_down(self) -> bool:
        """Whether both sides have shut the link down, and all was consumed."""

    def require_alive(self) -> None:
        """Raises LinkLost or ConnectionLost if the link has ended."""

    def has_room(self, channels: Sequence[int]) -> bool:
        """Whether these channels' windows, and the socket, have room. Raises LinkLost."""

    def wake(self) -> None:
        """Have what was sent on the link written."""

    def consumed_something(self) -> None:
        """Messages were consumed: acknowledge them, and shut down if that was awaited."""


class Gate:
    """Wakes all tasks that wait for a condition, each of which checks its own."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        """Wait until `open` is called."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def open(self) -> None:
        """Wake all who wait now."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class Sender:
    """A channel that we send on; made by `RelinkClient.sender`."""

    def __init__(self, client: LinkUser, channel: int) -> None:
        self.channel = channel
        self._client = client
        self._gate = Gate()
        self._turn = asyncio.Lock()
        self._transaction: Transaction | None = None
        # Counts, not sequence numbers: those wrap, and start again when a channel is reopened.
        self._sent = 0
        self._consumed = 0
        self._committed = 0
        self._answered = 0
        self._refusals: list[range] = []
        self._closed = 0

    async def send(self, *parts: Buffer) -> int:
        """Send a message as soon as the window has room; gives the number of messages sent so far.

        It is repeated over reconnections until the other side has it. Raises LinkLost.
        """
        if self._client.link.transactions:
            raise LocalProtocolError("this link's messages are sent in transactions")
        async with self._turn:
            return await self._send(parts)

    async def consumed(self, count: int | None = None, *, timeout_s: float | None = None) -> None:
        """Wait until the other side has consumed the first `count` messages, or all sent.

        Raises RequestTimeout or LinkLost.
        """
        if self._client.link.transactions:
            raise LocalProtocolError("leaving a transaction waits for its outcome")
        goal = self._sent if count is None else count
        await within(timeout_s, "messages were not consumed", self._until_consumed(goal))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """Messages sent in it are processed together when it ends, or not at all if it raises.

        Leaving it waits for the outcome; raises RequestFailed("uncommitted", …) if they were
        refused, and LinkLost if the outcome is unknown.
        """
        async with self._turn:
            transaction = self._transaction = Transaction(self)
            try:
                yield transaction
            except BaseException:
                # Also when it is cancelled: the other side holds the messages until it is decided.
                self.roll_back()
                raise
            finally:
                self._transaction = None
            if transaction.count:
                await self._commit(transaction.count)

    async def close(self, *, timeout_s: float | None = None) -> None:
        """Close the channel and wait until all of it was consumed. It can be used again then."""
        async with self._turn:
            self._client.require_alive()
            # Counted before it is closed: the answer can't come before this one awaits.
            goal = self._closed + 1
            self._client.link.close(self.channel)
            self._client.wake()
            await within(timeout_s, "the channel was not closed", self._until_closed(goal))

    # Called by the client and by transactions.

    def acknowledged(self, kind: str, count: int) -> None:
        """The other side has acknowledged `count` messages, in order."""
        if kind == "consumed":
            self._consumed += count
        elif kind != "received":
            if kind == "uncommitted":
                self._refusals.append(range(self._answered, self._answered + count))
            self._answered += count
        self._gate.open()

    def closed(self) -> None:
        """The other side has consumed all of a channel that we closed."""
        self._closed += 1
        self._gate.open()

    def look_again(self) -> None:
        """The link or its connection has changed: wake all who wait."""
        self._gate.open()

    def roll_back(self) -> None:
        """Roll back the open transaction, if there is one."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None and transaction.count and not self._client.link.ended:
            self._client.link.rollback(self.channel)
            self._client.wake()

    async def _send(self, parts: Sequence[Buffer]) -> int:
        client = self._client
        # Checked again after each wake: others may have taken the room.
        while not client.has_room([self.channel]):
            await self._gate.wait()
        client.link.send(self.channel, parts)
        client.wake()
        self._sent += 1
        return self._sent

    def count_multicast(self) -> None:
        """A multicast was sent on this channel too."""
        self._sent += 1

    async def _commit(self, count: int) -> None:
        """Commit, and wait for the outcome of `count` messages.

        Outcomes come in the order of commits; they are counted even if nobody waits any more.
        """
        self._client.require_alive()
        self._client.link.commit(self.channel)
        self._client.wake()
        first = self._committed
        goal = self._committed = first + count
        while self._answered < goal:
            self._client.require_alive()
            await self._gate.wait()
        # Refusals before `first` are of commits that nobody waited for to the end.
        refused = sum(len(run) for run in self._refusals if run.stop > first)
        self._refusals.clear()
        if refused:
            raise RequestFailed("uncommitted", f"{refused} of {plural(count, 'message')} refused")

    async def _until_consumed(self, goal: int) -> None:
        while self._consumed < goal:
            self._client.require_alive()
            await self._gate.wait()

    async def _until_closed(self, goal: int) -> None:
        while self._closed < goal:
            self._client.require_alive()
            await self._gate.wait()


class Transaction:
    """Messages that are processed together, or not at all; made by `Sender.transaction`."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.count = 0

    async def send(self, *parts: Buffer) -> None:
        """As `Sender.send`. Raises LocalProtocolError when it alone has filled the window."""
        client = self._sender._client
        if self.count >= client.link.limits.window:
            raise LocalProtocolError("the transaction is larger than the channel's window")
        await self._sender._send(parts)
        self.count += 1


class Received:
    """A message of the other side. `consume` or `refuse` it: the window is limited."""

    __slots__ = ("_receiver", "channel", "parts", "sequence")

    def __init__(self, receiver: Receiver, event: MessageReceived) -> None:
        self._receiver = receiver
        self.channel = event.channel
        self.sequence = event.sequence
        self.parts = event.parts

    def consume(self) -> None:
        """It was processed. Where the other side uses transactions: with success."""
        self._receiver.finish(self, success=True)

    def refuse(self) -> None:
        """It could not be processed. Only where the other side uses transactions."""
        if not self._receiver.transactions:
            raise LocalProtocolError("only a message in a transaction can be refused")
        self._receiver.finish(self, success=False)


class Receiver:
    """A channel of the other side, as an async iterator; made by `RelinkClient.receiver`.

    The iteration ends when the other side closes the channel, or when the link was shut down.
    """

    def __init__(self, client: LinkUser, channel: int) -> None:
        self.channel = channel
        self._client = client
        self._gate = Gate()
        self._undecided: deque[Received] = deque()
        self._ready: deque[Received | None] = deque()
        self._unfinished: deque[Received] = deque()
        self._finished: dict[Received, bool] = {}

    @property
    def transactions(self) -> bool:
        """Whether the other side's channels use transactions."""
        return self._client.link.peer_transactions

    @property
    def idle(self) -> bool:
        """Whether no message waits for the application."""
        return not self._unfinished

    def __aiter__(self) -> Receiver:
        return self

    async def __anext__(self) -> Received:
        """The next message. Raises LinkLost when all are read and no more can come."""
        while not self._ready:
            if self._client.was_shut_down:
                raise StopAsyncIteration
            self._client.require_alive()
            await self._gate.wait()
        message = self._ready.popleft()
        if message is None:
            raise StopAsyncIteration
        return message

    def finish(self, message: Received, *, success: bool) -> None:
        """Acknowledge a message; one that is finished early waits for those before it."""
        if self._client.link.ended:
            return
        # A link acknowledges in order: an early one waits here for those before it.
        self._finished[message] = success
        while self._unfinished and self._unfinished[0] in self._finished:
            oldest = self._unfinished.popleft()
            outcome = self._finished.pop(oldest)
            if self.transactions:
                self._client.link.settle(self.channel, oldest.sequence, committed=outcome)
            else:
                self._client.link.consume(self.channel, oldest.sequence)
        self._client.consumed_something()

    # Called by the client.

    def arrived(self, event: MessageReceived) -> None:
        """A message has come; in a transaction it waits for the commit."""
        message = Received(self, event)
        if self.transactions:
            self._undecided.append(message)
        else:
            self._hand_over(message)

    def decided(self, count: int, *, commit: bool) -> None:
        """The oldest `count` undecided messages are committed, or rolled back."""
        for _ in range(count):
            message = self._undecided.popleft()
            if commit:
                self._hand_over(message)

    def closed(self) -> None:
        """The other side has closed the channel: the iteration ends after its messages."""
        self._ready.append(None)
        self._gate.open()

    def look_again(self) -> None:
        """The link or its connection has changed: wake all who wait."""
        self._gate.open()

    def _hand_over(self, message: Received) -> None:
        self._ready.append(message)
        self._unfinished.append(message)
        self._gate.open()
