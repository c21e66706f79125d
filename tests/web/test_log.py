"""The log over HTTP: plans and Arrow streams of a real hub, from its store and its lake."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crosswire.access import User
from crosswire.config import LakeSettings
from crosswire.envelope import Envelope
from crosswire.errors import RequestFailed
from crosswire.hub.attachment import Delivery
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.policies import TopicPolicy
from crosswire.hub.services import Provider
from crosswire.lake import history
from crosswire.lake.compaction import compact
from crosswire.lake.files import find
from crosswire.pipeline.connector.address import HubAddress
from crosswire.server import log_reader as log_module
from crosswire.server import log_snapshot as log_pieces
from tests.web.conftest import StartWeb, Taker, WebHub

NO_LAKE = LakeSettings(messages=False, ledger=False)
QUICK = LakeSettings(seal_s=0.01)
NEVER = LakeSettings(seal_s=3600.0)
PLANNED = ("node", "starts", "ends", "first", "behind")


def address(web: WebHub, token: str = "") -> HubAddress:
    return HubAddress(f"http://127.0.0.1:{web.port}", token, 0.0)


async def plan(web: WebHub, *destinations: str, token: str = "", **more: Any) -> Any:
    body = {"destinations": list(destinations), **more}
    return await asyncio.to_thread(address(web, token).post, "/v1/log/plan", body)


def fetch(where: HubAddress, body: dict[str, Any]) -> list[dict[str, Any]]:
    """A range to its end, in as many answers as it takes."""
    rows: list[dict[str, Any]] = []
    position = body["first"]
    while position < body["behind"]:
        for batch, metadata in where.batches("/v1/log/read", {**body, "first": position}):
            rows += batch.to_pylist()
            assert int(metadata[b"last"]) >= position
            position = int(metadata[b"last"]) + 1
    assert position == max(body["behind"], body["first"])
    return rows


async def read(web: WebHub, *destinations: str, **more: Any) -> list[dict[str, Any]]:
    """What a plan says, all of it."""
    planned = await plan(web, *destinations, **more)
    return await read_plan(web, planned, destinations)


async def read_plan(
    web: WebHub, planned: dict[str, Any], destinations: tuple[str, ...], **more: Any
) -> list[dict[str, Any]]:
    body = {key: planned[key] for key in PLANNED} | {"destinations": list(destinations)} | more
    return await asyncio.to_thread(fetch, address(web), body)


def ids(rows: list[dict[str, Any]]) -> list[int]:
    return [row["id"] for row in rows]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def sealed(web: WebHub) -> None:
    """All that is committed is in the lake's files, and the store may let go of it."""
    await web.hub.committed()
    store = web.hub.store
    newest = max(store.last_id(number) for number in store.destinations().values())
    await until(lambda: web.hub.seals.reclaim_limit >= newest)


async def consumed(web: WebHub, queue: str) -> None:
    """Everything in a queue is settled, and its room given back."""
    taker = Taker(web, queue, does="settle", window=10_000)
    await until(lambda: web.hub.queue(queue).length == 0)
    taker.leave()
    await sealed(web) if web.hub.config.lake else await web.hub.committed()
    web.hub.queue(queue).reclaim()
    await web.hub.committed()


def in_store(web: WebHub, destination: str) -> list[int]:
    view = web.hub.store.view()
    return list(view.ids(web.hub.store.number(destination), after=0, upto=1 << 60))


# What is read.


async def test_messages_are_read_in_order_with_all_that_they_have(web: WebHub) -> None:
    first, second = await web.produce("queue/a", "1", "2", key="k", properties={"n": 1, "t": "x"})
    await web.produce("queue/other", "no")
    (third,) = await web.produce("topic/b/c", "3")
    rows = await read(web, "queue/a", "topic/#")
    assert [(row["id"], row["destination"], row["payload"]) for row in rows] == [
        (first, "queue/a", b"1"),
        (second, "queue/a", b"2"),
        (third, "topic/b/c", b"3"),
    ]
    assert (rows[0]["key"], rows[0]["properties"]) == ("k", '{"n":1,"t":"x"}')
    assert (rows[0]["protocol"], rows[0]["kind"], rows[2]["kind"]) == ("http", "send", "publish")


