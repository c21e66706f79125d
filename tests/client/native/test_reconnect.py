"""Clients over a restart of their hub: subscriptions and services go on, or fail with a reason.

The hub is stopped and started again on the same data and the same ports.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from crosswire import session
from crosswire.access import User
from crosswire.bond import hub_module, marshal
from crosswire.client.native.dial import Backoff
from crosswire.client.native.emp import EmpClient, Json
from crosswire.client.native.emqp import EmqpClient, EmqpSubscriber
from crosswire.client.native.emqp.worker import Worker
from crosswire.client.native.epoxy import EpoxyClient, IncomingCall
from crosswire.client.native.micromsg2 import MicroMsg2Client
from crosswire.client.native.relink import RelinkClient
from crosswire.client.native.resubscribe import (
    KeptSubscription,
    KeptSubscriptions,
    SubscriptionNumbers,
)
from crosswire.envelope import Envelope, message_kind
from crosswire.errors import ConnectionLost
from crosswire.server.server import Server
from tests.gateways.conftest import StartServer, port_of, start_server

__all__ = ["start_server"]  # a fixture

HUB = hub_module().service("crosswire.Hub")
TOKEN = "a token that is long enough"


def soon() -> Backoff:
    return Backoff(0.01, 0.02)


def publish(server: Server, destination: str, payload: bytes) -> Awaitable[list[int]]:
    kind = message_kind(destination)
    envelope = Envelope(
        destination=destination, kind=kind, payload=payload, content_type="application/json"
    )
    receipt = server.hub.produce([envelope], server.context.now())

    async def wait() -> list[int]:
        return await receipt

    return wait()


async def restarted(server: Server, start: StartServer, **options: Any) -> Server:
    """The next hub, on the data and the ports of this one."""
    listen = {name: str(listener.address) for name, listener in server.listeners.items()}
    await server.stop()
    return await start(listen=listen, **options)


class Inbox:
    """What a consumer got, in the order of arrival."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()

    async def next(self) -> Any:
        return await asyncio.wait_for(self.queue.get(), 10)


@asynccontextmanager
async def emp_consumer(server: Server, destination: str) -> AsyncIterator[Inbox]:
    inbox = Inbox()

    async def deliver(data: Json) -> None:
        inbox.queue.put_nowait(data["json"])

    port = port_of(server, "emp")
    async with EmpClient(
        "127.0.0.1", port, handlers={"$deliver": deliver}, backoff=soon()
    ) as client:
        await client.request("$subscribe", {"destination": destination})
        yield inbox


@asynccontextmanager
async def epoxy_consumer(server: Server, destination: str) -> AsyncIterator[Inbox]:
    inbox = Inbox()
    struct = hub_module().struct("crosswire.Delivery")
    settlement = hub_module().struct("crosswire.Settlement").python_class

    async def deliver(call: IncomingCall) -> None:
        delivery = marshal.unmarshal(call.payload, struct)
        await client.call(
            HUB, "Settle", settlement(subscription=delivery.subscription, ids=[delivery.id])
        )
        inbox.queue.put_nowait(int(delivery.payload))

    handlers = {("crosswire.Subscriber", "Deliver"): deliver}
    port = port_of(server, "epoxy")
    async with EpoxyClient("127.0.0.1", port, handlers=handlers, backoff=soon()) as client:
        asked = hub_module().struct("crosswire.Subscription").python_class(destination=destination)
        await client.call(HUB, "Subscribe", asked)
        yield inbox


@asynccontextmanager
async def micromsg2_consumer(server: Server, destination: str) -> AsyncIterator[Inbox]:
    inbox = Inbox()
    port = port_of(server, "micromsg2")

    async def read() -> None:
        async for delivery in subscription:
            inbox.queue.put_nowait(int(delivery.payload))

    async with (
        MicroMsg2Client("127.0.0.1", port, backoff=soon()) as client,
        client.subscribe(destination) as subscription,
    ):
        reader = asyncio.create_task(read())
        yield inbox
        reader.cancel()


