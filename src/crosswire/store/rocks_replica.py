"""A replica's data directory on an embedded RocksDB, and how a directory becomes one and stops
being one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec
import rocksdict

from crosswire.commitlog.body import GroupBody, RecordedBody
from crosswire.commitlog.records import RecordPosition
from crosswire.durable_files import replace_file
from crosswire.errors import StoreDamaged, StoreFailed
from crosswire.store.contract import Store
from crosswire.store.engine import StoreLimits
from crosswire.store.keys import LOCAL, prefix_end, state_key
from crosswire.store.locks import check_unused
from crosswire.store.recovery import COPIED_SPACES, REMOVALS
from crosswire.store.replica import LOG_POSITION, RUNNING, ReplicaStore, pack_position
from crosswire.store.rocks import (
    COPIES,
    MARK,
    REPLICA,
    RocksStore,
    table_options,
)

__all__ = [
    "ReplicaFile",
    "RocksReplica",
    "content_digest",
    "convert",
    "read_replica_file",
    "record_content",
]

_ALL: Final = (b"\x00", b"\xff")
_UNSHARED: Final = frozenset({LOG_POSITION, RUNNING})


class ReplicaFile(msgspec.Struct, frozen=True):
    """What a data directory remembers outside of the engine: its log, and its name there."""

    log: str
    name: str


def read_replica_file(path: Path) -> ReplicaFile | None:
    """None for a store that is no replica's. Raises StoreDamaged."""
    try:
        return msgspec.json.decode((path / REPLICA).read_bytes(), type=ReplicaFile)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise StoreDamaged(f"{path / REPLICA} can't be read: {error}") from error


class RocksReplica(ReplicaStore, RocksStore):
    """The store of one replica. An empty directory is made one of the log with `log_id`.

    Opening raises StoreFailed for a store that is not a replica's.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        limits: StoreLimits | None = None,
        *,
        log_id: bytes = b"",
        name: str = "",
    ) -> None:
        self._made = ReplicaFile(log_id.hex(), name) if log_id else None
        super().__init__(path, limits)
        if not self.log_id:
            made = read_replica_file(self.path)
            self.join(log_id or bytes.fromhex(made.log if made is not None else ""))

    def _check_kind(self) -> None:
        if read_replica_file(self.path) is not None:
            return
        if self._made is None or (self.path / "CURRENT").exists():
            raise StoreFailed(
                f"{self.path} is the store of a hub without replicas: `crosswire replication init`"
                " starts a log from it. To have it as another replica, start with an empty data"
                " directory"
            )
        # Before the engine has any file: a kill must not leave what looks like a hub's own store.
        replace_file(self.path / REPLICA, msgspec.json.encode(self._made))

    def _open(self, *, create: bool = False) -> None:
        """Recover to a point in time: a damaged part of the write-ahead log ends it, so that what
        is left is a prefix of the replicated log, which has the rest."""
        self._disk_reserve.make_room()
        # Before the engine sees them: it would not return from some of these.
        for log in self.path.glob("*.log"):
            self._clear_headers(log)
        # A process that was killed before the engine had its files.
        create = create or not (self.path / "CURRENT").exists()
        try:
            self._open_with(rocksdict.DBRecoveryMode.point_in_time(), create=create)
        except Exception as error:
            self._judge_opening(error)
            raise StoreDamaged(self._explain(" ".join(str(error).split()))) from error
        self._find_manifest()

    def _engine_batch(self) -> GroupBody:
        return RocksStore._batch(self)

    def _explain(self, what: str) -> str:
        return (
            f"the replica in {self.path} can't be used: {what}. Remove its data directory and start"
            " it again: it fetches a checkpoint from another replica"
        )

    def _release(self) -> None:
        try:
            self.write_position()
            self._db.flush_wal(sync=True)
        except Exception as error:
            # What is missing here is read from the log again.
            self.close_error = str(error)
        self._close_engine()

    def leave(self) -> None:
        """Make it the store of a hub without replicas, and close it. Raises StoreError, OSError."""
        values = {
            b"d" + name.encode(): number.to_bytes(4) for name, number in self._numbers.items()
        }
        for space in COPIED_SPACES:
            begin = state_key(space, b"")
            values.update(self._scan(begin, prefix_end(begin)))
        for key in (b"!format", b"!node", b"!ids", REMOVALS):
            value = self._get(key)
            if value is not None:
                values[key] = value
        values[b"!stopped"] = self._last_group.to_bytes(8)
        self._replace_copies(values)
        batch = self._engine_batch()
        batch.delete_range(*LOCAL)
        batch.delete(LOG_POSITION)
        self._write(batch)
        self._sync()
        self._close_engine()
        self._durable_group = self._last_group
        RocksStore._save_mark(self)
        self._mark.close(sync=True)
        # Last: with it the directory is a replica, whatever else was done.
        (self.path / REPLICA).unlink()
        self._closed = True


def convert(
    path: Path, limits: StoreLimits, log_id: bytes, name: str, position: RecordPosition
) -> None:
    """Make the store of a stopped hub a replica that has all of the log up to this record.

    Raises StoreError, OSError.
    """
    check_unused(path)
    database = rocksdict.Rdict(str(path), table_options(limits.buffer_bytes))
    try:
        database.put(LOG_POSITION, pack_position(log_id, position))
        database.flush_wal(sync=True)
    finally:
        database.close()
    replace_file(path / REPLICA, msgspec.json.encode(ReplicaFile(log_id.hex(), name)))
    # After that they would be wrong with the first group that is applied.
    for file in (COPIES, MARK):
        (path / file).unlink(missing_ok=True)


def content_digest(store: Store) -> str:
    """SHA-256 over all keys and values that replicas share, in order: equal for equal stores."""
    digest = sha256()
    for key, value in _content(store):
        digest.update(len(key).to_bytes(4) + len(value).to_bytes(4) + key + value)
    return digest.hexdigest()


def record_content(store: Store, body_bytes: int, most_bytes: int) -> list[bytes]:
    """All that replicas share, as bodies of groups of about `body_bytes` each; none of it, if it
    has more than `most_bytes`."""
    bodies: list[bytes] = []
    body, size_bytes = RecordedBody(), 0
    for key, value in _content(store):
        body.put(key, value)
        if body.size_bytes >= body_bytes:
            bodies.append(body.encode())
            size_bytes += body.size_bytes
            body = RecordedBody()
        if size_bytes > most_bytes:
            return []
    return [*bodies, body.encode()]


def _content(store: Store) -> Iterator[tuple[bytes, bytes]]:
    for key, value in store.view().scan(*_ALL):
        if key not in _UNSHARED and not LOCAL[0] <= key < LOCAL[1]:
            yield key, value
