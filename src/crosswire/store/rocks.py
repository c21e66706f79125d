"""The store on an embedded RocksDB: what the hub runs on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import rocksdict

from crosswire.errors import StoreFailed, StoreFull
from crosswire.store.contract import Batch, Store, StoreLimits, View, full_or_failed
from crosswire.store.reserve import WAL_BUFFERS, Reserve, free_bytes
from crosswire.store.view import Damage

__all__ = ["RocksStore"]

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SUFFIX: Final = 8


class RocksStore(Store):
    """A data directory. Opening it replays the write-ahead log, nothing else.

    A damaged part of the log is left out, not everything behind it; damaged blocks of tables are
    found by their checksums when they are read, passed over and reported in `damage`.
    """

    def __init__(self, path: str | os.PathLike[str], limits: StoreLimits | None = None) -> None:
        super().__init__(limits)
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.heal_complaint = ""
        self._unsynced = rocksdict.WriteOptions()
        self._disk_reserve = Reserve(self.path, self.limits.buffer_bytes)
        self._open()
        self._recover()
        self._compare_boots()

    def _open(self) -> None:
        self._disk_reserve.make_room()
        try:
            self._db = rocksdict.Rdict(str(self.path), _options(self.limits.buffer_bytes))
        except Exception as error:
            if isinstance(full_or_failed(error), StoreFull):
                raise StoreFull(
                    f"{self.path}: there is no room on the disk to open the store: about"
                    f" {self._disk_reserve.needed_bytes()} bytes are needed"
                ) from error
            raise StoreFailed(f"{self.path}: {error}") from error
        self._disk_reserve.keep()

    def _compare_boots(self) -> None:
        """Was the machine stopped under us? Then what was not synced may be gone."""
        boot = _BOOT_ID.read_bytes().strip() if _BOOT_ID.exists() else b"unknown"
        running = self._get(b"!running")
        self.power_lost = running is not None and running != boot
        batch = self._batch()
        batch.put(b"!running", boot)
        self._store_now(batch)

    def _batch(self) -> Batch:
        batch: Batch = rocksdict.WriteBatch(raw_mode=True)
        return batch

    def _write(self, batch: Batch) -> None:
        written = cast(rocksdict.WriteBatch, batch)
        self._disk_reserve.before_write(written.size_in_bytes())
        # With `sync` it would keep the interpreter to itself until the disk is done.
        try:
            self._db.write(written, self._unsynced)
        except Exception as error:
            raise full_or_failed(error) from error

    def _sync(self) -> None:
        try:
            self._db.flush_wal(sync=True)
        except Exception as error:
            raise full_or_failed(error) from error

    def _heal(self) -> None:
        """After a failed write RocksDB takes no other until it is opened anew."""
        try:
            self._db.close()
        except Exception as error:
            # It repeats what was reported when the write failed; the files are let go of anyway.
            self.heal_complaint = str(error)
        self._open()

    def _get(self, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._db.get(key)
        except Exception as error:
            self._report(key, key + b"\x00", str(error))
            return None
        return value

    def _scan(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        options = rocksdict.ReadOptions()
        options.set_iterate_upper_bound(end)
        while True:
            key = b""
            rows = cast(Iterator[tuple[bytes, bytes]], self._db.items(False, begin, options))
            for row in rows:
                key = row[0]
                yield row
            # The iterator ends alike where the rows end and where a block can't be read.
            if key:
                begin = key + b"\x00"
            reason = self._complaint(begin, options)
            if reason is None:
                return
            behind = self._first_readable(begin, end, options)
            self._report(begin, behind, reason)
            begin = behind

    def _complaint(self, begin: bytes, options: Any) -> str | None:
        iterator = self._db.iter(options)
        iterator.seek(begin)
        if iterator.valid():
            return None
        try:
            iterator.status()
        except Exception as error:
            return str(error)
        return None

    def _first_readable(self, begin: bytes, end: bytes, options: Any) -> bytes:
        """The least key from which reading works again.

        A seek into a damaged block fails, one behind it does not: halving the distance finds the
        border, in as many steps as the part of the key behind the common prefix has bits.
        """
        shared = _shared(begin, end)
        low = int.from_bytes(begin[shared : shared + _SUFFIX].ljust(_SUFFIX, b"\x00"))
        high = int.from_bytes(end[shared : shared + _SUFFIX].ljust(_SUFFIX, b"\x00"))
        prefix = begin[:shared]
        while low < high:
            middle = (low + high) // 2
            if self._complaint(prefix + middle.to_bytes(_SUFFIX), options) is None:
                high = middle
            else:
                low = middle + 1
        return prefix + low.to_bytes(_SUFFIX)

    def _report(self, first: bytes, behind: bytes, reason: str) -> None:
        self.damage.append(Damage(first, behind, reason))

    def _last(self, begin: bytes, end: bytes) -> tuple[bytes, bytes] | None:
        options = rocksdict.ReadOptions()
        options.set_iterate_upper_bound(end)
        iterator = self._db.iter(options)
        iterator.seek_to_last()
        if not iterator.valid() or iterator.key() < begin:
            return None
        return iterator.key(), iterator.value()

    def view(self) -> View:
        return _RocksView(self, self._db.iter())

    def passed_over(self, begin: bytes, end: bytes, reason: str) -> bytes:
        """A part of [begin, end) can't be read: report it; gives where reading works again."""
        options = rocksdict.ReadOptions()
        options.set_iterate_upper_bound(end)
        behind = self._first_readable(begin, end, options)
        self._report(begin, behind, reason)
        return behind

    def _free_bytes(self) -> int:
        self._disk_reserve.keep()
        return free_bytes(self.path)

    def has_room(self, now: float) -> bool:
        return super().has_room(now) and self._disk_reserve.is_held

    def _release(self) -> None:
        """A clean stop: nothing unsynced is left that a power cut could take."""
        self._db.flush_wal(sync=True)
        self._db.delete(b"!running", self._unsynced)
        self._db.flush_wal(sync=True)
        self._db.close()


