"""The log shows nobody what he may not consume, however he asks for it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from crosswire.access import User, subscription_dead_letters
from crosswire.envelope import Envelope
from crosswire.hub.attachment import Attachment, Delivery, Notice
from crosswire.hub.ledger import LedgerPeer
from tests.web.conftest import StartWeb, WebHub
from tests.web.test_live import watching
from tests.web.test_log import QUICK, Answering, address, fetch, plan, sealed, until
from tests.web.test_log_files import files

ROOT = User(name="root", token="the-secret-of-root", administer=True, produce=("#",))
BOB = User(name="bob", token="the-secret-of-bob", consume=("topic/secret",))
WIDE = User(
    name="wide", token="the-secret-of-wide", consume=("queue/#", "service/s", "service/s/add")
)
LETTERS = subscription_dead_letters("bob", "s")


class Refusing:
    """A subscriber that refuses everything."""

    def __init__(self, web: WebHub) -> None:
        self._web = web

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        ids = [each.id for each in deliveries]
        attachment.refuse(ids, self._web.server.context.now(), cause="no", final=True)

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        """Nothing is of interest."""

    def broken(self, error: Exception) -> None:
        raise AssertionError(error)


async def buried(web: WebHub) -> None:
    """A message of a topic is among the dead letters of bob's subscription."""
    now, peer = web.server.context.now(), LedgerPeer("test", "c-1", BOB.name)
    web.hub.subscribe("topic/secret", Refusing(web), now, peer=peer, name="s")
    await web.hub.committed()
    body = {"messages": [{"destination": "topic/secret", "text": "secret"}]}
    await web.post("/v1/messages", body, token=ROOT.token)
    await until(lambda: LETTERS in web.hub.store.destinations())
    await web.hub.committed()


@pytest.fixture
async def web(start_web: StartWeb) -> WebHub:
    return await start_web(lake=QUICK, users=(ROOT, BOB, WIDE))


async def rows(web: WebHub, destination: str, user: User) -> list[dict[str, Any]]:
    planned = await plan(web, destination, token=user.token or "")
    names = ("node", "starts", "ends", "first", "behind")
    body = {name: planned[name] for name in names} | {"destinations": [destination]}
    return await asyncio.to_thread(fetch, address(web, user.token or ""), body)


@pytest.mark.parametrize("pattern", ["queue/#", "queue/+/dead"])
async def test_patterns_find_no_dead_letters_of_others(web: WebHub, pattern: str) -> None:
    await buried(web)
    await sealed(web)
    assert await rows(web, pattern, WIDE) == []
    assert await files(web, pattern, token=WIDE.token or "") == []
    found = await plan(web, pattern, token=WIDE.token or "", limit=10, tally="messages")
    assert (found["count"], found["tallies"][pattern]["messages"]) == (0, 0)
    assert [row["payload"] for row in await rows(web, LETTERS, BOB)] == [b"secret"]
    assert [row["destination"] for row in await rows(web, pattern, ROOT)] == [LETTERS]


async def test_nor_does_a_tail(web: WebHub) -> None:
    async with watching(web, "/v1/tail", WIDE.token, destination="queue/#") as tail:
        assert tail.status == 200
        await buried(web)
        body = {"messages": [{"destination": "queue/q", "text": "for all"}]}
        await web.post("/v1/messages", body, token=ROOT.token)
        assert (await tail.next("message"))["destination"] == "queue/q"


async def test_a_service_is_read_without_methods_that_may_not_be(web: WebHub) -> None:
    now, peer = web.server.context.now(), LedgerPeer("test", "caller")
    web.hub.provide(["service/s"], Answering(web), now, peer=peer)
    calls = [Envelope(destination=f"service/s/{each}", kind="request") for each in ("add", "sub")]
    web.hub.call(calls, now, answered=lambda *_: None, peer=peer)
    await sealed(web)
    found = await rows(web, "service/s", WIDE)
    assert {row["destination"] for row in found} == {"service/s/add"}


@pytest.mark.parametrize("path", ["/v1/log/read", "/v1/log/files"])
async def test_no_column_is_sent_more_than_once(web: WebHub, path: str) -> None:
    body = {"node": web.hub.node, "destinations": ["queue/a"], "first": 1, "behind": 1}
    data = json.dumps(body | {"columns": ["payload"] * 50_000}).encode()
    head = (
        f"POST {path} HTTP/1.1\nhost: localhost\ncontent-type: application/json\n"
        f"authorization: Bearer {WIDE.token}"
    )
    status, answer = await web.ask(head, data)
    assert (status, json.loads(answer)["description"]) == (400, "a column is named twice")
