"""Time series over HTTP."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from crosswire.access import User
from crosswire.errors import RequestFailed
from crosswire.hub.ledger import LedgerPeer
from crosswire.server import statistics
from tests.web.conftest import StartWeb, Taker, WebHub

WATCH = User(name="watch", token="the-secret-of-watch", observe=True)
ANNA = User(name="anna", token="the-secret-of-anna", produce=("queue/a",), consume=("queue/a",))


def sample(web: WebHub, after_s: float = 1.0) -> None:
    taken = web.server.statistics
    taken.sample(taken._sampled_at + after_s)


def last(points: list[Any]) -> Any:
    return [each for each in points if each is not None][-1]


@pytest.fixture
async def web(start_web: StartWeb) -> WebHub:
    """One that takes samples only when a test does."""
    web = await start_web()
    web.server.statistics.stop()
    # Some time ago: what is sampled later is before now.
    web.server.statistics._sampled_at -= 100
    return web


async def test_the_hub_as_a_whole(web: WebHub) -> None:
    sample(web)
    await web.produce("queue/a", *"123")
    web.server.statistics._is_stopped = False
    web.server.statistics._round()
    web.server.statistics.stop()
    sample(web)
    answer = await web.get("/v1/stats")
    series = answer["series"]
    assert answer["step_s"] == 1
    assert last(series["accepted_per_s"]) == pytest.approx(3.0)
    assert last(series["messages"]) == 3
    assert last(series["commit_p99_s"]) > 0
    age = datetime.now(UTC) - datetime.fromisoformat(answer["first"])
    assert timedelta(minutes=4) < age < timedelta(minutes=6)


async def test_a_queue_is_measured_from_the_first_request_on(web: WebHub) -> None:
    await web.produce("queue/a", *"123")
    first = await web.get("/v1/stats", destination="queue/a")
    assert set(first["series"]["length"]) == {None}
    sample(web, 0.1)
    await web.produce("queue/a", "4")
    sample(web, 1.0)
    series = (await web.get("/v1/stats", destination="queue/a"))["series"]
    assert last(series["length"]) == 4
    assert last(series["accepted_per_s"]) == pytest.approx(1.0)


async def test_the_busiest_are_measured_unasked(web: WebHub) -> None:
    names = [f"queue/q{number}" for number in range(statistics._BUSIEST + 5)]
    for name in names:
        await web.produce(name, "x")
    await web.produce("queue/loud", *["x"] * 50)
    taken = web.server.statistics
    list(taken._choose_busiest(web.server.context.now()))
    assert len(taken._groups) == statistics._BUSIEST and "queue/loud" in taken._groups
    rows = (await web.get("/v1/stats/busiest", kind="queue", limit=2))["rows"]
    assert rows[0]["name"] == "loud" and rows[0]["rates"]["accepted"] > 0


async def test_a_sample_goes_on_in_the_next_turn_when_one_is_over(
    start_web: StartWeb, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = await start_web()
    taken, turns = web.server.statistics, web.server.hub.turns
    for number in range(20):
        await web.produce(f"queue/q{number}", "x")
    list(taken._choose_busiest(web.server.context.now()))
    sampled: list[int] = []
    sample_name = taken._sample_name

    def sample_and_count(*args: Any) -> Any:
        sampled[-1] += 1
        return sample_name(*args)

    monkeypatch.setattr(taken, "_sample_name", sample_and_count)
    monkeypatch.setattr(turns, "is_over", lambda: sum(sampled) < 20)
    continue_sample = taken._sample_on

    def continue_and_count() -> None:
        sampled.append(0)
        continue_sample()

    monkeypatch.setattr(taken, "_sample_on", continue_and_count)
    taken._tick()
    async with asyncio.timeout(10.0):
        while sum(sampled) < 20:
            await asyncio.sleep(0)
    assert max(sampled) == 1


async def test_series_of_names_are_limited(web: WebHub) -> None:
    for number in range(statistics._ASKED + 5):
        await web.produce(f"queue/q{number}", "x")
        await web.get("/v1/stats", destination=f"queue/q{number}")
    assert len(web.server.statistics._groups) <= statistics._ASKED


async def test_steps(web: WebHub) -> None:
    for since, step_s, points in ((200, 1, 201), (3600, 10, 361), (90_000, 60, 1441)):
        asked = datetime.now(UTC) - timedelta(seconds=since)
        answer = await web.get("/v1/stats", since=asked.isoformat())
        assert answer["step_s"] == step_s
        assert abs(len(answer["series"]["messages"]) - points) <= 1
    answer = await web.get("/v1/stats", step_s=10)
    assert abs(len(answer["series"]["messages"]) - 31) <= 1


async def test_a_subscription_and_a_service(web: WebHub) -> None:
    taker = Taker(web, "queue/other", does="hold")
    peer = LedgerPeer("test", "c")
    web.hub.subscribe("topic/t", taker, web.server.context.now(), peer=peer, name="s.1")
    await web.get("/v1/stats", subscription="s.1")
    await web.produce("topic/t", "1", "2")
    sample(web)
    series = (await web.get("/v1/stats", subscription="s.1"))["series"]
    assert (last(series["length"]), last(series["consumers"])) == (2, 1)
    assert set((await web.get("/v1/stats", destination="service/x"))["series"]) == {
        "calls_per_s",
        "errors_per_s",
        "waiting",
        "p50_s",
        "p99_s",
    }


async def test_who_may_see_which(start_web: StartWeb) -> None:
    web = await start_web(users=(WATCH, ANNA))

    async def code(token: str | None, **query: str) -> str:
        try:
            await web.get("/v1/stats", token=token, **query)
        except RequestFailed as error:
            return error.code
        return ""

    web.hub.target("queue/a")
    assert await code(WATCH.token) == ""
    assert await code(ANNA.token) == "forbidden"
    assert await code(ANNA.token, destination="queue/a") == ""
    assert await code(ANNA.token, destination="queue/b") == "forbidden"
    assert await code(WATCH.token, destination="queue/b") == "not_found"
    assert await code(ANNA.token, subscription="s", owner="watch") == "not_found"
    assert await code(WATCH.token, subscription="s", destination="queue/a") == "invalid_request"
