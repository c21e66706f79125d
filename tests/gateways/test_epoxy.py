"""Epoxy peers and the hub, over real sockets."""

from __future__ import annotations

import asyncio
import re
import ssl
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from crosswire.access import User
from crosswire.bond import hub_module, idl, marshal
from crosswire.bond.dialect import Dialect
from crosswire.client.native.dial import Backoff
from crosswire.client.native.emp import EmpClient, Json
from crosswire.client.native.epoxy import CallReply, EpoxyClient, Handlers, IncomingCall, offer
from crosswire.config import LISTENERS, BondFiles, ConnectionLimits, ProtocolLimits, TlsFiles
from crosswire.envelope import Envelope
from crosswire.errors import CallFailed, ConnectionLost, RequestFailed
from crosswire.gateways.payloads import BOND, BYTES, JSON, TEXT, unwrap, wrap
from crosswire.hub.policies import QueuePolicy, Retry, ServicePolicy, TopicPolicy
from crosswire.server.server import Server
from crosswire.wire.epoxy.comm import Error, ErrorCode, marshal_credentials, marshal_error
from crosswire.wire.epoxy.frames import EpoxyLimits
from tests.conftest import TlsPair
from tests.gateways.conftest import StartServer, port_of

HUB = hub_module().service("crosswire.Hub")
SUBSCRIBER = hub_module().service("crosswire.Subscriber")
CALC_FILE = Path(__file__).parents[2] / "examples" / "calc.bond"
CALC = idl.load(CALC_FILE).service("examples.calc.Calc")
PARAMS = CALC.method("Calculate").request
RESULT = CALC.method("Calculate").response
CALCULATE = "examples.calc.Calc/Calculate"
LAYER = marshal.marshal(PARAMS.python_class(x=1), PARAMS)
TOKEN = "a-secret-of-anna"
BOND_FILES = BondFiles(files=(str(CALC_FILE),))

assert RESULT is not None
Params, Result = PARAMS.python_class, RESULT.python_class


def make(name: str, /, **values: Any) -> Any:
    """A struct of the hub's own."""
    return hub_module().struct(f"crosswire.{name}").python_class(**values)


PROPERTIES = {
    "n": make("Value", integer=1),
    "f": make("Value", real=0.5),
    "b": make("Value", truth=True),
    "s": make("Value", text="x"),
}


class Inbox:
    """Takes deliveries; a test settles them."""

    def __init__(self) -> None:
        self.got: asyncio.Queue[tuple[Any, IncomingCall]] = asyncio.Queue()

    async def deliver(self, delivery: Any, call: IncomingCall) -> None:
        self.got.put_nowait((delivery, call))

    async def next(self) -> Any:
        return (await self.next_call())[0]

    async def next_call(self) -> tuple[Any, IncomingCall]:
        return await asyncio.wait_for(self.got.get(), 10)


class Calculator:
    async def calculate(self, params: Any) -> Any:
        if params.operation == 1 and not params.y:
            raise CallFailed(17, "can't divide by zero")
        return Result(z=params.x * params.y)

    async def note(self, params: Any) -> None:
        raise AssertionError(params)


def epoxy(server: Server, inbox: Inbox | None = None, **options: Any) -> EpoxyClient:
    handlers: Handlers = options.pop("handlers", {})
    if inbox is not None:
        handlers = {**handlers, **offer(SUBSCRIBER, inbox)}
    options.setdefault("limits", EpoxyLimits(drain_s=0.1, goodbye_s=0.5))
    return EpoxyClient(
        "127.0.0.1",
        port_of(server, "epoxy"),
        handlers=handlers,
        backoff=Backoff(0.01, 0.02),
        **options,
    )


def emp(server: Server, **handlers: Any) -> EmpClient:
    port = port_of(server, "emp")
    return EmpClient("127.0.0.1", port, handlers=handlers, backoff=Backoff(0.01, 0.02))


async def publish(client: EpoxyClient, destination: str, payload: bytes = b"x", **more: Any) -> int:
    publication = make("Publication", destination=destination, payload=payload, **more)
    identifier: int = (await client.call(HUB, "Publish", publication)).id
    return identifier


async def subscribe(client: EpoxyClient, destination: str, **more: Any) -> int:
    asked = make("Subscription", destination=destination, **more)
    number: int = (await client.call(HUB, "Subscribe", asked)).subscription
    return number


async def settle(client: EpoxyClient, *deliveries: Any, **more: Any) -> int:
    ids = [delivery.id for delivery in deliveries]
    settlement = make("Settlement", subscription=deliveries[0].subscription, ids=ids, **more)
    count: int = (await client.call(HUB, "Settle", settlement)).count
    return count


async def serve(client: EpoxyClient, *services: str) -> None:
    await client.call(HUB, "Serve", make("Services", services=list(services)))


