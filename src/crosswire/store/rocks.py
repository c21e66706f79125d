"""The store on an embedded RocksDB: what the hub runs on."""

from __future__ import annotations

import errno
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from struct import Struct as Layout
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Final, cast

import rocksdict

from crosswire.commitlog.body import GroupBody
from crosswire.durable_files import make_folder
from crosswire.errors import RecordUnreadable, StoreDamaged, StoreError, StoreFailed, StoreFull
from crosswire.store.contract import Store, View
from crosswire.store.copies import Copies, CopyFile
from crosswire.store.damage import Damage, DamageFile
from crosswire.store.engine import LogMark, StoreLimits, full_or_failed
from crosswire.store.locks import check_unused, describe_holder
from crosswire.store.manifest import HEADER_BYTES, fault_of, invalid_headers
from crosswire.store.reserve import WAL_BUFFERS, Reserve, free_bytes
from crosswire.store.scanning import error_of, first_readable

__all__ = [
    "COPIES",
    "DAMAGES",
    "MARK",
    "REPLICA",
    "MarkFile",
    "RocksStore",
    "is_new",
    "refuse_replica",
    "table_options",
]

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_COPY_BYTES: Final = 64 << 10
_MANIFEST_S: Final = 0.1
"""How old the size of the list of tables may be in a mark: an older size only shows less."""
COPIES: Final = "crosswire.copies"
MARK: Final = "crosswire.mark"
DAMAGES: Final = "crosswire.damage"
REPLICA: Final = "crosswire.replica"
"""A file in the store of a replica: to which log it belongs."""
_MARK_LAYOUT: Final = Layout(">8sQQQQQQ")
_MARK_MAGIC: Final = b"cwmark 1"
_MANIFEST: Final = re.compile(r"MANIFEST-\d+")
_ENGINE_FILES: Final = ("CURRENT", "MANIFEST-*", "*.sst", "*.log", COPIES, MARK)


