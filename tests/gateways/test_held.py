"""What waits for a full queue: bounded in memory, and in the time that it takes from others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from crosswire.config import ProtocolLimits
from crosswire.hub.policies import QueuePolicy
from crosswire.server.server import Server
from crosswire.wire.contract import Event
from crosswire.wire.micromsg2.events import MessageReceived, MessagesAcknowledged
from crosswire.wire.micromsg2.frames import MicroMsg2Limits
from tests.gateways.conftest import StartServer
from tests.gateways.wires import Peer, micromsg2

_OPEN_CALLS = 1024
_ROOM = 200


async def until(holds: Any) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0)


def acknowledged(peer: Peer) -> int:
    return sum(len(each.sequences) for each in peer.all(MessagesAcknowledged))


def produced(server: Server) -> int:
    return server.context.counters["produced", "micromsg2"]


def send(peer: Peer, number: int, destination: str, **properties: str) -> None:
    for _ in range(number):
        peer.wire.send_message(destination, b"", properties)
    peer.session.wake()


async def drain(server: Server, destination: str, number: int) -> None:
    """Take `number` messages, as fast as they come."""
    async with micromsg2(server, acks=1000) as consumer:
        got = 0

        def take(event: Event) -> None:
            nonlocal got
            if isinstance(event, MessageReceived):
                got += 1
                consumer.wire.acknowledge(event.sequence)

        consumer.react = take
        consumer.wire.send_subscribe(destination)
        consumer.session.wake()
        await until(lambda: got == number)


async def test_a_call_is_open_until_its_answer_is_stored(start_server: StartServer) -> None:
    server = await start_server(queues={"full": QueuePolicy(max_length=_ROOM)})
    number = _ROOM + _OPEN_CALLS + 100
    async with micromsg2(server, acks=5000) as caller, micromsg2(server, acks=10) as other:
        send(caller, number, "service/nobody", **{"reply-to": "queue/full"})
        await until(lambda: acknowledged(caller) >= _OPEN_CALLS)
        # A round trip of somebody else: what was on its way has arrived.
        send(other, 1, "queue/other")
        await until(lambda: acknowledged(other) == 1)
        assert acknowledged(caller) <= _ROOM + _OPEN_CALLS
        await drain(server, "queue/full", number)
        await until(lambda: acknowledged(caller) == number)
        assert caller.end is None
    assert not server.hub.callbacks.failed


@pytest.mark.parametrize("destination", ["service/nobody", "queue/full"])
async def test_a_retry_takes_a_few_of_what_is_held(
    start_server: StartServer, destination: str
) -> None:
    server = await start_server(queues={"full": QueuePolicy(max_length=1)})
    number = 3000
    async with micromsg2(server, acks=5000) as peer:
        send(peer, number, destination, **{"reply-to": "queue/full"})
        gateway: Any
        (gateway,) = server.context.gateways.values()
        await until(lambda: sum(map(len, gateway._intake._held.values())) == number - 1)
        for _ in range(3):
            before = produced(server)
            await until(lambda before=before: produced(server) > before)
            assert produced(server) - before <= 64


async def test_what_is_held_keeps_its_order(start_server: StartServer) -> None:
    server = await start_server(queues={"full": QueuePolicy(max_length=10)})
    number = 500
    async with micromsg2(server, acks=1000) as producer, micromsg2(server, acks=1000) as consumer:
        for each in range(number):
            producer.wire.send_message("queue/full", b"%d" % each, {})
        producer.session.wake()
        await until(lambda: acknowledged(producer) == 10)
        got: list[int] = []

        def take(event: Event) -> None:
            if isinstance(event, MessageReceived):
                got.append(int(event.payload))
                consumer.wire.acknowledge(event.sequence)

        consumer.react = take
        consumer.wire.send_subscribe("queue/full")
        consumer.session.wake()
        await until(lambda: len(got) == number)
        assert got == list(range(number))
        await until(lambda: acknowledged(producer) == number)


@pytest.mark.parametrize(
    ("number", "destination", "properties"),
    [
        (100, "queue/full", {}),
        (100, "service/nobody", {"reply-to": "queue/full"}),
        (5, "queue/full", {"large": "x" * 10_000}),
    ],
)
async def test_messages_without_payload_are_bounded_too(
    start_server: StartServer, number: int, destination: str, properties: dict[str, str]
) -> None:
    limits = ProtocolLimits(micromsg2=MicroMsg2Limits(message_bytes=20_000))
    server = await start_server(queues={"full": QueuePolicy(max_length=1)}, limits=limits)
    async with micromsg2(server, acks=1000) as peer:
        send(peer, number, destination, **properties)
        await until(lambda: peer.end is not None)
        assert "too much was sent to full queues" in str(peer.end)


async def test_one_message_as_large_as_may_be_waits(start_server: StartServer) -> None:
    limits = ProtocolLimits(micromsg2=MicroMsg2Limits(message_bytes=1000))
    server = await start_server(queues={"full": QueuePolicy(max_length=1)}, limits=limits)
    async with micromsg2(server, acks=10) as peer:
        for _ in range(2):
            peer.wire.send_message("queue/full", bytes(1000), {})
        peer.session.wake()
        await until(lambda: acknowledged(peer) == 1)
        await drain(server, "queue/full", 2)
        await until(lambda: acknowledged(peer) == 2)
