"""Limits how many requests read the log at a time, of all and of each user.

They share two threads. What is streamed takes one of them for a step at a time, and others are
served in between. A plan or a search takes it for seconds: of these a user has one at a time, so
that nobody keeps all threads busy.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from crosswire.errors import ServiceUnavailable

__all__ = ["LogSlots"]

_READERS: Final = 32
_STREAMS_EACH: Final = 8
_SEARCHES_EACH: Final = 1
_WAIT_S: Final = 8.0


class LogSlots:
    """A `holder` is a user or an address; "" has no share below the total."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(_READERS)
        self._own: dict[tuple[str, int], asyncio.Semaphore] = {}
        self._users: Counter[tuple[str, int]] = Counter()

    def stream(self, holder: str) -> AbstractAsyncContextManager[None]:
        """For what is read in short steps. Raises ServiceUnavailable if all are taken for long."""
        return self._slot(holder, _STREAMS_EACH)

    def search(self, holder: str) -> AbstractAsyncContextManager[None]:
        """For what may take a thread for seconds. Raises ServiceUnavailable like `stream`."""
        return self._slot(holder, _SEARCHES_EACH)

    @asynccontextmanager
    async def _slot(self, holder: str, most: int) -> AsyncIterator[None]:
        key = holder, most
        own = self._own.setdefault(key, asyncio.Semaphore(most if holder else _READERS))
        self._users[key] += 1
        try:
            # Its own first: who waits for those occupies nothing of others.
            async with _acquired(own), _acquired(self._all):
                yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._own[key]


@asynccontextmanager
async def _acquired(slots: asyncio.Semaphore) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_WAIT_S):
            await slots.acquire()
    except TimeoutError:
        raise ServiceUnavailable("too many read the log at once") from None
    try:
        yield
    finally:
        slots.release()
