"""The broker at the far end of an eMQP connection, and how it is dialled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import count
from typing import Final
from uuid import uuid4

from crosswire.client.native.dial import dial, wait_opened, within
from crosswire.client.native.remote import RemotePeer
from crosswire.errors import ConnectionLost
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, Event
from crosswire.wire.emqp.connection import EmqpConnection
from crosswire.wire.emqp.events import PeerReady, PongReceived
from crosswire.wire.emqp.frames import EmqpLimits
from crosswire.wire.zmtp.mechanisms import Mechanism

__all__ = ["WITH_PINGS", "EmqpPeer", "connect_peer"]

WITH_PINGS: Final = EmqpLimits(ping_interval_s=10.0)
"""eMQP has no heartbeats for clients and subscribers: ZMTP's show whether the broker is alive."""


class EmqpPeer(RemotePeer):
    """The broker at the far end of one connection."""

    def __init__(self) -> None:
        super().__init__()
        self._drained = asyncio.Event()
        self._pongs: dict[bytes, asyncio.Future[None]] = {}
        self._contexts = count(1)

    @property
    def connection(self) -> EmqpConnection:
        """The session's connection."""
        connection = self.session.connection
        assert isinstance(connection, EmqpConnection)
        return connection

    async def flush(self) -> None:
        """Write what was sent; waits while the broker doesn't read."""
        self.session.wake()
        while self.session.congested and not self.ended.done():
            self._drained.clear()
            await self._drained.wait()

    async def synchronize(self, timeout_s: float | None = 10.0) -> None:
        """Wait until the broker has read all that was sent, which only ZMTP can confirm.

        With a broker whose ZMTP is too old for that, until it is written. Raises RequestTimeout or
        ConnectionLost.
        """
        if self.connection.closed:
            raise ConnectionLost("the connection ended; what was sent may not have been read")
        context = next(self._contexts).to_bytes(8)
        if not self.connection.send_ping(context):
            await self.flush()
            return
        self.session.wake()
        pong = self._pongs[context] = asyncio.get_running_loop().create_future()
        try:
            await within(timeout_s, "no sign of life from the broker", pong)
        finally:
            del self._pongs[context]

    # Called by the session.

    def handle_events(self, events: list[Event]) -> None:
        """Handle each event; the end comes last."""
        for event in events:
            if isinstance(event, ConnectionClosed | ConnectionFailed):
                self.finish(event)
            else:
                self.handle_event(event)

    def handle_event(self, event: Event) -> None:
        """Handle one event; overridden for those of a client, a subscriber or a worker."""
        if isinstance(event, PeerReady):
            self.open()
        elif isinstance(event, PongReceived):
            pong = self._pongs.get(event.context)
            if pong is not None and not pong.done():
                pong.set_result(None)

    def handle_drain(self) -> None:
        """Let those who flush go on."""
        self._drained.set()

    def finish(self, end: ConnectionClosed | ConnectionFailed) -> None:
        """Let those who flush go on: nothing will be written any more."""
        self._drained.set()
        super().finish(end)
        for pong in self._pongs.values():
            if not pong.done():
                pong.set_exception(self.lost())
                pong.exception()  # asyncio warns of an exception that nobody has fetched


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
    """Connect to the broker and wait for its handshake. Raises ConnectFailed.

    Each connection has an identity of its own: a deployed broker that has not noticed the end of
    the last one would refuse the same identity.
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
    await wait_opened(peer.session, peer.opened, timeout_s)


def _new_id() -> str:
    return str(uuid4())
