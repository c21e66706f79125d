"""A hub under load that is killed again and again: what it acknowledged arrives, and all go on."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress

import msgspec

from crosswire.errors import ClientError
from crosswire.server.server import GATEWAYS
from tests.cli.conftest import RunningHub, StartHub
from tests.e2e.bridging import until
from tests.e2e.parties import PARTIES, EmqpParty, Inbox, Party

KILLS = 3
BETWEEN_S = 0.8
AT_ONCE = 3
ARRIVE_S = 20.0
TOPIC = "topic/kept"


class Sent(msgspec.Struct):
    """What went to a destination, as far as its producers know."""

    acknowledged: set[bytes] = msgspec.field(default_factory=set)
    unknown: set[bytes] = msgspec.field(default_factory=set)


class Traffic:
    """Producers and consumers of all protocols, and what they know."""

    def __init__(self, queues: list[str]) -> None:
        self.sent = {destination: Sent() for destination in [*queues, TOPIC]}
        self.received: dict[tuple[str, str], Counter[bytes]] = {}
        self.running = True
        self._queues = queues

    async def produce(self, party: Party, number: int) -> None:
        """One message after the other; what was not acknowledged is not sent again."""
        # eMQP publishes without a receipt: nobody knows what was acknowledged.
        indexes = self._queues if isinstance(party, EmqpParty) else [*self._queues, TOPIC]
        count = 0
        while self.running:
            destination = indexes[count % len(indexes)]
            payload = f"{party.name} {number} {count}".encode()
            count += 1
            try:
                await party.produce(destination, payload)
            except ClientError:
                self.sent[destination].unknown.add(payload)
            else:
                self.sent[destination].acknowledged.add(payload)

    async def consume(self, party: Party, destination: str, inbox: Inbox) -> None:
        arrived = self.received[party.name, destination] = Counter()
        while True:
            arrived[(await inbox.get()).payload] += 1

    def missing(self) -> dict[tuple[str, str], set[bytes]]:
        """What was acknowledged and did not arrive where it should."""
        return {
            (name, destination): self.sent[destination].acknowledged - set(arrived)
            for (name, destination), arrived in self.received.items()
        }

    def invented(self) -> set[bytes]:
        """What arrived and was never sent there."""
        return {
            payload
            for (_, destination), arrived in self.received.items()
            for payload in arrived
            if payload not in self.sent[destination].acknowledged
            and payload not in self.sent[destination].unknown
        }

    def __str__(self) -> str:
        lines = []
        for (name, destination), arrived in self.received.items():
            sent = self.sent[destination]
            lines.append(
                f"{name} from {destination}: {len(sent.acknowledged)} acknowledged, "
                f"{len(sent.acknowledged & set(arrived))} of them arrived, "
                f"{len(sent.unknown)} uncertain, "
                f"{len(sent.unknown & set(arrived))} of them arrived, "
                f"{sum(arrived.values()) - len(arrived)} came again"
            )
        return "\n".join(lines)


def lasting_ports(count: int) -> Iterator[int]:
    """Free ones that nobody is given for a connection of his own while the hub is away: a client
    that keeps trying could even reach itself there."""
    for port in random.sample(range(20_000, 32_000), 100 * count):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            count -= 1
            yield port
        if not count:
            return


class Mortal:
    """A hub that is killed and comes back, at the same addresses."""

    def __init__(self, start_hub: StartHub) -> None:
        names = (*GATEWAYS, "http")
        self.ports = dict(zip(names, lasting_ports(len(names)), strict=True))
        self._start_hub = start_hub
        self.hub = self._rise()

    def _rise(self) -> RunningHub:
        return self._start_hub(
            *(f"--listen={name}=127.0.0.1:{port}" for name, port in self.ports.items())
        )

    async def die_and_rise(self) -> None:
        self.hub.process.send_signal(signal.SIGKILL)
        self.hub.process.wait(timeout=10)
        self.hub = await asyncio.to_thread(self._rise)


async def test_all_that_was_acknowledged_arrives(start_hub: StartHub) -> None:
    mortal = Mortal(start_hub)
    queues = [f"queue/kept-{party.name}" for party in PARTIES]
    traffic = Traffic(queues)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as consuming:
        consumers: list[asyncio.Task[None]] = []
        for kind, queue in zip(PARTIES, queues, strict=True):
            party = await stack.enter_async_context(kind(mortal.ports))
            inbox = await party.consume(queue)
            consumers.append(consuming.create_task(traffic.consume(party, queue, inbox)))
            if kind is not EmqpParty:
                inbox = await party.consume(TOPIC, name=f"kept-{party.name}")
                consumers.append(consuming.create_task(traffic.consume(party, TOPIC, inbox)))
        async with asyncio.TaskGroup() as producing:
            for kind in PARTIES:
                for number in range(AT_ONCE):
                    party = await stack.enter_async_context(kind(mortal.ports))
                    producing.create_task(traffic.produce(party, number))
            for _ in range(KILLS):
                await asyncio.sleep(BETWEEN_S)
                await mortal.die_and_rise()
            await asyncio.sleep(BETWEEN_S)
            traffic.running = False
        with suppress(TimeoutError):  # what is missing is reported below
            await until(lambda: not any(traffic.missing().values()), within_s=ARRIVE_S)
        for consumer in consumers:
            consumer.cancel()
    print(f"\n{KILLS} kills\n{traffic}")
    assert {where: len(lost) for where, lost in traffic.missing().items() if lost} == {}
    assert traffic.invented() == set()
