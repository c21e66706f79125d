"""Servers of several replicas in one process, on a log in memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from crosswire.access import User
from crosswire.client.native.emp import EmpClient
from crosswire.commitlog.contract import LogState
from crosswire.commitlog.model import ModelFault, ModelServers, model_log
from crosswire.commitlog.records import (
    Genesis,
    HandOver,
    RecordChain,
    RecordKind,
    Takeover,
    decode_record,
)
from crosswire.config import Config, LakeSettings, ReplicationSettings, ScheduleEntry
from crosswire.errors import (
    ClientError,
    ConfigError,
    ConnectionLost,
    CrosswireError,
    LogDamaged,
    LogRefused,
    NotLeading,
)
from crosswire.hub.wall import Clock
from crosswire.lake.compaction import compact
from crosswire.lake.files import FinishedFile, find, find_all
from crosswire.lake.files import publish as publish_files
from crosswire.lake.verification import verify
from crosswire.listeners import PLAIN_LISTENERS
from crosswire.server import replica as replica_module
from crosswire.server.server import Server
from crosswire.server.succession import Role
from crosswire.store.contract import StoreLimits
from crosswire.store.memory import MemoryDisk, MemoryReplica, MemoryStore
from crosswire.store.rocks_replica import content_digest, record_content

pytestmark = pytest.mark.slow

TAKEOVER_S = 0.4
PENDING_BYTES = 1 << 20
RECORD_BYTES = 700_000
READ_BYTES = 256 * 1024


class Node:
    """A machine of one replica: its disk outlives the server."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.disk = MemoryDisk()
        self.server: Server | None = None
        self.data = "/nowhere"
        self.clock_off_s = 0.0
        self.lake = LakeSettings(messages=False, ledger=False)

    def use_lake(self, folder: Path, name: str = "lake") -> None:
        """The room for a lake depends on that of a store."""
        self.data = str(folder)
        (folder / "store").mkdir(exist_ok=True)
        self.lake = LakeSettings(directory=str(folder / name), seal_s=0.05)

    async def start(self) -> None:
        listen = dict.fromkeys(PLAIN_LISTENERS, "127.0.0.1:0")
        config = Config(
            data=self.data,
            listen={**listen, "http": "off"},
            drain_s=0.2,
            store=StoreLimits(spare_bytes=1),
            lake=self.lake,
            replication=ReplicationSettings(
                log="postgresql://model",
                name=self.name,
                takeover_s=TAKEOVER_S,
                advertise=f"http://{self.name}",
                pending_bytes=PENDING_BYTES,
                record_bytes=RECORD_BYTES,
            ),
        )
        self.server = Server(
            config,
            clock=Clock(lambda: time.time() + self.clock_off_s),
            open_log=lambda _: model_log(self.cluster.servers, asyncio.sleep),
            open_replica=self._open,
        )
        await self.server.start()

    def _open(self, config: Config, log_id: bytes) -> MemoryReplica | None:
        if not self.disk.rows and not log_id:
            return None
        store = MemoryReplica(self.disk, config.store)
        if not store.log_id:
            store.join(log_id)
        return store

    @property
    def leads(self) -> bool:
        return self.server is not None and self.server.is_leading and self.server.started_at > 0

    async def stop(self) -> None:
        server, self.server = self.server, None
        if server is not None:
            await server.stop()

    def client(self) -> EmpClient:
        assert self.server is not None
        address = self.server.listeners["emp"].address
        return EmpClient("127.0.0.1", address.port)


