"""The far end of a client's connection: its beginning, its end and the reason, pending replies."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from crosswire.client.native.dial import handshake_failed, within
from crosswire.errors import ConnectionLost, CrosswireError
from crosswire.session import Session
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, Event

__all__ = ["PendingReplies", "RemotePeer"]

T = TypeVar("T")


class RemotePeer(ABC):
    """The far end of one connection: `opened` when it can be used, `ended` when it is gone.

    A protocol derives it with the session's `handle_events`, which sets `opened` and calls `finish`
    with the last event.
    """

    session: Session

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.end: ConnectionClosed | ConnectionFailed | None = None

    @abstractmethod
    def handle_events(self, events: list[Event]) -> None:
        """Act on the events of one read; called by the session."""

    def handle_drain(self) -> None:
        """The peer reads again; for those who wait meanwhile."""

    async def close(self) -> None:
        """Send the protocol's goodbye and wait until the socket is closed."""
        self.session.connection.close()
        self.session.wake()
        await asyncio.wait([self.ended, self.session.gone])

    def open(self) -> None:
        """The handshake is done; the caller may have given up meanwhile."""
        if not self.opened.done():
            self.opened.set_result(None)

    def finish(self, end: ConnectionClosed | ConnectionFailed) -> None:
        """The connection has ended. Overriding methods fail what is pending before they call it."""
        self.end = end
        if not self.opened.done():
            self.opened.set_exception(handshake_failed(self.session, self.why()))
            self.opened.exception()  # asyncio warns of an exception that nobody has fetched
        self.ended.set_result(None)

    def why(self, fallback: CrosswireError | None = None) -> str:
        """The reason of the end as text; `fallback` if the connection has not ended."""
        match self.end:
            case ConnectionFailed(error=error):
                return f"the connection failed: {error}"
            case ConnectionClosed():
                return "the connection was closed"
        return str(fallback)

    def lost(self) -> ConnectionLost:
        """The error for requests without a reply: nobody knows whether they were carried out."""
        return ConnectionLost(f"{self.why()}; what was under way may or may not have been done")


class PendingReplies(Generic[T]):
    """Requests of one connection that wait for their reply, by the protocol's identifier."""

    def __init__(self) -> None:
        self._futures: dict[int, asyncio.Future[T]] = {}
        self._on_success: dict[int, Callable[[bytes], None]] = {}

    async def wait(
        self,
        identifier: int,
        what: str,
        *,
        timeout_s: float | None,
        on_success: Callable[[bytes], None] | None = None,
    ) -> T:
        """The reply. Raises RequestTimeout, which begins with `what`, or ConnectionLost.

        `on_success` is called with the data of a success before any event after it is handled. The
        caller's task runs only later: a delivery that follows in the same read would find a
        subscription that nobody knows yet.
        """
        future = self.expect(identifier)
        if on_success is not None:
            self._on_success[identifier] = on_success
        try:
            return await within(timeout_s, what, future)
        finally:
            self._futures.pop(identifier, None)
            self._on_success.pop(identifier, None)

    def expect(self, identifier: int) -> asyncio.Future[T]:
        """The reply, for callers that send many requests and wait for all of them at once."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._futures[identifier] = future
        return future

    def forget(self, identifiers: Iterable[int]) -> None:
        """Nobody waits for these any more."""
        for identifier in identifiers:
            self._futures.pop(identifier, None)

    def resolve(self, identifier: int, reply: T, success: bytes | None) -> None:
        """A reply has come, with the data of a success; one that nobody waits for is dropped."""
        future = self._futures.get(identifier)
        if future is not None and not future.done():
            if success is not None and identifier in self._on_success:
                self._on_success[identifier](success)
            future.set_result(reply)

    def fail(self, error: ConnectionLost) -> None:
        """No reply will come any more."""
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)