class RocksStore(Store):
    """A data directory. Opening it replays the write-ahead log, nothing else.

    A damaged part of the log is left out, not everything after it; damaged blocks of tables are
    found by their checksums when they are read, skipped and reported in `damage`. Opening raises
    StoreDamaged where going on would be a guess.
    """

    _can_read = False
    _links: TemporaryDirectory[str] | None = None
    """Links to its files, while it is open to read only."""

    def __init__(self, path: str | os.PathLike[str], limits: StoreLimits | None = None) -> None:
        super().__init__(limits)
        self.path = Path(path)
        make_folder(self.path)
        self._check_kind()
        self.close_error = ""
        """What the engine raised when it was closed, or the list of damage could not be written:
        for debugging, nothing depends on it."""
        self._unsynced = rocksdict.WriteOptions()
        self._disk_reserve = Reserve(self.path, self.limits.buffer_bytes)
        self._copies = CopyFile(self.path / COPIES)
        self._mark = MarkFile(self.path / MARK)
        self._manifest = ""
        self._manifest_number = 0
        self._manifest_bytes = 0
        self._manifest_until = 0.0
        self._compacts = True
        new = is_new(self.path)
        # A hub that was killed during its first start leaves an engine without our files.
        if not new and not any(self.path.glob("crosswire.*")):
            new = self._is_blank()
        self.damages = DamageFile(self.path / DAMAGES, self._on_list_failed)
        # Merging tables with damage fails, and the engine refuses all writes after that: with known
        # damage it is off from the start.
        self._compacts = all(each.part != "tables" for each in self.damages.known)
        if not new:
            self._check_manifest()
        self._open(create=new)
        try:
            self._recover(is_new=new)
        except BaseException:
            self._close_engine()
            raise
        finally:
            # Not before the first writes: on a full disk they need what `make_room` freed.
            self._disk_reserve.keep()

    # Opening.

    def _check_kind(self) -> None:
        """Raises StoreFailed for the store of a replica."""
        refuse_replica(self.path)

    def _open(self, *, create: bool = False) -> None:
        """Open with a log that is intact except for a torn end, or else with what is left of it.

        What a damaged log has lost shows in the numbers of its groups.
        """
        modes = rocksdict.DBRecoveryMode
        check_unused(self.path)
        self._disk_reserve.make_room()
        # Before the engine sees them: it would not return from some of these.
        for log in self.path.glob("*.log"):
            self._clear_headers(log)
        try:
            self._open_with(modes.tolerate_corrupted_tail_records(), create=create)
        except Exception as error:
            self._judge_opening(error)
            try:
                self._open_with(modes.skip_any_corrupted_record(), create=False)
            except Exception as again:
                raise StoreDamaged(self._explain(_plain(str(again)))) from again
            self._log_error = self._log_error or " ".join(str(error).split())
        self._find_manifest()

    def _judge_opening(self, error: Exception) -> None:
        """Raises StoreFailed or StoreFull if that is why the engine can't be opened."""
        if "lock file" in str(error) or "/LOCK" in str(error):
            raise StoreFailed(f"{self.path} is in use by {describe_holder(self.path)}") from error
        if isinstance(full_or_failed(error), StoreFull):
            raise StoreFull(
                f"{self.path}: there is no room on the disk to open the store: about"
                f" {self._disk_reserve.needed_bytes()} bytes are needed"
            ) from error

    def _is_blank(self) -> bool:
        """A database without any of the hub's own files: is there nothing in it yet?

        A hub that was killed at its very first start leaves one, and an older hub kept no such
        files. Raises StoreFailed for that of another program. Nothing is written here.
        """
        check_unused(self.path)
        with TemporaryDirectory() as folder, suppress(RecordUnreadable):
            try:
                database = self._open_to_read(folder)
            except Exception:
                # What is wrong with it is reported when it is opened.
                return False
            try:
                return not _has_own_keys(database, self.path)
            finally:
                database.close()
        return False

    def _open_to_read(self, folder: str) -> rocksdict.Rdict:
        """What is on disk, by way of links in an empty folder: even to read only, the engine writes
        files of its own beside those that it reads."""
        for file in self.path.resolve().glob("[CMI0-9]*"):
            (Path(folder) / file.name).symlink_to(file)
        access = rocksdict.AccessType.read_only()
        return rocksdict.Rdict(folder, rocksdict.Options(raw_mode=True), access_type=access)

    def _clear_headers(self, log: Path) -> None:
        """Overwrite headers that the engine would read again and again without end with zeros: it
        leaves out the rest of that block then, as it does with other damage. Whether a group is
        missing because of that shows in the groups' numbers."""
        if not log.stat().st_size:
            return
        with log.open("r+b") as file, mmap(file.fileno(), 0) as data:
            for at in invalid_headers(data):
                header = data[at : at + HEADER_BYTES]
                data[at : at + HEADER_BYTES] = bytes(HEADER_BYTES)
                self._log_error = f"{log.name} had the header {header.hex()} at byte {at}"

    def _open_with(self, mode: rocksdict.DBRecoveryMode, *, create: bool) -> None:
        options = table_options(self.limits.buffer_bytes)
        options.create_if_missing(create)
        options.set_wal_recovery_mode(mode)
        options.set_disable_auto_compactions(not self._compacts)
        self._db = rocksdict.Rdict(str(self.path), options)
        self._can_read = True

    def _check_manifest(self) -> None:
        """Raises StoreDamaged for a list of tables that the engine must not open."""
        current = self.path / "CURRENT"
        if not current.exists():
            raise StoreDamaged(self._explain("the file CURRENT is missing"))
        name = current.read_text(errors="replace").strip()
        if not _MANIFEST.fullmatch(name):
            raise StoreDamaged(
                self._explain("the file CURRENT does not have the name of a list of tables")
            )
        try:
            data = (self.path / name).read_bytes()
        except OSError as error:
            raise StoreDamaged(
                self._explain(f"the list of tables, {name}, can't be read: {error.strerror}")
            ) from error
        mark = self._mark.load()
        is_known = mark is not None and name == f"MANIFEST-{mark.manifest:06}"
        fault = fault_of(data, mark.manifest_bytes if mark is not None and is_known else 0)
        if fault:
            raise StoreDamaged(self._explain(f"the list of tables, {name}: {fault}"))

    def _find_manifest(self) -> None:
        name = (self.path / "CURRENT").read_text().strip()
        # Not a `Path`: it is looked at after every commit group.
        self._manifest = str(self.path / name)
        self._manifest_number = int(name.partition("-")[2])
        # The size that is known is another one's.
        self._manifest_until = 0.0

    def _explain(self, what: str) -> str:
        folder = self.path.parent
        return (
            f"the store in {self.path} is damaged: {what}. Nothing was changed. "
            f"`crosswire store verify {folder}` lists what is damaged, "
            f"`crosswire store repair {folder}` restores what can be restored"
        )

    def _running(self) -> bytes:
        return _BOOT_ID.read_bytes().strip() if _BOOT_ID.exists() else b"unknown"

    # Second copies and the mark.

    def _load_copies(self) -> Copies:
        try:
            return self._copies.load()
        except OSError as error:
            detail = f"{self._copies.path.name} can't be read: {error.strerror}"
            self._report(Damage(b"", b"", detail, "copies"))
            return Copies({}, True, False)

    def _save_copies(self, changes: Mapping[bytes, bytes | None]) -> None:
        self._write_copies(lambda: self._copies.save(changes))

    def _replace_copies(self, values: Mapping[bytes, bytes]) -> None:
        self._write_copies(lambda: self._copies.rewrite(values))

    def _write_copies(self, write: Callable[[], None]) -> None:
        try:
            try:
                write()
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                # A new file beside the old one.
                if not self._disk_reserve.give(2 * self._copies.size_bytes + _COPY_BYTES):
                    raise
                write()
        except OSError as error:
            raise full_or_failed(error) from error

    def _load_mark(self) -> LogMark | None:
        return self._mark.load()

    def _save_mark(self) -> None:
        # Without a mark, or with an old one, nothing is lost: it only shows less.
        try:
            now = monotonic()
            if now >= self._manifest_until or self._closed:
                self._look_at_manifest()
                self._manifest_until = now + _MANIFEST_S
            self._mark.save(
                LogMark(
                    self._last_group,
                    self._durable_group,
                    self._next_id - 1,
                    self._next_row,
                    self._manifest_number,
                    self._manifest_bytes,
                )
            )
        except (OSError, ValueError):
            return

    def _look_at_manifest(self) -> None:
        try:
            self._manifest_bytes = os.stat(self._manifest).st_size  # noqa: PTH116
        except FileNotFoundError:
            # The engine has begun another one.
            self._find_manifest()
            self._manifest_bytes = os.stat(self._manifest).st_size  # noqa: PTH116

    def _size_of(self, batch: GroupBody) -> int:
        return cast(rocksdict.WriteBatch, batch).size_in_bytes()

    def _report(self, damage: Damage) -> None:
        if self._closed:
            # A reader that comes too late must not leave a report of damage in the files.
            raise StoreFailed("the store is closed")
        super()._report(damage)
        if damage.part == "tables" and self._compacts:
            # Merging a damaged table fails, and stops all writes with it.
            self._compacts = False
            self._db.set_options({"disable_auto_compactions": "true"})

    def _on_list_failed(self, error: OSError) -> None:
        self.close_error = f"{DAMAGES} can't be written: {error}"

    def _batch(self) -> GroupBody:
        batch: GroupBody = rocksdict.WriteBatch(raw_mode=True)
        return batch

    def _write(self, batch: GroupBody) -> None:
        written = cast(rocksdict.WriteBatch, batch)
        self._disk_reserve.before_write(written.size_in_bytes())
        # Not synced here: the binding would hold the interpreter's lock until the disk is done.
        try:
            self._db.write(written, self._unsynced)
        except Exception as error:
            raise full_or_failed(error) from error

    def _sync(self) -> None:
        try:
            self._db.flush_wal(sync=True)
        except Exception as error:
            raise full_or_failed(error) from error

    def _reopen(self) -> None:
        """RocksDB refuses all writes after a failed one, until it is opened anew. While that fails,
        what is on disk can still be read."""
        self._close_engine()
        if "Corruption" in str(self.last_error):
            # Merging tables would fail there again, and stop all writes with it.
            self._compacts = False
            detail = f"tables can't be merged until they are repaired: {self.last_error}"
            self._report(Damage(b"", b"", detail, "engine"))
        try:
            self._open()
        except (StoreError, OSError) as error:
            self._read_only()
            raise error if isinstance(error, StoreError) else full_or_failed(error) from error
        finally:
            self._disk_reserve.keep()

    def _close_engine(self) -> None:
        try:
            self._db.close()
        except Exception as error:
            # It repeats what was reported before; the files are closed all the same.
            self.close_error = str(error)
        if self._links is not None:
            self._links.cleanup()
            self._links = None
        self._can_read = False

    def _read_only(self) -> None:
        try:
            self._links = TemporaryDirectory(prefix="crosswire-store-")
            self._db = self._open_to_read(self._links.name)
            self._can_read = True
        except Exception as error:
            # Nothing can be read either, for the time being: that is no damage.
            self.close_error = str(error)

    # Reading. What can't be read is reported.

    @property
    def _engine(self) -> rocksdict.Rdict:
        """What is read from. Raises StoreFailed while nothing can be."""
        if not self._can_read:
            raise StoreFailed("the store can't be opened again yet")
        return self._db

    def _get(self, key: bytes) -> bytes | None:
        engine = self._engine
        try:
            value: bytes | None = engine.get(key)
        except Exception as error:
            self._report(Damage(key, key + b"\x00", str(error)))
            raise RecordUnreadable(str(error)) from error
        return value

    def _scan(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        options = rocksdict.ReadOptions()
        options.set_iterate_upper_bound(end)
        while begin < end:
            key = b""
            rows = cast(Iterator[tuple[bytes, bytes]], self._engine.items(False, begin, options))
            for row in rows:
                key = row[0]
                yield row
            # The iterator ends alike where the rows end and where a block can't be read.
            if key:
                begin = key + b"\x00"
            iterator = self._engine.iter(options)
            iterator.seek(begin)
            reason = error_of(iterator)
            if reason is None:
                if not iterator.valid():
                    return
                # It can be read now, and could not a moment ago: continue here, which gives one row
                # at least, so that this ends.
                continue
            begin = self.skip_unreadable(begin, end, reason)

    def skip_unreadable(self, begin: bytes, end: bytes, reason: str) -> bytes:
        """Report that a part of [begin, end) can't be read; returns the key after it."""
        options = rocksdict.ReadOptions()
        options.set_iterate_upper_bound(end)
        after = first_readable(lambda: self._engine.iter(options), begin, end)
        self._report(Damage(begin, after, reason))
        return after

    def _last(self, begin: bytes, end: bytes) -> tuple[bytes, bytes] | None:
        options = rocksdict.ReadOptions()
        options.set_iterate_upper_bound(end)
        iterator = self._engine.iter(options)
        iterator.seek_to_last()
        if not iterator.valid():
            reason = error_of(iterator)
            if reason is not None:
                self._report(Damage(begin, end, reason))
                raise RecordUnreadable(reason)
            return None
        if iterator.key() < begin:
            return None
        return iterator.key(), iterator.value()

    def copy_engine(self, folder: Path) -> None:
        """Link or copy the engine's files, as they are at one moment, to a new folder; on any
        thread. Raises StoreFull and StoreFailed."""
        try:
            # First: the copy sorts into tables what is in memory, and the binding holds the
            # interpreter's lock meanwhile. These don't: the second one sorts what was written
            # during the first, and leaves little.
            self._db.flush()
            self._db.flush()
            rocksdict.Checkpoint(self._db).create_checkpoint(str(folder))
        except Exception as error:
            raise full_or_failed(error) from error

    def view(self) -> View:
        """A snapshot of the engine."""
        return _RocksView(self, self._engine.snapshot())

    def _free_bytes(self) -> int:
        self._disk_reserve.keep()
        return free_bytes(self.path)

    def _has_room_to_reopen(self) -> bool:
        return super()._has_room_to_reopen() or self._disk_reserve.can_open()

    def has_room(self, now: float) -> bool:
        """Also without room to open the store again, producers have to wait."""
        return super().has_room(now) and self._disk_reserve.is_held

    def _release(self) -> None:
        """A clean stop: nothing unsynced is left that a power cut could take."""
        try:
            self._db.flush_wal(sync=True)
            self._db.delete(b"!running", self._unsynced)
            self._db.flush_wal(sync=True)
        except Exception as error:
            # An engine that met damage takes no more writes. All groups are on disk by now; without
            # this delete the next start takes the stop for an unclean one.
            self.close_error = str(error)
        with suppress(OSError):
            # After a clean stop the end of the log is known even without the mark.
            self._copies.save({b"!running": None, b"!stopped": self._last_group.to_bytes(8)})
        self._close_engine()
        self._durable_group = self._last_group
        self._save_mark()
        with suppress(OSError):
            self._mark.close(sync=True)


class MarkFile:
    """The mark's file: one record, overwritten after each commit group and not synced.

    Raises OSError where it can't be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def load(self) -> LogMark | None:
        """None where there is no mark, or it is damaged."""
        try:
            data = self.path.read_bytes()
        except OSError:
            return None
        if len(data) != _MARK_LAYOUT.size + 4 or zlib.crc32(data[:-4]) != int.from_bytes(data[-4:]):
            return None
        magic, *numbers = _MARK_LAYOUT.unpack(data[:-4])
        return LogMark(*numbers) if magic == _MARK_MAGIC else None

    def save(self, mark: LogMark) -> None:
        """One write, of one sector: a killed process leaves the old record or the new one."""
        data = _MARK_LAYOUT.pack(
            _MARK_MAGIC,
            mark.written,
            mark.durable,
            mark.newest_id,
            mark.next_row,
            mark.manifest,
            mark.manifest_bytes,
        )
        if self._descriptor < 0:
            # Not truncated: a kill between that and the write would leave no record at all.
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(self._descriptor, len(data) + 4)
        os.pwrite(self._descriptor, data + zlib.crc32(data).to_bytes(4), 0)

    def close(self, *, sync: bool = False) -> None:
        """Close the file, which the next `save` opens again."""
        if self._descriptor >= 0:
            if sync:
                os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


class _RocksView(View):
    """A snapshot: all its scans see what was there when it was made."""

    def __init__(self, store: RocksStore, snapshot: rocksdict.Snapshot) -> None:
        self._store = store
        self._snapshot = snapshot
        self._iterator = snapshot.iter()
        self._is_bounded = False

    def scan(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        for key in self.keys(begin, end):
            yield key, self._iterator.value()

    def keys(self, begin: bytes, end: bytes) -> Iterator[bytes]:
        self._remove_bound()
        while begin < end:
            iterator = self._iterator
            valid, key_of, next_one = iterator.valid, iterator.key, iterator.next
            iterator.seek(begin)
            while valid():
                key: bytes = key_of()
                if key >= end:
                    return
                yield key
                begin = key + b"\x00"
                next_one()
            reason = error_of(iterator)
            if reason is None:
                return
            # A failed iterator stays failed. And this one has no upper bound: what it could not
            # read may be the first block after `end`, which is not this scan's damage. Without the
            # bound it would fail there again and again, one key further each time.
            options = rocksdict.ReadOptions()
            options.set_iterate_upper_bound(end)
            if self._is_bounded:
                begin = self._store.skip_unreadable(begin, end, reason)
            self._iterator, self._is_bounded = self._snapshot.iter(options), True

    def first(self, begin: bytes, end: bytes) -> bytes | None:
        return next(self.keys(begin, end), None)

    def _remove_bound(self) -> None:
        """The bound of an earlier scan that met damage."""
        if self._is_bounded:
            self._iterator, self._is_bounded = self._snapshot.iter(), False

    def last(self, begin: bytes, end: bytes) -> bytes | None:
        self._remove_bound()
        self._iterator.seek_for_prev(end)
        if self._iterator.valid() and self._iterator.key() == end:
            self._iterator.prev()
        if not self._iterator.valid():
            if error_of(self._iterator) is None:
                return None
            # What can't be read at the end must not hide what is before it.
            newest = deque(self.keys(begin, end), maxlen=1)
            return newest[0] if newest else None
        key: bytes = self._iterator.key()
        return key if key >= begin else None


def _has_own_keys(database: rocksdict.Rdict, path: Path) -> bool:
    """Raises StoreFailed where there are only other keys, RecordUnreadable for damage."""
    try:
        if any(database.get(key) is not None for key in (b"!format", b"!node", b"!ids")):
            return True
    except Exception as error:
        raise RecordUnreadable(str(error)) from error
    iterator = database.iter()
    iterator.seek_to_first()
    is_empty = not iterator.valid()
    reason = error_of(iterator)
    if reason is not None:
        raise RecordUnreadable(reason)
    if not is_empty:
        raise StoreFailed(
            f"{path} has the database of another program, not a hub's store: nothing was changed;"
            " choose another folder for the data"
        )
    return False


def refuse_replica(path: Path) -> None:
    """Raises StoreFailed for the store of a replica: a write that is not in its log would make it
    differ from all others."""
    if (path / REPLICA).exists():
        raise StoreFailed(
            f"{path} is a replica of a log: start it with that log ([replication] log), or run"
            f" `crosswire replication leave` first. Nothing was changed"
        )


def is_new(path: Path) -> bool:
    """Is there no file of a store? A directory that has lost some of its files is not new."""
    return not any(True for pattern in _ENGINE_FILES for _ in path.glob(pattern))


def _plain(reason: str) -> str:
    """The engine's error in terms of its files."""
    reason = " ".join(reason.split())
    if ".sst" in reason:
        return f"a table is missing or unreadable ({reason})"
    if "MANIFEST" in reason:
        return f"the list of tables is missing or unreadable ({reason})"
    if "CURRENT" in reason:
        return f"the file CURRENT is missing or unreadable ({reason})"
    return f"it can't be opened ({reason})"


def table_options(buffer_bytes: int) -> rocksdict.Options:
    """The engine's options. Buffers are small: the tail of a queue is on disk, not in memory."""
    options = rocksdict.Options(raw_mode=True)
    options.set_write_buffer_size(buffer_bytes)
    options.set_max_write_buffer_number(3)
    options.set_max_total_wal_size(WAL_BUFFERS * buffer_bytes)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(4)
    # It is read as a whole, and checked, at every start.
    options.set_max_manifest_file_size(4 << 20)
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    table = rocksdict.BlockBasedOptions()
    table.set_block_cache(rocksdict.Cache(32 << 20))
    table.set_block_size(16 << 10)
    options.set_block_based_table_factory(table)
    return options
