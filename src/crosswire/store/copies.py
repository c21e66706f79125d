"""The second copy of what a store must never lose or guess: its own keys and names.

A file beside the engine's, so that no damage to one file takes both copies. Records are appended
and synced; each has a checksum of its own:

    4 bytes   start of a record
    4 bytes   CRC-32 of what follows, big-endian
    2 bytes   length of the key
    4 bytes   length of the value, or 0xffffffff for a key that is gone
    …         key, value
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from struct import Struct as Layout
from typing import Final

import msgspec

from crosswire.durable_files import replace_file

__all__ = ["Copies", "CopyFile"]

_START: Final = b"\xc5cw\n"
_SIZES: Final = Layout(">HI")
_HEADER: Final = len(_START) + 4 + _SIZES.size
_GONE: Final = 0xFFFFFFFF
_SLACK: Final = 1000


class Copies(msgspec.Struct):
    """What was read from the second copy.

    `is_there` is False without a file; `is_whole` means that every byte of it was readable.
    The end of a whole file may still be missing: it is compared with the first copy.
    """

    values: dict[bytes, bytes]
    is_there: bool
    is_whole: bool
    records: int = 0


class CopyFile:
    """The file with the second copy. Use from one thread at a time. Everything raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: dict[bytes, bytes] = {}
        self._records = 0
        self._must_rewrite = True

    @property
    def size_bytes(self) -> int:
        """How long the file is."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def load(self) -> Copies:
        """All that can be read: a damaged record is skipped, not those that follow it."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return Copies({}, False, False)
        values: dict[bytes, bytes] = {}
        at, records, is_whole = 0, 0, True
        while at < len(data):
            record = _parse(data, at)
            if record is None:
                is_whole = False
                at = data.find(_START, at + 1)
                if at < 0:
                    break
                continue
            key, value, at = record
            records += 1
            if value is None:
                values.pop(key, None)
            else:
                values[key] = value
        self._values, self._records = dict(values), records
        # An append after a torn record would follow bytes that no reader gets past.
        self._must_rewrite = not is_whole
        return Copies(values, True, is_whole, records)

    def save(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Bring these to the disk; None drops a key."""
        values = dict(self._values)
        for key, value in changes.items():
            if value is None:
                values.pop(key, None)
            else:
                values[key] = value
        if self._must_rewrite or self._records + len(changes) > 2 * len(values) + _SLACK:
            self.rewrite(values)
            return
        data = b"".join(_record(key, value) for key, value in changes.items())
        # If the append fails, the file may end in a torn record.
        self._must_rewrite = True
        with self.path.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._must_rewrite = False
        self._values = values
        self._records += len(changes)

    def rewrite(self, values: Mapping[bytes, bytes]) -> None:
        """Exactly these, in a new file that replaces the old one."""
        replace_file(self.path, b"".join(_record(key, values[key]) for key in sorted(values)))
        self._values = dict(values)
        self._records = len(values)
        self._must_rewrite = False


def _record(key: bytes, value: bytes | None) -> bytes:
    size = _GONE if value is None else len(value)
    body = _SIZES.pack(len(key), size) + key + (value or b"")
    return _START + zlib.crc32(body).to_bytes(4) + body


def _parse(data: bytes, at: int) -> tuple[bytes, bytes | None, int] | None:
    """Key, value and where the next record starts; None if there is no intact record here."""
    if len(data) < at + _HEADER or data[at : at + len(_START)] != _START:
        return None
    checksum = int.from_bytes(data[at + len(_START) : at + len(_START) + 4])
    begin = at + len(_START) + 4
    key_size, value_size = _SIZES.unpack_from(data, begin)
    key_at = begin + _SIZES.size
    end = key_at + key_size + (0 if value_size == _GONE else value_size)
    if end > len(data) or zlib.crc32(data[begin:end]) != checksum:
        return None
    key = data[key_at : key_at + key_size]
    return key, None if value_size == _GONE else data[key_at + key_size : end], end
