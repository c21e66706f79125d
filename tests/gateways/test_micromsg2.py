"""MicroMsg2 peers and the hub, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import pytest

from crosswire.access import User
from crosswire.client.native.dial import Backoff, dial
from crosswire.client.native.emp import EmpClient, Json
from crosswire.client.native.micromsg2 import (
    MicroMsg2Client,
    MicroMsg2Delivery,
    MicroMsg2Subscription,
    client_offer,
)
from crosswire.config import ProtocolLimits
from crosswire.errors import ConnectionLost, RequestFailed
from crosswire.hub.policies import QueuePolicy, Retry, TopicPolicy
from crosswire.server.server import Server
from crosswire.session import Session
from crosswire.wire.contract import Event
from crosswire.wire.micromsg2.connection import MicroMsg2Connection
from crosswire.wire.micromsg2.events import MessageReceived, Opened
from crosswire.wire.micromsg2.extensions import DOTNET, JSON, PUB_SUB, Offer, batch_ack
from crosswire.wire.micromsg2.frames import Extension, MicroMsg2Limits, message_prefix
from tests.gateways.conftest import StartServer, port_of

PROPERTIES: dict[str, Any] = {
    "n": 7,
    "f": 0.5,
    "b": True,
    "c": False,
    "s": "h\u00e9 ;:%",
    "Big": -(1 << 63),
}
ON_THE_WIRE = PROPERTIES | {"b": "true", "c": "false"}
del ON_THE_WIRE["Big"]
ON_THE_WIRE["big"] = -(1 << 63)


def micro(server: Server, **options: Any) -> MicroMsg2Client:
    window = options.pop("window", 100)
    options.setdefault("offer", client_offer(window=window, auth=options.pop("auth", None)))
    port = port_of(server, "micromsg2")
    return MicroMsg2Client("127.0.0.1", port, backoff=Backoff(0.01, 0.02), **options)


def offer(*extensions: Extension, acks: int | None = 10) -> Offer:
    """Exactly these extensions, beside pub/sub and acknowledgements."""
    given = (*extensions, Extension(PUB_SUB), *((batch_ack(acks),) if acks else ()))
    return Offer(required=given, supported=frozenset(each.name for each in given))


async def following(subscription: MicroMsg2Subscription) -> MicroMsg2Delivery:
    return await asyncio.wait_for(anext(subscription), 10)


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


def attached(server: Server) -> int:
    return sum(len(gateway.attachments) for gateway in server.context.gateways.values())


async def echo(asked: MicroMsg2Delivery) -> tuple[bytes, dict[str, Any]]:
    return asked.payload[::-1], {"echoed": len(asked.payload)}


@asynccontextmanager
async def serving(server: Server, destination: str, responder: Any) -> AsyncIterator[None]:
    async with micro(server) as provider:
        await provider.serve(destination, responder)
        await until(lambda: server.hub.is_served(destination))
        yield


async def answer_of(client: MicroMsg2Client, destination: str, **properties: Any) -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        await client.call(destination, b"", properties)
    return caught.value


async def error_of(client: MicroMsg2Client) -> str:
    """The ERROR with which the server ended the connection."""
    peer = await client.peer()
    await asyncio.wait_for(asyncio.wait([peer.ended]), 10)
    assert peer.error is not None
    return str(peer.error.code)


# ------------------------------------------------------------------------------ produce and consume


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("size", [0, 128, 256, 65537, 3 * 1024 * 1024 + 1])
async def test_a_message_crosses_a_queue(server: Server, window: int | None, size: int) -> None:
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    async with micro(server, window=window) as client:
        await client.send("queue/q", payload, PROPERTIES)
        async with client.subscribe("queue/q") as got:
            delivery = await following(got)
    assert delivery.payload == payload
    assert delivery.destination == "queue/q"
    assert delivery.properties == ON_THE_WIRE


@pytest.mark.parametrize("window", [None, 1, 7, 1000])
async def test_many_messages_keep_their_order(server: Server, window: int | None) -> None:
    """Windows are passed many times over, and no message twice."""
    count = 300
    async with micro(server, window=window) as producer, micro(server, window=window) as consumer:
        async with consumer.subscribe("queue/q") as got:
            peer = await producer.peer()
            sent = [peer.send("queue/q", b"%d" % number) for number in range(count)]
            numbers = [int((await following(got)).payload) for _ in range(count)]
            await asyncio.gather(*sent)
        await until(lambda: server.hub.queue("queue/q").length == 0)
    assert numbers == list(range(count))


class Shuttle:
    """Publishes to itself, a full window at a time, until `count` messages came back."""

    session: Session

    def __init__(self, count: int) -> None:
        self.count = count
        self.got = 0
        self.to_send = iter(range(count))
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def handle_events(self, events: list[Event]) -> None:
        connection = self.session.connection
        assert isinstance(connection, MicroMsg2Connection)
        if isinstance(events[0], Opened):
            connection.send_subscribe("topic/t")
        messages = [event for event in events if isinstance(event, MessageReceived)]
        connection.acknowledge(*(message.sequence for message in messages))
        for number, message in enumerate(messages, self.got):
            if int(message.payload) != number and not self.done.done():
                self.done.set_exception(AssertionError(f"{message} where {number} was due"))
        self.got += len(messages)
        prefix = message_prefix(b"topic/t", b"")
        run = [(prefix, b"%d" % number) for number in islice(self.to_send, connection.credit)]
        if run:
            connection.send_run(run)
        elif self.got == self.count and not self.done.done():
            self.done.set_result(None)

    def handle_drain(self) -> None:
        pass


@pytest.mark.slow
async def test_sequence_numbers_wrap(start_server: StartServer) -> None:
    server = await start_server(topics={"t": TopicPolicy(durable=False)})
    shuttle = Shuttle(66_000)
    session = await dial(
        "127.0.0.1",
        port_of(server, "micromsg2"),
        lambda now: MicroMsg2Connection("client", now, offer=offer(acks=2000)),
        shuttle,
    )
    await asyncio.wait_for(shuttle.done, 10)
    session.transport.abort()
    assert shuttle.got == 66_000


async def test_a_bare_name_is_a_queue(server: Server) -> None:
    async with micro(server) as client, client.subscribe("orders") as got:
        await client.send("orders", b"x")
        assert (await following(got)).destination == "orders"
        assert server.hub.queue("queue/orders").length == 1


async def test_each_message_of_a_run_has_its_own_head(server: Server) -> None:
    text, own = {"content-type": "text/plain"}, {"price": 12}
    heads: list[dict[str, Any]] = [text, {}, text, {**text, **own}, {}, own, text]
    async with micro(server) as client:
        # The second time a shorter name replaces heads that are known; the third time all are.
        for name in ("queue/q", "q", "q"):
            for each in heads:
                await client.send("queue/q", b"x", each)
            async with client.subscribe(name) as got:
                deliveries = [await following(got) for _ in heads]
            assert [each.properties for each in deliveries] == heads
            assert {each.destination for each in deliveries} == {name}


async def test_what_is_acknowledged_is_on_disk(start_server: StartServer) -> None:
    server = await start_server()
    async with micro(server) as client:
        await client.send("queue/q", b"kept")
        assert server.hub.committed_id >= server.hub.queue("queue/q").visible > 0
    await server.stop()
    server = await start_server()
    async with micro(server) as client, client.subscribe("queue/q") as got:
        assert (await following(got)).payload == b"kept"


async def test_a_topic_reaches_everybody_whose_filter_matches(server: Server) -> None:
    async with micro(server) as one, micro(server, window=None) as other:
        every = one.subscribe("topic/ticks/+")
        picked = other.subscribe("topic/#", filter="price>N10;hot=Ttrue")
        async with every, picked:
            await until(lambda: attached(server) == 2)
            for price in (5, 15):
                await one.send("topic/ticks/x", b"", {"price": price, "hot": True})
            assert [(await following(every)).properties["price"] for _ in "ab"] == [5, 15]
            delivery = await following(picked)
    assert (delivery.destination, delivery.properties["price"]) == ("topic/ticks/x", 15)


async def test_a_named_subscription_goes_on_after_a_restart(start_server: StartServer) -> None:
    server = await start_server()
    async with micro(server) as client, client.subscribe("topic/t", name="mine") as got:
        await client.send("topic/t", b"1")
        await client.send("topic/t", b"2")
        assert (await following(got)).payload == b"1"
    await server.stop()
    server = await start_server()
    async with micro(server) as client:
        await client.send("topic/t", b"3")
        async with client.subscribe("topic/t", name="mine") as got:
            assert [(await following(got)).payload for _ in range(2)] == [b"2", b"3"]


async def test_a_subscription_can_begin_at_the_beginning(server: Server) -> None:
    async with micro(server) as client:
        await client.send("topic/t", b"old")
        async with client.subscribe("topic/t", start="earliest") as got:
            assert (await following(got)).payload == b"old"


async def test_subscriptions_of_a_connection_share_its_window(server: Server) -> None:
    async with micro(server, window=3) as client:
        for queue in ("queue/a", "queue/b"):
            for _ in range(5):
                await client.send(queue, b"")
        a = client.subscribe("queue/a", manual=True)
        b = client.subscribe("queue/b", manual=True)
        async with a, b:
            held = [await following(a) for _ in range(3)]
            assert (a.held, b.held) == (0, 0)
            for delivery in held:
                delivery.acknowledge()
            await until(lambda: a.held + b.held == 3)


async def test_a_subscription_may_ask_for_a_smaller_window(server: Server) -> None:
    async with micro(server) as client:
        for _ in range(5):
            await client.send("queue/q", b"")
        async with client.subscribe("queue/q", window=2, manual=True) as got:
            await following(got)
            await client.send("queue/other", b"after all that was delivered")
            assert got.held == 1


async def test_unsubscribing_returns_what_was_not_acknowledged(server: Server) -> None:
    async with micro(server) as first, micro(server) as second:
        await first.send("queue/q", b"1")
        await first.send("queue/q", b"2")
        async with first.subscribe("queue/q", manual=True) as got:
            (await following(got)).acknowledge()
            late = await following(got)
        async with second.subscribe("queue/q") as got:
            assert (await following(got)).payload == b"2"
            late.acknowledge()
            await first.send("queue/other", b"the connection is still there")


async def test_a_consumer_that_leaves_returns_what_it_held(server: Server) -> None:
    async with micro(server) as second:
        async with micro(server) as first:
            await first.send("queue/q", b"x")
            subscription = first.subscribe("queue/q", manual=True)
            await subscription.__aenter__()
            await following(subscription)
        async with second.subscribe("queue/q") as got:
            assert (await following(got)).payload == b"x"


async def test_a_client_that_sends_and_closes_is_served(server: Server) -> None:
    """Without acknowledgements the end of the bytes comes right after the last message."""
    async with micro(server, window=None) as client:
        peer = await client.peer()
        for _ in range(10):
            peer.send("queue/q", b"x")
    await until(lambda: not server.context.gateways)
    assert server.hub.queue("queue/q").length == 10


async def test_a_lost_connection_is_made_again(start_server: StartServer) -> None:
    server = await start_server()
    async with micro(server) as client, client.subscribe("queue/q") as got:
        peer = await client.peer()
        (gateway,) = server.context.gateways.values()
        gateway.session.transport.abort()
        await asyncio.wait([peer.ended])
        await client.send("queue/q", b"again")
        assert (await following(got)).payload == b"again"


# -------------------------------------------------------------------------------------- extensions


async def test_json_is_marked_for_other_protocols(server: Server) -> None:
    got: asyncio.Queue[Json] = asyncio.Queue()

    async def deliver(data: Json) -> Json:
        got.put_nowait(data)
        return {}

    emp = EmpClient("127.0.0.1", port_of(server, "emp"), handlers={"$deliver": deliver})
    async with emp, micro(server, offer=offer(Extension(JSON))) as client:
        await emp.request("$subscribe", {"destination": "queue/q"})
        await client.send("queue/q", b'{"x": 1}', {"b": True})
        data = await asyncio.wait_for(got.get(), 10)
    assert (data["json"], data["properties"]) == ({"x": 1}, {"b": True})


@pytest.mark.parametrize(
    ("body", "payload", "content_type"),
    [
        ({"json": [1]}, b"[1]", None),
        ({"text": "h\u00e9"}, '{"text":"h\u00e9"}'.encode(), "text/plain"),
        ({"base64": "AP8="}, b'{"base64":"AP8="}', "application/octet-stream"),
        ({"base64": "Mg=="}, b"2", None),
        ({"base64": "IHsgfQo="}, b" { }\n", None),
        ({"text": "2"}, b"2", "text/plain"),
    ],
)
async def test_a_json_peer_gets_json(
    server: Server, body: Json, payload: bytes, content_type: str | None
) -> None:
    async with EmpClient("127.0.0.1", port_of(server, "emp")) as emp:
        await emp.request("$publish", {"destination": "queue/q"} | body)
    json_only = offer(Extension(JSON))
    async with micro(server, offer=json_only) as client, client.subscribe("queue/q") as got:
        delivery = await following(got)
    assert delivery.payload == payload
    assert delivery.properties.get("content-type") == content_type


@pytest.mark.parametrize(
    ("body", "payload", "content_type"),
    [
        ({"json": {"a": 1}}, b'{"a":1}', "application/json"),
        ({"text": "x"}, b"x", "text/plain"),
        ({"base64": "AP8="}, b"\x00\xff", None),
    ],
)
async def test_others_payloads_arrive_unchanged_with_their_type(
    server: Server, body: Json, payload: bytes, content_type: str | None
) -> None:
    async with EmpClient("127.0.0.1", port_of(server, "emp")) as emp:
        await emp.request("$publish", {"destination": "queue/q"} | body)
    async with micro(server) as client, client.subscribe("queue/q") as got:
        delivery = await following(got)
    assert delivery.payload == payload
    assert delivery.properties.get("content-type") == content_type


async def test_a_content_type_goes_through(server: Server) -> None:
    async with micro(server) as client, client.subscribe("queue/q") as got:
        properties: dict[str, Any] = {
            "content-type": "text/plain",
            "correlation-id": "7",
            "reply-to": "queue/r",
            "a": 1,
        }
        await client.send("queue/q", b"x", properties)
        assert (await following(got)).properties == properties


async def test_a_dotnet_type_is_a_property_elsewhere(server: Server) -> None:
    properties = {"dotnet-type": "Some.Type, Assembly"}
    async with micro(server, offer=offer(Extension(DOTNET))) as typed, micro(server) as plain:
        here, there = typed.subscribe("topic/t"), plain.subscribe("topic/t")
        async with here, there:
            await until(lambda: attached(server) == 2)
            await typed.send("topic/t", b"", properties)
            assert (await following(there)).properties == properties
            assert (await following(here)).properties == properties


# ---------------------------------------------------------------------------------- call and serve


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("size", [3, 2 * 1024 * 1024 + 5])
async def test_a_service_answers(server: Server, window: int | None, size: int) -> None:
    payload = b"ab" * (size // 2)
    async with serving(server, "service/echo", echo), micro(server, window=window) as caller:
        answer = await caller.call("service/echo/method", payload)
    assert answer.payload == payload[::-1]
    assert answer.properties["echoed"] == len(payload)


async def test_a_client_may_serve_itself_within_a_window_of_one(server: Server) -> None:
    async with micro(server, window=1) as client:
        await client.serve("service/echo", echo)
        assert (await client.call("service/echo", b"ab")).payload == b"ba"


async def test_many_calls_at_once(server: Server) -> None:
    async with serving(server, "service/echo", echo), micro(server) as caller:
        calls = [caller.call("service/echo", b"%d" % number) for number in range(500)]
        answers = await asyncio.gather(*calls)
    assert [int(answer.payload[::-1]) for answer in answers] == list(range(500))


async def test_a_correlation_comes_back_as_it_was_sent(server: Server) -> None:
    """Text or number; the client's own calls have text."""
    answers: list[MicroMsg2Delivery] = []
    async with serving(server, "service/echo", echo), micro(server) as caller:
        peer = await caller.peer()
        peer._route = answers.append
        for correlation in ("x y", 12):
            properties = {"reply-to": "reply/here", "correlation-id": correlation}
            await peer.send("service/echo", b"", properties)
        await until(lambda: len(answers) == 2)
    assert [answer.destination for answer in answers] == ["reply/here", "reply/here"]
    assert [answer.properties["correlation-id"] for answer in answers] == ["x y", 12]


