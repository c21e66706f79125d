"""EMP peers and the hub, over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from crosswire.access import User
from crosswire.client.native.dial import Backoff
from crosswire.client.native.emp import EmpClient, Json
from crosswire.errors import RequestFailed, StoreFull
from crosswire.hub.policies import QueuePolicy
from crosswire.server.server import Server
from crosswire.wire.emp.decoder import EmpDecoder
from crosswire.wire.emp.frames import Hello, Request, serialize, serialize_call
from tests.gateways.conftest import StartServer, port_of


class Inbox:
    """Takes deliveries, and refuses those that a test wants refused."""

    def __init__(self) -> None:
        self.got: asyncio.Queue[Json] = asyncio.Queue()
        self.refusals = 0

    async def deliver(self, data: Json) -> Json:
        if self.refusals:
            self.refusals -= 1
            raise RequestFailed("busy", "not now")
        self.got.put_nowait(data)
        return {}

    async def next(self) -> Json:
        return await asyncio.wait_for(self.got.get(), 10)


def emp(server: Server, inbox: Inbox | None = None, **handlers: Any) -> EmpClient:
    if inbox is not None:
        handlers["$deliver"] = inbox.deliver
    port = port_of(server, "emp")
    return EmpClient("127.0.0.1", port, handlers=handlers, backoff=Backoff(0.01, 0.02))


async def code_of(client: EmpClient, op: str, data: Json) -> str:
    with pytest.raises(RequestFailed) as caught:
        await client.request(op, data)
    return caught.value.code


@pytest.mark.parametrize(
    "body", [{"json": {"x": [1, None]}}, {"json": 7}, {"text": "h\u00e9"}, {"base64": "AP8="}]
)
async def test_a_message_crosses_a_queue(server: Server, body: Json) -> None:
    inbox = Inbox()
    async with emp(server, inbox) as consumer, emp(server) as producer:
        asked = {"destination": "queue/q", "properties": {"n": 1, "f": 0.5, "b": True, "s": "x"}}
        answer = await producer.request("$publish", asked | body)
        await consumer.request("$subscribe", {"destination": "queue/q"})
        assert await inbox.next() == asked | body | {"subscription": 1, "attempt": 1, **answer}


async def test_a_topic_reaches_everybody_whose_filter_matches(server: Server) -> None:
    first, second = Inbox(), Inbox()
    async with emp(server, first) as a, emp(server, second) as b:
        await a.request("$subscribe", {"destination": "topic/ticks/+"})
        await b.request("$subscribe", {"destination": "topic/#", "filter": "price>N10"})
        for price in (5, 15):
            asked = {"destination": "topic/ticks/x", "json": 1, "properties": {"price": price}}
            await a.request("$publish", asked)
        assert [(await first.next())["properties"]["price"] for _ in range(2)] == [5, 15]
        assert (await second.next())["properties"]["price"] == 15


async def test_publishes_are_answered_in_order_with_growing_ids(server: Server) -> None:
    async with emp(server) as client:
        asked = {"destination": "queue/q", "json": {}}
        ids = await asyncio.gather(*(client.request("$publish", asked) for _ in range(300)))
    numbers = [answer["id"] for answer in ids]
    assert numbers == sorted(set(numbers))


async def test_a_refused_message_comes_again(server: Server) -> None:
    inbox = Inbox()
    inbox.refusals = 1
    async with emp(server, inbox) as client:
        await client.request("$subscribe", {"destination": "queue/q"})
        await client.request("$publish", {"destination": "queue/q", "text": "x"})
        assert (await inbox.next())["attempt"] == 2


async def test_what_is_never_taken_becomes_a_dead_letter(start_server: StartServer) -> None:
    server = await start_server(queues={"q": QueuePolicy(retry=_quick())})
    inbox, dead = Inbox(), Inbox()
    inbox.refusals = 99
    async with emp(server, inbox) as client, emp(server, dead) as undertaker:
        await undertaker.request("$subscribe", {"destination": "queue/q/dead"})
        await client.request("$subscribe", {"destination": "queue/q"})
        await client.request("$publish", {"destination": "queue/q", "text": "x"})
        letter = await dead.next()
    assert letter["text"] == "x"
    assert letter["properties"]["dead-attempts"] == 5
    assert letter["properties"]["dead-cause"] == "busy: not now"


async def test_a_consumer_that_leaves_returns_what_it_held(server: Server) -> None:
    entered = asyncio.Event()

    async def stuck(_data: Json) -> Json:
        entered.set()
        await asyncio.Event().wait()
        return {}

    inbox = Inbox()
    async with emp(server) as producer, emp(server, inbox) as second:
        async with emp(server, **{"$deliver": stuck}) as first:
            await first.request("$subscribe", {"destination": "queue/q"})
            await producer.request("$publish", {"destination": "queue/q", "text": "x"})
            await entered.wait()
        await second.request("$subscribe", {"destination": "queue/q"})
        assert (await inbox.next())["attempt"] == 2


async def test_unsubscribing_ends_deliveries(server: Server) -> None:
    inbox = Inbox()
    async with emp(server, inbox) as client:
        await client.request("$subscribe", {"destination": "queue/q"})
        await client.request("$unsubscribe", {"subscription": 1})
        await client.request("$publish", {"destination": "queue/q", "text": "x"})
        assert server.hub.queue("queue/q").length == 1
        assert await code_of(client, "$unsubscribe", {"subscription": 1}) == "invalid_request"


async def test_messages_and_named_subscriptions_survive_a_restart(
    start_server: StartServer,
) -> None:
    server = await start_server()
    subscription = {"destination": "topic/t", "name": "mine", "from": "earliest"}
    async with emp(server, Inbox()) as client:
        await client.request("$subscribe", subscription)
    async with emp(server) as client:
        await client.request("$publish", {"destination": "topic/t", "text": "a"})
        await client.request("$publish", {"destination": "queue/q", "text": "b"})
    await server.stop()
    server = await start_server()
    inbox = Inbox()
    async with emp(server, inbox) as client:
        await client.request("$subscribe", subscription)
        await client.request("$subscribe", {"destination": "queue/q"})
        assert {(await inbox.next())["text"] for _ in range(2)} == {"a", "b"}


async def test_a_service_answers(server: Server) -> None:
    async def add(data: Json) -> Json:
        return {"sum": data["a"] + data["b"]}

    async with emp(server, add=add) as provider, emp(server) as caller:
        await provider.request("$serve", {"services": ["add"]})
        assert await caller.request("add", {"a": 1, "b": 2}) == {"sum": 3}
        ops = {op["name"] for op in (await caller.request("$list_ops"))["ops"]}
        assert {"add", "$echo", "$publish"} <= ops
        assert await caller.request("$get_op", {"op_name": "add"}) == {"op": {"name": "add"}}


async def test_a_providers_failure_reaches_the_caller(server: Server) -> None:
    async def fail(_data: Json) -> Json:
        raise RequestFailed("unknown_job", "no such job", data=b'{"id":1}')

    async with emp(server, fail=fail) as provider, emp(server) as caller:
        await provider.request("$serve", {"services": ["fail"]})
        with pytest.raises(RequestFailed) as caught:
            await caller.request("fail")
    assert (caught.value.code, caught.value.data) == ("unknown_job", b'{"id":1}')


async def test_a_provider_that_leaves_is_distinguished_from_none(server: Server) -> None:
    entered = asyncio.Event()

    async def stuck(_data: Json) -> Json:
        entered.set()
        await asyncio.Event().wait()
        return {}

    async with emp(server) as caller:
        assert await code_of(caller, "stuck", {}) == "unknown_op"
        async with emp(server, stuck=stuck) as provider:
            await provider.request("$serve", {"services": ["stuck"]})
            task = asyncio.create_task(code_of(caller, "stuck", {}))
            await entered.wait()
        assert await task == "provider_lost"


async def test_schedules(server: Server) -> None:
    inbox = Inbox()
    async with emp(server, inbox) as client:
        await client.request("$subscribe", {"destination": "queue/q"})
        asked = {"destination": "queue/q", "text": "tick", "interval_s": 60}
        schedule = await client.request("$schedule", asked)
        assert (await inbox.next())["text"] == "tick"
        listed = (await client.request("$list_schedules"))["schedules"]
        assert [each["schedule"] for each in listed] == [schedule["schedule"]]
        await client.request("$unschedule", schedule)
        assert (await client.request("$list_schedules"))["schedules"] == []


async def test_a_full_queue_refuses(start_server: StartServer) -> None:
    server = await start_server(queues={"q": QueuePolicy(max_length=1)})
    async with emp(server) as client:
        asked = {"destination": "queue/q", "text": "x"}
        await client.request("$publish", asked)
        assert await code_of(client, "$publish", asked) == "refused"


@pytest.mark.parametrize(
    ("op", "data", "code"),
    [
        ("$nope", {}, "unknown_op"),
        ("nobody", {}, "unknown_op"),
        ("$publish", {}, "invalid_request"),
        ("$publish", {"destination": "queue/q"}, "invalid_request"),
        ("$publish", {"destination": "queue/q", "text": "x", "json": 1}, "invalid_request"),
        ("$publish", {"destination": "queue/q", "base64": "?"}, "invalid_request"),
        ("$publish", {"destination": "nowhere", "text": "x"}, "invalid_request"),
        ("$publish", {"destination": "topic/+", "text": "x"}, "invalid_request"),
        (
            "$publish",
            {"destination": "queue/q", "text": "", "properties": {"a": []}},
            "invalid_request",
        ),
        ("$subscribe", {"destination": "service/x"}, "invalid_request"),
        ("$subscribe", {"destination": "topic/x", "filter": "nonsense"}, "invalid_request"),
        ("$subscribe", {"destination": "topic/x", "name": "n", "from": "when"}, "invalid_request"),
        ("$serve", {"services": ["$mine"]}, "forbidden"),
        ("$schedule", {"destination": "queue/q", "text": "x"}, "invalid_request"),
        ("$unschedule", {"schedule": "nope"}, "invalid_request"),
        ("$get_op", {"op_name": "nope"}, "unknown_op"),
        ("$authenticate", {"token": "x"}, "forbidden"),
    ],
)
async def test_what_can_not_be_done_is_reported_and_the_connection_kept(
    server: Server, op: str, data: Json, code: str
) -> None:
    async with emp(server) as client:
        assert await code_of(client, op, data) == code
        assert await client.request("$echo", {"still": "here"}) == {"still": "here"}


async def test_a_name_that_is_taken_is_a_conflict_and_keeps_what_waits(server: Server) -> None:
    inbox = Inbox()
    async with emp(server) as client:
        await client.request("$subscribe", {"destination": "topic/secret", "name": "n"})
    async with emp(server, inbox) as client:
        await client.request("$publish", {"destination": "topic/secret", "text": "kept"})
        with pytest.raises(RequestFailed) as caught:
            await client.request("$subscribe", {"destination": "topic/other", "name": "n"})
        assert caught.value.code == "conflict" and "secret" not in str(caught.value)
        await client.request("$subscribe", {"destination": "topic/secret", "name": "n"})
        assert (await inbox.next())["text"] == "kept"


@pytest.mark.parametrize("when", ["before", "commit"])
@pytest.mark.parametrize(
    ("op", "data"),
    [
        ("$schedule", {"destination": "queue/q", "text": "x", "interval_s": 0.1}),
        ("$subscribe", {"destination": "topic/t", "name": "n"}),
    ],
)
async def test_what_is_refused_on_a_full_disk_is_not_there(
    server: Server, op: str, data: Json, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = server.hub.store

    def fail(_batch: object) -> None:
        monkeypatch.undo()
        raise StoreFull("IO error: No space left on device: /srv/data/store/000123.log")

    async with emp(server) as client:
        await server.hub.committed()
        if when == "before":
            store._room_until = 0.0
            monkeypatch.setattr(store, "_free_bytes", lambda: 0)
        else:
            monkeypatch.setattr(store, "_write", fail)
        with pytest.raises(RequestFailed) as caught:
            await client.request(op, data)
        assert caught.value.code == "refused"
        assert "no room on the disk" in str(caught.value) and "srv" not in str(caught.value)
        monkeypatch.undo()
        store._room_until = 0.0
        await server.hub.commits.flush()
        assert server.hub.schedules.all() == [] and server.hub.subscriptions.all() == []
        await client.request(op, data)
        assert len(server.hub.schedules.all()) + len(server.hub.subscriptions.all()) == 1


async def test_rights(start_server: StartServer) -> None:
    token = "a-secret-of-anna"
    anna = User(name="anna", token=token, produce=("queue/orders",))
    server = await start_server(users=(anna,))
    async with emp(server) as client:
        asked = {"destination": "queue/orders", "text": "x"}
        assert await code_of(client, "$publish", asked) == "forbidden"
        assert await client.request("$authenticate", {"token": token}) == {"principal": "anna"}
        assert "id" in await client.request("$publish", asked)
        assert await code_of(client, "$subscribe", {"destination": "queue/orders"}) == "forbidden"
        assert await code_of(client, "some_service", {}) == "forbidden"


async def test_stopping_sends_bye_and_loses_nothing(start_server: StartServer) -> None:
    server = await start_server()
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server, "emp"))
    writer.write(bytes.fromhex("000000080000000001000000"))
    await reader.readexactly(12)
    await server.stop()
    assert await reader.read() == bytes.fromhex("0000000401000000")
    writer.close()


def _quick() -> Any:
    from crosswire.hub.policies import Retry

    return Retry(first_delay_s=0.001, longest_delay_s=0.002)


async def test_a_subscription_is_answered_before_its_first_delivery(server: Server) -> None:
    async with emp(server) as producer:
        await producer.request("$publish", {"destination": "queue/q", "text": "x"})
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server, "emp"))
    body = serialize_call("$subscribe", b'{"destination":"queue/q"}')
    writer.write(serialize(Hello(1)) + serialize(Request(1, body)))
    decoder, seen = EmpDecoder("server"), []
    while len(seen) < 3:
        seen += [row.frame for row in decoder.rows(await reader.read(4096))]
    assert seen == ["hello", "response", "request"]
    writer.close()


async def test_serving_twice_is_serving_once(server: Server) -> None:
    async def add(_data: Json) -> Json:
        return {"n": 1}

    async with emp(server) as caller:
        async with emp(server, add=add) as provider:
            await provider.request("$serve", {"services": ["add", "add"]})
            await provider.request("$serve", {"services": ["add"]})
            assert await caller.request("add") == {"n": 1}
        assert await code_of(caller, "add", {}) == "unknown_op"
