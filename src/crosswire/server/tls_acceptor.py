"""Accepts connections with TLS: the number of unfinished handshakes is limited, and few go on in
one turn.

An event loop's own server can't do that: a peer that connects and sends nothing would occupy an
open file until its handshake times out, and there is no handle to close it by. And hundreds of
peers that send their part of a handshake at the same moment would all be answered, with a signature
or a certificate to check each, before anybody else is served.

So handshakes have turns. The event loop has the socket once a handshake has begun, and would read
what arrives at once: between turns the socket is given a low-water mark (SO_RCVLOWAT), below which
Linux does not report it as readable. Its end is reported all the same.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import sys
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from fcntl import ioctl
from functools import partial
from termios import FIONREAD
from typing import Any, Final

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
_HELD_BYTES: Final = 1 << 16
"""The low-water mark between turns: what a peer sends in a handshake is shorter."""
_LOOK_S: Final = 0.001
_LOOK_EACH_S: Final = 0.00002
"""How often is looked whether something has arrived: more rarely for many, a microsecond each."""
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
        self._held: dict[socket.socket, asyncio.Future[None]] = {}
        """Sockets below their low-water mark, and who waits for their next bytes."""
        self._is_looking = False

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
            await self._turn()
            handshake = loop.create_task(
                loop.connect_accepted_socket(
                    self._make, accepted, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S
                )
            )
            try:
                if sys.platform == "linux":
                    await self._read_in_turns(accepted, handshake)
                await handshake
            finally:
                handshake.cancel()
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

    async def _read_in_turns(self, accepted: socket.socket, handshake: asyncio.Task[Any]) -> None:
        """Until the handshake has ended, have its socket read only when it is its turn."""
        try:
            while True:
                for _ in range(_READ_TURNS):
                    await asyncio.sleep(0)
                if handshake.done():
                    return
                _hold(accepted, _HELD_BYTES)
                await self._next_bytes(accepted, handshake)
                if handshake.done():
                    return
                await self._turn()
                _hold(accepted, 1)
        finally:
            _hold(accepted, 1)

    async def _next_bytes(self, accepted: socket.socket, handshake: asyncio.Task[Any]) -> None:
        """Until something has arrived, or the handshake has ended without."""
        loop = asyncio.get_running_loop()
        arrived = self._held[accepted] = loop.create_future()
        if not self._is_looking:
            self._is_looking = True
            loop.call_later(_LOOK_S, self._look)
        finish = partial(_finish_with, arrived)
        handshake.add_done_callback(finish)
        try:
            await arrived
        finally:
            handshake.remove_done_callback(finish)
            self._held.pop(accepted, None)

    def _look(self) -> None:
        """Sockets below their mark are not reported: ask each how much it has."""
        for accepted, arrived in self._held.items():
            if _unread_bytes(accepted):
                _finish(arrived)
        self._is_looking = bool(self._held)
        if self._is_looking:
            delay_s = max(_LOOK_S, _LOOK_EACH_S * len(self._held))
            asyncio.get_running_loop().call_later(delay_s, self._look)

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


def _finish_with(future: asyncio.Future[None], _ended: asyncio.Task[Any]) -> None:
    _finish(future)


def _hold(accepted: socket.socket, size_bytes: int) -> None:
    """Have the socket reported as readable from this many bytes on. With what it has already, it is
    reported at once."""
    with suppress(OSError):  # it is closed
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)


def _unread_bytes(accepted: socket.socket) -> int:
    size_bytes = array("i", [0])
    with suppress(OSError, ValueError):  # it is closed, which ends the handshake
        ioctl(accepted, FIONREAD, size_bytes)
    return size_bytes[0]


def _shut_down(accepted: socket.socket) -> None:
    with suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)
