"""What the API shows of queues, subscriptions, services and connections, and acts on them."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from crosswire.access import User
from crosswire.client.native.emp import EmpClient
from crosswire.envelope import Envelope
from crosswire.errors import RequestFailed
from crosswire.hub.attachment import Delivery
from crosswire.hub.ledger import LedgerPeer, Step
from crosswire.hub.policies import QueuePolicy
from crosswire.hub.services import Answer, Provider
from crosswire.server.activity import Activities, Activity, merged_percentiles_s
from tests.web.conftest import StartWeb, Taker, WebHub

ROOT = User(name="root", token="the-secret-of-root", administer=True)
ANNA = User(name="anna", token="the-secret-of-anna", produce=("queue/a",), consume=("topic/+",))


async def failure(asking: Any) -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        await asking
    return caught.value


# Queues.


async def test_a_queue_shows_age_and_rates(web: WebHub) -> None:
    await web.produce("queue/a", *"1234")
    taker = Taker(web, "queue/a", does="settle", window=1)
    await web.hub.committed()
    await web.hub.committed()
    taker.leave()
    await web.produce("queue/a", "5")
    (row,) = (await web.get("/v1/queues"))["queues"]
    age_s = (datetime.now(UTC) - datetime.fromisoformat(row["oldest"])).total_seconds()
    # The age is rounded to a millisecond.
    assert 0 <= row["oldest_age_s"] <= age_s + 0.001 < 60
    assert row["rates"]["accepted"] > row["rates"]["settled"] > 0
    assert (row["length"], row["paused"]) == (1, False)


async def test_queues_are_sorted_and_paged_by_length(web: WebHub) -> None:
    for name, count in (("a", 1), ("b", 3), ("c", 3), ("d", 2)):
        await web.produce(f"queue/{name}", *["x"] * count)
    web.hub.target("queue/empty")
    names, cursor = [], ""
    while True:
        page = await web.get("/v1/queues", sort="length", state="backlog", limit=1, cursor=cursor)
        names += [each["name"] for each in page["queues"]]
        cursor = page["next"]
        if not cursor:
            break
    assert names == ["b", "c", "d", "a"]


@pytest.mark.parametrize("cursor", ["x", "e30", "WzEsMl0", "%00", "a" * 4097])
async def test_a_cursor_of_nothing_is_refused(web: WebHub, cursor: str) -> None:
    assert (await failure(web.get("/v1/queues", cursor=cursor))).code == "invalid_request"


async def test_a_queue_is_created_once(web: WebHub) -> None:
    assert await web.post("/v1/queues", {"name": "n/1"}) == {"name": "n/1", "created": True}
    assert not (await web.post("/v1/queues", {"name": "n/1"}))["created"]
    assert (await web.get("/v1/queues/n/1"))["length"] == 0
    for wrong in ({"name": "a//b"}, {"name": "@own"}, {"name": ""}, {"name": "a", "x": 1}, {}):
        assert (await failure(web.post("/v1/queues", wrong))).code == "invalid_request"


async def test_a_paused_queue_delivers_nothing_even_after_a_restart(start_web: StartWeb) -> None:
    web = await start_web()
    await web.post("/v1/queues", {"name": "q"})
    assert (await web.patch("/v1/queues/q", {"paused": True}))["paused"]
    await web.produce("queue/q", "1")
    taker = Taker(web, "queue/q", does="settle")
    await web.hub.committed()
    assert taker.given == []
    await web.server.stop()
    web = await start_web()
    taker = Taker(web, "queue/q", does="settle")
    ids = await web.produce("queue/q", "2")
    assert (await web.get("/v1/queues", state="paused"))["queues"][0]["length"] == 2
    assert taker.given == []
    await web.patch("/v1/queues/q", {"paused": False})
    assert taker.given[-1:] == ids and len(taker.given) == 2


async def test_chosen_messages_are_deleted(web: WebHub) -> None:
    ids = await web.produce("queue/a", *"1234", properties={"n": 1})
    await web.produce("queue/a", "5", properties={"n": 2})
    dry = await web.post("/v1/queues/a/purge", {"filter": "n>N1", "dry_run": True})
    assert dry == {"purged": 0, "matched": 1, "dry_run": True}
    assert (await web.post("/v1/queues/a/purge", {"filter": "n>N1"}))["purged"] == 1
    assert (await web.post("/v1/queues/a/purge", {"ids": ids[:2]}))["purged"] == 2
    left = (await web.get("/v1/queues/a", messages=9))["messages"]
    assert [each["id"] for each in left] == ids[2:]


async def test_messages_are_moved_and_keep_what_they_had(web: WebHub) -> None:
    first, second = await web.produce("queue/a", "1", "2", properties={"n": 1}, key="k")
    Taker(web, "queue/a", does="hold", window=1)
    body = {"ids": [first, second], "destination": "queue/b"}
    moved = await web.post("/v1/queues/a/move", body)
    assert (moved["state"], moved["replayed"], moved["skipped"]) == ("done", 1, 1), "one is held"
    (message,) = (await web.get("/v1/queues/b", messages=9))["messages"]
    assert (message["text"], message["properties"], message["key"]) == ("2", {"n": 1}, "k")
    steps = (await web.get(f"/v1/messages/{second}"))["steps"]
    assert steps[-1]["step"] == "replayed"
    assert steps[-1]["detail"] == f"sent again as {message['id']}"
    (listed,) = (await web.get("/v1/dead/replays"))["replays"]
    assert (listed["source"], listed["destination"]) == ("queue/a", "queue/b")
    assert listed["started"] <= listed["ended"]


@pytest.mark.parametrize(
    "body",
    [
        {"all": True, "destination": "queue/a"},
        {"all": True, "destination": "service/x"},
        {"all": True, "destination": "queue/@x/dead"},
        {"destination": "queue/b"},
        {"all": True, "ids": [1], "destination": "queue/b"},
    ],
)
async def test_a_move_that_is_not_clear_moves_nothing(web: WebHub, body: dict[str, Any]) -> None:
    await web.produce("queue/a", "1")
    assert (await failure(web.post("/v1/queues/a/move", body))).code == "invalid_request"
    assert (await web.get("/v1/queues/a"))["length"] == 1


async def test_a_replay_that_can_not_be_sent_loses_nothing(
    web: WebHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    (identifier,) = await web.produce("queue/a", "1")

    def refuse(*_args: object, **_more: object) -> None:
        raise OSError("broken")

    monkeypatch.setattr(web.hub._intake, "_keep", refuse)
    with pytest.raises(OSError):
        web.hub.dead_letters.replay("queue/a", [identifier], web.hub.now, destination="queue/b")
    assert (await web.get("/v1/queues/a"))["length"] == 1


# Subscriptions.


async def test_lag_is_counted_in_messages_and_seconds(start_web: StartWeb) -> None:
    web = await start_web()
    taker = Taker(web, "queue/other", does="hold")
    peer = LedgerPeer("test", "c")
    now = web.server.context.now()
    web.hub.subscribe("topic/t", taker, now, peer=peer, name="s", window=1).close(now)
    await web.produce("topic/t", *["x"] * 3000)
    (row,) = (await web.get("/v1/subscriptions", sort="lag"))["subscriptions"]
    assert (row["lag_messages"], row["lag_is_exact"]) == (3000, True)
    assert 0 < row["lag_s"] < 60
    assert (await web.get("/v1/subscriptions", topic="u"))["subscriptions"] == []
    removed = await web.delete("/v1/subscriptions/s")
    assert removed["lag_messages"] == 3000


# Services.


class _Answering:
    def __init__(self, web: WebHub) -> None:
        self.web = web
        self.is_silent = False

    def request(self, provider: Provider, requests: list[Delivery]) -> None:
        for each in () if self.is_silent else requests:
            response = Envelope(destination="", kind="response", payload=b"1")
            provider.answer(each.id, response, self.web.server.context.now())

    def cancel(self, provider: Provider, ids: list[int]) -> None:
        """Nothing to cancel."""

    def broken(self, error: Exception) -> None:
        raise error


async def test_a_service_shows_calls_errors_and_latency(web: WebHub) -> None:
    hub, serving = web.hub, _Answering(web)
    peer = LedgerPeer("test", "provider-1")
    provider = hub.provide(["service/sums"], serving, hub.now, peer=peer)
    answers: list[Answer] = []

    def call(method: str) -> None:
        request = Envelope(destination=f"service/sums/{method}", kind="request")
        hub.call(
            [request],
            web.server.context.now(),
            answered=lambda _call, answer: answers.append(answer),
            peer=LedgerPeer("test", "caller"),
        )

    for _ in range(9):
        call("add")
    serving.is_silent = True
    call("multiply")
    await hub.committed()
    (row,) = (await web.get("/v1/services", sort="latency"))["services"]
    assert (row["name"], row["answered"], row["calls"], row["waiting"]) == ("sums", 9, 1, 0)
    assert 0 < row["p50_s"] <= row["p99_s"] < 10
    assert row["providers"][0]["calls"] == 1
    provider.close(web.server.context.now())
    await hub.committed()
    hub.provide(["service/sums"], serving, hub.now, peer=peer)
    (row,) = (await web.get("/v1/services"))["services"]
    assert (row["failed"], row["calls"]) == (1, 0)
    assert row["errors_per_s"] > 0


# Connections.


async def test_connections_that_ended_are_kept_with_the_reason(start_web: StartWeb) -> None:
    web = await start_web(listen={"emp": "127.0.0.1:0"})
    port = web.server.listeners["emp"].address.port
    async with EmpClient("127.0.0.1", port) as client:
        await client.request("$publish", {"destination": "queue/x", "text": "1"})
        (open_row,) = (await web.get("/v1/connections"))["connections"]
        assert open_row["received_bytes"] > 0 and open_row["sent_bytes"] > 0
        assert open_row["accepted"] == 1
        shown = await web.get(f"/v1/connections/{open_row['id']}")
        assert shown["address"] == open_row["address"]
        await web.delete(f"/v1/connections/{open_row['id']}")
        while not web.server.context.closed:
            await asyncio.sleep(0.01)
    rows = (await web.get("/v1/connections/closed", contains="administrator"))["connections"]
    assert [(each["id"], each["reason"]) for each in rows] == [
        (open_row["id"], "closed by an administrator")
    ]
    assert rows[0]["accepted"] == 1 and rows[0]["ended"] >= rows[0]["since"]


# Schedules.


async def test_a_schedule_is_paused_fired_and_resumed(start_web: StartWeb) -> None:
    web = await start_web()
    body = {"id": "s", "destination": "queue/q", "text": "x", "interval_s": 0.1, "nohaste": True}
    await web.post("/v1/schedules", body)
    paused = await web.patch("/v1/schedules/s", {"paused": True})
    assert (paused["paused"], paused["next_due"], paused["preview"]) == (True, None, [])
    await web.post("/v1/queues", {"name": "q"})
    await web.post("/v1/queues/q/purge", {})
    fired = await web.post("/v1/schedules/s/fire", {})
    (message,) = (await web.get("/v1/queues/q", messages=9))["messages"]
    assert (message["id"], fired["destination"]) == (fired["id"], "queue/q")
    web.hub.handle_deadline(web.server.context.now() + 5)
    assert (await web.get("/v1/queues/q"))["length"] == 1, "it is paused"
    await web.server.stop()
    web = await start_web()
    assert (await web.get("/v1/schedules/s"))["paused"]
    resumed = await web.patch("/v1/schedules/s", {"paused": False})
    assert datetime.fromisoformat(resumed["next_due"]) > datetime.now(UTC).replace(year=2020)
    while (await web.get("/v1/queues/q"))["length"] < 2:
        await asyncio.sleep(0.05)
    assert (await failure(web.post("/v1/schedules/none/fire", {}))).code == "not_found"


# Users, access, configuration, disk.


async def test_the_rule_that_decides_is_shown(start_web: StartWeb) -> None:
    web = await start_web(users=(ROOT, ANNA))

    async def decide(token: str | None, **query: str) -> tuple[bool, str]:
        answer = await web.get("/v1/access", token=token, **query)
        return answer["allowed"], answer["rule"]

    root, anna = ROOT.token, ANNA.token
    allowed = await decide(anna, right="produce", destination="queue/a")
    assert allowed == (True, "produce = 'queue/a'")
    refused = await decide(root, user="anna", right="consume", destination="queue/a")
    assert refused == (False, "no pattern covers it: consume = 'topic/+'")
    assert (await decide(anna, right="call", destination="service/x"))[0] is False
    assert await decide(anna, right="observe") == (False, "observe = false")
    assert await decide(root, right="observe") == (True, "administer = true")
    assert (await decide(root, user="nobody", right="administer"))[0] is False
    other = web.get("/v1/access", token=anna, user="root", right="observe")
    assert (await failure(other)).code == "forbidden"
    wrong = web.get("/v1/access", token=root, right="produce")
    assert (await failure(wrong)).code == "invalid_request"


async def test_users_are_listed_without_secrets(start_web: StartWeb) -> None:
    web = await start_web(users=(ROOT, ANNA))
    listed = await web.get("/v1/users", token=ROOT.token)
    assert [each["name"] for each in listed["users"]] == ["anna", "root"]
    assert "secret" not in str(listed)
    mine = (await web.get("/v1/users", token=ANNA.token))["users"]
    assert [each["name"] for each in mine] == ["anna"]


async def test_the_configuration_is_shown_with_what_waits(start_web: StartWeb) -> None:
    web = await start_web(users=(ROOT, ANNA))
    config = web.server.config
    store = msgspec.structs.replace(config.store, destinations=77)
    policy = QueuePolicy(max_length=7)
    changed = msgspec.structs.replace(config, store=store, queues={"q": policy})
    assert web.server.reload(changed) == ["store"]
    shown = await web.get("/v1/configuration", token=ROOT.token)
    assert shown["effective"]["queues"]["q"]["max_length"] == 7
    assert shown["waiting"] == [
        {
            "name": "store.destinations",
            "effective": config.store.destinations,
            "configured": 77,
        }
    ]
    assert "secret-of" not in str(shown)
    asked = web.get("/v1/configuration", token=ANNA.token)
    assert (await failure(asked)).code == "forbidden"
    web.server.reload(config)
    assert not (await web.get("/v1/configuration", token=ROOT.token))["waiting"]


async def test_disk_and_lake_are_shown(start_web: StartWeb) -> None:
    web = await start_web()
    await web.produce("queue/q", "x")
    while (await web.get("/v1/lake"))["sealed_id"] < 1:
        await asyncio.sleep(0.05)
    disk = await web.get("/v1/disk")
    assert disk["store"]["size_bytes"] > 0 and disk["lake"]["files"] > 0 and disk["has_room"]
    tables = {each["table"] for each in (await web.get("/v1/lake"))["tables"]}
    assert {"messages", "ledger"} <= tables
    files, cursor = [], ""
    while True:
        page = await web.get("/v1/lake/files", limit=1, cursor=cursor)
        files += page["files"]
        cursor = page["next"]
        if not cursor:
            break
    assert len({each["path"] for each in files}) == len(files) >= 2
    (only,) = (await web.get("/v1/lake/files", table="messages"))["files"]
    assert (only["first_seq"], only["last_seq"]) == (1, 1)
    assert await web.get("/v1/lake/gaps") == {"gaps": [], "next": ""}


async def test_causes_of_dead_letters_are_grouped(web: WebHub) -> None:
    await web.produce("queue/q", "1", "2", "3")
    taker = Taker(web, "queue/q", does="refuse")
    await web.hub.committed()
    taker.leave()
    await web.hub.committed()
    (cause,) = (await web.get("/v1/dead/causes", queue="q"))["causes"]
    assert (cause["cause"], cause["letters"]) == ("can't", 3)
    listed = await web.get("/v1/dead/letters", queue="q", cause="other")
    assert listed["letters"] == []


# Parameters and methods.


@pytest.mark.parametrize("name", [".", ".."])
async def test_names_that_clients_take_for_steps_in_a_path(web: WebHub, name: str) -> None:
    await web.produce(f"queue/{name}", "1")
    status, body = await web.ask(f"GET /v1/queues/{name}%2F HTTP/1.1\nhost: localhost")
    assert (status, json.loads(body)["name"]) == (200, name)
    purge = f"POST /v1/queues/{name}%2F/purge HTTP/1.1\nhost: localhost"
    status, _ = await web.ask(f"{purge}\ncontent-type: application/json", b"{}")
    assert status == 200


@pytest.mark.parametrize(
    "query", ["nonsense=1", "limit=1&limit=2", "sort=colour", "after=a", "contains=a&x"]
)
async def test_unknown_parameters_are_refused(web: WebHub, query: str) -> None:
    head = f"GET /v1/queues?{query} HTTP/1.1\nhost: localhost"
    assert (await web.ask(head))[0] == 400
    for path in ("/v1/state", "/healthz", "/readyz", "/metrics", "/openapi.json"):
        assert (await web.ask(f"GET {path}?x=1 HTTP/1.1\nhost: localhost"))[0] == 400


async def test_a_wrong_method_comes_before_a_wrong_type(web: WebHub) -> None:
    status, _ = await web.ask("PUT /v1/queues HTTP/1.1\nhost: localhost", b"x")
    assert status == 405
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    writer.write(b"PUT /v1/queues HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    (allow,) = [line for line in answer.split(b"\r\n") if line.lower().startswith(b"allow:")]
    assert {b"GET", b"POST"} <= set(allow.split(b":")[1].replace(b" ", b"").split(b","))


# Activity.


def test_rates_are_those_of_the_last_seconds() -> None:
    activity = Activity(100.0)
    activity.totals[Step.ACCEPTED] += 50
    assert activity.rate(110.0 - 0.1, Step.ACCEPTED) == pytest.approx(50 / 9.9)
    assert activity.rate(120.0, Step.ACCEPTED) == 0.0
    activity.begin(int(121.0 // 5))
    activity.totals[Step.ACCEPTED] += 7
    assert activity.rate(122.0, Step.ACCEPTED) == pytest.approx(7 / 7)
    assert activity.total(Step.ACCEPTED) == 57


def test_what_was_idle_for_longest_is_forgotten() -> None:
    activities = Activities(2)
    for name, now in (("a", 0.0), ("b", 1.0), ("a", 10.0), ("c", 11.0)):
        activities.begin(name, now)
    assert list(activities.by_name) == ["a", "c"]
    assert [name for name, _ in activities.active(11.0)] == ["c", "a"]


def test_percentiles_are_within_a_fifth() -> None:
    activity = Activity(0.0)
    for latency_us in range(1, 1001):
        activity.answered(latency_us * 1000, 1.0, 1)
    assert activity.latency is not None
    p50_s, p99_s = merged_percentiles_s([activity.latency], 1.0, 0.5, 0.99)
    assert 0.5 <= p50_s <= 0.6 and 0.99 <= p99_s <= 1.2
    assert merged_percentiles_s([activity.latency], 200.0, 0.5) == [0.0]
