"""Disk space that is kept for opening the store: a file of allocated blocks beside its tables.

Opening the store sorts what is in the write-ahead log into new tables before the log goes away, so
it takes as much room as the log has once more. A hub that was killed on a full disk would not start
again without that room. The file is made smaller before opening where too little else is free, and
takes back what is left when the store has done its first writes. It grows with the log, and while
it is too small for the log producers are refused, so that whatever fills the disk leaves the store
able to open. What it has beyond the room that opening takes at least is for the store's own small
writes on a full disk, such as what consumers settle.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Final

__all__ = ["RESERVE", "WAL_BUFFERS", "Reserve", "flush_bytes", "free_bytes", "room_for_others"]

WAL_BUFFERS: Final = 4
"""The log holds at most this number of buffers, and one more while one is being sorted."""
RESERVE: Final = "RESERVE"
_OVERHEAD_BYTES: Final = 8 << 20
"""Manifest, options, the engine's own log file, and the first writes after opening."""
_FIRST_BYTES: Final = 4 << 20
"""What is kept beside the room for the log."""
_LEAST_BYTES: Final = 2 << 20
"""What stays of that for the next start: small writes get no more of it."""
_MARGIN_BYTES: Final = 64 << 10
"""Left free beside the reserve, for what the engine writes on threads of its own."""
_AMPLE_BYTES: Final = 256 << 20
_AMPLE_S: Final = 0.01
"""With this much free, the disk is not looked at again for so long: to ask for every small group
costs a part of what its write does. Who fills all of it meanwhile makes a group fail, which is
tried again with what the reserve gives."""
_ATTEMPTS: Final = 8
_SMALL_BYTES: Final = 256 << 10
_STEP_BYTES: Final = 1 << 20
_PAGE_BYTES: Final = 4096


def flush_bytes(buffer_bytes: int) -> int:
    """How much room it takes at most to sort the whole log into tables."""
    return (WAL_BUFFERS + 1) * buffer_bytes + _OVERHEAD_BYTES


def free_bytes(path: Path) -> int:
    """What an unprivileged process may still write to the file system of `path`."""
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize


def room_for_others(beside: Path, store: Path, least_bytes: int) -> Callable[[], bool]:
    """Returns a check whether the lake in the folder `beside` may write, so that the store always
    can. A lake on another file system than the store always may.
    """

    def has_room() -> bool:
        folder = beside
        while not folder.exists():
            folder = folder.parent
        if folder.stat().st_dev != store.stat().st_dev:
            return True
        return free_bytes(folder) >= least_bytes

    return has_room


def _rounded(size_bytes: int, step_bytes: int = _STEP_BYTES) -> int:
    return -(-size_bytes // step_bytes) * step_bytes


class Reserve:
    """The file of allocated blocks.

    `is_held` means that it is as large as opening the store requires now.
    """

    def __init__(self, store: Path, buffer_bytes: int) -> None:
        self.path = store / RESERVE
        self.is_held = False
        self._store = store
        self._most_bytes = flush_bytes(buffer_bytes)
        self._can_allocate = True
        self._slack_bytes = 0
        self._ample_until = 0.0

    @property
    def size_bytes(self) -> int:
        """How much is allocated. Looked up each time: the file may have been removed."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def needed_bytes(self) -> int:
        """How much room is kept for opening the store, with the log that there is."""
        return min(_FIRST_BYTES + self._table_bytes(), self._most_bytes)

    def _least_bytes(self) -> int:
        return min(_LEAST_BYTES + self._table_bytes(), self._most_bytes)

    def _table_bytes(self) -> int:
        """How much room the log takes when it is sorted into tables."""
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
        return log_bytes + log_bytes // 8

    def make_room(self) -> None:
        """Before the store is opened: give up of the reserve what is not free otherwise.

        That of a store that another hub has open is not ours to give up. Nothing is taken back
        before `keep` is called: the first writes need the room too.
        """
        lacking = self.needed_bytes() - free_bytes(self._store)
        if lacking > 0 and self.size_bytes and not self._is_in_use():
            self._shrink(self.size_bytes - lacking)
            self.is_held = False
        self._slack_bytes = self._most_bytes

    def can_open(self) -> bool:
        """Is there room to open the store once more, with what the reserve has?"""
        return free_bytes(self._store) + self.size_bytes >= self._least_bytes()

    def give(self, size_bytes: int) -> bool:
        """Make room for a small write of the store's own; False if that is not possible, or not
        necessary."""
        lacking = size_bytes + _MARGIN_BYTES - free_bytes(self._store)
        if lacking <= 0 or size_bytes > _SMALL_BYTES:
            return False
        size = self.size_bytes
        given = min(lacking, size - self._least_bytes())
        if given <= 0:
            return False
        self._shrink(size - given)
        return True

    def _shrink(self, size: int) -> None:
        # Whole pages: the rest of one would not be free.
        with suppress(OSError):
            os.truncate(self.path, max(size, 0) // _PAGE_BYTES * _PAGE_BYTES)

    def _is_in_use(self) -> bool:
        try:
            with (self._store / "LOCK").open("rb+") as lock:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def before_write(self, size_bytes: int) -> None:
        """The log is about to grow by this size: the reserve has to grow before, because another
        process may fill the disk right after."""
        self._slack_bytes -= size_bytes + size_bytes // 8
        if self._slack_bytes < 0:
            self.keep(size_bytes)
        now = monotonic()
        if now < self._ample_until:
            return
        if free_bytes(self._store) >= _AMPLE_BYTES:
            self._ample_until = now + _AMPLE_S
        else:
            self.give(size_bytes)

    def keep(self, more_bytes: int = 0) -> None:
        """Allocate what is needed, with `more_bytes` in the log, if there is room for it."""
        needed = min(self.needed_bytes() + more_bytes + more_bytes // 8, self._most_bytes)
        if self.size_bytes < min(needed + _STEP_BYTES, self._most_bytes):
            # Ahead of the log, so that this is rare while it grows.
            ahead = needed + max(needed - _FIRST_BYTES, _STEP_BYTES)
            if not self._allocate(_rounded(min(ahead, self._most_bytes))):
                self._allocate_part(_rounded(needed, _PAGE_BYTES))
        size = self.size_bytes
        self.is_held = size >= needed or not self._can_allocate
        # At its full size, nothing has to be checked while the log grows.
        is_final = size >= self._most_bytes or not self._can_allocate
        self._slack_bytes = self._most_bytes if is_final else size - needed

    def _allocate_part(self, size: int) -> None:
        """As much of `size` as there is room for. The engine's own threads and other processes
        write at the same time, and a page that they took makes the whole allocation fail: then it
        is tried with less."""
        for attempt in range(_ATTEMPTS):
            obtainable = self._obtainable_bytes() - attempt * _MARGIN_BYTES
            if self._allocate(min(size, obtainable)) or not self._can_allocate:
                return

    def _obtainable_bytes(self) -> int:
        """How large it can be made. Some is left free, as far as the next start can do without."""
        most = self.size_bytes + free_bytes(self._store)
        least = min(self._least_bytes(), most)
        return max(most - _MARGIN_BYTES, least) // _PAGE_BYTES * _PAGE_BYTES

    def _allocate(self, size: int) -> bool:
        before = self.size_bytes
        if size <= before:
            return True
        if not self._can_allocate or free_bytes(self._store) < size - before:
            return False
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                # This file system can't allocate: the hub runs without a reserve.
                self._can_allocate = False
            # Another process took the room: give back the part that was allocated.
            os.ftruncate(descriptor, before)
            return False
        finally:
            os.close(descriptor)
        return True
