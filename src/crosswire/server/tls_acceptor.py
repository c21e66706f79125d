"""Accepts connections with TLS: the number of unfinished handshakes is limited, and few go on in
one turn.

An event loop's own server can't do that: a peer that connects and sends nothing would occupy an
open file until its handshake times out, and there is no handle to close it by. And hundreds of
peers that send their part of a handshake at the same moment would all be answered, with a signature
or a certificate to check each, before anybody else is served.

So handshakes have turns, and between them the event loop reads nothing of a peer: TLS begins on a
connection that the loop has already (`start_tls`), because that one can be paused. A selector of
our own, which the loop watches like a socket, reports who has sent something.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from selectors import EVENT_READ, DefaultSelector
from typing import Final, cast

from crosswire.gateways.slots import PassingSockets

__all__ = ["HANDSHAKE_S", "TlsAcceptor"]

HANDSHAKE_S: Final = 5.0
_BACKLOG: Final = 1024
_AT_ONCE: Final = 64
"""Connections that are accepted before others have a turn."""
_CONTINUED_AT_ONCE: Final = 4
"""Handshakes that begin or go on before others have a turn: signatures are most of their work, up
to a millisecond each."""
_READ_TURNS: Final = 4
"""Turns of the event loop in which a socket that may be read is read, and answered."""
_UNREAD_BYTES: Final = 1 << 16
"""The low-water mark of a socket that the loop has before TLS begins: a first flight is shorter, so
that it is not reported as readable."""
_PAUSE_S: Final = 0.1
"""How long nothing is accepted when the process has no open file left."""
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TlsAcceptor:
    """The listening sockets of one address.

    `make` makes the protocol of a connection, which is used once the handshake is done; `failed` is
    called for each handshake that fails.
    """

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext,
        handshakes: PassingSockets,
        failed: Callable[[], None],
    ) -> None:
        self._make = make
        self._tls = tls
        self._handshakes = handshakes
        self._failed = failed
        self._listening: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_letting_in = False
        self._arrivals = DefaultSelector()
        """Sockets whose next bytes are waited for, each with the future of who does."""

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port that was taken. Raises OSError."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, kind, protocol, _, address in dict.fromkeys(found):
                listening = socket.socket(family, kind, protocol)
                self._listening.append(listening)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.bind(address)
                listening.listen(_BACKLOG)
                listening.setblocking(False)
        except BaseException:  # a host that has no address, one that is in use, a cancellation
            self.close()
            raise
        for listening in self._listening:
            loop.add_reader(listening, self._accept, listening)
        loop.add_reader(self._arrivals.fileno(), self._on_arrivals)
        taken: int = self._listening[0].getsockname()[1]
        return taken

    def close(self) -> None:
        """Accept no more connections; handshakes that have begun may end."""
        loop = asyncio.get_running_loop()
        listening, self._listening = self._listening, []
        for each in listening:
            loop.remove_reader(each)
            each.close()
        self._close_arrivals()

    def _close_arrivals(self) -> None:
        """Once nothing is listening and no handshake is left."""
        if not self._listening and not self._tasks and self._arrivals.get_map() is not None:
            asyncio.get_running_loop().remove_reader(self._arrivals.fileno())
            self._arrivals.close()

    def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_AT_ONCE):
            try:
                accepted, _address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    loop.remove_reader(listening)
                    loop.call_later(_PAUSE_S, self._resume, listening)
                    return
                raise
            accepted.setblocking(False)
            # Closed by shutting it down: the event loop owns the file, and ends the handshake.
            close = partial(_shut_down, accepted)
            self._handshakes.add(accepted, close)
            task = loop.create_task(self._shake_hands(accepted))
            self._tasks.add(task)
            task.add_done_callback(self._on_ended)

    def _on_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._close_arrivals()

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        try:
            with suppress(OSError):  # the peer has reset it already
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(HANDSHAKE_S):
                await self._arrival(accepted)
            await self._turn()
            await self._begin(accepted)
        except (OSError, ssl.CertificateError):  # ssl.SSLError and TimeoutError are OSErrors
            accepted.close()
            self._failed()
        finally:
            self._handshakes.remove(accepted)

    async def _begin(self, accepted: socket.socket) -> None:
        """Shake hands, and give the connection to its protocol. Raises OSError and
        CertificateError."""
        loop = asyncio.get_running_loop()
        # uvloop reads from the moment on at which it has a socket, and can be paused only after.
        _set_low_water(accepted, _UNREAD_BYTES)
        transport, _ = await loop.connect_accepted_socket(_BeforeTls, accepted)
        handshake = loop.create_task(self._secure(transport))
        try:
            await asyncio.sleep(0)  # it is paused by now
            _set_low_water(accepted, 1)
            await self._read_in_turns(accepted, transport, handshake)
            await handshake
        except BaseException:
            transport.abort()
            raise
        finally:
            handshake.cancel()

    async def _secure(self, transport: asyncio.Transport) -> None:
        if transport.is_closing():
            raise ConnectionResetError("the peer has left")
        first = _FirstData()
        secured = await asyncio.get_running_loop().start_tls(
            transport, first, self._tls, server_side=True, ssl_handshake_timeout=HANDSHAKE_S
        )
        if secured is None or first.is_lost:
            raise ConnectionResetError("the peer has left")
        first.hand_over(secured, self._make())

    async def _read_in_turns(
        self,
        accepted: socket.socket,
        transport: asyncio.Transport,
        handshake: asyncio.Task[None],
    ) -> None:
        """Until the handshake has ended, have its socket read only when it is its turn."""
        while True:
            for _ in range(_READ_TURNS):
                await asyncio.sleep(0)
            if handshake.done():
                return
            transport.pause_reading()
            try:
                await self._arrival(accepted, handshake)
                if not handshake.done():
                    await self._turn()
            finally:
                transport.resume_reading()  # it may have ended with what was read before

    async def _arrival(
        self, accepted: socket.socket, handshake: asyncio.Task[None] | None = None
    ) -> None:
        """Until the peer has sent something or has left, or the handshake has ended without."""
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        number = accepted.fileno()
        if number < 0:
            raise ConnectionResetError("the socket is closed")
        self._forget(number)  # of a socket that was closed meanwhile
        self._arrivals.register(number, EVENT_READ, arrived)
        finish = partial(_finish_with, arrived)
        if handshake is not None:
            handshake.add_done_callback(finish)
        try:
            await arrived
        finally:
            if handshake is not None:
                handshake.remove_done_callback(finish)
            # The number may be another socket's by now.
            entry = self._arrivals.get_map().get(number)
            if entry is not None and entry.data is arrived:
                self._forget(number)

    def _forget(self, number: int) -> None:
        if number in self._arrivals.get_map():
            self._arrivals.unregister(number)

    def _on_arrivals(self) -> None:
        for entry, _ in self._arrivals.select(0):
            self._arrivals.unregister(entry.fd)
            _finish(entry.data)

    async def _turn(self) -> None:
        """Until it is its turn, in the order in which peers sent something."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        if not self._is_letting_in:
            self._is_letting_in = True
            loop.call_soon(self._let_in)
        await turn

    def _let_in(self) -> None:
        for _ in range(min(_CONTINUED_AT_ONCE, len(self._waiting))):
            _finish(self._waiting.popleft())
        self._is_letting_in = bool(self._waiting)
        if self._is_letting_in:
            asyncio.get_running_loop().call_soon(self._let_in)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _finish_with(future: asyncio.Future[None], _ended: asyncio.Task[None]) -> None:
    _finish(future)


def _set_low_water(accepted: socket.socket, size_bytes: int) -> None:
    """Have the socket reported as readable from this many bytes on, or at its end."""
    with suppress(OSError):  # it is closed
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)


def _shut_down(accepted: socket.socket) -> None:
    with suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)


class _BeforeTls(asyncio.Protocol):
    """Of a connection whose handshake has not begun."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._transport.pause_reading()

    def data_received(self, _data: bytes) -> None:
        """The peer has left already, or sends more than a first flight has."""
        self._transport.abort()


class _FirstData(asyncio.Protocol):
    """What follows a handshake in the same read, for the protocol that takes over."""

    def __init__(self) -> None:
        self._data: list[bytes] = []
        self._is_finished = False
        self.is_lost = False

    def data_received(self, data: bytes) -> None:
        self._data.append(data)

    def eof_received(self) -> None:
        self._is_finished = True

    def connection_lost(self, _error: Exception | None) -> None:
        self.is_lost = True

    def hand_over(self, transport: asyncio.Transport, protocol: asyncio.Protocol) -> None:
        """Give the connection, and what it has received, to its protocol."""
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        for data in self._data:
            protocol.data_received(data)
        if self._is_finished:
            protocol.eof_received()
