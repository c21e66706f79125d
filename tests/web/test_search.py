"""Search and trace: a message is found wherever the hub has it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from crosswire.access import User
from crosswire.client.native.emp import EmpClient
from crosswire.config import LakeSettings, TapSettings
from crosswire.errors import RequestFailed
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.policies import QueuePolicy, Retry
from tests.web.conftest import StartWeb, Taker, WebHub, bury

ROOT = User(name="root", token="the-secret-of-root", administer=True)
WATCH = User(name="watch", token="the-secret-of-watch", observe=True)
ANNA = User(name="anna", token="the-secret-of-anna", produce=("queue/a",), consume=("queue/a",))

PLACES = ("store", "lake", "no lake")


@pytest.fixture(params=PLACES)
async def web(start_web: StartWeb, request: pytest.FixtureRequest) -> WebHub:
    """A hub whose messages are in the store, or in the lake as soon as `settled` returns."""
    lake = {
        "store": LakeSettings(seal_s=3600.0),
        "lake": LakeSettings(seal_s=0.01),
        "no lake": LakeSettings(messages=False, ledger=False),
    }[request.param]
    policy = QueuePolicy(retry=Retry(max_attempts=1))
    web = await start_web(lake=lake, queues={"q": policy})
    web.is_sealing = request.param == "lake"  # type: ignore[attr-defined]
    return web


async def settled(web: WebHub) -> None:
    """What was sent so far is where the test wants it."""
    await web.hub.committed()
    while web.is_sealing and web.server.sealed()[0] < web.hub.committed_id:  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)
        await web.hub.committed()


async def ids_of(web: WebHub, **query: Any) -> list[int]:
    found: list[int] = []
    cursor = ""
    while True:
        page = await web.get("/v1/messages", cursor=cursor, **query)
        found += [each["message"]["id"] for each in page["messages"]]
        cursor = page["next"]
        if not cursor:
            return found


async def test_messages_of_a_destination_newest_first(web: WebHub) -> None:
    first = await web.produce("queue/a", *"123")
    other = await web.produce("queue/b", *"45")
    topic = await web.produce("topic/t", "6")
    await settled(web)
    assert await ids_of(web, destination="queue/a") == first[::-1]
    assert await ids_of(web, destination="queue/a", limit=2) == first[::-1]
    assert await ids_of(web) == [*topic, *other[::-1], *first[::-1]]
    assert await ids_of(web, destination="topic/+") == topic
    assert await ids_of(web, destination="queue/none") == []


async def test_messages_oldest_first(web: WebHub) -> None:
    first = await web.produce("queue/a", *"123", properties={"n": 1})
    other = await web.produce("queue/b", *"45")
    between = datetime.now(UTC).isoformat()
    later = await web.produce("queue/a", *"678", properties={"n": 1})
    await settled(web)
    for limit in (1, 2, 100):
        asked = {"sort": "oldest", "limit": limit}
        assert await ids_of(web, destination="queue/a", **asked) == [*first, *later]
        assert await ids_of(web, **asked) == [*first, *other, *later]
        assert await ids_of(web, property="n = 1", **asked) == [*first, *later]
        assert await ids_of(web, since=between, **asked) == later
        assert await ids_of(web, until=between, **asked) == [*first, *other]
        assert await ids_of(web, destination="queue/a", until=between, **asked) == first
        assert await ids_of(web, outcome="settled", **asked) == []


async def test_large_messages_oldest_first(web: WebHub) -> None:
    """A response has a limit of bytes: the next page goes on where it was reached."""
    text = "x" * 900_000
    sent = []
    for _ in range(20):
        sent += await web.produce("queue/a", text)
    await settled(web)
    for sort, expected in (("oldest", sent), ("newest", sent[::-1])):
        assert await ids_of(web, destination="queue/a", sort=sort) == expected


async def test_what_messages_have(web: WebHub) -> None:
    plain, marked = (
        await web.produce("queue/a", "Green Tea", properties={"n": 1}),
        await web.produce("queue/a", "coffee", properties={"n": 7, "name": "acme"}, key="K-9"),
    )
    await settled(web)
    for destination in ("", "queue/a"):
        assert await ids_of(web, destination=destination, text="green") == plain
        assert await ids_of(web, destination=destination, text="k-9") == marked
        assert await ids_of(web, destination=destination, text="name=acme") == marked
        assert await ids_of(web, destination=destination, property="n>N1") == marked
        assert await ids_of(web, destination=destination, text="nowhere") == []


async def test_times(web: WebHub) -> None:
    first = await web.produce("queue/a", "1")
    between = datetime.now(UTC)
    second = await web.produce("queue/a", "2")
    await settled(web)
    for destination in ("", "queue/a"):
        asked = {"destination": destination}
        assert await ids_of(web, since=between.isoformat(), **asked) == second
        assert await ids_of(web, until=between.isoformat(), **asked) == first
        later = (between + timedelta(hours=1)).isoformat()
        assert await ids_of(web, since=later, **asked) == []
        assert await ids_of(web, until=later, **asked) == [*second, *first]


async def test_outcomes(web: WebHub) -> None:
    await bury(web, "dies")
    held, waits = await web.produce("queue/h", "1", "2")
    Taker(web, "queue/h", does="hold", window=1)
    done = await web.produce("queue/s", "3")
    Taker(web, "queue/s", does="settle")
    await web.hub.committed()
    topic = await web.produce("topic/t", "4")
    await settled(web)
    page = (await web.get("/v1/messages"))["messages"]
    outcomes = {each["message"]["id"]: each["outcome"] for each in page}
    assert (outcomes[held], outcomes[waits]) == ("held", "waiting")
    assert (outcomes[done[0]], outcomes[topic[0]]) == ("settled", "published")
    assert await ids_of(web, outcome="dead", destination="queue/q") == [1]
    assert await ids_of(web, outcome="held") == [held]
    assert await ids_of(web, outcome="failed") == []


async def test_many_destinations_and_pages(web: WebHub) -> None:
    sent = []
    for number in range(70):
        sent += await web.produce(f"queue/q{number}", "x", "y")
    await settled(web)
    assert await ids_of(web, limit=7) == sent[::-1]
    assert await ids_of(web, limit=7, sort="oldest") == sent


async def test_a_trace_is_found_when_memory_has_forgotten(web: WebHub) -> None:
    (identifier,) = await web.produce("queue/a", "tea")
    Taker(web, "queue/a", does="settle")
    await settled(web)
    await settled(web)
    web.hub.ledger.recent_rows = 10
    await web.produce("queue/b", *["x"] * 30)
    await web.produce("queue/b", *["x"] * 30)
    await settled(web)
    assert not web.hub.trace(identifier), "it is in memory"
    if web.is_sealing:  # type: ignore[attr-defined]
        web.hub._forget_rows()
        web.hub.queue("queue/a").reclaim()
        web.hub.commits.request()
        await web.hub.commits.flush()
    traced = await web.get(f"/v1/messages/{identifier}")
    assert [each["step"] for each in traced["steps"]] == ["accepted", "delivered", "settled"]
    assert traced["message"]["text"] == "tea"
    assert traced["is_complete"]
    if web.is_sealing:  # type: ignore[attr-defined]
        assert traced["found_in"] == "lake"


async def test_a_trace_leads_to_the_dead_letter_and_its_replay(web: WebHub) -> None:
    (letter,) = await bury(web, "dies")
    replay = await web.post("/v1/dead/replays", {"queue": "q", "all": True})
    assert replay["replayed"] == 1
    await settled(web)
    await settled(web)

    async def links(identifier: int) -> list[tuple[str, int]]:
        found = (await web.get(f"/v1/messages/{identifier}"))["links"]
        return [(each["relation"], each["id"]) for each in found]

    (again,) = [each for each in await ids_of(web, destination="queue/q") if each != 1]
    assert await links(1) == [("dead_letter", letter)]
    assert await links(letter) == [("origin", 1), ("sent_again_as", again)]
    assert await links(again) == [("sent_again_from", letter)]


async def test_large_payloads_are_found_in_parts(
    start_web: StartWeb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosswire.web.search._MOST_BYTES", 100_000)
    web = await start_web(lake=LakeSettings(seal_s=0.01))
    web.is_sealing = True  # type: ignore[attr-defined]
    sent = []
    for _ in range(6):
        sent += await web.produce("queue/a", "x" * 40_000)
    await settled(web)
    page = await web.get("/v1/messages", destination="queue/a")
    assert all(each["message"]["truncated"] for each in page["messages"])
    assert await ids_of(web, destination="queue/a") == sent[::-1]


async def test_who_may_find_what(start_web: StartWeb) -> None:
    web = await start_web(users=(ROOT, WATCH, ANNA))
    body = {"messages": [{"destination": "queue/a", "text": "secret", "properties": {"n": 1}}]}
    await web.post("/v1/messages", body, token=ANNA.token)
    peer = LedgerPeer("test", "t", "root")
    web.hub.target("queue/b", peer)
    (mine,) = (await web.get("/v1/messages", token=ANNA.token))["messages"]
    assert mine["message"]["text"] == "secret"
    (seen,) = (await web.get("/v1/messages", token=WATCH.token))["messages"]
    assert seen["message"]["hidden"] and "text" not in seen["message"]
    for content in ({"text": "secret"}, {"property": "n=N1"}):
        found = await web.get("/v1/messages", token=WATCH.token, **content)
        assert found["messages"] == [], "an observer could guess contents"
    with pytest.raises(RequestFailed) as caught:
        await web.get("/v1/messages", token=ANNA.token, destination="queue/b")
    assert caught.value.code == "forbidden"


@pytest.mark.parametrize("wrong", [{"destination": "x"}, {"property": ">"}, {"since": "yesterday"}])
async def test_questions_that_are_wrong(start_web: StartWeb, wrong: dict[str, str]) -> None:
    web = await start_web()
    with pytest.raises(RequestFailed) as caught:
        await web.get("/v1/messages", **wrong)
    assert caught.value.code == "invalid_request"


async def test_a_trace_has_the_frames_that_the_tap_recorded(start_web: StartWeb) -> None:
    lake = LakeSettings(seal_s=0.05, tap=TapSettings(listeners=("emp",)))
    web = await start_web(lake=lake, listen={"emp": "127.0.0.1:0"})
    port = web.server.listeners["emp"].address.port
    async with EmpClient("127.0.0.1", port) as client:
        await client.request("$publish", {"destination": "queue/x", "text": "noise"})
        answer = await client.request("$publish", {"destination": "queue/a", "text": "green tea"})
        async with asyncio.timeout(20):
            while not (traced := await web.get(f"/v1/messages/{answer['id']}"))["frames"]:
                await asyncio.sleep(0.05)
    (frame,) = traced["frames"]
    assert (frame["step"], frame["frame"], frame["direction"]) == ("accepted", "request", "forward")
    assert frame["has_payload"]
    data = bytes.fromhex(frame["hex"])
    assert len(data) == frame["length"] and b"queue/a" in data and b"noise" not in data
    assert frame["offset"] > 0
