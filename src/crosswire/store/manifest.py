"""Checks of the engine's list of tables (MANIFEST) and logs, before the engine opens them.

The engine accepts a list that was cut, and deletes the tables that are no longer in it; some
damaged headers it reads again and again without end. Lists and logs have the same layout: blocks of
32 KiB, records with a header of a masked CRC-32C, a length and a type, none across the border of a
block.
"""

from __future__ import annotations

from mmap import mmap
from typing import Final

__all__ = ["HEADER_BYTES", "crc32c", "fault_of", "invalid_headers"]

_BLOCK: Final = 32 << 10
HEADER_BYTES: Final = 7
_HEADER: Final = HEADER_BYTES
_TYPES: Final = range(1, 5)
"""Whole, first, middle and last part of a record."""


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ 0x82F63B78 if value & 1 else value >> 1
        table.append(value)
    return table


_TABLE: Final = _table()


def crc32c(data: bytes) -> int:
    """CRC-32 with Castagnoli's polynomial, which `zlib` does not have."""
    table, value = _TABLE, 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ table[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


def _masked(checksum: int) -> int:
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def fault_of(data: bytes, known_bytes: int) -> str:
    """What is wrong with a list of tables, an empty text if it is intact.

    An incomplete record at the end was being written when the machine stopped, unless the list is
    known to have had `known_bytes`.
    """
    if len(data) < known_bytes:
        return f"it has {len(data)} bytes, and had {known_bytes}"
    at = 0
    while at < len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        end = at + _HEADER + int.from_bytes(data[at + 4 : at + 6], "little")
        is_at_end = at >= known_bytes and (end > len(data) or not any(data[at:]))
        if is_at_end and (len(data) < at + _HEADER or data[at + 6] in (0, *_TYPES)):
            return ""
        stored = int.from_bytes(data[at : at + 4], "little")
        if end > len(data) or data[at + 6] not in _TYPES or end - at > left:
            return f"its record at byte {at} is damaged"
        if _masked(crc32c(data[at + 6 : end])) != stored:
            return f"its record at byte {at} has the wrong checksum"
        at = end
    return ""


def invalid_headers(data: bytes | mmap) -> list[int]:
    """Offsets of headers in a log with a type that is never written: the engine would read them
    again and again."""
    found, at, size = [], 0, len(data)
    while at + _HEADER <= size:
        border = at - at % _BLOCK + _BLOCK
        if border - at < _HEADER:
            at = border
            continue
        kind = data[at + 6]
        if kind > 4:
            found.append(at)
            at = border
            continue
        end = at + _HEADER + data[at + 4] + (data[at + 5] << 8)
        # Zeros, or a length that exceeds the block: the engine continues with the next block.
        at = border if not kind or end > border else end
    return found
