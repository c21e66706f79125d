"""eMQP for asyncio programs: ask for jobs, publish, subscribe, schedule.

async with EmqpClient("127.0.0.1") as client:
    total = await client.call("billing.sum_up", [2026, 11], queue="reports")

The broker may be Crosswire or a deployed EventMQ. The jobs are done by a worker:
`crosswire.client.native.emqp.worker`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from crosswire.client.native.dial import Backoff, StayingClient, dial, within
from crosswire.client.native.remote import RemotePeer
from crosswire.envelope import Property
from crosswire.errors import (
    ConnectionLost,
    LocalProtocolError,
    RequestFailed,
)
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, Event
from crosswire.wire.emqp.connection import EmqpConnection
from crosswire.wire.emqp.events import PeerReady, PublicationReceived, ReplyReceived
from crosswire.wire.emqp.frames import EmqpLimits
from crosswire.wire.emqp.headers import Headers
from crosswire.wire.emqp.jobs import failure_of, serialize_job, value_of
from crosswire.wire.zmtp.mechanisms import Mechanism

__all__ = ["EmqpClient", "EmqpPeer", "EmqpSubscriber", "Publication", "connect_peer"]

CLIENTS_PORT = 47291
SUBSCRIBERS_PORT = 47299

Publication = tuple[str, bytes]
"""Topic and message."""

_WATCHFUL = EmqpLimits(ping_interval_s=10.0)
"""eMQP has no heartbeats for clients and subscribers, so ZMTP's tell whether the broker lives."""


class EmqpPeer(RemotePeer):
    """The broker at the far end of one connection; `opened` when it may be talked to."""

    def __init__(self) -> None:
        super().__init__()
        self._drained = asyncio.Event()

    @property
    def connection(self) -> EmqpConnection:
        connection = self.session.connection
        assert isinstance(connection, EmqpConnection)
        return connection

    async def flush(self) -> None:
        """Have what was sent written; waits while the broker doesn't keep up."""
        self.session.wake()
        while self.session.congested and not self.ended.done():
            self._drained.clear()
            await self._drained.wait()

    # Called by the session.

    def handle_events(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, ConnectionClosed | ConnectionFailed):
                self.finish(event)
            else:
                self.handle_event(event)

    def handle_event(self, event: Event) -> None:
        """Whoever has more to hear than that the broker is there extends this."""
        if isinstance(event, PeerReady):
            self.opened.set_result(None)

    def handle_drain(self) -> None:
        self._drained.set()

    def finish(self, end: ConnectionClosed | ConnectionFailed) -> None:
        self._drained.set()
        super().finish(end)


async def connect_peer(
    peer: EmqpPeer,
    role: str,
    host: str,
    port: int,
    *,
    queues: Sequence[tuple[int, str]] = (),
    mechanism: Mechanism | None = None,
    limits: EmqpLimits | None = None,
    timeout_s: float = 10.0,
) -> None:
    """Dial the broker and wait until it may be talked to. Raises ConnectFailed.

    Each connection has an identity of its own: a deployed broker that has not noticed the end of
    the last one would not let the same identity in again.
    """

    def connect(now: float) -> EmqpConnection:
        return EmqpConnection(
            role,
            now,
            limits=limits,
            queues=queues,
            identity=_new_id().encode(),
            mechanism=mechanism,
            next_id=_new_id,
            unix_offset_s=time.time() - now,
        )

    await dial(host, port, connect, peer, timeout_s=timeout_s)
    await peer.opened


def _new_id() -> str:
    return str(uuid4())


# ---------------------------------------------------------------------------------------- client


class _ClientPeer(EmqpPeer):
    """A client's broker: requests wait here for what they were promised."""

    def __init__(self) -> None:
        super().__init__()
        self._receipts: dict[str, asyncio.Future[bytes]] = {}
        self._results: dict[str, asyncio.Future[bytes]] = {}

    async def request(
        self, queue: str, headers: Headers, message: bytes, wait_s: float | None
    ) -> bytes:
        """The result if one is requested, else the receipt."""
        msgid = self.send_request(queue, headers, message)
        waiting = self._results if headers.reply_requested else self._receipts
        future = waiting[msgid] = asyncio.get_running_loop().create_future()
        self.session.wake()
        what = "no result" if headers.reply_requested else "no receipt"
        try:
            return await within(wait_s, f"{what} from queue {queue}", future)
        finally:
            waiting.pop(msgid, None)

    def send_request(self, queue: str, headers: Headers, message: bytes) -> str:
        try:
            return self.connection.send_request(queue, str(headers), message)
        except LocalProtocolError as error:
            raise ConnectionLost(f"the request was not sent: {self.why(error)}") from None

    def handle_event(self, event: Event) -> None:
        if not isinstance(event, ReplyReceived):
            super().handle_event(event)
            return
        if event.request is None:
            future = self._receipts.get(event.message.decode(errors="replace"))
        else:
            future = self._results.get(event.request)
        if future is not None and not future.done():
            future.set_result(event.message)

    def finish(self, end: ConnectionClosed | ConnectionFailed) -> None:
        super().finish(end)
        lost = ConnectionLost(f"{self.why()}; what was under way may or may not have been done")
        for future in (*self._receipts.values(), *self._results.values()):
            if not future.done():
                future.set_exception(lost)