async def code_of(called: Awaitable[object]) -> str:
    with pytest.raises(CallFailed) as caught:
        await called
    return caught.value.code


def answering(reply: Callable[[IncomingCall], bytes | CallReply]) -> dict[tuple[str, str], Any]:
    """Handlers of the method `svc.M`."""

    async def handle(call: IncomingCall) -> bytes | CallReply:
        return reply(call)

    return {("svc", "M"): handle}


def stuck(entered: asyncio.Event) -> dict[tuple[str, str], Any]:
    async def handle(_call: IncomingCall) -> bytes:
        entered.set()
        await asyncio.Event().wait()
        return b""

    return {("svc", "M"): handle}


# ------------------------------------------------------------------------- publishing, consuming


@pytest.mark.parametrize(
    ("payload", "content_type"),
    [(b'{"x":1}', JSON), (b"hi", TEXT), (b"", BYTES), (bytes(1 << 20), BYTES), (LAYER, BOND)],
)
async def test_a_message_crosses_a_queue(server: Server, payload: bytes, content_type: str) -> None:
    inbox = Inbox()
    async with epoxy(server, inbox) as client:
        number = await subscribe(client, "queue/q")
        more = {"content_type": content_type, "properties": PROPERTIES}
        identifier = await publish(client, "queue/q", payload, **more)
        assert await inbox.next() == make(
            "Delivery",
            subscription=number,
            id=identifier,
            destination="queue/q",
            payload=payload,
            attempt=1,
            **more,
        )


async def test_a_message_without_a_content_type_is_bytes(server: Server) -> None:
    inbox = Inbox()
    async with epoxy(server, inbox) as client:
        await publish(client, "queue/q")
        await subscribe(client, "queue/q")
        assert (await inbox.next()).content_type == BYTES


async def test_a_publish_is_on_disk_when_it_is_answered(server: Server) -> None:
    async with epoxy(server) as client:
        ids = await asyncio.gather(*(publish(client, "queue/q") for _ in range(200)))
        assert server.hub.committed_id >= max(ids)
    assert len(set(ids)) == 200


async def test_settled_messages_are_gone(server: Server) -> None:
    inbox = Inbox()
    async with epoxy(server, inbox) as client:
        for _ in range(3):
            await publish(client, "queue/q")
        await subscribe(client, "queue/q")
        deliveries = [await inbox.next() for _ in range(3)]
        assert await settle(client, *deliveries) == 3
        assert server.hub.queue("queue/q").length == 0
        assert await settle(client, *deliveries) == 0


@pytest.mark.parametrize("destination", ["queue/t", "topic/t"])
async def test_settling_makes_room_once(server: Server, destination: str) -> None:
    inbox = Inbox()
    async with epoxy(server, inbox) as client:
        await subscribe(client, destination, window=2)
        for _ in range(5):
            await publish(client, destination)
        first, second = await inbox.next(), await inbox.next()
        settlement = make("Settlement", subscription=1, ids=[first.id, first.id, 99])
        assert (await client.call(HUB, "Settle", settlement)).count == 1
        third = await inbox.next()
        assert await settle(client, first) == 0
        assert inbox.got.empty()
        assert await settle(client, second, third) == 2
        await inbox.next()


