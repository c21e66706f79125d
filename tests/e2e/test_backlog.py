"""A backlog far above what a queue keeps in memory, to idle consumers of every protocol."""

from __future__ import annotations

import asyncio

import pytest

from crosswire.envelope import Envelope, message_kind
from crosswire.hub.policies import QueuePolicy
from tests.e2e.bridging import ports_of
from tests.e2e.parties import PARTIES, Party, RelinkParty
from tests.gateways.conftest import StartServer

MIB = 1 << 20


def sent(count: int, size: int, destination: str) -> list[Envelope]:
    kind = message_kind(destination)
    return [
        Envelope(destination=destination, kind=kind, payload=b"%06d" % each + bytes(size - 6))  # type: ignore[arg-type]
        for each in range(count)
    ]


async def numbers(inbox: asyncio.Queue, count: int) -> list[int]:  # type: ignore[type-arg]
    return [int((await asyncio.wait_for(inbox.get(), 20)).payload[:6]) for _ in range(count)]


@pytest.mark.parametrize("party", PARTIES, ids=lambda party: party.name)
async def test_a_backlog_beyond_its_window_reaches_a_consumer(
    party: type[Party], start_server: StartServer
) -> None:
    """The hub has it all before the consumer comes; nothing is sent after that."""
    policy = QueuePolicy(window_bytes=100_000, window_messages=16)
    server = await start_server(queues={"q": policy})
    await server.hub.produce(sent(60, 20_000, "queue/q"), server.context.now())
    async with party(ports_of(server)) as consumer:
        inbox = await consumer.consume("queue/q")
        assert sorted(await numbers(inbox, 60)) == list(range(60))


async def test_a_backlog_above_16_mib_reaches_a_queue_and_a_subscription(
    start_server: StartServer,
) -> None:
    """With the windows that everybody has."""
    server = await start_server()
    async with RelinkParty(ports_of(server)) as consumer:
        inbox = await consumer.consume("queue/q")
        named = await consumer.consume("topic/t", name="n")
        for destination in ("queue/q", "topic/t"):
            await server.hub.produce(sent(24, MIB, destination), server.context.now())
        for each in (inbox, named):
            assert sorted(await numbers(each, 24)) == list(range(24))
