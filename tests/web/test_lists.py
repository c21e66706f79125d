"""Order and filters of the lists that screens page through."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pytest

from crosswire.access import User
from crosswire.client.native.emp import EmpClient
from crosswire.envelope import Envelope
from crosswire.errors import RequestFailed
from crosswire.hub.cursor import FailedDelivery
from crosswire.hub.dead import bury as bury_envelope
from crosswire.hub.ledger import LedgerPeer
from crosswire.lake.files import write
from crosswire.lake.schemas import GAPS
from crosswire.store.damage import Damage
from crosswire.web.api import OPERATIONS
from crosswire.web.contract import Operation
from crosswire.web.paging import ListQuery
from tests.web.conftest import StartWeb, Taker, WebHub, bury

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


LISTS = [each for each in OPERATIONS if each.name.startswith(("list_", "search_"))]


@pytest.mark.parametrize("operation", LISTS, ids=lambda each: each.name)
def test_every_list_has_a_cursor(operation: Operation) -> None:
    assert operation.query is not None
    assert issubclass(operation.query, ListQuery)
    assert operation.answer is not None
    assert "next" in operation.answer.__struct_fields__


async def pages(web: WebHub, path: str, key: str, **query: Any) -> list[Any]:
    """All rows of a list, one by one."""
    rows: list[Any] = []
    cursor = ""
    while True:
        page = await web.get(path, limit=1, cursor=cursor, **query)
        rows += page[key]
        cursor = page["next"]
        if not cursor:
            return rows
        assert len(page[key]) == 1


async def test_dead_letters_are_sorted(web: WebHub) -> None:
    letters = await bury(web, *"abcdef")
    # Messages of others are between them.
    await web.produce("queue/other", *["x"] * 600)
    letters = await bury(web, "g", properties={"n": 1})
    path = "/v1/dead/letters"
    for limit in (2, 100):
        asked: dict[str, Any] = {"queue": "q", "limit": limit}
        for sort, expected in (
            ("oldest", letters),
            ("newest", letters[::-1]),
            ("attempts", letters),
            ("cause", letters),
        ):
            found: list[int] = []
            cursor = ""
            while True:
                page = await web.get(path, sort=sort, cursor=cursor, **asked)
                found += [row["id"] for row in page["letters"]]
                cursor = page["next"]
                if not cursor:
                    break
            assert found == expected, (sort, limit)
            assert page["is_complete"]
    last = await web.get(path, queue="q", sort="newest", filter="n = 1", limit=1)
    assert [row["id"] for row in last["letters"]] == letters[-1:]
    after = await web.get(path, queue="q", after=letters[4])
    assert [row["id"] for row in after["letters"]] == letters[5:]
    before = await web.get(path, queue="q", after=letters[2], sort="newest")
    assert [row["id"] for row in before["letters"]] == letters[1::-1]


async def test_letters_are_sorted_by_what_happened_to_them(web: WebHub) -> None:
    for cause in ("b", "c", "a", "c"):
        envelope = Envelope(destination="queue/once", kind="send", id=1)
        attempts = [FailedDelivery(1, "c", cause)] * (3 if cause == "a" else 1)
        dead = bury_envelope(envelope, "queue/once/dead", cause, attempts)
        await web.hub.produce([dead], web.server.context.now())
    path = "/v1/dead/letters"
    by_cause = await pages(web, path, "letters", queue="once", sort="cause")
    assert [row["cause"] for row in by_cause] == ["a", "b", "c", "c"]
    by_attempts = await pages(web, path, "letters", queue="once", sort="attempts")
    assert [len(row["attempts"]) for row in by_attempts] == [3, 1, 1, 1]
    assert by_attempts[0]["cause"] == "a"
    for sort, expected in (("letters", "cab"), ("cause", "abc"), ("last", "cab")):
        rows = await pages(web, "/v1/dead/causes", "causes", queue="once", sort=sort)
        assert "".join(row["cause"] for row in rows) == expected, sort
        assert sum(row["letters"] for row in rows) == 4


async def test_replays_are_sorted_and_filtered(web: WebHub) -> None:
    await bury(web, *"abc")
    await web.produce("queue/m", "1")
    await web.post("/v1/dead/replays", {"queue": "q", "all": True, "dry_run": True})
    await web.post("/v1/queues/m/move", {"all": True, "destination": "queue/n"})
    await web.post("/v1/dead/replays", {"queue": "q", "ids": [1], "dry_run": True})
    path = "/v1/dead/replays"
    for sort, expected in (
        ("newest", [3, 2, 1]),
        ("source", [2, 3, 1]),
        ("state", [3, 2, 1]),
        ("matched", [1, 2, 3]),
        ("replayed", [2, 3, 1]),
        ("skipped", [3, 2, 1]),
    ):
        rows = await pages(web, path, "replays", sort=sort)
        assert [row["id"] for row in rows] == expected, sort
    assert [row["id"] for row in await pages(web, path, "replays", contains="/n")] == [2]
    assert await pages(web, path, "replays", state="running") == []


async def test_gaps_are_sorted_and_filtered(web: WebHub) -> None:
    lake = web.server.lake_path
    sizes = {1: ("messages", 10), 2: ("ledger", 30), 3: ("messages", 20)}
    for seq, (table, size) in sizes.items():
        row = {"node": "n", "seq": seq, "time": seq, "table": table, "reason": "why"}
        rows = [{**row, "first": 1, "last": size}]
        write(lake, "gaps", pa.Table.from_pylist(rows, schema=GAPS))
    for query, expected in (
        ({}, [20, 30, 10]),
        ({"sort": "table"}, [30, 20, 10]),
        ({"sort": "rows"}, [30, 20, 10]),
        ({"table": "messages"}, [20, 10]),
    ):
        rows = await pages(web, "/v1/lake/gaps", "gaps", **query)
        assert [row["last"] for row in rows] == expected, query


async def test_what_is_busiest_has_pages(web: WebHub) -> None:
    for name, number in (("a", 1), ("b", 3), ("c", 2)):
        await web.produce(f"queue/{name}", *["x"] * number)
    rows = await pages(web, "/v1/stats/busiest", "rows", kind="queue")
    assert sorted(row["name"] for row in rows) == ["a", "b", "c"]


async def test_damage_has_pages(web: WebHub) -> None:
    for number in range(3):
        damage = Damage(bytes([number]), bytes([number + 1]), "unreadable", "record")
        web.hub.store.damages.add(damage, f"number {number}")
    rows = await pages(web, "/v1/damage", "damage")
    assert [row["detail"] for row in rows] == [f"number {number}" for number in range(3)]
