"""Consumers and providers: a few with what they belong to, all in lists of their own."""

from __future__ import annotations

from typing import Any

import pytest

from crosswire.access import User
from crosswire.client.native.emp import EmpClient
from crosswire.errors import RequestFailed
from crosswire.hub.ledger import LedgerPeer
from tests.web.conftest import StartWeb, Taker, WebHub

ROOT = User(name="root", token="the-secret-of-root", administer=True)
ANNA = User(
    name="anna", token="the-secret-of-anna", consume=("queue/q", "topic/t"), call=("service/s0",)
)
MANY = 45
SHOWN = 20


class Consumers:
    """Consumers of `queue/q`, and others by the name `s` of topic `t`."""

    def __init__(self, web: WebHub) -> None:
        self.web = web
        self.taker = Taker(web, "queue/other", does="hold")

    def consume(self, connection: str, principal: str = "", window: int = 1) -> None:
        """One more of `queue/q`."""
        now = self.web.server.context.now()
        peer = LedgerPeer("test", connection, principal)
        self.web.hub.consume("queue/q", self.taker, now, peer=peer, window=window)

    def subscribe(self, connection: str, owner: str) -> None:
        """One more of the named subscription."""
        now = self.web.server.context.now()
        peer = LedgerPeer("test", connection, owner)
        self.web.hub.subscribe("topic/t", self.taker, now, peer=peer, name="s", window=1)


async def paged(web: WebHub, path: str, key: str, **query: object) -> list[dict[str, Any]]:
    """All rows of a list, seven at a time."""
    found: list[dict[str, Any]] = []
    cursor = ""
    while True:
        page = await web.get(path, limit=7, cursor=cursor, **query)
        assert len(page[key]) <= 7
        found += page[key]
        cursor = page["next"]
        if not cursor:
            return found


async def code_of(asked: Any) -> str:
    with pytest.raises(RequestFailed) as caught:
        await asked
    return caught.value.code


async def test_many_consumers_of_a_queue_are_listed_in_pages(web: WebHub) -> None:
    consumers = Consumers(web)
    for number in range(MANY):
        consumers.consume(f"c{number:03}", window=2 if number == 30 else 1)
    # Twice by one connection: no page may skip one of them.
    consumers.consume("c006")
    await web.produce("queue/q", *(str(number) for number in range(MANY + 2)))
    detail = await web.get("/v1/queues/q")
    assert (len(detail["consumers"]), detail["consumer_count"]) == (SHOWN, MANY + 1)
    rows = await paged(web, "/v1/consumers", "consumers", queue="q")
    expected = sorted([*(f"c{number:03}" for number in range(MANY)), "c006"])
    assert [row["connection"] for row in rows] == expected
    assert {row["destination"] for row in rows} == {"queue/q"}
    first, *_ = await paged(web, "/v1/consumers", "consumers", queue="q", sort="held")
    assert (first["connection"], first["held"], first["free"]) == ("c030", 2, 0)


async def test_who_holds_a_message_is_shown_however_many_consume(web: WebHub) -> None:
    consumers = Consumers(web)
    for number in range(MANY):
        consumers.consume(f"c{number:03}")
    await web.produce("queue/q", *"abc")
    shown = (await web.get("/v1/queues/q", messages=3))["messages"]
    assert len({each["held_by"] for each in shown}) == 3


async def test_users_see_their_own_consumers(start_web: StartWeb) -> None:
    web = await start_web(users=(ROOT, ANNA))
    consumers = Consumers(web)
    await web.post("/v1/queues", {"name": "q"}, token=ROOT.token)
    consumers.consume("mine", "anna")
    consumers.consume("other", "bert")
    consumers.subscribe("sub", "anna")
    for token, expected in ((ANNA.token, ["mine"]), (ROOT.token, ["mine", "other"])):
        rows = (await web.get("/v1/consumers", token=token, queue="q"))["consumers"]
        assert [row["connection"] for row in rows] == expected
        detail = await web.get("/v1/queues/q", token=token)
        assert detail["consumer_count"] == len(expected)
    asked = {"subscription": "s", "owner": "anna"}
    (row,) = (await web.get("/v1/consumers", token=ROOT.token, **asked))["consumers"]
    assert (row["connection"], row["destination"]) == ("sub", "topic/t")
    (row,) = (await web.get("/v1/consumers", token=ANNA.token, subscription="s"))["consumers"]
    assert row["principal"] == "anna"
    hidden = web.get("/v1/consumers", token=ANNA.token, subscription="s", owner="bert")
    assert await code_of(hidden) == "not_found"
    assert await code_of(web.get("/v1/consumers", token=ANNA.token, queue="x")) == "forbidden"
    assert await code_of(web.get("/v1/providers", token=ANNA.token, service="x")) == "forbidden"


async def test_it_must_be_clear_whose_consumers_are_meant(web: WebHub) -> None:
    assert await code_of(web.get("/v1/consumers")) == "invalid_request"
    assert await code_of(web.get("/v1/consumers", queue="q", connection="c")) == "invalid_request"
    for missing in ({"queue": "none"}, {"subscription": "none"}, {"connection": "none"}):
        assert await code_of(web.get("/v1/consumers", **missing)) == "not_found", missing
    assert await code_of(web.get("/v1/providers", service="none")) == "not_found"


async def test_what_a_connection_consumes_and_serves_is_listed_in_pages(
    start_web: StartWeb,
) -> None:
    web = await start_web(listen={"emp": "127.0.0.1:0"})
    port = web.server.listeners["emp"].address.port

    async def answer(_data: Any) -> None:
        return None

    names = [f"s{number}" for number in range(MANY)]
    async with EmpClient("127.0.0.1", port, handlers={"s0": answer}) as client:
        for number in range(MANY):
            await client.request("$subscribe", {"destination": f"queue/q{number}"})
        await client.request("$serve", {"services": names})
        (row,) = (await web.get("/v1/connections"))["connections"]
        assert (len(row["consumes"]), row["consumer_count"]) == (SHOWN, MANY)
        assert (len(row["serves"]), row["service_count"]) == (SHOWN, MANY)
        consumed = await paged(web, "/v1/consumers", "consumers", connection=row["id"])
        assert {each["destination"] for each in consumed} == {
            f"queue/q{number}" for number in range(MANY)
        }
        served = await paged(web, "/v1/services", "services", connection=row["id"])
        assert sorted(each["name"] for each in served) == sorted(names)
        (provider,) = (await web.get("/v1/providers", service="s7"))["providers"]
        assert (provider["connection"], provider["protocol"]) == (row["id"], "emp")