async def test_only_the_columns_that_are_asked_for_are_given(web: WebHub) -> None:
    await web.produce("queue/a", "1")
    planned = await plan(web, "queue/a")
    rows = await read_plan(web, planned, ("queue/a",), columns=["payload", "time"])
    assert list(rows[0]) == ["payload", "time"]


@pytest.mark.parametrize("lake", [NO_LAKE, QUICK], ids=["store", "lake"])
async def test_messages_and_bytes_are_counted_by_destination(
    start_web: StartWeb, lake: LakeSettings
) -> None:
    web = await start_web(lake=lake)
    await web.produce("queue/a", "1", "22")
    await web.produce("queue/other", "no")
    await web.produce("topic/b/c", "333", "4444")
    if lake is QUICK:
        await sealed(web)
    wanted = ("queue/a", "topic/#", "topic/b/+", "queue/none")
    planned = await plan(web, *wanted, limit=100, tally="bytes")
    assert planned["count"] == 4
    assert {
        name: (each["messages"], each["bytes"]) for name, each in planned["tallies"].items()
    } == {
        "queue/a": (2, 3),
        "topic/#": (2, 7),
        "topic/b/+": (2, 7),
        "queue/none": (0, 0),
    }
    counted = await plan(web, "queue/a", limit=100, tally="messages")
    assert counted["tallies"] == {"queue/a": {"messages": 2, "bytes": 0}}
    assert (await plan(web, "queue/a", limit=100))["tallies"] == {}


async def test_a_destination_that_is_not_there_has_nothing(web: WebHub) -> None:
    await web.produce("queue/a", "1")
    assert await read(web, "queue/nowhere", "topic/no/+") == []
    planned = await plan(web, "queue/nowhere", parts=3)
    assert (planned["splits"], planned["missing"]) == ([], [])
    assert not (await plan(web, "queue/nowhere"))["found"]


class Answering:
    """A provider that says yes."""

    def __init__(self, web: WebHub) -> None:
        self._web = web

    def request(self, provider: Provider, requests: list[Delivery]) -> None:
        for each in requests:
            answer = Envelope(destination=each.envelope.destination, kind="response", payload=b"y")
            provider.answer(each.id, answer, self._web.server.context.now())

    def cancel(self, provider: Provider, ids: list[int]) -> None:
        raise AssertionError

    def broken(self, error: Exception) -> None:
        raise AssertionError(error)


@pytest.mark.parametrize(
    ("wanted", "methods"),
    [("service/s", ["add", "sub"]), ("service/s/sub", ["sub"]), ("service/+/add", ["add"])],
)
@pytest.mark.parametrize("lake", [QUICK, NO_LAKE])
async def test_calls_are_read_by_service_or_method(
    start_web: StartWeb, wanted: str, methods: list[str], lake: LakeSettings
) -> None:
    web = await start_web(lake=lake)
    now, peer = web.server.context.now(), LedgerPeer("test", "caller")
    web.hub.provide(["service/s"], Answering(web), now, peer=peer)
    calls = [Envelope(destination=f"service/s/{each}", kind="request") for each in ("add", "sub")]
    web.hub.call(calls, now, answered=lambda *_: None, peer=peer)
    await sealed(web) if lake is QUICK else await web.hub.committed()
    rows = await read(web, wanted)
    expected = [(f"service/s/{each}", kind) for kind in ("request", "response") for each in methods]
    assert sorted((row["destination"], row["kind"]) for row in rows) == sorted(expected)
    assert (await plan(web, wanted, limit=1))["behind"] == rows[0]["id"] + 1


# From where to where.


async def test_each_destination_has_its_own_start_and_end(web: WebHub) -> None:
    a = await web.produce("queue/a", "1", "2", "3")
    b = await web.produce("queue/b", "1", "2", "3")
    rows = await read(
        web,
        "queue/a",
        "queue/b",
        starts={"queue/a": a[1], "*": b[1]},
        ends={"queue/a": a[2], "*": -1},
    )
    assert ids(rows) == [a[1], b[1], b[2]]


async def test_latest_is_behind_what_is_there(web: WebHub) -> None:
    await web.produce("queue/a", "1")
    planned = await plan(web, "queue/a", starts={"*": -1})
    assert (planned["first"], planned["found"]) == (planned["behind"], False)
    (new,) = await web.produce("queue/a", "2")
    assert ids(await read(web, "queue/a", starts=planned["starts"])) == [new]