@asynccontextmanager
async def relink_consumer(server: Server, destination: str) -> AsyncIterator[Inbox]:
    inbox = Inbox()
    port = port_of(server, "relink")

    async def read() -> None:
        async for message in client.receiver(0):
            inbox.queue.put_nowait(int(bytes(message.parts[-1])))
            message.consume()

    endpoint = f"{destination}?consume"
    async with RelinkClient("127.0.0.1", port, endpoint, backoff=soon()) as client:
        reader = asyncio.create_task(read())
        yield inbox
        reader.cancel()


@asynccontextmanager
async def emqp_consumer(server: Server, destination: str) -> AsyncIterator[Inbox]:
    inbox = Inbox()
    queue = destination.removeprefix("queue/")

    async def job(number: int) -> None:
        inbox.queue.put_nowait(number)

    port = port_of(server, "emqp-workers")
    async with Worker(
        "127.0.0.1", port, queues=[(10, queue)], jobs={"tests.job": job}, backoff=soon()
    ):
        yield inbox


JOB = b'["run", {"path": "tests", "callable": "job", "args": [%d], "kwargs": {}}]'
CONSUMERS: dict[str, Callable[[Server, str], Any]] = {
    "emp": emp_consumer,
    "emqp": emqp_consumer,
    "epoxy": epoxy_consumer,
    "micromsg2": micromsg2_consumer,
    "relink": relink_consumer,
}


@pytest.mark.parametrize("protocol", CONSUMERS)
async def test_a_consumer_goes_on_after_a_restart_of_the_hub(
    protocol: str, start_server: StartServer
) -> None:
    server = await start_server()
    body = JOB if protocol == "emqp" else b"%d"
    async with CONSUMERS[protocol](server, "queue/orders") as inbox:
        await publish(server, "queue/orders", body % 1)
        assert await inbox.next() == 1
        server = await restarted(server, start_server)
        await publish(server, "queue/orders", body % 2)
        assert await inbox.next() == 2


class TestEmp:
    async def test_the_program_keeps_its_numbers(self, start_server: StartServer) -> None:
        server = await start_server()
        inbox = Inbox()

        async def deliver(data: Json) -> None:
            inbox.queue.put_nowait((data["subscription"], data["json"]))

        client = EmpClient(
            "127.0.0.1", port_of(server, "emp"), handlers={"$deliver": deliver}, backoff=soon()
        )
        async with client:
            numbers = [
                (await client.request("$subscribe", {"destination": f"queue/q{each}"}))[
                    "subscription"
                ]
                for each in range(3)
            ]
            await client.request("$unsubscribe", {"subscription": numbers[0]})
            server = await restarted(server, start_server)
            for each in (1, 2):
                await publish(server, f"queue/q{each}", b"%d" % each)
            assert {await inbox.next(), await inbox.next()} == {(numbers[1], 1), (numbers[2], 2)}
            # A new one gets a number that no other has, and the old ones can still be ended.
            answer = await client.request("$subscribe", {"destination": "queue/new"})
            assert answer["subscription"] not in numbers[1:]
            await publish(server, "queue/new", b"7")
            assert await inbox.next() == (answer["subscription"], 7)
            await client.request("$unsubscribe", {"subscription": numbers[2]})
            assert not server.hub.is_consumed("queue/q2")
            assert server.hub.is_consumed("queue/q1")

    async def test_a_topic_read_from_the_beginning_is_not_read_twice(
        self, start_server: StartServer
    ) -> None:
        server = await start_server()
        inbox = Inbox()

        async def deliver(data: Json) -> None:
            inbox.queue.put_nowait(data["json"])

        await publish(server, "topic/t", b"1")
        client = EmpClient(
            "127.0.0.1", port_of(server, "emp"), handlers={"$deliver": deliver}, backoff=soon()
        )
        async with client:
            await client.request("$subscribe", {"destination": "topic/t", "from": "earliest"})
            assert await inbox.next() == 1
            server = await restarted(server, start_server)
            await publish(server, "topic/t", b"2")
            assert await inbox.next() == 2

    async def test_who_it_is_and_what_it_serves(self, start_server: StartServer) -> None:
        options = {
            "users": [User(name="shop", token=TOKEN, serve=["service/#"], call=["service/#"])]
        }
        server = await start_server(**options)

        async def stock(data: Json) -> Json:
            return {"left": 3}

        client = EmpClient(
            "127.0.0.1", port_of(server, "emp"), handlers={"stock": stock}, backoff=soon()
        )
        async with client:
            await client.request("$authenticate", {"token": TOKEN})
            await client.request("$serve", {"services": ["stock"]})
            server = await restarted(server, start_server, **options)
            assert await client.request("stock") == {"left": 3}

    async def test_a_refused_subscription_ends_the_client_with_the_reason(
        self, start_server: StartServer
    ) -> None:
        users = [User(name="shop", token=TOKEN, consume=["queue/#"])]
        server = await start_server(users=users)
        client = EmpClient("127.0.0.1", port_of(server, "emp"), backoff=soon())
        async with client:
            await client.request("$authenticate", {"token": TOKEN})
            await client.request("$subscribe", {"destination": "queue/orders"})
            users = [User(name="shop", token=TOKEN, consume=[])]
            await restarted(server, start_server, users=users)
            with pytest.raises(ConnectionLost, match="forbidden"):
                await asyncio.wait_for(asyncio.shield(client.ended), 10)
            with pytest.raises(ConnectionLost, match="forbidden"):
                await client.request("$echo")