async def test_a_settlement_is_answered_when_it_is_on_disk(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox, store = Inbox(), server.hub.store
    sync, may_end = store._sync, threading.Event()

    def held_up() -> None:
        assert may_end.wait(30)
        sync()

    async with epoxy(server, inbox) as client:
        await subscribe(client, "queue/q")
        await publish(client, "queue/q")
        delivery = await inbox.next()
        await server.hub.committed()
        monkeypatch.setattr(store, "_sync", held_up)
        answer = asyncio.create_task(settle(client, delivery))
        async with asyncio.timeout(10):
            while server.hub.queue("queue/q").length:
                await asyncio.sleep(0)
        # An answer that waited for nothing would be here before that of the next request.
        assert await subscribe(client, "queue/other") == 2
        assert not answer.done()
        may_end.set()
        assert await answer == 1


async def test_a_refused_message_comes_again(server: Server) -> None:
    inbox = Inbox()
    async with epoxy(server, inbox) as client:
        await subscribe(client, "queue/q")
        await publish(client, "queue/q")
        assert await settle(client, await inbox.next(), refused=True, reason="busy") == 1
        assert (await inbox.next()).attempt == 2


async def test_the_reason_of_a_refusal_goes_with_a_dead_letter(start_server: StartServer) -> None:
    retry = Retry(max_attempts=1, first_delay_s=0.001, longest_delay_s=0.002)
    server = await start_server(queues={"q": QueuePolicy(retry=retry)})
    inbox, dead = Inbox(), Inbox()
    async with epoxy(server, inbox) as client, epoxy(server, dead) as undertaker:
        await subscribe(undertaker, "queue/q/dead")
        await subscribe(client, "queue/q")
        await publish(client, "queue/q")
        await settle(client, await inbox.next(), refused=True, reason="no such order")
        assert (await dead.next()).properties["dead-cause"].text == "no such order"


async def test_a_topic_reaches_whose_filter_matches(server: Server) -> None:
    all_of_them, some = Inbox(), Inbox()
    async with epoxy(server, all_of_them) as a, epoxy(server, some) as b:
        await subscribe(a, "topic/ticks/+")
        await subscribe(b, "topic/#", filter="n>N10")
        for value in (5, 15):
            properties = {"n": make("Value", integer=value)}
            await publish(a, "topic/ticks/x", properties=properties)
        numbers = [(await all_of_them.next()).properties["n"].integer for _ in range(2)]
        assert numbers == [5, 15]
        assert (await some.next()).properties["n"].integer == 15


async def test_the_subscription_is_answered_before_its_first_delivery(server: Server) -> None:
    inbox = Inbox()
    async with epoxy(server, inbox) as client:
        await publish(client, "queue/q")
        await subscribe(client, "queue/q")
        assert inbox.got.empty()
        await inbox.next()


async def test_unsubscribing_returns_what_was_not_settled(server: Server) -> None:
    inbox = Inbox()
    async with epoxy(server, inbox) as client:
        number = await subscribe(client, "queue/q")
        for _ in range(2):
            await publish(client, "queue/q")
        await settle(client, await inbox.next())
        await inbox.next()
        gone = make("Subscribed", subscription=number)
        assert await client.call(HUB, "Unsubscribe", gone) == make("Nothing")
        assert server.hub.queue("queue/q").length == 1
        assert await code_of(client.call(HUB, "Unsubscribe", gone)) == "invalid-invocation"
        assert await subscribe(client, "queue/q") == number + 1
        assert (await inbox.next()).attempt == 2


async def test_a_consumer_that_leaves_returns_what_it_held(server: Server) -> None:
    first, second = Inbox(), Inbox()
    async with epoxy(server, second) as other:
        async with epoxy(server, first) as client:
            await subscribe(client, "queue/q")
            await publish(client, "queue/q")
            await first.next()
        await subscribe(other, "queue/q")
        assert (await second.next()).attempt == 2


async def test_messages_and_named_subscriptions_survive_a_restart(
    start_server: StartServer,
) -> None:
    server = await start_server()
    named = {"name": "mine", "start": "earliest"}
    async with epoxy(server, Inbox()) as client:
        await subscribe(client, "topic/t", **named)
    async with epoxy(server) as client:
        await publish(client, "topic/t", b"a")
        await publish(client, "queue/q", b"b")
    await server.stop()
    server = await start_server()
    inbox = Inbox()
    async with epoxy(server, inbox) as client:
        await subscribe(client, "topic/t", **named)
        await subscribe(client, "queue/q")
        assert {(await inbox.next()).payload for _ in range(2)} == {b"a", b"b"}


async def test_an_event_is_published(server: Server) -> None:
    inbox = Inbox()
    async with epoxy(server, inbox) as client:
        await subscribe(client, "topic/examples.calc.Calc/+")
        await client.send_event(CALC, "Note", Params(x=5))
        delivery = await inbox.next()
        assert delivery.destination == "topic/examples.calc.Calc/Note"
        assert delivery.content_type == BOND
        assert marshal.unmarshal(delivery.payload, PARAMS).x == 5


@pytest.mark.parametrize("protocol", [marshal.FAST_V1, marshal.COMPACT_V2])
async def test_other_encodings_arrive_as_they_are(server: Server, protocol: Dialect) -> None:
    payload = marshal.marshal(Params(x=5), PARAMS, protocol=protocol)
    inbox = Inbox()
    async with epoxy(server, inbox) as client:
        await subscribe(client, "topic/svc/E")
        await client.send_event_bytes("svc", "E", payload)
        assert (await inbox.next()).payload == payload


async def test_events_and_publishes_keep_their_order(server: Server) -> None:
    inbox = Inbox()
    async with epoxy(server, inbox) as client:
        await subscribe(client, "topic/svc/E")
        await client.send_event_bytes("svc", "E", LAYER)
        asked = asyncio.create_task(publish(client, "topic/svc/E", b"second"))
        await asyncio.sleep(0)
        await client.send_event_bytes("svc", "E", wrap(b"third", TEXT))
        await asked
        assert [(await inbox.next()).payload for _ in range(3)] == [LAYER, b"second", b"third"]


async def test_layer_data_is_forwarded(server: Server) -> None:
    inbox = Inbox()
    async with epoxy(server, inbox) as client:
        await subscribe(client, "topic/#")
        await client.send_event(CALC, "Note", Params(), layer_data=LAYER)
        publication = make("Publication", destination="topic/t")
        await client.call(HUB, "Publish", publication, layer_data=b"any bytes")
        layers = [(await inbox.next_call())[1].layer_data for _ in range(2)]
        assert layers == [LAYER, b"any bytes"]


async def test_what_an_integer_of_epoxy_can_not_hold_keeps_its_digits(server: Server) -> None:
    """Earlier versions took integers without a sign: what they stored is still delivered."""
    inbox = Inbox()
    async with epoxy(server, inbox) as client:
        await subscribe(client, "queue/q")
        stored = Envelope(destination="queue/q", kind="send", properties={"n": 2**63})
        server.hub.produce([stored], server.context.now())
        assert (await inbox.next()).properties["n"].text == str(2**63)


async def test_what_is_too_large_for_the_consumer_is_refused(start_server: StartServer) -> None:
    limits = ProtocolLimits(epoxy=EpoxyLimits(frame_bytes=4096))
    retry = Retry(max_attempts=1, first_delay_s=0.001, longest_delay_s=0.002)
    server = await start_server(limits=limits, queues={"q": QueuePolicy(retry=retry)})
    inbox = Inbox()
    async with epoxy(server, inbox) as client, emp(server) as producer:
        await subscribe(client, "queue/q")
        for text in ("x" * 5000, "short"):
            await producer.request("$publish", {"destination": "queue/q", "text": text})
        assert (await inbox.next()).payload == b"short"
        (letter,) = server.hub.dead_letters.list("queue/q/dead")
        assert "can't be sent in Epoxy" in letter.cause


# ------------------------------------------------------------------------------ calling, serving


async def test_a_service_answers(server: Server) -> None:
    async with epoxy(server, handlers=offer(CALC, Calculator())) as provider:
        await serve(provider, CALC.full_name)
        async with epoxy(server) as caller:
            calls = [caller.call(CALC, "Calculate", Params(x=n, y=3)) for n in range(100)]
            assert [result.z for result in await asyncio.gather(*calls)] == [
                3 * n for n in range(100)
            ]


async def test_answers_come_in_any_order(server: Server) -> None:
    release = asyncio.Event()

    async def slow(_call: IncomingCall) -> bytes:
        await release.wait()
        return LAYER

    handlers = {("svc", "Slow"): slow, **answering(lambda call: call.payload)}
    async with epoxy(server, handlers=handlers) as provider, epoxy(server) as caller:
        await serve(provider, "svc")
        waiting = asyncio.create_task(caller.call_bytes("svc", "Slow", LAYER))
        await caller.call_bytes("svc", "M", LAYER)
        assert not waiting.done()
        release.set()
        await waiting


async def test_payloads_and_layer_data_pass_between_epoxy_peers_unchanged(server: Server) -> None:
    seen: list[IncomingCall] = []

    def reply(call: IncomingCall) -> CallReply:
        seen.append(call)
        return CallReply(call.payload, layer_data=b"back")

    payload = marshal.marshal(Params(x=5), PARAMS, protocol=marshal.FAST_V1)
    async with epoxy(server, handlers=answering(reply)) as provider, epoxy(server) as caller:
        await serve(provider, "svc")
        got = await caller.call_bytes("svc", "M", payload, layer_data=b"there")
    assert got == CallReply(payload, b"back")
    assert (seen[0].payload, seen[0].layer_data) == (payload, b"there")


async def test_a_blob_is_opened_and_closed_on_the_way(server: Server) -> None:
    handlers = answering(lambda call: call.payload)
    async with epoxy(server, handlers=handlers) as provider, epoxy(server) as caller:
        await serve(provider, "svc/M")
        reply = await caller.call_bytes("svc", "M", wrap(b"hi", TEXT))
    assert unwrap(reply.payload) == (b"hi", TEXT)


async def test_an_error_reaches_the_caller_as_it_is(server: Server) -> None:
    error = Error(17, "no", Error(3, "inside"))

    def reply(_call: IncomingCall) -> bytes:
        raise CallFailed(17, data=marshal_error(error))

    async with epoxy(server, handlers=answering(reply)) as provider, epoxy(server) as caller:
        await serve(provider, "svc")
        with pytest.raises(CallFailed) as caught:
            await caller.call_bytes("svc", "M", LAYER)
    assert caught.value.data == marshal_error(error)


async def test_a_provider_that_leaves_is_distinguished_from_none(server: Server) -> None:
    entered = asyncio.Event()
    async with epoxy(server) as caller:
        assert await code_of(caller.call_bytes("svc", "M", LAYER)) == "method-not-found"
        async with epoxy(server, handlers=stuck(entered)) as provider:
            await serve(provider, "svc")
            waiting = asyncio.create_task(code_of(caller.call_bytes("svc", "M", LAYER)))
            await entered.wait()
            for gateway in list(server.context.gateways.values()):
                if gateway.providers:
                    gateway.session.transport.abort()
            assert await waiting == "connection-shut-down"


async def test_no_answer_in_time_is_a_timeout(start_server: StartServer) -> None:
    server = await start_server(services=ServicePolicy(deadline_s=0.05))
    entered = asyncio.Event()
    async with epoxy(server, handlers=stuck(entered)) as provider, epoxy(server) as caller:
        await serve(provider, "svc")
        assert await code_of(caller.call_bytes("svc", "M", LAYER)) == "timeout-error"


async def test_serving_twice_is_serving_once(server: Server) -> None:
    async with epoxy(server, handlers=answering(lambda call: call.payload)) as provider:
        await serve(provider, "svc", "svc")
        await serve(provider, "svc")
        assert [len(peers) for peers in server.hub.services.providers().values()] == [1]
    while server.context.gateways:
        await asyncio.sleep(0.01)
    assert server.hub.services.providers() == {}


# ------------------------------------------------------------------------------- across protocols


async def test_emp_calls_the_calculator_with_json(start_server: StartServer) -> None:
    server = await start_server(bond=BOND_FILES)
    async with epoxy(server, handlers=offer(CALC, Calculator())) as provider:
        await serve(provider, CALC.full_name)
        async with emp(server) as caller:
            asked = {"x": 67, "y": 87, "operation": "Mul"}
            assert await caller.request(CALCULATE, asked) == {"z": 5829}


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"x": 1, "operation": "Div"}, "17"),
        ({"x": "many"}, "invalid_request"),
    ],
)
async def test_emp_receives_what_the_calculator_can_not_do(
    start_server: StartServer, asked: Json, code: str
) -> None:
    server = await start_server(bond=BOND_FILES)
    async with epoxy(server, handlers=offer(CALC, Calculator())) as provider:
        await serve(provider, CALC.full_name)
        async with emp(server) as caller:
            with pytest.raises(RequestFailed) as caught:
                await caller.request(CALCULATE, asked)
    assert caught.value.code == code


