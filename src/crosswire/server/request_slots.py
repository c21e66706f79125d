"""Limits how many requests do something costly at a time, of all users and of each."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from crosswire.errors import ServiceUnavailable

__all__ = ["RequestSlots"]


class RequestSlots:
    """Slots for all, and of these a few for each holder, a user or an address. Who finds them taken
    waits `wait_s` for one of its own, and as long for one of all, then gets `refusal`."""

    def __init__(self, total: int, wait_s: float, refusal: str) -> None:
        self._total = total
        self._wait_s = wait_s
        self._refusal = refusal
        self._all = asyncio.Semaphore(total)
        self._own: dict[tuple[str, int], asyncio.Semaphore] = {}
        self._users: Counter[tuple[str, int]] = Counter()

    @asynccontextmanager
    async def slot(self, holder: str, each: int) -> AsyncIterator[None]:
        """A slot while the block runs, of the `each` that this holder may have; kinds of requests
        with another number count on their own. The holder "" has no share below the total. Raises
        ServiceUnavailable."""
        key = holder, each
        own = self._own.setdefault(key, asyncio.Semaphore(each if holder else self._total))
        self._users[key] += 1
        try:
            # Its own first: who waits for those occupies nothing of others.
            async with self._acquired(own), self._acquired(self._all):
                yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                # Users and addresses come and go for as long as the hub runs.
                del self._users[key], self._own[key]

    @asynccontextmanager
    async def _acquired(self, slots: asyncio.Semaphore) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._wait_s):
                await slots.acquire()
        except TimeoutError:
            raise ServiceUnavailable(self._refusal) from None
        try:
            yield
        finally:
            slots.release()
