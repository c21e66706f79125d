"""States of connections that rest: so many in memory, the others in a file that goes with us."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from itertools import islice
from typing import Final

__all__ = ["IN_MEMORY", "States"]

IN_MEMORY: Final = 65_536
_AT_ONCE: Final = 4096
_OF_ONE: Final = "FROM states WHERE connection = ? AND node = ?"

_Key = tuple[str, str]


class States:
    """What `ConnectionRows.dump` gave, by connection and node. `in_memory` bounds what is held;
    those that have rested longest go to a file without a name in the folder for temporary files."""

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._in_memory = in_memory
        self._held: dict[_Key, bytes] = {}
        self._file: sqlite3.Connection | None = None
        self._filed = 0

    def __len__(self) -> int:
        return len(self._held) + self._filed

    def put(self, key: _Key, state: bytes) -> None:
        """There is none of this key."""
        self._held[key] = state
        if len(self._held) >= self._in_memory + _AT_ONCE:
            self._file_oldest()

    def take(self, key: _Key) -> bytes | None:
        state = self._held.pop(key, None)
        if state is None and self._filed:
            assert self._file is not None
            found = self._file.execute(f"SELECT state {_OF_ONE}", key).fetchone()
            if found is not None:
                (state,) = found
                self._file.execute(f"DELETE {_OF_ONE}", key)
                self._filed -= 1
        return state

    def take_all(self) -> Iterator[tuple[_Key, bytes]]:
        """Each once; none is here afterwards."""
        if self._file is not None:
            for connection, node, state in self._file.execute("SELECT * FROM states"):
                yield (connection, node), state
            self._file.close()
            self._file, self._filed = None, 0
        while self._held:
            key = next(iter(self._held))
            yield key, self._held.pop(key)

    def _file_oldest(self) -> None:
        if self._file is None:
            self._file = sqlite3.connect("", isolation_level=None)
            # Nobody reads it after us: no journal, and no waiting for the disk.
            self._file.executescript(
                "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -16384;"
                "CREATE TABLE states (connection TEXT, node TEXT, state BLOB,"
                " PRIMARY KEY (connection, node)) WITHOUT ROWID"
            )
        oldest = list(islice(self._held.items(), _AT_ONCE))
        self._file.execute("BEGIN")
        self._file.executemany(
            "INSERT INTO states VALUES (?, ?, ?)", ((*key, state) for key, state in oldest)
        )
        self._file.execute("COMMIT")
        for key, _ in oldest:
            del self._held[key]
        self._filed += len(oldest)
