"""Checkpoints: a consistent copy of a running store in a folder of its own, listed with checksums.

A checkpoint has everything that was written when it was made, and so everything that was
acknowledged before. Tables are links to those of the store, which the engine never changes: it
takes little time and, until the store has merged them, little room. What the store keeps beside the
engine (second copies, the mark) is made anew from what is in the checkpoint, since the files of the
running store go on while the engine is copied.

Backups are made of checkpoints, and replicas start from them. Everything here is called on any
thread but that of an event loop.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import rocksdict

from crosswire.durable_files import sync_folder
from crosswire.errors import StoreDamaged, StoreFailed
from crosswire.store.copies import CopyFile
from crosswire.store.engine import LogMark, full_or_failed
from crosswire.store.keys import GROUPS, LOCAL, prefix_end, state_key
from crosswire.store.recovery import COPIED_SPACES, GROUP_ROW, POWER_LOSSES, REMOVALS
from crosswire.store.rocks import COPIES, DAMAGES, MARK, MarkFile, RocksStore, table_options
from crosswire.store.scanning import error_of

__all__ = [
    "RUNNING",
    "Checkpoint",
    "CheckpointFile",
    "checksum",
    "copy_file",
    "create_checkpoint",
    "is_plain_name",
    "read_state",
    "rewrite_checkpoint",
    "verify_files",
]

_OWN_KEYS: Final = (b"!format", b"!node", b"!ids", REMOVALS, POWER_LOSSES)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_CHUNK_BYTES: Final = 1 << 20
_BUFFER_BYTES: Final = 4 << 20
RUNNING: Final = b"!running"


class CheckpointFile(msgspec.Struct, frozen=True):
    """A file of a checkpoint; `sha256` is in hex."""

    name: str
    size_bytes: int
    sha256: str


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is of, and all of its files.

    `group` is the number of the last commit group in it; `newest_id` and `next_row` are what had
    been given out by then.
    """

    node: str
    group: int
    newest_id: int
    next_row: int
    files: tuple[CheckpointFile, ...]


def create_checkpoint(store: RocksStore, folder: Path) -> Checkpoint:
    """Make a checkpoint of a store that is open, and in use, in a folder that does not exist.

    Raises StoreFull and StoreFailed, and StoreDamaged where what it needs can't be read; then
    nothing is left of it.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        store.copy_engine(folder)
        return _complete(folder, store.path)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise full_or_failed(error) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _complete(folder: Path, source: Path) -> Checkpoint:
    """Add the store's own files, as they belong to the engine's."""
    with _opened(folder) as database:
        values = dict(_copied_rows(database))
        number, next_row, newest_id = _last_group(database)
    if b"!node" not in values:
        raise StoreDamaged(f"the store in {source} has lost its name: it can't be copied")
    CopyFile(folder / COPIES).rewrite(values)
    if (source / DAMAGES).exists():
        shutil.copyfile(source / DAMAGES, folder / DAMAGES)
    _write_mark(folder, number, next_row, newest_id)
    _remove_logs(folder)
    sync_folder(folder)
    return Checkpoint(
        node=values[b"!node"].decode(),
        group=number,
        newest_id=newest_id,
        next_row=next_row,
        files=tuple(
            CheckpointFile(each.name, each.stat().st_size, checksum(each))
            for each in sorted(folder.iterdir())
        ),
    )


def _copied_rows(database: rocksdict.Rdict) -> Iterator[tuple[bytes, bytes]]:
    """Rows of which the store has a second copy."""
    for key in _OWN_KEYS:
        value = database.get(key)
        if value is not None:
            yield key, value
    yield from _rows(database, b"d", b"e")
    for space in sorted(COPIED_SPACES):
        begin = state_key(space, b"")
        yield from _rows(database, begin, prefix_end(begin))


def _last_group(database: rocksdict.Rdict) -> tuple[int, int, int]:
    """Its number, and the next row and the newest id after it."""
    number, next_row, newest_id = 0, 1, 0
    for key, value in _rows(database, *GROUPS):
        number = int.from_bytes(key[1:])
        next_row, newest_id = GROUP_ROW.unpack(value)
    return number, next_row, newest_id


def _rows(database: rocksdict.Rdict, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Raises StoreDamaged where a row can't be read: a copy without it would look intact."""
    options = rocksdict.ReadOptions()
    options.set_iterate_upper_bound(end)
    iterator = database.iter(options)
    iterator.seek(begin)
    while iterator.valid():
        yield iterator.key(), iterator.value()
        iterator.next()
    reason = error_of(iterator)
    if reason is not None:
        raise StoreDamaged(f"the store is damaged and can't be copied: {reason}")