class Cluster:
    def __init__(self) -> None:
        self.servers = ModelServers()
        self.nodes = [Node(self, name) for name in "abc"]

    async def create(self) -> None:
        chain = RecordChain(b"l" * 16, b"i" * 16)
        log = model_log(self.servers, asyncio.sleep)
        await log.create(chain.genesis(Genesis("n"), 1))
        await log.open()
        for body in record_content(MemoryStore(), 1 << 20, 1 << 20):
            for record in chain.group(body, 2):
                await log.append(record)
        await log.append(chain.heartbeat(3))

    async def start(self) -> Node:
        await self.create()
        for node in self.nodes:
            await node.start()
        return await self.leader()

    async def start_alone(self) -> Node:
        """A leader that does not give up without the log, and no standby."""
        leader = await self.start()
        assert leader.server is not None and leader.server.replica is not None
        replica = leader.server.replica
        replica.settings = msgspec.structs.replace(replica.settings, takeover_s=60.0)
        replica.succession._takeover_s = 60.0
        for node in self.nodes:
            if node is not leader:
                await node.stop()
        return leader

    async def leader(self, *, other_than: Node | None = None) -> Node:
        await until(lambda: any(node.leads and node is not other_than for node in self.nodes))
        return next(node for node in self.nodes if node.leads and node is not other_than)

    def standby(self) -> Node:
        return next(node for node in self.nodes if node.server is not None and not node.leads)

    async def reported(self) -> None:
        """The leader knows two standbys to which it can hand over."""
        reports = self.servers.reports
        await until(lambda: [each.role for each, _ in reports.values()].count("standby") == 2)

    async def caught_up(self) -> None:
        """All have applied what is in the log but its last record, which no later one proves."""

        def applied() -> bool:
            stores = [node.server.replica.store for node in self.nodes if node.server]  # type: ignore[union-attr]
            least = min(store.position.number for store in stores)
            return least >= self.servers.head.number - 1

        await until(applied)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    yield made
    for node in made.nodes:
        with suppress(CrosswireError):
            await node.stop()


async def publish(node: Node, count: int, start: int = 0) -> list[str]:
    sent = [f"m{number}" for number in range(start, start + count)]
    async with node.client() as client:
        for text in sent:
            await client.request("$publish", {"destination": "queue/q", "text": text})
    return sent


async def test_one_leads_and_the_others_have_the_same(cluster: Cluster) -> None:
    leader = await cluster.start()
    await publish(leader, 5)
    await cluster.caught_up()
    assert [node.leads for node in cluster.nodes].count(True) == 1
    for node in cluster.nodes:
        await node.stop()
    stores = [MemoryReplica(node.disk) for node in cluster.nodes]
    newest = max(store.position.number for store in stores)
    digests = {content_digest(store) for store in stores if store.position.number == newest}
    assert len(digests) == 1
    assert len({store.node for store in stores}) == 1


async def test_a_standby_refuses_what_only_a_leader_does(cluster: Cluster) -> None:
    leader = await cluster.start()
    standby = cluster.standby()
    assert standby.server is not None
    await until(lambda: bool(standby.server.replica.succession.leader.replica))  # type: ignore[union-attr]
    with pytest.raises(NotLeading, match=f"leader is {leader.name} at http://{leader.name}"):
        _ = standby.server.hub
    assert standby.server.listeners == {}


async def test_a_planned_hand_over_loses_nothing_and_waits_for_nothing(cluster: Cluster) -> None:
    leader = await cluster.start()
    await publish(leader, 5)
    await cluster.reported()
    await leader.stop()
    following = await cluster.leader()
    assert following.server is not None
    assert following.server.hub.depth("queue/q")[0] == 5
    records = [decode_record(data) for data in cluster.servers.records]
    at = next(index for index, each in enumerate(records) if each.kind is RecordKind.HAND_OVER)
    handed, takeover = records[at : at + 2]
    assert takeover.kind is RecordKind.TAKEOVER
    assert handed.read(HandOver).replica == following.name == takeover.read(Takeover).replica
    assert takeover.time_us - handed.time_us < TAKEOVER_S * 1_000_000


async def test_a_leader_that_hands_over_on_request_becomes_a_standby(cluster: Cluster) -> None:
    leader = await cluster.start()
    await cluster.reported()
    assert leader.server is not None and leader.server.replica is not None
    leader.server.replica.hand_over()
    following = await cluster.leader(other_than=leader)
    await publish(following, 2)
    await until(lambda: not leader.leads)
    await cluster.caught_up()
    assert leader.server.replica.succession.leader.replica == following.name
    assert not leader.server.context.draining


