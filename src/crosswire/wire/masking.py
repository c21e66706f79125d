"""Keeps credentials out of recordings: a peer's bytes with its secrets masked.

A secret is overwritten by asterisks of the same number, so that offsets and lengths stay correct
and a recording can still be decoded. Each protocol that carries secrets has a `mask.py` that finds
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from crosswire.wire.contract import ReceiveBuffer

__all__ = ["COVER", "EVERYTHING", "Mask", "cover"]

COVER: Final = b"*"
EVERYTHING: Final = 1 << 62
"""More bytes than any connection has: no more secrets can follow."""


def cover(buffer: bytearray, start: int, end: int) -> None:
    """Overwrite buffer[start:end] with asterisks."""
    buffer[start:end] = COVER * (end - start)


class Mask(ABC):
    """Masks one peer's bytes, from the first on. Returns each byte once, in order.

    Bytes that can't be judged yet are held back, at most until their frame is complete.
    """

    def __init__(self) -> None:
        self._passing = 0
        self._buffer = ReceiveBuffer()

    @property
    def is_done(self) -> bool:
        """Whether no more secrets can follow: bytes need not be passed through any longer."""
        return self._passing >= EVERYTHING >> 1 and not self._buffer.size

    def feed(self, data: bytes) -> bytes:
        """The bytes that may be recorded now, masked."""
        buffer = self._buffer.push(data)
        if buffer is None:
            return b""
        position, need, end = 0, 0, len(buffer)
        masked: bytearray | None = None
        while position < end:
            if self._passing:
                # Judged before, perhaps in an earlier read, and free of secrets.
                step = min(self._passing, end - position)
                self._passing -= step
                position += step
                continue
            length, need, secrets = self._judge(buffer, position)
            if need:
                break
            for start, stop in secrets:
                # Copied only if there is a secret: nearly all bytes pass as they are.
                masked = bytearray(buffer) if masked is None else masked
                cover(masked, start, stop)
            self._passing = length
        self._buffer.keep(buffer, position, need)
        if masked is not None:
            return bytes(masked[:position])
        return buffer if position == end else buffer[:position]

    def rest(self) -> bytes:
        """The connection has ended: asterisks for all held back bytes, since any may be secret."""
        held, self._buffer = self._buffer.size, ReceiveBuffer()
        return COVER * held

    @abstractmethod
    def _judge(self, buffer: bytes, position: int) -> tuple[int, int, list[tuple[int, int]]]:
        """How many bytes from `position` on are judged, 0, and where secrets start and end in them.

        Or 0, how many bytes are needed to judge, and no secrets.
        """
