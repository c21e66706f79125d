"""MicroMsg2's client: it stays connected, and restores subscriptions and services.

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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from typing import Final

from crosswire.client.native.dial import (
    Addresses,
    Backoff,
    StayingClient,
    dial,
    wait_opened,
    within,
)
from crosswire.client.native.micromsg2.peer import MicroMsg2Delivery, MicroMsg2Peer
from crosswire.client.native.micromsg2.subscription import MicroMsg2Subscription
from crosswire.envelope import Property
from crosswire.errors import (
    ConnectionLost,
    LocalProtocolError,
    RequestFailed,
)
from crosswire.wire.contract import Event
from crosswire.wire.micromsg2.connection import MicroMsg2Connection
from crosswire.wire.micromsg2.extensions import (
    ACK,
    BATCH_ACK,
    DOTNET,
    PUB_SUB,
    REFUSE,
    Offer,
    batch_ack,
    token,
)
from crosswire.wire.micromsg2.frames import Extension, MicroMsg2Limits

__all__ = ["MicroMsg2Client", "Responder", "client_offer"]

_log = logging.getLogger("crosswire.client.native.micromsg2")

_REPLY_TO: Final = "reply/calls"
_HELD_MOST = 1000
_HELD_FEW = 500
_OUR_FAULT: Final = frozenset({"malformed", "forbidden", "unknown-destination", "extension"})
"""Errors that would come again on the next connection."""


def client_offer(
    *, identity: str = "crosswire", window: int | None = 100, auth: str | None = None
) -> Offer:
    """The default offer of a client: acknowledgements with a window, pub/sub, and a token if it has
    one. It accepts `dotnet`, but not `json`, which would restrict payloads. A hub also agrees to
    refusals (`x-refuse`)."""
    acks = (batch_ack(window),) if window else ()
    proof = (token(auth),) if auth is not None else ()
    supported = frozenset({ACK, BATCH_ACK, DOTNET, PUB_SUB} if window else {DOTNET, PUB_SUB})
    return Offer(
        identity=identity,
        optional=(*acks, Extension(PUB_SUB), *([Extension(REFUSE)] if window else []), *proof),
        supported=supported,
    )


Responder = Callable[[MicroMsg2Delivery], Awaitable[bytes | tuple[bytes, Mapping[str, Property]]]]
"""Answers a call. Raise RequestFailed(code, description) to answer with a failure."""


class MicroMsg2Client(StayingClient[MicroMsg2Peer]):
    """A client that stays connected; subscriptions and services outlive a connection.

    A message that is sent while there is no connection waits for the next one, within its timeout.
    `on_event` is called with all other events: those of vendor extensions in the offer. `others`
    are further addresses of the same hub, tried in turn.
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
        others: Sequence[tuple[str, int]] = (),
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        super().__init__(
            lambda: self._addresses.reach(self._connect),
            backoff=backoff,
            connect_timeout_s=connect_timeout_s,
        )
        self._addresses = Addresses(host, port, others)
        self._offer = offer or client_offer()
        self._tls = tls
        self._limits = limits
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
        """Send a message, and wait until the server has acknowledged it.

        Raises RequestTimeout, LocalProtocolError for a message that can't be sent, or
        ConnectionLost: then it may or may not have arrived, and it is not repeated.
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
        """Call a service; gives its answer. Raises RequestFailed for one with an `error`."""
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
        """A subscription, to be entered with `async with`. With `manual` the program acknowledges
        each delivery."""
        arguments = {"filter": filter, "name": name, "start": start, "window": window}
        return MicroMsg2Subscription(self, destination, arguments, manual=manual)

    async def serve(
        self, destination: str, responder: Responder, *, timeout_s: float | None = 30.0
    ) -> None:
        """Answer the calls of a service, from now on."""
        peer = await self._redialler.peer(timeout_s)
        if destination in self._services:
            raise ValueError(f"{destination} has its responder already")
        peer.connection.send_serve(destination)
        peer.session.wake()
        self._services[destination] = responder

    async def close(self) -> None:
        """Close the connection; subscriptions end with ConnectionLost."""
        await super().close()
        for task in list(self._answering):
            task.cancel()
        for subscription in self._subscriptions:
            subscription.fail(ConnectionLost("the client is closed"))

    # Called by subscriptions.

    async def start_subscription(self, subscription: MicroMsg2Subscription) -> None:
        """Subscribe. Raises ValueError if it overlaps with another subscription."""
        peer = await self._redialler.peer(None)
        for other in self._subscriptions:
            # A message doesn't name its subscription, so they must not overlap.
            if other.takes(subscription.destination) or subscription.takes(other.destination):
                raise ValueError(f"{subscription.destination} overlaps with {other.destination}")
        _subscribe(peer, subscription)
        self._subscriptions.append(subscription)

    def end_subscription(self, subscription: MicroMsg2Subscription) -> None:
        """Unsubscribe, if it is subscribed."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            peer = self._peer
            if peer is not None and not peer.ended.done():
                name = subscription.arguments["name"]
                peer.connection.send_unsubscribe(subscription.destination, name=name)
                peer.session.wake()

    def relieve(self) -> None:
        """Read from the server again, once the subscriptions have caught up."""
        peer = self._peer
        if peer is None or peer.ended.done() or peer.connection.reading:
            return
        if sum(subscription.held for subscription in self._subscriptions) <= _HELD_FEW:
            peer.connection.reading = True
            peer.session.wake()

    # The connection.

    async def _connect(self, host: str, port: int) -> MicroMsg2Peer:
        peer = MicroMsg2Peer(self._route, self._on_event)
        await dial(
            host,
            port,
            lambda now: MicroMsg2Connection("client", now, limits=self._limits, offer=self._offer),
            peer,
            tls=self._tls,
            timeout_s=self._connect_timeout_s,
            keep_alive=True,
        )
        await wait_opened(peer.session, peer.opened, self._connect_timeout_s)
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
        """Fail calls, which are not repeated. Subscriptions are restored, unless the server ended
        the connection for a reason that would come again."""
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
            # An answer takes a frame of the window like any message.
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
            _log.info("a message for %r has no subscription and no responder", delivery.destination)
            delivery.acknowledge()
            return
        task = asyncio.create_task(self._answer(responder, delivery))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _slow_down(self, connection: MicroMsg2Connection) -> None:
        """Stop reading: without acknowledgements only the socket can slow the server down."""
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

    async def _answer(self, responder: Responder, call: MicroMsg2Delivery) -> None:
        properties: dict[str, Property] = {}
        payload = b""
        try:
            answer = await responder(call)
            if isinstance(answer, tuple):
                payload, properties = answer[0], dict(answer[1])
            else:
                payload = answer
        except RequestFailed as failure:
            payload = failure.data
            properties = {"error": failure.code, "description": failure.description}
        except Exception:
            _log.exception("the responder of %s failed", call.destination)
            properties = {"error": "internal", "description": "the responder failed"}
        reply_to = call.properties.get("reply-to")
        if isinstance(reply_to, str) and reply_to:
            if "correlation-id" in call.properties:
                properties["correlation-id"] = call.properties["correlation-id"]
            try:
                await call.peer.send(reply_to, payload, properties)
            except (ConnectionLost, LocalProtocolError) as error:
                _log.warning("an answer to %s was not sent: %s", reply_to, error)
        call.acknowledge()


def _subscribe(peer: MicroMsg2Peer, subscription: MicroMsg2Subscription) -> None:
    peer.connection.send_subscribe(subscription.destination, **subscription.arguments)
    peer.session.wake()


def _pass_on(sent: asyncio.Future[None], answer: asyncio.Future[MicroMsg2Delivery]) -> None:
    """A call whose message could not be sent fails with the reason."""
    if not sent.cancelled() and (error := sent.exception()) and not answer.done():
        answer.set_exception(error)