class EmqpClient(StayingClient[_ClientPeer]):
    """A client that stays connected. What is asked while there is no connection waits for one.

    Every request gets the broker's receipt; with `reply_requested` the result too. A deployed
    EventMQ gives a receipt only if a worker can take the job at once, and never passes results on.
    """

    def __init__(
        self,
        host: str,
        port: int = CLIENTS_PORT,
        *,
        subscribers_port: int = SUBSCRIBERS_PORT,
        mechanism: Mechanism | None = None,
        limits: EmqpLimits | None = None,
        backoff: Backoff | None = None,
        connect_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(self._connect, backoff=backoff)
        self._host = host
        self._port = port
        self._subscribers_port = subscribers_port
        self._mechanism = mechanism
        self._limits = limits or _WATCHFUL
        self._connect_timeout_s = connect_timeout_s

    async def request(
        self,
        message: bytes,
        *,
        queue: str = "default",
        reply_requested: bool = False,
        guarantee: bool = False,
        retry_count: int = 0,
        timeout_s: float = 0,
        properties: Mapping[str, Property] | None = None,
        receipt: bool = True,
        wait_s: float | None = 30.0,
    ) -> bytes | None:
        """Have a worker of `queue` do something; `timeout_s` is for the worker, 0 is for ever.

        With `reply_requested` gives the result, without it None as soon as the broker took the
        request, or, without `receipt`, when it is on its way. Raises RequestFailed when the broker
        gave up on it, RequestTimeout when nothing was heard for `wait_s`, or ConnectionLost: then
        nobody knows whether it was carried out, and it is not repeated.
        """
        headers = Headers.of(
            reply_requested=reply_requested,
            guarantee=guarantee,
            retry_count=retry_count,
            timeout_s=timeout_s,
            properties=properties,
        )
        peer = await self._redialler.peer(wait_s)
        if not receipt and not reply_requested:
            peer.send_request(queue, headers, message)
            await peer.flush()
            return None
        answer = await peer.request(queue, headers, message, wait_s)
        if not reply_requested:
            return None
        if failure := failure_of(answer):
            raise RequestFailed("failed", f"{failure[0]} (attempts: {failure[1]})", data=answer)
        return answer

    async def call(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        class_args: Sequence[Any] = (),
        class_kwargs: Mapping[str, Any] | None = None,
        queue: str = "default",
        guarantee: bool = False,
        retry_count: int = 0,
        timeout_s: float = 0,
        wait_s: float | None = 30.0,
    ) -> Any:
        """What `module.function` or `module:Class.method` of a worker gives back.

        A worker reports an exception like a result, as text; `TimeoutError` is one of them. Raises
        as `request` does, and RequestFailed for a result that is none.
        """
        message = serialize_job(
            name, args, kwargs, class_args=class_args, class_kwargs=class_kwargs
        )
        answer = await self.request(
            message,
            queue=queue,
            reply_requested=True,
            guarantee=guarantee,
            retry_count=retry_count,
            timeout_s=timeout_s,
            wait_s=wait_s,
        )
        assert answer is not None
        try:
            return value_of(answer)
        except ValueError as error:
            raise RequestFailed("invalid", str(error), data=answer) from None

    async def publish(
        self, topic: str, message: bytes, *, properties: Mapping[str, Property] | None = None
    ) -> None:
        """Hand a message to all subscribers of `topic`. The protocol has no receipt for it."""
        headers = str(Headers.of(properties=properties)) if properties else None
        peer = await self._redialler.peer(self._connect_timeout_s)
        self._sending(peer, lambda: peer.connection.send_publish(topic, message, headers))
        await peer.flush()

    async def schedule(
        self,
        message: bytes,
        *,
        queue: str = "default",
        interval_s: float | None = None,
        cron: str | None = None,
        nohaste: bool = False,
        run_count: int | None = None,
        guarantee: bool = False,
    ) -> None:
        """Have `message` sent to `queue` every `interval_s`, or when `cron` says.

        An interval begins with a first run at once unless `nohaste`. The same call scheduled again
        replaces what was. There is no receipt.
        """
        if (interval_s is None) == (cron is None):
            raise ValueError("a schedule has either an interval or a cron")
        headers = str(Headers.of(guarantee=guarantee, nohaste=nohaste, run_count=run_count))
        peer = await self._redialler.peer(self._connect_timeout_s)
        self._sending(
            peer,
            lambda: peer.connection.send_schedule(
                queue, headers, message, interval_s=interval_s, cron=cron
            ),
        )
        await peer.flush()

    async def unschedule(self, message: bytes, *, queue: str = "default") -> None:
        """End the schedule of this message."""
        peer = await self._redialler.peer(self._connect_timeout_s)
        self._sending(peer, lambda: peer.connection.send_unschedule(queue, "", message))
        await peer.flush()

    def subscribe(self, *topics: str) -> EmqpSubscriber:
        """Everything published under topics that start so; see EmqpSubscriber."""
        return EmqpSubscriber(
            self._host,
            self._subscribers_port,
            topics,
            mechanism=self._mechanism,
            limits=self._limits,
            connect_timeout_s=self._connect_timeout_s,
        )

    @staticmethod
    def _sending(peer: EmqpPeer, send: Callable[[], object]) -> None:
        try:
            send()
        except LocalProtocolError as error:
            raise ConnectionLost(f"not sent: {peer.why(error)}") from None

    async def _connect(self) -> _ClientPeer:
        peer = _ClientPeer()
        await connect_peer(
            peer,
            "client",
            self._host,
            self._port,
            mechanism=self._mechanism,
            limits=self._limits,
            timeout_s=self._connect_timeout_s,
        )
        return peer


# ------------------------------------------------------------------------------------ subscriber


class _SubscriberPeer(EmqpPeer):
    def __init__(self, owner: EmqpSubscriber) -> None:
        super().__init__()
        self._owner = owner

    def handle_event(self, event: Event) -> None:
        if isinstance(event, PublicationReceived):
            self._owner._take(event, self)
            return
        if isinstance(event, PeerReady):
            for topic in self._owner.topics:
                self.connection.send_subscribe(topic)
        super().handle_event(event)


class EmqpSubscriber(StayingClient[_SubscriberPeer]):
    """What is published, as an asynchronous iterator of topic and message; at most once.

    Topics match by their beginning, and "" is everything. Reconnects by itself: what is published
    meanwhile is missed. Up to `window` messages wait for the reader; then the broker does. The
    iteration raises ConnectionLost when it can't reconnect any more.
    """

    def __init__(
        self,
        host: str,
        port: int = SUBSCRIBERS_PORT,
        topics: Sequence[str] = ("",),
        *,
        window: int = 10_000,
        mechanism: Mechanism | None = None,
        limits: EmqpLimits | None = None,
        backoff: Backoff | None = None,
        connect_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(self._connect, backoff=backoff)
        self._host = host
        self._port = port
        self.topics = list(topics)
        self._window = window
        self._mechanism = mechanism
        self._limits = limits or _WATCHFUL
        self._connect_timeout_s = connect_timeout_s
        self._waiting: deque[Publication] = deque()
        self._arrived = asyncio.Event()
        self._closed = False
        self._reason: ConnectionLost | None = None
        self._peer: _SubscriberPeer | None = None

    def __aiter__(self) -> EmqpSubscriber:
        return self

    async def __anext__(self) -> Publication:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            if self._reason is not None:
                raise self._reason
            self._arrived.clear()
            await self._arrived.wait()
        publication = self._waiting.popleft()
        peer = self._peer
        if peer is not None and len(self._waiting) <= self._window // 2:
            connection = peer.connection
            if connection.paused:
                connection.paused = False
                peer.session.wake()
        return publication

    async def close(self) -> None:
        """What has arrived can still be read; then the iteration ends."""
        self._closed = True
        self._arrived.set()
        await super().close()

    def _on_redialler_end(self, reason: ConnectionLost) -> None:
        self._reason = reason
        self._arrived.set()

    def _take(self, event: PublicationReceived, peer: _SubscriberPeer) -> None:
        self._waiting.append((event.topic, event.message))
        self._arrived.set()
        if len(self._waiting) >= self._window:
            peer.connection.paused = True

    async def _connect(self) -> _SubscriberPeer:
        peer = _SubscriberPeer(self)
        await connect_peer(
            peer,
            "subscriber",
            self._host,
            self._port,
            mechanism=self._mechanism,
            limits=self._limits,
            timeout_s=self._connect_timeout_s,
        )
        self._peer = peer
        return peer
