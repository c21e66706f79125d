"""A way to a hub that can be stopped up: what the hub sends is no longer read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Pipe:
    """Passes bytes on, in both directions, until it is set to `stall` the one from the hub."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    def stall(self) -> None:
        self._open.clear()

    def flow(self) -> None:
        self._open.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        for work in (self._pass(reader, far_writer), self._pass(far_reader, writer, self._open)):
            task = asyncio.create_task(work)
            self._tasks.add(task)

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        gate: asyncio.Event | None = None,
    ) -> None:
        try:
            while data := await reader.read(65536):
                if gate is not None:
                    await gate.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # the end of one side is the end of the other
        finally:
            writer.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


@asynccontextmanager
async def pipe_to(port: int) -> AsyncIterator[Pipe]:
    pipe = Pipe(port)
    server = await asyncio.start_server(pipe._accept, "127.0.0.1", 0)
    pipe.port = server.sockets[0].getsockname()[1]
    try:
        yield pipe
    finally:
        server.close()
        await pipe.close()
