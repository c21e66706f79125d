"""Checkpoints of a running hub: its store and the files of its lake that belong to it, kept while
somebody fetches them.

The store is copied first. The lake goes on meanwhile, so of its files only those count whose rows
the copied store has sealed: a hub that starts from both continues after exactly these, and seals
the rest again from its own store.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Literal

import msgspec

from crosswire.errors import (
    CrosswireError,
    DestinationFull,
    LakeError,
    StoreFailed,
    UnknownMessage,
)
from crosswire.hub.seals import SEAL_KEY, SEAL_SPACE, Seal, parse_seal
from crosswire.lake.files import LakeFile, find
from crosswire.store.checkpoint import Checkpoint, create_checkpoint, read_state
from crosswire.store.contract import Store
from crosswire.store.rocks import RocksStore

__all__ = ["FOLDER", "Checkpoints", "LakeCopy", "LiveCheckpoint", "lake_name"]

FOLDER: Final = "checkpoints"
"""In the data directory."""
_LAKE_FOLDER: Final = ".checkpoints"
"""In the lake, for links to its files: on the same file system as these."""
_MOST: Final = 4
_UNUSED_S: Final = 600.0
_CHECK_S: Final = 60.0
_ATTEMPTS: Final = 5
_NO_LINKS: Final = (errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.EMLINK)
_ID: Final = re.compile(r"[0-9a-f]{16}")


class LakeCopy(msgspec.Struct, frozen=True):
    """A file of the lake: its path inside the lake, its size, and where it can be read."""

    name: str
    size_bytes: int
    path: Path


class LiveCheckpoint:
    """A checkpoint that is being made, or can be fetched; `error` is why it could not be made."""

    def __init__(self, identifier: str, folder: Path, lake_folder: Path, now: float) -> None:
        self.id = identifier
        self.folder = folder
        self.lake_folder = lake_folder
        self.created_at = time.time()
        self.used_at = now
        self.error = ""
        self.checkpoint: Checkpoint | None = None
        self.lake: list[LakeCopy] = []
        self.lake_paths: dict[str, Path] = {}

    @property
    def state(self) -> Literal["running", "ready", "failed"]:
        """`running`, `ready` or `failed`."""
        if self.error:
            return "failed"
        return "running" if self.checkpoint is None else "ready"


class Checkpoints:
    """The checkpoints of one hub. Use it on the event loop.

    One that nobody used for ten minutes is removed: its links keep files that the store has
    replaced.
    """

    def __init__(self, store: Store, data: Path, lake: Path) -> None:
        self._store = store
        self._folder = data / FOLDER
        self._lake = lake
        self._live: dict[str, LiveCheckpoint] = {}
        self._tasks: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Remove what an earlier process has left."""
        _delete((self._folder, self._lake / _LAKE_FOLDER))

    async def stop(self) -> None:
        """Wait for the one that is being made, and remove all."""
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for each in list(self._live.values()):
            self._remove(each)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def create(self) -> LiveCheckpoint:
        """Begin to make one. Raises DestinationFull and StoreFailed."""
        store = self._store
        if not isinstance(store, RocksStore):
            raise StoreFailed("a store in memory has no checkpoints")
        self.expire()
        if len(self._live) >= _MOST:
            raise DestinationFull(f"there are {_MOST} checkpoints already: remove one of them")
        identifier = secrets.token_hex(8)
        live = LiveCheckpoint(
            identifier,
            self._folder / identifier,
            self._lake / _LAKE_FOLDER / identifier,
            time.monotonic(),
        )
        self._live[identifier] = live
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_CHECK_S, self._check)
        self._follow(asyncio.ensure_future(self._make(store, live)))
        return live

    def _follow(self, task: asyncio.Future[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _make(self, store: RocksStore, live: LiveCheckpoint) -> None:
        try:
            checkpoint, lake = await asyncio.to_thread(_make, store, live, self._lake)
        except (CrosswireError, OSError) as error:
            live.error = str(error)
            return
        live.lake, live.lake_paths = lake, {each.name: each.path for each in lake}
        live.checkpoint = checkpoint
        live.used_at = time.monotonic()

    def all(self) -> list[LiveCheckpoint]:
        """All that there are, oldest first."""
        self.expire()
        return list(self._live.values())

    def get(self, identifier: str) -> LiveCheckpoint:
        """One of them, which counts as used. Raises UnknownMessage."""
        live = self._live.get(identifier)
        if live is None or not _ID.fullmatch(identifier):
            raise UnknownMessage(f"there is no checkpoint {identifier!r}")
        live.used_at = time.monotonic()
        return live

    def remove(self, identifier: str) -> None:
        """Remove one that is made. Raises UnknownMessage, and DestinationFull for one that is being
        made."""
        live = self.get(identifier)
        if live.state == "running":
            raise DestinationFull(f"checkpoint {identifier} is being made: wait for it")
        self._remove(live)

    def _check(self) -> None:
        """Now and then, while there are any: nobody may ever ask for them again."""
        self._timer = None
        self.expire()
        if self._live:
            self._timer = asyncio.get_running_loop().call_later(_CHECK_S, self._check)

    def expire(self) -> None:
        """Remove those that nobody used for long."""
        for each in list(self._live.values()):
            if each.state != "running" and time.monotonic() - each.used_at > _UNUSED_S:
                self._remove(each)

    def _remove(self, live: LiveCheckpoint) -> None:
        self._live.pop(live.id, None)
        # Not here: a lake may have a million files.
        loop = asyncio.get_running_loop()
        self._follow(loop.run_in_executor(None, _delete, (live.folder, live.lake_folder)))


def _delete(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _make(store: RocksStore, live: LiveCheckpoint, lake: Path) -> tuple[Checkpoint, list[LakeCopy]]:
    checkpoint = create_checkpoint(store, live.folder)
    stored = read_state(live.folder, SEAL_SPACE, SEAL_KEY)
    seal = None if stored is None else parse_seal(stored)
    for attempt in range(_ATTEMPTS):
        try:
            return checkpoint, _link_lake(lake, live.lake_folder, checkpoint.node, seal)
        except FileNotFoundError:
            # Retention or a compaction has removed a file that was just listed.
            shutil.rmtree(live.lake_folder, ignore_errors=True)
            if attempt + 1 == _ATTEMPTS:
                raise
    raise AssertionError("unreachable")


def _link_lake(lake: Path, folder: Path, node: str, seal: Seal | None) -> list[LakeCopy]:
    """Links to all files with rows that are sealed. Raises LakeError and OSError."""
    copies = []
    belongs = _belonging(node, seal)
    for file in find(lake):
        if belongs(file):
            copies.append(_link(file, lake, folder))
    return copies


def _belonging(node: str, seal: Seal | None) -> Callable[[LakeFile], bool]:
    last = {"messages": 0, "ledger": 0, "gaps": 0}
    if seal is not None:
        last_gap = seal.first_gap + len(seal.gaps) - 1
        last = {"messages": seal.last_seq, "ledger": seal.last_row, "gaps": last_gap}

    def belongs(file: LakeFile) -> bool:
        if file.node != node or file.table not in last:
            return True
        if file.first <= last[file.table] < file.last:
            raise LakeError(
                f"{file.path.name} was compacted while the checkpoint was made: make another one"
            )
        return file.last <= last[file.table]

    return belongs


def lake_name(file: LakeFile) -> str:
    """The path of a file inside its lake."""
    return f"{file.table}/date={file.date}/{file.path.name}"


def _link(file: LakeFile, lake: Path, folder: Path) -> LakeCopy:
    name = lake_name(file)
    size_bytes = file.path.stat().st_size
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file.path, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # A file system without links: it is fetched from where it is, unless it is gone by then.
        return LakeCopy(name, size_bytes, lake / name)
    return LakeCopy(name, size_bytes, target)
