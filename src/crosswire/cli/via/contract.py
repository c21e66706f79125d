"""What every adapter offers: publish, subscribe, call, serve, in the words of the hub.

Destinations are the hub's own in all protocols: `queue/NAME`, `topic/NAME`,
`service/NAME[/METHOD]`.
"""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any, Final, TypeVar

import msgspec

from crosswire.envelope import Property
from crosswire.listeners import LISTENERS

__all__ = [
    "BYTES",
    "JSON",
    "VIAS",
    "Answerer",
    "HubTarget",
    "IncomingMessage",
    "OutgoingMessage",
    "SameHandler",
    "SubscriptionRequest",
    "Via",
    "inside",
    "kept",
    "runs",
    "via",
    "with_type",
]

VIAS: Final = {
    "emp": "EmpVia",
    "emqp": "EmqpVia",
    "relink": "RelinkVia",
    "epoxy": "EpoxyVia",
    "micromsg2": "MicroMsg2Via",
}
"""Adapters by protocol; each is imported when it is asked for."""

BYTES: Final = "application/octet-stream"
JSON: Final = "application/json"
_AT_ONCE: Final = 256

T = TypeVar("T")


class HubTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where the hub is, and who we are."""

    host: str = "127.0.0.1"
    port: int | None = None
    tls: ssl.SSLContext | None = None
    token: str | None = None
    bond: tuple[str, ...] = ()
    curve_server: str | None = None
    curve_secret: str | None = None


class OutgoingMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent."""

    payload: bytes
    content_type: str = BYTES
    properties: dict[str, Property] = {}


class SubscriptionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is subscribed to."""

    destination: str
    filter: str = ""
    name: str = ""
    start: str = ""
    window: int = 16


class IncomingMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A received message; `settle` acknowledges it to the hub."""

    destination: str
    payload: bytes
    content_type: str = ""
    properties: dict[str, Property] = {}
    id: int = 0
    attempt: int = 0
    settle: Callable[[], Awaitable[None]] | None = None


Answerer = Callable[[IncomingMessage], Awaitable[OutgoingMessage]]


class Via(ABC):
    """A protocol's way to a hub. All raise ClientError."""

    def __init__(self, target: HubTarget) -> None:
        self.target = target

    @abstractmethod
    async def publish(self, destination: str, messages: Sequence[OutgoingMessage]) -> list[int]:
        """Send to a queue or a topic; returns when the hub has them.

        Ids where the protocol returns them.
        """

    @abstractmethod
    def subscribe(self, wanted: SubscriptionRequest) -> AsyncGenerator[IncomingMessage, None]:
        """What comes, until the iterator is closed."""

    @abstractmethod
    async def call(
        self, service: str, message: OutgoingMessage, timeout_s: float
    ) -> IncomingMessage:
        """A service's answer."""

    @abstractmethod
    async def serve(self, service: str, answerer: Answerer, ready: Callable[[], None]) -> None:
        """Answer calls until cancelled; `ready` is called when the hub knows."""

    def port(self, listener: str) -> int:
        if self.target.port is not None:
            return self.target.port
        return LISTENERS[f"{listener}-tls" if self.target.tls is not None else listener]


async def inside(work: Awaitable[T], keeper: asyncio.Task[None]) -> T:
    """The result, unless what it depends on fails first."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, keeper}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            keeper.result()
        return await task
    finally:
        task.cancel()


@asynccontextmanager
async def kept(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """A task beside the block."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


def runs(messages: Sequence[OutgoingMessage]) -> Iterator[Sequence[OutgoingMessage]]:
    for start in range(0, len(messages), _AT_ONCE):
        yield messages[start : start + _AT_ONCE]


def with_type(message: OutgoingMessage) -> dict[str, Property]:
    """Protocols without content types carry them as a property."""
    if message.content_type == BYTES:
        return message.properties
    return {"content-type": message.content_type, **message.properties}


class SameHandler(Mapping[Any, T]):
    """The same handler whatever it is looked up for: every method of a service."""

    def __init__(self, handler: T) -> None:
        self._handler = handler

    def __getitem__(self, _name: Any) -> T:
        return self._handler

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True


def via(protocol: str, target: HubTarget) -> Via:
    """The way to a hub through a protocol."""
    module = import_module(f"crosswire.cli.via.{protocol}")
    kind: type[Via] = getattr(module, VIAS[protocol])
    return kind(target)
