"""Programs in all five protocols that send, settle and count while a hub is treated badly."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from contextlib import suppress
from random import Random
from typing import Final

from crosswire.client.client import Client
from crosswire.client.connect import connect
from crosswire.client.native.dial import Backoff
from crosswire.errors import CrosswireError
from crosswire.testing.simulation.clients import PROTOCOLS, decode_message, encode_message
from crosswire.testing.simulation.durable import MessageKey
from tests.campaigns.hub import HubProcess

__all__ = ["Load"]

_CERTAIN_S: Final = 5.0
"""A settlement holds after this time, if nothing happens meanwhile, also on a busy machine."""
_AGAIN_S: Final = 0.05
_DRAIN_S: Final = 90.0


class Load:
    """A producer and a consumer of each protocol, each pair with a queue of its own."""

    def __init__(self, hub: HubProcess, seed: int, *, pause_s: float = 0.005) -> None:
        self._hub = hub
        self._random = Random(seed)
        self._pause_s = pause_s
        self.attempted = 0
        self.wrong = 0
        self.returned = 0
        self.delivered = 0
        self.refused = 0
        self.acknowledged: set[MessageKey] = set()
        self.latencies_s: list[float] = []
        """How long acknowledgements of single messages took."""
        self._seen: set[MessageKey] = set()
        self._sent: set[MessageKey] = set()
        self._settled: dict[MessageKey, float] = {}
        self._disturbances: list[float] = []
        self._is_sending = True
        self._last_success = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin."""
        for protocol in PROTOCOLS:
            self._tasks.append(asyncio.ensure_future(self._consume(protocol)))
            self._tasks.append(asyncio.ensure_future(self._produce(protocol)))

    def disturbed(self) -> None:
        """Something was done to the hub now."""
        self._disturbances.append(time.monotonic())

    async def success_after(self, moment: float, timeout_s: float = 60.0) -> float:
        """Waits for an acknowledgement after a moment; how long that took from then. Raises
        TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while self._last_success <= moment:
                await asyncio.sleep(0.005)
        return self._last_success - moment

    async def finish(self, *, drain_s: float = _DRAIN_S) -> int:
        """Send no more, and wait for what was acknowledged; gives how many never came."""
        self._is_sending = False
        ends = time.monotonic() + drain_s
        while self.acknowledged - self._seen and time.monotonic() < ends:
            await asyncio.sleep(0.05)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return len(self.acknowledged - self._seen)

    def _client(self, protocol: str) -> Client:
        return connect(self._hub.url(protocol), timeout_s=10.0, backoff=lambda: Backoff(0.02, 0.2))

    async def _produce(self, protocol: str) -> None:
        destination, number, random = f"queue/{protocol}", 0, self._random
        while self._is_sending:
            try:
                async with self._client(protocol) as client:
                    while self._is_sending:
                        count = 1 if random.random() < 0.8 else random.randint(2, 20)
                        keys = [
                            MessageKey(destination, protocol, number + index)
                            for index in range(1, count + 1)
                        ]
                        number += count
                        self.attempted += count
                        self._sent.update(keys)
                        began = time.monotonic()
                        payloads = [encode_message(key, random.randint(0, 300)) for key in keys]
                        await client.publish_many(destination, payloads)
                        self.acknowledged.update(keys)
                        self._last_success = time.monotonic()
                        if count == 1:
                            self.latencies_s.append(self._last_success - began)
                        await asyncio.sleep(random.expovariate(1 / self._pause_s))
            except CrosswireError:
                self.refused += 1
                await asyncio.sleep(_AGAIN_S)

    async def _consume(self, protocol: str) -> None:
        while True:
            try:
                async with (
                    self._client(protocol) as client,
                    client.subscribe(f"queue/{protocol}", window=64) as subscription,
                ):
                    async for message in subscription:
                        self._take(message.payload)
                        with suppress(CrosswireError):
                            await message.settle()
            except CrosswireError:
                await asyncio.sleep(_AGAIN_S)

    def _take(self, payload: bytes) -> None:
        now = time.monotonic()
        self.delivered += 1
        try:
            key = decode_message(payload)
        except (ValueError, TypeError):
            self.wrong += 1
            return
        if key not in self._sent:
            self.wrong += 1
            return
        self._seen.add(key)
        settled_at = self._settled.get(key)
        if settled_at is not None and not self._was_disturbed(settled_at):
            self.returned += 1
        self._settled[key] = now

    def _was_disturbed(self, moment: float) -> bool:
        """Whether a settlement of that moment may not have held."""
        first = bisect_left(self._disturbances, moment - _CERTAIN_S)
        times = self._disturbances[first : first + 1]
        return bool(times) and times[0] <= moment + _CERTAIN_S
