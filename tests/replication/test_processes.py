"""Replicas as users run them: processes, real servers of the log, commands."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from crosswire.client.native.emp import EmpClient
from crosswire.web.api import OPERATIONS
from tests.postgres.cluster import ClusterPool
from tests.replication.replicas import ReplicaCluster, ReplicaProcess

pytestmark = pytest.mark.slow

STANDBY_PATHS = (
    "/v1/queues",
    "/v1/topics",
    "/v1/subscriptions",
    "/v1/schedules",
    "/v1/dead",
    "/v1/damage",
    "/v1/state",
    "/v1/replication",
)


@pytest.fixture
async def cluster(clusters: ClusterPool, tmp_path: Path) -> AsyncIterator[ReplicaCluster]:
    made = ReplicaCluster(clusters.take(), tmp_path)
    yield made
    await made.close()


async def publish(replica: ReplicaProcess, *texts: str) -> None:
    port = replica.port("emp")
    assert port is not None
    async with EmpClient("127.0.0.1", port) as client:
        for text in texts:
            await client.request("$publish", {"destination": "queue/q", "text": text})


async def length(replica: ReplicaProcess) -> int:
    status, queue = await replica.ask("/v1/queues/q")
    assert status == 200, queue
    found: int = queue["length"]
    return found


async def test_the_life_of_three_replicas(cluster: ReplicaCluster) -> None:
    """One after the other, because starting them takes longest."""
    leader = await cluster.start()
    await publish(leader, "1", "2", "3")

    # Standbys: open for HTTP only, not ready, and they name the leader.
    standby = next(each for each in cluster.replicas if each is not leader)
    assert set(standby.listen) == {"http"}
    assert (await standby.ask("/healthz"))[0] == 200
    status, ready = await standby.ask("/readyz")
    assert status == 503 and ready["status"].startswith("standby of ")
    # They show what they have applied, and change nothing.
    for path in STANDBY_PATHS:
        status, answer = await standby.ask(path)
        assert status == 200, (path, answer)
    while (await standby.ask("/v1/queues/q"))[1].get("length") != 3:
        await asyncio.sleep(0.1)
    # Totals are counted about once a second.
    while (state := (await standby.ask("/v1/state"))[1])["messages"] != 3:
        await asyncio.sleep(0.1)
    assert (state["role"], state["leader"]) == ("standby", leader.name)
    assert state["leader_address"] == f"http://127.0.0.1:{leader.http_port}"
    assert state["applied"] > 2 and state["lag"] >= 0
    status, state = await leader.ask("/v1/state")
    assert (state["role"], state["leader"]) == ("leader", leader.name)
    production = json.dumps({"messages": [{"destination": "queue/q", "text": "4"}]})
    for path, body in (
        ("/v1/messages", production),
        ("/v1/queues/q/purge", "{}"),
        ("/v1/messages", ""),
        ("/v1/messages/1", ""),
        ("/v1/stats", ""),
    ):
        status, refused = await standby.ask(path, "POST" if body else "GET", body)
        assert status == 503 and refused["error"] == "standby", (path, refused)
        assert f"{leader.name} at http://127.0.0.1:" in refused["description"]
    for operation in OPERATIONS:
        if operation.method == "GET" and "{" not in operation.path:
            status, answer = await standby.ask(operation.path)
            if operation.on_standby:
                assert status in (200, 400), (operation.path, answer)
            else:
                assert status == 503 and answer["error"] == "standby", (operation.path, answer)
    status, metrics = await standby.ask("/metrics")
    assert status == 200 and "crosswire_replica_leading 0" in metrics
    status, session = await standby.ask("/v1/session")
    assert (status, session["role"], session["leader"]) == (200, "standby", leader.name)
    status, page = await standby.ask("/")
    assert status == 200 and "/console/main.js" in page
    assert (await leader.ask("/readyz"))[0] == 200

    # Killed: another one has everything that was acknowledged.
    await leader.end(signal.SIGKILL)
    second = await cluster.leader()
    assert await length(second) == 3
    await publish(second, "4")
    await leader.start()

    # Asked to stop: the next one takes over at once.
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await second.end() == 0
    third = await cluster.leader(other_than=second)
    assert loop.time() - began < 5.0
    assert await length(third) == 4
    await second.start()

    # On request: the old leader goes on as a standby.
    while True:
        status, state = await third.ask("/v1/replication")
        if sum(each["role"] == "standby" for each in state["replicas"]) == 2:
            break
        await asyncio.sleep(0.1)
    wanted = json.dumps({"to": second.name})
    # It may be a standby and not be fit to take over yet, or not for a moment.
    while (await third.ask("/v1/replication/hand-over", "POST", wanted))[0] == 400:
        await asyncio.sleep(0.1)
    assert await cluster.leader(other_than=third) is second
    assert await length(second) == 4

    # What commands show and refuse.
    rows: dict[str, Any] = {}
    # Replicas report now and then.
    while rows.get(second.name, {}).get("role") != "leader":
        shown = await asyncio.to_thread(cluster.command, second, "status", "--json", check=True)
        rows = {each["name"]: each for each in json.loads(shown.stdout)["replicas"]}
    assert set(rows) == {"r0", "r1", "r2"}
    again = await asyncio.to_thread(cluster.command, third, "init")
    assert again.returncode == 1 and "replication leave" in again.stderr
    removed = await asyncio.to_thread(cluster.command, second, "remove", third.name)
    assert removed.returncode == 1 and "stop it first" in removed.stderr

    for each in cluster.replicas:
        await each.end(signal.SIGKILL)
    digests = await cluster.digests()
    assert len(set(digests.values())) == 1, digests

    # One that leaves its log is a hub of its own.
    left = await asyncio.to_thread(cluster.command, third, "leave")
    assert left.returncode == 0, left.stderr
    third.config.write_text(third.config.read_text().partition("[replication]")[0])
    await third.start()
    assert third.leads and await length(third) == 4


async def test_mistakes_are_explained(cluster: ReplicaCluster, tmp_path: Path) -> None:
    first = cluster.replicas[0]

    async def words_of(replica: ReplicaProcess) -> str:
        with pytest.raises(AssertionError):
            await replica.start()
        assert replica.process is not None and await replica.process.wait() == 1
        return replica.words()

    assert "replication init" in await words_of(first)
    await asyncio.to_thread(cluster.command, first, "init", "--as", "postgres", check=True)
    local = ReplicaProcess(tmp_path, "local", "local")
    local.config.write_text(local.config.read_text().replace(str(local.data), str(first.data)))
    assert "replication leave" in await words_of(local)
    wrong = ReplicaProcess(tmp_path, "wrong", cluster.url.replace("hub@", "stranger@"))
    assert "password" in await words_of(wrong)
    cluster.postgres.primary.set("synchronous_standby_names", "")
    try:
        assert "synchronous_standby_names" in await words_of(cluster.replicas[1])
    finally:
        cluster.postgres.primary.set("synchronous_standby_names", "ANY 1 (n0, n1, n2)")
