"""A store in memory, for tests, with the behaviour of the one on disk, crashes included."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress

from crosswire.commitlog.body import GroupBody
from crosswire.errors import RecordUnreadable, StoreFull
from crosswire.store.contract import Store, View
from crosswire.store.copies import Copies
from crosswire.store.damage import Damage, DamageList
from crosswire.store.engine import LogMark, StoreLimits
from crosswire.store.replica import ReplicaStore

__all__ = ["MemoryDisk", "MemoryReplica", "MemoryStore", "Operation"]

Operation = tuple[bytes, bytes | None, bytes | None]
"""Key and value of a put; key of a deletion; key and end of a deleted range."""


class MemoryDisk:
    """What outlives a store: opening another one on it is a restart.

    After `cut_power`, what was written but not synced is lost. Reading keys in `unreadable` fails;
    `copies` and `mark` may be None, as if their files were lost.
    """

    def __init__(self) -> None:
        self.room_bytes = 1 << 40
        self.rows: dict[bytes, bytes] = {}
        self._keys: list[bytes] | None = []
        self.unsynced: list[list[Operation]] = []
        self.boots = 0
        """How many times the power came back."""
        self.unreadable: set[bytes] = set()
        self.copies: dict[bytes, bytes] | None = {}
        self.mark: LogMark | None = None
        self.damages = DamageList()
        self._synced: dict[bytes, bytes] = {}

    @property
    def keys(self) -> list[bytes]:
        """All keys in order, sorted when they are needed: few writes are followed by a scan."""
        if self._keys is None:
            self._keys = sorted(self.rows)
        return self._keys

    @keys.setter
    def keys(self, keys: list[bytes]) -> None:
        self._keys = keys

    @property
    def synced_rows(self) -> Mapping[bytes, bytes]:
        """What a power cut leaves."""
        return self._synced

    def write(self, operations: list[Operation]) -> None:
        """Apply a group, unsynced. Raises StoreFull beyond `room_bytes`."""
        size_bytes = sum(len(key) + len(value) for key, value, _ in operations if value)
        if size_bytes > self.room_bytes:
            raise StoreFull("no room in memory")
        self._apply(self.rows, operations)
        self._keys = None
        self.unsynced.append(operations)

    def sync(self) -> None:
        """Make all that was written survive a power cut."""
        for each in self.unsynced:
            self.apply_synced(each)
        self.unsynced.clear()

    def apply_synced(self, operations: list[Operation]) -> None:
        """Make this group survive a power cut."""
        self._apply(self._synced, operations)

    def cut_power(self) -> None:
        """Lose what was not synced."""
        self.unsynced.clear()
        self.rows = dict(self._synced)
        self._keys = None
        self.boots += 1

    @staticmethod
    def _apply(rows: dict[bytes, bytes], operations: list[Operation]) -> None:
        for key, value, end in operations:
            if end is not None:
                for each in [each for each in rows if key <= each < end]:
                    del rows[each]
            elif value is None:
                rows.pop(key, None)
            else:
                rows[key] = value


class _MemoryBatch:
    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def put(self, key: bytes, value: bytes) -> None:
        self.operations.append((key, value, None))

    def delete(self, key: bytes) -> None:
        self.operations.append((key, None, None))

    def delete_range(self, begin: bytes, end: bytes) -> None:
        self.operations.append((begin, None, end))


class MemoryStore(Store):
    """Everything of the contract on a MemoryDisk."""

    def __init__(self, disk: MemoryDisk | None = None, limits: StoreLimits | None = None) -> None:
        super().__init__(limits or StoreLimits(spare_bytes=1))
        self.disk = disk or MemoryDisk()
        self.damages = self.disk.damages
        self._recover(is_new=not self.disk.rows and not self.disk.copies)

    def _batch(self) -> GroupBody:
        return _MemoryBatch()

    def _write(self, batch: GroupBody) -> None:
        assert isinstance(batch, _MemoryBatch)
        self.disk.write(batch.operations)

    def _sync(self) -> None:
        self.disk.sync()

    def _size_of(self, batch: GroupBody) -> int:  # noqa: ARG002
        return 1 << 20

    def _running(self) -> bytes:
        return b"memory %d" % self.disk.boots

    def _load_copies(self) -> Copies:
        values = self.disk.copies
        return Copies(dict(values or {}), values is not None, values is not None)

    def _save_copies(self, changes: Mapping[bytes, bytes | None]) -> None:
        kept = {**(self.disk.copies or {}), **changes}
        self.disk.copies = {key: value for key, value in kept.items() if value is not None}

    def _replace_copies(self, values: Mapping[bytes, bytes]) -> None:
        self.disk.copies = dict(values)

    def _load_mark(self) -> LogMark | None:
        return self.disk.mark

    def _save_mark(self) -> None:
        self.disk.mark = LogMark(
            self._last_group, self._durable_group, self._next_id - 1, self._next_row
        )

    def _get(self, key: bytes) -> bytes | None:
        self._check(key)
        return self.disk.rows.get(key)

    def _check(self, key: bytes) -> None:
        if key in self.disk.unreadable:
            self._report(Damage(key, key + b"\x00", "made unreadable"))
            raise RecordUnreadable("made unreadable")

    def _scan(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        keys, rows = self.disk.keys, self.disk.rows
        for index in range(bisect_left(keys, begin), bisect_left(keys, end)):
            key = keys[index]
            if key in self.disk.unreadable:
                self._report(Damage(key, key + b"\x00", "made unreadable"))
                continue
            yield key, rows[key]

    def _last(self, begin: bytes, end: bytes) -> tuple[bytes, bytes] | None:
        keys = self.disk.keys
        index = bisect_left(keys, end)
        if index and keys[index - 1] >= begin:
            self._check(keys[index - 1])
            return keys[index - 1], self.disk.rows[keys[index - 1]]
        return None

    def view(self) -> View:
        """A copy of all rows."""
        return _MemoryView(self.disk)

    def _reopen(self) -> None:
        pass

    def _free_bytes(self) -> int:
        return self.disk.room_bytes

    def _release(self) -> None:
        pass


class MemoryReplica(ReplicaStore, MemoryStore):
    """The store of a replica. As on a disk, all that was applied is lost from some group on, when
    the power fails; never a group in the middle."""

    def _engine_batch(self) -> GroupBody:
        return MemoryStore._batch(self)

    def _release(self) -> None:
        with suppress(StoreFull):  # what is missing here is read from the log again
            self.write_position()
        self.disk.sync()


class _MemoryView(View):
    def __init__(self, disk: MemoryDisk) -> None:
        self._rows, self._keys = dict(disk.rows), disk.keys

    def scan(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        for key in self.keys(begin, end):
            yield key, self._rows[key]

    def keys(self, begin: bytes, end: bytes) -> Iterator[bytes]:
        yield from self._keys[bisect_left(self._keys, begin) : bisect_left(self._keys, end)]

    def first(self, begin: bytes, end: bytes) -> bytes | None:
        return next(self.keys(begin, end), None)

    def last(self, begin: bytes, end: bytes) -> bytes | None:
        index = bisect_left(self._keys, end)
        return self._keys[index - 1] if index and self._keys[index - 1] >= begin else None
