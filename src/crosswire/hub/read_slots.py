"""Limits how many reads over many topics are under way at a time.

Each has up to a page of messages in memory between its turns, and all subscriptions that lag would
read at once. Who finds no slot reads nothing yet: it asks again when it is its turn, with what it
needs by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from crosswire.hub.dispatch import Dispatcher, DispatchLoop

__all__ = ["ReadSlots"]

_SLOTS: Final = 4


class ReadSlots:
    """Slots, and those who wait for one, in order."""

    def __init__(self, loop: DispatchLoop) -> None:
        self._loop = loop
        self._taken = 0
        self._waiting: dict[Dispatcher, Callable[[], None]] = {}
        self._next: Dispatcher | None = None

    def take(self, reader: Dispatcher, ask_again: Callable[[], None]) -> bool:
        """Whether it may read now; then it has to `release` the slot. If not, `ask_again` is called
        when it is its turn, and the reader is touched."""
        if self._taken < _SLOTS and (not self._waiting or reader is self._next):
            self._next = None
            self._taken += 1
            return True
        self._waiting[reader] = ask_again
        return False

    def release(self) -> None:
        """A read has ended."""
        self._taken -= 1
        if self._waiting:
            self._loop.touch(self)

    def dispatch(self, now: float) -> None:  # noqa: ARG002
        """Have the next one ask again. It may have no use for the slot any more: the one after it
        is next then."""
        self._next = None
        if self._waiting and self._taken < _SLOTS:
            self._next = next(iter(self._waiting))
            self._waiting.pop(self._next)()
            self._loop.touch(self._next)
            self._loop.touch(self)