async def test_a_leader_that_was_replaced_answers_nobody(cluster: Cluster) -> None:
    """It stands still, another takes over, and it goes on as if nothing had happened."""
    leader = await cluster.start()
    await publish(leader, 3)
    assert leader.server is not None and leader.server.replica is not None
    log = leader.server.replica.log
    blocked = asyncio.Event()
    append = log.append

    async def stand_still(record: object) -> None:
        await blocked.wait()
        await append(record)  # type: ignore[arg-type]

    log.append = stand_still  # type: ignore[method-assign,assignment]
    client = leader.client()
    await client.__aenter__()
    request = asyncio.ensure_future(
        client.request("$publish", {"destination": "queue/q", "text": "late"})
    )
    following = await cluster.leader(other_than=leader)
    await publish(following, 2, start=3)
    blocked.set()
    log.append = append  # type: ignore[method-assign]
    with pytest.raises(CrosswireError):
        await request
    await client.__aexit__(None, None, None)
    await until(lambda: not leader.leads)
    assert following.server is not None
    assert following.server.hub.depth("queue/q")[0] == 5
    await cluster.caught_up()


async def test_without_the_log_nobody_leads_and_all_resumes(cluster: Cluster) -> None:
    leader = await cluster.start()
    await publish(leader, 2)
    cluster.servers.is_reachable = False
    await until(lambda: not any(node.leads for node in cluster.nodes))
    cluster.servers.is_reachable = True
    following = await cluster.leader()
    await publish(following, 2)
    assert following.server is not None
    assert following.server.hub.depth("queue/q")[0] == 4


async def test_peers_wait_when_too_much_waits_for_the_log(cluster: Cluster) -> None:
    """Not more than the limit and what one peer sent in one read is ever taken in."""
    leader = await cluster.start_alone()
    assert leader.server is not None
    commits = leader.server.hub.commits
    gate = commits.gate
    assert gate is not None
    cluster.servers.is_reachable = False
    most = 0

    def is_waiting() -> bool:
        nonlocal most
        most = max(most, commits.pending_bytes())
        return gate.waiting == 3

    async with leader.client() as one, leader.client() as two, leader.client() as three:
        text = "x" * 100_000
        requests = [
            asyncio.ensure_future(
                client.request("$publish", {"destination": "queue/q", "text": text})
            )
            for client in (one, two, three)
            for _ in range(70)
        ]
        await until(is_waiting)
        assert PENDING_BYTES < most < PENDING_BYTES + 2 * READ_BYTES
        cluster.servers.is_reachable = True
        await asyncio.gather(*requests)
    assert leader.server.hub.depth("queue/q")[0] == 210
    assert gate.waiting == 0 and commits.pending_bytes() < PENDING_BYTES


async def test_peers_that_wait_for_the_log_are_dropped_with_their_leader(cluster: Cluster) -> None:
    leader = await cluster.start()
    assert leader.server is not None
    gate = leader.server.hub.commits.gate
    assert gate is not None
    cluster.servers.is_reachable = False
    async with leader.client() as client:
        text = "x" * 100_000
        requests = [
            asyncio.ensure_future(
                client.request("$publish", {"destination": "queue/q", "text": text})
            )
            for _ in range(70)
        ]
        await until(lambda: gate.waiting == 1)
        request = asyncio.ensure_future(gate.passed())
        await until(lambda: not leader.leads)
        assert leader.server.context.gateways == {}
        for each in await asyncio.gather(*requests, return_exceptions=True):
            assert isinstance(each, ConnectionLost)
        with pytest.raises(NotLeading):
            await request
    cluster.servers.is_reachable = True
    following = await cluster.leader()
    assert following.server is not None
    # The group in flight may have been appended; what was open is gone with the leader.
    assert following.server.hub.depth("queue/q")[0] <= 1


