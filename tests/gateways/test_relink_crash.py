"""Relink over a hub that is killed in the middle: neither loss nor duplicate nor gap."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from crosswire.clients.dial import Backoff
from crosswire.clients.relink import RelinkClient

KILLS = 4
MESSAGES = 4000


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
            *(sys.executable, "-m", "crosswire.cli.main", "serve", "--json", "--log", "info"),
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

    def client(self, endpoint: str, **options: bool) -> RelinkClient:
        backoff = Backoff(first_s=0.02, most_s=0.2)
        return RelinkClient("127.0.0.1", self.port, endpoint, backoff=backoff, **options)


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
    """Remembers what came, and tells when it was half of what there is between two kills."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self.reached = [asyncio.Event() for _ in range(KILLS + 1)]

    async def consume(self, client: RelinkClient) -> None:
        step = MESSAGES // (KILLS + 1)
        async for message in client.receiver(0):
            self.found.append(int(bytes(message.parts[0])))
            message.consume()
            if len(self.found) % step == step // 2:
                self.reached[len(self.found) // step].set()
            if len(self.found) == MESSAGES:
                break


@pytest.mark.parametrize(
    ("to", "of", "transactions"),
    [
        ("queue/q", "queue/q?consume", False),
        ("queue/q", "queue/q?consume", True),
        ("topic/t", "topic/t?subscribe", False),
        ("topic/t", "topic/+?subscribe&name=n", False),
    ],
)
async def test_a_killed_hub_goes_on(tmp_path: Path, to: str, of: str, transactions: bool) -> None:
    async with running(tmp_path) as hub:
        consumer = hub.client(of, listener_transactions=transactions)
        producer = hub.client(to, connector_transactions=transactions)
        async with consumer, producer:
            async with asyncio.timeout(30):
                witness = Consumer()
                async with asyncio.TaskGroup() as group:
                    group.create_task(witness.consume(consumer))
                    group.create_task(produce(producer, transactions=transactions))
                    for reached in witness.reached[:KILLS]:
                        await reached.wait()
                        await hub.kill()
                        await hub.start()
        assert witness.found == list(range(MESSAGES))
        assert await hub.stop() == 0
