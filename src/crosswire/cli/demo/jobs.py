"""Jobs in eMQP: guaranteed, retried, and one that comes every second."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import ClassVar

from crosswire.cli.demo.scene import HOST, Scene, soon
from crosswire.clients.emqp import EmqpClient
from crosswire.clients.emqp_worker import Worker
from crosswire.wire.emqp.jobs import serialize_job

__all__ = ["Jobs"]

_BURST = 10
_TOO_LONG_S = 60.0


class Jobs(Scene):
    title: ClassVar[str] = "jobs"
    way: ClassVar[str] = "eMQP → queue → eMQP"
    story: ClassVar[str] = "workers with retries: some jobs take too long at first; a schedule"

    def __init__(self, ports: dict[str, int]) -> None:
        super().__init__(ports)
        self._begun: Counter[int] = Counter()
        self._ticks = 0

    async def play(self, curtain: asyncio.Event) -> None:
        worker = Worker(
            HOST,
            self.ports["emqp-workers"],
            queues=[(10, "thumbnails")],
            slots=16,
            jobs={"demo.shrink": self._shrink, "demo.tick": self._tick},
            backoff=soon(),
        )
        client = EmqpClient(HOST, self.ports["emqp-clients"], backoff=soon())
        async with worker, client:
            tick = serialize_job("demo.tick", ())
            await client.schedule(tick, queue="thumbnails", interval_s=1)
            await self.send(curtain, lambda number: self._ask(client, number), burst=_BURST)
            await asyncio.Event().wait()

    async def _ask(self, client: EmqpClient, number: int) -> None:
        await client.request(
            serialize_job("demo.shrink", (number,)),
            queue="thumbnails",
            guarantee=True,
            retry_count=5,
            timeout_s=1,
            wait_s=10,
        )

    async def _shrink(self, number: int) -> int:
        self._begun[number] += 1
        if number % 97 == 0 and self._begun[number] == 1:
            await asyncio.sleep(_TOO_LONG_S)
        self.arrived[number] += 1
        return number

    async def _tick(self) -> None:
        self._ticks += 1

    def aside(self) -> str:
        late = sum(1 for number in self._begun if number % 97 == 0)
        return f"{late} timeouts retried, {self._ticks} scheduled runs"
