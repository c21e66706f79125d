"""The API's operations, asked over a real socket."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest

from crosswire.client.native.emp import EmpClient
from crosswire.envelope import PROPERTIES
from crosswire.errors import RequestFailed
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.policies import QueuePolicy, TopicPolicy
from crosswire.web.api import OPERATIONS
from crosswire.web.contract import EVENT_STREAM
from crosswire.web.messages import JsonMessage
from crosswire.web.openapi import openapi
from tests.web.conftest import StartWeb, Taker, WebHub, bury


async def code_of(asking: Any) -> str:
    with pytest.raises(RequestFailed) as caught:
        await asking
    return caught.value.code


async def until_removed(web: WebHub, path: str) -> Any:
    """A queue whose messages are not in the lake yet is refused for a moment."""
    while True:
        try:
            return await web.delete(path)
        except RequestFailed as error:
            assert "lake" in error.description
        await asyncio.sleep(0.05)


# Producing, queues, topics.


@pytest.mark.parametrize("body", [{"json": {"a": [1]}}, {"text": "h\u00e9"}, {"base64": "AP8="}])
async def test_a_message_is_produced_and_seen(web: WebHub, body: dict[str, Any]) -> None:
    message = {"destination": "queue/a/b", "properties": {"n": 1, "t": True}, "key": "k", **body}
    produced = await web.post("/v1/messages", {"messages": [message]})
    seen = (await web.get("/v1/queues/a/b", messages=10))["messages"]
    assert produced == {"ids": [seen[0]["id"]], "refused": []}
    assert {key: seen[0].get(key) for key in message} == message


async def test_each_message_of_a_batch_is_accepted_or_refused_on_its_own(web: WebHub) -> None:
    good = {"destination": "queue/x", "text": "x"}
    messages = [good, {"destination": "nowhere", "text": "x"}, good, {"destination": "queue/x"}]
    answer = await web.post("/v1/messages", {"messages": messages})
    assert [bool(identifier) for identifier in answer["ids"]] == [True, False, True, False]
    assert [(each["index"], each["error"]) for each in answer["refused"]] == [
        (1, "invalid_request"),
        (3, "invalid_request"),
    ]


async def test_a_full_queue_refuses(start_web: StartWeb) -> None:
    web = await start_web(queues={"q": QueuePolicy(max_length=1)})
    await web.produce("queue/q", "x")
    assert await code_of(web.produce("queue/q", "x")) == "refused"


async def test_queues_are_listed_with_what_waits_in_them(web: WebHub) -> None:
    await web.produce("queue/b", "1", "2")
    await web.produce("queue/a", "1")
    Taker(web, "queue/b", does="hold", window=1)
    rows = (await web.get("/v1/queues"))["queues"]
    assert [(each["name"], each["length"], each["held"], each["consumers"]) for each in rows] == [
        ("a", 1, 0, 0),
        ("b", 2, 1, 1),
    ]
    first = await web.get("/v1/queues", limit=1)
    second = await web.get("/v1/queues", cursor=first["next"])
    assert [each["name"] for each in second["queues"]] == ["b"]
    assert second["next"] == ""


async def test_a_peek_tells_who_holds_a_message(web: WebHub) -> None:
    first, second = await web.produce("queue/b", "1", "2")
    Taker(web, "queue/b", does="hold", window=1)
    shown = await web.get("/v1/queues/b", messages=10)
    assert [(each["id"], each.get("held_by")) for each in shown["messages"]] == [
        (first, "taker-1"),
        (second, None),
    ]
    assert shown["consumers"][0]["principal"] == "anna"


async def test_a_long_payload_is_cut_in_a_peek(web: WebHub) -> None:
    await web.produce("queue/b", "x" * 10_000)
    (seen,) = (await web.get("/v1/queues/b", messages=1))["messages"]
    assert (seen["size_bytes"], len(seen["text"]), seen["truncated"]) == (10_000, 4096, True)


async def test_purging_leaves_what_consumers_hold(web: WebHub) -> None:
    await web.produce("queue/b", "1", "2", "3")
    Taker(web, "queue/b", does="hold", window=1)
    assert await web.post("/v1/queues/b/purge", {}) == {"purged": 2, "matched": 3, "dry_run": False}
    assert (await web.get("/v1/queues/b"))["length"] == 1


async def test_unused_queues_and_topics_can_be_deleted(start_web: StartWeb) -> None:
    web = await start_web(topics={"light": TopicPolicy(durable=False)})
    await web.produce("queue/a/b", "1")
    await web.produce("topic/t", "1")
    web.hub.topic("topic/empty")
    assert await code_of(web.delete("/v1/queues/a/b")) == "conflict"
    assert await code_of(web.delete("/v1/topics/t")) == "conflict"
    web.hub.topic("topic/light")
    assert await code_of(web.delete("/v1/topics/light")) == "conflict"
    assert await code_of(web.delete("/v1/topics/nope")) == "not_found"
    await web.post("/v1/queues/a/b/purge", {})
    assert await until_removed(web, "/v1/queues/a/b") == {"removed": "a/b"}
    assert await web.delete("/v1/topics/empty") == {"removed": "empty"}
    assert await code_of(web.get("/v1/queues/a/b")) == "not_found"
    assert await web.produce("queue/a/b", "2")
    assert (await web.get("/v1/queues/a/b"))["length"] == 1


async def test_asking_for_a_queue_does_not_make_it(web: WebHub) -> None:
    assert await code_of(web.get("/v1/queues/nope")) == "not_found"
    assert (await web.get("/v1/queues"))["queues"] == []


async def test_topics_and_named_subscriptions(start_web: StartWeb) -> None:
    web = await start_web(topics={"light": TopicPolicy(durable=False)})
    peer = Taker(web, "queue/other", does="hold")
    now = web.server.context.now()
    attached = web.hub.subscribe("topic/+", peer, now, peer=LedgerPeer("test", "c"), name="mine")
    await web.produce("topic/news", "1")
    await web.produce("topic/light", "1")
    rows = {each["name"]: each for each in (await web.get("/v1/topics"))["topics"]}
    assert rows["news"]["subscriptions"] == ["mine"]
    assert not rows["light"]["durable"]
    shown = await web.get("/v1/topics/news", messages=5)
    assert [each["text"] for each in shown["messages"]] == ["1"]
    (subscription,) = (await web.get("/v1/subscriptions"))["subscriptions"]
    assert (subscription["pattern"], subscription["held"]) == ("+", 1)
    assert await code_of(web.delete("/v1/subscriptions/mine")) == "conflict"
    attached.close(now)
    assert await web.delete("/v1/subscriptions/mine") == {
        "removed": "mine",
        "lag_messages": 1,
        "lag_is_exact": True,
        "dead_letters": 0,
    }


# Connections, services, state.


async def test_connections_are_listed_and_closed(start_web: StartWeb) -> None:
    web = await start_web(listen={"emp": "127.0.0.1:0"})
    port = web.server.listeners["emp"].address.port

    async def answer(_data: Any) -> None:
        return None

    async with EmpClient("127.0.0.1", port, handlers={"add": answer}) as client:
        await client.request("$subscribe", {"destination": "queue/q"})
        await client.request("$serve", {"services": ["add"]})
        (row,) = (await web.get("/v1/connections"))["connections"]
        assert (row["protocol"], row["serves"]) == ("emp", ["service/add"])
        assert [each["destination"] for each in row["consumes"]] == ["queue/q"]
        (service,) = (await web.get("/v1/services"))["services"]
        assert (service["name"], service["providers"][0]["connection"]) == ("add", row["id"])
        peer = await client.peer()
        assert await web.delete(f"/v1/connections/{row['id']}") == {"closed": row["id"]}
        await asyncio.wait_for(asyncio.wait([peer.ended]), 10)
    assert await code_of(web.delete("/v1/connections/nobody")) == "not_found"


async def test_the_state_adds_up(web: WebHub) -> None:
    await bury(web, "1", "2")
    await web.produce("queue/b", "1")
    state = await web.get("/v1/state")
    assert (state["messages"], state["dead_letters"], state["draining"]) == (1, 2, False)
    assert state["listen"] == {"http": f"127.0.0.1:{web.port}"}
    assert state["store"]["error"] == ""


# The ledger.


async def test_a_trace_tells_every_step(web: WebHub) -> None:
    (identifier,) = await web.produce("queue/b", "1")
    Taker(web, "queue/b", does="settle")
    trace = await web.get(f"/v1/messages/{identifier}")
    assert [each["step"] for each in trace["steps"]] == ["accepted", "delivered", "settled"]
    assert trace["message"]["text"] == "1"
    assert await code_of(web.get("/v1/messages/999999")) == "not_found"


async def test_a_trace_goes_back_behind_what_is_in_memory(web: WebHub) -> None:
    (identifier,) = await web.produce("queue/b", "1")
    web.hub.ledger.recent_rows = 1
    await web.produce("queue/b", "2")
    await web.produce("queue/b", "3")
    assert web.hub.trace(identifier) == []
    trace = await web.get(f"/v1/messages/{identifier}")
    assert [each["step"] for each in trace["steps"]] == ["accepted"]


# Dead letters.


async def test_dead_letters_are_listed_and_shown(web: WebHub) -> None:
    first, second = await bury(web, "1", "2", properties={"n": 1})
    queues = (await web.get("/v1/dead"))["queues"]
    assert [(each["queue"], each["length"]) for each in queues] == [("q", 2)]
    listed = await web.get("/v1/dead/letters", queue="q", limit=1)
    assert [each["id"] for each in listed["letters"]] == [first]
    listed = await web.get("/v1/dead/letters", queue="queue/q/dead", cursor=listed["next"])
    assert ([each["id"] for each in listed["letters"]], listed["next"]) == ([second], "")
    shown = await web.get(f"/v1/dead/letters/{first}", queue="q")
    assert (shown["origin"], shown["cause"]) == ("queue/q", "can't")
    assert [each["connection"] for each in shown["attempts"]] == ["taker-1"]
    assert await code_of(web.get("/v1/dead/letters", queue="other")) == "not_found"
    assert await code_of(web.get("/v1/dead/letters/999", queue="q")) == "not_found"


async def test_a_dead_letter_is_edited_and_replayed(web: WebHub) -> None:
    (dead_letter,) = await bury(web, "wrong", properties={"n": 1})
    edit = {"queue": "q", "json": {"right": True}, "properties": {"n": 2}}
    edited = await web.patch(f"/v1/dead/letters/{dead_letter}", edit)
    assert edited["message"]["content_type"] == "application/json"
    replay = await web.post("/v1/dead/replays", {"queue": "q", "ids": [dead_letter]})
    assert (replay["state"], replay["replayed"], replay["skipped"]) == ("done", 1, 0)
    (message,) = (await web.get("/v1/queues/q", messages=5))["messages"]
    assert (message["json"], message["properties"]) == ({"right": True}, {"n": 2})
    assert (await web.get("/v1/dead"))["queues"] == []


async def test_a_dry_run_only_tells(web: WebHub) -> None:
    dead_letters = await bury(web, "1", "2")
    for path in ("/v1/dead/replays", "/v1/dead/purge"):
        answer = await web.post(path, {"queue": "q", "all": True, "dry_run": True})
        assert (answer["matched"], answer["ids"]) == (2, dead_letters)
    assert (await web.get("/v1/dead"))["queues"][0]["length"] == 2


async def test_a_filter_chooses(web: WebHub) -> None:
    await bury(web, "a", properties={"n": 1})
    dead_letters = await bury(web, "b", properties={"n": 2})
    listed = await web.get("/v1/dead/letters", queue="q", filter="n>N1")
    assert [each["id"] for each in listed["letters"]] == dead_letters[1:]
    asked = {"queue": "q", "filter": "n>N1"}
    assert (await web.post("/v1/dead/replays", asked))["replayed"] == 1
    assert (await web.get("/v1/dead"))["queues"][0]["length"] == 1


async def test_letters_are_replayed_elsewhere(web: WebHub) -> None:
    await bury(web, "1")
    asked = {"queue": "q", "all": True, "destination": "queue/elsewhere"}
    await web.post("/v1/dead/replays", asked)
    assert (await web.get("/v1/queues/elsewhere"))["length"] == 1


async def test_a_letter_without_an_origin_is_skipped(web: WebHub) -> None:
    await web.produce("queue/q/dead", "sent there by hand")
    replay = await web.post("/v1/dead/replays", {"queue": "q", "all": True})
    assert (replay["state"], replay["replayed"], replay["skipped"]) == ("done", 0, 1)
    assert replay["error"]


async def test_a_slow_replay_is_watched_and_cancelled(
    web: WebHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosswire.web.replays._WAIT_S", 0.05)
    await bury(web, "1", "2", "3")
    replay = await web.post("/v1/dead/replays", {"queue": "q", "all": True, "rate": 0.01})
    assert (replay["state"], replay["replayed"]) == ("running", 1)
    path = f"/v1/dead/replays/{replay['id']}"
    assert (await web.get(path))["state"] == "running"
    assert (await web.delete(path))["state"] == "cancelled"
    assert (await web.get("/v1/dead"))["queues"][0]["length"] == 2
    assert [each["state"] for each in (await web.get("/v1/dead/replays"))["replays"]] == [
        "cancelled"
    ]


async def test_letters_are_deleted(web: WebHub) -> None:
    first, _ = await bury(web, "1", "2")
    assert (await web.post("/v1/dead/purge", {"queue": "q", "ids": [first]}))["done"] == 1
    assert (await web.post("/v1/dead/purge", {"queue": "q", "all": True}))["done"] == 1
    assert (await web.get("/v1/dead"))["queues"] == []


@pytest.mark.parametrize("which", [{}, {"all": True, "ids": [1]}, {"filter": "nonsense"}])
async def test_it_must_be_clear_which_letters_are_meant(web: WebHub, which: dict[str, Any]) -> None:
    await bury(web, "1")
    for path in ("/v1/dead/replays", "/v1/dead/purge"):
        assert await code_of(web.post(path, {"queue": "q", **which})) == "invalid_request"


# Schedules.


async def test_schedules_are_added_listed_previewed_and_removed(web: WebHub) -> None:
    asked = {"id": "a/b", "destination": "queue/t", "cron": "0 3 * * *", "json": {"x": 1}}
    added = await web.post("/v1/schedules", asked)
    assert len(added["preview"]) == 10
    assert [each["id"] for each in (await web.get("/v1/schedules"))["schedules"]] == ["a/b"]
    shown = await web.get("/v1/schedules/a/b", count=3)
    assert shown["preview"] == added["preview"][:3]
    assert shown["message"]["json"] == {"x": 1}
    # It has an id and a time when it fires.
    assert not shown["message"].keys() & {"id", "time"}
    preview = await web.post("/v1/schedules/preview", {"cron": "0 3 * * *", "count": 2})
    assert preview["times"] == added["preview"][:2]
    assert await web.delete("/v1/schedules/a/b") == {"removed": "a/b"}
    assert await code_of(web.delete("/v1/schedules/a/b")) == "not_found"


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"interval_s": 1, "cron": "* * * * *"},
        {"cron": "never"},
        {"interval_s": -1},
        {"interval_s": 1, "destination": "service/x"},
        {"interval_s": 1, "id": "a\nb"},
        {"interval_s": 1, "id": "a\0"},
        {"interval_s": 1, "id": "x" * 256},
        {"cron": "1," * 100_000 + "1 * * * *"},
        {"cron": "\u0661 * * * *"},
    ],
)
async def test_a_schedule_that_can_not_be_kept(web: WebHub, wrong: dict[str, Any]) -> None:
    asked = {"destination": "queue/t", "text": "", **wrong}
    assert await code_of(web.post("/v1/schedules", asked)) == "invalid_request"
    assert (await web.get("/v1/schedules"))["schedules"] == []
    if len(wrong.get("cron", "")) > 256:
        assert await code_of(web.post("/v1/schedules/preview", wrong)) == "invalid_request"


# The document.


async def test_the_document_describes_every_operation(web: WebHub) -> None:
    document = await web.get("/openapi.json")
    assert document == json.loads(json.dumps(openapi()))
    paths = document["paths"].values()
    described = {each["operationId"] for path in paths for each in path.values()}
    plain = {"healthz", "readyz", "metrics", "openapi"}
    assert described == {operation.name for operation in OPERATIONS} | plain
    for name, schema in document["components"]["schemas"].items():
        for field, described_field in schema.get("properties", {}).items():
            assert described_field.get("description"), f"{name}.{field} is not described"
            assert "examples" in described_field, f"{name}.{field} has no example"
    for path in paths:
        for operation in path.values():
            assert operation["description"] and operation["tags"]
            for parameter in operation["parameters"]:
                assert parameter["description"], (operation["operationId"], parameter["name"])


def test_the_examples_of_the_document_are_valid() -> None:
    for operation in OPERATIONS:
        described = openapi()["paths"][re.sub(r"{(\w+):\w+}", r"{\1}", operation.path)]
        content = described[operation.method.lower()]["responses"]["200"]["content"]
        if operation.answer is not None:
            example = content["application/json"]["example"]
            msgspec.json.decode(json.dumps(example), type=operation.answer)
        elif operation.streams == EVENT_STREAM:
            lines = content[EVENT_STREAM]["example"].splitlines()
            assert [line.partition(":")[0] for line in lines] == ["id", "event", "data", ""]
            data = lines[2].removeprefix("data: ")
            msgspec.json.decode(data, type=JsonMessage if operation.name == "tail" else dict)
        if operation.body is not None:
            body = described[operation.method.lower()]["requestBody"]["content"]
            example = body["application/json"]["example"]
            msgspec.json.decode(json.dumps(example), type=operation.body)


def test_every_reference_of_the_document_leads_somewhere() -> None:
    document = openapi()
    names: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                if key == "$ref":
                    names.add(each.rpartition("/")[2])
                walk(each)
        elif isinstance(value, list):
            for each in value:
                walk(each)

    walk(document)
    assert names
    assert names <= set(document["components"]["schemas"])


async def test_properties_have_limits(web: WebHub) -> None:
    most = {f"p{number}": number for number in range(PROPERTIES)}
    await web.produce("queue/q", "x", properties=most)
    with pytest.raises(RequestFailed, match="at most 1000 properties, not 1001"):
        await web.produce("queue/q", "x", properties={**most, "one": "more"})
    with pytest.raises(RequestFailed, match="properties have at most 65536 bytes"):
        await web.produce("queue/q", "x", properties={"a": "x" * 70_000})
    with pytest.raises(RequestFailed, match="at most 1000 properties, not 1001"):
        asked = {"destination": "queue/q", "text": "x", "interval_s": 60}
        await web.post("/v1/schedules", {**asked, "properties": {**most, "one": "more"}})
