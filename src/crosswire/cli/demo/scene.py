"""What the demo's scenes share: who keeps count, and how they talk to a hub that may go away."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import ClassVar

from crosswire.clients.dial import Backoff
from crosswire.clients.emp import EmpClient, EmpPeer
from crosswire.errors import ClientError

__all__ = ["HOST", "Scene", "keep_asking", "soon"]

HOST = "127.0.0.1"


def soon() -> Backoff:
    """For clients that are to come back quickly."""
    return Backoff(0.05, 0.5)


class Scene(ABC):
    """Traffic of one kind, numbered, with a count of what was acknowledged and what arrived."""

    title: ClassVar[str]
    way: ClassVar[str]
    story: ClassVar[str]

    def __init__(self, ports: dict[str, int]) -> None:
        self.ports = ports
        self.tried = 0
        self.acknowledged: set[int] = set()
        self.arrived: Counter[int] = Counter()
        self.is_busy = True

    @abstractmethod
    async def play(self, curtain: asyncio.Event) -> None:
        """Send until the curtain falls, and take what comes until cancelled."""

    @property
    def lost(self) -> set[int]:
        return self.acknowledged - self.arrived.keys()

    def outcome(self) -> dict[str, int]:
        return {
            "tried": self.tried,
            "acknowledged": len(self.acknowledged),
            "arrived": len(self.arrived),
            "again": sum(count - 1 for count in self.arrived.values()),
            "lost": len(self.lost),
        }

    def aside(self) -> str:
        """What else happened, in a few words."""
        return ""

    async def send(
        self, curtain: asyncio.Event, send_one: Callable[[int], Awaitable[object]], *, burst: int
    ) -> None:
        """Numbered messages in bursts; one that is not acknowledged is not sent again."""
        number = 0
        while not curtain.is_set():
            numbers = range(number, number + burst)
            number += burst
            self.tried += burst
            results = await asyncio.gather(
                *(send_one(each) for each in numbers), return_exceptions=True
            )
            for each, result in zip(numbers, results, strict=True):
                if not isinstance(result, BaseException):
                    self.acknowledged.add(each)
                elif not isinstance(result, ClientError):
                    raise result
            await asyncio.sleep(0.05)
        self.is_busy = False


async def keep_asking(client: EmpClient, ask: Callable[[EmpPeer], Awaitable[object]]) -> None:
    """Ask for the same on every connection anew: a subscription is the connection's."""
    while True:
        peer = await client.peer()
        try:
            await ask(peer)
        except ClientError:
            continue
        await asyncio.wait([peer.ended])
