"""The frames of an analysis in a SQLite file, which one process writes and others search.

Frames are written in groups, each a transaction: if the writer is killed, what it has written can
be read.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from crosswire.analyzer.analysis import AnalyzedConnection, AnalyzedFrame
from crosswire.analyzer.decoded_frames import Violation
from crosswire.analyzer.frame_filter import FrameFilter, summarize
from crosswire.errors import InvalidInput

__all__ = [
    "FoundFrame",
    "FrameContent",
    "FrameStart",
    "PackedRange",
    "ResultReader",
    "ResultWriter",
]

_GROUP: Final = 2000
_GROUP_BYTES: Final = 4 << 20
_ROW_BYTES: Final = 256
"""Of a row beside its content."""
_SHOWN_BYTES: Final = 64 * 1024
"""Of a frame; what follows is not kept."""
_DETAIL_BYTES: Final = 512 * 1024
"""Fields in JSON: of a large frame they would be twice its size in hex."""
_CHECKED: Final = 1000
"""Steps of SQLite between two looks at the clock."""

_TABLES: Final = """
CREATE TABLE connections (number INTEGER PRIMARY KEY, row BLOB);
CREATE TABLE frames (
    number INTEGER PRIMARY KEY, connection INTEGER, protocol TEXT, time_us INTEGER,
    is_forward INTEGER, sender TEXT, offset INTEGER, length INTEGER, layer INTEGER, frame TEXT,
    destination TEXT, conversation TEXT, violation BLOB, summary TEXT
);
CREATE TABLE contents (
    number INTEGER PRIMARY KEY, fields BLOB, ranges BLOB, is_masked INTEGER, data BLOB
);
"""


PackedRange: TypeAlias = tuple[list[str | int], int, int, bool]
"""Path, start, end, and whether it is a field."""
_RANGES: Final = msgspec.msgpack.Decoder(list[PackedRange])


class FrameStart(msgspec.Struct, frozen=True, kw_only=True):
    """A frame as a list shows it."""

    number: int
    connection: int
    protocol: str
    time_us: int
    is_forward: bool
    sender: str
    offset: int
    length: int
    layer: int
    frame: str
    destination: str
    conversation: str
    violation: Violation | None
    summary: str


class FrameContent(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a frame as JSON, the ranges of its fields, and its bytes: the first 64 KiB."""

    fields: msgspec.Raw
    ranges: list[PackedRange]
    is_masked: bool
    data: bytes


class FoundFrame(FrameStart, frozen=True, kw_only=True):
    """A frame with its content."""

    content: FrameContent


# ----------------------------------------------------------------------------------------- writing


class ResultWriter:
    """Writes a new file. `size_bytes` is about what was written."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        # Nobody reads the file after a power cut.
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.executescript(_TABLES)
        self._frames: list[tuple[Any, ...]] = []
        self._contents: list[tuple[Any, ...]] = []
        self._connections: dict[int, AnalyzedConnection] = {}
        self._waiting_bytes = 0
        self.size_bytes = 0

    def add(self, frame: AnalyzedFrame) -> None:
        """Write a frame, now or with those that follow."""
        decoded, connection = frame.decoded, frame.connection
        fields = msgspec.json.encode(decoded.fields)
        if len(fields) > _DETAIL_BYTES:
            note = f"more than {_DETAIL_BYTES} bytes: see the frame's own"
            fields = msgspec.json.encode(dict.fromkeys(decoded.fields, note))
        violation = None
        if decoded.violation is not None:
            violation = msgspec.msgpack.encode(decoded.violation)
        data = decoded.data[:_SHOWN_BYTES]
        ranges = [
            (each.path, each.start, each.end, each.is_field)
            for each in decoded.ranges
            if each.start <= len(data)
        ]
        packed = msgspec.msgpack.encode(ranges)
        self._frames.append(
            (
                frame.number,
                connection.number,
                connection.protocol,
                frame.time_us,
                frame.is_forward,
                frame.sender,
                decoded.offset,
                decoded.length,
                decoded.layer,
                decoded.frame,
                frame.subject.destination,
                frame.subject.conversation,
                violation,
                summarize(decoded.fields, decoded.violation),
            )
        )
        self._contents.append((frame.number, fields, packed, decoded.is_masked, data))
        self._connections[connection.number] = connection
        size_bytes = len(fields) + len(packed) + len(data) + _ROW_BYTES
        self.size_bytes += size_bytes
        self._waiting_bytes += size_bytes
        if len(self._frames) >= _GROUP or self._waiting_bytes >= _GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Make what was added readable."""
        database = self._database
        database.execute("BEGIN")
        marks = ",".join("?" * 14)
        database.executemany(f"INSERT INTO frames VALUES ({marks})", self._frames)
        database.executemany("INSERT INTO contents VALUES (?,?,?,?,?)", self._contents)
        self.put_connections(list(self._connections.values()))
        database.execute("COMMIT")
        self._frames, self._contents, self._connections = [], [], {}
        self._waiting_bytes = 0

    def put_connections(self, connections: list[AnalyzedConnection]) -> None:
        """Write connections, or write them again."""
        self._database.executemany(
            "INSERT OR REPLACE INTO connections VALUES (?, ?)",
            [(each.number, msgspec.msgpack.encode(each)) for each in connections],
        )

    def close(self) -> None:
        """Write all of it."""
        self.flush()
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._database.close()