async def test_an_answer_may_go_to_a_queue(server: Server) -> None:
    async with serving(server, "service/echo", echo), micro(server) as caller:
        properties = {"reply-to": "answers", "correlation-id": "7"}
        await caller.send("service/echo", b"ab", properties)
        await caller.send("service/nobody", b"", properties)
        async with caller.subscribe("queue/answers") as got:
            answers = [(await following(got)) for _ in range(2)]
    (failed,) = [answer for answer in answers if "error" in answer.properties]
    (answered,) = [answer for answer in answers if "error" not in answer.properties]
    assert answered.payload == b"ba"
    assert answered.properties == {"echoed": 2, "correlation-id": "7"}
    assert (failed.properties["error"], failed.properties["correlation-id"]) == ("unknown_op", "7")


async def test_an_answer_reaches_a_queue_when_the_caller_has_left(server: Server) -> None:
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def slow(asked: MicroMsg2Delivery) -> bytes:
        entered.set()
        await go_on.wait()
        return asked.payload

    async with serving(server, "service/slow", slow):
        async with micro(server) as caller:
            await caller.send("service/slow", b"x", {"reply-to": "queue/answers"})
            await entered.wait()
        await until(lambda: len(server.context.gateways) == 1)
        go_on.set()
        async with micro(server) as client, client.subscribe("queue/answers") as got:
            assert (await following(got)).payload == b"x"


