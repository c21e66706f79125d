"""The far end of an EMP connection: requests in both directions, in order."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from crosswire.client.native.dial import within
from crosswire.client.native.remote import PendingReplies, RemotePeer
from crosswire.client.native.resubscribe import SubscriptionNumbers
from crosswire.errors import ConnectionLost, LocalProtocolError, RequestFailed
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, ConnectionOpened, Event
from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emp.events import RequestReceived, ResponseReceived

__all__ = ["EmpDelivery", "EmpPeer", "Handler", "Json", "OwedAnswer", "Receiver", "decode"]

Json = dict[str, Any]
Handler = Callable[[Json], Awaitable[Json | None]]
"""Answers an operation. Raise RequestFailed(code, description) to answer with a failure."""

_log = logging.getLogger("crosswire.client.native.emp")


class OwedAnswer:
    """The answer to one request of the peer; it leaves when those before it have left."""

    __slots__ = ("_id", "_peer", "send")

    def __init__(self, peer: EmpPeer, identifier: int) -> None:
        self._peer = peer
        self._id = identifier
        self.send: Callable[[], None] | None = None

    @property
    def lost(self) -> bool:
        """Whether the connection ended before the answer was given."""
        return self._peer.end is not None

    def succeed(self, data: bytes = b"{}") -> None:
        """Answer with success."""
        self.send = lambda: self._peer.connection.send_success(self._id, data)
        self._peer.send_answers()

    def fail(self, code: str, description: str, data: bytes = b"{}") -> None:
        """Answer with a failure."""
        self.send = lambda: self._peer.connection.send_failure(self._id, code, description, data)
        self._peer.send_answers()


class EmpDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a `$deliver`: exactly one of `json`, `text` and `base64` is there."""

    subscription: int
    id: int
    destination: str
    attempt: int = 1
    properties: dict[str, int | float | bool | str] = {}
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: str | None = None
    base64: bytes = b""


_parse_delivery = msgspec.json.Decoder(EmpDelivery).decode

Receiver = Callable[[EmpDelivery, OwedAnswer], None]
"""Takes a delivery at once, and answers it later."""


