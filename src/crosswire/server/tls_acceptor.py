"""Accepts connections with TLS: the number of unfinished handshakes is limited, and few begin in
one turn.

An event loop's own server can't do that: a peer that connects and sends nothing would occupy an
open file until its handshake times out, and there is no handle to close it by. And hundreds of
peers that send their first bytes at the same moment would all be answered, with a signature each,
before anybody else is served.
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
from typing import Final

from crosswire.gateways.slots import PassingSockets

__all__ = ["HANDSHAKE_S", "TlsAcceptor"]

HANDSHAKE_S: Final = 5.0
_BACKLOG: Final = 1024
_AT_ONCE: Final = 64
"""Connections that are accepted before others have a turn."""
_BEGUN_AT_ONCE: Final = 4
"""Handshakes that begin before others have a turn: the hub's signature is most of their work."""
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

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port that was taken. Raises OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, kind, protocol, _, address in dict.fromkeys(found):
                listening = socket.socket(family, kind, protocol)
                self._listening.append(listening)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.bind(address)
                listening.listen(_BACKLOG)
                listening.setblocking(False)
        except OSError:
            self.close()
            raise
        for listening in self._listening:
            loop.add_reader(listening, self._accept, listening)
        taken: int = self._listening[0].getsockname()[1]
        return taken

    def close(self) -> None:
        """Accept no more connections; handshakes that have begun may end."""
        loop = asyncio.get_running_loop()
        listening, self._listening = self._listening, []
        for each in listening:
            loop.remove_reader(each)
            each.close()

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
            task.add_done_callback(self._tasks.discard)

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            with suppress(OSError):  # the peer has reset it already
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(HANDSHAKE_S):
                await self._first_bytes(accepted)
            await self._may_begin()
            await loop.connect_accepted_socket(
                self._make, accepted, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S
            )
        except (OSError, ssl.CertificateError):  # ssl.SSLError and TimeoutError are OSErrors
            accepted.close()
            self._failed()
        finally:
            self._handshakes.remove(accepted)

    async def _first_bytes(self, accepted: socket.socket) -> None:
        """Until the peer has sent something, or has closed its socket."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()
        loop.add_reader(accepted, _finish, arrived)
        try:
            await arrived
        finally:
            loop.remove_reader(accepted)

    async def _may_begin(self) -> None:
        """Until it is its turn, in the order in which peers sent their first bytes."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        if not self._is_letting_in:
            self._is_letting_in = True
            loop.call_soon(self._let_in)
        await turn

    def _let_in(self) -> None:
        for _ in range(min(_BEGUN_AT_ONCE, len(self._waiting))):
            _finish(self._waiting.popleft())
        self._is_letting_in = bool(self._waiting)
        if self._is_letting_in:
            asyncio.get_running_loop().call_soon(self._let_in)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _shut_down(accepted: socket.socket) -> None:
    with suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)
