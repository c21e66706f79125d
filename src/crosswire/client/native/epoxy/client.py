"""Epoxy for asyncio programs: call Bond services, offer them, tell and be told.

    calc = idl.load("calc.bond").service("examples.calc.Calc")
    async with EpoxyClient("127.0.0.1", 25188) as client:
        result = await client.call(calc, "Calculate", Params(x=67, y=87, operation=3))

Values are those of `crosswire.bond`; `call_bytes` and `tell_bytes` carry marshalled Bond untouched.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import ssl
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from crosswire.bond import hub_module, marshal
from crosswire.bond.schema import MethodDef, ServiceDef
from crosswire.client.native.dial import Backoff, StayingClient, dial, within
from crosswire.client.native.remote import RemotePeer
from crosswire.client.native.resubscribe import (
    KeptSubscription,
    KeptSubscriptions,
    SubscriptionNumbers,
)
from crosswire.errors import (
    BondDecodeError,
    CallFailed,
    ConnectionLost,
    ConnectionRejected,
    CrosswireError,
    LocalProtocolError,
    ServiceUnavailable,
)
from crosswire.session import Session, use_keep_alive
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, ConnectionOpened, Event
from crosswire.wire.epoxy.comm import Error, ErrorCode, marshal_credentials, unmarshal_error
from crosswire.wire.epoxy.connection import EpoxyConnection
from crosswire.wire.epoxy.events import EventReceived, RequestReceived, ResponseReceived
from crosswire.wire.epoxy.frames import EpoxyLimits

__all__ = [
    "CallReply",
    "EpoxyClient",
    "EpoxyPeer",
    "EpoxyServer",
    "Handler",
    "Handlers",
    "IncomingCall",
    "offer",
]

_log = logging.getLogger("crosswire.client.native.epoxy")

_HUB: Final = "crosswire.Hub"
_DELIVERY: Final = "crosswire.Delivery"
_SUBSCRIPTION: Final = "crosswire.Subscription"
_SUBSCRIBED: Final = "crosswire.Subscribed"
_DELIVER: Final = ("crosswire.Subscriber", "Deliver")
_WITH_NUMBER: Final = frozenset({"Settle", "Unsubscribe"})
"""Methods of the hub whose request names a subscription."""

_REMEMBERED: Final = frozenset({"Serve", "Subscribe", "Unsubscribe"})
"""Methods of the hub whose effect a new connection doesn't have."""

_MOST_WORKERS = 64
"""Handlers of one connection that may wait for something at the same time."""


class CallReply(msgspec.Struct, frozen=True, gc=False):
    """What a request was answered with: marshalled Bond, as it came."""

    payload: bytes
    layer_data: bytes | None = None


class IncomingCall(msgspec.Struct, frozen=True, kw_only=True):
    """What a handler is given: a request, or an event, as it came."""

    service: str
    method: str
    payload: bytes
    layer_data: bytes | None
    is_event: bool
    peer: EpoxyPeer


Handler: TypeAlias = Callable[[IncomingCall], Awaitable[bytes | CallReply | None]]
"""Answers with marshalled Bond, to an event with None. Raise CallFailed to answer with an error."""

Handlers: TypeAlias = Mapping[tuple[str, str], Handler]
"""Handlers by service and method; `offer` makes them from a class."""


# -------------------------------------------------------------------------------------- services


def offer(service: ServiceDef, implementation: object) -> dict[tuple[str, str], Handler]:
    """Handlers that call the methods of an object with values, and take values from them.

    A method of the service is one of the object, spelt the same or in snake case: a coroutine
    function of the request, or of the request and its Call. Raises TypeError if one is missing.
    """
    handlers: dict[tuple[str, str], Handler] = {}
    for method in service.methods.values():
        function = getattr(implementation, method.name, None) or getattr(
            implementation, _snake_case(method.name), None
        )
        if not inspect.iscoroutinefunction(function):
            raise TypeError(
                f"{type(implementation).__name__} has no coroutine method {method.name} "
                f"for the service {service.full_name}"
            )
        handlers[service.full_name, method.name] = _handler(service, method, function)
    return handlers


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _handler(
    service: ServiceDef, method: MethodDef, function: Callable[..., Awaitable[Any]]
) -> Handler:
    takes_call = len(inspect.signature(function).parameters) > 1
    name = f"{service.full_name}.{method.name}"

    async def handle(call: IncomingCall) -> bytes | None:
        if call.is_event != method.is_event:
            raise CallFailed(
                ErrorCode.INVALID_INVOCATION,
                f"{name} is {'an event' if method.is_event else 'a request'}",
            )
        request = marshal.unmarshal(call.payload, method.request)
        result = await (function(request, call) if takes_call else function(request))
        if method.response is None:
            return None
        return marshal.marshal(
            method.response.python_class() if result is None else result, method.response
        )

    return handle