async def test_a_method_that_the_provider_lacks_is_unknown_to_emp(server: Server) -> None:
    async with epoxy(server) as provider, emp(server) as caller:
        await serve(provider, "svc")
        with pytest.raises(RequestFailed) as caught:
            await caller.request("svc/M")
    assert caught.value.code == "unknown_op"


async def test_epoxy_calls_an_emp_provider_by_the_schema(start_server: StartServer) -> None:
    async def calculate(data: Json) -> Json:
        assert data["operation"] == "Mul"
        return {"z": data["x"] * data["y"]}

    server = await start_server(bond=BOND_FILES)
    async with emp(server, **{CALCULATE: calculate}) as provider, epoxy(server) as caller:
        await provider.request("$serve", {"services": [CALC.full_name]})
        result = await caller.call(CALC, "Calculate", Params(x=67, y=87, operation=3))
    assert result.z == 5829


async def test_epoxy_calls_an_emp_provider_without_a_schema(server: Server) -> None:
    async def add(data: Json) -> Json:
        return {"sum": data["a"] + data["b"]}

    async with emp(server, add=add) as provider, epoxy(server) as caller:
        await provider.request("$serve", {"services": ["add"]})
        reply = await caller.call_bytes("add", "", wrap(b'{"a":1,"b":2}', JSON))
    assert unwrap(reply.payload) == (b'{"sum":3}', JSON)


