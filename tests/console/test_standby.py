"""The console of a real standby: who leads, and how to get there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.console.browser import BrowserThread, ConsolePage
from tests.postgres.cluster import ClusterPool
from tests.replication.replicas import ReplicaCluster, ReplicaProcess

pytestmark = pytest.mark.slow


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[tuple[ReplicaProcess, ReplicaProcess]]:
    """A leader and a standby, which has reported."""
    pool = ClusterPool()
    try:
        with asyncio.Runner() as runner:
            cluster = ReplicaCluster(pool.take(), tmp_path, size=2)
            try:
                leader = runner.run(cluster.start())
                (standby,) = (each for each in cluster.replicas if each is not leader)
                runner.run(_reported(standby))
                yield leader, standby
            finally:
                runner.run(cluster.close())
    finally:
        pool.close()


async def _reported(replica: ReplicaProcess) -> None:
    async with asyncio.timeout(60):
        while True:
            _, state = await replica.ask("/v1/replication")
            if {each["role"] for each in state["replicas"]} == {"leader", "standby"}:
                return
            await asyncio.sleep(0.1)


def test_a_standby_leads_to_the_leader(
    browser_thread: BrowserThread, replicas: tuple[ReplicaProcess, ReplicaProcess]
) -> None:
    leader, standby = replicas
    browser = browser_thread.browser
    assert browser is not None
    tab = ConsolePage(browser, f"http://127.0.0.1:{standby.http_port}")
    try:
        tab.page.goto("/#/queues")
        expect(tab.page.get_by_role("heading", name="This hub is a standby")).to_be_visible()
        address = f"http://127.0.0.1:{leader.http_port}"
        expect(tab.page.get_by_text(f"The leader is {leader.name} at {address}.")).to_be_visible()
        expect(tab.row(leader.name)).to_contain_text("leader")
        expect(tab.row(standby.name)).to_contain_text("standby")
        tab.check()
        tab.page.get_by_role("link", name="Go to the leader's console").click()
        expect(tab.page.get_by_role("heading", name="Overview")).to_be_visible()
        assert tab.page.url.startswith(address)
    finally:
        tab.close()
