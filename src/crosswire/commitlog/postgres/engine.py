"""Attempts on a log in PostgreSQL: when a commit counts as durable.

A COMMIT that returns proves little by itself. It also returns when somebody ended the wait for
copies (then with a warning), when synchronous replication was switched off while it waited (then
without any), and on a primary that was replaced and does not know it. So an attempt is confirmed
only if

- COMMIT returned, and there was no warning;
- the settings asked for copies before it, and afterwards, and were not loaded anew in between, nor
  a moment before;
- it is the same server afterwards, of the same system and timeline, and has the record as its head;
- that timeline is not older than one that was used before.

All else is unknown, and what is found later is confirmed by a write of its own (`confirm`): the WAL
is sequential, so a standby that has the later commit has the earlier one.
"""

from __future__ import annotations

import asyncio
from struct import Struct
from typing import Any, Final, Literal

import msgspec
import psycopg
from psycopg import sql
from psycopg.rows import TupleRow

from crosswire.commitlog.contract import LogState, ReplicaState
from crosswire.commitlog.postgres.address import LogAddress, ServerAddress, parse_address
from crosswire.commitlog.postgres.exchange import PreparedCall
from crosswire.commitlog.postgres.schema import (
    CONFIRM,
    LAYOUT,
    LOOK,
    OFFER,
    PARTITION_RECORDS,
    Statements,
    creation,
    grants,
)
from crosswire.commitlog.postgres.session import NoAnswer, PostgresSession
from crosswire.commitlog.records import LogRecord, RecordPosition
from crosswire.commitlog.replicated import (
    EngineAnswer,
    EngineLog,
    FetchedRecords,
    RecordEngine,
    WriteOutcome,
)
from crosswire.errors import (
    LogError,
    LogForeign,
    LogNameTaken,
    LogRefused,
    LogTooNew,
    LogUnavailable,
    LogUnsafe,
)

__all__ = ["SETTLE_S", "Durability", "PostgresEngine", "postgres_log"]

Durability = Literal["verify", "trust"]

SETTLE_S: Final = 1.0
"""How long nothing is confirmed after a server has loaded its settings. Less than a leader may be
silent, or each change of a setting would be a takeover."""
_NAME_TAKEN_S: Final = 10.0
_CONFIRM_AGAIN_S: Final = 0.1
_OTHERS_S: Final = 0.5
"""How long other servers are waited for when one has answered."""
_SAFE_LEVELS: Final = ("on", "remote_apply")
_PASSING: Final = ("40", "53", "55", "58", "XX")
"""Classes of errors that end by themselves, or when somebody has mended the server: conflicts,
resources, objects that are in use, the system, internal ones."""
_INTEGER: Final = Struct(">q")
_STATE_ENCODER: Final = msgspec.msgpack.Encoder()
_STATE_DECODER: Final = msgspec.msgpack.Decoder(ReplicaState)


class _ServerFacts(msgspec.Struct, frozen=True):
    """A server and its log, as one statement saw them."""

    layout: int
    log_id: bytes
    number: int
    digest: bytes
    system: str
    timeline: int
    standby_names: str
    commit_level: str
    fsync: str
    read_only: str
    loaded_at: str
    loaded_s: str
    """How long ago that is."""

    @classmethod
    def from_binary(cls, row: tuple[bytes, ...]) -> _ServerFacts:
        """Of a row as the server sends it, without psycopg's adaptation."""
        layout, log_id, number, digest, system, timeline, *settings = row
        texts = [each.decode() for each in settings]
        return cls(
            int.from_bytes(layout, signed=True),
            log_id,
            int.from_bytes(number, signed=True),
            digest,
            system.decode(),
            int.from_bytes(timeline, signed=True),
            *texts,
        )

    @property
    def head(self) -> RecordPosition:
        return RecordPosition(self.number, self.digest)

    @property
    def server(self) -> tuple[str, int]:
        return self.system, self.timeline

    def fault(self) -> str:
        """Why a commit under these settings may have no copies; "" if it has."""
        if not self.standby_names.strip():
            return "synchronous_standby_names is empty, so commits wait for no standby"
        if self.commit_level not in _SAFE_LEVELS:
            return f"synchronous_commit is {self.commit_level}"
        if self.fsync != "on":
            return "fsync is off"
        if self.read_only != "off":
            return "the database is read-only"
        return ""


