"""Scene: jobs in eMQP, guaranteed and retried after a timeout, and one scheduled every second."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, ClassVar

from crosswire.cli.demo.scene import HOST, Scene, quick_backoff
from crosswire.client.native.emqp import EmqpClient
from crosswire.client.native.emqp.worker import Worker
from crosswire.plurals import plural
from crosswire.wire.emqp.jobs import serialize_job

__all__ = ["Jobs"]

_BURST = 10
_URGENT = 5
_SLOW = 97
_HOPELESS = 7
_TIMEOUT_S = 1
_TOO_LONG_S = 60.0


class Jobs(Scene):
    """A client and a worker; some jobs exceed their timeout, one of them every time."""

    title: ClassVar[str] = "jobs"
    route: ClassVar[str] = "eMQP → queue → eMQP"
    description: ClassVar[str] = "jobs with timeouts and retries; a schedule"
    queue: ClassVar[str] = "thumbnails"

    def __init__(self, ports: dict[str, int]) -> None:
        super().__init__(ports)
        self._begun: Counter[int] = Counter()
        self._cleanings = 0
        self._timeouts = 0

    async def run(self, ending: asyncio.Event) -> None:
        """Send jobs until `ending`; work until cancelled."""
        worker = Worker(
            HOST,
            self.ports["emqp-workers"],
            queues=[(10, "thumbnails")],
            slots=16,
            jobs={"demo.shrink": self._shrink, "demo.clean": self._clean},
            backoff=quick_backoff(),
        )
        client = EmqpClient(HOST, self.ports["emqp-clients"], backoff=quick_backoff())
        async with worker, client:
            clean = serialize_job("demo.clean", ())
            await client.schedule(clean, queue="thumbnails", interval_s=1)
            await self.send(ending, lambda number: self._ask(client, number), burst=_BURST)
            await client.unschedule(clean, queue="thumbnails")
            await asyncio.Event().wait()

    async def _ask(self, client: EmqpClient, number: int) -> None:
        """Most requests wait until the hub has stored the job, every fifth for its result."""
        await client.request(
            serialize_job("demo.shrink", (number,)),
            queue="thumbnails",
            reply_requested=number % _URGENT == 0,
            guarantee=True,
            retry_count=2,
            timeout_s=_TIMEOUT_S,
            wait_s=10,
        )

    async def _shrink(self, number: int) -> int:
        self._begun[number] += 1
        if number == _HOPELESS or (number % _SLOW == 0 and self._begun[number] == 1):
            self._timeouts += 1
            await asyncio.sleep(_TOO_LONG_S)
        self.arrived[number] += 1
        return number

    async def _clean(self) -> None:
        self._cleanings += 1

    def number_in(self, body: Any) -> int:
        """The job's first argument."""
        return int(body[1]["args"][0])

    def remarks(self) -> str:
        """Timeouts, and runs of the scheduled job."""
        return f"{plural(self._timeouts, 'timeout')}, {self._cleanings:,} scheduled"