async def test_a_providers_failure_reaches_the_caller(server: Server) -> None:
    async def fail(_asked: MicroMsg2Delivery) -> bytes:
        raise RequestFailed("unknown_job", "no such job", data=b"details")

    async with serving(server, "service/fail", fail), micro(server) as caller:
        failure = await answer_of(caller, "service/fail")
    assert (failure.code, failure.description) == ("unknown_job", "no such job")
    assert failure.data == b"details"


async def test_ways_of_getting_no_answer_are_distinguished(server: Server) -> None:
    entered = asyncio.Event()

    async def stuck(_asked: MicroMsg2Delivery) -> bytes:
        entered.set()
        await asyncio.Event().wait()
        return b""

    async with micro(server) as caller:
        assert (await answer_of(caller, "service/stuck")).code == "unknown_op"
        async with serving(server, "service/stuck", stuck):
            assert (await answer_of(caller, "service/stuck", timeout=0.01)).code == "timeout"
            entered.clear()
            task = asyncio.create_task(answer_of(caller, "service/stuck"))
            await entered.wait()
        assert (await task).code == "provider_lost"


async def test_a_json_peer_gets_failures_in_json(server: Server) -> None:
    async with micro(server, offer=offer(Extension(JSON))) as caller:
        with pytest.raises(RequestFailed) as caught:
            await caller.call("service/nobody", b"{}")
    assert (caught.value.code, caught.value.data) == ("unknown_op", b"null")


