"""Relink peers on a real hub: endpoints, transactions, and links that outlive connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from crosswire.access import User
from crosswire.client.adapters.relink import _RelinkFeed
from crosswire.client.connect import connect
from crosswire.client.native.dial import Backoff
from crosswire.client.native.emp import EmpClient
from crosswire.client.native.relink import Received, RelinkClient
from crosswire.commitlog.body import GroupBody
from crosswire.config import ProtocolLimits
from crosswire.errors import (
    ConnectFailed,
    ConnectionLost,
    InvalidDestination,
    LinkLost,
    RequestFailed,
    StoreFailed,
)
from crosswire.gateways.relink.endpoints import Endpoint, parse_endpoint
from crosswire.gateways.relink.links import Links
from crosswire.hub.policies import QueuePolicy
from crosswire.hub.subscriptions import AtId
from crosswire.server.server import Server
from crosswire.store.contract import StoreLimits
from crosswire.store.rocks import RocksStore
from crosswire.wire.relink.frames import RelinkLimits
from crosswire.wire.relink.handshake import LinkTerms
from crosswire.wire.relink.link import Link
from tests.gateways.conftest import StartServer, port_of

WAIT_S = 20.0


def client(server: Server, endpoint: str, **options: Any) -> RelinkClient:
    options.setdefault("backoff", Backoff(0.01, 0.05))
    return RelinkClient("127.0.0.1", port_of(server, "relink"), endpoint, **options)


async def take(source: RelinkClient, channel: int = 0) -> Received:
    async with asyncio.timeout(WAIT_S):
        return await anext(source.receiver(channel))


async def take_parts(source: RelinkClient, channel: int = 0) -> tuple[bytes, ...]:
    """The next message, consumed."""
    message = await take(source, channel)
    message.consume()
    return tuple(bytes(part) for part in message.parts)


async def send(server: Server, endpoint: str, *messages: bytes) -> None:
    """Produce, and wait until the hub has it."""
    async with client(server, endpoint) as producer:
        for message in messages:
            await producer.sender().send(message)
        await producer.sender().consumed(timeout_s=WAIT_S)


async def drain(server: Server, endpoint: str, count: int) -> list[bytes]:
    async with client(server, endpoint) as consumer:
        return [(await take_parts(consumer))[-1] for _ in range(count)]


async def until(server: Server, holds: Any) -> None:
    """Let the loop turn until it is true; what makes it true is on its way."""
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await server.hub.committed()
            await asyncio.sleep(0)


def cut(peer: RelinkClient) -> None:
    """The network fails; the client will dial again."""
    peer.session.transport.abort()


def abandon(peer: RelinkClient) -> None:
    """The peer dies without a word."""
    assert peer._keeper is not None
    peer._keeper.cancel()
    cut(peer)


def link_of(server: Server, peer: RelinkClient) -> Any:
    return server.context.shared(Links).find(peer.link.epoch, peer.link.id)


# -------------------------------------------------------------------------------------- endpoints


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("queue/a/b", Endpoint("produce", "queue/a/b")),
        ("topic/t", Endpoint("produce", "topic/t")),
        ("queue/q?consume", Endpoint("consume", "queue/q")),
        ("queue/q?consume&filter=a%3DN1", Endpoint("consume", "queue/q", "a=N1")),
        ("topic/t/+?subscribe&from=7&name=me", Endpoint("consume", "topic/t/+", "", "me", AtId(7))),
        ("service/s/m", Endpoint("call", "service/s/m")),
        ("service/s?serve", Endpoint("serve", "service/s")),
    ],
)
def test_an_endpoint_defines_what_a_link_is_for(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize(
    "text",
    [
        "",
        "q",
        "queue/",
        "queue/q?",
        "queue/q?subscribe",
        "queue/q?consume&name=n",
        "topic/t?subscribe&name",
        "topic/t?subscribe&name=a&name=b",
        "topic/+",
        "topic/t?subscribe&from=never",
        "service/s?consume",
    ],
)
def test_others_are_not_known(text: str) -> None:
    with pytest.raises(InvalidDestination):
        parse_endpoint(text)


@pytest.mark.parametrize(
    ("endpoint", "options"),
    [
        ("nowhere", {}),
        ("queue/q?subscribe", {}),
        ("queue/q?consume&filter=%3D", {}),
        ("service/s", {"connector_id_size": 2}),
        ("service/s?serve", {"listener_transactions": True}),
        ("service/crosswire.Hub?serve", {}),
    ],
)
async def test_an_unknown_endpoint_ends_the_connection(
    server: Server, endpoint: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ConnectFailed):
        async with client(server, endpoint, **options):
            pass


# --------------------------------------------------------------------------- produce and consume


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ((b"payload",), (b"payload",)),
        ((b'{"a":1,"b":"x","c":true,"d":1.5}', b"p"), (b'{"a":1,"b":"x","c":true,"d":1.5}', b"p")),
        ((b"{}", b"p"), (b"p",)),
        ((b"", b"p"), (b"p",)),
        ((b"1", b"", b"333"), (b"1", b"", b"333")),
        ((), (b"",)),
        ((b"x" * 1_000_000,), (b"x" * 1_000_000,)),
    ],
)
async def test_parts_come_out_as_they_went_in(
    server: Server, sent: tuple[bytes, ...], received: tuple[bytes, ...]
) -> None:
    async with client(server, "queue/q") as producer, client(server, "queue/q?consume") as consumer:
        await producer.sender().send(*sent)
        assert await take_parts(consumer) == received


async def test_a_message_of_another_protocol_has_one_part(server: Server) -> None:
    async with (
        EmpClient("127.0.0.1", port_of(server, "emp")) as emp,
        client(server, "queue/q?consume") as consumer,
    ):
        await emp.request("$publish", {"destination": "queue/q", "json": {"a": 1}})
        assert await take_parts(consumer) == (b'{"a":1}',)


async def test_a_multicast_is_a_message_for_each_target(server: Server) -> None:
    async with client(server, "queue/q") as producer:
        await producer.multicast([1, 2, 2], b"m")
        for channel in (1, 2):
            await producer.sender(channel).consumed(timeout_s=WAIT_S)
    assert server.hub.queue("queue/q").length == 3


async def test_consumed_means_on_disk(start_server: StartServer) -> None:
    server = await start_server()
    await send(server, "queue/q", b"1", b"2")
    await server.stop()
    assert await drain(await start_server(), "queue/q?consume", 2) == [b"1", b"2"]


async def test_a_channel_can_be_closed_and_used_again(server: Server) -> None:
    async with client(server, "queue/q") as producer:
        for message in (b"1", b"2"):
            await producer.sender(7).send(message)
            await producer.sender(7).close(timeout_s=WAIT_S)
    assert await drain(server, "queue/q?consume", 2) == [b"1", b"2"]


async def test_everybody_who_subscribed_gets_it(server: Server) -> None:
    async with (
        client(server, "topic/a/b?subscribe") as one,
        client(server, "topic/a/+?subscribe") as other,
    ):
        await send(server, "topic/a/b", b"m")
        assert [await take_parts(each) for each in (one, other)] == [(b"m",), (b"m",)]


async def test_a_filter_chooses(server: Server) -> None:
    async with (
        client(server, "topic/t?subscribe&filter=a%3EN1") as subscriber,
        client(server, "topic/t") as publisher,
    ):
        for number in (1, 2):
            await publisher.sender().send(b'{"a":%d}' % number, b"%d" % number)
        assert (await take_parts(subscriber))[1] == b"2"


async def test_a_subscriber_may_start_with_what_is_stored(server: Server) -> None:
    await send(server, "topic/t", b"1", b"2")
    assert await drain(server, "topic/t?subscribe&from=earliest", 2) == [b"1", b"2"]


async def test_a_name_keeps_the_position(server: Server) -> None:
    async with client(server, "topic/t?subscribe&name=n"):
        pass
    await send(server, "topic/t", b"1", b"2")
    assert await drain(server, "topic/t?subscribe&name=n", 1) == [b"1"]
    assert await drain(server, "topic/t?subscribe&name=n", 1) == [b"2"]


async def test_a_burst_larger_than_the_window_reaches_a_subscriber(server: Server) -> None:
    count = 3000
    async with client(server, "topic/t?subscribe") as subscriber:
        await send(server, "topic/t", *(b"%d" % number for number in range(count)))
        found = [await take_parts(subscriber) for _ in range(count)]
    assert found == [(b"%d" % number,) for number in range(count)]


async def test_a_consumer_sends_nothing(server: Server) -> None:
    async with client(server, "queue/q?consume") as consumer:
        await consumer.sender().send(b"?")
        with pytest.raises(ConnectionLost):
            await consumer.sender().consumed(timeout_s=WAIT_S)


async def test_properties_that_are_none_end_the_link(server: Server) -> None:
    async with client(server, "queue/q") as producer:
        await producer.sender().send(b"before")
        await producer.sender().consumed(timeout_s=WAIT_S)
        await producer.sender().send(b"[]", b"payload")
        with pytest.raises(ConnectionLost):
            await producer.sender().consumed(timeout_s=WAIT_S)
    assert server.hub.queue("queue/q").length == 1


# ----------------------------------------------------------------------------------- transactions


async def test_what_is_committed_is_there_and_what_is_rolled_back_is_not(server: Server) -> None:
    async with client(server, "queue/q", connector_transactions=True) as producer:
        with pytest.raises(InterruptedError):
            async with producer.sender().transaction() as transaction:
                await transaction.send(b"never")
                raise InterruptedError
        async with producer.sender().transaction() as transaction:
            await transaction.send(b"1")
            await transaction.send(b"2")
        assert server.hub.queue("queue/q").length == 2
    assert await drain(server, "queue/q?consume", 2) == [b"1", b"2"]


async def test_a_transaction_is_taken_whole_or_not_at_all(start_server: StartServer) -> None:
    server = await start_server(queues={"q": QueuePolicy(max_length=2)})
    async with client(server, "queue/q", connector_transactions=True) as producer:
        with pytest.raises(RequestFailed, match="uncommitted"):
            async with producer.sender().transaction() as transaction:
                for _ in range(3):
                    await transaction.send(b"too many")
        assert server.hub.queue("queue/q").length == 0
        async with producer.sender().transaction() as transaction:
            await transaction.send(b"fits")
    assert server.hub.queue("queue/q").length == 1


async def test_properties_that_are_none_are_not_committed(server: Server) -> None:
    async with client(server, "queue/q", connector_transactions=True) as producer:
        with pytest.raises(RequestFailed, match="uncommitted"):
            async with producer.sender().transaction() as transaction:
                await transaction.send(b"[]", b"payload")


async def send_undecided(producer: RelinkClient, *messages: bytes) -> None:
    """Send in a transaction that stays open, and wait until the hub has it safe."""
    for message in messages:
        producer.link.send(0, (message,))
    producer.wake()
    sending = producer.link._sending.channels[0]
    async with asyncio.timeout(WAIT_S):
        while sending.received < len(messages):
            await asyncio.sleep(0.001)


async def test_an_open_transaction_survives_a_restart(start_server: StartServer) -> None:
    server = await start_server()
    address = f"127.0.0.1:{port_of(server, 'relink')}"
    async with client(server, "queue/q", connector_transactions=True) as producer:
        await send_undecided(producer, b"1", b"2", b"3")
        await server.stop()
        server = await start_server(listen={"relink": address})
        producer.link.commit(0, 1)
        producer.link.rollback(0)
        producer.wake()
        assert await drain(server, "queue/q?consume", 2) == [b"1", b"2"]
        await until(server, lambda: not producer.link.unconsumed)
    assert server.hub.queue("queue/q").length == 0


async def test_an_open_transaction_ends_with_its_link(start_server: StartServer) -> None:
    server = await start_server(limits=short_links())
    async with client(server, "queue/q", connector_transactions=True) as producer:
        await send_undecided(producer, b"1")
        abandon(producer)
        await until(server, lambda: link_of(server, producer) is None)
        await server.hub.committed()
        assert list(server.hub.store.load("relink-row")) == []
        producer.link.detach(ended=True)
    assert server.hub.queue("queue/q").length == 0


async def test_a_consumer_may_refuse_in_transactions(server: Server) -> None:
    await send(server, "queue/q", b"m")
    async with client(server, "queue/q?consume", listener_transactions=True) as consumer:
        (await take(consumer)).refuse()
        (await take(consumer)).consume()
        await until(server, lambda: server.hub.queue("queue/q").length == 0)
    steps = [row.step for row in server.hub.trace(1)]
    assert steps == ["accepted", "delivered", "refused", "delivered", "settled"]


# ------------------------------------------------------------------------------- limits and rights


async def test_a_full_queue_stops_its_producer(start_server: StartServer) -> None:
    server = await start_server(queues={"q": QueuePolicy(max_length=3)})
    async with client(server, "queue/q") as producer:
        for number in range(10):
            await producer.sender().send(b"%d" % number)
        await producer.sender().consumed(3, timeout_s=WAIT_S)
        await until(server, lambda: not producer_of(server).session.connection.wants_data)
        found = await drain(server, "queue/q?consume", 10)
        await producer.sender().consumed(timeout_s=WAIT_S)
    assert found == [b"%d" % number for number in range(10)]


def producer_of(server: Server) -> Any:
    return next(iter(server.context.gateways.values()))


async def test_bytes_are_limited_too(start_server: StartServer) -> None:
    server = await start_server(queues={"q": QueuePolicy(max_bytes=5000)})
    async with client(server, "queue/q") as producer:
        for _ in range(3):
            await producer.sender().send(b"x" * 2000)
        await producer.sender().consumed(2, timeout_s=WAIT_S)
        assert len(await drain(server, "queue/q?consume", 3)) == 3


def fail_writes(server: Server, count: int) -> None:
    """The disk fails that often, then it works again."""
    store = server.hub.store
    write = store._write

    def failing(batch: GroupBody) -> None:
        nonlocal count
        count -= 1
        if count >= 0:
            raise StoreFailed("the disk has a bad day")
        write(batch)

    store._write = failing  # type: ignore[method-assign]


async def test_a_failing_disk_only_delays_a_producer(server: Server) -> None:
    async with client(server, "queue/q") as producer, client(server, "queue/q?consume") as consumer:
        fail_writes(server, 3)
        for number in range(3):
            await producer.sender().send(b"%d" % number)
        await producer.sender().consumed(timeout_s=WAIT_S)
        found = [await take_parts(consumer) for _ in range(3)]
    assert found == [(b"0",), (b"1",), (b"2",)]


async def test_a_failing_disk_does_not_commit(server: Server) -> None:
    async with client(server, "queue/q", connector_transactions=True) as producer:
        fail_writes(server, 1)
        with pytest.raises(RequestFailed, match="uncommitted"):
            async with producer.sender().transaction() as transaction:
                await transaction.send(b"m")
    assert server.hub.queue("queue/q").length == 0


async def test_a_full_disk_stops_producers(start_server: StartServer) -> None:
    server = await start_server(store=StoreLimits(spare_bytes=1 << 60))
    async with client(server, "queue/q") as producer:
        await producer.sender().send(b"m")
        await until(server, lambda: not producer_of(server).session.connection.wants_data)
        server.hub.store.limits = StoreLimits()
        await producer.sender().consumed(timeout_s=WAIT_S)
    assert server.hub.queue("queue/q").length == 1


async def test_who_may_not_is_disconnected(start_server: StartServer) -> None:
    user = User(name="u", token="0123456789abcdef", produce=("queue/q",))
    server = await start_server(users=(user,))
    with pytest.raises(ConnectFailed):
        async with client(server, "queue/q"):
            pass
    assert server.context.counters["forbidden", "relink"] == 1


async def test_a_malformed_peer_harms_nobody(server: Server) -> None:
    async with client(server, "queue/q") as producer:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server, "relink"))
        writer.write(b"\xff" * 300)
        # Our version was sent before there was anything wrong; after it there is only the end.
        assert await asyncio.wait_for(reader.read(), WAIT_S) == bytes(8)
        writer.close()
        await producer.sender().send(b"m")
        await producer.sender().consumed(timeout_s=WAIT_S)
    assert server.hub.queue("queue/q").length == 1


# ---------------------------------------------------------------------------------------- services


@asynccontextmanager
async def serving(server: Server, endpoint: str = "service/s?serve") -> AsyncIterator[RelinkClient]:
    """A provider that gives back what it is asked; `fail` as the payload makes it fail."""
    async with client(server, endpoint) as provider, asyncio.TaskGroup() as group:

        async def answer(channel: int) -> None:
            async for message in provider.receiver(channel):
                parts = [bytes(part) for part in message.parts]
                if parts[-1] == b"fail":
                    parts = [b'{"error":"broken","description":"it is"}', b"because"]
                await provider.sender(channel).send(*parts)
                message.consume()

        async def listen() -> None:
            async for receiver in provider.opened():
                group.create_task(answer(receiver.channel))

        listener = group.create_task(listen())
        yield provider
        for task in list(group._tasks):
            task.cancel()
        listener.cancel()


async def ask(caller: RelinkClient, *parts: bytes, channel: int = 0) -> tuple[bytes, ...]:
    await caller.sender(channel).send(*parts)
    return await take_parts(caller, channel)


async def test_a_call_is_answered_on_its_channel(server: Server) -> None:
    async with serving(server), client(server, "service/s") as caller:
        assert await ask(caller, b"hello", channel=3) == (b"hello",)
        assert await ask(caller, b'{"a":1}', b"there", channel=4) == (b'{"a":1}', b"there")


async def test_answers_come_in_the_order_of_the_calls(server: Server) -> None:
    calls = [b"%d" % number for number in range(100)]
    async with serving(server), client(server, "service/s") as caller:
        for call in calls:
            await caller.sender().send(call)
        assert [(await take_parts(caller))[0] for _ in calls] == calls


async def test_channels_of_calls_can_be_closed_and_used_again(server: Server) -> None:
    async with serving(server), client(server, "service/s") as caller:
        for _ in range(3):
            assert await ask(caller, b"m", channel=9) == (b"m",)
            await caller.sender(9).close(timeout_s=WAIT_S)
            async with asyncio.timeout(WAIT_S):
                assert await anext(caller.receiver(9), None) is None


@pytest.mark.parametrize(
    ("parts", "answer"),
    [
        ((b"fail",), (b'{"error":"broken","description":"it is"}', b"because")),
        ((b"[]", b"m"), (b'"error":"invalid_request"',)),
    ],
)
async def test_what_goes_wrong_is_reported(
    server: Server, parts: tuple[bytes, ...], answer: tuple[bytes, ...]
) -> None:
    async with serving(server), client(server, "service/s") as caller:
        found = await ask(caller, *parts)
        assert answer[0] in found[0]
        assert found[1:] in (answer[1:], (b"",))


async def test_nobody_serves(server: Server) -> None:
    async with client(server, "service/s") as caller:
        assert b'"error":"unknown_op"' in (await ask(caller, b"m"))[0]


async def test_a_call_may_have_a_timeout(server: Server) -> None:
    async with client(server, "service/s?serve"), client(server, "service/s") as caller:
        assert b'"error":"timeout"' in (await ask(caller, b'{"timeout":0.05}', b"m"))[0]


async def test_a_provider_that_leaves_loses_its_calls(server: Server) -> None:
    async with client(server, "service/s") as caller:
        async with client(server, "service/s?serve") as provider:
            await caller.sender().send(b"m")
            await take(provider)
        assert b'"error":"provider_lost"' in (await take_parts(caller))[0]


async def test_a_call_outlives_the_connections(server: Server) -> None:
    async with (
        client(server, "service/s?serve") as provider,
        client(server, "service/s") as caller,
    ):
        await caller.sender().send(b"m")
        request = await take(provider)
        cut(caller)
        cut(provider)
        await provider.sender(request.channel).send(b"late")
        request.consume()
        assert await take_parts(caller) == (b"late",)


async def test_answers_that_nobody_consumes_are_bounded(start_server: StartServer) -> None:
    limits = ProtocolLimits(relink=RelinkLimits(unconsumed_bytes=100_000))
    server = await start_server(limits=limits)
    async with serving(server), client(server, "service/s") as caller:
        with pytest.raises(ConnectionLost):
            for _ in range(20):
                await caller.sender().send(b"x" * 10_000)
                await take(caller)


@pytest.mark.slow
async def test_many_calls_on_many_channels_are_answered(server: Server) -> None:
    """More than may be open at a time; the caller consumes nothing before it has asked for all."""
    async with serving(server), client(server, "service/s") as caller:
        for number in range(3000):
            await caller.sender(number % 10).send(b"%d" % number)
        for number in range(3000):
            assert await take_parts(caller, number % 10) == (b"%d" % number,)


async def test_an_answer_to_nothing_ends_the_link(server: Server) -> None:
    async with client(server, "service/s?serve") as provider:
        await provider.sender().send(b"?")
        with pytest.raises(ConnectionLost):
            await provider.sender().consumed(timeout_s=WAIT_S)


# ------------------------------------------------------------------------------------------- links


async def test_what_a_cut_link_holds_goes_to_nobody_else(server: Server) -> None:
    async with client(server, "queue/q?consume") as consumer:
        await send(server, "queue/q", b"held")
        held = await take(consumer)
        async with client(server, "queue/q?consume") as other:
            cut(consumer)
            await send(server, "queue/q", b"next")
            assert await take_parts(other) == (b"next",)
            held.consume()
            await until(server, lambda: server.hub.queue("queue/q").length == 0)


async def test_a_cut_subscriber_gets_what_was_published_meanwhile(server: Server) -> None:
    async with client(server, "topic/t?subscribe", backoff=Backoff(0.3, 0.3)) as subscriber:
        cut(subscriber)
        await until(server, lambda: not server.context.gateways)
        await send(server, "topic/t", b"1", b"2")
        assert [await take_parts(subscriber) for _ in range(2)] == [(b"1",), (b"2",)]


async def test_the_ledger_has_what_a_connection_carried(server: Server) -> None:
    """What is kept for a link without a connection is delivered when it has one again."""
    async with client(server, "topic/t?subscribe", backoff=Backoff(0.3, 0.3)) as subscriber:
        (first,) = server.context.gateways
        cut(subscriber)
        await until(server, lambda: not server.context.gateways)
        await send(server, "topic/t", b"1")
        assert steps_of(server, "topic/t") == [("accepted", True)]
        await take_parts(subscriber)
        assert steps_of(server, "topic/t") == [("accepted", True), ("delivered", True)]
        assert first not in {row.connection for row in server.hub.ledger.of_destination("topic/t")}


async def test_what_a_forgotten_link_kept_was_not_delivered(start_server: StartServer) -> None:
    server = await start_server(limits=short_links())
    async with client(server, "topic/t?subscribe") as subscriber:
        await send(server, "topic/t", b"unconfirmed")
        await take(subscriber)
        abandon(subscriber)
        await until(server, lambda: not server.context.gateways)
        await send(server, "topic/t", b"kept")
        await until(server, lambda: "returned" in [step for step, _ in steps_of(server, "topic/t")])
        assert [step for step, _ in steps_of(server, "topic/t")] == [
            "accepted",
            "delivered",
            "accepted",
            "returned",
        ]
        subscriber.link.detach(ended=True)


def steps_of(server: Server, destination: str) -> list[tuple[str, bool]]:
    """The steps at a destination, and whether a connection is named."""
    rows = server.hub.ledger.of_destination(destination)
    return [(row.step, bool(row.connection)) for row in rows]


async def test_a_cut_producer_goes_on(server: Server) -> None:
    async with client(server, "queue/q") as producer:
        for number in range(100):
            if number % 20 == 10:
                cut(producer)
            await producer.sender().send(b"%d" % number)
        await producer.sender().consumed(timeout_s=WAIT_S)
    found = await drain(server, "queue/q?consume", 100)
    assert found == [b"%d" % number for number in range(100)]


def short_links() -> ProtocolLimits:
    return ProtocolLimits(relink=RelinkLimits(link_s=0.1))


async def test_a_link_without_a_connection_is_forgotten(start_server: StartServer) -> None:
    server = await start_server(limits=short_links())
    async with client(server, "queue/q?consume") as consumer:
        await send(server, "queue/q", b"m")
        await take(consumer)
        abandon(consumer)
        assert await drain(server, "queue/q?consume", 1) == [b"m"]
        consumer.link.detach(ended=True)
    await server.hub.committed()
    assert list(server.hub.store.load("relink-row")) == []


async def test_a_forgotten_link_is_lost(start_server: StartServer) -> None:
    server = await start_server(limits=short_links())
    async with client(server, "queue/q", backoff=Backoff(0.5, 0.5)) as producer:
        await producer.sender().send(b"m")
        await producer.sender().consumed(timeout_s=WAIT_S)
        cut(producer)
        with pytest.raises(LinkLost):
            async with asyncio.timeout(WAIT_S):
                while True:
                    await producer.sender().send(b"m")
                    await producer.sender().consumed()


async def test_a_client_whose_window_is_full_notices_that_its_link_is_lost(
    start_server: StartServer,
) -> None:
    """It settles nothing meanwhile, and asks for no more: others may be at work for long."""
    server = await start_server(limits=short_links())
    await send(server, "queue/q", b"1", b"2", b"3")
    url = f"relink://127.0.0.1:{port_of(server, 'relink')}"
    async with (
        connect(url, backoff=lambda: Backoff(0.5, 0.5)) as program,
        program.subscribe("queue/q", window=1) as subscription,
    ):
        held = await subscription.receive(WAIT_S)
        await until(server, lambda: not subscription.has_room)
        feed = subscription._feed
        assert isinstance(feed, _RelinkFeed)
        cut(feed.client)
        again = await subscription.receive(WAIT_S)
        assert held.lost and again.payload == b"1"


async def test_a_shutdown_gives_back_what_was_held_at_once(server: Server) -> None:
    await send(server, "queue/q", b"m")
    async with client(server, "queue/q?consume") as consumer:
        await take(consumer)
    assert await drain(server, "queue/q?consume", 1) == [b"m"]


async def test_a_link_is_taken_over(server: Server) -> None:
    async with client(server, "queue/q?consume") as first:
        await send(server, "queue/q", b"m")
        await take(first)
        assert first._keeper is not None
        first._keeper.cancel()
        second = client(server, "queue/q?consume")
        second.link = Link.restore(first.link.save())
        async with second:
            await until(server, lambda: not first.connected)
            assert len(server.context.gateways) == 1
            second.link.consume(0, 0)
            second.wake()
            await until(server, lambda: server.hub.queue("queue/q").length == 0)
        first.link.detach(ended=True)


async def test_a_link_to_elsewhere_is_refused(server: Server) -> None:
    async with client(server, "queue/q") as first:
        second = client(server, "queue/other")
        second.link = Link("connector", LinkTerms(endpoint="queue/other"))
        second.link.epoch, second.link.id = first.link.epoch, first.link.id
        with pytest.raises(ConnectFailed):
            await second._connect()
        await first.sender().send(b"m")
        await first.sender().consumed(timeout_s=WAIT_S)


async def test_links_survive_a_restart(start_server: StartServer) -> None:
    server = await start_server()
    address = f"127.0.0.1:{port_of(server, 'relink')}"
    await send(server, "queue/q", b"1", b"2")
    async with client(server, "queue/q?consume") as consumer:
        held = await take(consumer)
        await server.stop()
        server = await start_server(listen={"relink": address})
        await send(server, "queue/q", b"3")
        assert (await take_parts(consumer), await take_parts(consumer)) == ((b"2",), (b"3",))
        held.consume()
        await until(server, lambda: server.hub.queue("queue/q").length == 0)


async def test_a_restarted_hub_keeps_what_a_link_holds(start_server: StartServer) -> None:
    server = await start_server()
    async with client(server, "queue/q?consume") as consumer:
        await send(server, "queue/q", b"held")
        await take(consumer)
        abandon(consumer)
        await server.stop()
        server = await start_server(limits=ProtocolLimits(relink=RelinkLimits(link_s=0.3)))
        await send(server, "queue/q", b"new")
        assert await drain(server, "queue/q?consume", 2) == [b"new", b"held"]
        consumer.link.detach(ended=True)


async def stop_and_tamper(server: Server, tmp_path: Path, key: bytes, value: bytes) -> None:
    await server.stop()
    store = RocksStore(tmp_path / "data" / "store")
    store._db[key] = value
    store._db.close()


@pytest.mark.parametrize("failed_starts", [0, 1])
async def test_links_that_cannot_be_trusted_are_of_another_epoch(
    start_server: StartServer, tmp_path: Path, failed_starts: int
) -> None:
    server = await start_server()
    address = f"127.0.0.1:{port_of(server, 'relink')}"
    await send(server, "queue/q", b"m")
    async with client(server, "queue/q?consume") as consumer:
        (await take(consumer))
        epoch = consumer.link.epoch
        await stop_and_tamper(server, tmp_path, b"!running", b"another boot")
        for _ in range(failed_starts):
            RocksStore(tmp_path / "data" / "store")._db.close()
        server = await start_server(listen={"relink": address})
        with pytest.raises(LinkLost):
            await take(consumer)
        assert server.context.shared(Links).epoch > epoch
        assert await drain(server, "queue/q?consume", 1) == [b"m"]


@pytest.mark.parametrize("is_own", [True, False])
async def test_a_damaged_link_is_forgotten_alone(
    start_server: StartServer, tmp_path: Path, *, is_own: bool
) -> None:
    server = await start_server()
    address = f"127.0.0.1:{port_of(server, 'relink')}"
    await send(server, "queue/q", b"1")
    async with client(server, "queue/q?consume") as consumer:
        held = await take(consumer)
        epoch = consumer.link.epoch
        key = consumer.link.id.to_bytes(8) if is_own else b"12345678"
        await stop_and_tamper(server, tmp_path, b"srelink-link/" + key, b"damaged")
        server = await start_server(listen={"relink": address})
        assert server.context.shared(Links).epoch == epoch
        await server.hub.committed()  # what is set aside is written with the next group
        assert ("relink-link", key, b"damaged") in list(server.hub.damage.state())
        if is_own:
            with pytest.raises(LinkLost):
                await take(consumer)
            assert await drain(server, "queue/q?consume", 1) == [b"1"]
        else:
            held.consume()
            await send(server, "queue/q", b"2")
            assert await take_parts(consumer) == (b"2",)


def kept(server: Server) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
    """Names of destinations and state, without the last known time, which goes on by itself."""
    scan = server.hub.store._scan
    state = {key: value for key, value in scan(b"s", b"t") if not key.startswith(b"sclock/")}
    return dict(scan(b"d", b"e")), state


@pytest.mark.parametrize(
    "start",
    ["1" * 30, "9223372036854775808", "-1", "0001-01-01", "1e400", "nan", "1" * 5000],
)
async def test_a_hello_that_is_refused_leaves_no_state(
    start_server: StartServer, start: str
) -> None:
    server = await start_server()
    before = kept(server)
    refused = client(server, f"topic/t?subscribe&from={start}&name=n")
    with pytest.raises(ConnectFailed):
        await refused.__aenter__()
    await server.hub.committed()
    after = kept(server)
    assert after == before
    await server.stop()
    server = await start_server()
    assert not server.hub.reports
    await send(server, "queue/q", b"m")


async def test_a_name_that_is_taken_is_refused(server: Server) -> None:
    server.hub.subscriptions.named("n", "topic/secret", "", None, server.context.now())
    await server.hub.committed()
    with pytest.raises(ConnectFailed):
        await client(server, "topic/t?subscribe&name=n").__aenter__()
    assert server.hub.subscriptions.all()[0].definition.pattern == "secret"


async def test_a_violation_costs_the_link(server: Server) -> None:
    await send(server, "queue/q", b"m")
    async with client(server, "queue/q?consume") as consumer:
        await take(consumer)
        consumer.session.transport.write(b"\xff" * 64)
        with pytest.raises(ConnectionLost):
            await take(consumer)
    assert await drain(server, "queue/q?consume", 1) == [b"m"]


async def test_an_unconsumed_window_is_all_a_consumer_gets(server: Server) -> None:
    async with client(server, "queue/q?consume") as consumer:
        await send(server, "queue/q", *(b"m" for _ in range(1100)))
        messages = [await take(consumer) for _ in range(1024)]
        assert link_of(server, consumer).link.room(0) == 0
        for message in messages:
            message.consume()
        for _ in range(76):
            (await take(consumer)).consume()
        await until(server, lambda: server.hub.queue("queue/q").length == 0)
