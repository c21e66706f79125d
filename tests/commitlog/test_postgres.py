"""What the log relies on in PostgreSQL, statement by statement, against real servers.

The first part asks the servers themselves, without our code: if one of these fails with a new
version, the log's promises have to be thought through again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from crosswire.commitlog.postgres.address import parse_address
from crosswire.commitlog.postgres.engine import postgres_log
from crosswire.commitlog.records import (
    ORIGIN,
    RECORD_BYTES,
    RecordChain,
    Takeover,
    decode_record,
)
from crosswire.commitlog.replicated import EngineLog, WriteOutcome
from crosswire.errors import (
    ConfigError,
    LogConflict,
    LogForeign,
    LogRefused,
    LogUnavailable,
    LogUnsafe,
)
from tests.commitlog.harness import WRITER_B, next_page
from tests.commitlog.postgres_harness import PostgresHarness
from tests.postgres.cluster import PASSWORD, ROLE, PostgresCluster

WAITING = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
PIDS = "FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


class Commit:
    """An INSERT on a thread of its own, and how it ended."""

    def __init__(self, cluster: PostgresCluster, schema: str) -> None:
        self.notices: list[str] = []
        self.error: Exception | None = None
        self._cluster, self._schema = cluster, schema
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._cluster.primary.connect() as connection:
                connection.add_notice_handler(
                    lambda notice: self.notices.append(str(notice.message_primary))
                )
                connection.execute(f"INSERT INTO {self._schema}.plain VALUES (1)")  # type: ignore[arg-type]
        except psycopg.Error as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()


@contextmanager
def waiting_commit(postgres: PostgresHarness) -> Iterator[Commit]:
    """A commit that waits for copies, which no standby makes."""
    cluster, schema = postgres.cluster, postgres.schema
    cluster.primary.query(f"CREATE SCHEMA {schema}")
    cluster.primary.query(f"CREATE TABLE {schema}.plain (number integer PRIMARY KEY)")
    cluster.hold_copies(True)
    commit = Commit(cluster, schema)
    cluster.primary.wait_until(WAITING)
    yield commit
    commit.join()


def rows(postgres: PostgresHarness) -> int:
    count: int = postgres.cluster.primary.query(f"SELECT count(*) FROM {postgres.schema}.plain")[0][
        0
    ]
    return count


async def test_a_commit_that_waits_for_copies_can_not_be_read(postgres: PostgresHarness) -> None:
    with waiting_commit(postgres) as commit:
        assert rows(postgres) == 0
        postgres.cluster.hold_copies(False)
    assert rows(postgres) == 1 and commit.error is None and commit.notices == []


async def test_a_cancelled_wait_is_a_warning_and_lost_in_a_failover(
    postgres: PostgresHarness,
) -> None:
    cluster = postgres.cluster
    with waiting_commit(postgres) as commit:
        cluster.primary.query(f"SELECT pg_cancel_backend(pid) {PIDS}")
    assert commit.error is None
    assert commit.notices == ["canceling wait for synchronous replication due to user request"]
    assert rows(postgres) == 1
    cluster.failover()
    assert rows(postgres) == 0


async def test_a_terminated_wait_leaves_a_commit_without_copies(postgres: PostgresHarness) -> None:
    with waiting_commit(postgres) as commit:
        postgres.cluster.primary.query(f"SELECT pg_terminate_backend(pid) {PIDS}")
    assert isinstance(commit.error, psycopg.OperationalError)
    assert rows(postgres) == 1


async def test_settings_that_are_emptied_end_a_wait_without_any_warning(
    postgres: PostgresHarness,
) -> None:
    with waiting_commit(postgres) as commit:
        postgres.cluster.primary.set("synchronous_standby_names", "")
    assert commit.error is None and commit.notices == []
    assert rows(postgres) == 1


@contextmanager
def unnoticed_settings(postgres: PostgresHarness) -> Iterator[None]:
    """No standby makes copies; the settings asked for none, and ask for them again. All processes
    of the primary know that but its checkpointer."""
    cluster = postgres.cluster
    cluster.primary.set("synchronous_standby_names", "")
    cluster.hold_copies(True)
    of_checkpointer = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'"
    checkpointer: int = cluster.primary.query(of_checkpointer)[0][0]
    os.kill(checkpointer, signal.SIGSTOP)
    try:
        cluster.primary.set("synchronous_standby_names", "ANY 1 (n0, n1, n2)")
        yield
    finally:
        os.kill(checkpointer, signal.SIGCONT)
        cluster.hold_copies(False)


async def test_settings_are_in_force_only_when_the_checkpointer_has_loaded_them(
    postgres: PostgresHarness,
) -> None:
    primary, schema = postgres.cluster.primary, postgres.schema
    primary.query(f"CREATE SCHEMA {schema}")
    primary.query(f"CREATE TABLE {schema}.plain (number integer PRIMARY KEY)")
    with unnoticed_settings(postgres), primary.connect() as connection:
        shown = connection.execute("SHOW synchronous_standby_names").fetchone()
        assert shown == ("ANY 1 (n0, n1, n2)",)
        connection.execute("SET statement_timeout = '20s'")
        connection.execute(f"INSERT INTO {schema}.plain VALUES (1)")  # type: ignore[arg-type]


async def test_a_restarted_primary_shows_what_no_standby_has(postgres: PostgresHarness) -> None:
    primary = postgres.cluster.primary
    with waiting_commit(postgres):
        primary.kill()
    primary.start()
    assert rows(postgres) == 1


async def test_on_conflict_do_nothing_waits_for_nobody(postgres: PostgresHarness) -> None:
    with waiting_commit(postgres):
        postgres.cluster.primary.query(f"SELECT pg_cancel_backend(pid) {PIDS}")
    with postgres.cluster.primary.connect() as connection:
        connection.execute("SET statement_timeout = '5s'")
        insert = f"INSERT INTO {postgres.schema}.plain VALUES (1) ON CONFLICT DO NOTHING"
        assert connection.execute(insert).rowcount == 0  # type: ignore[arg-type]


async def test_the_timeline_of_the_wal_is_the_new_one_right_after_a_promotion(
    postgres: PostgresHarness,
) -> None:
    timeline = "SELECT left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)"
    assert postgres.cluster.primary.query(timeline) == [("00000001",)]
    postgres.cluster.failover()
    assert postgres.cluster.primary.query(timeline) == [("00000002",)]


# The log on such servers.


async def leading(postgres: PostgresHarness) -> tuple[EngineLog, RecordChain]:
    genesis = await postgres.create()
    log = await postgres.open()
    assert isinstance(log, EngineLog)
    return log, await postgres.lead(log, genesis)


async def wait_for(postgres: PostgresHarness, condition: str = WAITING) -> None:
    await asyncio.to_thread(postgres.cluster.primary.wait_until, condition)


@pytest.mark.parametrize("restored", [False, True])
async def test_settings_that_are_emptied_while_a_record_waits_confirm_nothing(
    postgres: PostgresHarness, restored: bool
) -> None:
    log, chain = await leading(postgres)
    await postgres.hold_copies(True)
    attempt = asyncio.create_task(log.engine.offer(chain.heartbeat(3)))
    await wait_for(postgres)
    await postgres.set_safe(False)
    if restored:
        await postgres.set_safe(True)
    answer = await attempt
    assert answer.outcome is WriteOutcome.UNKNOWN
    await postgres.set_safe(True)
    await postgres.hold_copies(False)


@pytest.mark.parametrize("act", ["pg_cancel_backend", "pg_terminate_backend"])
async def test_a_record_whose_wait_was_ended_is_confirmed_by_a_later_write(
    postgres: PostgresHarness, act: str
) -> None:
    log, chain = await leading(postgres)
    record = chain.group(b"body", 3)[0]
    await postgres.hold_copies(True)
    append = asyncio.create_task(log.append(record))
    await wait_for(postgres)
    await postgres.query(f"SELECT {act}(pid) {PIDS}")
    while not log.trouble:
        await asyncio.sleep(0.01)
    assert not append.done()
    await postgres.hold_copies(False)
    await append
    counted = await postgres.query(f"SELECT confirmations FROM {postgres.schema}.head")
    # One by genesis.
    assert counted[0][0] >= 2
    await postgres.failover()
    assert decode_record((await postgres.stored())[-1]) == record


async def test_settings_that_were_loaded_a_moment_ago_confirm_nothing(
    postgres: PostgresHarness,
) -> None:
    genesis = await postgres.create()
    log = postgres_log(postgres.url(), settle_s=60.0)
    postgres.opened.append(log)
    await log.open()
    chain = RecordChain(postgres.log_id, WRITER_B, position=genesis.position)
    with unnoticed_settings(postgres):
        answer = await log.engine.offer(chain.takeover(Takeover("b"), 2))
    assert answer.outcome is WriteOutcome.UNKNOWN
    assert "loaded its settings a moment ago" in answer.reason


async def test_an_append_is_one_round_trip(postgres: PostgresHarness) -> None:
    """What is asked after the commit is at the server before it has committed."""
    log, chain = await leading(postgres)
    await postgres.hold_copies(True)
    attempt = asyncio.create_task(log.engine.offer(chain.heartbeat(3)))
    await wait_for(postgres)
    for proxy in postgres.proxies:
        proxy.is_deaf = True
    await postgres.hold_copies(False)
    assert (await attempt).outcome is WriteOutcome.CONFIRMED


async def test_giving_up_on_an_answer_does_not_cancel_the_wait(postgres: PostgresHarness) -> None:
    genesis = await postgres.create()
    log = postgres_log(postgres.url(), answer_s=0.3)
    postgres.opened.append(log)
    await log.open()
    chain = await postgres.lead(log, genesis)
    record = chain.group(b"body", 3)[0]
    await postgres.hold_copies(True)
    append = asyncio.create_task(log.append(record))
    while "did not answer within 0.3 s" not in log.trouble:
        await asyncio.sleep(0.01)
    assert len(await postgres.stored()) == 2
    assert (await postgres.query(WAITING))[0][0]
    await postgres.hold_copies(False)
    await append
    assert decode_record((await postgres.stored())[2]) == record
    assert "canceling wait" not in postgres.cluster.primary.log()


async def test_a_primary_that_was_replaced_and_goes_on_is_left(postgres: PostgresHarness) -> None:
    log, chain = await leading(postgres)
    old = postgres.cluster.primary
    await asyncio.to_thread(postgres.cluster.promote_best)
    record = chain.group(b"body", 3)[0]
    await log.append(record)
    assert old.is_running
    assert decode_record((await postgres.stored())[-1]) == record
    assert log.engine.timeline == 2
    # A replica that knows of the failover does not use the old one, even if it is alone.
    again = postgres_log(postgres.url(ports=[old.port]))
    postgres.opened.append(again)
    with pytest.raises(LogUnavailable, match="timeline is 1, and 2 was used before"):
        await again.open(log.bookmark(chain.position))


async def test_settings_of_the_role_do_not_reach_the_session(postgres: PostgresHarness) -> None:
    await postgres.query(f"ALTER ROLE {ROLE} SET statement_timeout = '50ms'")
    await postgres.query(f"ALTER ROLE {ROLE} SET synchronous_commit = off")
    await postgres.query(f"ALTER ROLE {ROLE} SET default_transaction_isolation = serializable")
    try:
        log, chain = await leading(postgres)
        await postgres.hold_copies(True)
        append = asyncio.create_task(log.append(chain.heartbeat(3)))
        await wait_for(postgres)
        await wait_for(
            postgres,
            f"SELECT count(*) > 0 {PIDS} AND query_start < clock_timestamp() - interval '0.2 s'",
        )
        assert log.trouble == ""
        await postgres.hold_copies(False)
        await append
    finally:
        await postgres.query(f"ALTER ROLE {ROLE} RESET ALL")


async def test_the_role_of_the_hub_changes_no_tables_and_removes_no_records(
    postgres: PostgresHarness,
) -> None:
    await postgres.create()
    schema = postgres.schema
    with psycopg.connect(
        host="127.0.0.1",
        port=postgres.cluster.primary.port,
        user=ROLE,
        password=PASSWORD,
        dbname="postgres",
        autocommit=True,
    ) as connection:
        for statement in (
            f"DROP TABLE {schema}.records_0",
            f"ALTER TABLE {schema}.head ADD COLUMN more integer",
            f"CREATE TABLE {schema}.more (number integer)",
            f"DELETE FROM {schema}.records",
            f"UPDATE {schema}.records SET data = ''",
            f"TRUNCATE {schema}.records",
            f"DELETE FROM {schema}.head",
            f"UPDATE {schema}.head SET log_id = ''",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement)  # type: ignore[arg-type]


async def test_partitions_are_made_ahead_and_trimming_drops_them(postgres: PostgresHarness) -> None:
    log, chain = await leading(postgres)
    for number in range(3, 60):
        await log.append(chain.heartbeat(number))
    names = (
        "SELECT relname, attstorage FROM pg_inherits JOIN pg_class ON oid = inhrelid"
        f" JOIN pg_attribute ON attrelid = oid AND attname = 'data'"
        f" WHERE inhparent = '{postgres.schema}.records'::regclass ORDER BY oid"
    )
    made = await postgres.query(names)
    assert made == [(f"records_{first}", "e") for first in (0, 16, 32, 48, 64)]
    assert await log.trim(47) == 48
    assert await postgres.query(names) == made[3:]
    # Only whole partitions go, and never the newest record.
    assert await log.trim(59) == 48
    await log.append(chain.heartbeat(60))


async def test_records_of_the_largest_size_are_appended_and_read(postgres: PostgresHarness) -> None:
    log, chain = await leading(postgres)
    parts = chain.group(bytes(range(256)) * (9 * RECORD_BYTES // 1024), 3)
    assert len(parts) == 3 and len(parts[0].data) == RECORD_BYTES
    for record in parts:
        await log.append(record)
    reader, found = (await postgres.open()).read(ORIGIN), []
    while len(found) < 4:
        found += (await next_page(reader)).records
    assert found[2:4] == parts[:2]


async def test_trust_does_without_the_settings(postgres: PostgresHarness) -> None:
    genesis = await postgres.create()
    await postgres.set_safe(False)
    log = postgres_log(postgres.url(), durability="trust")
    postgres.opened.append(log)
    assert (await log.open()).unsafe == ""
    await postgres.lead(log, genesis)


async def test_a_log_is_not_made_where_nothing_is_copied(postgres: PostgresHarness) -> None:
    await postgres.set_safe(False)
    with pytest.raises(LogUnsafe, match="synchronous_standby_names is empty"):
        await postgres.create()


async def test_fsync_that_is_off_is_unsafe(postgres: PostgresHarness) -> None:
    await postgres.create()
    primary = postgres.cluster.primary
    await asyncio.to_thread(primary.set, "fsync", "off")
    try:
        with pytest.raises(LogUnsafe, match="fsync is off"):
            await postgres.open()
    finally:
        await asyncio.to_thread(primary.set, "fsync", "on")


async def refusal(postgres: PostgresHarness, url: str) -> LogRefused:
    log = postgres_log(url)
    postgres.opened.append(log)
    with pytest.raises(LogRefused) as caught:
        await log.open()
    return caught.value


async def test_a_wrong_password_is_an_error_that_does_not_show_it(
    postgres: PostgresHarness,
) -> None:
    await postgres.create()
    postgres.passwords.write_text(f"*:*:*:{ROLE}:wrong horse\n")
    error = await refusal(postgres, postgres.url())
    assert "password authentication failed" in error.reason
    assert "wrong horse" not in str(error) and "passfile" in str(error)


async def test_a_read_only_database_is_an_error_of_its_own(postgres: PostgresHarness) -> None:
    await postgres.create()
    await postgres.query(f"ALTER ROLE {ROLE} SET default_transaction_read_only = on")
    try:
        error = await refusal(postgres, postgres.url())
    finally:
        await postgres.query(f"ALTER ROLE {ROLE} RESET ALL")
    assert "the database is read-only" in error.reason


async def test_missing_rights_are_an_error_that_names_them(postgres: PostgresHarness) -> None:
    await postgres.create()
    await postgres.query(f"REVOKE SELECT ON {postgres.schema}.head FROM {ROLE}")
    error = await refusal(postgres, postgres.url())
    assert "permission denied for table head" in error.reason


async def test_a_lock_that_somebody_holds_is_no_refusal(postgres: PostgresHarness) -> None:
    """A replica that is refused stops; one that can't read for a moment waits."""
    genesis = await postgres.create()
    log = await postgres.open()
    with postgres.cluster.primary.connect() as connection, connection.transaction():
        connection.execute(f"LOCK TABLE {postgres.schema}.records")  # type: ignore[arg-type]
        with pytest.raises(LogUnavailable, match="lock timeout"):
            await log.read(genesis.position).next_page()


