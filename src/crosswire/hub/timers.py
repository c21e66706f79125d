"""Timers: actions and when they are due."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

from crosswire.hub.dispatch import Callbacks

__all__ = ["Timers"]

_AGAIN_S: Final = 1.0

_Action = Callable[[float], None]


class Timers:
    """Actions are called once, with the hub's time.

    One that raises harms no other: it is logged and counted by `callbacks`, and the rest runs.
    `sooner` is called when an action is due before all others. `is_over`: whether the turn of the
    event loop has had its time.
    """

    def __init__(self, callbacks: Callbacks, is_over: Callable[[], bool] | None = None) -> None:
        self.sooner: Callable[[], None] | None = None
        self._callbacks = callbacks
        self._is_over = is_over
        self._heap: list[tuple[float, int, _Action, object | None]] = []
        self._count = 0
        self._owners: dict[int, float] = {}

    def next_due(self) -> float | None:
        """When the first action is due; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def run(self, now: float) -> None:
        """Call what is due, until the turn is over; the rest stays due.

        What becomes due meanwhile waits for the next call, so that an action that is always due
        again can't keep the caller here.
        """
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap))
        due.reverse()
        try:
            while due:
                at, _, action, owner = due.pop()
                if owner is not None:
                    if self._owners.get(id(owner)) != at:
                        # Replaced by an earlier one, which has requested its next time since.
                        continue
                    del self._owners[id(owner)]
                error = self._callbacks.run("timer", action, now)
                if error is not None and owner is not None:
                    # It did not get as far as requesting its next time.
                    self.at_least(owner, now + _AGAIN_S, action)
                if self._is_over is not None and self._is_over():
                    break
        finally:
            for entry in due:
                heapq.heappush(self._heap, entry)

    def at(self, due: float, action: _Action) -> None:
        """Call it once when `due` has come."""
        self._push(due, action, None)

    def at_least(self, owner: object, due: float, action: _Action) -> None:
        """Like `at`, but an owner is called for the earliest of its times only.

        It requests the next one itself when it is called. One whose action raised is called again
        after a second.
        """
        waiting = self._owners.get(id(owner))
        if waiting is not None and waiting <= due:
            return
        self._owners[id(owner)] = due
        self._push(due, action, owner)

    def _push(self, due: float, action: _Action, owner: object | None) -> None:
        self._count += 1
        is_first = not self._heap or due < self._heap[0][0]
        # The entry keeps its owner alive: no other object gets the same `id()` meanwhile.
        heapq.heappush(self._heap, (due, self._count, action, owner))
        if is_first and self.sooner is not None:
            self.sooner()
