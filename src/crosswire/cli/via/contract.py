"""The interface of the commands' protocol adapters: publish, subscribe, call, serve.

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
    "IncomingMessage",
    "SameHandler",
    "Via",
    "ViaMessage",
    "ViaSubscription",
    "ViaTarget",
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
"""Class of the adapter by protocol; its module is imported on first use."""

BYTES: Final = "application/octet-stream"
JSON: Final = "application/json"
_AT_ONCE: Final = 256

T = TypeVar("T")


class ViaTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The hub's address and our credentials. `port` None is the protocol's default port."""

    host: str = "127.0.0.1"
    port: int | None = None
    tls: ssl.SSLContext | None = None
    token: str | None = None
    bond: tuple[str, ...] = ()
    curve_server: str | None = None
    curve_secret: str | None = None


class ViaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message to be sent, or a response."""

    payload: bytes
    content_type: str = BYTES
    properties: dict[str, Property] = {}


class ViaSubscription(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a subscription; empty ones are the hub's defaults."""

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


Answerer = Callable[[IncomingMessage], Awaitable[ViaMessage]]


class Via(ABC):
    """Access to a hub through one protocol. All methods raise ClientError."""

    def __init__(self, target: ViaTarget) -> None:
        self.target = target

    @abstractmethod
    async def publish(self, destination: str, messages: Sequence[ViaMessage]) -> list[int]:
        """Send to a queue or a topic; returns when all are acknowledged.

        The result has an id per message, 0 where the protocol does not return ids.
        """

    @abstractmethod
    def subscribe(self, wanted: ViaSubscription) -> AsyncGenerator[IncomingMessage, None]:
        """Messages as they arrive, until the iterator is closed."""

    @abstractmethod
    async def call(self, service: str, message: ViaMessage, timeout_s: float) -> IncomingMessage:
        """The service's response. Raises RequestFailed if the call fails."""

    @abstractmethod
    async def serve(self, service: str, answerer: Answerer, ready: Callable[[], None]) -> None:
        """Answer calls until cancelled; `ready` is called when the service is registered."""

    def port(self, listener: str) -> int:
        """`--port`, else the default of the listener, or of its TLS twin."""
        if self.target.port is not None:
            return self.target.port
        return LISTENERS[f"{listener}-tls" if self.target.tls is not None else listener]


async def inside(work: Awaitable[T], keeper: asyncio.Task[None]) -> T:
    """The result of `work`. Raises the error of `keeper`, if that ends first."""
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
    """Run `work` as a task for the duration of the block."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


def runs(messages: Sequence[ViaMessage]) -> Iterator[Sequence[ViaMessage]]:
    """Slices of messages that are sent concurrently, so that few wait for acknowledgements."""
    for start in range(0, len(messages), _AT_ONCE):
        yield messages[start : start + _AT_ONCE]


def with_type(message: ViaMessage) -> dict[str, Property]:
    """Properties with the content type, for protocols that have no field for it."""
    if message.content_type == BYTES:
        return message.properties
    return {"content-type": message.content_type, **message.properties}


class SameHandler(Mapping[Any, T]):
    """A mapping that has the same handler for every key: all methods of a service.

    It is true although it has no keys: clients check whether they have handlers.
    """

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


def via(protocol: str, target: ViaTarget) -> Via:
    """The adapter of a protocol for this hub."""
    module = import_module(f"crosswire.cli.via.{protocol}")
    kind: type[Via] = getattr(module, VIAS[protocol])
    return kind(target)
