"""What the far end of every connection has: a beginning, an end, and a reason for it."""

from __future__ import annotations

import asyncio

from crosswire.errors import ConnectFailed, CrosswireError
from crosswire.session import Session
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed

__all__ = ["RemotePeer"]


class RemotePeer:
    """The far end of one connection: `opened` when it may be talked to, `ended` when it is gone.

    A protocol derives it with the session's `handle_events` and `handle_drain`; it sets `opened`,
    and calls `finish` with the last event.
    """

    session: Session

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.end: ConnectionClosed | ConnectionFailed | None = None

    async def close(self) -> None:
        """Say the protocol's goodbye and wait until the socket is closed."""
        self.session.connection.close()
        self.session.wake()
        await asyncio.wait([self.ended, self.session.gone])

    def finish(self, end: ConnectionClosed | ConnectionFailed) -> None:
        """The connection is over. Who has more to let go of does it before."""
        self.end = end
        if not self.opened.done():
            self.opened.set_exception(ConnectFailed(f"no handshake: {self.why()}"))
            self.opened.exception()
        self.ended.set_result(None)

    def why(self, fallback: CrosswireError | None = None) -> str:
        """How it ended, in words; what was wrong otherwise, if it has not."""
        match self.end:
            case ConnectionFailed(error=error):
                return f"the connection failed: {error}"
            case ConnectionClosed():
                return "the connection was closed"
        return str(fallback)