# ------------------------------------------------------------------------------------------ peer


class EpoxyPeer(RemotePeer):
    """The far end of one connection, whoever dialled. Both ends may call and tell.

    Handlers are begun in the order in which requests and events came; one that waits does not hold
    up the next.
    """

    def __init__(
        self, handlers: Handlers, *, token: str | None = None, events_waiting: int = 1024
    ) -> None:
        super().__init__()
        self.numbers = SubscriptionNumbers()
        self._handlers = handlers
        self._credentials = None if token is None else marshal_credentials(token)
        self._events_waiting = events_waiting
        self._waiting: dict[int, asyncio.Future[ResponseReceived]] = {}
        self._joining: dict[int, Callable[[bytes], None]] = {}
        self._to_handle: deque[RequestReceived | EventReceived] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._drained: asyncio.Future[None] | None = None
        self.events_dropped = 0
        """Events that came faster than they were handled, or that nobody handles."""

    @property
    def connection(self) -> EpoxyConnection:
        connection = self.session.connection
        assert isinstance(connection, EpoxyConnection)
        return connection

    async def call(
        self,
        service: ServiceDef,
        method: str,
        request: Any,
        *,
        layer_data: bytes | None = None,
        timeout_s: float | None = 30.0,
    ) -> Any:
        """The service's response, a value of the method's response type.

        Raises CallFailed for an error, RequestTimeout, BondDecodeError for a response of another
        type, or ConnectionLost: then nobody knows whether it was carried out, and it is not
        repeated.
        """
        declared = service.method(method)
        if declared.response is None:
            raise LocalProtocolError(f"{service.full_name}.{method} is an event: tell it")
        reply = await self.call_bytes(
            service.full_name,
            method,
            marshal.marshal(request, declared.request),
            layer_data=layer_data,
            timeout_s=timeout_s,
        )
        return marshal.unmarshal(reply.payload, declared.response)

    async def call_bytes(
        self,
        service: str,
        method: str,
        payload: bytes,
        *,
        layer_data: bytes | None = None,
        timeout_s: float | None = 30.0,
        succeeded: Callable[[bytes], None] | None = None,
    ) -> CallReply:
        """Like `call`, with marshalled Bond that stays bytes.

        `succeeded` is given the response before anything that came after it is looked at.
        """
        name = f"{service}.{method}"
        if service == _HUB and method in _WITH_NUMBER and self.numbers.differ:
            payload = self._with_our_number(method, payload)
        try:
            conversation = self.connection.send_request(
                service, method, payload, layer_data=layer_data or self._credentials
            )
        except LocalProtocolError as error:
            raise self._not_sent(name, error) from None
        self.session.wake()
        future: asyncio.Future[ResponseReceived] = asyncio.get_running_loop().create_future()
        self._waiting[conversation] = future
        if succeeded is not None:
            self._joining[conversation] = succeeded
        try:
            response = await within(timeout_s, f"no response from {name}", future)
        finally:
            self._waiting.pop(conversation, None)
            self._joining.pop(conversation, None)
            self.connection.forget_request(conversation)
        if response.payload is None:
            raise _failure(response.error or b"")
        return CallReply(response.payload, response.layer_data)

    async def send_event(
        self, service: ServiceDef, method: str, event: Any, *, layer_data: bytes | None = None
    ) -> None:
        """Send an event: no answer, and no knowing whether it arrived. Raises ConnectionLost."""
        declared = service.method(method)
        payload = marshal.marshal(event, declared.request)
        await self.send_event_bytes(service.full_name, method, payload, layer_data=layer_data)

    async def send_event_bytes(
        self, service: str, method: str, payload: bytes, *, layer_data: bytes | None = None
    ) -> None:
        """Like `send_event`, with marshalled Bond that stays bytes. Waits while the peer is
        behind.
        """
        await self._keep_pace()
        try:
            self.connection.send_event(
                service, method, payload, layer_data=layer_data or self._credentials
            )
        except LocalProtocolError as error:
            raise self._not_sent(f"{service}.{method}", error) from None
        self.session.wake()

    def _with_our_number(self, method: str, payload: bytes) -> bytes:
        """What names a subscription by the program's number names it by this connection's.

        What can't be read is left to the hub, which says so.
        """
        request = hub_module().service(_HUB).method(method).request
        try:
            asked = marshal.unmarshal(payload, request)
        except BondDecodeError:
            return payload
        number = self.numbers.for_connection(asked.subscription)
        if number == asked.subscription:
            return payload
        asked.subscription = number
        return marshal.marshal(asked, request)

    def _with_programs_number(self, payload: bytes) -> bytes:
        """A delivery as the program sees it. One that can't be read is left to its handler."""
        struct = hub_module().struct(_DELIVERY)
        try:
            delivery = marshal.unmarshal(payload, struct)
        except BondDecodeError:
            return payload
        number = self.numbers.for_program(delivery.subscription, delivery.id)
        if number == delivery.subscription:
            return payload
        delivery.subscription = number
        return marshal.marshal(delivery, struct)

    # Called by the session.

    def handle_events(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case ResponseReceived(conversation_id=conversation):
                    future = self._waiting.get(conversation)
                    if future is not None and not future.done():
                        if event.payload is not None and conversation in self._joining:
                            self._joining[conversation](event.payload)
                        future.set_result(event)
                case RequestReceived():
                    self._to_handle.append(event)
                case EventReceived():
                    if len(self._to_handle) < self._events_waiting:
                        self._to_handle.append(event)
                    else:
                        self.events_dropped += 1
                case ConnectionOpened():
                    self.opened.set_result(None)
                case ConnectionClosed() | ConnectionFailed():
                    self.finish(event)
        self._find_worker()

    def handle_drain(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def finish(self, end: ConnectionClosed | ConnectionFailed) -> None:
        self.end = end
        lost = ConnectionLost(f"{self.why()}; what was under way may or may not have been done")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(lost)
        self._to_handle.clear()
        for worker in self._workers:
            worker.cancel()
        self.handle_drain()
        super().finish(end)

    def _not_sent(self, name: str, error: LocalProtocolError) -> CrosswireError:
        """Nothing is wrong with the connection if it is still there; if not, it has a goodbye."""
        self.session.wake()
        if self.end is None and self.connection.accepts_conversations:
            return error
        return ConnectionLost(f"{name} was not sent: {self.why(error)}")

    async def _keep_pace(self) -> None:
        while self.session.congested and self.end is None:
            if self._drained is None or self._drained.done():
                self._drained = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._drained)

    # Handling.

    def _find_worker(self) -> None:
        """A worker handles all that came, unless a handler waits: then another one goes on."""
        if self._to_handle and len(self._workers) < _MOST_WORKERS:
            worker = asyncio.create_task(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)

    async def _work(self) -> None:
        asyncio.get_running_loop().call_soon(self._find_worker)
        while self._to_handle:
            asked = self._to_handle.popleft()
            if isinstance(asked, RequestReceived):
                await self._answer(asked)
            else:
                await self._take(asked)

    async def _take(self, event: EventReceived) -> None:
        """An event never gets an answer, not even an error."""
        name = event.service_name, event.method_name
        handler = self._handlers.get(name)
        if handler is None:
            self.events_dropped += 1
            return
        try:
            await handler(self._call(event, is_event=True))
        except (CallFailed, BondDecodeError) as error:
            self.events_dropped += 1
            _log.warning("event %s.%s: %s", *name, error)
        except Exception:
            _log.exception("the handler of %s.%s failed", *name)

    async def _answer(self, asked: RequestReceived) -> None:
        result = await self._result(asked)
        await self._keep_pace()
        connection, conversation = self.connection, asked.conversation_id
        try:
            if isinstance(result, CallReply):
                connection.send_response(conversation, result.payload, layer_data=result.layer_data)
            else:
                connection.send_error(conversation, result)
        except LocalProtocolError as error:
            _log.warning("%s.%s is not answered: %s", asked.service_name, asked.method_name, error)
            if connection.is_owed(conversation):
                connection.send_error(conversation, _internal_error("the response can't be sent"))
        self.session.wake()

    async def _result(self, asked: RequestReceived) -> CallReply | Error | bytes:
        """The reply; or the error, marshalled if it came from elsewhere."""
        name = asked.service_name, asked.method_name
        handler = self._handlers.get(name)
        if handler is None:
            return Error(ErrorCode.METHOD_NOT_FOUND, "there is no method {}.{}".format(*name))
        try:
            result = await handler(self._call(asked, is_event=False))
            if result is None:
                raise TypeError("a request was answered with None")
            return result if isinstance(result, CallReply) else CallReply(result)
        except CallFailed as failure:
            return failure.data or Error(failure.error_code, failure.description)
        except BondDecodeError as error:
            return _internal_error(f"the payload can't be read: {error}")
        except Exception:
            event = _internal_error("the service failed")
            _log.exception("the handler of %s.%s failed (%s)", *name, event.unique_id)
            return event

    def _call(self, received: RequestReceived | EventReceived, *, is_event: bool) -> IncomingCall:
        payload = received.payload
        if (received.service_name, received.method_name) == _DELIVER:
            payload = self._with_programs_number(payload)
        return IncomingCall(
            service=received.service_name,
            method=received.method_name,
            payload=payload,
            layer_data=received.layer_data,
            is_event=is_event,
            peer=self,
        )


def _failure(data: bytes) -> CallFailed:
    try:
        error = unmarshal_error(data)
    except BondDecodeError as unreadable:
        reason = f"an error that can't be read: {unreadable}"
        return CallFailed(ErrorCode.INTERNAL_SERVER_ERROR, reason, data=data)
    return CallFailed(error.error_code, error.message, code=error.error_name, data=data)


def _internal_error(message: str) -> Error:
    """Tells the caller little; the id finds the rest in the log."""
    return Error(ErrorCode.INTERNAL_SERVER_ERROR, message, unique_id=str(uuid.uuid4()))


# ------------------------------------------------------------------------------ client and server


class EpoxyClient(StayingClient[EpoxyPeer]):
    """A client that stays connected; `handlers` answer what the server calls.

    A call that is made while there is no connection waits for the next one, within its timeout.
    With a `token`, every call and event that has no layer data of its own says who we are.
    What `crosswire.Hub.Subscribe` and `Serve` achieved is asked for again on every new connection,
    before anything else: deliveries and calls go on, with the same `subscription`. If the hub
    refuses that, the client ends, and `ended` has the reason.
    """

    def __init__(
        self,
        host: str,
        port: int = 25188,
        *,
        tls: ssl.SSLContext | None = None,
        handlers: Handlers | None = None,
        token: str | None = None,
        limits: EpoxyLimits | None = None,
        backoff: Backoff | None = None,
        connect_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(self._connect, backoff=backoff)
        self._host = host
        self._port = port
        self._tls = tls
        self._handlers = handlers or {}
        self._token = token
        self._limits = limits
        self._connect_timeout_s = connect_timeout_s
        self._subscriptions = KeptSubscriptions()
        self._services: dict[str, None] = {}

    async def call(
        self,
        service: ServiceDef,
        method: str,
        request: Any,
        *,
        layer_data: bytes | None = None,
        timeout_s: float | None = 30.0,
    ) -> Any:
        """As `EpoxyPeer.call`."""
        if service.full_name == _HUB and method in _REMEMBERED:
            declared = service.method(method)
            payload = marshal.marshal(request, declared.request)
            reply = await self.call_bytes(
                _HUB, method, payload, layer_data=layer_data, timeout_s=timeout_s
            )
            assert declared.response is not None  # all methods of the hub have one
            return marshal.unmarshal(reply.payload, declared.response)
        peer = await self._redialler.peer(timeout_s)
        return await peer.call(service, method, request, layer_data=layer_data, timeout_s=timeout_s)

    async def call_bytes(
        self,
        service: str,
        method: str,
        payload: bytes,
        *,
        layer_data: bytes | None = None,
        timeout_s: float | None = 30.0,
    ) -> CallReply:
        """As `EpoxyPeer.call_bytes`."""
        peer = await self._redialler.peer(timeout_s)
        if service == _HUB and method == "Subscribe":
            return await self._subscribe(peer, payload, layer_data, timeout_s)
        reply = await peer.call_bytes(
            service, method, payload, layer_data=layer_data, timeout_s=timeout_s
        )
        if service == _HUB and method in _REMEMBERED:
            asked = marshal.unmarshal(payload, hub_module().service(_HUB).method(method).request)
            if method == "Serve":
                self._services |= dict.fromkeys(asked.services)
            else:
                self._subscriptions.by_number.pop(asked.subscription, None)
        return reply

    async def send_event(
        self,
        service: ServiceDef,
        method: str,
        event: Any,
        *,
        layer_data: bytes | None = None,
        timeout_s: float | None = 30.0,
    ) -> None:
        """As `EpoxyPeer.tell`."""
        peer = await self._redialler.peer(timeout_s)
        await peer.send_event(service, method, event, layer_data=layer_data)

    async def send_event_bytes(
        self,
        service: str,
        method: str,
        payload: bytes,
        *,
        layer_data: bytes | None = None,
        timeout_s: float | None = 30.0,
    ) -> None:
        """As `EpoxyPeer.tell_bytes`."""
        peer = await self._redialler.peer(timeout_s)
        await peer.send_event_bytes(service, method, payload, layer_data=layer_data)

    async def _connect(self) -> EpoxyPeer:
        peer = EpoxyPeer(self._handlers, token=self._token)
        await dial(
            self._host,
            self._port,
            lambda now: EpoxyConnection("client", now, limits=self._limits),
            peer,
            tls=self._tls,
            timeout_s=self._connect_timeout_s,
            keep_alive=True,
        )
        await peer.opened
        try:
            await self._restore(peer)
        except BaseException:
            # Half restored is of no use to anybody, and its subscriptions would hold messages.
            await peer.close()
            raise
        return peer

    async def _subscribe(
        self, peer: EpoxyPeer, payload: bytes, layer_data: bytes | None, timeout_s: float | None
    ) -> CallReply:
        """Keep what was asked for; gives the reply with the program's number."""
        module = hub_module()
        subscribed = module.struct(_SUBSCRIBED)
        kept: list[KeptSubscription] = []

        def keep(reply: bytes) -> None:
            try:
                asked = marshal.unmarshal(payload, module.struct(_SUBSCRIPTION))
                number = marshal.unmarshal(reply, subscribed).subscription
            except BondDecodeError:
                return  # a server that is no hub, and means something else by it
            kept.append(
                self._subscriptions.add(
                    number,
                    payload,
                    destination=asked.destination,
                    name=asked.name,
                    start=asked.start,
                )
            )
            peer.numbers.join(number, kept[0])

        reply = await peer.call_bytes(
            _HUB, "Subscribe", payload, layer_data=layer_data, timeout_s=timeout_s, succeeded=keep
        )
        if not kept:
            return reply
        answer = subscribed.python_class(subscription=kept[0].number)
        return CallReply(marshal.marshal(answer, subscribed), reply.layer_data)

    async def _restore(self, peer: EpoxyPeer) -> None:
        """Ask again for what earlier connections had. Raises ClientError."""
        hub, timeout_s = hub_module().service(_HUB), self._connect_timeout_s
        if self._services:
            services = hub.method("Serve").request.python_class(services=list(self._services))
            await peer.call(hub, "Serve", services, timeout_s=timeout_s)
        for kept in list(self._subscriptions.by_number.values()):
            request = hub.method("Subscribe").request
            asked = marshal.unmarshal(kept.request, request)
            asked.start = kept.start_again()

            def join(reply: bytes, kept: KeptSubscription = kept) -> None:
                number = marshal.unmarshal(reply, hub_module().struct(_SUBSCRIBED)).subscription
                peer.numbers.join(number, kept)

            await peer.call_bytes(
                _HUB,
                "Subscribe",
                marshal.marshal(asked, request),
                timeout_s=timeout_s,
                succeeded=join,
            )


class EpoxyServer:
    """Accepts connections and answers with `handlers`; `peers` are those connected now.

    `refuse` is asked about every new connection, given its transport (address, certificate): the
    reason that it gives, if any, is what the peer is rejected with. So is one too many.
    """

    def __init__(
        self,
        handlers: Handlers | Iterable[Handlers],
        *,
        tls: ssl.SSLContext | None = None,
        limits: EpoxyLimits | None = None,
        refuse: Callable[[asyncio.Transport], str | None] | None = None,
        most_peers: int | None = None,
    ) -> None:
        several = [handlers] if isinstance(handlers, Mapping) else handlers
        self._handlers = {name: handler for each in several for name, handler in each.items()}
        self._tls = tls
        self._limits = limits
        self._refuse = refuse
        self._most_peers = most_peers
        self._server: asyncio.Server | None = None
        self.port = 0
        self.peers: set[EpoxyPeer] = set()

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Open the port, and give it; 0 takes a free one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, host, port, ssl=self._tls)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self.port

    async def close(self) -> None:
        """Stop listening, answer what was asked, and close."""
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(peer.close() for peer in list(self.peers)))

    def _accept(self) -> Session:
        peer = EpoxyPeer(self._handlers)
        return Session(lambda now: self._open(peer, now), peer)

    def _open(self, peer: EpoxyPeer, now: float) -> EpoxyConnection:
        """The socket is there, and with TLS its handshake is done."""
        self.peers.add(peer)
        peer.ended.add_done_callback(lambda _: self.peers.discard(peer))
        connection = EpoxyConnection("server", now, limits=self._limits)
        transport = peer.session.transport
        use_keep_alive(transport)
        if self._most_peers is not None and len(self.peers) > self._most_peers:
            connection.fail(ServiceUnavailable("no room for another connection"))
        elif self._refuse is not None and (reason := self._refuse(transport)):
            connection.fail(ConnectionRejected(reason))
        return connection
