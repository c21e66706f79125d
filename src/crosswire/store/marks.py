"""How far the log goes, kept outside of the engine: it shows when the end of a log is missing.

One record in a small file, overwritten after each commit group and not synced. It may lag what is
on disk, but is never ahead of it: after a power cut `durable` is compared, otherwise `written`.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from struct import Struct as Layout
from typing import Final

import msgspec

__all__ = ["LogMark", "MarkFile"]

_LAYOUT: Final = Layout(">8sQQQQQQ")
_MAGIC: Final = b"cwmark 1"


class LogMark(msgspec.Struct, frozen=True, gc=False):
    """`written` and `durable` are numbers of commit groups; `newest_id` and `next_row` are what was
    given out when the last of them was sealed.

    `manifest` and `manifest_bytes` are the number of the engine's list of tables, and its length
    then: a shorter one has lost tables.
    """

    written: int
    durable: int
    newest_id: int = 0
    next_row: int = 1
    manifest: int = 0
    manifest_bytes: int = 0


class MarkFile:
    """The file with the mark. Raises OSError where it can't be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def load(self) -> LogMark | None:
        """None where there is no mark, or it is damaged."""
        try:
            data = self.path.read_bytes()
        except OSError:
            return None
        if len(data) != _LAYOUT.size + 4 or zlib.crc32(data[:-4]) != int.from_bytes(data[-4:]):
            return None
        magic, *numbers = _LAYOUT.unpack(data[:-4])
        return LogMark(*numbers) if magic == _MAGIC else None

    def save(self, mark: LogMark) -> None:
        """One write, of one sector: a killed process leaves the old record or the new one."""
        data = _LAYOUT.pack(
            _MAGIC,
            mark.written,
            mark.durable,
            mark.newest_id,
            mark.next_row,
            mark.manifest,
            mark.manifest_bytes,
        )
        if self._descriptor < 0:
            # Not truncated: a kill between that and the write would leave no record at all.
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(self._descriptor, len(data) + 4)
        os.pwrite(self._descriptor, data + zlib.crc32(data).to_bytes(4), 0)

    def close(self, *, sync: bool = False) -> None:
        """Close the file, which the next `save` opens again."""
        if self._descriptor >= 0:
            if sync:
                os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