class EmpPeer(RemotePeer):
    """The far end of one connection, in either role. Requests go both ways and stay in order.

    Handlers run one after the other. `deliver` gets the hub's `$deliver` requests as they arrive.
    """

    def __init__(self, handlers: Mapping[str, Handler], *, deliver: Receiver | None = None) -> None:
        super().__init__()
        self.numbers = SubscriptionNumbers()
        self._handlers = handlers
        self._replies: PendingReplies[ResponseReceived] = PendingReplies()
        self._deliver = deliver
        self._to_answer: deque[tuple[RequestReceived, OwedAnswer]] = deque()
        self._owed: deque[OwedAnswer] = deque()
        """Answers to all requests of the peer, in their order, which is that of the answers."""
        self._answering: asyncio.Task[None] | None = None

    @property
    def connection(self) -> EmpConnection:
        """The session's connection."""
        connection = self.session.connection
        assert isinstance(connection, EmpConnection)
        return connection

    async def request(
        self, op: str, data: Json | None = None, *, timeout_s: float | None = 30.0
    ) -> Json:
        """Send a request; gives the data of the response.

        Raises RequestFailed for a failure, RequestTimeout, or ConnectionLost: then nobody knows
        whether it was carried out, and it is not repeated.
        """
        reply = await self.request_json(op, msgspec.json.encode(data or {}), timeout_s=timeout_s)
        return decode(reply)

    async def request_json(
        self,
        op: str,
        data: bytes,
        *,
        timeout_s: float | None = 30.0,
        on_success: Callable[[bytes], None] | None = None,
    ) -> bytes:
        """Like `request`, with JSON objects as bytes.

        `on_success` is called with the response before any event after it is handled.
        """
        if op in ("$extend", "$unsubscribe") and self.numbers.differ:
            # The hub numbers subscriptions anew on each connection, the program keeps the first.
            data = self._with_our_number(data)
        try:
            identifier = self.connection.send_request(op, data)
        except LocalProtocolError as error:
            raise ConnectionLost(f"{op} was not sent: {self.why(error)}") from None
        self.session.wake()
        response = await self._replies.wait(
            identifier, f"no response to {op}", timeout_s=timeout_s, on_success=on_success
        )
        if not response.succeeded:
            raise RequestFailed(response.code, response.description, data=response.data)
        return response.data

    async def request_all(
        self, op: str, data: Sequence[bytes], *, timeout_s: float | None = 30.0
    ) -> list[bytes | RequestFailed]:
        """Send many requests in one write; gives the data of each response, or its failure.

        Raises RequestTimeout or ConnectionLost, as `request` does.
        """
        send = self.connection.send_request
        try:
            identifiers = [send(op, each) for each in data]
        except LocalProtocolError as error:
            raise ConnectionLost(f"{op} was not sent: {self.why(error)}") from None
        self.session.wake()
        # After sending: nothing is read before this coroutine awaits.
        pending = [self._replies.expect(each) for each in identifiers]
        try:
            responses = await within(timeout_s, f"no response to {op}", asyncio.gather(*pending))
        finally:
            self._replies.forget(identifiers)
        return [
            each.data
            if each.succeeded
            else RequestFailed(each.code, each.description, data=each.data)
            for each in responses
        ]

    def _with_our_number(self, data: bytes) -> bytes:
        """A request with this connection's number of a subscription instead of the program's."""
        parsed = msgspec.json.decode(data)
        number = parsed.get("subscription") if isinstance(parsed, dict) else None
        if not isinstance(number, int):
            return data
        return msgspec.json.encode(parsed | {"subscription": self.numbers.for_connection(number)})

    # Called by the session.

    def handle_events(self, events: list[Event]) -> None:
        """Resolve replies, and answer requests one after the other."""
        for event in events:
            match event:
                case ResponseReceived(id=identifier):
                    self._replies.resolve(
                        identifier, event, event.data if event.succeeded else None
                    )
                case RequestReceived():
                    self._take(event)
                case ConnectionOpened():
                    self.open()
                case ConnectionClosed() | ConnectionFailed():
                    self.finish(event)
        # One task for all requests of a read, not one for each.
        if self._to_answer and self._answering is None:
            self._answering = asyncio.create_task(self._answer())

    def finish(self, end: ConnectionClosed | ConnectionFailed) -> None:
        """Fail pending requests, and stop answering those of the peer."""
        # First: a caller that gets the error, or a late answer, finds the connection ended.
        self.end = end
        self._replies.fail(self.lost())
        if self._answering is not None:
            self._answering.cancel()
        super().finish(end)

    def _take(self, request: RequestReceived) -> None:
        answer = OwedAnswer(self, request.id)
        self._owed.append(answer)
        if request.op == "$deliver" and self._deliver is not None:
            # Without waiting for handlers: a program may settle deliveries in any order; their
            # answers wait in `_owed` for those before them.
            self._hand_over(self._deliver, request, answer)
        else:
            self._to_answer.append((request, answer))

    def _hand_over(self, deliver: Receiver, request: RequestReceived, answer: OwedAnswer) -> None:
        try:
            delivery = _parse_delivery(request.data)
        except msgspec.MsgspecError as error:
            answer.fail("invalid_request", f"the delivery can't be read: {error}")
            return
        self.numbers.for_program(delivery.subscription, delivery.id)
        deliver(delivery, answer)

    def _delivery(self, data: bytes) -> Json:
        """A delivery with the program's number of its subscription."""
        decoded = decode(data)
        if {"subscription", "id"} <= decoded.keys():
            number = self.numbers.for_program(decoded["subscription"], decoded["id"])
            decoded["subscription"] = number
        return decoded

    def send_answers(self) -> None:
        """Send the answers that are known and have none before them that isn't."""
        owed = self._owed
        while owed and owed[0].send is not None and self.end is None:
            send = owed.popleft().send
            assert send is not None
            send()
        self.session.wake()

    async def _answer(self) -> None:
        """Answer requests in order: EMP asks to finish one before the next is begun."""
        while self._to_answer:
            request, answer = self._to_answer.popleft()
            try:
                handler = self._handlers.get(request.op)
                if handler is None:
                    raise RequestFailed("unknown_op", f"nobody answers {request.op}")
                is_delivery = request.op == "$deliver"
                data = self._delivery(request.data) if is_delivery else decode(request.data)
                reply = await handler(data)
                answer.succeed(msgspec.json.encode(reply or {}))
            except RequestFailed as failure:
                answer.fail(failure.code, failure.description, failure.data)
            except Exception:
                _log.exception("the handler of %s failed", request.op)
                answer.fail("internal", "the handler failed")
        # Nothing was awaited since the last look: a request that comes now starts another task.
        self._answering = None


def decode(data: bytes) -> Json:
    """Any JSON object; numbers that msgspec's decoder can't hold are read by Python's."""
    try:
        decoded: Json = msgspec.json.decode(data)
    except msgspec.DecodeError:
        decoded = json.loads(data, parse_int=_integer)
    return decoded


def _integer(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:
        # More digits than Python converts to an int; a float becomes infinity, as for 1e400.
        return float(digits)