async def test_emp_calls_an_epoxy_provider_without_a_schema(server: Server) -> None:
    def reply(call: IncomingCall) -> bytes:
        assert unwrap(call.payload) == (b'{"a":1}', JSON)
        return wrap(b'{"b":2}', JSON)

    async with epoxy(server, handlers=answering(reply)) as provider, emp(server) as caller:
        await serve(provider, "svc")
        assert await caller.request("svc/M", {"a": 1}) == {"b": 2}


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("unknown_op", ErrorCode.METHOD_NOT_FOUND),
        ("timeout", ErrorCode.TIMEOUT_ERROR),
        ("17", 17),
        ("no_such_job", ErrorCode.INTERNAL_SERVER_ERROR),
        ("99999999999", ErrorCode.INTERNAL_SERVER_ERROR),
    ],
)
async def test_an_emp_providers_failure_is_an_error(server: Server, code: str, number: int) -> None:
    async def fail(_data: Json) -> Json:
        raise RequestFailed(code, "why not")

    async with emp(server, fail=fail) as provider, epoxy(server) as caller:
        await provider.request("$serve", {"services": ["fail"]})
        with pytest.raises(CallFailed, match="why not") as caught:
            await caller.call_bytes("fail", "", wrap(b"{}", JSON))
    assert caught.value.error_code == number


