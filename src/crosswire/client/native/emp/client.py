"""EMP for asyncio programs: ask, and answer what the other side asks.

async with EmpClient("127.0.0.1", 5040) as client:
    reply = await client.request("$echo", {"hello": "world"})
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from crosswire.client.native.dial import Backoff, StayingClient, dial, within
from crosswire.client.native.remote import RemotePeer
from crosswire.client.native.resubscribe import (
    KeptSubscription,
    KeptSubscriptions,
    SubscriptionNumbers,
)
from crosswire.errors import (
    ConnectionLost,
    LocalProtocolError,
    RequestFailed,
)
from crosswire.session import Session
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, ConnectionOpened, Event
from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emp.events import RequestReceived, ResponseReceived
from crosswire.wire.emp.frames import EmpLimits

__all__ = ["EmpClient", "EmpPeer", "EmpServer", "Handler", "Json"]

Json = dict[str, Any]
Handler = Callable[[Json], Awaitable[Json | None]]
"""Answers an operation. Raise RequestFailed(code, description) to answer with a failure."""

_log = logging.getLogger("crosswire.client.native.emp")


class EmpPeer(RemotePeer):
    """The far end of one connection, whoever dialled. Requests go both ways and stay in order."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        super().__init__()
        self.numbers = SubscriptionNumbers()
        self._handlers = handlers
        self._waiting: dict[int, asyncio.Future[ResponseReceived]] = {}
        self._joining: dict[int, Callable[[bytes], None]] = {}
        self._to_answer: deque[RequestReceived] = deque()
        self._answering: asyncio.Task[None] | None = None

    @property
    def connection(self) -> EmpConnection:
        connection = self.session.connection
        assert isinstance(connection, EmpConnection)
        return connection

    async def request(
        self, op: str, data: Json | None = None, *, timeout_s: float | None = 30.0
    ) -> Json:
        """The data of the response.

        Raises RequestFailed for a failure, RequestTimeout, or ConnectionLost: then nobody knows
        whether it was carried out, and it is not repeated.
        """
        reply = await self.request_json(op, msgspec.json.encode(data or {}), timeout_s=timeout_s)
        return _decode(reply)

    async def request_json(
        self,
        op: str,
        data: bytes,
        *,
        timeout_s: float | None = 30.0,
        succeeded: Callable[[bytes], None] | None = None,
    ) -> bytes:
        """Like `request`, with JSON objects that stay bytes.

        `succeeded` is given the response before anything that came after it is looked at.
        """
        if op == "$unsubscribe" and self.numbers.differ:
            data = self._with_our_number(data)
        try:
            identifier = self.connection.send_request(op, data)
        except LocalProtocolError as error:
            raise ConnectionLost(f"{op} was not sent: {self.why(error)}") from None
        self.session.wake()
        future: asyncio.Future[ResponseReceived] = asyncio.get_running_loop().create_future()
        self._waiting[identifier] = future
        if succeeded is not None:
            self._joining[identifier] = succeeded
        try:
            response = await within(timeout_s, f"no response to {op}", future)
        finally:
            self._waiting.pop(identifier, None)
            self._joining.pop(identifier, None)
        if not response.succeeded:
            raise RequestFailed(response.code, response.description, data=response.data)
        return response.data

    def _with_our_number(self, data: bytes) -> bytes:
        """What names a subscription by the program's number names it by this connection's."""
        asked = msgspec.json.decode(data)
        number = asked.get("subscription") if isinstance(asked, dict) else None
        if not isinstance(number, int):
            return data
        return msgspec.json.encode(asked | {"subscription": self.numbers.for_connection(number)})

    # Called by the session.

    def handle_events(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case ResponseReceived(id=identifier):
                    future = self._waiting.get(identifier)
                    if future is not None and not future.done():
                        if event.succeeded and identifier in self._joining:
                            self._joining[identifier](event.data)
                        future.set_result(event)
                case RequestReceived():
                    self._to_answer.append(event)
                case ConnectionOpened():
                    self.opened.set_result(None)
                case ConnectionClosed() | ConnectionFailed():
                    self.finish(event)
        if self._to_answer and self._answering is None:
            self._answering = asyncio.create_task(self._answer())

    def handle_drain(self) -> None:
        """Requests wait for their responses, which bounds what is under way."""

    def finish(self, end: ConnectionClosed | ConnectionFailed) -> None:
        self.end = end
        lost = ConnectionLost(f"{self.why()}; what was under way may or may not have been done")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(lost)
        if self._answering is not None:
            self._answering.cancel()
        super().finish(end)

    async def _answer(self) -> None:
        """EMP wants a request answered before the next is begun, so one task does them all."""
        while self._to_answer:
            asked = self._to_answer.popleft()
            try:
                handler = self._handlers.get(asked.op)
                if handler is None:
                    raise RequestFailed("unknown_op", f"nobody answers {asked.op}")
                data = _decode(asked.data)
                if asked.op == "$deliver" and {"subscription", "id"} <= data.keys():
                    data["subscription"] = self.numbers.for_program(
                        data["subscription"], data["id"]
                    )
                reply = await handler(data)
                self.connection.send_success(asked.id, msgspec.json.encode(reply or {}))
            except RequestFailed as failure:
                self.connection.send_failure(
                    asked.id, failure.code, failure.description, failure.data
                )
            except Exception:
                _log.exception("the handler of %s failed", asked.op)
                self.connection.send_failure(asked.id, "internal", "the handler failed")
            self.session.wake()
        self._answering = None


def _decode(data: bytes) -> Json:
    """Any JSON object. Numbers that the fast decoder has no room for are JSON all the same."""
    try:
        decoded: Json = msgspec.json.decode(data)
    except msgspec.DecodeError:
        decoded = json.loads(data, parse_int=_integer)
    return decoded


def _integer(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:
        # Longer than Python converts: as large as 1e400 is.
        return float(digits)


class _SubscribeRequest(msgspec.Struct, frozen=True):
    """What of a `$subscribe` decides how it is made again."""

    destination: str = ""
    name: str = ""
    start: str | int = msgspec.field(default="", name="from")


class _SubscribeResult(msgspec.Struct, frozen=True):
    subscription: int


class _ServiceNames(msgspec.Struct, frozen=True):
    services: list[str]


class EmpClient(StayingClient[EmpPeer]):
    """A client that stays connected; operations in `handlers` answer what the server asks.

    A request that is made while there is no connection waits for the next one, within its timeout.
    What `$authenticate`, `$subscribe` and `$serve` achieved is asked for again on every new
    connection, before anything else: deliveries and calls go on, with the same `subscription`. If
    the hub refuses that, the client ends, and `ended` has the reason.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        handlers: Mapping[str, Handler] | None = None,
        limits: EmpLimits | None = None,
        backoff: Backoff | None = None,
        connect_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(self._connect, backoff=backoff)
        self._host = host
        self._port = port
        self._tls = tls
        self._handlers = handlers or {}
        self._limits = limits
        self._connect_timeout_s = connect_timeout_s
        self._credentials: bytes | None = None
        self._subscriptions = KeptSubscriptions()
        self._services: dict[str, None] = {}

    async def request(
        self, op: str, data: Json | None = None, *, timeout_s: float | None = 30.0
    ) -> Json:
        """As `EmpPeer.request`."""
        reply = await self.request_json(op, msgspec.json.encode(data or {}), timeout_s=timeout_s)
        return _decode(reply)

    async def request_json(self, op: str, data: bytes, *, timeout_s: float | None = 30.0) -> bytes:
        """As `EmpPeer.request_json`."""
        peer = await self._redialler.peer(timeout_s)
        if op == "$subscribe":
            return await self._subscribe(peer, data, timeout_s)
        reply = await peer.request_json(op, data, timeout_s=timeout_s)
        if op == "$authenticate":
            self._credentials = data
        elif op == "$serve":
            names = msgspec.json.decode(data, type=_ServiceNames).services
            self._services |= dict.fromkeys(names)
        elif op == "$unsubscribe":
            number = msgspec.json.decode(data, type=_SubscribeResult).subscription
            self._subscriptions.by_number.pop(number, None)
        return reply

    async def _subscribe(self, peer: EmpPeer, data: bytes, timeout_s: float | None) -> bytes:
        """Keep what was asked for; gives the reply with the program's number."""
        kept: list[KeptSubscription] = []

        def keep(reply: bytes) -> None:
            try:
                number = msgspec.json.decode(reply, type=_SubscribeResult).subscription
                asked = msgspec.json.decode(data, type=_SubscribeRequest)
            except msgspec.MsgspecError:
                return  # a server that is no hub, and means something else by it
            kept.append(
                self._subscriptions.add(
                    number,
                    data,
                    destination=asked.destination,
                    name=asked.name,
                    start=str(asked.start),
                )
            )
            peer.numbers.join(number, kept[0])

        reply = await peer.request_json("$subscribe", data, timeout_s=timeout_s, succeeded=keep)
        if not kept:
            return reply
        return msgspec.json.encode(msgspec.json.decode(reply) | {"subscription": kept[0].number})

    async def _connect(self) -> EmpPeer:
        peer = EmpPeer(self._handlers)
        await dial(
            self._host,
            self._port,
            lambda now: EmpConnection("client", now, limits=self._limits),
            peer,
            tls=self._tls,
            timeout_s=self._connect_timeout_s,
        )
        await peer.opened
        try:
            await self._restore(peer)
        except BaseException:
            # Half restored is of no use to anybody, and its subscriptions would hold messages.
            await peer.close()
            raise
        return peer

    async def _restore(self, peer: EmpPeer) -> None:
        """Ask again for what earlier connections had. Raises ClientError."""
        timeout_s = self._connect_timeout_s
        if self._credentials is not None:
            await peer.request_json("$authenticate", self._credentials, timeout_s=timeout_s)
        if self._services:
            await peer.request("$serve", {"services": list(self._services)}, timeout_s=timeout_s)
        for kept in list(self._subscriptions.by_number.values()):
            asked = msgspec.json.decode(kept.request)
            start = kept.start_again()
            if start != kept.start:
                asked["from"] = start

            def join(reply: bytes, kept: KeptSubscription = kept) -> None:
                peer.numbers.join(
                    msgspec.json.decode(reply, type=_SubscribeResult).subscription, kept
                )

            await peer.request_json(
                "$subscribe", msgspec.json.encode(asked), timeout_s=timeout_s, succeeded=join
            )


class EmpServer:
    """Accepts connections and answers with `handlers`; `peers` are those connected now."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        tls: ssl.SSLContext | None = None,
        limits: EmpLimits | None = None,
    ) -> None:
        self._handlers = handlers
        self._tls = tls
        self._limits = limits
        self._server: asyncio.Server | None = None
        self.port = 0
        self.peers: set[EmpPeer] = set()

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Open the port, and give it; 0 takes a free one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, host, port, ssl=self._tls)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self.port

    async def close(self) -> None:
        """Stop listening and say bye to everybody."""
        if self._server is not None:
            self._server.close()
        for peer in list(self.peers):
            await peer.close()

    def _accept(self) -> Session:
        peer = EmpPeer(self._handlers)

        def connect(now: float) -> EmpConnection:
            self.peers.add(peer)
            peer.ended.add_done_callback(lambda _: self.peers.discard(peer))
            return EmpConnection("server", now, limits=self._limits)

        return Session(connect, peer)
