"""How many live streams there may be, of all users and of each, and how much they may buffer."""

from __future__ import annotations

from collections import Counter
from typing import Final

from crosswire.errors import ServiceUnavailable

__all__ = ["StreamSlots"]

_STREAMS: Final = 64
_STREAMS_EACH: Final = 16
_BUFFERED_BYTES: Final = 64 << 20
_BUFFERED_EACH_BYTES: Final = 4 << 20


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

    @property
    def room_bytes(self) -> int:
        """How much each of them may buffer for a client that does not read: with many of them less,
        since clients that never read must not take the hub's memory."""
        return min(_BUFFERED_EACH_BYTES, _BUFFERED_BYTES // max(self._open.total(), 1))

    def leave(self, holder: str) -> None:
        """One less."""
        self._open[holder] -= 1
        if not self._open[holder]:
            del self._open[holder]