async def test_a_late_answer_harms_nobody(server: Server) -> None:
    go_on = asyncio.Event()

    async def slow(asked: MicroMsg2Delivery) -> bytes:
        await go_on.wait()
        return asked.payload

    async with serving(server, "service/slow", slow), micro(server) as caller:
        assert (await answer_of(caller, "service/slow", timeout=0.01)).code == "timeout"
        go_on.set()
        assert (await caller.call("service/slow", b"x")).payload == b"x"
        assert server.context.counters["late", "micromsg2"] == 1


async def test_ending_a_service(server: Server) -> None:
    async with micro(server) as provider, micro(server) as caller:
        await provider.serve("service/echo", echo)
        await until(lambda: server.hub.is_served("service/echo"))
        peer = await provider.peer()
        peer.connection.send_unsubscribe("service/echo")
        peer.session.wake()
        await until(lambda: not server.hub.is_served("service/echo"))
        assert (await answer_of(caller, "service/echo")).code == "unknown_op"


async def test_calls_cross_protocols(server: Server) -> None:
    async def add(data: Json) -> Json:
        return {"sum": data["a"] + data["b"]}

    emp = EmpClient("127.0.0.1", port_of(server, "emp"), handlers={"add": add})
    async with emp, micro(server) as client:
        await emp.request("$serve", {"services": ["add"]})
        properties = {"content-type": "application/json"}
        answer = await client.call("service/add", b'{"a": 1, "b": 2}', properties)
        assert (answer.payload, answer.properties["content-type"]) == (
            b'{"sum":3}',
            "application/json",
        )

        async def upper(asked: MicroMsg2Delivery) -> tuple[bytes, dict[str, Any]]:
            return asked.payload.upper(), {"content-type": "application/json"}

        await client.serve("service/upper", upper)
        await until(lambda: server.hub.is_served("service/upper"))
        assert await emp.request("upper", {"a": "b"}) == {"A": "B"}