class TestEpoxy:
    async def test_the_program_keeps_its_numbers(self, start_server: StartServer) -> None:
        server = await start_server()
        inbox = Inbox()
        module = hub_module()
        delivered = module.struct("crosswire.Delivery")
        subscription = module.struct("crosswire.Subscription").python_class
        subscribed = module.struct("crosswire.Subscribed").python_class

        async def deliver(call: IncomingCall) -> None:
            delivery = marshal.unmarshal(call.payload, delivered)
            inbox.queue.put_nowait((delivery.subscription, int(delivery.payload)))

        client = EpoxyClient(
            "127.0.0.1",
            port_of(server, "epoxy"),
            handlers={("crosswire.Subscriber", "Deliver"): deliver},
            backoff=soon(),
        )
        async with client:
            numbers = [
                (
                    await client.call(HUB, "Subscribe", subscription(destination=f"queue/q{each}"))
                ).subscription
                for each in range(3)
            ]
            await client.call(HUB, "Unsubscribe", subscribed(subscription=numbers[0]))
            server = await restarted(server, start_server)
            for each in (1, 2):
                await publish(server, f"queue/q{each}", b"%d" % each)
            assert {await inbox.next(), await inbox.next()} == {(numbers[1], 1), (numbers[2], 2)}
            await client.call(HUB, "Unsubscribe", subscribed(subscription=numbers[2]))
            assert not server.hub.is_consumed("queue/q2")
            assert server.hub.is_consumed("queue/q1")

    async def test_what_it_serves(self, start_server: StartServer) -> None:
        server = await start_server()

        async def echo(call: IncomingCall) -> bytes:
            return call.payload

        handlers = {("test.Echo", "Repeat"): echo}
        services = hub_module().struct("crosswire.Services").python_class
        port = port_of(server, "epoxy")
        payload = bytes.fromhex("4342010000")
        async with EpoxyClient("127.0.0.1", port, handlers=handlers, backoff=soon()) as client:
            await client.call(HUB, "Serve", services(services=["test.Echo"]))
            await restarted(server, start_server)
            reply = await client.call_bytes("test.Echo", "Repeat", payload)
            assert reply.payload == payload


class Breaks(Exception):
    """A fault that no client expects."""


async def _end_of_iteration(iterator: Any) -> None:
    async for _ in iterator:
        pass