async def test_groups_close_at_the_size_of_a_record(cluster: Cluster) -> None:
    """While one is in flight, others are closed behind it; each is one record."""
    leader = await cluster.start_alone()
    assert leader.server is not None
    first = cluster.servers.head.number
    cluster.servers.is_reachable = False
    async with leader.client() as client:
        text = "x" * 20_000
        requests = [
            asyncio.ensure_future(
                client.request("$publish", {"destination": "queue/q", "text": text})
            )
            for _ in range(40)
        ]
        commits = leader.server.hub.commits
        await until(lambda: commits.pending_bytes() > 40 * len(text))
        cluster.servers.is_reachable = True
        await asyncio.gather(*requests)
    records = [decode_record(data) for data in cluster.servers.records]
    groups = [each for each in records if each.number > first and each.kind is RecordKind.GROUP]
    sizes = [len(each.body) for each in groups]
    assert len(groups) >= 2 and all(each.parts == 1 for each in groups)
    assert max(sizes) < RECORD_BYTES
    rows = [row.seq for row in leader.server.hub.ledger.of_destination("queue/q")]
    assert rows == sorted(set(rows)) and len(rows) == 40
    await leader.stop()
    await leader.start()
    await until(lambda: leader.leads)
    assert leader.server.hub.depth("queue/q")[0] == 40


async def test_a_large_message_is_several_records(cluster: Cluster) -> None:
    leader = await cluster.start()
    async with leader.client() as client:
        text = "x" * 6_000_000
        await client.request("$publish", {"destination": "queue/q", "text": text})
    await leader.stop()
    following = await cluster.leader()
    assert following.server is not None
    length, size_bytes = following.server.hub.depth("queue/q")
    assert length == 1 and size_bytes > 6_000_000
    assert any(decode_record(data).parts > 1 for data in cluster.servers.records)


async def test_a_leader_whose_store_is_damaged_resigns(cluster: Cluster) -> None:
    """What damage makes a hub believe is not replicated."""
    leader = await cluster.start()
    await publish(leader, 2)
    assert leader.server is not None
    store = leader.server.hub.store
    store.report_damage("record", "message 1 of queue/q is missing")
    store.save("space", b"key", b"of a damaged store")
    leader.server.hub.commits.request()
    following = await cluster.leader(other_than=leader)
    assert following.server is not None
    assert following.server.hub.store.get("space", b"key") is None
    assert not leader.leads
    await until(lambda: cluster.servers.reports[leader.name][0].role == Role.DAMAGED)


async def test_a_standby_without_room_waits_and_never_leads(cluster: Cluster) -> None:
    leader = await cluster.start()
    await cluster.caught_up()
    standby = cluster.standby()
    room_bytes, standby.disk.room_bytes = standby.disk.room_bytes, 0
    await publish(leader, 3)
    await until(lambda: cluster.servers.reports[standby.name][0].role == Role.DAMAGED)
    assert standby.server is not None and standby.server.replica is not None
    assert "no room" in standby.server.replica.fault()
    standby.disk.room_bytes = room_bytes
    await publish(leader, 1, start=3)
    await cluster.caught_up()
    await until(lambda: cluster.servers.reports[standby.name][0].role == Role.STANDBY)


async def test_a_leader_without_room_stops_without_an_answer(cluster: Cluster) -> None:
    """The group is durable, so it must not be reported as failed."""
    leader = await cluster.start()
    await cluster.reported()
    async with leader.client() as client:
        leader.disk.room_bytes = 20_000
        text = "x" * 50_000
        with pytest.raises(ConnectionLost):
            await client.request("$publish", {"destination": "queue/q", "text": text})
    following = await cluster.leader(other_than=leader)
    assert following.server is not None
    assert following.server.hub.depth("queue/q")[0] == 1


async def test_a_leader_without_room_hands_over_to_one_that_has_some(cluster: Cluster) -> None:
    """It would refuse producers for as long as it leads."""
    leader = await cluster.start()
    await cluster.reported()
    room_bytes, leader.disk.room_bytes = leader.disk.room_bytes, 0
    following = await cluster.leader(other_than=leader)
    await publish(following, 2)
    assert leader.server is not None and leader.server.replica is not None
    assert "no room" in leader.server.replica.fault()
    leader.disk.room_bytes = room_bytes
    await cluster.caught_up()


async def test_trimming_goes_on_after_the_log_refused_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "_TRIM_S", 0.01)
    leader = await cluster.start()
    assert leader.server is not None and leader.server.replica is not None
    log = leader.server.replica.log
    look, refusals = log.state, [0]

    async def refuse_twice() -> LogState:
        refusals[0] += 1
        if refusals[0] <= 2:
            raise LogRefused("the role has lost a right for a moment")
        return await look()

    monkeypatch.setattr(log, "state", refuse_twice)
    await until(lambda: refusals[0] > 2)