async def test_ids_can_be_bounded_from_both_sides(web: WebHub) -> None:
    a = await web.produce("queue/a", "1", "2", "3", "4")
    assert ids(await read(web, "queue/a", first=a[1], behind=a[3])) == a[1:3]


@pytest.mark.parametrize("lake", [QUICK, NO_LAKE])
async def test_a_time_finds_what_came_since(start_web: StartWeb, lake: LakeSettings) -> None:
    web = await start_web(lake=lake)
    await web.produce("queue/a", "1", "2")
    await web.produce("topic/a", "1", "2")
    middle = time.time_ns() // 1000
    after = await web.produce("queue/a", "3") + await web.produce("topic/a", "3")
    if lake is QUICK:
        await sealed(web)
    wanted = ("queue/a", "topic/a")
    assert ids(await read(web, *wanted, since=middle)) == after
    assert len(await read(web, *wanted, until=middle)) == 4
    assert await read(web, *wanted, since=middle + 3_600_000_000) == []


@pytest.mark.parametrize("lake", [QUICK, NO_LAKE])
async def test_a_limit_counts_what_matches(start_web: StartWeb, lake: LakeSettings) -> None:
    web = await start_web(lake=lake)
    mine: list[int] = []
    for _ in range(5):
        mine += await web.produce("queue/mine", "1", "2")
        mine += await web.produce("topic/mine", "3")
        await web.produce("queue/other", *"12345")
    if lake is QUICK:
        await sealed(web)
    wanted = ("queue/mine", "topic/mine")
    seen: list[int] = []
    starts = {"*": -2}
    while (planned := await plan(web, *wanted, starts=starts, limit=4))["found"]:
        rows = await read_plan(web, planned, wanted)
        assert len(rows) == planned["count"] == min(4, len(mine) - len(seen))
        seen += ids(rows)
        starts = {"*": planned["behind"]}
    assert seen == mine


@pytest.mark.parametrize("lake", [QUICK, NO_LAKE])
async def test_a_range_is_divided_evenly(start_web: StartWeb, lake: LakeSettings) -> None:
    web = await start_web(lake=lake)
    for _ in range(10):
        await web.produce("queue/a", *map(str, range(100)))
        if lake is QUICK:
            await sealed(web)  # no file has messages from before and after the hole
        web.hub.store.reserve(1 << 20)  # as a restart does
    planned = await plan(web, "queue/a", parts=4)
    splits = planned["splits"]
    assert splits[0][0] == planned["first"] and splits[-1][1] == planned["behind"]
    assert all(one[1] == two[0] for one, two in pairwise(splits))
    counts = []
    for first, behind in splits:
        part = planned | {"first": first, "behind": behind}
        counts.append(len(await read_plan(web, part, ("queue/a",))))
    assert sum(counts) == 1000 and min(counts) >= 150


@pytest.mark.parametrize("lake", [QUICK, NO_LAKE])
async def test_large_messages_make_more_splits(
    start_web: StartWeb, lake: LakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "_PART_BYTES", 10_000)
    web = await start_web(lake=lake)
    await web.produce("queue/a", *(["x" * 1000] * 45))
    await web.produce("queue/b", *(["x"] * 45))
    if lake is QUICK:
        await sealed(web)
    assert 4 <= len((await plan(web, "queue/a", parts=1))["splits"]) <= 8


# Lake and store.


