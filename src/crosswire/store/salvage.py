"""All that can still be read of a stopped hub's store, without changing one of its files."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final, cast

import rocksdict

from crosswire.errors import StoreDamaged, StoreFailed
from crosswire.store.contract import Store
from crosswire.store.copies import Copies, CopyFile
from crosswire.store.damage import Damage, DamageList
from crosswire.store.engine import LogMark
from crosswire.store.keys import message_key
from crosswire.store.reserve import RESERVE, Reserve
from crosswire.store.rocks import COPIES, MARK, MarkFile, RocksStore, is_new, table_options

__all__ = ["Salvage", "build"]

_BATCH_BYTES: Final = 4 << 20
_TABLE: Final = re.compile(r"(\d+\.sst)")

_NOT_COPIED: Final = ("LOCK", RESERVE)


class Salvage(RocksStore):
    """The store in `path`, opened through links and copies of its files in the new folder `work`.

    Nothing is recovered or written; what is saved here stays in `changes`. What can't be read of
    its files is in `damage`. Where the engine can't open them, it makes a new list of its tables.
    """

    def __init__(self, path: Path, work: Path) -> None:
        Store.__init__(self)
        self.path = work
        self.source = path
        self.is_empty = is_new(path)
        self.close_error = ""
        self.damages = DamageList()
        self._disk_reserve = Reserve(work, self.limits.buffer_bytes)
        self._compacts = False
        self._manifest = ""
        self._manifest_number = 0
        self._copies = CopyFile(work / COPIES)
        self._mark = MarkFile(work / MARK)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        for file in path.iterdir() if path.is_dir() else ():
            if file.suffix == ".sst":
                # The engine never writes to a table again.
                os.link(file, work / file.name)
            elif (
                file.is_file() and not file.name.startswith("LOG") and file.name not in _NOT_COPIED
            ):
                shutil.copyfile(file, work / file.name)
        self.copies = Copies({}, False, False)
        self.mark: LogMark | None = None
        if not self.is_empty:
            self._open_somehow()
            self.copies, self.mark = self._copies.load(), self._mark.load()
        else:
            self._open_with(rocksdict.DBRecoveryMode.point_in_time(), create=True)

    def _open_somehow(self) -> None:
        try:
            self._check_manifest()
            self._open()
        except StoreDamaged as error:
            cause = str(error).partition("is damaged: ")[2].partition(". Nothing was changed")[0]
            self._report(Damage(b"", b"", cause, "engine"))
            for file in (*self.path.glob("MANIFEST-*"), self.path / "CURRENT"):
                file.unlink(missing_ok=True)
            try:
                rocksdict.Rdict.repair(str(self.path), table_options(self.limits.buffer_bytes))
                self._open()
            except Exception as again:
                raise StoreFailed(f"{self.source}: nothing can be read: {again}") from again
        if self._log_error:
            detail = f"the log is damaged: {' '.join(self._log_error.split())}"
            self._report(Damage(b"", b"", detail, "log"))

    @property
    def changes(self) -> Mapping[bytes, bytes | None]:
        """What was saved and dropped here."""
        return self.group.saves

    def rows(self, begin: bytes = b"\x00", end: bytes = b"\xff") -> Iterator[tuple[bytes, bytes]]:
        """All rows that can be read, in order of keys; what can't goes to `damage`, separately for
        each kind of rows and each destination."""
        borders = [b"l", b"m", *(message_key(each, 0) for each in sorted(self._names)), b"n"]
        borders = [begin, *(each for each in borders if begin < each < end), end]
        for first, end in pairwise(borders):
            yield from self._scan(first, end)

    def hidden_rows(self) -> Iterator[tuple[bytes, bytes]]:
        """Messages and blocks of the ledger that a damaged table hides: they are in other tables,
        and reading them together with it fails. What it replaced or dropped may be among them."""
        damaged = {name for each in self.damage for name in _TABLE.findall(each.reason)}
        ranges = [
            (each.first, each.end)
            for each in self.damage
            if each.part == "tables" and each.first[:1] in (b"m", b"l")
        ]
        if not damaged or not ranges:
            return
        folder = self.path / "others"
        folder.mkdir()
        for file in self.path.glob("*.sst"):
            if file.name not in damaged:
                os.link(file, folder / file.name)
        options = table_options(self.limits.buffer_bytes)
        rocksdict.Rdict.repair(str(folder), options)
        options = table_options(self.limits.buffer_bytes)
        options.set_disable_auto_compactions(True)
        others = rocksdict.Rdict(str(folder), options)
        for first, end in ranges:
            rows = cast(Iterator[tuple[bytes, bytes]], others.items(False, first))
            for key, value in rows:
                if not key < end or key[:1] != first[:1]:
                    break
                yield key, value
        others.close()

    def know(self, numbers: Mapping[str, int]) -> None:
        """Set the names of destinations, which descriptions of damage use."""
        self._numbers = dict(numbers)
        self._names = {number: name for name, number in numbers.items()}

    def discard(self) -> None:
        """Close it and remove the links and copies."""
        self._closed = True
        self._close_engine()
        shutil.rmtree(self.path, ignore_errors=True)


def build(path: Path, rows: Iterator[tuple[bytes, bytes]], own: Mapping[bytes, bytes]) -> None:
    """Write a new store with these rows, in any order; `own` are those that have a second copy, and
    are among the rows too."""
    options = table_options(32 << 20)
    options.create_if_missing(True)
    db = rocksdict.Rdict(str(path), options)
    unlogged = rocksdict.WriteOptions()
    unlogged.disable_wal = True  # type: ignore[assignment,method-assign]
    batch, size = rocksdict.WriteBatch(raw_mode=True), 0
    for key, value in rows:
        batch.put(key, value)
        size += len(key) + len(value)
        if size >= _BATCH_BYTES:
            db.write(batch, unlogged)
            batch, size = rocksdict.WriteBatch(raw_mode=True), 0
    db.write(batch, unlogged)
    db.flush()
    db.close()
    CopyFile(path / COPIES).rewrite(own)
