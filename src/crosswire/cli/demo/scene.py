"""What the demo's scenes share: who keeps count, and how they talk to a hub that may go away."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from crosswire.client.native.dial import Backoff
from crosswire.client.native.emp import EmpClient, EmpPeer
from crosswire.errors import ClientError

__all__ = ["HOST", "Scene", "keep_asking", "soon"]

HOST = "127.0.0.1"
_PAUSE_S = 0.05


def soon() -> Backoff:
    """For clients that are to come back quickly."""
    return Backoff(0.05, 0.5)


class Scene(ABC):
    """Traffic of one kind, numbered, with a count of what was acknowledged and what arrived."""

    title: ClassVar[str]
    way: ClassVar[str]
    story: ClassVar[str]
    queue: ClassVar[str] = ""
    """Whose dead letters are of this scene."""

    def __init__(self, ports: dict[str, int]) -> None:
        self.ports = ports
        self.tried = 0
        self.under_way = 0
        self.acknowledged: set[int] = set()
        self.arrived: Counter[int] = Counter()
        self.dead: dict[int, int] = {}
        """Dead letters: the number, and the id of the message that it was."""
        self.is_busy = True

    @abstractmethod
    async def play(self, curtain: asyncio.Event) -> None:
        """Send until the curtain falls, and take what comes until cancelled."""

    def find_dead_letters(self, dead_letters: list[dict[str, Any]]) -> None:
        """What the hub keeps since nobody could take it: not lost either."""
        for dead_letter in dead_letters:
            self.dead[self.number_in(dead_letter["message"]["json"])] = dead_letter["origin_id"]

    def number_in(self, body: Any) -> int:
        """The number of the message with this body, of a scene that has a queue."""
        raise LookupError(f"{self.title} has no queue, and no dead letters: {body!r}")

    @property
    def lost(self) -> set[int]:
        return self.acknowledged - self.arrived.keys() - self.dead.keys()

    def outcome(self) -> dict[str, int]:
        return {
            "tried": self.tried,
            "acknowledged": len(self.acknowledged),
            "arrived": len(self.arrived),
            "dead": len(self.dead),
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
        while not curtain.is_set():
            numbers = range(self.tried, self.tried + burst)
            self.tried += burst
            await asyncio.gather(*(self._send(send_one, number) for number in numbers))
            await asyncio.sleep(_PAUSE_S)
        self.is_busy = False

    async def _send(self, send_one: Callable[[int], Awaitable[object]], number: int) -> None:
        self.under_way += 1
        try:
            await send_one(number)
        except ClientError:
            return
        finally:
            self.under_way -= 1
        self.acknowledged.add(number)


async def keep_asking(client: EmpClient, ask: Callable[[EmpPeer], Awaitable[object]]) -> None:
    """Ask for the same on every connection anew: a subscription is the connection's."""
    while True:
        peer = await client.peer()
        try:
            await ask(peer)
        except ClientError:
            continue
        await asyncio.wait([peer.ended])
