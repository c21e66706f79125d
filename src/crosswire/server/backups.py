"""Backups: what is in one, whether it is intact, and a data directory made from it.

A backup has the layout of a data directory: `store/`, `lake/`, and `backup.json`, which is written
last and lists every file with its checksum. Without it, a folder is no backup.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from crosswire.durable_files import replace_file, sync_folder
from crosswire.errors import StoreDamaged, StoreFailed
from crosswire.hub.seals import SEAL_KEY, SEAL_SPACE
from crosswire.lake.files import find, parse_name
from crosswire.lake.schemas import SCHEMAS
from crosswire.server.lake_identity import LAKE_IDENTITY
from crosswire.server.private_files import create_private_files
from crosswire.server.store_repair import verify
from crosswire.store.checkpoint import (
    RUNNING,
    Checkpoint,
    CheckpointFile,
    checksum,
    copy_file,
    is_plain_name,
    rewrite_checkpoint,
    verify_files,
)
from crosswire.store.keys import state_key
from crosswire.store.replica import LOG_POSITION

__all__ = [
    "MANIFEST",
    "Backup",
    "is_lake_name",
    "load_backup",
    "restore",
    "save_backup",
    "verify_backup",
]

MANIFEST: Final = "backup.json"
_VERSION: Final = 1
_WORK: Final = ".restoring"
_SKIPPED_IDS: Final = 1 << 40
"""What a restored hub does not give out: the original may have given it out after the backup, and
(node, id) is the key of a message everywhere."""
_RESTORED: Final = b"restored"
"""No boot of a machine: the store starts as after a power cut. So links of Relink, whose peers may
have seen more than the backup has, are not continued."""


class Backup(msgspec.Struct, frozen=True, kw_only=True):
    """A backup's list. `lake` are paths inside the lake; it is None if the lake was left out."""

    version: int = _VERSION
    crosswire: str
    created: str
    store: Checkpoint
    lake: tuple[CheckpointFile, ...] | None

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(each.size_bytes for each in (*self.store.files, *(self.lake or ())))


class _StoredBackup(msgspec.Struct, frozen=True):
    backup: msgspec.Raw
    sha256: str


def save_backup(folder: Path, backup: Backup) -> None:
    """Make a folder whose files are complete a backup. Raises OSError."""
    body = msgspec.json.encode(backup)
    stored = _StoredBackup(msgspec.Raw(body), hashlib.sha256(body).hexdigest())
    replace_file(folder / MANIFEST, msgspec.json.encode(stored))


