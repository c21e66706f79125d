"""The client: the same verbs, types and errors in all five protocols."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Self

from crosswire.client.adapters.contract import (
    Adapter,
    EncodedMessage,
    Feed,
    ScheduleRequest,
    SubscriptionRequest,
    encode,
    retried,
)
from crosswire.client.message import Message, OutgoingMessage, outgoing
from crosswire.client.native.dial import within
from crosswire.envelope import Property, parse_destination, parse_pattern
from crosswire.errors import (
    ConnectionLost,
    CrosswireError,
    InvalidDestination,
    ProviderFailed,
)
from crosswire.filter_text import wire_filter

__all__ = ["CallHandler", "Client", "ClientSubscription", "ProvidedService"]

CallHandler = Callable[[Message], Awaitable[Any]]
"""Answers a call with a body, or with an OutgoingMessage. Raise ProviderFailed(code, description)
to answer with a failure."""

_AT_ONCE: Final = 1000
"""Messages of one `publish_many` that wait for their acknowledgements at a time."""

_log = logging.getLogger("crosswire.client")


class Client:
    """A connection to a hub that is kept; made by `crosswire.connect`.

    What it was asked for while there is no connection waits for the next one, within its timeout. A
    request whose connection ended before its answer came raises ConnectionLost: nobody knows
    whether it was carried out, and it is not repeated. Subscriptions and services go on.

    The errors are the same in all protocols. HubError is what the hub answered: Forbidden,
    DestinationFull (refused: no room), SubscriptionConflict, BadRequest, NoProvider, ProviderLost,
    ProviderFailed. ClientError is our side: ConnectFailed, ConnectionLost, RequestTimeout (no
    answer in time: it may have been carried out), Unsupported (the protocol has no word for it).
    """

    def __init__(self, adapter: Adapter, *, timeout_s: float) -> None:
        self._adapter = adapter
        self._timeout_s = timeout_s
        self._feeds: dict[ClientSubscription | ProvidedService, None] = {}
        self._closed = False

    async def __aenter__(self) -> Self:
        await self._adapter.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def protocol(self) -> str:
        """The protocol's name."""
        return self._adapter.target.url.protocol

    @property
    def knows_ids(self) -> bool:
        """Whether the protocol carries ids of messages: EMP and Epoxy do."""
        return self._adapter.knows_ids

    async def close(self) -> None:
        """End all subscriptions and services, settle what is done, and disconnect."""
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*(each.close() for each in list(self._feeds)))
        await self._adapter.close()

    # Produce.

    async def publish(
        self,
        destination: str,
        body: Any,
        *,
        properties: Mapping[str, Property] | None = None,
        content_type: str = "",
        timeout_s: float | None = None,
    ) -> int | None:
        """Send a message to `queue/NAME` or publish it to `topic/NAME`; returns when it is durable.

        `body` is bytes, text, or anything that JSON can express. Gives the message's id in EMP and
        Epoxy, None in protocols that don't carry it. eMQP has no acknowledgement of what is
        published to a topic: there the hub has read it.
        """
        if content_type:
            body = OutgoingMessage(body=body, content_type=content_type)
        (identifier,) = await self.publish_many(
            destination, [body], properties=properties, timeout_s=timeout_s
        )
        return identifier

    async def publish_many(
        self,
        destination: str,
        bodies: Iterable[Any],
        *,
        properties: Mapping[str, Property] | None = None,
        timeout_s: float | None = None,
    ) -> list[int | None]:
        """Send many messages in order; gives their ids, as `publish` does.

        Items are bodies or OutgoingMessages; `properties` are for all of them. When it raises, some
        may have been sent.
        """
        if parse_destination(destination).kind == "service":
            raise InvalidDestination(f"{destination} is a service: use call")
        messages = [encode(outgoing(body, properties)) for body in bodies]
        ids: list[int | None] = []
        for start in range(0, len(messages), _AT_ONCE):
            run = messages[start : start + _AT_ONCE]
            ids += await self._adapter.publish(destination, run, self._patience(timeout_s))
        return ids

    # Call.

    async def call(
        self,
        service: str,
        body: Any = None,
        *,
        properties: Mapping[str, Property] | None = None,
        content_type: str = "",
        timeout_s: float | None = None,
    ) -> Message:
        """Call `service/NAME[/METHOD]`; gives its answer, whose value is in `body`.

        Without a body an empty JSON object is sent. Raises NoProvider, ProviderLost,
        ProviderFailed, RequestTimeout or Forbidden. In eMQP a request that nobody provides waits in
        the queue of that name, so that it ends with RequestTimeout.
        """
        if parse_destination(service).kind != "service":
            raise InvalidDestination(f"{service} is no service: use publish")
        message = outgoing({} if body is None else body, properties)
        if content_type:
            message = OutgoingMessage(
                body=message.body, properties=message.properties, content_type=content_type
            )
        return await self._adapter.call(service, encode(message), self._patience(timeout_s))

    async def serve(self, service: str, handler: CallHandler) -> ProvidedService:
        """Answer the calls of `service/NAME`, with every METHOD; returns when the hub has it.

        The handler's Message has the METHOD in its `destination`, except in Relink. Up to 16 to 256
        calls run at a time, as the protocol allows; in EMP one after the other.
        """
        if parse_destination(service).kind != "service":
            raise InvalidDestination(f"{service} is no service")
        served = ProvidedService(self, service, handler)
        await self._add(served, served.start)
        return served

    # Consume.

    def subscribe(
        self,
        destination: str,
        *,
        name: str = "",
        filter: str = "",  # noqa: A002  what everybody calls it
        start: str | int | datetime = "",
        window: int = 32,
    ) -> ClientSubscription:
        """The messages of `queue/NAME` or `topic/NAME`, where `+` and `#` are wildcards.

        Iterate over it, or enter it with `async with` to be subscribed before the first message is
        awaited. A topic's subscription with a `name` is durable and shared by all who use the name;
        a new one starts at `start`: "earliest", "latest", an id or a time. `filter` selects by
        properties: "price > 10; name & acme". At most `window` messages are unsettled at a time.
        """
        if parse_pattern(destination).kind == "service":
            raise InvalidDestination(f"{destination} is a service: use serve")
        if destination.startswith("queue/") and (name or start):
            raise InvalidDestination("only subscriptions to topics have names and starts")
        if not 1 <= window <= 65_535:
            raise ValueError(f"a window is 1 to 65535, not {window}")
        if isinstance(start, datetime):
            start = start.astimezone(UTC).isoformat()
        request = SubscriptionRequest(
            destination=destination,
            filter=wire_filter(filter),
            name=name,
            start=str(start),
            window=window,
        )
        return ClientSubscription(self, request)

    # Schedules.

    async def schedule(
        self,
        destination: str,
        body: Any,
        *,
        interval_s: float | None = None,
        cron: str | None = None,
        nohaste: bool = False,
        run_count: int | None = None,
        properties: Mapping[str, Property] | None = None,
    ) -> str:
        """Have a message sent to a queue every `interval_s`, or by the expression `cron`.

        An interval begins with a message at once, unless `nohaste`. Gives what `unschedule` takes.
        Raises Unsupported in Relink, Epoxy and MicroMsg2.
        """
        if (interval_s is None) == (cron is None):
            raise ValueError("a schedule has either an interval or a cron")
        if parse_destination(destination).kind != "queue":
            raise InvalidDestination(f"{destination}: schedules send to queues")
        request = ScheduleRequest(
            destination=destination,
            interval_s=interval_s,
            cron=cron,
            nohaste=nohaste,
            run_count=run_count,
        )
        return await self._adapter.schedule(request, encode(outgoing(body, properties)))

    async def unschedule(self, schedule: str) -> None:
        """End a schedule. Raises BadRequest for one that does not exist, where that is known."""
        await self._adapter.unschedule(schedule)

    # Called by subscriptions and services.

    async def _add(
        self, feed: ClientSubscription | ProvidedService, start: Callable[[], Awaitable[None]]
    ) -> None:
        """Start a feed. While no hub is reached it is tried again, like everything else."""
        if self._closed:
            raise ConnectionLost("the client is closed")
        if self._adapter.has_connected:
            await retried(start, self._adapter.target.backoff(), self._timeout_s)
        else:
            await start()
            self._adapter.has_connected = True
        self._feeds[feed] = None

    def _patience(self, timeout_s: float | None) -> float:
        if self._closed:
            raise ConnectionLost("the client is closed")
        return self._timeout_s if timeout_s is None else timeout_s


