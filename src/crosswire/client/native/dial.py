"""Connecting clients: once, and again with growing delays whenever the connection ends."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, Self, TypeVar
from typing import Protocol as Shape

from crosswire.errors import (
    ClientError,
    ConnectFailed,
    ConnectionLost,
    HandshakeFailed,
    RequestFailed,
    RequestTimeout,
    TlsFailed,
    WrongProtocol,
)
from crosswire.session import Session, SessionOwner, use_keep_alive
from crosswire.wire.contract import Connection
from crosswire.wire.registry import begins_as_expected, recognize, title_of

__all__ = [
    "Addresses",
    "Backoff",
    "OpenPeer",
    "Redialler",
    "StayingClient",
    "dial",
    "handshake_failed",
    "wait_opened",
    "within",
]

_log = logging.getLogger("crosswire.client.native")

_TEMPORARY: Final = frozenset(
    {"connection-shut-down", "internal", "provider_lost", "refused", "timeout", "timeout-error"}
)
"""Codes of refusals that a later attempt may not get; any other would come again."""

_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE"})
"""What OpenSSL calls an answer that is not TLS."""

T = TypeVar("T")


async def within(timeout_s: float | None, what: str, awaitable: Awaitable[T]) -> T:
    """The result. Raises RequestTimeout, whose text begins with `what`: "no response to $echo"."""
    try:
        async with asyncio.timeout(timeout_s):
            return await awaitable
    except TimeoutError:
        raise RequestTimeout(f"{what} within {timeout_s:g} s") from None


async def dial(
    host: str,
    port: int,
    connect: Callable[[float], Connection],
    owner: SessionOwner,
    *,
    tls: ssl.SSLContext | None = None,
    timeout_s: float = 10.0,
    keep_alive: bool = False,
) -> Session:
    """A session on a new socket, before its protocol's handshake. Raises ConnectFailed.

    `keep_alive` is for protocols without a ping of their own: TCP detects that the peer is gone.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            _, session = await loop.create_connection(
                lambda: Session(connect, owner), host, port, ssl=tls
            )
    except ssl.SSLError as error:
        if error.reason in _NO_TLS:
            raise WrongProtocol(f"{host}:{port} does not speak TLS: is the port right?") from error
        raise TlsFailed(f"no TLS with {host}:{port}: {error}") from error
    except (OSError, TimeoutError) as error:
        reason = str(error) or "no answer in time"
        raise ConnectFailed(f"can't connect to {host}:{port}: {reason}") from error
    if keep_alive:
        use_keep_alive(session.transport)
    return session


