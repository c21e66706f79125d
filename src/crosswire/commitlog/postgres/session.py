"""A connection to the primary of a log, on which one statement runs at a time, or several that are
sent together.

Two things are unusual. A statement is never cancelled: PostgreSQL would end the wait for copies and
leave the commit as it is, without them. Where others cancel, the socket is shut down instead; the
server's process goes on to wait, and commits when it has copies. And each notice is kept: a commit
without copies is reported by a warning, not by an error.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.errors import Diagnostic
from psycopg.rows import TupleRow

from crosswire.commitlog.postgres.address import ServerAddress
from crosswire.commitlog.postgres.exchange import PreparedCall, StatementExchange
from crosswire.errors import LogRefused, LogUnavailable

__all__ = ["NoAnswer", "PostgresSession"]

_LEAST_VERSION: Final = 150_000
_CONNECT_S: Final = 10.0

# Not as `options` of the connection, which poolers refuse. `statement_timeout` and the like cancel
# a statement, which must not happen; `lock_timeout` ends only the wait for the row of the head,
# which a commit of ours that waits for copies may hold.
_SETTINGS: Final = {
    "synchronous_commit": "on",
    "statement_timeout": "0",
    "lock_timeout": "2000",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "default_transaction_isolation": "read committed",
    "client_min_messages": "warning",
    "bytea_output": "hex",
}
_SETTINGS_17: Final = {"transaction_timeout": "0"}

_REFUSALS: Final = (
    "authentication failed",
    "no password supplied",
    "pg_hba.conf",
    "does not exist",
    "permission denied",
    "is not permitted to log in",
    "certificate verify failed",
    "does not match host name",
    "server does not support SSL",
    "root certificate file",
)


class NoAnswer(Exception):
    """A statement was sent, and what became of it is not known."""


class PostgresSession:
    """One connection. After NoAnswer it can't be used any more."""

    def __init__(self, connection: AsyncConnection[TupleRow], address: str) -> None:
        self.address = address
        self.warnings: list[str] = []
        """Notices of the server since the caller cleared the list."""
        self._connection = connection
        connection.add_notice_handler(self._on_notice)

    @classmethod
    async def connect(cls, server: ServerAddress, **settings: str) -> PostgresSession:
        """Raises LogRefused where trying again can't help, else LogUnavailable."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                connection = await AsyncConnection.connect(
                    **server.parameters, autocommit=True, prepare_threshold=0
                )
        except (psycopg.Error, OSError, TimeoutError) as error:
            text = _text_of(error) or "no answer"
            kind = LogRefused if any(each in text for each in _REFUSALS) else LogUnavailable
            raise kind(f"{server.name} can't be used: {text}") from None
        session = cls(connection, server.name)
        try:
            await session._prepare(settings)
        except NoAnswer as error:
            await session.close()
            raise LogUnavailable(f"{server.name} can't be used: {error}") from None
        except psycopg.Error as error:
            await session.close()
            raise LogRefused(f"{server.name} can't be used: {_text_of(error)}") from None
        except BaseException:
            await session.close()
            raise
        return session

    async def _prepare(self, settings: Mapping[str, str]) -> None:
        version = self._connection.info.server_version
        if version < _LEAST_VERSION:
            raise LogRefused(
                f"{self.address} is PostgreSQL {version // 10_000}, the log needs 15 or newer"
            )
        wanted = {**_SETTINGS, **(_SETTINGS_17 if version >= 170_000 else {}), **settings}
        calls = sql.SQL(", ").join(
            sql.SQL("set_config({}, {}, false)").format(sql.Literal(name), sql.Literal(value))
            for name, value in wanted.items()
        )
        rows = await self.run(
            sql.SQL("SELECT current_setting('transaction_read_only'), {}").format(calls)
        )
        if rows[0][0] != "off":
            raise LogRefused(
                f"{self.address} is the primary, but the database is read-only "
                f"(default_transaction_read_only)"
            )

    @property
    def is_usable(self) -> bool:
        """May another statement be sent?"""
        return not self._connection.closed

    async def run(
        self,
        statement: sql.SQL | sql.Composed,
        parameters: Mapping[str, Any] | None = None,
        *,
        within_s: float = 5.0,
    ) -> list[TupleRow]:
        """The rows of a statement, which is committed when this returns.

        Raises NoAnswer if that is not known, also when the server closes the connection; and
        psycopg.Error where the server refused it: then nothing was done.
        """
        return await self._finish(self._execute(statement, parameters), within_s)

    async def exchange(
        self, calls: Sequence[PreparedCall], *, within_s: float
    ) -> list[list[tuple[bytes, ...]]]:
        """The rows of prepared statements that are sent together. Each is committed before the next
        one begins, and all are when this returns. Raises as `run`."""
        try:
            exchange = StatementExchange(self._connection, calls)
        except psycopg.OperationalError as error:
            raise await self._lost(error) from None
        try:
            async with asyncio.timeout(within_s):
                return await exchange.done
        except TimeoutError:
            raise NoAnswer(f"{self.address} did not answer within {within_s:g} s") from None
        except psycopg.Error as error:
            await self._sort(error)
            raise
        finally:
            if not exchange.is_complete:
                # As `_abandon`: the server's process goes on with what it has received.
                exchange.stop()
                await self.close()

    async def run_script(self, statements: Sequence[sql.Composable], *, within_s: float) -> None:
        """Several statements in one transaction. Raises as `run`."""
        script = sql.SQL("BEGIN;\n{};\nCOMMIT").format(sql.SQL(";\n").join(statements))
        await self._finish(self._execute_script(script), within_s)

    async def _finish(
        self, execution: Coroutine[Any, Any, list[TupleRow]], within_s: float
    ) -> list[TupleRow]:
        task = asyncio.ensure_future(execution)
        try:
            await asyncio.wait([task], timeout=within_s)
        except asyncio.CancelledError:
            await self._abandon(task)
            raise
        if not task.done():
            await self._abandon(task)
            raise NoAnswer(f"{self.address} did not answer within {within_s:g} s")
        try:
            return task.result()
        except psycopg.Error as error:
            await self._sort(error)
            raise

    async def _sort(self, error: psycopg.Error) -> None:
        """Raises NoAnswer, if the error does not mean that the server has refused a statement."""
        if self._connection.closed or self._connection.broken or not error.sqlstate:
            raise await self._lost(error) from None
        if error.sqlstate[:2] == "57":
            # Cancelled or shut down by somebody. Where a commit waits for copies that would be
            # a warning; but it is not for us to know what the server had done by then.
            raise NoAnswer(f"{self.address}: {_text_of(error)}") from None

    async def _lost(self, error: psycopg.Error) -> NoAnswer:
        await self.close()
        return NoAnswer(f"the connection to {self.address} was lost: {_text_of(error)}")

    async def _execute(
        self, statement: sql.SQL | sql.Composed, parameters: Mapping[str, Any] | None
    ) -> list[TupleRow]:
        async with self._connection.cursor(binary=True) as cursor:
            await cursor.execute(statement, parameters)
            return await cursor.fetchall() if cursor.description is not None else []

    async def _execute_script(self, script: sql.Composed) -> list[TupleRow]:
        # Without parameters and as text: only so a server takes several statements at once.
        async with self._connection.cursor() as cursor:
            await cursor.execute(script, prepare=False)
        return []

    async def _abandon(self, task: asyncio.Future[list[TupleRow]]) -> None:
        """Leave a statement that is under way to the server, without cancelling it."""
        # psycopg waits for this socket: it must not be closed under it, but may end.
        with (
            suppress(OSError, psycopg.Error),
            socket.socket(fileno=os.dup(self._connection.fileno())) as own,
        ):
            own.shutdown(socket.SHUT_RDWR)
        await asyncio.wait([task])
        # An error is what we caused.
        task.exception()
        await self.close()

    async def close(self) -> None:
        """No statement may be under way."""
        await self._connection.close()

    def _on_notice(self, notice: Diagnostic) -> None:
        self.warnings.append(notice.message_primary or notice.severity or "a notice")


def _text_of(error: BaseException) -> str:
    return " ".join(str(error).split())
