"""Relink's client: an endpoint whose channels survive the loss of their connection.

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
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from crosswire.client.native.dial import (
    Addresses,
    Backoff,
    dial,
    handshake_failed,
    wait_opened,
    within,
)
from crosswire.client.native.relink.channels import Gate, Receiver, Sender
from crosswire.errors import (
    ClientError,
    ConnectionLost,
    LinkLost,
)
from crosswire.plurals import plural
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

__all__ = ["RelinkClient"]

_log = logging.getLogger("crosswire.client.native.relink")


class RelinkClient:
    """An open endpoint: a link that is resumed whenever its connection was lost.

    Channels are opened by using them. When the other side no longer knows the link, everything that
    waits raises LinkLost, and so does everything after it: only the application can know what is to
    be repeated. `others` are further addresses of the same hub, tried in turn.
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
        others: Sequence[tuple[str, int]] = (),
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
        self._addresses = Addresses(host, port, others)
        self._tls = tls
        self._backoff = backoff or Backoff()
        self._connect_timeout_s = connect_timeout_s
        self._close_timeout_s = close_timeout_s
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._unclaimed: deque[Receiver] = deque()
        self._gate = Gate()
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
        """Whether both sides have shut the link down, and all was consumed."""
        return self.link.ended and self.link.shut_down and self.link.peer_shut_down

    @property
    def connected(self) -> bool:
        """Whether the link has a connection now."""
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
        """The channels that the other side opens and that `receiver` was not called for."""
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
            # Until the socket is closed: a program that ends its loop now would leave it open.
            await asyncio.wait([self.session.gone])

    async def unless_ended(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for this work, or for the link's end: then the work is cancelled."""
        assert self._keeper is not None, "the client is connected"
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, self._keeper], return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()

    # Called by channels.

    def require_alive(self) -> None:
        """Raises LinkLost or ConnectionLost if the link has ended."""
        if self._lost is not None:
            raise type(self._lost)(*self._lost.args)
        if self.link.ended:
            raise ConnectionLost("the link was shut down")

    def has_room(self, channels: Sequence[int]) -> bool:
        """Whether these channels' windows, and the socket, have room. Raises LinkLost."""
        self.require_alive()
        if self.link.shut_down:
            raise ConnectionLost("the link was shut down")
        if self._connected and self.session.congested:
            return False
        return all(self.link.room(channel) >= channels.count(channel) for channel in set(channels))

    def wake(self) -> None:
        """Have what was sent on the link written, if it is connected."""
        if self._connected:
            self.session.wake()

    def consumed_something(self) -> None:
        """Messages were consumed: acknowledge them, and shut down if that was awaited."""
        self._answer_shutdown()
        self.wake()

    # Called by the session.

    def handle_events(self, events: list[Event]) -> None:
        """Pass events to their channels, then acknowledge messages as received."""
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
                    self.sender(channel).acknowledged(kind, _count(first, last))
                    self._gate.open()
                case CommitReceived(channel=channel, first=first, last=last):
                    self.receiver(channel).decided(_count(first, last), commit=True)
                case RollbackReceived(channel=channel, first=first, last=last):
                    self.receiver(channel).decided(_count(first, last), commit=False)
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
            # Received means safe: a message in this process is as safe as the link, which also
            # ends with the process.
            if self.link.is_receiving(channel):
                self.link.mark_received(channel, sequence)

    def handle_drain(self) -> None:
        """Wake senders: the other side reads again."""
        self._look_again()

    # The connection.

    async def _connect(self) -> None:
        """Raises ConnectFailed."""
        await self._addresses.reach(self._connect_to)

    async def _connect_to(self, host: str, port: int) -> None:
        self._opened = asyncio.get_running_loop().create_future()
        await dial(host, port, self._make, self, tls=self._tls, timeout_s=self._connect_timeout_s)
        await wait_opened(self.session, self._opened, self._connect_timeout_s)

    def _make(self, now: float) -> RelinkConnection:
        link = self.link
        return RelinkConnection(
            "connector", now, limits=link.limits, link=link, require_old_link=link.id != 0
        )

    async def _run(self) -> None:
        try:
            await self._keep()
        except Exception as error:
            # Nobody awaits this task: those who wait for a message must get the error.
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
            self._opened.set_exception(handshake_failed(self.session, why))
            self._opened.exception()
        self._look_again()

    def _lose(self, why: ConnectionLost) -> None:
        if self._lost is None and not self.was_shut_down:
            self._lost = why
        self._look_again()

    def _what_is_open(self) -> str:
        return f"{plural(self.link.unconsumed, 'message')} may not have been processed"

    def _look_again(self) -> None:
        self._gate.open()
        for sender in self._senders.values():
            sender.look_again()
        for receiver in self._receivers.values():
            receiver.look_again()

    def _answer_shutdown(self) -> None:
        """Shut down after the other side did, once all was consumed in both directions."""
        link = self.link
        if not link.peer_shut_down or link.shut_down or link.ended or link.unconsumed:
            return
        if all(receiver.idle for receiver in self._receivers.values()):
            link.shutdown()
            self.wake()

    async def _until_ended(self) -> None:
        while not self.link.ended:
            await self._gate.wait()


def _count(first: int, last: int) -> int:
    """The number of messages from one sequence number to another; they wrap at 32 bits."""
    return (last - first) % (1 << 32) + 1
