"""Order and filters of the lists that screens page through."""

from __future__ import annotations

import asyncio

import pytest

from crosswire.access import User
from crosswire.client.native.emp import EmpClient
from crosswire.errors import RequestFailed
from crosswire.hub.ledger import LedgerPeer
from tests.web.conftest import StartWeb, Taker, WebHub

ROOT = User(name="root", token="the-secret-of-root", administer=True)
ANNA = User(name="anna", token="the-secret-of-anna", consume=("topic/+",))
BEN = User(name="ben", token="the-secret-of-ben", consume=("topic/+",))


def subscribe(web: WebHub, name: str, owner: str = "") -> None:
    taker, now = Taker(web, "queue/other", does="hold"), web.server.context.now()
    peer = LedgerPeer("test", "c", owner)
    web.hub.subscribe("topic/t", taker, now, peer=peer, name=name, window=1).close(now)


async def test_subscriptions_are_sorted_by_what_they_have(web: WebHub) -> None:
    for name in ("a", "b", "c"):
        subscribe(web, name)
    taker, now = Taker(web, "queue/other", does="settle"), web.server.context.now()
    web.hub.subscribe("topic/t", taker, now, peer=LedgerPeer("test", "d"), name="b", window=9)
    await web.produce("topic/t", "1", "2")
    await web.hub.committed()
    for sort in ("out", "consumers"):
        rows = (await web.get("/v1/subscriptions", sort=sort))["subscriptions"]
        assert [row["name"] for row in rows] == ["b", "a", "c"], sort
    rows = (await web.get("/v1/subscriptions", sort="dead"))["subscriptions"]
    assert [row["name"] for row in rows] == ["a", "b", "c"]


async def test_a_subscription_is_shown_to_its_owner_and_observers(start_web: StartWeb) -> None:
    web = await start_web(users=(ROOT, ANNA, BEN))
    subscribe(web, "s", "anna")
    row = await web.get("/v1/subscriptions/s", token="the-secret-of-anna")
    assert (row["owner"], row["pattern"], row["lag_messages"]) == ("anna", "t", 0)
    shown = await web.get("/v1/subscriptions/s", token="the-secret-of-root", owner="anna")
    assert shown["name"] == "s"
    for owner in ({"owner": "anna"}, {}):
        with pytest.raises(RequestFailed) as caught:
            await web.get("/v1/subscriptions/s", token="the-secret-of-ben", **owner)
        assert caught.value.code == "not_found"


async def test_connections_that_ended_are_sorted(start_web: StartWeb) -> None:
    web = await start_web(listen={"emp": "127.0.0.1:0"})
    port = web.server.listeners["emp"].address.port
    for size in (10, 1000, 100):
        async with EmpClient("127.0.0.1", port) as client:
            await client.request("$publish", {"destination": "queue/x", "text": "x" * size})
            assert (await web.get("/v1/connections", state="congested"))["connections"] == []
    while len(web.server.context.closed) < 3:
        await asyncio.sleep(0.01)
    rows = (await web.get("/v1/connections/closed"))["connections"]
    ended = [row["id"] for row in rows]
    by_bytes = (await web.get("/v1/connections/closed", sort="received"))["connections"]
    assert [row["id"] for row in by_bytes] == [ended[1], ended[0], ended[2]]


async def test_schedules_are_sorted_and_filtered(web: WebHub) -> None:
    for name, interval_s in (("a", 3000), ("b", 1000), ("c", 2000)):
        body = {"id": name, "destination": "queue/x", "text": "1", "interval_s": interval_s}
        await web.post("/v1/schedules", body | {"nohaste": True})
    await web.patch("/v1/schedules/b", {"paused": True})

    async def ids(**query: str) -> list[str]:
        names: list[str] = []
        cursor = ""
        while True:
            page = await web.get("/v1/schedules", limit=1, cursor=cursor, **query)
            names += [each["id"] for each in page["schedules"]]
            cursor = page["next"]
            if not cursor:
                return names

    assert await ids(sort="due") == ["c", "a", "b"]
    assert await ids(state="paused") == ["b"]
    assert await ids(state="active") == ["a", "c"]
    assert await ids(sort="fired") == ["a", "b", "c"]


async def test_users_are_sorted_by_connections(start_web: StartWeb) -> None:
    web = await start_web(users=(ANNA, BEN, ROOT), listen={"emp": "127.0.0.1:0"})
    port = web.server.listeners["emp"].address.port
    async with EmpClient("127.0.0.1", port) as client:
        await client.request("$authenticate", {"token": "the-secret-of-ben"})
        page = await web.get("/v1/users", token="the-secret-of-root", sort="connections")
    assert [row["name"] for row in page["users"]] == ["ben", "anna", "root"]


async def test_files_of_the_lake_are_sorted_by_size(start_web: StartWeb) -> None:
    web = await start_web()
    date = web.server.lake_path / "messages" / "date=2026-11-15"
    date.mkdir(parents=True)
    for number, size in ((1, 10), (2, 30), (3, 20)):
        (date / f"n-{number:020}-{number:020}.parquet").write_bytes(b"x" * size)

    async def firsts(**query: str) -> list[int]:
        found: list[int] = []
        cursor = ""
        while True:
            page = await web.get("/v1/lake/files", limit=1, cursor=cursor, **query)
            found += [each["first_seq"] for each in page["files"]]
            cursor = page["next"]
            if not cursor:
                return found

    assert await firsts() == [3, 2, 1]
    assert await firsts(sort="size") == [2, 3, 1]