async def test_standbys_alone_are_no_log(postgres: PostgresHarness) -> None:
    await postgres.create()
    ports = [server.port for server in postgres.cluster.standbys]
    log = postgres_log(postgres.url(ports=ports))
    postgres.opened.append(log)
    with pytest.raises(LogUnavailable, match="hot standby"):
        await log.open()


async def test_a_second_log_in_the_database_has_a_schema_of_its_own(
    postgres: PostgresHarness,
) -> None:
    await postgres.create()
    other = postgres_log(postgres.url().replace(f"schema={postgres.schema}", "schema=others"))
    postgres.opened.append(other)
    with pytest.raises(LogForeign, match="no log in the schema others"):
        await other.open()


async def test_a_takeover_while_the_leaders_record_waits_comes_after_it(
    postgres: PostgresHarness,
) -> None:
    """The second writer waits at the row of the head, and finds another one then."""
    log, chain = await leading(postgres)
    other = await postgres.open()
    record = chain.group(b"body", 3)[0]
    await postgres.hold_copies(True)
    append = asyncio.create_task(log.append(record))
    await wait_for(postgres)
    rival = RecordChain(
        postgres.log_id, WRITER_B, position=decode_record((await postgres.stored())[-1]).position
    )
    takeover = asyncio.create_task(other.append(rival.takeover(Takeover("b"), 4)))
    await wait_for(
        postgres, "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    )
    await postgres.hold_copies(False)
    await append
    with pytest.raises(LogConflict, match="another writer's record is at number 3"):
        await takeover


# Addresses.


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://hub@db/x", "begin with postgresql://"),
        ("postgresql://hub:secret@db/x", "contains a password"),
        ("postgresql://hub@db/x?password=secret", "contains a password"),
        ("postgresql://hub@db/x?sslmode=require", "sslmode=verify-full"),
        ("postgresql://hub@127.0.0.1,db/x?sslmode=disable", "connection to db has to verify"),
        ("postgresql://hub@/x", "needs a host"),
        ("postgresql://hub@db:1:secret/x", "a port .* is not a number"),
        ("postgresql://hub@db/x?nonsense=secret", "can't be read"),
        ("postgresql://hub@db/x?schema=a-b", "letters a to z"),
        ("postgresql://hub@db/x?options=-cfsync%3Doff", "can't have options"),
        ("postgresql://hub@db/x?target_session_attrs=any", "can't have target_session_attrs"),
    ],
)
def test_addresses_that_are_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_address(url)
    assert "secret" not in str(caught.value)


def test_names_are_verified_unless_the_server_is_on_this_machine() -> None:
    address = parse_address("postgresql://hub@db1:6000,db2,127.0.0.1,[::1],localhost/x")
    modes = {server.name: server.parameters.get("sslmode") for server in address.servers}
    assert modes == {
        "db1:6000": "verify-full",
        "db2:5432": "verify-full",
        "127.0.0.1:5432": None,
        "::1:5432": None,
        "localhost:5432": None,
    }
    assert address.servers[0].parameters["sslrootcert"] == "system"
    assert address.schema == "crosswire"


def test_what_the_log_depends_on_is_in_every_connection() -> None:
    url = "postgresql://hub@db/x?tcp_user_timeout=0&keepalives=0&sslrootcert=/ca.pem"
    own = parse_address(url).servers[0].parameters
    assert own["tcp_user_timeout"] == 10_000 and own["keepalives"] == 1
    assert own["target_session_attrs"] == "primary"
    assert own["sslrootcert"] == "/ca.pem"
