"""Prepared statements that are sent together: one round trip, and a transaction for each.

A pipeline of psycopg's own waits for the results before it sends a second Sync, and a Sync is what
ends a transaction. So this uses libpq as psycopg exposes it (`psycopg.pq`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from psycopg import AsyncConnection, OperationalError
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus, Format
from psycopg.pq.abc import PGresult
from psycopg.rows import TupleRow

__all__ = ["PreparedCall", "StatementExchange"]

PreparedCall = tuple[bytes, Sequence[bytes]]
"""The name of a prepared statement, and its parameters in PostgreSQL's binary form."""

_BINARY: Final = Format.BINARY


class StatementExchange:
    """`done` has the rows of each statement, in binary form, when the server has committed all of
    them; or psycopg.Error: of the first statement that the server refused, or without a `sqlstate`
    where the connection was lost. No other statement may be under way on the connection.
    """

    def __init__(
        self, connection: AsyncConnection[TupleRow], calls: Sequence[PreparedCall]
    ) -> None:
        """Sends them. Raises OperationalError if that can't even be begun."""
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[list[list[tuple[bytes, ...]]]] = self._loop.create_future()
        self._libpq = connection.pgconn
        self._results: list[PGresult] = []
        self._missing = len(calls)
        self._libpq.enter_pipeline_mode()
        for name, values in calls:
            self._libpq.send_query_prepared(name, values, [_BINARY] * len(values), _BINARY)
            self._libpq.pipeline_sync()
        self._descriptor = connection.fileno()
        self._loop.add_reader(self._descriptor, self._on_readable)
        self._is_writing = False
        self._flush()

    @property
    def is_complete(self) -> bool:
        """Has the server answered all? Else the connection can only be closed."""
        return not self._missing

    def stop(self) -> None:
        """Read no more."""
        self._loop.remove_reader(self._descriptor)
        if self._is_writing:
            self._loop.remove_writer(self._descriptor)
            self._is_writing = False

    def _flush(self) -> None:
        # A large record does not fit into the socket's buffer at once.
        is_left = self._libpq.flush() != 0
        if is_left and not self._is_writing:
            self._loop.add_writer(self._descriptor, self._on_writable)
        elif self._is_writing and not is_left:
            self._loop.remove_writer(self._descriptor)
        self._is_writing = is_left

    def _on_writable(self) -> None:
        try:
            self._flush()
            # libpq reads while it can't write, so that both sides are not blocked for good.
            self._process()
        except OperationalError as error:
            self._fail(error)

    def _on_readable(self) -> None:
        try:
            self._libpq.consume_input()
            self._process()
        except OperationalError as error:
            self._fail(error)

    def _process(self) -> None:
        libpq = self._libpq
        while self._missing and not libpq.is_busy():
            if libpq.status == ConnStatus.BAD:
                raise OperationalError("the server closed the connection")
            result = libpq.get_result()
            if result is None:
                continue  # the end of one statement's results
            if result.status == ExecStatus.PIPELINE_SYNC:
                self._missing -= 1
            else:
                self._results.append(result)
        if not self._missing:
            self._finish()

    def _finish(self) -> None:
        self.stop()
        self._libpq.exit_pipeline_mode()
        if self.done.done():
            return
        for result in self._results:
            if result.status != ExecStatus.TUPLES_OK:
                self.done.set_exception(error_from_result(result))
                return
        self.done.set_result([_rows_of(result) for result in self._results])

    def _fail(self, error: OperationalError) -> None:
        self.stop()
        if not self.done.done():
            self.done.set_exception(error)


def _rows_of(result: PGresult) -> list[tuple[bytes, ...]]:
    columns = range(result.nfields)
    # None of these statements gives NULL.
    return [
        tuple(result.get_value(row, column) or b"" for column in columns)
        for row in range(result.ntuples)
    ]
