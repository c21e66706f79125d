"""Files of a hub that lose at a power cut what was not synced: contents and names, each by itself.

The lake is on a real file system. While a `SimulatedFiles` is active, it sees each `os.fsync` below
its folder. A synced file keeps its content, a synced folder its names: at a power cut every name
that came, went or changed since is as it is now, or as it was, by chance.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from random import Random
from typing import Final, NamedTuple, Protocol

__all__ = ["SimulatedFiles"]

_TORN: Final = 0.5
_real_fsync: Final = os.fsync


class HasFileno(Protocol):
    """An open file."""

    def fileno(self) -> int:
        """Its number."""


class _SyncedFile(NamedTuple):
    """A file that was synced. It is kept open, so that its number is not given to another one."""

    descriptor: int
    content: bytes


class SimulatedFiles:
    """What is below a folder, one at a time in a process: from `open` on, until `close`."""

    def __init__(self, folder: Path, random: Random) -> None:
        self._folder = folder
        self._random = random
        self._synced: dict[int, _SyncedFile] = {}
        """Files by their numbers."""
        self._names: dict[Path, dict[str, int]] = {}
        """By folder: the numbers of what it had when it was synced."""
        self.changes = 0
        """How many names were lost, came back, or lost their content."""

    def open(self) -> None:
        """See what is synced."""
        os.fsync = self._fsync
        self._note(self._folder)

    def close(self) -> None:
        """See no more, and let files go."""
        os.fsync = _real_fsync
        for each in self._synced.values():
            os.close(each.descriptor)
        self._synced.clear()

    def _fsync(self, fd: int | HasFileno) -> None:
        """What is synced here survives; no disk has to."""
        file = fd if isinstance(fd, int) else fd.fileno()
        path = Path(f"/proc/self/fd/{file}").readlink()
        if path != self._folder and self._folder not in path.parents:
            _real_fsync(file)
            return
        found = os.fstat(file)
        if stat.S_ISDIR(found.st_mode):
            self._note(path)
            return
        known = self._synced.pop(found.st_ino, None)
        if known is not None:
            os.close(known.descriptor)
        descriptor = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
        self._synced[found.st_ino] = _SyncedFile(descriptor, os.pread(descriptor, found.st_size, 0))

    def _note(self, folder: Path) -> None:
        self._names[folder] = _numbers_in(folder)

    def cut_power(self) -> None:
        """Lose what was not synced; what is left is on disk from now on."""
        self._cut(self._folder)
        known, self._names = self._names, {}
        for folder in known:
            if folder.is_dir():
                self._note(folder)

    def _cut(self, folder: Path) -> None:
        now, synced = _numbers_in(folder), self._names.get(folder, {})
        for name in sorted(now.keys() | synced.keys()):
            path = folder / name
            is_kept = now.get(name) == synced.get(name) or self._random.random() < 0.5
            if not is_kept:
                self.changes += 1
                self._restore(path, synced.get(name))
            if path.is_dir():
                self._cut(path)
            elif path.exists():
                self._cut_content(path)

    def _restore(self, path: Path, number: int | None) -> None:
        """Let a name be what it was when its folder was synced."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        known = None if number is None else self._synced.get(number)
        if known is not None:
            path.write_bytes(known.content)
            with path.open("rb") as file:
                self._fsync(file.fileno())

    def _cut_content(self, path: Path) -> None:
        """A content that was not synced is there in part, or as it was."""
        known = self._synced.get(path.stat().st_ino)
        content = path.read_bytes()
        if known is not None and content == known.content:
            return
        if content:
            self.changes += 1
            before = b"" if known is None else known.content
            is_torn = self._random.random() < _TORN
            path.write_bytes(content[: self._random.randrange(len(content))] if is_torn else before)
        with path.open("rb") as file:
            self._fsync(file.fileno())


def _numbers_in(folder: Path) -> dict[str, int]:
    with os.scandir(folder) as entries:
        return {each.name: each.inode() for each in entries}