async def test_an_answer_that_does_not_fit_the_schema_is_an_internal_error(
    start_server: StartServer,
) -> None:
    async def calculate(_data: Json) -> Json:
        return {"z": "many"}

    server = await start_server(bond=BOND_FILES)
    async with emp(server, **{CALCULATE: calculate}) as provider, epoxy(server) as caller:
        await provider.request("$serve", {"services": [CALC.full_name]})
        called = caller.call(CALC, "Calculate", Params())
        assert await code_of(called) == "internal-server-error"


async def test_an_event_reaches_emp_as_json(start_server: StartServer) -> None:
    got: asyncio.Queue[Json] = asyncio.Queue()

    async def deliver(data: Json) -> Json:
        got.put_nowait(data)
        return {}

    server = await start_server(bond=BOND_FILES)
    async with emp(server, **{"$deliver": deliver}) as consumer, epoxy(server) as teller:
        await consumer.request("$subscribe", {"destination": "topic/examples.calc.Calc/Note"})
        await teller.send_event(CALC, "Note", Params(x=1, y=2))
        delivery = await asyncio.wait_for(got.get(), 10)
    assert delivery["json"] == {"x": 1, "y": 2, "operation": "Add"}


# ---------------------------------------------------------------------- what can't and may not be


@pytest.mark.parametrize(
    ("method", "request_", "code"),
    [
        ("Publish", make("Publication", destination="nowhere"), "invalid-invocation"),
        ("Publish", make("Publication", destination="service/svc"), "invalid-invocation"),
        ("Publish", make("Publication", destination="topic/+"), "invalid-invocation"),
        (
            "Publish",
            make("Publication", destination="queue/q", properties={"a": make("Value")}),
            "internal-server-error",
        ),
        ("Subscribe", make("Subscription", destination="service/x"), "invalid-invocation"),
        (
            "Subscribe",
            make("Subscription", destination="topic/x", filter="nonsense"),
            "invalid-invocation",
        ),
        (
            "Subscribe",
            make("Subscription", destination="topic/x", name="n", start="when"),
            "invalid-invocation",
        ),
        ("Unsubscribe", make("Subscribed", subscription=7), "invalid-invocation"),
        ("Settle", make("Settlement", subscription=7), "invalid-invocation"),
        ("Serve", make("Services", services=["crosswire.Mine"]), "invalid-invocation"),
        ("Serve", make("Services", services=[""]), "invalid-invocation"),
    ],
)
async def test_what_can_not_be_done_is_answered_and_the_connection_kept(
    server: Server, method: str, request_: Any, code: str
) -> None:
    async with epoxy(server) as client:
        assert await code_of(client.call(HUB, method, request_)) == code
        assert await publish(client, "queue/q")


async def test_a_name_that_is_taken_is_an_error(server: Server) -> None:
    server.hub.subscriptions.named("n", "topic/secret", "", None, server.context.now())
    async with epoxy(server) as client:
        request = make("Subscription", destination="topic/x", name="n")
        assert await code_of(client.call(HUB, "Subscribe", request)) == "invalid-invocation"
        assert await publish(client, "queue/q")
    assert server.hub.subscriptions.all()[0].definition.pattern == "secret"


@pytest.mark.parametrize(
    ("service", "method", "payload", "code"),
    [
        ("crosswire.Hub", "Nope", LAYER, "method-not-found"),
        ("crosswire.Nope", "Publish", LAYER, "method-not-found"),
        ("crosswire.Subscriber", "Deliver", LAYER, "method-not-found"),
        ("crosswire.Hub", "Publish", b"garbage", "internal-server-error"),
        ("crosswire.Hub", "Settle", b"CB\x01\x00\x0b", "internal-server-error"),
        ("svc", "M", LAYER, "method-not-found"),
        ("svc", "M", b"garbage", "internal-server-error"),
        ("", "M", LAYER, "method-not-found"),
        ("a/b", "M", LAYER, "method-not-found"),
        ("s\n", "M", LAYER, "invalid-invocation"),
    ],
)
async def test_what_is_unknown_or_unreadable_is_answered_and_the_connection_kept(
    server: Server, service: str, method: str, payload: bytes, code: str
) -> None:
    async with epoxy(server) as client:
        assert await code_of(client.call_bytes(service, method, payload)) == code
        assert await publish(client, "queue/q")


async def test_an_internal_error_has_an_id_that_leads_to_the_connection(server: Server) -> None:
    async with epoxy(server) as client:
        with pytest.raises(CallFailed) as caught:
            await client.call_bytes("svc", "M", b"garbage")
        (name,) = server.context.gateways
        assert re.search(rb"epoxy-[0-9a-f]+-[0-9a-f]+/1", caught.value.data)
        assert name.encode() in caught.value.data


