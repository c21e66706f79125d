"""Relink for asyncio programs: channels that survive the loss of their connection.

async with RelinkClient("127.0.0.1", 7350, "queue/orders") as client:
    orders = client.sender(0)
    await orders.send(b"one order")
    await orders.consumed()

async with RelinkClient("127.0.0.1", 7350, "queue/orders?consume") as client:
    async for message in client.receiver(0):
        print(message.parts)
        message.consume()
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from crosswire.client.native.dial import Backoff, dial, within
from crosswire.errors import (
    ClientError,
    ConnectFailed,
    ConnectionLost,
    LinkLost,
    LocalProtocolError,
    RequestFailed,
)
from crosswire.session import Session
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, Event
from crosswire.wire.relink.connection import RelinkConnection
from crosswire.wire.relink.events import (
    Acknowledged,
    ChannelClosed,
    CloseReceived,
    CommitReceived,
    LinkForgotten,
    LinkOpened,
    MessageReceived,
    RollbackReceived,
    ShutdownReceived,
)
from crosswire.wire.relink.frames import Buffer, RelinkLimits
from crosswire.wire.relink.handshake import LinkTerms
from crosswire.wire.relink.link import Link

__all__ = ["Received", "Receiver", "RelinkClient", "Sender", "Transaction"]

_log = logging.getLogger("crosswire.client.native.relink")


class _Gate:
    """Lets all who wait at it look again."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def open(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class Sender:
    """A channel that we send on; `RelinkClient.sender` gives it."""

    def __init__(self, client: RelinkClient, channel: int) -> None:
        self.channel = channel
        self._client = client
        self._gate = _Gate()
        self._turn = asyncio.Lock()
        self._transaction: Transaction | None = None
        self._sent = 0
        self._consumed = 0
        self._committed = 0
        self._answered = 0
        self._refusals: list[range] = []
        self._closed = 0

    async def send(self, *parts: Buffer) -> int:
        """Send a message, as soon as the window has room for it; gives how many were sent so far.

        It is repeated over reconnections until the other side has it. Raises LinkLost.
        """
        if self._client.link.transactions:
            raise LocalProtocolError("this link's messages are sent in transactions")
        async with self._turn:
            return await self._send(parts)

    async def consumed(self, count: int | None = None, *, timeout_s: float | None = None) -> None:
        """Wait until the other side is done with the first `count` messages, or with all sent.

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
        refused, and LinkLost if nobody can tell.
        """
        async with self._turn:
            transaction = self._transaction = Transaction(self)
            try:
                yield transaction
            except BaseException:
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
            goal = self._closed + 1
            self._client.link.close(self.channel)
            self._client.wake()
            await within(timeout_s, "the channel was not closed", self._until_closed(goal))

    # Called by the client and by transactions.

    def acknowledged(self, kind: str, count: int) -> None:
        if kind == "consumed":
            self._consumed += count
        elif kind != "received":
            if kind == "uncommitted":
                self._refusals.append(range(self._answered, self._answered + count))
            self._answered += count
        self._gate.open()

    def closed(self) -> None:
        self._closed += 1
        self._gate.open()

    def look_again(self) -> None:
        self._gate.open()

    def roll_back(self) -> None:
        """Give up the transaction that is under way, if there is one."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None and transaction.count and not self._client.link.ended:
            self._client.link.rollback(self.channel)
            self._client.wake()

    async def _send(self, parts: Sequence[Buffer]) -> int:
        client = self._client
        while not client.has_room([self.channel]):
            await self._gate.wait()
        client.link.send(self.channel, parts)
        client.wake()
        self._sent += 1
        return self._sent

    def count_multicast(self) -> None:
        self._sent += 1

    async def _commit(self, count: int) -> None:
        """Outcomes come in the order of commits, whether anybody still waits for them or not."""
        self._client.require_alive()
        self._client.link.commit(self.channel)
        self._client.wake()
        first = self._committed
        goal = self._committed = first + count
        while self._answered < goal:
            self._client.require_alive()
            await self._gate.wait()
        refused = sum(len(run) for run in self._refusals if run.stop > first)
        self._refusals.clear()
        if refused:
            raise RequestFailed("uncommitted", f"{refused} of {count} messages were refused")

    async def _until_consumed(self, goal: int) -> None:
        while self._consumed < goal:
            self._client.require_alive()
            await self._gate.wait()

    async def _until_closed(self, goal: int) -> None:
        while self._closed < goal:
            self._client.require_alive()
            await self._gate.wait()


class Transaction:
    """What is sent on it goes through together, or not at all; `Sender.transaction` gives it."""

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
    """A message that came. Say when you are done with it: the window holds only so many."""

    __slots__ = ("_receiver", "channel", "parts", "sequence")

    def __init__(self, receiver: Receiver, event: MessageReceived) -> None:
        self._receiver = receiver
        self.channel = event.channel
        self.sequence = event.sequence
        self.parts = event.parts

    def consume(self) -> None:
        """Done. Where the other side uses transactions: it succeeded."""
        self._receiver.finish(self, success=True)

    def refuse(self) -> None:
        """It could not be processed. Only where the other side uses transactions."""
        if not self._receiver.transactions:
            raise LocalProtocolError("only a message in a transaction can be refused")
        self._receiver.finish(self, success=False)


class Receiver:
    """A channel of the other side, as an async iterator; `RelinkClient.receiver` gives it.

    The iteration ends when the other side closes the channel, or when the link was shut down.
    """

    def __init__(self, client: RelinkClient, channel: int) -> None:
        self.channel = channel
        self._client = client
        self._gate = _Gate()
        self._undecided: deque[Received] = deque()
        self._ready: deque[Received | None] = deque()
        self._unfinished: deque[Received] = deque()
        self._finished: dict[Received, bool] = {}

    @property
    def transactions(self) -> bool:
        return self._client.link.peer_transactions

    @property
    def idle(self) -> bool:
        """Nothing waits for the application."""
        return not self._unfinished

    def __aiter__(self) -> Receiver:
        return self

    async def __anext__(self) -> Received:
        """The next message. Raises LinkLost when what came has been read and no more can come."""
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
        """Acknowledgements go in order: one that is early waits for those before it."""
        if self._client.link.ended:
            return
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
        message = Received(self, event)
        if self.transactions:
            self._undecided.append(message)
        else:
            self._hand_over(message)

    def decided(self, count: int, *, commit: bool) -> None:
        for _ in range(count):
            message = self._undecided.popleft()
            if commit:
                self._hand_over(message)

    def closed(self) -> None:
        self._ready.append(None)
        self._gate.open()

    def look_again(self) -> None:
        self._gate.open()

    def _hand_over(self, message: Received) -> None:
        self._ready.append(message)
        self._unfinished.append(message)
        self._gate.open()


class RelinkClient:
    """An endpoint, opened: a link that is resumed whenever its connection was lost.

    Channels are made by using them. When the other side no longer knows the link, everything that
    waits raises LinkLost, and so does everything after it: what is to be done again, only the
    application can know.
    """

    session: Session

    def __init__(
        self,
        host: str,
        port: int,
        endpoint: str,
        *,
        connector_id_size: int = 1,
        listener_id_size: int = 1,
        connector_transactions: bool = False,
        listener_transactions: bool = False,
        tls: ssl.SSLContext | None = None,
        limits: RelinkLimits | None = None,
        backoff: Backoff | None = None,
        connect_timeout_s: float = 10.0,
        close_timeout_s: float = 5.0,
    ) -> None:
        terms = LinkTerms(
            endpoint=endpoint,
            connector_id_size=connector_id_size,
            listener_id_size=listener_id_size,
            connector_transactions=connector_transactions,
            listener_transactions=listener_transactions,
        )
        self.link = Link("connector", terms, limits=limits)
        self._address = (host, port)
        self._tls = tls
        self._backoff = backoff or Backoff()
        self._connect_timeout_s = connect_timeout_s
        self._close_timeout_s = close_timeout_s
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._unclaimed: deque[Receiver] = deque()
        self._gate = _Gate()
        self._connected = False
        self._opened: asyncio.Future[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._lost: ConnectionLost | None = None

    async def __aenter__(self) -> RelinkClient:
        await self._connect()
        self._keeper = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def was_shut_down(self) -> bool:
        """Both sides have said that they are through, and are."""
        return self.link.ended and self.link.shut_down and self.link.peer_shut_down

    @property
    def connected(self) -> bool:
        return self._connected

    def sender(self, channel: int = 0) -> Sender:
        """Our channel of that number."""
        sender = self._senders.get(channel)
        if sender is None:
            sender = self._senders[channel] = Sender(self, channel)
        return sender

    def receiver(self, channel: int = 0) -> Receiver:
        """The other side's channel of that number."""
        receiver = self._receivers.get(channel)
        if receiver is None:
            receiver = self._receivers[channel] = Receiver(self, channel)
        return receiver

    async def opened(self) -> AsyncIterator[Receiver]:
        """The channels that the other side opens and nobody asked `receiver` for, each once."""
        while True:
            while self._unclaimed:
                yield self._unclaimed.popleft()
            if self.was_shut_down:
                return
            self.require_alive()
            await self._gate.wait()

    async def multicast(self, channels: Sequence[int], *parts: Buffer) -> None:
        """Send one message to several channels, when all of them have room."""
        while not self.has_room(channels):
            await self._gate.wait()
        self.link.send_multicast(channels, parts)
        for channel in channels:
            self.sender(channel).count_multicast()
        self.wake()

    async def close(self) -> None:
        """Shut the link down, and wait until the other side has consumed what was sent.

        Raises RequestTimeout if it doesn't; then the connection is dropped.
        """
        if self._keeper is None:
            return
        try:
            if not self.link.ended and self._lost is None:
                for sender in self._senders.values():
                    sender.roll_back()
                self.link.shutdown()
                self.wake()
                await within(self._close_timeout_s, "the link did not end", self._until_ended())
        finally:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            self._keeper = None
            if self._connected:
                self.session.connection.close()
                self.session.wake()
            self.link.detach(ended=True)
            self._lose(ConnectionLost("the client is closed"))

    # Called by channels.

    def require_alive(self) -> None:
        if self._lost is not None:
            raise type(self._lost)(*self._lost.args)
        if self.link.ended:
            raise ConnectionLost("the link was shut down")

    def has_room(self, channels: Sequence[int]) -> bool:
        """Is there room in the windows, and in the socket if there is one? Raises LinkLost."""
        self.require_alive()
        if self.link.shut_down:
            raise ConnectionLost("the link was shut down")
        if self._connected and self.session.congested:
            return False
        return all(self.link.room(channel) >= channels.count(channel) for channel in set(channels))

    def wake(self) -> None:
        if self._connected:
            self.session.wake()

    def consumed_something(self) -> None:
        self._answer_shutdown()
        self.wake()

    # Called by the session.

    def handle_events(self, events: list[Event]) -> None:
        arrived: dict[int, int] = {}
        for event in events:
            match event:
                case MessageReceived(channel=channel, sequence=sequence):
                    if channel not in self._receivers:
                        self._unclaimed.append(self.receiver(channel))
                        self._gate.open()
                    self._receivers[channel].arrived(event)
                    arrived[channel] = sequence
                case Acknowledged(acknowledgement=kind, channel=channel, first=first, last=last):
                    self.sender(channel).acknowledged(kind, (last - first) % 2**32 + 1)
                    self._gate.open()
                case CommitReceived(channel=channel, first=first, last=last):
                    self.receiver(channel).decided((last - first) % 2**32 + 1, commit=True)
                case RollbackReceived(channel=channel, first=first, last=last):
                    self.receiver(channel).decided((last - first) % 2**32 + 1, commit=False)
                case CloseReceived(channel=channel):
                    self.receiver(channel).closed()
                case ChannelClosed(channel=channel):
                    self.sender(channel).closed()
                case LinkOpened():
                    self._connected = True
                    if self._opened is not None and not self._opened.done():
                        self._opened.set_result(None)
                case LinkForgotten():
                    self._lose(LinkLost(f"the listener forgot the link; {self._what_is_open()}"))
                case ShutdownReceived():
                    self._answer_shutdown()
                case ConnectionClosed() | ConnectionFailed():
                    self._disconnected(event)
        for channel, sequence in arrived.items():
            # With us it is as safe as the link itself, which lives in this process too.
            if self.link.is_receiving(channel):
                self.link.mark_received(channel, sequence)

    def handle_drain(self) -> None:
        self._look_again()

    # The connection.

    async def _connect(self) -> None:
        """Raises ConnectFailed."""
        self._opened = asyncio.get_running_loop().create_future()
        host, port = self._address
        await dial(host, port, self._make, self, tls=self._tls, timeout_s=self._connect_timeout_s)
        await self._opened

    def _make(self, now: float) -> RelinkConnection:
        link = self.link
        return RelinkConnection(
            "connector", now, limits=link.limits, link=link, require_old_link=link.id != 0
        )

    async def _run(self) -> None:
        try:
            await self._keep()
        except Exception as error:
            # Nobody awaits this task: whoever waits for a message must learn that none will come.
            _log.exception("reconnecting failed")
            self._lose(ConnectionLost(f"the client reconnects no more: {error}"))

    async def _keep(self) -> None:
        while not self.link.ended:
            if self._connected:
                await self._gate.wait()
                continue
            await asyncio.sleep(self._backoff.next_s())
            try:
                await self._connect()
                self._backoff.reset()
            except (ClientError, OSError) as error:
                _log.info("reconnecting: %s", error)

    def _disconnected(self, event: ConnectionClosed | ConnectionFailed) -> None:
        self._connected = False
        why = "the connection was closed"
        if isinstance(event, ConnectionFailed):
            why = f"the connection failed: {event.error}"
        if self.link.ended and not self.was_shut_down:
            self._lose(LinkLost(f"{why}; {self._what_is_open()}"))
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(ConnectFailed(f"no handshake: {why}"))
            self._opened.exception()
        self._look_again()

    def _lose(self, why: ConnectionLost) -> None:
        if self._lost is None and not self.was_shut_down:
            self._lost = why
        self._look_again()

    def _what_is_open(self) -> str:
        return f"{self.link.unconsumed} messages may not have been processed"

    def _look_again(self) -> None:
        self._gate.open()
        for sender in self._senders.values():
            sender.look_again()
        for receiver in self._receivers.values():
            receiver.look_again()

    def _answer_shutdown(self) -> None:
        """When the other side is through, so are we, once all has been consumed both ways."""
        link = self.link
        if not link.peer_shut_down or link.shut_down or link.ended or link.unconsumed:
            return
        if all(receiver.idle for receiver in self._receivers.values()):
            link.shutdown()
            self.wake()

    async def _until_ended(self) -> None:
        while not self.link.ended:
            await self._gate.wait()
