"""Limits how many large bodies of requests are in memory at a time.

What a handler makes of a body takes several times its size, until the last of it is stored. So a
request with a large one waits for a slot before its body is read.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from starlette.exceptions import HTTPException

__all__ = ["LARGE_BYTES", "BodySlots"]

LARGE_BYTES: Final = 64 * 1024
_SLOTS: Final = 4
_WAIT_S: Final = 10.0


class BodySlots:
    """Slots for all, and one for each user: who waits for its own occupies nothing of others."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(_SLOTS)
        self._own: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def slot(self, holder: str) -> AsyncIterator[None]:
        """A slot while the block runs. Raises HTTPException if there is none for too long."""
        own = self._own.setdefault(holder, asyncio.Semaphore(1 if holder else _SLOTS))
        self._users[holder] += 1
        try:
            async with _acquired(own), _acquired(self._slots):
                yield
        finally:
            self._users[holder] -= 1
            if not self._users[holder]:
                # Users come and go for as long as the hub runs.
                del self._users[holder], self._own[holder]


@asynccontextmanager
async def _acquired(slots: asyncio.Semaphore) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_WAIT_S):
            await slots.acquire()
    except TimeoutError:
        raise HTTPException(503, "too many large bodies at a time: retry later") from None
    try:
        yield
    finally:
        slots.release()
