"""Lines of standard input or a file as they arrive, in bounded memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from threading import Semaphore, Thread
from typing import Final

from crosswire.errors import CrosswireError

__all__ = ["read_lines"]

_CHUNK_BYTES: Final = 1 << 18
_LONGEST_BYTES: Final = 64 << 20
"""No protocol carries a longer message."""


async def read_lines(descriptor: int) -> AsyncGenerator[list[bytes], None]:
    """All lines that one read brought, without their ends, again and again until the end.

    The next read is under way while the caller works, and no more than that: who can't take the
    lines as fast as they come makes their sender wait. Raises CrosswireError for a line that is too
    long, or a file that can't be read.
    """
    chunks = _Chunks(descriptor)
    parts: list[bytes] = []
    size_bytes = number = 0
    while chunk := await chunks.next():
        first, *others = chunk.split(b"\n")
        parts.append(first)
        size_bytes += len(first)
        if size_bytes > _LONGEST_BYTES:
            raise CrosswireError(f"line {number + 1} has more than {_LONGEST_BYTES >> 20} MiB")
        if others:
            # Joined once: a long line that grew with each chunk would be copied again and again.
            lines = [b"".join(parts), *others[:-1]]
            parts, size_bytes = [others[-1]], len(others[-1])
            number += len(lines)
            yield [line.removesuffix(b"\r") for line in lines]
    if size_bytes:
        yield [b"".join(parts).removesuffix(b"\r")]


class _Chunks:
    """What a thread reads, one chunk ahead.

    Not asyncio's threads, which the program would wait for at its end: a read of a terminal ends
    when somebody presses a key.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._wanted = Semaphore(1)
        self._arrived: asyncio.Queue[bytes | OSError] = asyncio.Queue()
        Thread(target=self._read, name="crosswire-input", daemon=True).start()

    async def next(self) -> bytes:
        """The next chunk, empty at the end. Raises CrosswireError."""
        chunk = await self._arrived.get()
        if isinstance(chunk, OSError):
            raise CrosswireError(f"can't read the input: {chunk.strerror}")
        self._wanted.release()
        return chunk

    def _read(self) -> None:
        while self._wanted.acquire():
            chunk: bytes | OSError
            try:
                chunk = os.read(self._descriptor, _CHUNK_BYTES)
            except OSError as error:
                chunk = error
            if self._loop.is_closed():
                return  # the program ended meanwhile
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, chunk)
            if not chunk or isinstance(chunk, OSError):
                return