def load_backup(folder: Path) -> Backup:
    """The list of a backup. Raises StoreFailed for what is none, StoreDamaged for a damaged one."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise StoreFailed(
            f"{folder} is no backup, or it was not finished: {path} is missing"
        ) from None
    except OSError as error:
        raise StoreFailed(f"can't read {path}: {error.strerror}") from error
    try:
        stored = msgspec.json.decode(data, type=_StoredBackup)
        if hashlib.sha256(stored.backup).hexdigest() != stored.sha256:
            raise ValueError("its checksum differs")
        version = msgspec.json.decode(stored.backup, type=dict[str, msgspec.Raw]).get("version")
        if version is not None and bytes(version) != b"%d" % _VERSION:
            raise StoreFailed(f"{path} was written by another version of Crosswire")
        return msgspec.json.decode(stored.backup, type=Backup)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StoreDamaged(f"{path} is damaged: {error}") from None


def is_lake_name(name: str) -> bool:
    """Whether it is the path of a file inside a lake: names come from other machines."""
    parts = PurePosixPath(name).parts
    return (
        len(parts) == 3
        and parts[0] in SCHEMAS
        and parts[1].startswith("date=")
        and parse_name(parts[0], parts[1], Path(parts[2])) is not None
    )


def verify_backup(folder: Path, backup: Backup, progress: Callable[[str], None]) -> None:
    """Compare all files with the list, then read all messages, and compare them with ledger and
    lake. Raises StoreDamaged for what is not intact, and StoreFailed."""
    verify_files(folder / "store", backup.store)
    _verify_lake(folder / "lake", backup, progress)
    _verify_store(folder, progress)


def _verify_lake(lake: Path, backup: Backup, progress: Callable[[str], None]) -> None:
    names = {each.name for each in backup.lake or ()}
    others = [each for each in find(lake) if _name_in(lake, each.path) not in names]
    if others:
        raise StoreDamaged(f"{others[0].path} does not belong to the backup")
    for index, each in enumerate(backup.lake or ()):
        progress(f"verifying the lake: file {index + 1:,} of {len(names):,}")
        if not is_lake_name(each.name):
            raise StoreDamaged(f"{each.name!r} is no name of a lake's file")
        path = lake / each.name
        if not path.is_file():
            raise StoreDamaged(f"{path} is missing")
        try:
            if path.stat().st_size != each.size_bytes or checksum(path) != each.sha256:
                raise StoreDamaged(f"{path} is not what was written: its checksum differs")
        except OSError as error:
            raise StoreFailed(f"can't read {path}: {error.strerror}") from error


def _name_in(lake: Path, path: Path) -> str:
    return path.relative_to(lake).as_posix()


def _verify_store(data: Path, progress: Callable[[str], None]) -> None:
    result = verify(data, data / "lake", progress)
    if not result.is_intact:
        first = result.findings[0]
        where = f" of {first.destination}" if first.destination else ""
        raise StoreDamaged(f"{data}: {first.part}{where}: {first.detail}")


def restore(source: Path, data: Path, *, new_node: bool, progress: Callable[[str], None]) -> Backup:
    """Make a data directory from a backup. Raises StoreFailed and StoreDamaged; then there is none.

    The hub that starts on it is the same one, with the same node, and goes on after the backup.
    With `new_node` it is another one, which may live beside the original: its lake begins with what
    it accepts itself, and keeps the files of the original.
    """
    backup = load_backup(source)
    work = data / _WORK
    try:
        if data.exists() and any(each.name != _WORK for each in data.iterdir()):
            raise StoreFailed(f"{data} is not empty: restore into a new folder")
        create_private_files()
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            _copy(source, work, backup, progress)
            _verify_store(work, progress)
            rewrite_checkpoint(work / "store", _changes(new_node=new_node))
            _verify_store(work, progress)
            for name in ("lake", "store"):
                # The store last: without it, nothing is there yet.
                if (work / name).exists():
                    (work / name).rename(data / name)
            sync_folder(data)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise StoreFailed(f"{error.filename or data}: {error.strerror}") from error
    return backup


def _copy(source: Path, work: Path, backup: Backup, progress: Callable[[str], None]) -> None:
    """Copy all files, and compare them with the list as they are read."""
    files = [(f"store/{each.name}", each) for each in backup.store.files]
    files += [(f"lake/{each.name}", each) for each in backup.lake or ()]
    folders: set[Path] = {work}
    for index, (name, file) in enumerate(files):
        kind, _, own = name.partition("/")
        if not (is_plain_name(own) if kind == "store" else is_lake_name(own)):
            raise StoreDamaged(f"{own!r} is no name of a {kind}'s file")
        progress(f"copying: file {index + 1:,} of {len(files):,}")
        target = work / name
        target.parent.mkdir(parents=True, exist_ok=True)
        folders.add(target.parent)
        try:
            found = copy_file(source / name, target)
        except FileNotFoundError:
            raise StoreDamaged(f"{source / name} is missing") from None
        if found != file.sha256:
            raise StoreDamaged(f"{source / name} is not what was written: its checksum differs")
    for folder in folders:
        sync_folder(folder)


def _changes(*, new_node: bool) -> Callable[[Mapping[bytes, bytes]], dict[bytes, bytes | None]]:
    def change(copied: Mapping[bytes, bytes]) -> dict[bytes, bytes | None]:
        ids = int.from_bytes(copied.get(b"!ids", b"\x01")) + _SKIPPED_IDS
        # Of a replica, too, it becomes a hub of its own: another log is started from it.
        changes: dict[bytes, bytes | None] = {
            b"!ids": ids.to_bytes(8),
            RUNNING: _RESTORED,
            LOG_POSITION: None,
            LAKE_IDENTITY: None,
        }
        if new_node:
            changes[b"!node"] = secrets.token_hex(8).encode()
            # The lake of the new node has nothing yet: a seal of the old one would claim otherwise.
            changes[state_key(SEAL_SPACE, SEAL_KEY)] = None
        return changes

    return change