# ------------------------------------------------------------------------------------------ limits


async def test_a_full_queue_withholds_acknowledgements(start_server: StartServer) -> None:
    server = await start_server(queues={"q": QueuePolicy(max_length=2)})
    async with micro(server) as producer, micro(server) as consumer:
        peer = await producer.peer()
        sent = [peer.send("queue/q", b"%d" % number) for number in range(6)]
        await asyncio.gather(*sent[:2])
        await until(lambda: server.context.counters["refused", "micromsg2"] == 4)
        assert not any(each.done() for each in sent[2:])
        async with consumer.subscribe("queue/q") as got:
            numbers = [int((await following(got)).payload) for _ in range(6)]
        await asyncio.gather(*sent)
    assert numbers == list(range(6))


async def test_a_full_queue_does_not_hold_up_other_destinations(
    start_server: StartServer,
) -> None:
    server = await start_server(queues={"q": QueuePolicy(max_length=1)})
    async with micro(server) as client, client.subscribe("queue/other") as got:
        peer = await client.peer()
        for destination in ("queue/q", "queue/q", "queue/other"):
            peer.send(destination, b"x")
        assert (await following(got)).payload == b"x"


async def test_without_acknowledgements_a_full_queue_ends_the_connection(
    start_server: StartServer,
) -> None:
    server = await start_server(queues={"q": QueuePolicy(max_length=1)})
    async with micro(server, window=None) as client:
        await client.send("queue/q", b"x")
        await client.send("queue/q", b"x")
        assert await error_of(client) == "limit"
    assert server.hub.queue("queue/q").length == 1


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 10])
async def test_a_peer_that_does_not_read_gets_no_more_than_it_may(
    start_server: StartServer, window: int | None
) -> None:
    server = await start_server()
    async with micro(server) as producer:
        for _ in range(60):
            await producer.send("queue/q", bytes(1 << 20))
        async with micro(server, window=window) as consumer:
            peer = await consumer.peer()
            peer.connection.reading = False
            subscription = consumer.subscribe("queue/q", manual=True)
            await subscription.__aenter__()
            await producer.send("queue/other", b"others go on")
            queue = server.hub.queue("queue/q")
            (gateway,) = [each for each in server.context.gateways.values() if each.attachments]
            (attachment,) = gateway.attachments
            await until(lambda: gateway.session.congested)
            await producer.send("queue/other", b"and on")
            assert queue.length >= 40
            assert len(attachment.held) <= 20  # type: ignore[attr-defined]