async def test_each_message_comes_once_wherever_it_is(
    start_web: StartWeb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_BATCH_ROWS", 2)
    web = await start_web(lake=QUICK)
    in_lake = await web.produce("queue/q", *"abcdefgh")
    await consumed(web, "queue/q")
    in_both = await web.produce("queue/q", "3", "4")
    topic = await web.produce("topic/t", "5")
    await sealed(web)
    assert in_store(web, "queue/q") == in_both
    await web.server.stop()
    web = await start_web(lake=NEVER)
    only_in_store = await web.produce("queue/q", "6", "7")
    kept = web.server.log._feed.kept  # type: ignore[union-attr]
    assert kept is not None and kept.upto < only_in_store[0]
    expected = [*in_lake, *in_both, *topic, *only_in_store]
    assert ids(await read(web, "queue/q", "topic/t")) == expected
    planned = await plan(web, "queue/q", "topic/t")
    for first in expected:
        for behind in (first, first + 1, only_in_store[0], planned["behind"]):
            rows = await read_plan(
                web, planned | {"first": first, "behind": behind}, ("queue/q", "topic/t")
            )
            assert ids(rows) == [each for each in expected if first <= each < behind]


async def test_a_file_that_is_in_place_but_not_known_to_be_is_not_read_twice(
    start_web: StartWeb, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = await start_web(lake=QUICK)
    expected = await web.produce("queue/q", "1", "2")
    await sealed(web)
    feed = web.server.log._feed  # type: ignore[union-attr]
    assert feed is not None
    monkeypatch.setattr(feed, "_is_published", False)
    assert ids(await read(web, "queue/q")) == expected
    monkeypatch.setattr(feed, "_is_published", True)


async def test_files_may_be_joined_while_they_are_read(start_web: StartWeb, tmp_path: Path) -> None:
    web = await start_web(lake=QUICK)
    expected = []
    for _ in range(3):
        expected += await web.produce("queue/q", "1", "2")
        await consumed(web, "queue/q")
    planned = await plan(web, "queue/q")
    assert ids(await read_plan(web, planned, ("queue/q",))) == expected
    done = await asyncio.to_thread(lambda: list(compact(tmp_path / "data/lake", before="9999")))
    assert any(each.table == "messages" and each.files_after == 1 for each in done)
    assert ids(await read_plan(web, planned, ("queue/q",))) == expected


async def test_answers_are_cut_short_and_asked_on(
    start_web: StartWeb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "_STREAM_S", 0.0)
    monkeypatch.setattr(log_module, "_FULL_ROWS", 1)
    web = await start_web(lake=QUICK)
    expected = []
    for _ in range(3):
        expected += await web.produce("queue/q", "1")
        await sealed(web)
    assert ids(await read(web, "queue/q")) == expected


async def test_large_messages_come_in_several_batches(start_web: StartWeb) -> None:
    web = await start_web(lake=NO_LAKE)
    expected = []
    for _ in range(12):
        expected += await web.produce("topic/big", "x" * 1_000_000)
    planned = await plan(web, "topic/big")
    body = {key: planned[key] for key in PLANNED} | {"destinations": ["topic/big"]}
    sizes = await asyncio.to_thread(
        lambda: [len(batch) for batch, _ in address(web).batches("/v1/log/read", body)]
    )
    assert sum(sizes) == 12 and max(sizes) <= 6


@pytest.mark.parametrize("lake", [QUICK, NO_LAKE])
async def test_counting_takes_a_while_at_most(
    start_web: StartWeb, monkeypatch: pytest.MonkeyPatch, lake: LakeSettings
) -> None:
    monkeypatch.setattr(log_module, "_COUNT_S", -1.0)
    monkeypatch.setattr(history, "_BATCH_ROWS", 2)
    monkeypatch.setattr(log_pieces, "_WINDOW", 2)
    web = await start_web(lake=lake)
    await web.produce("queue/other", *"123456")
    (wanted,) = await web.produce("queue/q", "1")
    if lake is QUICK:
        await sealed(web)
    looked, plans = 1, 0
    while not (planned := await plan(web, "queue/q", first=looked, limit=5))["found"]:
        assert planned["behind"] > looked
        looked, plans = planned["behind"], plans + 1
    assert (plans >= 1, planned["behind"]) == (True, wanted + 1)


# What is gone.


async def test_what_retention_took_is_missing(start_web: StartWeb) -> None:
    policy = TopicPolicy(retention_bytes=5_000_000)
    web = await start_web(lake=NO_LAKE, topics={"big": policy})
    produced = []
    for _ in range(14):
        produced += await web.produce("topic/big", "x" * 1_000_000)
    planned = await plan(web, "topic/big", starts={"*": produced[0]})
    web.hub.topic("topic/big").retain(web.server.context.now())
    await web.hub.committed()
    left = in_store(web, "topic/big")
    assert 0 < len(left) < 14
    again = await plan(web, "topic/big", starts=planned["starts"])
    gone = {"destination": "topic/big", "first": produced[0], "last": left[0] - 1}
    assert again["missing"] == [gone]
    with pytest.raises(RequestFailed) as caught:
        await read_plan(web, planned, ("topic/big",))
    assert (caught.value.code, "topic/big" in caught.value.description) == ("gone", True)
    assert ids(await read_plan(web, planned, ("topic/big",), strict=False)) == left
    earliest = await plan(web, "topic/big")
    assert (earliest["missing"], earliest["starts"]["topic/big"]) == ([], left[0])
    assert ids(await read(web, "topic/big")) == left


async def test_a_queue_without_a_lake_has_what_is_not_consumed(start_web: StartWeb) -> None:
    web = await start_web(lake=NO_LAKE)
    first = await web.produce("queue/q", "1", "2")
    assert ids(await read(web, "queue/q", starts={"*": 1})) == first
    await consumed(web, "queue/q")
    second = await web.produce("queue/q", "3")
    planned = await plan(web, "queue/q", starts={"*": 1})
    assert planned["missing"] == [{"destination": "queue/q", "first": 1, "last": first[-1]}]
    assert ids(await read(web, "queue/q")) == second


async def test_what_the_lake_let_go_of_comes_from_the_store_if_it_is_there(
    start_web: StartWeb, tmp_path: Path
) -> None:
    web = await start_web(lake=QUICK)
    (lost,) = await web.produce("queue/consumed", "1")
    kept = await web.produce("topic/kept", "1") + await web.produce("queue/waiting", "1")
    await consumed(web, "queue/consumed")
    for file in find(tmp_path / "data/lake", ("messages",)):
        file.path.unlink()
    (later,) = await web.produce("queue/consumed", "2")
    await sealed(web)
    wanted = ("queue/consumed", "queue/waiting", "topic/kept")
    planned = await plan(web, *wanted, starts={"*": 1})
    assert [each["destination"] for each in planned["missing"]] == ["queue/consumed"]
    assert planned["missing"][0]["last"] >= lost
    assert ids(await read(web, *wanted)) == [*kept, later]


@pytest.mark.parametrize("before", [QUICK, NO_LAKE])
async def test_a_lake_that_was_off_for_a_while_has_a_gap(
    start_web: StartWeb, before: LakeSettings
) -> None:
    web = await start_web(lake=before)
    expected = await web.produce("topic/t", "1")
    await web.server.stop()
    web = await start_web(lake=NO_LAKE)
    expected += await web.produce("topic/t", "2")
    assert ids(await read(web, "topic/t")) == expected
    await web.server.stop()
    web = await start_web(lake=QUICK)
    expected += await web.produce("topic/t", "3")
    await sealed(web)
    assert ids(await read(web, "topic/t")) == expected
    assert (await plan(web, "topic/t", starts={"*": 1}))["missing"] == []


# Who may, and what is wrong.

ROOT = User(name="root", token="the-secret-of-root", administer=True)
ANNA = User(name="anna", token="a-secret-of-anna", consume=("queue/a", "topic/t/#"))


async def code_of(asking: Any) -> str:
    with pytest.raises(RequestFailed) as caught:
        await asking
    return caught.value.code


async def test_who_may_consume_may_read(start_web: StartWeb) -> None:
    web = await start_web(users=(ROOT, ANNA))
    assert await code_of(plan(web, "queue/a")) == "unauthenticated"
    assert await code_of(plan(web, "queue/b", token="a-secret-of-anna")) == "forbidden"
    assert await code_of(plan(web, "topic/#", token="a-secret-of-anna")) == "forbidden"
    await plan(web, "queue/a", "topic/t/+", token="a-secret-of-anna")
    await plan(web, "queue/b", "topic/#", token="the-secret-of-root")
    planned = await plan(web, "queue/b", token="the-secret-of-root")
    body = {key: planned[key] for key in PLANNED} | {"destinations": ["queue/b"], "behind": 9}
    where = address(web, "a-secret-of-anna")
    assert await code_of(asyncio.to_thread(fetch, where, body)) == "forbidden"


async def test_only_what_may_be_consumed_is_named(start_web: StartWeb) -> None:
    web = await start_web(users=(ROOT, ANNA))
    for name in ("queue/a", "queue/b", "topic/t/x"):
        web.hub.target(name)
    named = (await web.get("/v1/log", token="a-secret-of-anna"))["destinations"]
    assert named == ["queue/a", "topic/t/x"]
    assert len((await web.get("/v1/log", token="the-secret-of-root"))["destinations"]) == 3


async def test_names_come_in_pages(web: WebHub) -> None:
    names = ["queue/a", "queue/a/dead", "queue/b", "topic/a", "topic/b"]
    for name in reversed(names):
        web.hub.target(name)
    found: list[str] = []
    cursor = ""
    for _ in range(3):
        page = await web.get("/v1/log", limit=2, cursor=cursor)
        found += page["destinations"]
        cursor = page["next"]
    assert (found, cursor) == (names, "")
    assert (await web.get("/v1/log", names="false"))["destinations"] == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"node": "another"}, "gone"),
        ({"columns": ["nothing"]}, "invalid_request"),
        ({"destinations": ["nowhere"]}, "invalid_request"),
        ({"first": "x"}, "invalid_request"),
        ({"behind": 1 << 40}, "invalid_request"),
    ],
)
async def test_what_can_not_be_read_is_told(
    web: WebHub, changes: dict[str, Any], code: str
) -> None:
    body = {"node": web.hub.node, "destinations": ["queue/a"], "first": 1, "behind": 2} | changes
    asking = asyncio.to_thread(lambda: list(address(web).batches("/v1/log/read", body)))
    assert await code_of(asking) == code


