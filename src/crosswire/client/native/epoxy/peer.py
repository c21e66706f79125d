"""The far end of an Epoxy connection: calls and events in both directions."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from crosswire.bond import hub_module, marshal
from crosswire.bond.schema import ServiceDef
from crosswire.client.native.dial import within
from crosswire.client.native.remote import PendingReplies, RemotePeer
from crosswire.client.native.resubscribe import SubscriptionNumbers
from crosswire.errors import (
    BondDecodeError,
    CallFailed,
    ConnectionLost,
    CrosswireError,
    LocalProtocolError,
)
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, ConnectionOpened, Event
from crosswire.wire.epoxy.comm import Error, ErrorCode, marshal_credentials, unmarshal_error
from crosswire.wire.epoxy.connection import EpoxyConnection
from crosswire.wire.epoxy.events import EventReceived, RequestReceived, ResponseReceived

__all__ = ["HUB", "CallReply", "EpoxyPeer", "Handler", "Handlers", "IncomingCall"]

_log = logging.getLogger("crosswire.client.native.epoxy")

HUB: Final = "crosswire.Hub"
"""The hub's own service."""
_DELIVERY: Final = "crosswire.Delivery"
_DELIVER: Final = ("crosswire.Subscriber", "Deliver")
_WITH_NUMBER: Final = frozenset({"Extend", "Settle", "Unsubscribe"})
"""Methods of the hub whose request names a subscription."""

_MOST_WORKERS = 64
"""Handlers of one connection that may wait for something at the same time."""


class CallReply(msgspec.Struct, frozen=True, gc=False):
    """The answer to a request: marshalled Bond, unchanged."""

    payload: bytes
    layer_data: bytes | None = None


class IncomingCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request or an event for a handler, unchanged."""

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


class EpoxyPeer(RemotePeer):
    """The far end of one connection, in either role. Both ends may call and send events.

    Handlers are begun in the order of requests and events; one that waits doesn't delay the next.
    """

    def __init__(
        self, handlers: Handlers, *, token: str | None = None, events_waiting: int = 1024
    ) -> None:
        super().__init__()
        self.numbers = SubscriptionNumbers()
        self._handlers = handlers
        self._credentials = None if token is None else marshal_credentials(token)
        self._events_waiting = events_waiting
        self._replies: PendingReplies[ResponseReceived] = PendingReplies()
        self._to_handle: deque[RequestReceived | EventReceived] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._drained: asyncio.Future[None] | None = None
        self.events_dropped = 0
        """Events that came faster than they were handled, failed, or have no handler."""

    @property
    def connection(self) -> EpoxyConnection:
        """The session's connection."""
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
        """Call a method; gives the response, a value of the method's response type.

        Raises CallFailed for an error, RequestTimeout, BondDecodeError for a response of another
        type, or ConnectionLost: then nobody knows whether it was carried out, and it is not
        repeated.
        """
        declared = service.method(method)
        if declared.response is None:
            raise LocalProtocolError(f"{service.full_name}.{method} is an event: use send_event")
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
        on_success: Callable[[bytes], None] | None = None,
    ) -> CallReply:
        """Like `call`, with marshalled Bond as bytes.

        `on_success` is called with the response before any event after it is handled.
        """
        name = f"{service}.{method}"
        if service == HUB and method in _WITH_NUMBER and self.numbers.differ:
            payload = self._with_our_number(method, payload)
        try:
            conversation = self.connection.send_request(
                service, method, payload, layer_data=layer_data or self._credentials
            )
        except LocalProtocolError as error:
            raise self._not_sent(name, error) from None
        self.session.wake()
        try:
            response = await self._replies.wait(
                conversation,
                f"no response from {name}",
                timeout_s=timeout_s,
                on_success=on_success,
            )
        finally:
            # After a timeout the response that still comes is dropped by the connection.
            self.connection.forget_request(conversation)
        if response.payload is None:
            raise _failure(response.error or b"")
        return CallReply(response.payload, response.layer_data)

    async def call_all(
        self,
        service: str,
        method: str,
        payloads: Sequence[bytes],
        *,
        timeout_s: float | None = 30.0,
    ) -> list[CallReply | CallFailed]:
        """Make many calls in one write; gives each answer, or its error.

        Raises RequestTimeout or ConnectionLost, as `call` does.
        """
        name = f"{service}.{method}"
        send = self.connection.send_request
        conversations: list[int] = []
        try:
            for payload in payloads:
                conversations.append(send(service, method, payload, layer_data=self._credentials))
        except LocalProtocolError as error:
            for conversation in conversations:
                self.connection.forget_request(conversation)
            raise self._not_sent(name, error) from None
        self.session.wake()
        pending = [self._replies.expect(each) for each in conversations]
        try:
            what = f"no response from {name}"
            responses = await within(timeout_s, what, asyncio.gather(*pending))
        finally:
            # After a timeout: nobody would ever take these out otherwise.
            self._replies.forget(conversations)
            for conversation in conversations:
                self.connection.forget_request(conversation)
        return [
            _failure(each.error or b"")
            if each.payload is None
            else CallReply(each.payload, each.layer_data)
            for each in responses
        ]

    async def send_event(
        self, service: ServiceDef, method: str, event: Any, *, layer_data: bytes | None = None
    ) -> None:
        """Send an event, which has no answer: it may not arrive. Raises ConnectionLost."""
        declared = service.method(method)
        payload = marshal.marshal(event, declared.request)
        await self.send_event_bytes(service.full_name, method, payload, layer_data=layer_data)

    async def send_event_bytes(
        self, service: str, method: str, payload: bytes, *, layer_data: bytes | None = None
    ) -> None:
        """Like `send_event`, with marshalled Bond as bytes. Waits while the peer doesn't read."""
        await self._keep_pace()
        try:
            self.connection.send_event(
                service, method, payload, layer_data=layer_data or self._credentials
            )
        except LocalProtocolError as error:
            raise self._not_sent(f"{service}.{method}", error) from None
        self.session.wake()

    def _with_our_number(self, method: str, payload: bytes) -> bytes:
        """A request with this connection's number of a subscription instead of the program's.

        One that can't be read is sent unchanged: the hub answers with the error.
        """
        request = hub_module().service(HUB).method(method).request
        try:
            parsed = marshal.unmarshal(payload, request)
        except BondDecodeError:
            return payload
        number = self.numbers.for_connection(parsed.subscription)
        if number == parsed.subscription:
            return payload
        parsed.subscription = number
        return marshal.marshal(parsed, request)

    def _with_programs_number(self, payload: bytes) -> bytes:
        """A delivery with the program's number; one that can't be read is left to its handler."""
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
        """Resolve replies and queue what handlers are for; events above the limit are dropped."""
        for event in events:
            match event:
                case ResponseReceived(conversation_id=conversation):
                    self._replies.resolve(conversation, event, event.payload)
                case RequestReceived():
                    self._to_handle.append(event)
                case EventReceived():
                    # A request is never dropped, since its sender waits; an event may be.
                    if len(self._to_handle) < self._events_waiting:
                        self._to_handle.append(event)
                    else:
                        self.events_dropped += 1
                case ConnectionOpened():
                    self.open()
                case ConnectionClosed() | ConnectionFailed():
                    self.finish(event)
        self._find_worker()

    def handle_drain(self) -> None:
        """Let senders of events and answers go on."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def finish(self, end: ConnectionClosed | ConnectionFailed) -> None:
        """Fail pending calls, and cancel handlers."""
        # First: a handler that is cancelled below, or a sender that wakes, must find it ended.
        self.end = end
        self._replies.fail(self.lost())
        # Nobody could be answered any more.
        self._to_handle.clear()
        for worker in self._workers:
            worker.cancel()
        self.handle_drain()
        super().finish(end)

    def _not_sent(self, name: str, error: LocalProtocolError) -> CrosswireError:
        """The error itself if the connection is usable: then the message was at fault. Otherwise
        the reason why the connection ended."""
        self.session.wake()
        if self.end is None and self.connection.accepts_conversations:
            return error
        return ConnectionLost(f"{name} was not sent: {self.why(error)}")

    async def _keep_pace(self) -> None:
        while self.session.congested and self.end is None:
            if self._drained is None or self._drained.done():
                self._drained = asyncio.get_running_loop().create_future()
            # Shared by all who wait: one that is cancelled must not cancel it for the others.
            await asyncio.shield(self._drained)

    # Handling.

    def _find_worker(self) -> None:
        """Start a worker if there is something to handle. A worker handles all that is queued;
        if its handler waits, the next turn of the loop starts another one."""
        if self._to_handle and len(self._workers) < _MOST_WORKERS:
            worker = asyncio.create_task(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)

    async def _work(self) -> None:
        # Runs when this task first waits: then another worker takes what is left.
        asyncio.get_running_loop().call_soon(self._find_worker)
        while self._to_handle:
            received = self._to_handle.popleft()
            if isinstance(received, RequestReceived):
                await self._answer(received)
            else:
                await self._take(received)

    async def _take(self, event: EventReceived) -> None:
        """Handle an event, which never gets an answer, not even an error."""
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

    async def _answer(self, received: RequestReceived) -> None:
        result = await self._result(received)
        await self._keep_pace()
        connection, conversation = self.connection, received.conversation_id
        try:
            if isinstance(result, CallReply):
                connection.send_response(conversation, result.payload, layer_data=result.layer_data)
            else:
                connection.send_error(conversation, result)
        except LocalProtocolError as error:
            _log.warning(
                "%s.%s is not answered: %s", received.service_name, received.method_name, error
            )
            # Too large for a frame: the caller waits for something, so it gets an error instead.
            if connection.is_owed(conversation):
                connection.send_error(conversation, _internal_error("the response can't be sent"))
        self.session.wake()

    async def _result(self, received: RequestReceived) -> CallReply | Error | bytes:
        """The reply, or the error; that of another service is passed on marshalled."""
        name = received.service_name, received.method_name
        handler = self._handlers.get(name)
        if handler is None:
            return Error(ErrorCode.METHOD_NOT_FOUND, "there is no method {}.{}".format(*name))
        try:
            result = await handler(self._call(received, is_event=False))
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
    """An error without details for the caller; its id is in the log, beside the exception."""
    return Error(ErrorCode.INTERNAL_SERVER_ERROR, message, unique_id=str(uuid.uuid4()))