async def test_a_slow_subscriber_loses_and_the_others_do_not(start_server: StartServer) -> None:
    server = await start_server(topics={"t": TopicPolicy(durable=False)})
    async with micro(server) as fast, micro(server, window=None) as slow, micro(server) as producer:
        (await slow.peer()).connection.reading = False
        async with fast.subscribe("topic/t") as got, slow.subscribe("topic/t"):
            await until(lambda: attached(server) == 2)
            for number in range(30):
                await producer.send("topic/t", b"%d" % number + bytes(1 << 20))
                delivery = await following(got)
                assert delivery.payload.startswith(b"%d" % number)


async def test_what_micromsg2_can_not_carry_is_a_dead_letter(start_server: StartServer) -> None:
    quick = Retry(first_delay_s=0.001, longest_delay_s=0.002)
    server = await start_server(queues={"q": QueuePolicy(retry=quick)})
    emp = EmpClient("127.0.0.1", port_of(server, "emp"))
    async with emp, micro(server) as client, client.subscribe("queue/q") as got:
        asked = {"destination": "queue/q", "text": "", "properties": {"a": "ü" * 30_000}}
        await emp.request("$publish", asked)
        await emp.request("$publish", {"destination": "queue/q", "text": "next"})
        assert (await following(got)).payload == b"next"
        await until(lambda: server.hub.queue("queue/q/dead").length == 1)


