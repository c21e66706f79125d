"""MicroMsg2 for asyncio programs: send, subscribe, call and serve.

async with MicroMsg2Client("127.0.0.1", 7360) as client:
    await client.send("queue/orders", b"...", {"price": 12})
    async with client.subscribe("topic/prices", filter="price>N10") as prices:
        async for delivery in prices:
            print(delivery.payload)
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from typing import Any, Final

from crosswire.client.native.dial import Backoff, StayingClient, dial, within
from crosswire.client.native.remote import RemotePeer
from crosswire.envelope import Property
from crosswire.errors import (
    ConnectionLost,
    CrosswireError,
    LocalProtocolError,
    PeerError,
    RequestFailed,
)
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, Event
from crosswire.wire.micromsg2.connection import MicroMsg2Connection
from crosswire.wire.micromsg2.events import MessageReceived, MessagesAcknowledged, Opened
from crosswire.wire.micromsg2.extensions import (
    ACK,
    BATCH_ACK,
    DOTNET,
    PUB_SUB,
    Offer,
    batch_ack,
    token,
)
from crosswire.wire.micromsg2.frames import Extension, MicroMsg2Limits
from crosswire.wire.micromsg2.values import Value

__all__ = [
    "MicroMsg2Client",
    "MicroMsg2Delivery",
    "MicroMsg2Peer",
    "MicroMsg2Subscription",
    "Responder",
    "client_offer",
]

_log = logging.getLogger("crosswire.client.native.micromsg2")

_REPLY_TO: Final = "reply/calls"
_HELD_MOST = 1000
_HELD_FEW = 500
_OUR_FAULT: Final = frozenset({"malformed", "forbidden", "unknown-destination", "extension"})
"""Errors for which saying the same again would not help."""


def client_offer(
    *, identity: str = "crosswire", window: int | None = 100, auth: str | None = None
) -> Offer:
    """What a client brings unless told otherwise: acknowledgements with a window, pub/sub, and a
    token if it has one. It goes along with `dotnet`, but not with `json`, which binds payloads."""
    acks = (batch_ack(window),) if window else ()
    proof = (token(auth),) if auth is not None else ()
    supported = frozenset({ACK, BATCH_ACK, DOTNET, PUB_SUB} if window else {DOTNET, PUB_SUB})
    return Offer(
        identity=identity,
        optional=(*acks, Extension(PUB_SUB), *proof),
        supported=supported,
    )


class MicroMsg2Delivery:
    """A message that came. `acknowledge` it when it is safe, unless that is done for you."""

    __slots__ = ("_acknowledged", "destination", "payload", "peer", "properties", "sequence")

    def __init__(self, peer: MicroMsg2Peer, message: MessageReceived) -> None:
        self._acknowledged = False
        self.peer = peer
        self.sequence = message.sequence
        self.destination = message.destination
        self.properties: Mapping[str, Value] = message.properties
        self.payload = message.payload

    def acknowledge(self) -> None:
        """Tell the server that this one is done, in whatever order; once is enough.

        When its connection is gone there is nobody to tell, and the message may come again.
        """
        if not self._acknowledged:
            self._acknowledged = True
            self.peer.acknowledge(self.sequence)


Responder = Callable[[MicroMsg2Delivery], Awaitable[bytes | tuple[bytes, Mapping[str, Property]]]]
"""Answers a call. Raise RequestFailed(code, description) to answer with a failure."""


class MicroMsg2Subscription:
    """What comes to a destination, as an asynchronous iterator that outlives its connection.

    Unless `manual`, a delivery is acknowledged when the next one is asked for, or when the block
    is left without an exception.
    """

    def __init__(
        self, client: MicroMsg2Client, destination: str, arguments: dict[str, Any], *, manual: bool
    ) -> None:
        self.destination = destination
        self.arguments = arguments
        self._client = client
        self._manual = manual
        self._pattern = _whole(destination).split("/")
        self._held: deque[MicroMsg2Delivery] = deque()
        self._handed_out: MicroMsg2Delivery | None = None
        self._error: CrosswireError | None = None
        self._closed = False
        self._changed = asyncio.Event()

    async def __aenter__(self) -> MicroMsg2Subscription:
        await self._client.start_subscription(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._acknowledge_last()
        self.close()

    def __aiter__(self) -> MicroMsg2Subscription:
        return self

    async def __anext__(self) -> MicroMsg2Delivery:
        self._acknowledge_last()
        while not self._held:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        delivery = self._held.popleft()
        self._client.relieve()
        if not self._manual:
            self._handed_out = delivery
        return delivery

    def close(self) -> None:
        """Unsubscribe, and end the iteration; what was not acknowledged goes to others."""
        self._client.end_subscription(self)
        # Behind the unsubscribe these acks settle nothing; they only free the window.
        self._acknowledge_last()
        for delivery in self._held:
            delivery.acknowledge()
        self._held.clear()
        self._client.relieve()
        self._closed = True
        self._changed.set()

    def takes(self, destination: str) -> bool:
        """Is it for this one? `+` stands for a level, `#` for all that follow."""
        levels = _whole(destination).split("/")
        for at, part in enumerate(self._pattern):
            if part == "#":
                return True
            if at == len(levels) or part not in ("+", levels[at]):
                return False
        return len(levels) == len(self._pattern)

    def deliver(self, delivery: MicroMsg2Delivery) -> None:
        self._held.append(delivery)
        self._changed.set()

    def fail(self, error: CrosswireError) -> None:
        """What was delivered before is still handed out."""
        self._error = error
        self._changed.set()

    @property
    def held(self) -> int:
        return len(self._held)

    def _acknowledge_last(self) -> None:
        last, self._handed_out = self._handed_out, None
        if last is not None:
            last.acknowledge()


class MicroMsg2Peer(RemotePeer):
    """The server at the far end of one connection."""

    def __init__(
        self,
        route: Callable[[MicroMsg2Delivery], None],
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._route = route
        self._on_event = on_event
        self._to_send: deque[tuple[str, bytes, Mapping[str, Property], asyncio.Future[None]]] = (
            deque()
        )
        self._unsettled: dict[int, asyncio.Future[None]] = {}
        self.agreed: Opened | None = None

    @property
    def connection(self) -> MicroMsg2Connection:
        connection = self.session.connection
        assert isinstance(connection, MicroMsg2Connection)
        return connection

    @property
    def error(self) -> PeerError | None:
        """What the server said when it ended the connection."""
        match self.end:
            case ConnectionFailed(error=PeerError() as error):
                return error
        return None

    def send(
        self, destination: str, payload: bytes, properties: Mapping[str, Property] | None = None
    ) -> asyncio.Future[None]:
        """Send as soon as the window allows. Done when it was acknowledged; where no
        acknowledgements were agreed, when it was written."""
        future: asyncio.Future[None] = self._loop.create_future()
        if self.end is not None:
            future.set_exception(ConnectionLost(f"nothing was sent: {self.why()}"))
            return future
        self._to_send.append((destination, payload, properties or {}, future))
        self._send_waiting()
        return future

    def acknowledge(self, sequence: int) -> None:
        if self.end is None:
            self.connection.acknowledge(sequence)
            self.session.wake()

    # Called by the session.

    def handle_events(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case MessageReceived():
                    self._route(MicroMsg2Delivery(self, event))
                case MessagesAcknowledged(sequences=sequences):
                    for sequence in sequences:
                        _settle(self._unsettled.pop(sequence))
                case Opened():
                    self.agreed = event
                    self.opened.set_result(None)
                case ConnectionClosed() | ConnectionFailed():
                    self.finish(event)
                case _ if self._on_event is not None:
                    self._on_event(event)
        self._send_waiting()

    def handle_drain(self) -> None:
        self._send_waiting()

    def _send_waiting(self) -> None:
        """All that the window and the socket take now."""
        waiting = self._to_send
        if not waiting or self.end is not None:
            return
        connection = self.connection
        while waiting and connection.credit and not self.session.congested:
            destination, payload, properties, future = waiting.popleft()
            if future.done():
                continue  # the caller no longer wants it
            try:
                sequence = connection.send_message(destination, payload, properties)
            except LocalProtocolError as error:
                future.set_exception(error)
                continue
            if connection.agreement.window is None:
                _settle(future)
            else:
                self._unsettled[sequence] = future
        self.session.wake()

    def finish(self, end: ConnectionClosed | ConnectionFailed) -> None:
        self.end = end
        why = self.why()
        for future in self._unsettled.values():
            if not future.done():
                future.set_exception(
                    ConnectionLost(f"{why}; the message may or may not have arrived")
                )
        for _, _, _, future in self._to_send:
            if not future.done():
                future.set_exception(ConnectionLost(f"{why}; the message was not sent"))
        self._unsettled.clear()
        self._to_send.clear()
        super().finish(end)


class MicroMsg2Client(StayingClient[MicroMsg2Peer]):
    """A client that stays connected; subscriptions and services outlive a connection.

    What is sent while there is no connection waits for the next one, within its timeout. `on_event`
    is told the rest: what vendor extensions in the offer say.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        offer: Offer | None = None,
        tls: ssl.SSLContext | None = None,
        limits: MicroMsg2Limits | None = None,
        backoff: Backoff | None = None,
        connect_timeout_s: float = 10.0,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        super().__init__(self._connect, backoff=backoff)
        self._host = host
        self._port = port
        self._offer = offer or client_offer()
        self._tls = tls
        self._limits = limits
        self._connect_timeout_s = connect_timeout_s
        self._on_event = on_event
        self._peer: MicroMsg2Peer | None = None
        self._subscriptions: list[MicroMsg2Subscription] = []
        self._services: dict[str, Responder] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._calls: dict[str, asyncio.Future[MicroMsg2Delivery]] = {}
        self._numbers = count(1)

    async def send(
        self,
        destination: str,
        payload: bytes,
        properties: Mapping[str, Property] | None = None,
        *,
        timeout_s: float | None = 30.0,
    ) -> None:
        """Send, and wait until the server has it safe.

        Raises RequestTimeout, LocalProtocolError for what can't be sent, or ConnectionLost: then
        it may or may not have arrived, and it is not repeated.
        """
        peer = await self._redialler.peer(timeout_s)
        future = peer.send(destination, payload, properties)
        await within(timeout_s, f"no acknowledgement of a message to {destination}", future)

    async def call(
        self,
        destination: str,
        payload: bytes,
        properties: Mapping[str, Property] | None = None,
        *,
        timeout_s: float | None = 30.0,
    ) -> MicroMsg2Delivery:
        """The answer of a service. Raises RequestFailed for one that has an `error`."""
        peer = await self._redialler.peer(timeout_s)
        identifier = str(next(self._numbers))
        answer: asyncio.Future[MicroMsg2Delivery] = asyncio.get_running_loop().create_future()
        self._calls[identifier] = answer
        marked = {**(properties or {}), "reply-to": _REPLY_TO, "correlation-id": identifier}
        try:
            sent = peer.send(destination, payload, marked)
            sent.add_done_callback(lambda done: _pass_on(done, answer))
            delivery = await within(timeout_s, f"no answer from {destination}", answer)
        finally:
            del self._calls[identifier]
        failure = delivery.properties.get("error")
        if failure is not None:
            description = str(delivery.properties.get("description", ""))
            raise RequestFailed(str(failure), description, data=delivery.payload)
        return delivery

    def subscribe(
        self,
        destination: str,
        *,
        filter: str | None = None,  # noqa: A002  it is what everybody calls it
        name: str | None = None,
        start: str | None = None,
        window: int | None = None,
        manual: bool = False,
    ) -> MicroMsg2Subscription:
        """To be entered with `async with`. With `manual` each delivery waits for its own
        `acknowledge()`."""
        arguments = {"filter": filter, "name": name, "start": start, "window": window}
        return MicroMsg2Subscription(self, destination, arguments, manual=manual)

    async def serve(
        self, destination: str, responder: Responder, *, timeout_s: float | None = 30.0
    ) -> None:
        """Answer what is asked of a service, from now on."""
        peer = await self._redialler.peer(timeout_s)
        if destination in self._services:
            raise ValueError(f"{destination} has its responder already")
        peer.connection.send_serve(destination)
        peer.session.wake()
        self._services[destination] = responder

    async def close(self) -> None:
        await super().close()
        for task in list(self._answering):
            task.cancel()
        for subscription in self._subscriptions:
            subscription.fail(ConnectionLost("the client is closed"))

    # Called by subscriptions.

    async def start_subscription(self, subscription: MicroMsg2Subscription) -> None:
        peer = await self._redialler.peer(None)
        for other in self._subscriptions:
            # A message does not say which subscription it came for, so they must not overlap.
            if other.takes(subscription.destination) or subscription.takes(other.destination):
                raise ValueError(f"{subscription.destination} overlaps with {other.destination}")
        _subscribe(peer, subscription)
        self._subscriptions.append(subscription)

    def end_subscription(self, subscription: MicroMsg2Subscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            peer = self._peer
            if peer is not None and not peer.ended.done():
                name = subscription.arguments["name"]
                peer.connection.send_unsubscribe(subscription.destination, name=name)
                peer.session.wake()

    def relieve(self) -> None:
        """Read again, once the subscriptions have caught up."""
        peer = self._peer
        if peer is None or peer.ended.done() or peer.connection.reading:
            return
        if sum(subscription.held for subscription in self._subscriptions) <= _HELD_FEW:
            peer.connection.reading = True
            peer.session.wake()

    # Our part.

    async def _connect(self) -> MicroMsg2Peer:
        peer = MicroMsg2Peer(self._route, self._on_event)
        await dial(
            self._host,
            self._port,
            lambda now: MicroMsg2Connection("client", now, limits=self._limits, offer=self._offer),
            peer,
            tls=self._tls,
            timeout_s=self._connect_timeout_s,
            keep_alive=True,
        )
        await peer.opened
        self._peer = peer
        peer.ended.add_done_callback(lambda _: self._lose(peer))
        for subscription in self._subscriptions:
            _subscribe(peer, subscription)
        for destination in self._services:
            peer.connection.send_serve(destination)
        peer.session.wake()
        return peer

    def _on_redialler_end(self, reason: ConnectionLost) -> None:
        for subscription in self._subscriptions:
            subscription.fail(reason)

    def _lose(self, peer: MicroMsg2Peer) -> None:
        """Calls are not repeated. Subscriptions are, unless the server said that it won't do."""
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(
                    ConnectionLost("the connection ended; the call may or may not have been done")
                )
        error = peer.error
        if error is not None and error.code in _OUR_FAULT:
            for subscription in self._subscriptions:
                subscription.fail(RequestFailed(str(error.code), error.reason))
            self._subscriptions.clear()

    def _route(self, delivery: MicroMsg2Delivery) -> None:
        if delivery.destination.startswith("reply/"):
            delivery.acknowledge()
            answer = self._calls.get(str(delivery.properties.get("correlation-id")))
            if answer is not None and not answer.done():
                answer.set_result(delivery)
            return
        for subscription in self._subscriptions:
            if subscription.takes(delivery.destination):
                subscription.deliver(delivery)
                self._slow_down(delivery.peer.connection)
                return
        responder = self._responder(delivery.destination)
        if responder is None:
            _log.info("nobody here takes what came for %r", delivery.destination)
            delivery.acknowledge()
            return
        task = asyncio.create_task(self._answer(responder, delivery))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _slow_down(self, connection: MicroMsg2Connection) -> None:
        """Without acknowledgements only the socket can hold the server back."""
        if connection.agreement.window is None and connection.reading:
            held = sum(subscription.held for subscription in self._subscriptions)
            connection.reading = held < _HELD_MOST

    def _responder(self, destination: str) -> Responder | None:
        """A provider of `service/NAME` gets every METHOD."""
        while destination:
            if destination in self._services:
                return self._services[destination]
            destination = destination.rpartition("/")[0]
        return None

    async def _answer(self, responder: Responder, asked: MicroMsg2Delivery) -> None:
        properties: dict[str, Property] = {}
        payload = b""
        try:
            answer = await responder(asked)
            if isinstance(answer, tuple):
                payload, properties = answer[0], dict(answer[1])
            else:
                payload = answer
        except RequestFailed as failure:
            payload = failure.data
            properties = {"error": failure.code, "description": failure.description}
        except Exception:
            _log.exception("the responder of %s failed", asked.destination)
            properties = {"error": "internal", "description": "the responder failed"}
        reply_to = asked.properties.get("reply-to")
        if isinstance(reply_to, str) and reply_to:
            if "correlation-id" in asked.properties:
                properties["correlation-id"] = asked.properties["correlation-id"]
            try:
                await asked.peer.send(reply_to, payload, properties)
            except (ConnectionLost, LocalProtocolError) as error:
                _log.warning("an answer to %s was not sent: %s", reply_to, error)
        asked.acknowledge()


def _whole(destination: str) -> str:
    """A bare name is a queue."""
    return destination if "/" in destination else f"queue/{destination}"


def _subscribe(peer: MicroMsg2Peer, subscription: MicroMsg2Subscription) -> None:
    peer.connection.send_subscribe(subscription.destination, **subscription.arguments)
    peer.session.wake()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _pass_on(sent: asyncio.Future[None], answer: asyncio.Future[MicroMsg2Delivery]) -> None:
    """A call whose message could not be sent fails with the reason."""
    if not sent.cancelled() and (error := sent.exception()) and not answer.done():
        answer.set_exception(error)
