"""Is the engine's list of tables intact? Looked at before the engine opens it.

From a list that was cut the engine takes what is left, and deletes the tables that are no longer in
it; from some damaged ones it reads without end. The list is a log: blocks of 32 KiB, records with a
header of a masked CRC-32C, a length and a type.
"""

from __future__ import annotations

from typing import Final

__all__ = ["crc32c", "fault_of"]

_BLOCK: Final = 32 << 10
_HEADER: Final = 7
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
    """With Castagnoli's polynomial: not the one of `zlib`."""
    table, value = _TABLE, 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ table[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


def _masked(checksum: int) -> int:
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def fault_of(data: bytes, known_bytes: int) -> str:
    """What is wrong with a list of tables, nothing if it is intact.

    A record at the end that is not complete was being written when the machine stopped, unless the
    list is known to have been longer: `known_bytes`.
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