async def test_what_waits_for_a_full_queue_is_bounded(start_server: StartServer) -> None:
    limits = ProtocolLimits(micromsg2=MicroMsg2Limits(message_bytes=1000))
    server = await start_server(queues={"q": QueuePolicy(max_length=1)}, limits=limits)
    async with micro(server) as client:
        peer = await client.peer()
        for _ in range(3):
            peer.send("queue/q", bytes(600)).add_done_callback(lambda done: done.exception())
        await asyncio.wait_for(asyncio.wait([peer.ended]), 10)
        assert peer.error is not None
        assert peer.error.code == "limit"


async def never(_asked: MicroMsg2Delivery) -> bytes:
    await asyncio.Event().wait()
    return b""


async def test_open_calls_are_bounded_by_withheld_acknowledgements(server: Server) -> None:
    async with serving(server, "service/stuck", never), micro(server, window=2000) as caller:
        peer = await caller.peer()
        sent = [peer.send("service/stuck", b"", {"reply-to": "reply/x"}) for _ in range(1100)]
        await asyncio.wait_for(sent[1023], 10)
        await until(
            lambda: any(len(each.calls) == 1100 for each in server.context.gateways.values())
        )
        assert sum(each.done() for each in sent) == 1024
        for each in sent:
            each.cancel()


async def test_open_calls_without_acknowledgements_end_in_an_error(server: Server) -> None:
    async with serving(server, "service/stuck", never), micro(server, window=None) as caller:
        peer = await caller.peer()
        for _ in range(1100):
            peer.send("service/stuck", b"", {"reply-to": "reply/x"})
        await asyncio.wait_for(asyncio.wait([peer.ended]), 10)
        assert peer.error is not None
        assert peer.error.code == "limit"


async def test_unsubscribing_forgets_what_was_not_sent(start_server: StartServer) -> None:
    """A window of one frame, many messages after it, and a second subscription to the same."""
    server = await start_server(topics={"t": TopicPolicy(durable=False)})
    async with micro(server, window=1) as client, micro(server) as producer:
        async with client.subscribe("topic/t", manual=True) as got:
            await until(lambda: attached(server) == 1)
            for number in range(20):
                await producer.send("topic/t", b"%d" % number)
            first = await following(got)
        await until(lambda: attached(server) == 0)
        first.acknowledge()
        async with client.subscribe("topic/t") as got:
            await until(lambda: attached(server) == 1)
            await producer.send("topic/t", b"new")
            assert (await following(got)).payload == b"new"


# ------------------------------------------------------------------------------------------ rights

TOKEN = "a-secret-of-anna"
ANNA = User(name="anna", token=TOKEN, produce=("queue/orders",), call=("service/a",))


async def test_a_token_identifies_the_peer(start_server: StartServer) -> None:
    server = await start_server(users=(ANNA,))
    async with micro(server, auth=TOKEN) as client:
        await client.send("queue/orders", b"x")
        (gateway,) = server.context.gateways.values()
        assert gateway.principal == "anna"


async def test_a_wrong_token_is_rejected(start_server: StartServer) -> None:
    server = await start_server(users=(ANNA,))
    client = micro(server, auth="not-the-secret-of-anna")
    async with client:
        assert await error_of(client) == "forbidden"
    assert server.context.counters["unauthenticated", "micromsg2"] > 0


