"""The log in PostgreSQL in the contract suite: real servers, with a network that loses bytes."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from typing import Any, Final, cast

from crosswire.commitlog.contract import ReplicatedLog
from crosswire.commitlog.postgres.address import parse_address
from crosswire.commitlog.postgres.engine import PostgresEngine, postgres_log
from crosswire.commitlog.records import LogRecord, RecordPosition
from tests.commitlog.harness import AppendFault, Harness
from tests.postgres.cluster import PASSWORD, ROLE, PostgresCluster
from tests.postgres.proxy import FaultyProxy, Loss

_LOSSES: Final = {
    AppendFault.UNANSWERED: Loss.ANSWER,
    AppendFault.NOT_LANDED: Loss.REQUEST,
    AppendFault.LATE: Loss.DELAY,
}
_numbers: Final = count(1)


class PostgresHarness(Harness):
    """Each has a schema of its own; partitions are small, so that there is something to trim."""

    def __init__(self, cluster: PostgresCluster, folder: Path) -> None:
        super().__init__()
        self.cluster = cluster
        self.is_safe = True
        self.schema = f"log_{next(_numbers)}"
        self.passwords = folder / "passwords"
        self.passwords.write_text(f"*:*:*:{ROLE}:{PASSWORD}\n")
        self.passwords.chmod(0o600)
        self.proxies = [FaultyProxy(server.port) for server in cluster.servers]

    async def start(self) -> None:
        for proxy in self.proxies:
            await proxy.start()

    async def close(self) -> None:
        await super().close()
        for proxy in self.proxies:
            await proxy.close()
        if not self.cluster.is_changed:
            if not self.is_safe:
                await self.set_safe(True)
            await self.query(f"DROP SCHEMA IF EXISTS {self.schema} CASCADE")

    async def query(self, text: str, *parameters: object) -> list[tuple[Any, ...]]:
        """On the primary, as the superuser, and not through the proxy."""
        return await asyncio.to_thread(self.cluster.primary.query, text, *parameters)

    def url(self, role: str = ROLE, ports: list[int] | None = None) -> str:
        used = ports or [proxy.port for proxy in self.proxies]
        hosts = ",".join(f"127.0.0.1:{port}" for port in used)
        return (
            f"postgresql://{role}@{hosts}/postgres?schema={self.schema}&passfile={self.passwords}"
        )

    def make_log(self) -> ReplicatedLog:
        return postgres_log(self.url(), answer_s=3.0)

    async def make(self, genesis: LogRecord) -> None:
        engine = PostgresEngine(parse_address(self.url("postgres")))
        await engine.create_for(genesis, ROLE, partition_records=16)

    async def break_next(self, log: ReplicatedLog, fault: AppendFault) -> None:
        for proxy in self.proxies:
            proxy.next_loss = _LOSSES[fault]

    async def deliver_late(self) -> None:
        for proxy in self.proxies:
            await proxy.deliver()

    async def hold_copies(self, is_held: bool) -> None:
        await asyncio.to_thread(self.cluster.hold_copies, is_held)

    async def end_wait(self, position: RecordPosition) -> None:
        head = f"SELECT number, digest FROM {self.schema}.head"
        while (await self.query(head))[0] != (position.number, position.digest):
            await self.query(
                "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            )

    async def failover(self) -> None:
        await asyncio.to_thread(self.cluster.failover)

    async def lose_suffix(self, count: int) -> None:
        # What a promoted standby would show that lacks these.
        await self.query(
            f"DELETE FROM {self.schema}.records WHERE number > "
            f"(SELECT number - %s FROM {self.schema}.head)",
            count,
        )
        await self.query(
            f"UPDATE {self.schema}.head SET (number, digest) = "
            f"(SELECT number, digest FROM {self.schema}.records ORDER BY number DESC LIMIT 1)"
        )

    async def recreate(self, genesis: LogRecord) -> None:
        await self.query(f"DROP SCHEMA {self.schema} CASCADE")
        await self.make(genesis)

    async def damage(self, number: int) -> None:
        await self.query(
            f"UPDATE {self.schema}.records SET data = set_byte(data, 60, get_byte(data, 60) # 1) "
            f"WHERE number = %s",
            number,
        )

    async def drop(self, number: int) -> None:
        await self.query(f"DELETE FROM {self.schema}.records WHERE number = %s", number)

    async def set_safe(self, is_safe: bool) -> None:
        self.is_safe = is_safe
        names = "ANY 1 (n0, n1, n2)" if is_safe else ""
        await asyncio.to_thread(self.cluster.primary.set, "synchronous_standby_names", names)

    async def set_reachable(self, is_reachable: bool) -> None:
        for proxy in self.proxies:
            proxy.is_open = is_reachable
            if not is_reachable:
                proxy.cut()

    async def stored(self) -> list[bytes]:
        rows = await self.query(f"SELECT data FROM {self.schema}.records ORDER BY number")
        return [cast(bytes, row[0]) for row in rows]
