"""The far end of an EMP connection: requests in both directions, in order."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from crosswire.client.native.remote import PendingReplies, RemotePeer
from crosswire.client.native.resubscribe import SubscriptionNumbers
from crosswire.errors import ConnectionLost, LocalProtocolError, RequestFailed
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, ConnectionOpened, Event
from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emp.events import RequestReceived, ResponseReceived

__all__ = ["EmpPeer", "Handler", "Json", "decode"]

Json = dict[str, Any]
Handler = Callable[[Json], Awaitable[Json | None]]
"""Answers an operation. Raise RequestFailed(code, description) to answer with a failure."""

_log = logging.getLogger("crosswire.client.native.emp")


class EmpPeer(RemotePeer):
    """The far end of one connection, in either role. Requests go both ways and stay in order."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        super().__init__()
        self.numbers = SubscriptionNumbers()
        self._handlers = handlers
        self._replies: PendingReplies[ResponseReceived] = PendingReplies()
        self._to_answer: deque[RequestReceived] = deque()
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
        if op == "$unsubscribe" and self.numbers.differ:
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
                    self._to_answer.append(event)
                case ConnectionOpened():
                    self.opened.set_result(None)
                case ConnectionClosed() | ConnectionFailed():
                    self.finish(event)
        if self._to_answer and self._answering is None:
            self._answering = asyncio.create_task(self._answer())

    def finish(self, end: ConnectionClosed | ConnectionFailed) -> None:
        """Fail pending requests, and stop answering those of the peer."""
        self.end = end
        self._replies.fail(self.lost())
        if self._answering is not None:
            self._answering.cancel()
        super().finish(end)

    async def _answer(self) -> None:
        """Answer requests in order: EMP asks to finish one before the next is begun."""
        while self._to_answer:
            request = self._to_answer.popleft()
            try:
                handler = self._handlers.get(request.op)
                if handler is None:
                    raise RequestFailed("unknown_op", f"nobody answers {request.op}")
                data = decode(request.data)
                if request.op == "$deliver" and {"subscription", "id"} <= data.keys():
                    data["subscription"] = self.numbers.for_program(
                        data["subscription"], data["id"]
                    )
                reply = await handler(data)
                self.connection.send_success(request.id, msgspec.json.encode(reply or {}))
            except RequestFailed as failure:
                self.connection.send_failure(
                    request.id, failure.code, failure.description, failure.data
                )
            except Exception:
                _log.exception("the handler of %s failed", request.op)
                self.connection.send_failure(request.id, "internal", "the handler failed")
            self.session.wake()
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
