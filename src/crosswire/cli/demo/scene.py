"""The base of the demo's scenes: counts, and clients that reconnect after the hub is killed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from crosswire.client.native.dial import Backoff
from crosswire.client.native.emp import EmpClient, EmpPeer
from crosswire.errors import ClientError

__all__ = ["HOST", "Scene", "quick_backoff", "repeat_on_connect"]

HOST = "127.0.0.1"
_PAUSE_S = 0.05


def quick_backoff() -> Backoff:
    """Short pauses between attempts to connect: the restarted hub is used at once."""
    return Backoff(0.05, 0.5)


class Scene(ABC):
    """Traffic of one kind, numbered, with a count of what was acknowledged and what arrived."""

    title: ClassVar[str]
    """First column of the table of results."""
    route: ClassVar[str]
    """Protocols and destinations of a message, in order."""
    description: ClassVar[str]
    queue: ClassVar[str] = ""
    """Name of the queue whose dead letters belong to this scene."""

    def __init__(self, ports: dict[str, int]) -> None:
        self.ports = ports
        self.tried = 0
        self.under_way = 0
        self.acknowledged: set[int] = set()
        self.arrived: Counter[int] = Counter()
        self.dead: dict[int, int] = {}
        """Dead letters: the number, and the id of the original message."""
        self.is_busy = True

    @abstractmethod
    async def run(self, ending: asyncio.Event) -> None:
        """Send until `ending` is set, and receive until cancelled."""

    def find_dead_letters(self, dead_letters: list[dict[str, Any]]) -> None:
        """Note the dead letters of this scene: they are not lost."""
        for dead_letter in dead_letters:
            self.dead[self.number_in(dead_letter["message"]["json"])] = dead_letter["origin_id"]

    def number_in(self, body: Any) -> int:
        """The number of the message with this body. Raises LookupError without a queue."""
        raise LookupError(f"{self.title} has no queue, and no dead letters: {body!r}")

    @property
    def lost(self) -> set[int]:
        """Numbers that were acknowledged and neither arrived nor are dead letters."""
        return self.acknowledged - self.arrived.keys() - self.dead.keys()

    def outcome(self) -> dict[str, int]:
        """The counts by name; `again` are deliveries after the first of a message."""
        return {
            "tried": self.tried,
            "acknowledged": len(self.acknowledged),
            "arrived": len(self.arrived),
            "dead": len(self.dead),
            "again": sum(count - 1 for count in self.arrived.values()),
            "lost": len(self.lost),
        }

    def remarks(self) -> str:
        """Other counts, for the last column of the table of results."""
        return ""

    async def send(
        self, ending: asyncio.Event, send_one: Callable[[int], Awaitable[object]], *, burst: int
    ) -> None:
        """Send numbered messages in bursts; one that is not acknowledged is not sent again."""
        while not ending.is_set():
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


async def repeat_on_connect(client: EmpClient, ask: Callable[[EmpPeer], Awaitable[object]]) -> None:
    """Send the same request on every new connection: a subscription belongs to its connection."""
    while True:
        peer = await client.peer()
        try:
            await ask(peer)
        except ClientError:
            continue
        await asyncio.wait([peer.ended])
