"""Names in order, followed as destinations are created and removed, and pages of them."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from crosswire.web.long_work import LongWork
from crosswire.web.name_index import NameKind, SortedNames
from crosswire.web.paging import ListQuery, page_of_names
from tests.web.conftest import StartWeb, WebHub


def all_of(names: SortedNames, most: int = 7) -> list[str]:
    found: list[str] = []
    while some := names.after(found[-1] if found else "", most):
        found += some
    return found


def test_names_stay_in_order() -> None:
    random, names, expected = Random(1), SortedNames(), set[str]()
    for _ in range(20_000):
        name = f"queue/{random.randrange(5_000)}"
        if random.random() < 0.7:
            names.add(name)
            expected.add(name)
        else:
            names.discard(name)
            expected.discard(name)
    assert all_of(names) == sorted(expected)
    assert len(names) == len(expected)
    for name in expected:
        names.discard(name)
    assert (all_of(names), len(names)) == ([], 0)


def test_names_after_one_that_is_gone() -> None:
    names = SortedNames()
    for name in ("a", "c", "e"):
        names.add(name)
    assert names.after("b", 9) == ["c", "e"]
    assert names.after("c", 1) == ["e"]
    assert names.after("e", 9) == []


async def indexed(web: WebHub, work: LongWork, kind: NameKind) -> list[str]:
    async with work.turn() as turn:
        return all_of(await work.index.names(web.hub, kind, turn))


async def test_the_index_follows_what_is_created_and_removed(web: WebHub) -> None:
    work = LongWork()
    for name in ("queue/b", "queue/a/dead", "topic/t", "queue/a"):
        web.hub.target(name)
    assert await indexed(web, work, "queue") == ["queue/a", "queue/b"]
    assert await indexed(web, work, "dead") == ["queue/a/dead"]
    assert await indexed(web, work, "topic") == ["topic/t"]
    await web.hub.committed()
    web.hub.remove("queue/a", web.server.context.now())
    # As many as before, so that only the new one shows that something is missing.
    web.hub.target("queue/c")
    assert await indexed(web, work, "queue") == ["queue/b", "queue/c"]
    web.hub.target("queue/a")
    assert await indexed(web, work, "queue") == ["queue/a", "queue/b", "queue/c"]


async def test_requests_that_index_at_the_same_time_see_the_same(web: WebHub) -> None:
    work = LongWork()
    for number in range(3_000):
        web.hub.target(f"queue/{number}")
    found = await asyncio.gather(*[indexed(web, work, "queue") for _ in range(4)])
    assert all(each == sorted(f"queue/{number}" for number in range(3_000)) for each in found)


@pytest.mark.parametrize("limit", [1, 3, 400, 999])
async def test_pages_have_each_name_once(limit: int) -> None:
    work, random = LongWork(), Random(limit)
    names = SortedNames()
    values = {f"queue/{number}": random.randrange(20) for number in range(1_000)}
    for name in values:
        names.add(name)

    async def pages(*, by_value: bool) -> list[str]:
        found, cursor = list[str](), ""
        async with work.turn() as turn:
            while True:
                page, cursor = await page_of_names(
                    names,
                    ListQuery(limit=limit, cursor=cursor),
                    turn,
                    prefix="queue/",
                    keep=lambda some: [each for each in some if not each.endswith("7")],
                    values=(lambda some: [values[each] for each in some]) if by_value else None,
                )
                found += page
                if not cursor:
                    return found

    kept = sorted(name for name in values if not name.endswith("7"))
    assert await pages(by_value=False) == kept
    assert await pages(by_value=True) == sorted(kept, key=lambda name: (-values[name], name))


async def test_queues_are_listed_by_age_without_being_opened(start_web: StartWeb) -> None:
    web = await start_web()
    # More than are opened one by one.
    names = [f"queue/q{number}" for number in range(2_500)]
    await web.post(
        "/v1/messages", {"messages": [{"destination": name, "text": "x"} for name in names]}
    )
    await web.produce("queue/old", "first", "second")
    first = web.hub.queue("queue/old").oldest_us()
    assert first
    await web.server.stop()
    again = await start_web()
    queues = (await again.get("/v1/queues", sort="length", limit=2))["queues"]
    assert [(each["name"], each["length"]) for each in queues] == [("old", 2), ("q0", 1)]
    queues = (await again.get("/v1/queues", sort="age", state="backlog", limit=3))["queues"]
    assert queues[0]["name"] == "q0"
    assert [each["oldest"] for each in queues] == sorted(each["oldest"] for each in queues)
    # Those that were shown, and no others.
    assert len(again.hub.opened_queues()) <= 5
    assert again.hub.oldest_times_us(["queue/old", "queue/q7", "queue/none"])[0] == first
