"""Spills the state of idle connections from memory to a temporary SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from itertools import islice
from typing import Final

__all__ = ["IN_MEMORY", "States"]

IN_MEMORY: Final = 65_536
_AT_ONCE: Final = 4096
"""States that are spilled in one transaction."""
_OF_ONE: Final = "FROM states WHERE connection = ? AND node = ?"

_Key = tuple[str, str]


class States:
    """States that `ConnectionRows.dump` gave, by connection and node.

    About `in_memory` of them are held in memory; those that have been idle longest are in an
    unnamed temporary file, which is gone when it is closed or the process dies.
    """

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._in_memory = in_memory
        self._states: dict[_Key, bytes] = {}
        self._file: sqlite3.Connection | None = None
        self._spilled = 0

    def __len__(self) -> int:
        return len(self._states) + self._spilled

    def put(self, key: _Key, state: bytes) -> None:
        """Store the state of a connection that has none here."""
        self._states[key] = state
        if len(self._states) >= self._in_memory + _AT_ONCE:
            self._spill_oldest()

    def take(self, key: _Key) -> bytes | None:
        """Remove and return the state of a connection; None if there is none."""
        state = self._states.pop(key, None)
        if state is None and self._spilled:
            assert self._file is not None
            found = self._file.execute(f"SELECT state {_OF_ONE}", key).fetchone()
            if found is not None:
                (state,) = found
                self._file.execute(f"DELETE {_OF_ONE}", key)
                self._spilled -= 1
        return state

    def take_all(self) -> Iterator[tuple[_Key, bytes]]:
        """Remove and return all states, in no particular order."""
        if self._file is not None:
            for connection, node, state in self._file.execute("SELECT * FROM states"):
                yield (connection, node), state
            self._file.close()
            self._file, self._spilled = None, 0
        while self._states:
            key = next(iter(self._states))
            yield key, self._states.pop(key)

    def _spill_oldest(self) -> None:
        if self._file is None:
            self._file = sqlite3.connect("", isolation_level=None)
            # Nothing is to survive a crash: no journal, and no waiting for the disk.
            self._file.executescript(
                "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -16384;"
                "CREATE TABLE states (connection TEXT, node TEXT, state BLOB,"
                " PRIMARY KEY (connection, node)) WITHOUT ROWID"
            )
        # A dict is in the order of insertion, and `take` removes what is used: the first are those
        # that have been idle longest.
        oldest = list(islice(self._states.items(), _AT_ONCE))
        self._file.execute("BEGIN")
        self._file.executemany(
            "INSERT INTO states VALUES (?, ?, ?)", ((*key, state) for key, state in oldest)
        )
        self._file.execute("COMMIT")
        for key, _ in oldest:
            del self._states[key]
        self._spilled += len(oldest)