class PostgresEngine(RecordEngine):
    """Attempts on the primary of a log.

    There are two connections: one that appends, and may have to wait for copies; and one for all
    else, whose own commits wait for none: what replicas report may be lost in a failover.
    """

    def __init__(
        self,
        address: LogAddress,
        *,
        durability: Durability = "verify",
        answer_s: float = 5.0,
        settle_s: float = SETTLE_S,
    ) -> None:
        super().__init__()
        self._address = address
        self._durability = durability
        self._answer_s = answer_s
        self._settle_s = settle_s
        self._statements = Statements(address.schema)
        self._writer: PostgresSession | None = None
        self._reader: PostgresSession | None = None
        self._reading = asyncio.Lock()
        self._partition_stop = 0
        self._partition_records = PARTITION_RECORDS

    async def pause(self, seconds: float) -> None:
        """Wait before another attempt."""
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        """Close the connections."""
        for session in (self._writer, self._reader):
            if session is not None:
                await session.close()
        self._writer = self._reader = None

    # Connections.

    async def _connect(self, *, commit_level: str) -> PostgresSession:
        """A connection to the primary, wherever that is now. Raises LogForeign, LogTooNew,
        LogRefused, LogUnavailable.

        All servers are asked at once. A primary that was replaced may go on to answer, and would
        wait for copies forever: of several, the one with the newest timeline is the primary.
        """
        attempts = {
            asyncio.ensure_future(self._try(server, commit_level))
            for server in self._address.servers
        }
        pending, errors = attempts, list[LogError]()
        sessions: list[tuple[PostgresSession, _ServerFacts]] = []
        try:
            while pending:
                # Servers that don't answer at all must not delay those that do.
                patience_s = _OTHERS_S if sessions else None
                done, pending = await asyncio.wait(
                    pending, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for task in done:
                    found = task.result()
                    if isinstance(found, LogError):
                        errors.append(found)
                    else:
                        sessions.append(found)
            sessions.sort(key=lambda each: (each[1].system == self.system, each[1].timeline))
            for session, facts in sessions[-1:]:
                self.accept_server(facts.system, facts.timeline, session.address)
                del sessions[-1]
                return session
        finally:
            for task in pending:
                task.cancel()
            for ended in await asyncio.gather(*pending, return_exceptions=True):
                if isinstance(ended, tuple):
                    sessions.append(ended)
            for session, _ in sessions:
                await session.close()
        # The one that a person has to do something about.
        for kind in (LogForeign, LogTooNew, LogRefused):
            for each in errors:
                if isinstance(each, kind):
                    raise each
        raise LogUnavailable("; ".join(each.reason for each in errors))

    async def _try(
        self, server: ServerAddress, commit_level: str
    ) -> tuple[PostgresSession, _ServerFacts] | LogError:
        """A connection to this server, if it is a primary of our log."""
        try:
            session = await PostgresSession.connect(server, synchronous_commit=commit_level)
        except LogError as error:
            return error
        try:
            return session, await self._look(session)
        except LogError as error:
            await session.close()
            return error
        except BaseException:
            await session.close()
            raise

    async def _look(self, session: PostgresSession) -> _ServerFacts:
        """The server and the log that it has. Raises as `_connect`."""
        try:
            rows = await session.run(self._statements.look, within_s=self._answer_s)
        except NoAnswer as error:
            raise LogUnavailable(str(error)) from None
        except psycopg.errors.UndefinedTable:
            rows = []
        except psycopg.Error as error:
            raise _refused(session, error) from None
        if not rows:
            raise LogForeign(
                f"there is no log in the schema {self._address.schema} of the database at "
                f"{session.address}: `crosswire replication init` makes one"
            )
        facts = _ServerFacts(*rows[0])
        _require_layout(facts, session)
        return facts

    async def _look_again(self, session: PostgresSession) -> _ServerFacts:
        """`_look`, on a server that may be used. Raises LogForeign, LogUnavailable, too."""
        facts = await self._look(session)
        self.accept_server(facts.system, facts.timeline, session.address)
        return facts

    def _accept(self, row: TupleRow, session: PostgresSession) -> _ServerFacts:
        facts = _ServerFacts(*row)
        self.accept_server(facts.system, facts.timeline, session.address)
        return facts

    def _accept_binary(
        self, rows: list[tuple[bytes, ...]], session: PostgresSession
    ) -> _ServerFacts | None:
        """None if there is no such row. Raises LogForeign, LogTooNew, LogUnavailable."""
        if not rows:
            return None
        facts = _ServerFacts.from_binary(rows[0])
        _require_layout(facts, session)
        self.accept_server(facts.system, facts.timeline, session.address)
        return facts

    def _fault(self, facts: _ServerFacts) -> str:
        return "" if self._durability == "trust" else facts.fault()

    # Writing.

    async def offer(self, record: LogRecord) -> EngineAnswer:
        """Try once to append a record on top of its predecessor."""
        values = (
            record.log_id,
            _INTEGER.pack(record.number),
            record.digest,
            record.predecessor,
            record.data,
        )
        return await self._write((OFFER, values), record.position)

    async def confirm(self, record: LogRecord) -> EngineAnswer:
        """Try once to prove that the head is durable, by a write after it."""
        values = (record.log_id, _INTEGER.pack(record.number), record.digest)
        return await self._write((CONFIRM, values), record.position)

    async def _connect_writer(self) -> PostgresSession:
        session = await self._connect(commit_level="on")
        try:
            await session.run_script(self._statements.prepared, within_s=self._answer_s)
        except psycopg.Error as error:
            await session.close()
            raise _refused(session, error) from None
        except BaseException:
            await session.close()
            raise
        return session

    async def _write(self, call: PreparedCall, position: RecordPosition) -> EngineAnswer:
        """One round trip: the server looks again after it has committed, in a statement of its own.

        Not in one statement, nor in a procedure that commits. A server's process loads changed
        settings between two messages of its client only; a statement that waited for copies while
        the settings were emptied would go on to see the old ones.
        """
        try:
            if self._writer is None:
                self._writer = await self._connect_writer()
            session = self._writer
            await self._add_partitions(session, position.number)
            session.warnings.clear()
            written, looked = await session.exchange([call, (LOOK, ())], within_s=self._answer_s)
            before = self._accept_binary(written, session)
            after = self._accept_binary(looked, session)
            if after is None:
                raise LogForeign(f"there is no log at {session.address} any more")
        except LogError as error:
            await self._drop_writer()
            return EngineAnswer(WriteOutcome.UNKNOWN, reason=error.reason)
        except NoAnswer as error:
            await self._drop_writer()
            return EngineAnswer(WriteOutcome.UNKNOWN, reason=str(error))
        except psycopg.errors.LockNotAvailable:
            return EngineAnswer(
                WriteOutcome.UNKNOWN,
                reason="an append before this one still waits for its copies, or a partition is "
                "being added",
            )
        except psycopg.Error as error:
            await self._drop_writer()
            return EngineAnswer(WriteOutcome.UNKNOWN, reason=_refused(session, error).reason)
        except asyncio.CancelledError:
            await self._drop_writer()
            raise
        if before is None or after.head != position:
            return EngineAnswer(WriteOutcome.REFUSED, after.log_id, after.head)
        doubt = self._doubt(session, before, after)
        if doubt:
            return EngineAnswer(WriteOutcome.UNKNOWN, reason=doubt)
        return EngineAnswer(WriteOutcome.CONFIRMED, after.log_id, after.head)

    def _doubt(self, session: PostgresSession, before: _ServerFacts, after: _ServerFacts) -> str:
        """Why the commit between the two may have no copies; "" if it has."""
        if session.warnings:
            return f"{session.address} committed with a warning: {session.warnings[0]}"
        if before.server != after.server:
            return f"{session.address} has become another server"
        if before.loaded_at != after.loaded_at:
            # The settings may have been other ones for a moment, in which nobody waited.
            return f"{session.address} has loaded its settings anew"
        # Whether a commit waits depends on a flag that the server's checkpointer sets when it loads
        # the settings, and it may do so after this connection's process. Negative: its clock was
        # set back.
        if self._durability == "verify" and 0 <= float(after.loaded_s) < self._settle_s:
            return f"{session.address} has loaded its settings a moment ago"
        return self._fault(before) or self._fault(after)

    async def _drop_writer(self) -> None:
        session, self._writer = self._writer, None
        if session is not None:
            await session.close()

    async def _add_partitions(self, session: PostgresSession, number: int) -> None:
        """Have partitions for this record and as many as half of one has after it."""
        if number + self._partition_records // 2 < self._partition_stop:
            return
        statements, within_s = self._statements, self._answer_s
        rows = await session.run(statements.partitions, within_s=within_s)
        self._partition_stop, self._partition_records = rows[0][0] or 0, rows[0][1]
        upto = number + self._partition_records // 2
        if upto < self._partition_stop:
            return
        try:
            rows = await session.run(statements.add_partitions, {"upto": upto}, within_s=within_s)
            self._partition_stop = rows[0][0]
        except psycopg.errors.LockNotAvailable:
            # Readers are in the way. There is time until the last partition is full.
            if number >= self._partition_stop:
                raise

    # Reading, and what is beside the records.

    async def _read(
        self, statement: sql.Composed, parameters: dict[str, Any] | None = None
    ) -> list[TupleRow]:
        """Raises LogUnavailable, LogRefused, LogForeign, LogTooNew."""
        async with self._reading:
            if self._reader is None:
                self._reader = await self._connect(commit_level="local")
            session = self._reader
            try:
                return await session.run(statement, parameters, within_s=self._answer_s)
            except NoAnswer as error:
                await self._drop_reader()
                raise LogUnavailable(str(error)) from None
            except psycopg.Error as error:
                await self._drop_reader()
                raise _refused(session, error) from None
            except asyncio.CancelledError:
                await self._drop_reader()
                raise

    async def _drop_reader(self) -> None:
        session, self._reader = self._reader, None
        if session is not None:
            await session.close()

    async def _accept_reading(self, row: TupleRow) -> _ServerFacts:
        session = self._reader
        assert session is not None
        try:
            return self._accept(row, session)
        except LogError:
            await self._drop_reader()
            raise

    async def look(self) -> LogState:
        """Log and settings as they are."""
        async with self._reading:
            if self._reader is None:
                self._reader = await self._connect(commit_level="local")
            session = self._reader
            try:
                facts = await self._look_again(session)
            except BaseException:
                await self._drop_reader()
                raise
        first, size_bytes = (await self._read(self._statements.extent))[0]
        # This connection's own commits need no copies; those of the other one do.
        own = msgspec.structs.replace(facts, commit_level="on")
        return LogState(
            facts.log_id,
            facts.head,
            first,
            size_bytes,
            facts.system,
            facts.timeline,
            session.address,
            self._fault(own),
        )

    async def fetch(self, after: int, limit_bytes: int) -> FetchedRecords:
        """Records as the primary has them now."""
        rows = await self._read(
            self._statements.fetch, {"after": after, "limit_bytes": limit_bytes}
        )
        if not rows:
            raise LogForeign(f"there is no log in the schema {self._address.schema} any more")
        layout, log_id, number, digest, first, *others, _ = rows[0]
        facts = await self._accept_reading((layout, log_id, number, digest, *others))
        records = [row[-1] for row in rows if row[-1] is not None]
        return FetchedRecords(facts.log_id, facts.head, first or 0, records)

    async def report(self, state: ReplicaState) -> None:
        """Keep what a replica reports."""
        parameters = {
            "name": state.name,
            "writer": state.writer,
            "state": _STATE_ENCODER.encode(state),
            "taken_s": _NAME_TAKEN_S,
        }
        if not await self._read(self._statements.report, parameters):
            for other in await self.replicas():
                if other.name == state.name and other.writer != state.writer:
                    raise LogNameTaken(f"a replica at {other.address} reports as {state.name}, too")

    async def replicas(self) -> list[ReplicaState]:
        """What was reported, with its age."""
        rows = await self._read(self._statements.replicas)
        return [
            msgspec.structs.replace(_STATE_DECODER.decode(state), age_s=age_s)
            for state, age_s in rows
        ]

    async def remove(self, name: str) -> bool:
        """Forget a replica."""
        return bool(await self._read(self._statements.remove, {"name": name}))

    async def trim(self, upto: int) -> int:
        """Drop the partitions that have only records up to this number."""
        first: int = (await self._read(self._statements.trim, {"upto": upto}))[0][0]
        return first

    # Making a log.

    async def create(self, genesis: LogRecord) -> None:
        """Make the tables with their first record, as a role that may, and is the hub's own."""
        await self.create_for(genesis, None)

    async def create_for(
        self,
        genesis: LogRecord,
        role: str | None,
        *,
        partition_records: int = PARTITION_RECORDS,
    ) -> None:
        """`create`, and the rights for the hub's role, in one transaction."""
        schema = self._address.schema
        session = await self._connect_to_create()
        try:
            values = sql.SQL(
                "INSERT INTO {schema}.head (layout, log_id, number, digest, partition_records)"
                " VALUES ({}, {}, {}, {}, {});"
                "SELECT {schema}.add_partitions(0);"
                "INSERT INTO {schema}.records VALUES ({}, {}, {})"
            ).format(
                LAYOUT,
                genesis.log_id,
                genesis.number,
                genesis.digest,
                partition_records,
                genesis.number,
                genesis.digest,
                genesis.data,
                schema=sql.Identifier(schema),
            )
            granted = [grants(schema, role)] if role is not None else []
            try:
                await session.run_script([creation(schema), values, *granted], within_s=60.0)
            except psycopg.errors.DuplicateSchema:
                raise LogForeign(
                    f"there is a log in the schema {schema} of the database at {session.address} "
                    f"already"
                ) from None
            except psycopg.Error as error:
                raise _refused(session, error) from None
            except NoAnswer as error:
                raise LogUnavailable(f"the log may have been made, or not: {error}") from None
        finally:
            await session.close()
        deadline = asyncio.get_running_loop().time() + self._answer_s + self._settle_s
        try:
            answer = await self.confirm(genesis)
            while (
                answer.outcome is WriteOutcome.UNKNOWN
                and asyncio.get_running_loop().time() < deadline
            ):
                await asyncio.sleep(_CONFIRM_AGAIN_S)
                answer = await self.confirm(genesis)
        finally:
            await self._drop_writer()
        if answer.outcome is not WriteOutcome.CONFIRMED:
            raise LogUnavailable(
                f"the log was made, but its standbys did not confirm it: {answer.reason}"
            )

    async def _connect_to_create(self) -> PostgresSession:
        """The primary, with settings that hold."""
        errors: list[LogError] = []
        for server in self._address.servers:
            try:
                session = await PostgresSession.connect(server)
            except LogError as error:
                errors.append(error)
                continue
            rows = await session.run(sql.SQL("SELECT current_setting('synchronous_standby_names')"))
            if self._durability == "verify" and not rows[0][0].strip():
                await session.close()
                raise LogUnsafe(
                    f"{server.name}: synchronous_standby_names is empty, so commits wait for no "
                    f"standby"
                )
            return session
        for each in errors:
            if isinstance(each, LogRefused):
                raise each
        raise LogUnavailable("; ".join(each.reason for each in errors))


def _require_layout(facts: _ServerFacts, session: PostgresSession) -> None:
    if facts.layout != LAYOUT:
        raise LogTooNew(
            f"the tables of the log at {session.address} have the layout {facts.layout}, this "
            f"version reads {LAYOUT}"
        )


def _refused(session: PostgresSession, error: psycopg.Error) -> LogRefused | LogUnavailable:
    """A lock that somebody holds, a full disk or the like passes: it must not stop a replica."""
    passes = (error.sqlstate or "")[:2] in _PASSING
    kind = LogUnavailable if passes else LogRefused
    return kind(f"{session.address} refuses a statement: {' '.join(str(error).split())}")


def postgres_log(
    url: str,
    *,
    application: str = "crosswire",
    durability: Durability = "verify",
    answer_s: float = 5.0,
    settle_s: float = SETTLE_S,
) -> EngineLog:
    """A replica's view of the log at a URL. Raises ConfigError."""
    address = parse_address(url, application=application)
    return EngineLog(
        PostgresEngine(address, durability=durability, answer_s=answer_s, settle_s=settle_s)
    )