async def test_confirmed_records_that_are_gone_stop_a_leader(cluster: Cluster) -> None:
    leader = await cluster.start()
    await publish(leader, 3)
    assert leader.server is not None and leader.server.replica is not None
    cluster.servers.lose_suffix(2)
    async with asyncio.timeout(10):
        error = await leader.server.replica.failed
    assert isinstance(error, LogDamaged)


async def publish_until_acknowledged(cluster: Cluster, text: str) -> int:
    """Gives how many attempts it took: under faults, and on a slow machine, a leader may lose its
    term meanwhile, and what became of the attempt is unknown."""
    attempts = 0
    while True:
        attempts += 1
        leader = await cluster.leader()
        try:
            async with leader.client() as client:
                await client.request("$publish", {"destination": "queue/q", "text": text})
        except ClientError:
            continue
        return attempts


async def test_takeovers_under_faults_of_the_log_lose_nothing(cluster: Cluster) -> None:
    await cluster.start()
    cluster.servers.rates = {
        ModelFault.UNANSWERED: 0.05,
        ModelFault.NOT_LANDED: 0.05,
        ModelFault.LATE: 0.05,
        ModelFault.NOT_COPIED: 0.05,
        ModelFault.STALE: 0.02,
    }
    acknowledged = attempts = 0
    for _ in range(3):
        for _ in range(5):
            attempts += await publish_until_acknowledged(cluster, "x")
            acknowledged += 1
        leader = await cluster.leader()
        await leader.stop()
        await cluster.leader()
        await leader.start()
    cluster.servers.rates = {}
    leader = await cluster.leader()
    assert leader.server is not None
    assert acknowledged <= leader.server.hub.depth("queue/q")[0] <= attempts


async def test_a_shared_lake_has_each_message_once(cluster: Cluster, tmp_path: Path) -> None:
    for node in cluster.nodes:
        node.use_lake(tmp_path)
    leader = await cluster.start()
    for round_number in range(3):
        await publish(leader, 4, start=4 * round_number)
        await leader.stop()
        following = await cluster.leader()
        await leader.start()
        leader = following
    for node in cluster.nodes:
        await node.stop()
    texts, rows = [], []
    for file in find(tmp_path / "lake", ("messages", "ledger")):
        table = pq.read_table(file.path, partitioning=None)
        if file.table == "messages":
            texts += [payload.decode() for payload in table["payload"].to_pylist()]
        else:
            rows += table["seq"].to_pylist()
    assert sorted(texts) == sorted(f"m{number}" for number in range(12))
    assert sorted(rows) == list(range(1, len(rows) + 1))


async def test_a_leader_that_publishes_late_doubles_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    """It stands still between the commit of a seal and the renaming of its files; another takes
    over, publishes the same rows, and they are compacted; then the first one goes on."""
    for node in cluster.nodes:
        node.use_lake(tmp_path)
    leader = await cluster.start()
    server = leader.server
    assert server is not None and server.replica is not None and server._lake is not None
    await publish(leader, 1)
    lake = tmp_path / "lake"
    await until(lambda: bool(messages_in(lake)))
    stands, goes_on, is_done = threading.Event(), threading.Event(), threading.Event()
    writer = server._lake._writer

    def publish_late(parts: Iterable[FinishedFile]) -> None:
        stands.set()
        goes_on.wait(30)
        publish_files(parts)
        is_done.set()

    writer.publish = publish_late  # type: ignore[method-assign]
    await publish(leader, 3, start=1)
    await until(stands.is_set)
    cluster.servers.is_reachable = False
    await until(lambda: not leader.leads)
    await leader.stop()
    cluster.servers.is_reachable = True
    following = await cluster.leader()
    await publish(following, 2, start=4)
    await until(lambda: len(messages_in(lake)) == 6)
    list(compact(lake, before="9999-12-31"))
    goes_on.set()
    await until(is_done.is_set)
    for node in cluster.nodes:
        await node.stop()
    late = set(find_all(lake, ("messages",))) - set(find(lake, ("messages",)))
    assert sum(each.last - each.first + 1 for each in late) > 0
    assert sorted(messages_in(lake)) == [f"m{number}" for number in range(6)]
    assert list(verify(lake)) == []