def _write_mark(folder: Path, number: int, next_row: int, newest_id: int) -> None:
    name = (folder / "CURRENT").read_text().strip()
    size_bytes = (folder / name).stat().st_size
    manifest = int(name.partition("-")[2])
    mark = MarkFile(folder / MARK)
    mark.save(LogMark(number, number, newest_id, next_row, manifest, size_bytes))
    mark.close(sync=True)


@contextmanager
def _opened(folder: Path, *, writing: bool = False) -> Iterator[rocksdict.Rdict]:
    options = table_options(_BUFFER_BYTES)
    options.set_disable_auto_compactions(True)
    access = rocksdict.AccessType.read_write() if writing else rocksdict.AccessType.read_only()
    try:
        database = rocksdict.Rdict(str(folder), options, access_type=access)
    except Exception as error:
        raise StoreDamaged(f"{folder} can't be opened: {' '.join(str(error).split())}") from error
    try:
        yield database
    finally:
        database.close()


def _remove_logs(folder: Path) -> None:
    """What the engine leaves where it only reads; it is no part of a store."""
    for each in (*folder.glob("LOG*"), folder / "LOCK", folder / "IDENTITY"):
        each.unlink(missing_ok=True)


def read_state(folder: Path, space: str, key: bytes) -> bytes | None:
    """A value of a state space, from a checkpoint; None where there is none. Raises StoreDamaged.

    The folder has the same files afterwards.
    """
    with _opened(folder) as database:
        try:
            value: bytes | None = database.get(state_key(space, key))
        except Exception as error:
            raise StoreDamaged(f"{folder} can't be read: {error}") from error
    _remove_logs(folder)
    return value


def rewrite_checkpoint(
    folder: Path,
    change: Callable[[Mapping[bytes, bytes]], Mapping[bytes, bytes | None]],
) -> None:
    """Change rows of a checkpoint that becomes a store of its own, second copies included.

    `change` gets the rows that have a second copy, and returns those to write; None drops one. Keys
    under `!local/`, which belong to one replica only, are dropped. The checksums of the checkpoint
    don't hold afterwards. Raises StoreDamaged and StoreFailed.
    """
    with _opened(folder, writing=True) as database:
        copied = dict(_copied_rows(database))
        changes = change(copied)
        batch = rocksdict.WriteBatch(raw_mode=True)
        batch.delete_range(*LOCAL)
        for key, value in changes.items():
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)
        try:
            database.write(batch)
            database.flush()
        except Exception as error:
            raise full_or_failed(error) from error
        number, next_row, newest_id = _last_group(database)
        values = dict(_copied_rows(database))
        running = database.get(RUNNING)
        if running is not None:
            values[RUNNING] = running
    CopyFile(folder / COPIES).rewrite(values)
    _write_mark(folder, number, next_row, newest_id)
    _remove_logs(folder)
    sync_folder(folder)


# -------------------------------------------------------------------------------------------- files


def is_plain_name(name: str) -> bool:
    """Whether it is the name of a file in a folder, and no path: names come from other machines."""
    return _NAME.fullmatch(name) is not None


def checksum(path: Path) -> str:
    """The SHA-256 of a file, in hex. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def copy_file(source: Path, target: Path) -> str:
    """Copy a file to the disk; returns the SHA-256 of what was read. Raises OSError."""
    digest = hashlib.sha256()
    with source.open("rb") as file, target.open("xb") as out:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def verify_files(folder: Path, checkpoint: Checkpoint) -> None:
    """Compare all files with the list. Raises StoreDamaged for the first that differs, is missing
    or is not in it, and StoreFailed for one that can't be read."""
    names = {each.name for each in checkpoint.files}
    try:
        others = sorted(each.name for each in folder.iterdir() if each.name not in names)
        if others:
            raise StoreDamaged(f"{folder / others[0]} does not belong to the checkpoint")
        for each in checkpoint.files:
            if not is_plain_name(each.name):
                raise StoreDamaged(f"{each.name!r} is no name of a store's file")
            path = folder / each.name
            if not path.is_file():
                raise StoreDamaged(f"{path} is missing")
            if path.stat().st_size != each.size_bytes or checksum(path) != each.sha256:
                raise StoreDamaged(f"{path} is not what was written: its checksum differs")
    except OSError as error:
        raise StoreFailed(f"{error.filename}: {error.strerror}") from error
