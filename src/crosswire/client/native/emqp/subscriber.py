"""eMQP's subscriber: publications as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from crosswire.client.native.dial import Addresses, Backoff, StayingClient
from crosswire.client.native.emqp.peer import WITH_PINGS, EmqpPeer, connect_peer
from crosswire.errors import ConnectionLost
from crosswire.wire.contract import Event
from crosswire.wire.emqp.events import PeerReady, PublicationReceived
from crosswire.wire.emqp.frames import EmqpLimits
from crosswire.wire.zmtp.mechanisms import Mechanism

__all__ = ["SUBSCRIBERS_PORT", "EmqpSubscriber", "Publication"]

SUBSCRIBERS_PORT = 47299

Publication = tuple[str, bytes]
"""Topic and message."""


class _SubscriberPeer(EmqpPeer):
    """A subscriber's broker; it gets all subscriptions again on every connection."""

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
    """Publications, as an asynchronous iterator of topic and message; at most once.

    Topics match by their beginning, and "" is everything. It reconnects automatically: what is
    published meanwhile is missed. Up to `window` messages wait for the reader; then nothing is read
    from the broker. The iteration raises ConnectionLost when it reconnects no more.
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
        others: Sequence[tuple[str, int]] = (),
    ) -> None:
        super().__init__(
            lambda: self._addresses.reach(self._connect),
            backoff=backoff,
            connect_timeout_s=connect_timeout_s,
        )
        self._addresses = Addresses(host, port, others)
        self.topics = list(topics)
        self._window = window
        self._mechanism = mechanism
        self._limits = limits or WITH_PINGS
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
        """Close the connection; what was received can still be read, then the iteration ends."""
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

    async def _connect(self, host: str, port: int) -> _SubscriberPeer:
        peer = _SubscriberPeer(self)
        await connect_peer(
            peer,
            "subscriber",
            host,
            port,
            mechanism=self._mechanism,
            limits=self._limits,
            timeout_s=self._connect_timeout_s,
        )
        self._peer = peer
        return peer