class TestAReconnectThatFails:
    """Each client, when its reconnecting fails for a reason that nobody thought of."""

    @pytest.fixture
    def broken(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
        def fail() -> None:
            async def dial(*args: object, **options: object) -> None:
                raise Breaks("no more sockets of this kind")

            for module in ("emp", "epoxy", "micromsg2", "relink"):
                monkeypatch.setattr(f"crosswire.client.native.{module}.client.dial", dial)
            monkeypatch.setattr("crosswire.client.native.emqp.peer.dial", dial)

        return fail

    @pytest.mark.parametrize(
        ("listener", "kind"),
        [
            ("emp", EmpClient),
            ("emqp-clients", EmqpClient),
            ("epoxy", EpoxyClient),
            ("micromsg2", MicroMsg2Client),
        ],
    )
    async def test_every_request_gets_the_reason(
        self,
        listener: str,
        kind: Callable[..., Any],
        start_server: StartServer,
        broken: Callable[[], None],
    ) -> None:
        server = await start_server()
        async with kind("127.0.0.1", port_of(server, listener), backoff=soon()) as client:
            broken()
            await server.stop()
            with pytest.raises(ConnectionLost, match="no more sockets"):
                await asyncio.wait_for(asyncio.shield(client.ended), 10)
            with pytest.raises(ConnectionLost, match="no more sockets"):
                await client.peer(10)

    async def test_an_iteration_ends_with_the_reason(
        self, start_server: StartServer, broken: Callable[[], None]
    ) -> None:
        server = await start_server()
        subscriber = EmqpSubscriber(
            "127.0.0.1", port_of(server, "emqp-subscribers"), backoff=soon()
        )
        micromsg2 = MicroMsg2Client("127.0.0.1", port_of(server, "micromsg2"), backoff=soon())
        relink = RelinkClient(
            "127.0.0.1", port_of(server, "relink"), "queue/q?consume", backoff=soon()
        )
        async with subscriber, micromsg2, micromsg2.subscribe("queue/r") as subscription, relink:
            broken()
            await server.stop()
            for iterator in (subscriber, subscription, relink.receiver(0)):
                with pytest.raises(ConnectionLost, match="no more sockets"):
                    await asyncio.wait_for(_end_of_iteration(iterator), 10)

    async def test_a_worker_stops_with_the_reason(
        self, start_server: StartServer, broken: Callable[[], None]
    ) -> None:
        server = await start_server()
        async with Worker("127.0.0.1", port_of(server, "emqp-workers"), backoff=soon()) as worker:
            broken()
            await server.stop()
            await asyncio.wait_for(worker.stopped.wait(), 10)
            assert "no more sockets" in str(worker.failure)


async def test_a_socket_that_was_reset_takes_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reset:
        family = socket.AF_INET

        def setsockopt(self, *_: object) -> None:
            raise OSError(22, "Invalid argument")

    class Transport:
        def get_extra_info(self, _name: str) -> Reset:
            return Reset()

    asked = Transport()
    session.use_keep_alive(asked)  # type: ignore[arg-type]
    assert asked.get_extra_info("socket").family == socket.AF_INET


async def test_dialling_survives_errors_of_the_system(start_server: StartServer) -> None:
    """An OSError that is not about connecting is no reason to stop either."""
    server = await start_server()
    port = port_of(server, "emp")
    failures = 3

    class Unlucky(EmpClient):
        async def _connect(self, host: str, port: int) -> Any:
            nonlocal failures
            if self._redialler._task is not None and failures:
                failures -= 1
                raise OSError(22, "Invalid argument")
            return await super()._connect(host, port)

    async with Unlucky("127.0.0.1", port, backoff=soon()) as client:
        await restarted(server, start_server)
        assert await client.request("$echo", {"n": 1}) == {"n": 1}
    assert failures == 0


class TestNumbers:
    def test_one_that_is_taken_becomes_another(self) -> None:
        kept = KeptSubscriptions()
        first = kept.add(1, b"", destination="queue/a", name="", start="")
        second = kept.add(1, b"", destination="queue/b", name="", start="")
        assert (first.number, second.number) == (1, 2)

    def test_both_ways(self) -> None:
        numbers = SubscriptionNumbers()
        numbers.join(1, KeptSubscription(5, "queue/a", "", "", b""))
        assert numbers.for_program(1, 10) == 5
        assert numbers.for_connection(5) == 1
        assert numbers.for_program(3, 10) == 3
        assert numbers.for_connection(3) == 3

    @pytest.mark.parametrize(
        ("destination", "name", "start", "again"),
        [
            ("queue/a", "", "", ""),
            ("topic/a", "", "latest", "latest"),
            ("topic/a", "", "", ""),
            ("topic/a", "", "earliest", "18"),
            ("topic/a", "", "5", "18"),
            ("topic/a", "mine", "earliest", "earliest"),
        ],
    )
    def test_where_it_goes_on(self, destination: str, name: str, start: str, again: str) -> None:
        kept = KeptSubscription(1, destination, name, start, b"", last_id=17)
        assert kept.start_again() == again
