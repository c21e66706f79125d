"""Named subscriptions over HTTP: the owner's and the administrators' alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from crosswire.access import User
from crosswire.envelope import Envelope
from crosswire.errors import RequestFailed, StoreFailed
from crosswire.hub.attachment import Attachment, Delivery, Notice
from crosswire.hub.ledger import LedgerPeer
from tests.web.conftest import StartWeb, WebHub

ANNA, BERT, ADMIN = "a-secret-of-anna", "a-secret-of-bert", "a-secret-of-admin"
USERS = (
    User(name="anna", token=ANNA, consume=("topic/#",)),
    User(name="bert", token=BERT, consume=("topic/#", "queue/#"), produce=("queue/#",)),
    User(name="admin", token=ADMIN, administer=True),
)
MINE = "/v1/subscriptions/n"


class Refuser:
    """Has everything become a dead letter at once."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        self.payloads += [each.envelope.payload for each in deliveries]
        attachment.refuse([each.id for each in deliveries], 0.0, final=True)

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        raise AssertionError(notice)

    def broken(self, error: Exception) -> None:
        raise error


@pytest.fixture
async def web(start_web: StartWeb) -> WebHub:
    """`n` of anna, with a dead letter, of bert, and of nobody."""
    web = await start_web(users=USERS)
    now = web.server.context.now()
    for owner in ("", "bert"):
        web.hub.subscriptions.named("n", f"topic/{owner}-s", "", None, now, owner)
    peer = LedgerPeer("test", "c", "anna")
    consumer = web.hub.subscribe("topic/t", Refuser(), now, peer=peer, name="n")
    envelope = Envelope(destination="topic/t", kind="publish", payload=b"x")
    await web.hub.produce([envelope], now)
    await web.hub.committed()
    consumer.close(web.server.context.now())
    await web.hub.committed()
    return web


async def code_of(asked: Any) -> str:
    with pytest.raises(RequestFailed) as caught:
        await asked
    assert "secret" not in str(caught.value)
    return str(caught.value.code)


async def test_one_sees_ones_own(web: WebHub) -> None:
    async def owners(token: str) -> list[str]:
        answer = await web.get("/v1/subscriptions", token=token)
        return [each["owner"] for each in answer["subscriptions"]]

    assert await owners(ANNA) == ["anna"]
    assert await owners(BERT) == ["bert"]
    assert await owners(ADMIN) == ["", "anna", "bert"]


async def test_the_owner_removes_it_and_no_other_user(web: WebHub) -> None:
    assert await code_of(web.delete(f"{MINE}?owner=anna", token=BERT)) == "forbidden"
    assert await code_of(web.delete("/v1/subscriptions/no?owner=anna", token=BERT)) == "forbidden"
    assert await code_of(web.delete(f"{MINE}?owner=", token=BERT)) == "forbidden"
    await web.delete(MINE, token=BERT)
    assert await code_of(web.delete(MINE, token=BERT)) == "not_found"
    await web.delete(f"{MINE}?owner=", token=ADMIN)
    assert [each.owner for each in web.hub.subscriptions.all()] == ["anna"]


async def test_an_administrator_assigns_it(web: WebHub) -> None:
    new = {"owner": "admin"}
    assert await code_of(web.patch(f"{MINE}?owner=", new, token=BERT)) == "forbidden"
    assert await code_of(web.patch(f"{MINE}?owner=", {"owner": "no"}, token=ADMIN)) == (
        "invalid_request"
    )
    assert await code_of(web.patch(f"{MINE}?owner=", {"owner": "bert"}, token=ADMIN)) == "conflict"
    answer = await web.patch(f"{MINE}?owner=", new, token=ADMIN)
    assert (answer["owner"], answer["pattern"]) == ("admin", "-s")
    assert [each.owner for each in web.hub.subscriptions.all()] == ["admin", "anna", "bert"]


async def test_dead_letters_are_the_owners(web: WebHub) -> None:
    mine = {"queue": "@anna.n"}
    for queue in ("@anna.n", "queue/@anna.n/dead", "orders", "@n"):
        # Bert may consume queues, and so read their dead letters; there are none.
        expected = "not_found" if queue == "orders" else "forbidden"
        assert await code_of(web.get("/v1/dead/letters", token=BERT, queue=queue)) == expected
        for path in ("purge", "replays"):
            body = {"queue": queue, "all": True}
            assert await code_of(web.post(f"/v1/dead/{path}", body, token=BERT)) == "forbidden"
        assert await code_of(web.patch("/v1/dead/letters/1", {"queue": queue}, token=BERT)) == (
            "forbidden"
        )
    assert (await web.get("/v1/dead", token=BERT))["queues"] == []
    assert (await web.get("/v1/dead", token=ADMIN))["queues"][0]["queue"] == "@anna.n"
    assert (await web.get("/v1/dead", token=ANNA))["queues"][0]["length"] == 1
    (letter,) = (await web.get("/v1/dead/letters", token=ANNA, **mine))["letters"]
    letter_path = f"/v1/dead/letters/{letter['id']}"
    await web.patch(letter_path, {**mine, "text": "y"}, token=ANNA)
    shown = await web.get(letter_path, token=ANNA, **mine)
    assert shown["message"]["text"] == "y"


async def test_the_owner_sees_no_paths_of_the_server(
    web: WebHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = f"{web.server.config.data}/store/000012.log"

    def fail(*_: object, **__: object) -> None:
        raise StoreFailed(f"IO error: {path}: No space left on device")

    monkeypatch.setattr(web.hub.dead_letters, "replay", fail)
    again = {"queue": "@anna.n", "all": True}
    with caplog.at_level(logging.ERROR, "crosswire.web"):
        replay = await web.post("/v1/dead/replays", again, token=ANNA)
    assert replay["skipped"] == 1
    assert replay["error"] and path not in replay["error"]
    assert path in str([vars(each) for each in caplog.records])


async def test_the_owner_replays_them(web: WebHub) -> None:
    again = {"queue": "@anna.n", "all": True}
    elsewhere = {**again, "destination": "queue/q"}
    assert await code_of(web.post("/v1/dead/replays", elsewhere, token=ANNA)) == "forbidden"
    replay = await web.post("/v1/dead/replays", again, token=ANNA)
    assert (replay["state"], replay["replayed"]) == ("done", 1)
    path = f"/v1/dead/replays/{replay['id']}"
    assert (await web.get(path, token=ANNA))["replayed"] == 1
    assert await code_of(web.get(path, token=BERT)) == "not_found"
    assert (await web.get("/v1/dead/replays", token=BERT))["replays"] == []
    taker = Refuser()
    peer = LedgerPeer("test", "c", "anna")
    consumer = web.hub.subscribe("topic/t", taker, web.server.context.now(), peer=peer, name="n")
    assert taker.payloads == [b"x"]
    consumer.close(web.server.context.now())