@pytest.mark.parametrize(
    ("service", "method", "payload"),
    [
        ("crosswire.Hub", "Publish", LAYER),
        ("svc", "E", b"garbage"),
        ("svc", "+", LAYER),
        ("s\n", "E", LAYER),
    ],
)
async def test_events_that_can_not_be_published_are_counted(
    server: Server, service: str, method: str, payload: bytes
) -> None:
    async with epoxy(server) as client:
        await client.send_event_bytes(service, method, payload)
        await publish(client, "queue/q")
    dropped = {key: n for key, n in server.context.counters.items() if key[0] == "dropped"}
    assert sum(dropped.values()) == 1


async def test_a_full_queue_is_an_error(start_server: StartServer) -> None:
    server = await start_server(queues={"q": QueuePolicy(max_length=1)})
    async with epoxy(server) as client:
        await publish(client, "queue/q")
        assert await code_of(publish(client, "queue/q")) == "transport-error"


async def test_subscriptions_and_services_of_a_connection_are_limited(
    start_server: StartServer,
) -> None:
    server = await start_server(connections=ConnectionLimits(subscriptions=1))
    async with epoxy(server) as client:
        await subscribe(client, "queue/q")
        assert await code_of(subscribe(client, "queue/q")) == "transport-error"
        assert await code_of(serve(client, "a", "b")) == "transport-error"


async def test_a_connection_too_many_is_rejected(start_server: StartServer) -> None:
    server = await start_server(connections=ConnectionLimits(connections=1))
    async with epoxy(server):
        reader, writer = await _connect(server)
        assert b"no room" in await reader.read()
        writer.close()


# ----------------------------------------------------------------------------------------- rights


def anna(**rights: tuple[str, ...]) -> dict[str, Any]:
    return {"users": (User(name="anna", token=TOKEN, **rights),)}  # type: ignore[arg-type]


async def test_without_credentials_nothing_is_allowed(start_server: StartServer) -> None:
    server = await start_server(**anna(produce=("#",)))
    async with epoxy(server) as client:
        assert await code_of(publish(client, "queue/q")) == "invalid-invocation"
        assert await code_of(subscribe(client, "queue/q")) == "invalid-invocation"
        assert await code_of(serve(client, "svc")) == "invalid-invocation"
        assert await code_of(client.call_bytes("svc", "M", LAYER)) == "invalid-invocation"
        await client.send_event_bytes("svc", "E", LAYER)
        await code_of(publish(client, "queue/q"))
    assert server.context.counters["dropped", "epoxy", "Forbidden"] == 1


async def test_a_token_in_the_layer_data_authenticates(start_server: StartServer) -> None:
    server = await start_server(**anna(produce=("queue/orders",)))
    async with epoxy(server, token=TOKEN) as client:
        assert await publish(client, "queue/orders")
        assert await code_of(subscribe(client, "queue/orders")) == "invalid-invocation"
    async with epoxy(server) as client:
        first = make("Publication", destination="queue/orders")
        await client.call(HUB, "Publish", first, layer_data=marshal_credentials(TOKEN))
        assert await publish(client, "queue/orders")


@pytest.mark.parametrize("users", [{}, anna(produce=("#",), consume=("#",))])
async def test_credentials_are_not_kept(start_server: StartServer, users: dict[str, Any]) -> None:
    server = await start_server(**users)
    async with epoxy(server, token=TOKEN) as client:
        identifier = await publish(client, "queue/q")
        await client.send_event_bytes("svc", "E", LAYER)
        later = await publish(client, "topic/svc/E")
        stored = server.hub.fetch("queue/q", [identifier])
        stored += server.hub.fetch("topic/svc/E", [later - 1, later])
    assert all(isinstance(each, Envelope) and each.native == {} for each in stored)


async def test_a_wrong_token_is_rejected(start_server: StartServer) -> None:
    server = await start_server(**anna())
    with pytest.raises(RequestFailed, match="forbidden: nobody has this token"):
        async with epoxy(server, token="nobody's-token-at-all"):
            pass
    assert server.context.counters["unauthenticated", "epoxy"] == 1


async def test_a_peer_stays_who_it_is(start_server: StartServer) -> None:
    server = await start_server(
        users=(
            User(name="anna", token=TOKEN, produce=("queue/#",)),
            User(name="bert", token="a-secret-of-bert", produce=("queue/#",)),
        )
    )
    async with epoxy(server, token=TOKEN) as client:
        await publish(client, "queue/q")
        other = marshal_credentials("a-secret-of-bert")
        with pytest.raises(ConnectionLost, match="can't be two users"):
            publication = make("Publication", destination="queue/q")
            await client.call(HUB, "Publish", publication, layer_data=other)


