"""What is to be done when: a heap of actions."""

from __future__ import annotations

import heapq
from collections.abc import Callable

__all__ = ["Timers"]


class Timers:
    """Actions are called once, with the time that it is then.

    `sooner` is called when something is due before all else that waits.
    """

    def __init__(self) -> None:
        self.sooner: Callable[[], None] | None = None
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._owners: dict[int, float] = {}

    def next_due(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def run(self, now: float) -> None:
        """Do what is due."""
        while self._heap and self._heap[0][0] <= now:
            _, _, action = heapq.heappop(self._heap)
            action(now)

    def at(self, due: float, action: Callable[[float], None]) -> None:
        self._count += 1
        is_first = not self._heap or due < self._heap[0][0]
        heapq.heappush(self._heap, (due, self._count, action))
        if is_first and self.sooner is not None:
            self.sooner()

    def at_least(self, owner: object, due: float, action: Callable[[float], None]) -> None:
        """Like `at`, unless the owner is called earlier anyhow."""
        key = id(owner)
        waiting = self._owners.get(key)
        if waiting is not None and waiting <= due:
            return

        def fire(now: float) -> None:
            if self._owners.get(key) == due:
                del self._owners[key]
            action(now)

        self._owners[key] = due
        self.at(due, fire)
