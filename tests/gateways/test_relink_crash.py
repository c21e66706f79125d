"""Relink over a hub that is killed in the middle: neither loss nor duplicate nor gap."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosswire.client.native.dial import Backoff
from crosswire.client.native.relink import Receiver, RelinkClient

MESSAGES = 3000


class Hub:
    """`crosswire serve` as a process of its own, always on the same port and directory."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.port = 0

    async def start(self) -> None:
        others = (
            *("emp", "epoxy", "micromsg2", "http"),
            *(f"emqp-{name}" for name in ("clients", "workers", "admin", "publishers")),
            "emqp-subscribers",
        )
        listen = [f"relink=127.0.0.1:{self.port}", *(f"{name}=off" for name in others)]
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "crosswire.cli.main", "serve", "--json"),
            *("--data", str(self.data)),
            *(word for each in listen for word in ("--listen", each)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert self.process.stdout is not None
        ready = json.loads(await self.process.stdout.readline())
        self.port = int(ready["listen"]["relink"].rpartition(":")[2])

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await self.process.wait()

    def client(self, endpoint: str, **options: Any) -> RelinkClient:
        # One that is done may close while the hub is dead: it must have the time to come back.
        options = {"backoff": Backoff(first_s=0.02, most_s=0.2), "close_timeout_s": 60.0} | options
        return RelinkClient("127.0.0.1", self.port, endpoint, **options)


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[Hub]:
    hub = Hub(tmp_path / "data")
    await hub.start()
    try:
        yield hub
    finally:
        if hub.process.returncode is None:
            await hub.kill()


async def produce(client: RelinkClient, *, transactions: bool) -> None:
    """Numbers, one a message; in transactions three of four are rolled back and sent again."""
    sender = client.sender(0)
    if not transactions:
        for number in range(MESSAGES):
            await sender.send(b"%d" % number)
        await sender.consumed(timeout_s=60)
        return
    for first in range(0, MESSAGES, 10):
        if first % 40:
            try:
                async with sender.transaction() as transaction:
                    await transaction.send(b"never")
                    raise InterruptedError
            except InterruptedError:
                pass
        async with sender.transaction() as transaction:
            for number in range(first, first + 10):
                await transaction.send(b"%d" % number)


class Consumer:
    """Records what was received, and signals when it was a third of all messages."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self.in_the_middle = asyncio.Event()

    async def consume(self, client: RelinkClient) -> None:
        async for message in client.receiver(0):
            self.found.append(int(bytes(message.parts[0])))
            message.consume()
            if len(self.found) == MESSAGES // 3:
                self.in_the_middle.set()
            if len(self.found) == MESSAGES:
                break


@dataclass
class Pair:
    """A producer and a consumer, and what the consumer must have got in the end."""

    to: str
    of: str
    transactions: bool = False
    witness: Consumer = field(default_factory=Consumer)

    async def run(self, hub: Hub) -> None:
        consumer = hub.client(self.of, listener_transactions=self.transactions)
        producer = hub.client(self.to, connector_transactions=self.transactions)
        async with consumer, producer, asyncio.TaskGroup() as group:
            group.create_task(self.witness.consume(consumer))
            group.create_task(produce(producer, transactions=self.transactions))


async def test_a_killed_hub_goes_on(tmp_path: Path) -> None:
    pairs = [
        Pair("queue/slow", "queue/slow?consume", transactions=True),
        Pair("queue/q", "queue/q?consume"),
        Pair("topic/t", "topic/t?subscribe"),
        Pair("topic/u/v", "topic/u/+?subscribe&name=n"),
    ]
    async with running(tmp_path) as hub:
        async with asyncio.timeout(90), asyncio.TaskGroup() as group:
            for pair in pairs:
                group.create_task(pair.run(hub))
                await pair.witness.in_the_middle.wait()
                await hub.kill()
                await hub.start()
        assert await hub.stop() == 0
    assert [pair.witness.found for pair in pairs] == [list(range(MESSAGES))] * len(pairs)


async def test_calls_go_on_over_a_killed_hub(tmp_path: Path) -> None:
    """Each is answered once, by the provider or with an error, on its channel."""
    async with (
        running(tmp_path) as hub,
        asyncio.timeout(90),
        hub.client("service/s?serve") as provider,
        hub.client("service/s") as caller,
        asyncio.TaskGroup() as group,
    ):

        async def serve(receiver: Receiver) -> None:
            async for message in receiver:
                await provider.sender(receiver.channel).send(message.parts[0])
                message.consume()

        async def listen() -> None:
            async for receiver in provider.opened():
                tasks.append(group.create_task(serve(receiver)))

        tasks = [group.create_task(listen())]
        for number in range(200):
            if number in (50, 150):
                await hub.kill()
                group.create_task(hub.start())
            await caller.sender(number % 3).send(b"%d" % number)
            answer = await anext(caller.receiver(number % 3))
            answer.consume()
            assert bytes(answer.parts[0]) == b"%d" % number or b'"error"' in answer.parts[0]
        for task in tasks:
            task.cancel()
