"""How tables become visible: each run or batch writes to a folder of its own, and one manifest, a
file that is created only if it is absent, names what belongs to each table.

    OUTPUT/runs/00000007-4f1c…/…             what a run, or a batch of a stream, wrote
    OUTPUT/manifests/00000007.jsonl          the tables after it: folders and files of runs
    OUTPUT/manifests/lock                    held while a manifest is created

Readers take the newest manifest. Nothing is renamed, moved or linked, and nothing that a manifest
names is ever changed, so a reader sees the tables of one run, however long it reads.

Of two runs that started from the same manifest, the one that creates the next one first wins; the
other one fails with the winner's name. A manifest counts if it is complete: its second line has the
length and checksum of the first. An incomplete one was left by a process that was killed while it
wrote: readers ignore it, and the next writer, who holds the lock, replaces it.

What manifests no longer name is deleted `KEEP_S` after the manifest that replaced theirs, by the
next run: longer than readers take that opened the tables before.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final
from zlib import crc32

import msgspec

from crosswire.errors import InvalidInput, PipelineError
from crosswire.pipeline.stores import TableStore

__all__ = [
    "KEEP_S",
    "Manifest",
    "Manifests",
    "RunFolder",
    "TablePaths",
    "all_paths",
    "listed_paths",
    "newest_manifest",
]

KEEP_S: Final = 3600.0
"""How long what a new manifest no longer names can still be read, by default."""

_VERSION: Final = 1
_FOLDER: Final = "manifests"
_RUNS: Final = "runs"
_INLINE: Final = 500
"""Files of a table that a manifest names itself; more of them are in lists of their own, so that
the manifest of each batch stays small."""


_NO_STREAM: Final = msgspec.Raw(b"null")


class TablePaths(msgspec.Struct, frozen=True):
    """Where the rows of a table are.

    paths         folders or Parquet files
    lists         files that have more such paths, one on a line
    provisional   files whose rows the next batch replaces
    """

    paths: list[str] = []
    lists: list[str] = []
    provisional: list[str] = []


class Manifest(msgspec.Struct, frozen=True):
    """The tables of an output at one time.

    number    counts manifests, from 1
    writer    who wrote it: process and machine
    time_us   when, µs since 1970
    tables    by name (`gold.traffic`)
    others    folders and files that only the writer needs, as the state of a stream
    stream    of a stream: what its next batch needs; see `stream.commits`
    """

    number: int
    writer: str
    time_us: int
    tables: dict[str, TablePaths]
    others: list[str] = []
    stream: msgspec.Raw = _NO_STREAM
    version: int = _VERSION

    @property
    def is_stream(self) -> bool:
        """Whether a stream wrote it."""
        return bytes(self.stream) != bytes(_NO_STREAM)


class _Check(msgspec.Struct):
    length: int
    crc32: int


class _Version(msgspec.Struct):
    version: int = 0


def _serialized(manifest: Manifest) -> bytes:
    line = msgspec.json.encode(manifest)
    return line + b"\n" + msgspec.json.encode(_Check(len(line), crc32(line))) + b"\n"


def _parsed(text: bytes, path: str) -> Manifest | None:
    """None if it is not complete. Raises InvalidInput if it is of another version."""
    line, _, rest = text.partition(b"\n")
    try:
        check = msgspec.json.decode(rest, type=_Check)
    except msgspec.MsgspecError:
        return None
    if (check.length, check.crc32) != (len(line), crc32(line)):
        return None
    try:
        if msgspec.json.decode(line, type=_Version).version == _VERSION:
            return msgspec.json.decode(line, type=Manifest)
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"{path} can't be read: {error}") from None
    raise InvalidInput(f"{path} was written by another version of crosswire")


def newest_manifest(store: TableStore) -> Manifest | None:
    """The newest complete manifest; None if there is none."""
    for number in reversed(_numbers(store)):
        found = _read(store, number)
        if found is not None:
            return found
    return None


def _numbers(store: TableStore) -> list[int]:
    names = (name.removesuffix(".jsonl") for name in store.names(_FOLDER) if "." in name)
    return sorted(int(name) for name in names if name.isdecimal())


def _name(number: int) -> str:
    return f"{_FOLDER}/{number:08}.jsonl"


def _read(store: TableStore, number: int) -> Manifest | None:
    text = store.read(_name(number))
    return None if text is None else _parsed(text, store.url(_name(number)))


def all_paths(store: TableStore, files: TablePaths) -> list[str]:
    """All folders and files of a table, those of lists included."""
    found = [*files.paths, *files.provisional]
    for path in files.lists:
        found += listed_paths(store, path)
    return found


def listed_paths(store: TableStore, path: str) -> list[str]:
    """The paths in a list. Raises PipelineError if it is gone."""
    text = store.read(path)
    if text is None:
        raise PipelineError(f"{store.url(path)} is missing: the tables can't be read")
    return text.decode().splitlines()


class RunFolder:
    """A folder that one run, or one batch of a stream, writes to. `folder` is relative to the
    store, `url` as Spark takes it."""

    def __init__(self, store: TableStore, number: int) -> None:
        self._store = store
        self.folder = f"{_RUNS}/{number:08}-{uuid.uuid4().hex[:12]}"
        self.url = store.url(self.folder)
        self._release = store.claim(self.folder)

    def create(self, path: str, data: bytes) -> None:
        """Write a small file below the folder, which nobody else writes to."""
        self._store.create(f"{self.folder}/{path}", data)

    def end(self, *, keep: bool) -> None:
        """Nothing more is written here; what was not committed is deleted."""
        if not keep:
            self._store.delete(self.folder)
        self._release()


class Manifests:
    """The manifests of an output, for a writer. `newest` is the one that it continues from."""

    def __init__(self, store: TableStore, *, keep_s: float = KEEP_S) -> None:
        self._store = store
        self._keep_s = keep_s
        self.writer = f"process {os.getpid()} on {socket.gethostname()}"
        self.newest = newest_manifest(store)

    @property
    def number(self) -> int:
        """The number of the manifest that this writer creates next."""
        return 1 if self.newest is None else self.newest.number + 1

    def begin_run(self) -> RunFolder:
        """A folder for the next manifest."""
        return RunFolder(self._store, self.number)

    def commit(
        self,
        tables: dict[str, TablePaths],
        *,
        others: Iterable[str] = (),
        stream: bytes | None = None,
    ) -> None:
        """Make these tables visible. Raises PipelineError if another writer was first."""
        manifest = Manifest(
            self.number,
            self.writer,
            time.time_ns() // 1000,
            tables,
            sorted(others),
            _NO_STREAM if stream is None else msgspec.Raw(stream),
        )
        with self._store.exclusive(self.writer):
            numbers = _numbers(self._store)
            if numbers and numbers[-1] >= manifest.number:
                winner = newest_manifest(self._store)
                if winner is not None and winner.number >= manifest.number:
                    self._lose(winner)
                for number in numbers:
                    if number >= manifest.number:
                        # Its writer held the lock, and was killed before it was done.
                        self._store.delete(_name(number))
            if not self._store.create(_name(manifest.number), _serialized(manifest)):
                self._lose(newest_manifest(self._store))
        self.newest = manifest

    def _lose(self, winner: Manifest | None) -> None:
        who, when = "another run", ""
        if winner is not None:
            who = winner.writer
            when = f" at {datetime.fromtimestamp(winner.time_us / 1e6, UTC):%Y-%m-%d %H:%M:%S} UTC"
        raise PipelineError(
            f"{who} wrote new tables to {self._store.root}{when}, after this run had started: "
            "these are shown, and those of this run are not"
        )

    def spill(self, files: TablePaths, run: RunFolder, table: str, newest: str) -> TablePaths:
        """Move names of files to a list in the run's folder, if there are too many; those whose
        path has `newest` in it stay, since they are the next to be replaced."""
        if len(files.paths) <= _INLINE:
            return files
        kept = [path for path in files.paths if newest in path]
        listed = [path for path in files.paths if newest not in path]
        if not listed:
            return files
        name = f"{run.folder}/lists/{table}.txt"
        with self._store.exclusive(self.writer):
            self._store.create(name, "\n".join(listed).encode())
        return TablePaths(kept, [*files.lists, name], files.provisional)

    # What nobody reads any more.

    def remove_old(self) -> None:
        """Delete manifests that were replaced `keep_s` ago, and what only they name."""
        numbers = _numbers(self._store)
        for number, following in pairwise(numbers):
            old, new = _read(self._store, number), _read(self._store, following)
            if new is None or new.time_us > (time.time() - self._keep_s) * 1e6:
                return
            if old is not None:
                # A path that a manifest drops never comes back: what the next one lacks is gone.
                for path in sorted(self._named(old) - self._named(new)):
                    self._store.delete(path)
            self._store.delete(_name(number))

    def remove_abandoned(self) -> None:
        """Delete folders of runs that no manifest names and that nobody writes to: those of runs
        that were killed, and those of which all files have been replaced."""
        # In this order: who commits after it was found idle would not be in manifests read before.
        found = self._store.names(_RUNS)
        folders = {f"{_RUNS}/{name.removesuffix('.writer')}" for name in found}
        idle = {folder for folder in folders if not self._store.is_claimed(folder)}
        for number in _numbers(self._store):
            manifest = _read(self._store, number)
            if manifest is not None:
                idle -= {_run_of(path) for path in self._named(manifest)}
        for folder in idle:
            self._store.delete(folder)
            self._store.delete(f"{folder}.writer")

    def _named(self, manifest: Manifest) -> set[str]:
        """All that a manifest names."""
        return set(self._paths_of(manifest))

    def _paths_of(self, manifest: Manifest) -> Iterator[str]:
        yield from manifest.others
        for files in manifest.tables.values():
            yield from files.lists
            yield from all_paths(self._store, files)


def _run_of(path: str) -> str:
    return "/".join(path.split("/")[:2])
