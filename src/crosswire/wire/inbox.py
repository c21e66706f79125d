"""Bytes that wait for the rest of their frame."""

from __future__ import annotations

__all__ = ["Inbox"]

_SMALL = 4096
_COLLECT = 65536


class Inbox:
    """Collects the chunks of an unfinished frame and joins them once, when enough have come.

    A large frame is therefore copied once on its way in, however many reads bring it, and a peer
    that sends it in crumbs costs neither quadratic time nor an object per crumb.
    """

    __slots__ = ("_chunks", "_need", "size")

    def __init__(self) -> None:
        self._chunks: list[bytes | bytearray | memoryview] = []
        self._need = 0
        self.size = 0

    def push(self, data: bytes) -> bytes | None:
        """All bytes at hand as one run, or None while the frame at their head can't be whole."""
        if not self.size:
            return data
        chunks = self._chunks
        self.size += len(data)
        last = chunks[-1]
        if len(data) >= _SMALL:
            chunks.append(data)
        elif isinstance(last, bytearray) and len(last) < _COLLECT:
            last += data
        else:
            chunks.append(bytearray(data))
        if self.size < self._need:
            return None
        whole = b"".join(chunks)
        self.clear()
        return whole

    def keep(self, buffer: bytes, position: int, need: int) -> None:
        """Hold buffer[position:] back until `need` bytes are there; for an empty inbox only."""
        self.size = len(buffer) - position
        self._need = need
        if self.size:
            rest: bytes | memoryview = memoryview(buffer)[position:]
            self._chunks.append(bytes(rest) if self.size < _SMALL else rest)

    def clear(self) -> None:
        self._chunks.clear()
        self._need = 0
        self.size = 0

    def peek(self) -> bytes:
        """A copy of what waits."""
        return b"".join(self._chunks)