class ClientSubscription:
    """Messages as they arrive; made by `Client.subscribe`.

        async with hub.subscribe("queue/orders") as orders:
            async for message in orders:
                await message.settle()

    It outlives its connection. What was not settled then is marked (`Message.lost`) and delivered
    again; settling it late raises DeliveryLost. A topic's subscriber without a name gets each
    message at most once, and has nothing to settle. The iteration raises when the hub refuses to go
    on, and ends when the subscription or the client is closed.
    """

    def __init__(self, client: Client, request: SubscriptionRequest) -> None:
        self._client = client
        self._request = request
        self._feed: Feed | None = None
        self._waiting: deque[Message] = deque()
        self._unsettled: dict[Message, int] = {}
        """What the program has and has not settled, with the number of each in order."""
        self._count = 0
        self._last_done = 0
        self._changed = asyncio.Event()
        self._is_over = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._starting = asyncio.Lock()
        self._error: CrosswireError | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<ClientSubscription {self._request.destination} by {self._client.protocol}>"

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[Message]:
        # Entered or received from before, it is the program that closes it. Else leaving the loop
        # does: a forgotten subscription would keep a window of messages from other consumers.
        is_ours = self._feed is None
        try:
            while True:
                try:
                    message = await self.receive()
                except _IterationEnded:
                    return
                yield message
        finally:
            if is_ours:
                await self.close()

    async def receive(self, timeout_s: float | None = None) -> Message:
        """The next message. Raises RequestTimeout, or ConnectionLost when it is closed."""
        await self._start()
        return await within(timeout_s, "no message", self._next())

    async def close(self) -> None:
        """Unsubscribe. What is settled stays settled; what is not goes to other consumers."""
        if self._closed:
            # A loop that was left closes it in a task of its own: the client's end waits for that.
            await self._is_over.wait()
            return
        self._closed = True
        self._changed.set()
        self._room.set()
        try:
            if self._feed is not None:
                if self._client._adapter.settles_in_order and not self._request.at_most_once:
                    await self._let_pass()
                await self._feed.close()
        finally:
            self._client._feeds.pop(self, None)
            self._is_over.set()

    async def _let_pass(self) -> None:
        """Refuse what the program holds before messages that it has settled.

        The protocol settles in order: without this, work that is done would be done again.
        """
        held = [each for each, number in self._unsettled.items() if number < self._last_done]
        for message in held:
            if not message.lost:
                try:
                    await message.refuse("the consumer left before it was done")
                except CrosswireError as error:
                    _log.info("closing: %s", error)

    async def _start(self) -> None:
        if self._feed is not None or self._closed:
            return
        async with self._starting:
            if self._feed is None:
                await self._client._add(self, self._open)

    async def _open(self) -> None:
        self._feed = await self._client._adapter.subscribe(self._request, self)

    async def _next(self) -> Message:
        while True:
            message = self._pop()
            if message is not None:
                self._room.set()
                return message
            if self._closed:
                raise _IterationEnded("the subscription is closed")
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()

    def _pop(self) -> Message | None:
        """The next message, if the window has room for one more."""
        if self._closed:
            return None
        if self._request.at_most_once:
            return self._waiting.popleft() if self._waiting else None
        while self._waiting and len(self._unsettled) < self._request.window:
            message = self._waiting.popleft()
            if message.lost:
                continue  # it is delivered again, on the new connection
            self._count += 1
            self._unsettled[message] = self._count
            message._on_done = self._done
            return message
        return None

    def _done(self, message: Message) -> None:
        self._last_done = max(self._last_done, self._unsettled.pop(message, 0))
        self._changed.set()

    # Called by the feed.

    def take(self, message: Message) -> None:
        """Called by the protocol's adapter with a message that has arrived."""
        if self._request.at_most_once and not message.settled:
            # Settled as it arrives, so that the hub goes on: nothing is delivered twice anyway.
            message._settle_soon()
        self._waiting.append(message)
        if len(self._waiting) >= self._request.window:
            self._room.clear()
        self._changed.set()

    @property
    def has_room(self) -> bool:
        """For the protocol's adapter: whether fewer messages than the window wait."""
        return self._room.is_set()

    async def room(self) -> None:
        """Called by the protocol's adapter: wait until fewer messages than the window wait."""
        await self._room.wait()

    def reset(self) -> None:
        """Called by the protocol's adapter when a connection has ended."""
        for message in [each for each in self._unsettled if each.lost]:
            del self._unsettled[message]
        self._waiting = deque(each for each in self._waiting if not each.lost)
        if len(self._waiting) < self._request.window:
            self._room.set()
        self._changed.set()

    def fail(self, error: CrosswireError) -> None:
        """Called by the protocol's adapter when no message will come any more."""
        self._error = error
        self._changed.set()


