"""The tap's spool: rows are appended to a file at once and sealed into files of `wire` soon after.

    .spool/NODE-FIRST.spool     rows from seq FIRST on, in batches:
                                length 4 · CRC-32 4 · MessagePack array of rows
    .spool/NODE.next            the seq after the last sealed row
    .spool/NODE.running         exists while a hub writes here

The spool is not synced. That of a killed process survives in the page cache and is sealed at the
next start; after a power cut its end may be missing. The next process can't distinguish the two, so
it records in a row `lost` that more may be missing. A row that can't be written, on a full disk, is
lost as well: the next one that can be is preceded by a row `lost`, and every connection that misses
bytes gets a row `gap`.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from crosswire.durable_files import make_folder, replace_file, sync_folder
from crosswire.lake.columns import binary, booleans, int32s, integers, optional_text, text
from crosswire.lake.files import clear, find, is_covered, write
from crosswire.lake.schemas import BACKWARD, DATA, FORWARD, GAP, LOST, OPEN, WIRE

__all__ = ["Peers", "Spool", "WireRow"]

_HEADER: Final = 8


class Peers(msgspec.Struct, frozen=True, array_like=True):
    """The columns that all rows of a connection have in common."""

    connection: str
    protocol: str
    listener: str
    connector_address: str = ""
    connector_port: int = 0
    acceptor_address: str = ""
    acceptor_port: int = 0


_NOBODY: Final = Peers("", "", "")


class WireRow(msgspec.Struct, frozen=True, array_like=True):
    """A row of `wire` without node and seq, which the spool adds. `time` is µs since 1970."""

    peers: Peers
    direction: str
    kind: str
    offset: int
    length: int
    time: int
    data: bytes | None = None
    late: bool = False


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[WireRow]).decode


class Spool:
    """Appends rows to a spool and makes files of them. Runs on one thread beside the event loop.

    Opening it seals the spool of an earlier process. Raises OSError there and in `seal`, never in
    `add`: a tap that can't write must not stop the hub, and records later what is missing.
    """

    def __init__(self, lake: Path, node: str, *, memory_bytes: int) -> None:
        self._lake = lake
        self._node = node
        self._folder = lake / ".spool"
        self._memory_bytes = memory_bytes
        make_folder(self._folder)
        self._next_file = self._folder / f"{node}.next"
        self._running = self._folder / f"{node}.running"
        self._rows: list[WireRow] = []
        self._offsets: dict[tuple[str, str], int] = {}
        self._file: int | None = None
        self._path: Path | None = None
        self._good_bytes = 0
        self.first_time = 0
        """When the first row that is not sealed was added, µs since 1970."""
        self.size_bytes = 0
        self.lost_bytes = 0
        """The number of bytes that were lost and are in no row yet."""
        self._lost = False
        self._next = self._recover()

    # Starting and stopping.

    def _recover(self) -> int:
        """Seal spools of an earlier process; gives the seq of the next row."""
        clear(self._lake, "wire", self._node)
        own = [each.last for each in find(self._lake, ("wire",)) if each.node == self._node]
        next_number = int(self._next_file.read_text()) if self._next_file.exists() else 1
        # A process that is killed between publishing a file and writing `.next` has used numbers
        # that only the file's name has; retention may have removed files that only `.next` knows.
        following = max([next_number, *(last + 1 for last in own)])
        for path in sorted(self._folder.glob(f"{self._node}-*.spool")):
            first = int(path.stem.rpartition("-")[2])
            rows = list(_read(path))
            last = first + len(rows) - 1
            # It was killed between publishing and removing the spool: the rows are in a file.
            if rows and not is_covered(self._lake, "wire", self._node, first, last):
                write(self._lake, "wire", _table(self._node, first, rows))
            following = max(following, last + 1)
            path.unlink()
        self._lost = self._running.exists()
        self._running.touch()
        sync_folder(self._folder)
        return following

    def close(self, now_us: int) -> None:
        """Seal what is spooled. The marker file stays if something is missing at the end, so that
        the next process begins with a row `lost`."""
        self.add([], now_us)
        self.seal()
        if not self._lost:
            self._running.unlink(missing_ok=True)

    # Rows.

    def add(self, rows: Sequence[WireRow], now_us: int, *, lost_bytes: int = 0) -> None:
        """Append rows; `lost_bytes` after them never reached the spool. Never raises."""
        if rows or self._lost:
            self._spool(rows, now_us)
        if lost_bytes:
            self._lose(lost_bytes)

    def _spool(self, rows: Sequence[WireRow], now_us: int) -> None:
        if self.size_bytes > self._memory_bytes:
            # Sealing fails or can't keep up. What is in memory has a limit; the rest is lost.
            self._lose(sum(row.length for row in rows))
            return
        before = dict(self._offsets)
        complete = list(self._completed(rows, now_us))
        try:
            self._append(_encode(complete))
        except OSError:
            self._offsets = before
            self._lose(sum(row.length for row in rows))
            self._cut_torn_batch()
            return
        self._lost, self.lost_bytes = False, 0
        if not self._rows:
            self.first_time = now_us
        self._rows += complete
        self.size_bytes += sum(row.length + 100 for row in complete)

    @property
    def is_lossy(self) -> bool:
        """Whether rows were lost that no row `lost` records yet."""
        return self._lost

    def _lose(self, lost_bytes: int) -> None:
        self._lost = True
        self.lost_bytes += lost_bytes

    def _completed(self, rows: Sequence[WireRow], now_us: int) -> Iterator[WireRow]:
        """The rows, with rows `lost` and `gap` for what is missing before and between them."""
        if self._lost:
            yield WireRow(_NOBODY, "", LOST, 0, self.lost_bytes, now_us)
        offsets = self._offsets
        for row in rows:
            connection = row.peers.connection
            key = (connection, row.direction)
            # The key without a direction marks a connection that was recorded from its beginning:
            # both its directions start at 0. Of others the first row seen sets the offset, and is
            # late unless it is the first byte.
            if row.kind == OPEN:
                offsets[connection, ""] = 0
            offset = offsets.get(key, 0 if (connection, "") in offsets else row.offset)
            late = row.offset > 0 and key not in offsets and (connection, "") not in offsets
            if row.offset > offset:
                missing = row.offset - offset
                yield WireRow(row.peers, row.direction, GAP, offset, missing, row.time)
            yield msgspec.structs.replace(row, late=True) if late else row
            offsets[key] = row.offset + (row.length if row.kind == DATA else 0)

    def forget(self, connections: Sequence[str]) -> None:
        """Drop the offsets of connections that have ended."""
        for connection in connections:
            for direction in ("", FORWARD, BACKWARD):
                self._offsets.pop((connection, direction), None)

    def _append(self, body: bytes) -> None:
        if self._file is None:
            self._path = self._folder / f"{self._node}-{self._next:020}.spool"
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            self._good_bytes = 0
        batch = len(body).to_bytes(4) + zlib.crc32(body).to_bytes(4) + body
        view = memoryview(batch)
        while view:
            view = view[os.write(self._file, view) :]
        self._good_bytes += len(batch)

    def _cut_torn_batch(self) -> None:
        """Remove a batch that was written in part: a reader would stop there and miss the next."""
        if self._file is not None:
            os.ftruncate(self._file, self._good_bytes)
            os.lseek(self._file, self._good_bytes, os.SEEK_SET)

    # Files.

    def seal(self) -> int:
        """Make a file of what is spooled; gives the number of rows. Raises OSError, and keeps the
        rows then."""
        rows = self._rows
        if not rows:
            return 0
        write(self._lake, "wire", _table(self._node, self._next, rows))
        self._next += len(rows)
        self._rows, self.size_bytes = [], 0
        # The file is published and synced before the spool goes: a kill in between leaves both, and
        # the file's name shows the next process that the spool is sealed.
        self._remove_spool()
        replace_file(self._next_file, str(self._next).encode())
        return len(rows)

    def _remove_spool(self) -> None:
        if self._file is not None and self._path is not None:
            os.close(self._file)
            self._path.unlink(missing_ok=True)
            self._file = self._path = None


def _read(path: Path) -> Iterator[WireRow]:
    """The rows of a spool up to a batch that is cut or has a wrong checksum."""
    data = path.read_bytes()
    offset = 0
    while offset + _HEADER <= len(data):
        size = int.from_bytes(data[offset : offset + 4])
        body = data[offset + _HEADER : offset + _HEADER + size]
        if len(body) < size or zlib.crc32(body) != int.from_bytes(data[offset + 4 : offset + 8]):
            return
        yield from _decode(body)
        offset += _HEADER + size


def _table(node: str, first_seq: int, rows: Sequence[WireRow]) -> pa.Table:
    peers = [row.peers for row in rows]
    columns = {
        "node": text([node] * len(rows)),
        "seq": integers(np.arange(first_seq, first_seq + len(rows))),
        "connection": text([each.connection for each in peers]),
        "direction": text([row.direction for row in rows]),
        "kind": text([row.kind for row in rows]),
        "offset": integers([row.offset for row in rows]),
        "length": integers([row.length for row in rows]),
        "time": integers([row.time for row in rows]),
        "data": binary([row.data for row in rows]),
        "late": booleans([row.late for row in rows]),
        "protocol": optional_text([each.protocol for each in peers]),
        "listener": optional_text([each.listener for each in peers]),
        "connector_address": text([each.connector_address for each in peers]),
        "connector_port": int32s([each.connector_port for each in peers]),
        "acceptor_address": text([each.acceptor_address for each in peers]),
        "acceptor_port": int32s([each.acceptor_port for each in peers]),
    }
    return pa.Table.from_arrays([columns[name] for name in WIRE.names], schema=WIRE)
