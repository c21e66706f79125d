"""Long work of requests, in short turns: the event loop serves all peers in between.

A list of 50,000 queues, or a request with 50,000 messages, takes seconds. Such a handler takes
turns: it works for a few milliseconds, then everybody else is served. Requests that do long work at
the same time alternate, so that any number of them takes one turn in each round of the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import msgspec

from crosswire.server.server import Server

__all__ = ["LongWork", "QueueTotals", "Turn"]

_TURN_S: Final = 0.005
_FRESH_S: Final = 1.0
_MANY: Final = 2_000
_SORTED: Final = 2_000

T = TypeVar("T")


class Turn:
    """A request's turn. What it iterates over may change at each `pause`."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock
        self._is_held = False
        self._ends_at = 0.0

    async def begin(self) -> None:
        """Wait for a turn."""
        await self._lock.acquire()
        self._is_held = True
        self._ends_at = time.perf_counter() + _TURN_S

    def end(self) -> None:
        """Let the next request have one."""
        if self._is_held:
            self._is_held = False
            self._lock.release()

    async def pause(self) -> None:
        """If this turn has taken long enough, let others work, and wait for the next one."""
        if time.perf_counter() >= self._ends_at:
            # Given back only after everybody else was served: else all requests that do long work
            # would have a turn in the same round of the event loop.
            await asyncio.sleep(0)
            self.end()
            await self.begin()


class QueueTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Counts over all queues; `messages` and `size_bytes` without dead letters."""

    queues: int
    messages: int
    size_bytes: int
    dead_letters: int


class LongWork:
    """The turns of all requests, and totals that several of them need."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._totals = QueueTotals(queues=0, messages=0, size_bytes=0, dead_letters=0)
        self._totals_at = float("-inf")

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """A turn, which the request renews by `Turn.pause`."""
        turn = Turn(self._lock)
        await turn.begin()
        try:
            yield turn
        finally:
            turn.end()

    async def first(
        self,
        names: Iterable[str],
        count: int,
        choose: Callable[[str], bool],
        turn: Turn,
    ) -> list[str]:
        """The first of the chosen names, in order: all of them sorted at once would take long."""
        found: list[str] = []
        chosen: list[str] = []
        for name in list(names):
            if choose(name):
                chosen.append(name)
                if len(chosen) == _SORTED:
                    found = sorted(found + chosen)[:count]
                    chosen = []
            await turn.pause()
        return sorted(found + chosen)[:count]

    async def totals(self, server: Server) -> QueueTotals:
        """Counts over all queues, at most a second old; of very many, as old as the last round of
        the statistics over them. On a standby those of what it has applied."""
        hub = server.hub_to_read()
        is_large = len(hub.store.destinations()) > _MANY
        if is_large and server.is_leading and server.statistics.totals[0]:
            queues, messages, size_bytes, dead_letters = server.statistics.totals
            return QueueTotals(
                queues=queues, messages=messages, size_bytes=size_bytes, dead_letters=dead_letters
            )
        async with self.turn() as turn:
            if time.monotonic() - self._totals_at < _FRESH_S:
                return self._totals
            queues = messages = size_bytes = dead_letters = 0
            for destination in list(hub.store.destinations()):
                if destination.startswith("queue/"):
                    length, size = hub.depth(destination)
                    queues += 1
                    if destination.endswith("/dead"):
                        dead_letters += length
                    else:
                        messages += length
                        size_bytes += size
                await turn.pause()
            self._totals = QueueTotals(
                queues=queues, messages=messages, size_bytes=size_bytes, dead_letters=dead_letters
            )
            self._totals_at = time.monotonic()
            return self._totals