class ProvidedService:
    """A service that is provided; made by `Client.serve`.

    It outlives its connection. `ended` is done when it is closed; it has the error if the hub
    refuses to go on.
    """

    def __init__(self, client: Client, name: str, handler: CallHandler) -> None:
        self.name = name
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client = client
        self._handler = handler
        self._feed: Feed | None = None
        self._running: set[asyncio.Future[Any]] = set()

    def __repr__(self) -> str:
        return f"<ProvidedService {self.name} by {self._client.protocol}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Called by the client: register with the hub."""
        self._feed = await self._client._adapter.serve(self.name, self._answer, self._fail)

    async def close(self, grace_s: float = 5.0) -> None:
        """Serve no more. Calls that are not answered within `grace_s` fail with ProviderLost."""
        self._client._feeds.pop(self, None)
        feed, self._feed = self._feed, None
        if feed is None:
            return
        if self._running:
            await asyncio.wait(self._running, timeout=grace_s)
        for handling in self._running:
            handling.cancel()
        await feed.close()
        if not self.ended.done():
            self.ended.set_result(None)

    def _fail(self, error: CrosswireError) -> None:
        _log.warning("%r ended: %s", self, error)
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # asyncio warns of an exception that nobody has fetched

    async def _answer(self, call: Message) -> EncodedMessage:
        handling = asyncio.ensure_future(self._handler(call))
        self._running.add(handling)
        handling.add_done_callback(self._running.discard)
        try:
            return encode(outgoing(await handling))
        except ProviderFailed:
            raise
        except asyncio.CancelledError:
            if self._feed is not None:
                raise  # not by `close`
            raise ProviderFailed("provider_lost", "the provider has left") from None
        except Exception:
            # The caller gets no details: they belong to this program's log.
            _log.exception("the handler of %s failed", call.destination)
            raise ProviderFailed("internal", "the service failed") from None


class _IterationEnded(ConnectionLost):
    """The subscription was closed: the iteration ends."""