async def test_a_certificate_authenticates(start_server: StartServer, tls: TlsPair) -> None:
    certificate, key = str(tls.certificate), str(tls.key)
    server = await start_server(
        tls=TlsFiles(certificate=certificate, key=key, client_ca=certificate),
        listen=dict.fromkeys(LISTENERS, "off") | {"epoxy-tls": "127.0.0.1:0"},
        users=(User(name="local", certificate="localhost", produce=("queue/q",)),),
    )
    context = ssl.create_default_context(cafile=certificate)
    context.load_cert_chain(certificate, key)
    port = port_of(server, "epoxy-tls")
    async with EpoxyClient("localhost", port, tls=context) as client:
        assert await publish(client, "queue/q")
        assert await code_of(publish(client, "queue/other")) == "invalid-invocation"


# -------------------------------------------------------------------------------- ends and faults


async def _connect(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server, "epoxy"))
    return reader, writer


async def test_a_malformed_peer_harms_nobody_else(server: Server) -> None:
    inbox = Inbox()
    async with epoxy(server, inbox) as client:
        await subscribe(client, "queue/q")
        reader, writer = await _connect(server)
        writer.write(b"\xff" * 1000)
        assert b"ER" in await reader.read()
        writer.close()
        await publish(client, "queue/q")
        await inbox.next()


async def test_a_client_that_reconnects_goes_on(server: Server) -> None:
    inbox = Inbox()
    named = {"name": "mine", "start": "earliest"}
    async with epoxy(server, inbox) as client:
        await subscribe(client, "topic/t", **named)
        await publish(client, "topic/t", b"a")
        held = await inbox.next()
        (gateway,) = server.context.gateways.values()
        gateway.session.transport.abort()
        while gateway.id in server.context.gateways:
            await asyncio.sleep(0.01)
        await subscribe(client, "topic/t", **named)
        again = await inbox.next()
    assert (again.id, again.payload, again.attempt) == (held.id, b"a", 2)


async def test_who_has_closed_its_half_holds_nothing_more(server: Server) -> None:
    """What it asked is still answered."""
    first, second = Inbox(), Inbox()
    entered, release = asyncio.Event(), asyncio.Event()

    async def slow(call: IncomingCall) -> bytes:
        entered.set()
        await release.wait()
        return call.payload

    async with (
        epoxy(server, second) as other,
        epoxy(server, handlers={("svc", "M"): slow}) as provider,
        epoxy(server, first) as client,
    ):
        await serve(provider, "svc")
        await subscribe(client, "queue/q")
        await publish(other, "queue/q")
        await first.next()
        waiting = asyncio.create_task(client.call_bytes("svc", "M", LAYER))
        await entered.wait()
        peer = await client._redialler.peer(10)
        peer.session.transport.write_eof()
        await subscribe(other, "queue/q")
        assert (await second.next()).attempt == 2
        release.set()
        assert (await waiting).payload == LAYER


async def test_a_subscriber_that_is_too_slow_is_sent_away(start_server: StartServer) -> None:
    server = await start_server(topics={"t": TopicPolicy(durable=False, slow="disconnect")})
    inbox = Inbox()
    async with epoxy(server, inbox) as client, epoxy(server) as publisher:
        await subscribe(client, "topic/t", window=1)
        peer = await client._redialler.peer(10)
        for _ in range(2):
            await publish(publisher, "topic/t")
        await asyncio.wait_for(asyncio.shield(peer.ended), 10)
        assert "subscription 1 of topic/t ended: too slow" in peer.why()


async def test_an_answer_that_comes_too_late_is_dropped(start_server: StartServer) -> None:
    server = await start_server(services=ServicePolicy(deadline_s=0.05))
    release = asyncio.Event()

    async def slow(call: IncomingCall) -> bytes:
        await release.wait()
        return call.payload

    handlers = {("svc", "Slow"): slow, **answering(lambda call: call.payload)}
    async with epoxy(server, handlers=handlers) as provider, epoxy(server) as caller:
        await serve(provider, "svc")
        await code_of(caller.call_bytes("svc", "Slow", LAYER))
        release.set()
        assert (await caller.call_bytes("svc", "M", LAYER)).payload == LAYER


async def test_stopping_answers_and_closes(start_server: StartServer) -> None:
    server = await start_server()
    reader, writer = await _connect(server)
    writer.write(bytes.fromhex("010043470100000000"))
    await reader.readexactly(9)
    stopping = asyncio.create_task(server.stop())
    assert await reader.read() == b""
    writer.close()
    await stopping


async def test_too_much_on_its_way_to_the_disk_holds_the_peer_up(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosswire.gateways.epoxy.gateway._UNSTORED_BYTES", 1000)
    async with epoxy(server) as client:
        for _ in range(50):
            await client.send_event_bytes("svc", "E", LAYER)
        await asyncio.gather(*(publish(client, "topic/svc/E") for _ in range(50)))
        (gateway,) = server.context.gateways.values()
        assert gateway._unstored_bytes == 0  # type: ignore[attr-defined]
        assert await publish(client, "queue/q")
