"""Long work of requests, in short turns: the event loop serves all peers in between.

A list of 50,000 queues, or a request with 50,000 messages, takes seconds. Such a handler takes
turns: it works for a few milliseconds, then everybody else is served. Requests that do long work at
the same time alternate, so that any number of them takes one turn in each round of the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from crosswire.hub.hub import Hub
from crosswire.hub.stored_queues import StoredQueue, read_stored_queues
from crosswire.server.server import Server
from crosswire.web.name_index import NameIndex
from crosswire.web.turn import Turn

__all__ = ["LongWork", "QueueTotals"]

_FRESH_S: Final = 1.0
_MANY: Final = 2_000


class QueueTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Counts over all queues; `messages` and `size_bytes` without dead letters."""

    queues: int
    messages: int
    size_bytes: int
    dead_letters: int


def _nothing() -> None:
    """Of requests without a server."""


def _never() -> bool:
    """Of requests without a server."""
    return False


class LongWork:
    """The turns of all requests, and what several of them need: names in order, and totals."""

    def __init__(
        self, enter: Callable[[], None] = _nothing, is_over: Callable[[], bool] = _never
    ) -> None:
        """`enter` is called when a turn begins; see `Turn`."""
        self._enter = enter
        self._is_over = is_over
        self.index = NameIndex()
        """The names of destinations in order."""
        self._known: Hub | None = None
        self._reading: asyncio.Future[dict[str, StoredQueue]] | None = None
        self._lock = asyncio.Lock()
        self._totals = QueueTotals(queues=0, messages=0, size_bytes=0, dead_letters=0)
        self._totals_at = float("-inf")

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """A turn, which the request renews by `Turn.pause`."""
        turn = Turn(self._lock, self._enter, self._is_over)
        await turn.begin()
        try:
            yield turn
        finally:
            turn.end()

    async def know_stored(self, server: Server, hub: Hub) -> None:
        """Once after a start: have the hub know what is stored of very many queues that nobody has
        used, before a list needs that of each of them."""
        log = server.log
        if log is None or self._known is hub:
            return
        if self._reading is None:
            numbers = hub.store.destinations()
            if len(numbers) - len(hub.opened_queues()) <= _MANY:
                return
            moment = log.moment()
            self._reading = asyncio.ensure_future(
                log.in_thread(
                    read_stored_queues,
                    hub.store,
                    moment.view,
                    dict(numbers),
                    moment.committed,
                    log.pause,
                )
            )
            # If the hub stops, nobody may be waiting for it any more.
            self._reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        reading = self._reading
        try:
            # All that wait for it wait for the same one, which ends with the hub.
            queues = await asyncio.shield(reading)
        finally:
            if self._reading is reading and reading.done():
                self._reading = None
        if self._known is not hub:
            self._known = hub
            hub.adopt_stored(queues)

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
