"""What the client needs of a protocol: publish, call, schedule, and feeds of messages and calls.

Requests share one connection. Each subscription and each service has one of its own: EMP answers in
the order of requests, and MicroMsg2 acknowledges in the order of messages, so that one message that
takes long would hold up everything else on a shared connection.
"""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import ClassVar, Protocol, TypeVar

import msgspec

from crosswire.client.address import HubUrl
from crosswire.client.message import BYTES, JSON, Message, OutgoingMessage
from crosswire.client.native.dial import Backoff, within
from crosswire.client.refusals import refusal_of
from crosswire.envelope import Property
from crosswire.errors import (
    ConnectFailed,
    CrosswireError,
    HandshakeFailed,
    RequestFailed,
    RequestTimeout,
    Unsupported,
)
from crosswire.wire.registry import protocol

__all__ = [
    "Adapter",
    "Answerer",
    "EncodedMessage",
    "Feed",
    "FeedOwner",
    "HubTarget",
    "ScheduleRequest",
    "SubscriptionRequest",
    "encode",
    "from_typed",
    "recognized",
    "report_end",
    "retried",
    "typed",
]


T = TypeVar("T")


class HubTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A hub's address, our credentials, and how patient we are."""

    url: HubUrl
    tls: ssl.SSLContext | None = None
    token: str | None = None
    bond: tuple[str, ...] = ()
    curve_server: str | None = None
    curve_secret: str | None = None
    connect_timeout_s: float = 10.0
    backoff: Callable[[], Backoff] = Backoff


class EncodedMessage(msgspec.Struct, frozen=True):
    """A message whose body is encoded."""

    payload: bytes
    content_type: str = BYTES
    properties: dict[str, Property] = {}


class SubscriptionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A subscription; empty options are the hub's defaults."""

    destination: str
    filter: str = ""
    name: str = ""
    start: str = ""
    window: int = 32

    @property
    def at_most_once(self) -> bool:
        """Whether there is nothing to settle: a subscriber of a topic without a name."""
        return self.destination.startswith("topic/") and not self.name


class ScheduleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """When a message is to be sent to a queue."""

    destination: str
    interval_s: float | None = None
    cron: str | None = None
    nohaste: bool = False
    run_count: int | None = None


Answerer = Callable[[Message], Awaitable[EncodedMessage]]
"""Answers a call. Raises ProviderFailed, and nothing else, to answer with a failure."""


class FeedOwner(Protocol):
    """The subscription that a feed is for."""

    def take(self, message: Message) -> None:
        """A message has arrived."""

    @property
    def has_room(self) -> bool:
        """Whether fewer messages than the window wait for the program."""

    async def room(self) -> None:
        """Wait until fewer messages than the window wait for the program; for protocols whose
        hub doesn't know the window."""

    def reset(self) -> None:
        """A connection has ended, and with it what was not settled."""

    def fail(self, error: CrosswireError) -> None:
        """No message will come any more."""


class Feed(ABC):
    """A subscription or a service on a connection that is kept."""

    @abstractmethod
    async def close(self) -> None:
        """End it; all that was settled before this is settled."""


class Adapter(ABC):
    """One protocol. Every method raises HubError and ClientError as `Client` documents."""

    settles_in_order: ClassVar[bool] = True
    """Whether a settlement waits for those of the messages before it."""
    knows_ids: ClassVar[bool] = False
    """Whether `publish` gives ids, and messages have them."""

    def __init__(self, target: HubTarget) -> None:
        self.target = target
        self.has_connected = True
        """Whether the hub was reached: until then a failure to connect is not retried."""

    @abstractmethod
    async def open(self) -> None:
        """Connect. Raises ConnectFailed; later connections are retried."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection of requests."""

    @abstractmethod
    async def publish(
        self, destination: str, messages: Sequence[EncodedMessage], timeout_s: float
    ) -> list[int | None]:
        """Send in order; returns when all are acknowledged."""

    @abstractmethod
    async def call(self, service: str, message: EncodedMessage, timeout_s: float) -> Message:
        """The answer of a service."""

    @abstractmethod
    async def subscribe(self, request: SubscriptionRequest, owner: FeedOwner) -> Feed:
        """Subscribe; returns when the hub has it."""

    @abstractmethod
    async def serve(
        self, service: str, answer: Answerer, fail: Callable[[CrosswireError], None]
    ) -> Feed:
        """Answer calls; returns when the hub has it. `fail` is called when it serves no more."""

    async def schedule(self, request: ScheduleRequest, message: EncodedMessage) -> str:
        """Have a message sent again and again; gives what `unschedule` takes."""
        del request, message
        raise self._no_schedules()

    async def unschedule(self, schedule: str) -> None:
        """End a schedule."""
        del schedule
        raise self._no_schedules()

    def _no_schedules(self) -> Unsupported:
        title = protocol(self.target.url.protocol).title
        return Unsupported(f"{title} has no schedules: use EMP, eMQP or the HTTP API")


def encode(message: OutgoingMessage) -> EncodedMessage:
    """The message as it is sent. Raises TypeError for a body that JSON can't express."""
    payload, content_type = message.encoded()
    return EncodedMessage(payload, content_type, dict(message.properties))


def typed(message: EncodedMessage) -> dict[str, Property]:
    """Properties with the content type, for protocols that have no field for it."""
    if message.content_type == BYTES:
        return message.properties
    return {"content-type": message.content_type, **message.properties}


def from_typed(
    properties: Mapping[str, Property], content_type: str = "", *, of_call: bool = False
) -> tuple[dict[str, Property], str]:
    """Properties of the program, and the content type: the property, or what its protocol gives.

    A Relink producer has its content type among the properties, and consumers of all protocols are
    given them. Of a call, what ties it to its answer is not the program's.
    """
    own = dict(properties)
    content_type = str(own.pop("content-type", content_type))
    if of_call:
        for name in ("correlation-id", "reply-to"):
            own.pop(name, None)
    return own, content_type


def recognized(payload: bytes) -> str:
    """The content type where none is carried: JSON objects and arrays, as the hub does."""
    if payload[:1] in (b"{", b"["):
        with suppress(msgspec.DecodeError, RecursionError):
            msgspec.json.decode(payload, type=msgspec.Raw)
            return JSON
    return BYTES


async def retried(open_once: Callable[[], Awaitable[T]], backoff: Backoff, timeout_s: float) -> T:
    """The result of the first attempt that reaches a hub.

    Raises the last ConnectFailed after `timeout_s`, and any other error at once.
    """
    failures: list[ConnectFailed] = []

    async def attempt() -> T:
        while True:
            try:
                return await open_once()
            except HandshakeFailed:
                raise
            except ConnectFailed as error:
                failures.append(error)
            await asyncio.sleep(backoff.next_s())

    try:
        return await within(timeout_s, "no connection", attempt())
    except RequestTimeout:
        if failures:
            raise failures[-1] from None
        raise


def report_end(ended: asyncio.Future[None], fail: Callable[[CrosswireError], None]) -> None:
    """Call `fail` with the reason when a native client reconnects no more."""

    def report(done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            return
        cause = error.__cause__
        if isinstance(cause, RequestFailed):
            fail(refusal_of(cause))
        elif isinstance(error, CrosswireError):
            fail(error)

    ended.add_done_callback(report)