async def test_a_damaged_file_is_told_and_not_passed_over(
    start_web: StartWeb, tmp_path: Path
) -> None:
    web = await start_web(lake=QUICK)
    await web.produce("queue/q", "1")
    await sealed(web)
    for file in find(tmp_path / "data/lake", ("messages",)):
        file.path.write_bytes(b"PAR1 what is this PAR1")
    assert await code_of(read(web, "queue/q")) == "lake_damaged"


async def test_only_administrators_get_the_names_of_files(
    start_web: StartWeb, tmp_path: Path
) -> None:
    both = msgspec.structs.replace(ANNA, produce=("queue/a",), observe=True)
    web = await start_web(lake=QUICK, users=(ROOT, both))
    message = {"destination": "queue/a", "text": "1"}
    await web.post("/v1/messages", {"messages": [message]}, token=ANNA.token)
    await sealed(web)
    planned = await plan(web, "queue/a", token=ANNA.token or "")
    for file in find(tmp_path / "data/lake", ("messages",)):
        file.path.write_bytes(b"PAR1 what is this PAR1")
    body = {key: planned[key] for key in PLANNED} | {"destinations": ["queue/a"]}
    shown = {}
    for user in (ROOT, ANNA):
        hub = address(web, user.token or "")
        with pytest.raises(RequestFailed) as caught:
            await asyncio.to_thread(fetch, hub, body)
        assert caught.value.code == "lake_damaged"
        disk = await web.get("/v1/disk", token=user.token)
        lake = await web.get("/v1/lake", token=user.token)
        report = await web.get("/v1/report", token=user.token)
        paths = [disk["store"]["path"], disk["lake"]["path"], lake["path"], report["path"]]
        shown[user.name] = [caught.value.description, *paths]
    assert all(str(tmp_path) in each for each in shown["root"])
    assert not any(str(tmp_path) in each for each in shown["anna"])


