"""How many live streams there may be, of all users and of each."""

from __future__ import annotations

from collections import Counter
from typing import Final

from crosswire.errors import ServiceUnavailable

__all__ = ["StreamSlots"]

_STREAMS: Final = 64
_STREAMS_EACH: Final = 16


class StreamSlots:
    """How many streams there are, of all users and of each."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    def enter(self, holder: str) -> None:
        """One more. Raises ServiceUnavailable."""
        most = _STREAMS_EACH if holder else _STREAMS
        if self._open.total() >= _STREAMS or self._open[holder] >= most:
            raise ServiceUnavailable("there are too many live streams: close one, or retry later")
        self._open[holder] += 1

    def leave(self, holder: str) -> None:
        """One less."""
        self._open[holder] -= 1
        if not self._open[holder]:
            del self._open[holder]