@pytest.mark.parametrize(
    ("auth", "command"),
    [
        (None, ("send", "queue/orders")),
        (TOKEN, ("send", "queue/other")),
        (TOKEN, ("subscribe", "queue/orders")),
        (TOKEN, ("serve", "service/a")),
        (TOKEN, ("send", "service/other")),
    ],
)
async def test_what_is_not_allowed_ends_the_connection(
    start_server: StartServer, auth: str | None, command: tuple[str, str]
) -> None:
    server = await start_server(users=(ANNA,))
    async with micro(server, auth=auth) as client:
        peer = await client.peer()
        verb, destination = command
        if verb == "send":
            peer.send(destination, b"").add_done_callback(lambda done: done.exception())
        else:
            getattr(peer.connection, f"send_{verb}")(destination)
            peer.session.wake()
        assert await error_of(client) == "forbidden"


async def test_a_call_that_is_not_allowed_is_answered(start_server: StartServer) -> None:
    server = await start_server(users=(ANNA,))
    async with micro(server, auth=TOKEN) as client:
        assert (await answer_of(client, "service/other")).code == "forbidden"
        assert (await answer_of(client, "service/a")).code == "unknown_op"


# ------------------------------------------------------------------------------------- bad peers


@pytest.mark.parametrize(
    ("command", "arguments", "error"),
    [
        ("subscribe", {"destination": "nowhere/x"}, "unknown-destination"),
        ("subscribe", {"destination": "service/x"}, "unknown-destination"),
        ("subscribe", {"destination": "topic/x", "filter": "nonsense"}, "malformed"),
        ("subscribe", {"destination": "topic/x", "name": "n", "start": "when"}, "malformed"),
        ("serve", {"destination": "queue/x"}, "unknown-destination"),
    ],
)
async def test_a_command_that_can_not_be_obeyed(
    server: Server, command: str, arguments: dict[str, str], error: str
) -> None:
    async with micro(server) as client:
        peer = await client.peer()
        getattr(peer.connection, f"send_{command}")(**arguments)
        peer.session.wake()
        assert await error_of(client) == error


async def test_a_name_that_is_taken_is_forbidden(server: Server) -> None:
    server.hub.subscriptions.named("n", "topic/secret", "", None, server.context.now())
    async with micro(server) as client:
        peer = await client.peer()
        peer.connection.send_subscribe(destination="topic/x", name="n")
        peer.session.wake()
        assert await error_of(client) == "forbidden"
    assert server.hub.subscriptions.all()[0].definition.pattern == "secret"


@pytest.mark.parametrize(
    ("destination", "properties"),
    [
        ("topic/+", {}),
        ("elsewhere/x", {}),
        ("service/x", {"reply-to": "service/y"}),
        ("service/x", {"reply-to": "reply/" + "x" * 255}),
    ],
)
async def test_a_destination_that_is_none(
    server: Server, destination: str, properties: dict[str, str]
) -> None:
    async with micro(server) as client:
        peer = await client.peer()
        with pytest.raises(ConnectionLost):
            await peer.send(destination, b"", properties)
        assert peer.error is not None
        assert peer.error.code == "unknown-destination"


async def test_an_unsubscribe_that_names_nothing_is_nothing(server: Server) -> None:
    async with micro(server) as client:
        peer = await client.peer()
        peer.connection.send_unsubscribe("queue/never")
        await client.send("queue/q", b"still here")
        assert await client.peer() is peer
    assert server.hub.queue("queue/q").length == 1


async def test_garbage_harms_nobody_else(server: Server) -> None:
    async with micro(server) as client, client.subscribe("queue/q") as got:
        for garbage in (b"\x00" * 100, b"GET / HTTP/1.1\r\n\r\n", b"\x01\x00\x00\x01\xff\0\0\0\0"):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port_of(server, "micromsg2")
            )
            writer.write(garbage)
            writer.write_eof()
            assert (await reader.read())[:1] in (b"\x04", b"\x0c", b"")
            writer.close()
        await client.send("queue/q", b"x")
        assert (await following(got)).payload == b"x"


async def test_stopping_lets_settle_and_closes(start_server: StartServer) -> None:
    server = await start_server()
    async with micro(server) as client:
        peer = await client.peer()
        await server.stop()
        await asyncio.wait_for(peer.ended, 10)
        assert peer.error is None
