"""Replicas that the log can't bring up to date: they fetch a checkpoint from the leader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from crosswire.access import User
from crosswire.client.native.emp import EmpClient
from crosswire.commitlog.model import ModelServers, model_log
from crosswire.commitlog.records import Genesis, RecordChain
from crosswire.config import Config, LakeSettings, ReplicationSettings
from crosswire.errors import ConfigError, CrosswireError, StoreDamaged, StoreFailed
from crosswire.listeners import PLAIN_LISTENERS
from crosswire.server import checkpoint_fetch
from crosswire.server.checkpoint_fetch import CheckpointFetch
from crosswire.server.server import Server
from crosswire.store.contract import StoreLimits
from crosswire.store.rocks import REPLICA, RocksStore
from crosswire.store.rocks_replica import RocksReplica, content_digest, convert, record_content
from crosswire.web.listener import WebListener
from tests.server.test_replica import until

pytestmark = pytest.mark.slow

LOG = b"l" * 16
LIMITS = StoreLimits(spare_bytes=24 << 20, buffer_bytes=1 << 20)
TOKEN = "a token of the replicas"


class Node:
    """A data directory with the store of one replica."""

    def __init__(self, servers: ModelServers, folder: Path, name: str) -> None:
        self.servers = servers
        self.name = name
        self.data = folder / name
        self.token_file = folder / "token"
        self.users: tuple[User, ...] = ()
        self.server: Server | None = None

    def config(self) -> Config:
        return Config(
            data=str(self.data),
            listen=dict.fromkeys(PLAIN_LISTENERS, "127.0.0.1:0"),
            drain_s=0.1,
            store=LIMITS,
            users=self.users,
            lake=LakeSettings(messages=False, ledger=False),
            replication=ReplicationSettings(
                log="postgresql://model",
                name=self.name,
                takeover_s=0.4,
                token_file=str(self.token_file) if self.users else None,
            ),
        )

    async def start(self) -> None:
        self.server = Server(
            self.config(),
            http=WebListener,
            open_log=lambda _: model_log(self.servers, asyncio.sleep),
        )
        await self.server.start()
        replica = self.server.replica
        assert replica is not None
        # Its port is not known before.
        address = f"http://{self.server.listeners['http'].address}"
        replica.settings = ReplicationSettings(
            log="postgresql://model", name=self.name, takeover_s=0.4, advertise=address
        )

    async def stop(self) -> None:
        server, self.server = self.server, None
        if server is not None:
            await server.stop()

    @property
    def leads(self) -> bool:
        return self.server is not None and self.server.is_leading and self.server.started_at > 0

    def digest(self) -> str:
        store = RocksReplica(self.data / "store", LIMITS)
        try:
            return content_digest(store)
        finally:
            store.close()


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[list[Node]]:
    """Two, on a log whose genesis names a checkpoint: the second needs more than the log."""
    servers = ModelServers()
    made = [Node(servers, tmp_path, name) for name in "ab"]
    store = RocksStore(made[0].data / "store", LIMITS)
    digest, node = content_digest(store), store.node
    store.close()
    chain = RecordChain(LOG, b"i" * 16)
    log = model_log(servers, asyncio.sleep)
    await log.create(chain.genesis(Genesis(node, digest), 1))
    await log.open()
    await log.append(chain.heartbeat(2))
    convert(made[0].data / "store", LIMITS, LOG, "a", chain.position)
    yield made
    for each in made:
        with suppress(CrosswireError):
            await each.stop()


async def publish(node: Node, *texts: str) -> None:
    assert node.server is not None
    port = node.server.listeners["emp"].address.port
    async with EmpClient("127.0.0.1", port, token=TOKEN if node.users else None) as client:
        for text in texts:
            await client.request("$publish", {"destination": "queue/q", "text": text})


def applied(node: Node) -> int:
    assert node.server is not None and node.server.replica is not None
    return node.server.replica.store.position.number


async def test_an_empty_replica_fetches_what_the_log_does_not_have(nodes: list[Node]) -> None:
    first, second = nodes
    await first.start()
    await until(lambda: first.leads)
    await publish(first, "1", "2", "3")
    await second.start()
    # The fetch begins when the leader's address is in a report.
    await until(lambda: applied(second) > 2)
    await publish(first, "4")
    await first.stop()
    await until(lambda: second.leads)
    assert second.server is not None
    assert second.server.hub.depth("queue/q")[0] == 4
    assert not (second.data / "store.arriving").exists()


async def test_a_replica_that_was_away_for_too_long_fetches_the_rest(nodes: list[Node]) -> None:
    first, second = nodes
    await first.start()
    await until(lambda: first.leads)
    await second.start()
    await until(lambda: applied(second) > 2)
    await second.stop()
    await publish(first, *(str(number) for number in range(20)))
    log = model_log(first.servers, asyncio.sleep)
    state = await log.open()
    await log.engine.trim(state.head.number - 2)
    await second.start()
    await until(lambda: applied(second) >= state.head.number)
    await first.stop()
    await until(lambda: second.leads)
    assert second.server is not None
    assert second.server.hub.depth("queue/q")[0] == 20


async def test_a_damaged_standby_is_rebuilt(nodes: list[Node]) -> None:
    first, second = nodes
    await first.start()
    await until(lambda: first.leads)
    await publish(first, "1")
    await second.start()
    await until(lambda: applied(second) > 2)
    assert second.server is not None and second.server.replica is not None
    replica = second.server.replica
    replica.store.report_damage("tables", "a block can't be read")
    assert replica.fault()
    await until(lambda: not replica.fault())
    assert (second.data / "store.replaced" / REPLICA).exists()
    await publish(first, "2")
    await first.stop()
    await until(lambda: second.leads)
    assert second.server.hub.depth("queue/q")[0] == 2


async def test_only_replicas_and_administrators_get_a_checkpoint(nodes: list[Node]) -> None:
    first, second = nodes
    rights = ("queue/#",)
    for node in nodes:
        node.users = (User(name="r", token=TOKEN, produce=rights, replicate=True),)
    first.token_file.write_text("a token of nobody at all\n")
    await first.start()
    await until(lambda: first.leads)
    await second.start()
    assert second.server is not None and second.server.replica is not None
    replica = second.server.replica
    await until(lambda: "401" in replica.trouble)
    first.token_file.write_text(TOKEN + "\n")
    await until(lambda: applied(second) > 2)


async def test_what_does_not_arrive_as_it_was_sent_is_not_used(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = nodes
    await first.start()
    await until(lambda: first.leads)
    assert first.server is not None
    address = f"http://{first.server.listeners['http'].address}"
    fetch = CheckpointFetch(second.config())
    read = checkpoint_fetch._Remote.read

    def damaged(self: checkpoint_fetch._Remote, path: str, *rest: object) -> object:
        for chunk in read(self, path, *rest):  # type: ignore[arg-type]
            yield chunk[:-1] + bytes([chunk[-1] ^ 1]) if "/files/" in path else chunk

    monkeypatch.setattr(checkpoint_fetch._Remote, "read", damaged)
    with pytest.raises(StoreDamaged, match="checksum differs"):
        await asyncio.to_thread(fetch.fetch, address, LOG)
    assert not (second.data / "store.arriving").exists()
    monkeypatch.setattr(checkpoint_fetch._Remote, "read", read)
    with pytest.raises(StoreFailed, match="belongs to the log"):
        await asyncio.to_thread(fetch.fetch, address, b"m" * 16)
    with pytest.raises(ConfigError, match="has no TLS"):
        await asyncio.to_thread(fetch.fetch, "http://10.0.0.1:7380", LOG)


async def test_a_fetch_goes_on_where_its_connection_ended(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = nodes
    await first.start()
    await until(lambda: first.leads)
    await publish(first, *("x" * 1000 for _ in range(50)))
    assert first.server is not None
    address = f"http://{first.server.listeners['http'].address}"
    read, cut = checkpoint_fetch._Remote.read, 0

    def short(self: checkpoint_fetch._Remote, path: str, *rest: object) -> object:
        nonlocal cut
        for chunk in read(self, path, *rest):  # type: ignore[arg-type]
            if "/files/" in path and len(chunk) > 100 and cut < 5:
                cut += 1
                yield chunk[: len(chunk) // 2]
                raise checkpoint_fetch.ConnectFailed("cut")
            yield chunk

    monkeypatch.setattr(checkpoint_fetch._Remote, "read", short)
    position = await asyncio.to_thread(CheckpointFetch(second.config()).fetch, address, LOG)
    assert cut == 5 and position.number > 2


def test_a_small_store_needs_no_checkpoint(tmp_path: Path) -> None:
    store = RocksStore(tmp_path, LIMITS)
    assert record_content(store, 1 << 20, 64 << 20)
    store.close()
