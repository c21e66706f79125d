"""What users see of a hub: with the right to observe everything but contents, else their own."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from crosswire.access import Access, User
from crosswire.errors import RequestFailed, StoreFailed
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.policies import QueuePolicy, Retry
from tests.web.conftest import StartWeb, Taker, WebHub, bury

ROOT = User(name="root", token="the-secret-of-root", administer=True)
WATCH = User(name="watch", token="the-secret-of-watch", observe=True)
ANNA = User(
    name="anna",
    token="the-secret-of-anna",
    produce=("queue/anna/#", "topic/anna/+"),
    consume=("queue/anna/#",),
    call=("service/sums/add",),
)
BERT = User(name="bert", token="the-secret-of-bert", produce=("queue/bert",))
USERS = (ROOT, WATCH, ANNA, BERT)
SECRET = "a payload of anna"


@pytest.fixture
async def web(start_web: StartWeb) -> WebHub:
    web = await start_web(users=USERS)
    messages = [
        {"destination": "queue/anna/q", "text": SECRET, "properties": {"p": SECRET}},
        {"destination": "topic/anna/t", "text": SECRET},
    ]
    await web.post("/v1/messages", {"messages": messages}, token=ANNA.token)
    mine = {"destination": "queue/bert", "text": "x"}
    await web.post("/v1/messages", {"messages": [mine]}, token=BERT.token)
    schedule = {"id": "s", "destination": "queue/anna/q", "text": SECRET, "cron": "0 0 1 1 *"}
    await web.post("/v1/schedules", schedule, token=ROOT.token)
    peer = LedgerPeer("test", "provider", "root")
    web.hub.provide(["service/sums", "service/other"], Provider(), web.hub.now, peer=peer)
    return web


class Provider:
    def request(self, provider: object, requests: list[Any]) -> None:
        raise AssertionError(requests)

    def cancel(self, provider: object, ids: list[int]) -> None:
        raise AssertionError(ids)

    def broken(self, error: Exception) -> None:
        raise error


async def refusal(asked: Any) -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        await asked
    return caught.value


async def names(web: WebHub, user: User) -> dict[str, list[str]]:
    found = {}
    for path, key in (
        ("/v1/queues", "queues"),
        ("/v1/topics", "topics"),
        ("/v1/services", "services"),
    ):
        rows = (await web.get(path, token=user.token))[key]
        found[key] = [each["name"] for each in rows]
    rows = (await web.get("/v1/schedules", token=user.token))["schedules"]
    found["schedules"] = [each["id"] for each in rows]
    return found


async def test_lists(web: WebHub) -> None:
    everything = {
        "queues": ["anna/q", "bert"],
        "topics": ["anna/t"],
        "services": ["other", "sums"],
        "schedules": ["s"],
    }
    assert await names(web, ROOT) == everything
    assert await names(web, WATCH) == everything
    own = {"queues": ["anna/q"], "services": ["sums"], "schedules": []}
    assert await names(web, ANNA) == everything | own
    assert await names(web, BERT) == {
        "queues": ["bert"],
        "topics": [],
        "services": [],
        "schedules": [],
    }
    providers = (await web.get("/v1/services", token=ANNA.token))["services"][0]["providers"]
    assert providers == []


@pytest.mark.parametrize("path", ["/v1/state", "/v1/damage", "/v1/ingest", "/v1/staged"])
async def test_state_needs_the_right_to_observe(web: WebHub, path: str) -> None:
    assert await web.get(path, token=WATCH.token)
    assert (await refusal(web.get(path, token=ANNA.token))).code == "forbidden"


async def test_an_observer_sees_no_paths_of_the_server(web: WebHub) -> None:
    store = web.hub.store
    path = f"{web.server.config.data}/store/000012.sst"
    store.report_damage("tables", f"{path} can't be read")
    store.last_error = StoreFailed(f"IO error: {path}: Input/output error")
    try:
        for user, is_shown in ((ROOT, True), (WATCH, False)):
            for asked in ("/v1/state", "/v1/damage"):
                assert (path in str(await web.get(asked, token=user.token))) == is_shown
        assert (await web.get("/v1/state", token=WATCH.token))["store"]["error"] == (
            "IO error: store/000012.sst: Input/output error"
        )
    finally:
        store.last_error = None


async def test_an_observer_sees_names_that_contain_a_relative_path(
    web: WebHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "message 7 of queue/orders/new is damaged: the orders of"
    web.hub.store.report_damage("record", f"{text} orders/store/000012.sst")
    monkeypatch.setattr(
        web.server, "config", msgspec.structs.replace(web.server.config, data="orders")
    )
    (entry,) = (await web.get("/v1/damage", token=WATCH.token))["damage"]
    assert entry["detail"] == f"{text} store/000012.sst"


async def test_an_observer_changes_nothing(web: WebHub) -> None:
    asked = [
        web.post("/v1/queues/anna/q/purge", {}, token=WATCH.token),
        web.delete("/v1/schedules/s", token=WATCH.token),
        web.delete("/v1/connections/x", token=WATCH.token),
        web.post("/v1/damage/acknowledge", {}, token=WATCH.token),
        web.delete("/v1/ingest/p", token=WATCH.token),
    ]
    for each in asked:
        assert (await refusal(each)).code == "forbidden"


async def test_contents_need_the_right_to_consume(web: WebHub) -> None:
    path = "/v1/queues/anna/q"
    assert (await web.get(path, token=WATCH.token))["length"] == 1
    refused = await refusal(web.get(path, token=WATCH.token, messages=1))
    assert (refused.code, SECRET in str(refused)) == ("forbidden", False)
    for user in (ANNA, ROOT):
        (shown,) = (await web.get(path, token=user.token, messages=1))["messages"]
        assert shown["text"] == SECRET
    # Who may only produce to a topic does not see what others published there.
    assert (await web.get("/v1/topics/anna/t", token=ANNA.token))["published"] == 1
    asked = web.get("/v1/topics/anna/t", token=ANNA.token, messages=1)
    assert (await refusal(asked)).code == "forbidden"


async def test_a_trace_without_contents(web: WebHub) -> None:
    root = await web.get("/v1/messages/1", token=ROOT.token)
    assert root["message"]["text"] == SECRET
    seen = await web.get("/v1/messages/1", token=WATCH.token)
    assert seen["steps"] == root["steps"]
    assert seen["message"]["hidden"] and SECRET not in str(seen)
    assert (await web.get("/v1/messages/1", token=ANNA.token))["message"]["text"] == SECRET
    stranger = await refusal(web.get("/v1/messages/1", token=BERT.token))
    assert stranger.code == "not_found"


async def test_a_schedule_without_contents(web: WebHub) -> None:
    for user, is_hidden in ((ROOT, False), (WATCH, True)):
        shown = await web.get("/v1/schedules/s", token=user.token)
        assert shown["message"].get("hidden", False) == is_hidden
        assert (SECRET in str(shown)) != is_hidden
    for user in (ANNA, BERT):
        # Another user's, even where it sends to what this one may produce to and consume.
        refused = await refusal(web.get("/v1/schedules/s", token=user.token))
        unknown = await refusal(web.get("/v1/schedules/t", token=user.token))
        assert (refused.code, str(refused)) == ("not_found", str(unknown).replace("'t'", "'s'"))


@pytest.mark.parametrize("kind", ["queues", "topics"])
async def test_what_exists_is_not_revealed(web: WebHub, kind: str) -> None:
    texts = set()
    for name in ("anna/q", "anna/t", "nothing"):
        refused = await refusal(web.get(f"/v1/{kind}/{name}", token=BERT.token))
        assert refused.code == "forbidden"
        texts.add(str(refused).replace(name, "NAME"))
    assert len(texts) == 1


async def test_dead_letters_can_be_read_by_who_may_consume_them(start_web: StartWeb) -> None:
    policy = {"q": QueuePolicy(retry=Retry(max_attempts=1))}
    reader = User(name="anna", token=ANNA.token, consume=("queue/q/dead",))
    web = await start_web(queues=policy, users=())
    await bury(web, SECRET)
    users = (ROOT, WATCH, reader, BERT)
    web.server.reload(msgspec.structs.replace(web.server.config, users=users))
    assert (await web.get("/v1/dead", token=WATCH.token))["queues"][0]["length"] == 1
    asked = web.get("/v1/dead/letters", token=WATCH.token, queue="q")
    assert (await refusal(asked)).code == "forbidden"
    (row,) = (await web.get("/v1/dead/letters", token=ANNA.token, queue="q"))["letters"]
    assert row["message"]["text"] == SECRET
    body = {"queue": "q", "all": True}
    assert (await refusal(web.post("/v1/dead/purge", body, token=ANNA.token))).code == "forbidden"


async def test_consumers_of_others_are_the_observers(web: WebHub) -> None:
    taker = Taker(web, "queue/anna/q", does="hold")  # its principal is anna
    for user, count in ((WATCH, 1), (ANNA, 1)):
        detail = await web.get("/v1/queues/anna/q", token=user.token)
        assert (len(detail["consumers"]), detail["held"]) == (count, 1)
    carl = User(name="carl", token="the-secret-of-carl", consume=("queue/#",))
    web.server.reload(msgspec.structs.replace(web.server.config, users=(*USERS, carl)))
    detail = await web.get("/v1/queues/anna/q", token=carl.token, messages=1)
    assert (detail["consumers"], detail["held"]) == ([], 1)
    assert "held_by" not in detail["messages"][0]
    taker.leave()


def test_who_may_observe() -> None:
    access = Access(USERS)
    assert [access.may_observe(each) for each in ("root", "watch", "anna", "", "no")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert Access().may_observe("")


def test_services_that_a_right_reaches() -> None:
    user = User(
        name="u", token="0" * 16, call=("service/a/b", "service/c/#", "service/d", "service/+/e")
    )
    access = Access((user,))
    reached = [name for name in "abcdf" if access.may_reach("u", "call", f"service/{name}")]
    assert reached == ["a", "b", "c", "d", "f"]
    narrow = Access((User(name="u", token="0" * 16, call=("service/a/b", "service/c")),))
    assert [n for n in "abc" if narrow.may_reach("u", "call", f"service/{n}")] == ["a", "c"]
    assert not narrow.may_reach("u", "call", "service/c/d")
    assert not narrow.may_reach("nobody", "call", "service/a")