def messages_in(lake: Path) -> list[str]:
    found: list[str] = []
    for file in find(lake, ("messages",)):
        table = pq.read_table(file.path, partitioning=None)
        found += [payload.decode() for payload in table["payload"].to_pylist()]
    return found


async def test_a_lake_that_is_not_shared_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    for node in cluster.nodes:
        node.use_lake(tmp_path)
    await cluster.start()
    standby = cluster.standby()
    await cluster.caught_up()
    await standby.stop()
    standby.use_lake(tmp_path, "another")
    with pytest.raises(ConfigError, match=r"crosswire-lake\.id can't be read"):
        await standby.start()
    standby.server = None
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / "crosswire-lake.id").write_text("of another hub")
    with pytest.raises(ConfigError, match="not the one that this hub's replicas share"):
        await standby.start()
    standby.server = None


async def test_two_replicas_of_one_name(cluster: Cluster) -> None:
    await cluster.start()
    standby = cluster.standby()
    await cluster.reported()
    twin = Node(cluster, standby.name)
    cluster.nodes.append(twin)
    await twin.start()
    assert twin.server is not None and twin.server.replica is not None
    replica = twin.server.replica
    await until(lambda: "reports as" in replica.fault())
    assert standby.server is not None and standby.server.replica is not None
    assert standby.server.replica.fault() == ""


async def test_a_standby_takes_another_configuration(cluster: Cluster) -> None:
    await cluster.start()
    standby = cluster.standby()
    server = standby.server
    assert server is not None and server.replica is not None
    tick = ScheduleEntry(id="tick", destination="queue/t", interval_s=3600, text="t")
    users = (User(name="anna", token="a-secret-of-anna", produce=("queue/#",)),)
    config = msgspec.structs.replace(server.config, users=users, schedules=(tick,))
    assert server.reload(config) == []
    for node in cluster.nodes:
        if node is not standby:
            await node.stop()
    await until(lambda: standby.leads)
    assert [each.id for each in server.hub.schedules.all()] == ["tick"]
    with pytest.raises(CrosswireError, match=r"forbidden|authenticate"):
        await publish(standby, 1)


async def test_times_do_not_run_back(cluster: Cluster) -> None:
    leader = await cluster.start()
    await publish(leader, 2)
    await leader.stop()
    following = await cluster.leader()
    await publish(following, 2)
    times = [decode_record(data).time_us for data in cluster.servers.records]
    assert times == sorted(times)


async def test_times_do_not_run_back_for_a_replica_that_has_nothing_to_read(
    cluster: Cluster,
) -> None:
    """Started again, it has applied all that there is: only the newest record knows the time."""
    leader = await cluster.start_alone()
    await publish(leader, 2)
    await leader.stop()
    leader.clock_off_s = -3600.0
    await leader.start()
    await until(lambda: leader.leads)
    times = [decode_record(data).time_us for data in cluster.servers.records]
    assert times == sorted(times)


async def test_a_clock_that_is_off_is_an_alarm_and_times_do_not_run_back(
    cluster: Cluster,
) -> None:
    """Clocks decide when somebody tries, never what is true."""
    leader = await cluster.start()
    await publish(leader, 1)
    odd = cluster.standby()
    await odd.stop()
    odd.clock_off_s = 3600.0
    await odd.start()
    assert leader.server is not None and leader.server.replica is not None
    replica = leader.server.replica
    await until(lambda: any(f"clock of {odd.name}" in each for each in replica.alarms()))
    replica.hand_over(odd.name)
    await until(lambda: odd.leads)
    await publish(odd, 1, start=1)
    await cluster.reported()
    await odd.stop()
    following = await cluster.leader()
    await publish(following, 1, start=2)
    times = [decode_record(data).time_us for data in cluster.servers.records]
    assert times == sorted(times)
    assert times[-1] > (time.time() + 3000) * 1_000_000
    assert following.server is not None
    assert following.server.hub.depth("queue/q")[0] == 3
