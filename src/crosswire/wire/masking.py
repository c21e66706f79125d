"""Credentials kept out of recordings: what a peer sends, byte for byte, with its secrets covered.

A secret is overwritten by as many asterisks, so that offsets and lengths stay true and what is
recorded can still be decoded. Each protocol that carries secrets has a `mask.py` that knows where.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from crosswire.wire.inbox import Inbox

__all__ = ["COVER", "EVERYTHING", "Mask", "cover"]

COVER: Final = b"*"
EVERYTHING: Final = 1 << 62
"""So many bytes may pass as never come: there are no more secrets."""


def cover(buffer: bytearray, start: int, end: int) -> None:
    """Overwrite buffer[start:end]."""
    buffer[start:end] = COVER * (end - start)


class Mask(ABC):
    """One peer's bytes, from the first on. Gives each byte back once, in order.

    What can't be judged before more has come is held back, at most until its frame is whole.
    """

    def __init__(self) -> None:
        self._passing = 0
        self._inbox = Inbox()

    @property
    def is_done(self) -> bool:
        """No more secrets can come: there is nothing to ask any longer."""
        return self._passing >= EVERYTHING >> 1 and not self._inbox.size

    def feed(self, data: bytes) -> bytes:
        """What may be recorded now."""
        buffer = self._inbox.push(data)
        if buffer is None:
            return b""
        position, need, end = 0, 0, len(buffer)
        masked: bytearray | None = None
        while position < end:
            if self._passing:
                step = min(self._passing, end - position)
                self._passing -= step
                position += step
                continue
            length, need, secrets = self._judge(buffer, position)
            if need:
                break
            for start, stop in secrets:
                masked = bytearray(buffer) if masked is None else masked
                cover(masked, start, stop)
            self._passing = length
        self._inbox.keep(buffer, position, need)
        if masked is not None:
            return bytes(masked[:position])
        return buffer if position == end else buffer[:position]

    def rest(self) -> bytes:
        """The connection is over: what was held back is covered, for nobody knows what it is."""
        held, self._inbox = self._inbox.size, Inbox()
        return COVER * held

    @abstractmethod
    def _judge(self, buffer: bytes, position: int) -> tuple[int, int, list[tuple[int, int]]]:
        """How many bytes from `position` on may pass, and where in them secrets stand.

        Or 0, and how many bytes it takes to tell.
        """
