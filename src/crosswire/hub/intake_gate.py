"""The gate in front of the hub's intake: closed while too much waits to become durable.

While a replicated log does not answer, what was accepted stays in memory: the group in flight, and
the open one. Beyond the log's limit nothing more is read from peers, which wait with it. The gate
is asked before each part of what a peer sent, not by a timer: so the limit is exceeded by one such
part at most, whatever the number of peers and the speed of their networks.

With the local log there is no gate: an append ends, or fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from crosswire.errors import HubError

__all__ = ["IntakeGate"]


class IntakeGate:
    """Closes when `pending` has more than `limit_bytes`, opens again when it has half of that.

    Peers are not stopped and continued for every message, therefore the half.
    """

    def __init__(self, pending: Callable[[], int], limit_bytes: int) -> None:
        self.closings = 0
        """How many times it was closed."""
        self._pending = pending
        self._limit_bytes = limit_bytes
        self._is_closed = False
        self._resumes: list[Callable[[], None]] = []
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def waiting(self) -> int:
        """How many wait for it to open."""
        return len(self._resumes) + len(self._waiters)

    def is_closed(self) -> bool:
        """Must nothing more be taken in? Looks at what is pending."""
        if not self._is_closed and self._pending() > self._limit_bytes:
            self._is_closed = True
            self.closings += 1
        return self._is_closed

    def when_open(self, resume: Callable[[], None]) -> None:
        """Have this called once, when the closed gate opens."""
        self._resumes.append(resume)

    async def passed(self) -> None:
        """Returns at once, or when the gate opens. Raises the error that `end` was given."""
        while self.is_closed():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def look(self) -> None:
        """A group is durable: open the gate if that is enough."""
        if self._is_closed and self._pending() <= self._limit_bytes // 2:
            self._is_closed = False
            resumes, self._resumes = self._resumes, []
            for resume in resumes:
                resume()
            for waiter in self._take_waiters():
                waiter.set_result(None)

    def end(self, error: HubError) -> None:
        """The hub stops and never opens it again: those who await it get the error."""
        for waiter in self._take_waiters():
            waiter.set_exception(error)

    def _take_waiters(self) -> list[asyncio.Future[None]]:
        waiters, self._waiters = self._waiters, []
        # The tasks that awaited the others were cancelled.
        return [each for each in waiters if not each.done()]
