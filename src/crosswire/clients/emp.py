"""EMP for asyncio programs: ask, and answer what the other side asks.

async with EmpClient("127.0.0.1", 5040) as client:
    reply = await client.request("$echo", {"hello": "world"})
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from crosswire.clients.dial import Backoff, StayingClient, dial, within
from crosswire.clients.far_end import FarEnd
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

_log = logging.getLogger("crosswire.clients.emp")


class EmpPeer(FarEnd):
    """The far end of one connection, whoever dialled. Requests go both ways and stay in order."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        super().__init__()
        self._handlers = handlers
        self._waiting: dict[int, asyncio.Future[ResponseReceived]] = {}
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
        answer: Json = msgspec.json.decode(reply)
        return answer

    async def request_json(self, op: str, data: bytes, *, timeout_s: float | None = 30.0) -> bytes:
        """Like `request`, with JSON objects that stay bytes."""
        try:
            identifier = self.connection.send_request(op, data)
        except LocalProtocolError as error:
            raise ConnectionLost(f"{op} was not sent: {self.why(error)}") from None
        self.session.wake()
        future: asyncio.Future[ResponseReceived] = asyncio.get_running_loop().create_future()
        self._waiting[identifier] = future
        try:
            response = await within(timeout_s, f"no response to {op}", future)
        finally:
            self._waiting.pop(identifier, None)
        if not response.succeeded:
            raise RequestFailed(response.code, response.description, data=response.data)
        return response.data

    # Called by the session.

    def handle_events(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case ResponseReceived(id=identifier):
                    future = self._waiting.get(identifier)
                    if future is not None and not future.done():
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
                reply = await handler(msgspec.json.decode(asked.data))
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


class EmpClient(StayingClient[EmpPeer]):
    """A client that stays connected; operations in `handlers` answer what the server asks.

    A request that is made while there is no connection waits for the next one, within its timeout.
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

    async def request(
        self, op: str, data: Json | None = None, *, timeout_s: float | None = 30.0
    ) -> Json:
        """As `EmpPeer.request`."""
        peer = await self._redialler.peer(timeout_s)
        return await peer.request(op, data, timeout_s=timeout_s)

    async def request_json(self, op: str, data: bytes, *, timeout_s: float | None = 30.0) -> bytes:
        """As `EmpPeer.request_json`."""
        peer = await self._redialler.peer(timeout_s)
        return await peer.request_json(op, data, timeout_s=timeout_s)

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
        return peer


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