class _RocksView(View):
    """An iterator sees what was there when it was made, and so do all its scans."""

    def __init__(self, store: RocksStore, iterator: rocksdict.RdictIter) -> None:
        self._store = store
        self._iterator = iterator

    def scan(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        value = self._iterator.value
        for key in self.keys(begin, end):
            yield key, value()

    def keys(self, begin: bytes, end: bytes) -> Iterator[bytes]:
        iterator = self._iterator
        valid, key_of, next_one = iterator.valid, iterator.key, iterator.next
        while begin < end:
            iterator.seek(begin)
            while valid():
                key: bytes = key_of()
                if key >= end:
                    return
                yield key
                begin = key + b"\x00"
                next_one()
            reason = self._complaint()
            if reason is None:
                return
            begin = self._store.passed_over(begin, end, reason)

    def first(self, begin: bytes, end: bytes) -> bytes | None:
        return next(self.keys(begin, end), None)

    def last(self, begin: bytes, end: bytes) -> bytes | None:
        self._iterator.seek_for_prev(end)
        if self._iterator.valid() and self._iterator.key() == end:
            self._iterator.prev()
        if not self._iterator.valid():
            return None
        key: bytes = self._iterator.key()
        return key if key >= begin else None

    def _complaint(self) -> str | None:
        try:
            self._iterator.status()
        except Exception as error:
            return str(error)
        return None


def _shared(one: bytes, other: bytes) -> int:
    """How many bytes two keys have in common at their start."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


def _options(buffer_bytes: int) -> rocksdict.Options:
    """Small buffers: the tail of a queue lives on disk, not in here."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(buffer_bytes)
    options.set_max_write_buffer_number(3)
    options.set_max_total_wal_size(WAL_BUFFERS * buffer_bytes)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(4)
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    options.set_wal_recovery_mode(rocksdict.DBRecoveryMode.skip_any_corrupted_record())
    table = rocksdict.BlockBasedOptions()
    table.set_block_cache(rocksdict.Cache(32 << 20))
    table.set_block_size(16 << 10)
    options.set_block_based_table_factory(table)
    return options