async def test_a_reader_that_leaves_makes_room_for_others(
    start_web: StartWeb, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = await start_web(lake=NO_LAKE)
    for _ in range(12):
        await web.produce("topic/big", "x" * 1_000_000)
    planned = await plan(web, "topic/big")
    assert web.server.log is not None
    monkeypatch.setattr(web.server.log.slots._slots, "_all", asyncio.Semaphore(1))
    body = {key: planned[key] for key in PLANNED} | {"destinations": ["topic/big"]}

    def begin() -> None:
        batches = address(web).batches("/v1/log/read", body)
        next(batches)
        del batches  # and with it the connection

    for _ in range(3):
        await asyncio.to_thread(begin)
    assert len(await read_plan(web, planned, ("topic/big",))) == 12


async def test_who_may_consume_nothing_does_not_see_how_much_others_send(
    start_web: StartWeb,
) -> None:
    blind = User(name="blind", token="a-secret-of-blind", produce=("queue/a",))
    watch = User(name="watch", token="a-secret-of-watch", observe=True)
    web = await start_web(users=(ROOT, ANNA, blind, watch))
    assert await code_of(web.get("/v1/log", token="a-secret-of-blind")) == "forbidden"
    for token in ("the-secret-of-root", "a-secret-of-anna", "a-secret-of-watch"):
        assert (await web.get("/v1/log", token=token))["latest"] >= 0
