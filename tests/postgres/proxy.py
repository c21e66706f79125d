"""A network in front of a server, which loses what a test wants to be lost."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from enum import Enum, auto
from typing import Final

__all__ = ["FaultyProxy", "Loss"]

_APPEND: Final = b"CWL\x01"
"""How the bytes of a record begin: what has them is an attempt to append."""


class Loss(Enum):
    """What happens to the next attempt to append."""

    REQUEST = auto()
    """The server never gets it, and the connection ends."""
    ANSWER = auto()
    """The server is done with it, and the connection ends before the client knows."""
    DELAY = auto()
    """The connection ends for the client; the server gets it when `deliver` is called."""


class FaultyProxy:
    """Forwards connections to a port of this machine. Start it on a running event loop."""

    def __init__(self, port: int) -> None:
        self.target_port = port
        self.port = 0
        self.next_loss: Loss | None = None
        self.is_open = True
        self.is_deaf = False
        """Nothing that clients send from now on reaches the server."""
        self._server: asyncio.Server | None = None
        self._late: list[tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for _, writer, _ in self._late:
            writer.transport.abort()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cut(self) -> None:
        """All connections end."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def deliver(self) -> None:
        """The server gets what is late, and has answered when this returns."""
        late, self._late = self._late, []
        for reader, writer, data in late:
            writer.write(data)
            await reader.read(65536)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.is_open:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            with suppress(OSError):
                await self._forward(reader, writer)
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        self._writers.add(server_writer)
        is_late = False
        answers = asyncio.ensure_future(self._copy(server_reader, writer))
        try:
            while data := await reader.read(1 << 20):
                if self.is_deaf:
                    continue
                loss = self.next_loss if _APPEND in data else None
                if loss is None:
                    server_writer.write(data)
                    await server_writer.drain()
                    continue
                self.next_loss = None
                answers.cancel()
                await asyncio.gather(answers, return_exceptions=True)
                if loss is Loss.DELAY:
                    is_late = True
                    self._late.append((server_reader, server_writer, data))
                elif loss is Loss.ANSWER:
                    server_writer.write(data)
                    await server_reader.read(65536)
                return
        finally:
            self._writers.discard(server_writer)
            answers.cancel()
            await asyncio.gather(answers, return_exceptions=True)
            if not is_late:
                server_writer.transport.abort()

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 20):
            writer.write(data)
            await writer.drain()
        writer.transport.abort()