async def wait_opened(session: Session, opened: Awaitable[None], timeout_s: float) -> None:
    """Wait for the handshake; a socket without one is closed at once, whatever the reason.

    Raises HandshakeFailed or WrongProtocol.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await opened
        # Some handshakes can be misread: any 24 bytes may be a Relink listener's.
        if not begins_as_expected(session.connection, session.first_bytes):
            raise handshake_failed(session, "it begins differently")
    except TimeoutError:
        session.abort()
        await asyncio.wait([session.gone])
        raise handshake_failed(session, f"none within {timeout_s:g} s") from None
    except BaseException:
        session.abort()
        await asyncio.wait([session.gone])
        raise


def handshake_failed(session: Session, why: str) -> HandshakeFailed:
    """The error of a connection that ended before its handshake was done: what answered, if it
    is not what we speak."""
    connection = session.connection
    expected, answered = title_of(connection), recognize(session.first_bytes)
    address = _address_of(session)
    if isinstance(session.lost, ssl.SSLError):
        # With TLS 1.3 a server refuses our certificate after we think that all is well.
        alert = (session.lost.reason or str(session.lost)).lower().replace("_", " ")
        return TlsFailed(f"the peer refuses TLS: {alert}")
    if answered is not None and answered != expected:
        return WrongProtocol(
            f"{address} speaks {answered}, not {expected}: is the port right?", found=answered
        )
    if not session.first_bytes:
        # Not all servers answer with an alert of TLS: asyncio's, which the hub uses, hang up.
        if session.opened and session.transport.get_extra_info("sslcontext") is not None:
            hint = f"is it a port for {expected}? Does it require a client certificate?"
        else:
            hint = f"is it a port for {expected}, without TLS?"
        why = f"{why}; nothing was received: {hint}"
    return HandshakeFailed(f"no handshake with {address}: {why}")


def _address_of(session: Session) -> str:
    peer = session.transport.get_extra_info("peername") if session.opened else None
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "the peer"


class Addresses:
    """The addresses of a server, tried in turn from the one that was used last."""

    def __init__(self, host: str, port: int, others: Sequence[tuple[str, int]] = ()) -> None:
        self._addresses = deque([(host, port), *others])

    async def reach(self, connect: Callable[[str, int], Awaitable[T]]) -> T:
        """The connection to the first address that takes it.

        Raises the last ConnectFailed if none does, and any other error at once: an address that
        refuses our credentials is the right one.
        """
        reasons: dict[str, None] = {}
        for _ in range(len(self._addresses)):
            try:
                return await connect(*self._addresses[0])
            except ConnectFailed as error:
                self._addresses.rotate(-1)
                reasons[str(error)] = None
                if len(self._addresses) == 1:
                    raise
                failed = error
        raise ConnectFailed("; ".join(reasons)) from failed


class Backoff:
    """Growing delays between attempts, with jitter so that many clients don't return at once."""

    def __init__(
        self,
        first_s: float = 1.0,
        most_s: float = 60.0,
        *,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._chance = chance
        self._ceiling_s = first_s

    def next_s(self) -> float:
        """Between half of the present ceiling and the whole of it; then the ceiling doubles."""
        delay_s = self._ceiling_s * (0.5 + 0.5 * self._chance())
        self._ceiling_s = min(self._ceiling_s * 2, self._most_s)
        return delay_s

    def reset(self) -> None:
        """Start again with the first delay: an attempt has succeeded."""
        self._ceiling_s = self._first_s


class OpenPeer(Shape):
    """The far end of a session that is open; `ended` is done when it no longer is."""

    @property
    def session(self) -> Session:
        """The session on its socket."""

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when the connection is gone."""

    async def close(self) -> None:
        """Send the protocol's goodbye and wait until the socket is closed."""


P = TypeVar("P", bound=OpenPeer)


class Redialler(Generic[P]):
    """Keeps a connection: connects, waits for its end, backs off, connects again.

    Failures to connect are retried: no network, no listener, a failed handshake, a refusal that may
    pass. Any other exception ends it, and everybody who waits for a peer gets the reason.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[P]],
        *,
        backoff: Backoff | None = None,
        on_end: Callable[[ConnectionLost], None] | None = None,
    ) -> None:
        self._connect = connect
        self._backoff = backoff or Backoff()
        self._on_end = on_end
        self._peer: P | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.on_lost: Callable[[], None] | None = None
        """Called whenever a connection has ended, before the next is made."""
        self._closing: dict[Session, None] = {}
        self._ended: asyncio.Future[None] | None = None
        self._reason: ConnectionLost | None = None

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when it connects no more; with the reason, unless `stop` was called."""
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    async def start(self) -> P:
        """Make the first connection, which is not retried: a wrong address raises at once."""
        self._peer = await self._connect()
        self._task = asyncio.create_task(self._run())
        return self._peer

    async def peer(self, timeout_s: float | None = None) -> P:
        """The connected peer; waits while there is none.

        Raises RequestTimeout, or ConnectionLost when it connects no more.
        """
        if self._peer is not None and not self._peer.ended.done():
            return self._peer
        return await within(timeout_s, "no connection", self._next_peer())

    async def stop(self) -> None:
        """Close the connection and connect no more."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None
        self._changed.set()
        if not self.ended.done():
            self.ended.set_result(None)
        if self._peer is not None:
            await self._peer.close()
        for session in list(self._closing):
            session.abort()
        if self._closing:
            await asyncio.wait([session.gone for session in self._closing])

    def _keep_until_closed(self, session: Session) -> None:
        """A connection that has ended may have its socket open for some seconds, until its last
        bytes are read: `stop` closes it, too."""
        if not session.gone.done():
            self._closing[session] = None
            session.gone.add_done_callback(lambda _: self._closing.pop(session, None))

    async def _next_peer(self) -> P:
        while self._peer is None or self._peer.ended.done():
            if self._reason is not None:
                raise ConnectionLost(str(self._reason)) from self._reason.__cause__
            if self._task is None:
                raise ConnectionLost("the client is closed")
            self._changed.clear()
            await self._changed.wait()
        return self._peer

    async def _run(self) -> None:
        try:
            await self._keep()
        except Exception as error:
            # Nobody awaits this task: without this a program would wait for a peer for ever.
            if not isinstance(error, ClientError):
                _log.exception("reconnecting failed")
            self._reason = ConnectionLost(f"the client reconnects no more: {error}")
            self._reason.__cause__ = error
            self._changed.set()
            if not self.ended.done():
                self.ended.set_exception(self._reason)
                self.ended.exception()  # asyncio warns of an exception that nobody has fetched
            if self._on_end is not None:
                self._on_end(self._reason)

    async def _keep(self) -> None:
        while True:
            if self._peer is not None:
                await asyncio.wait([self._peer.ended])
                self._keep_until_closed(self._peer.session)
                self._peer = None
                if self.on_lost is not None:
                    self.on_lost()
            # Before the first attempt too: a server that was restarted would get all at once.
            await asyncio.sleep(self._backoff.next_s())
            try:
                self._peer = await self._connect()
            except (ClientError, OSError) as error:
                if isinstance(error, RequestFailed) and error.code not in _TEMPORARY:
                    raise
                _log.info("reconnecting: %s", error)
                continue
            self._backoff.reset()
            self._changed.set()


class StayingClient(Generic[P]):
    """A client that stays connected. Requests wait while there is no connection."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[P]],
        *,
        backoff: Backoff | None = None,
        connect_timeout_s: float = 10.0,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._redialler: Redialler[P] = Redialler(
            connect, backoff=backoff, on_end=self._on_redialler_end
        )

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when the client reconnects no more: after `close`, or with ConnectionLost.

        Programs that only receive await it, so that an end is not mistaken for silence.
        """
        return self._redialler.ended

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Have `on_lost` called whenever a connection has ended, before the next is made."""
        self._redialler.on_lost = on_lost

    async def __aenter__(self) -> Self:
        await self._redialler.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def peer(self, timeout_s: float | None = None) -> P:
        """The connected server; waits while there is none. Raises RequestTimeout."""
        return await self._redialler.peer(timeout_s)

    async def close(self) -> None:
        """Close the connection with the protocol's goodbye, and connect no more."""
        await self._redialler.stop()

    async def _opened(self, peer: P, opened: Awaitable[None]) -> P:
        """The peer, when its handshake is done and what earlier connections had is restored."""
        await wait_opened(peer.session, opened, self._connect_timeout_s)
        try:
            await self._restore(peer)
        except BaseException:
            # Half restored is of no use to anybody, and its subscriptions would hold messages.
            await peer.close()
            raise
        return peer

    async def _restore(self, peer: P) -> None:
        """Subscribe and serve again on a new connection. Raises ClientError."""

    def _on_redialler_end(self, reason: ConnectionLost) -> None:
        """Fail what waits in the client: it connects no more."""
