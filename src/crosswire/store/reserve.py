"""Disk space that is kept for opening the store: a file of allocated blocks beside its tables.

Opening the store sorts what is in the write-ahead log into new tables before the log goes away, so
it takes as much room as the log has once more. A hub that was killed on a full disk would not start
again without that room. The file is removed before opening where too little else is free, and
allocated again as soon as there is room. It grows with the log, and while it is too small for the
log producers are refused, so that whatever fills the disk leaves the store able to open.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["WAL_BUFFERS", "Reserve", "flush_bytes", "free_bytes", "room_for_others"]

WAL_BUFFERS: Final = 4
"""The log holds at most so many buffers (and one more, while one is being sorted)."""
_NAME: Final = "RESERVE"
_OVERHEAD_BYTES: Final = 8 << 20
"""Manifest, options, the engine's own log file, and the first writes after opening."""
_FIRST_BYTES: Final = 2 << 20
_STEP_BYTES: Final = 1 << 20


def flush_bytes(buffer_bytes: int) -> int:
    """How much room it takes at most to sort the whole log into tables."""
    return (WAL_BUFFERS + 1) * buffer_bytes + _OVERHEAD_BYTES


def free_bytes(path: Path) -> int:
    """What an unprivileged process may still write to the file system of `path`."""
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize


def room_for_others(beside: Path, store: Path, least_bytes: int) -> Callable[[], bool]:
    """Tells whether the lake in the folder `beside` may write, so that the store always can.

    Where it lies on another file system than the store there is nothing to leave.
    """

    def has_room() -> bool:
        folder = beside
        while not folder.exists():
            folder = folder.parent
        if folder.stat().st_dev != store.stat().st_dev:
            return True
        return free_bytes(folder) >= least_bytes

    return has_room


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _STEP_BYTES) * _STEP_BYTES


class Reserve:
    """`is_held`: there is as much as opening the store would take now."""

    def __init__(self, store: Path, buffer_bytes: int) -> None:
        self.path = store / _NAME
        self.is_held = False
        self._store = store
        self._most_bytes = flush_bytes(buffer_bytes)
        self._can_allocate = True
        try:
            self._size_bytes = self.path.stat().st_size
        except FileNotFoundError:
            self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """How much is allocated."""
        return self._size_bytes

    def needed_bytes(self) -> int:
        """How much room opening the store takes, with the log that there is."""
        log_bytes = 0
        with os.scandir(self._store) as entries:
            for entry in entries:
                if entry.name.endswith(".log"):
                    try:
                        log_bytes += entry.stat().st_size
                    except FileNotFoundError:
                        # The engine removes a log on a thread of its own when it is done with it.
                        continue
        # A table has an index beside what the log has.
        needed = _FIRST_BYTES + log_bytes + log_bytes // 8
        return min(needed, self._most_bytes)

    def make_room(self) -> None:
        """Before the store is opened: give up the reserve where too little else is free."""
        if self._size_bytes and free_bytes(self._store) < self.needed_bytes():
            self.path.unlink(missing_ok=True)
            self._size_bytes = 0
            self.is_held = False

    def keep(self) -> None:
        """Allocate what is needed, if there is room for it."""
        needed = self.needed_bytes()
        if needed > self._size_bytes:
            # Ahead of the log, so that this is rare while it grows.
            ahead = min(2 * needed - _FIRST_BYTES, self._most_bytes)
            if not self._allocate(_rounded(ahead)):
                self._allocate(_rounded(needed))
        self.is_held = self._size_bytes >= needed or not self._can_allocate

    def _allocate(self, size: int) -> bool:
        if not self._can_allocate or free_bytes(self._store) < size - self._size_bytes:
            return False
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            os.posix_fallocate(descriptor, 0, size)
            self._size_bytes = size
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                # This file system can't: better no reserve than no hub.
                self._can_allocate = False
            # Others were quicker: what is not whole is given back.
            os.ftruncate(descriptor, self._size_bytes)
            return False
        finally:
            os.close(descriptor)
        return True