# ----------------------------------------------------------------------------------------- reading


class ResultReader:
    """Searches a file that is written, or was. For use on threads; each call opens it anew, so
    that nothing stays open for a client that does not return."""

    def __init__(self, path: Path, within_s: float = 5.0) -> None:
        self._path = path
        self._within_s = within_s

    def connections(self, after: int = 0, limit: int = 1000) -> list[AnalyzedConnection]:
        """Connections in the order of their numbers, from the one after `after` on. Raises
        InvalidInput."""
        with self._database() as database:
            rows = database.execute(
                "SELECT row FROM connections WHERE number > ? ORDER BY number LIMIT ?",
                (after, limit),
            )
            return [msgspec.msgpack.decode(row, type=AnalyzedConnection) for (row,) in rows]

    def frames(self, chosen: FrameFilter, after: int, limit: int) -> list[FrameStart]:
        """Frames in the order of their numbers, from the one after `after` on. Raises InvalidInput
        if the search takes too long."""
        terms = ["frames.number > ?"]
        values: list[int | str] = [after]
        join = ""
        for name in ("connection", "protocol", "frame", "conversation"):
            if value := getattr(chosen, name):
                terms.append(f"{name} = ?")
                values.append(value)
        if chosen.destination:
            terms.append("instr(destination, ?) > 0")
            values.append(chosen.destination)
        if chosen.violations:
            terms.append("violation IS NOT NULL")
        if chosen.text:
            join = "JOIN contents USING (number)"
            terms.append("has_text(summary, frame, data)")
        wanted = ", ".join(f"frames.{name}" for name in _COLUMNS)
        with self._database() as database:
            database.create_function("has_text", 3, _finder(chosen.text), deterministic=True)
            rows = database.execute(
                f"SELECT {wanted} FROM frames {join} WHERE {' AND '.join(terms)}"
                " ORDER BY frames.number LIMIT ?",
                (*values, limit),
            )
            return [FrameStart(**_start(row)) for row in rows]

    def frame(self, number: int) -> FoundFrame | None:
        """One frame with its content; None if there is none. Raises InvalidInput."""
        wanted = ", ".join(f"frames.{name}" for name in _COLUMNS)
        with self._database() as database:
            row = database.execute(
                f"SELECT {wanted}, fields, ranges, is_masked, data FROM frames"
                " JOIN contents USING (number) WHERE frames.number = ?",
                (number,),
            ).fetchone()
        if row is None:
            return None
        fields, ranges, is_masked, data = row[len(_COLUMNS) :]
        content = FrameContent(
            fields=msgspec.Raw(fields),
            ranges=msgspec.msgpack.decode(
                ranges, type=list[tuple[list[str | int], int, int, bool]]
            ),
            is_masked=bool(is_masked),
            data=data,
        )
        return FoundFrame(**_start(row[: len(_COLUMNS)]), content=content)

    def names(self) -> tuple[dict[str, int], dict[str, int], int]:
        """How many frames there are of each name and protocol, and how many violations."""
        with self._database() as database:
            frames = database.execute(
                "SELECT frame, count(*) FROM frames WHERE frame != '' GROUP BY frame ORDER BY frame"
            ).fetchall()
            protocols = database.execute(
                "SELECT protocol, count(*) FROM frames GROUP BY protocol ORDER BY protocol"
            ).fetchall()
            (violations,) = database.execute(
                "SELECT count(*) FROM frames WHERE violation IS NOT NULL"
            ).fetchone()
        return dict(frames), dict(protocols), violations

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        try:
            # Not read-only: what a killed writer left has to be put in order first.
            database = sqlite3.connect(f"file:{self._path}?mode=rw", uri=True)
        except sqlite3.Error as error:
            raise InvalidInput(f"the analysis can't be read: {error}") from None
        deadline = time.monotonic() + self._within_s
        database.set_progress_handler(lambda: time.monotonic() > deadline, _CHECKED)
        try:
            yield database
        except sqlite3.Error as error:
            late = time.monotonic() > deadline
            reason = "the search takes too long: give more filters" if late else str(error)
            raise InvalidInput(reason) from None
        finally:
            database.close()


_COLUMNS: Final = (
    "number",
    "connection",
    "protocol",
    "time_us",
    "is_forward",
    "sender",
    "offset",
    "length",
    "layer",
    "frame",
    "destination",
    "conversation",
    "violation",
    "summary",
)


def _start(row: tuple[Any, ...]) -> dict[str, Any]:
    values = dict(zip(_COLUMNS, row, strict=True))
    packed = values["violation"]
    values["violation"] = None if packed is None else msgspec.msgpack.decode(packed, type=Violation)
    values["is_forward"] = bool(values["is_forward"])
    return values


def _finder(text: str) -> Any:
    sought, raw = text.lower(), text.lower().encode()

    def has_text(summary: str, frame: str, data: bytes) -> bool:
        return sought in summary.lower() or sought in frame or raw in data.lower()

    return has_text
