"""The HTTP listener: uvicorn's protocol on the hub's event loop, with the hub's own limits.

Only uvicorn's connection class is used: its server would install signal handlers, and stop before
the hub has drained.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from typing import Any, ClassVar, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from crosswire.access import ANONYMOUS
from crosswire.budget import MemoryAccount
from crosswire.config import Address
from crosswire.errors import ServiceUnavailable
from crosswire.gateways.certificates import read_certificate
from crosswire.logs import log_event
from crosswire.server.listener import cannot_listen
from crosswire.server.server import Server
from crosswire.server.tls_acceptor import TlsAcceptor
from crosswire.web.app import App
from crosswire.wire.registry import recognize

__all__ = ["WebListener"]

# Limits against peers that send slowly, or nothing, to occupy connections.
_HEAD_S: Final = 5.0
_REQUEST_S: Final = 30.0
_KEEP_ALIVE_S: Final = 15
_STALL_S: Final = 10.0
_FINISH_S: Final = 1.0
_REQUESTS_S: Final = 5.0
"""How long a hub that stops waits for requests: most end within this time of their own."""
_POLL_S: Final = 0.01
_HEAD_BYTES: Final = 32 * 1024
_HEAD_LINES: Final = 200
_END_OF_HEAD: Final = re.compile(rb"\n\r?\n")
_FIRST_BYTES: Final = 512
"""Enough to recognize another protocol."""

_log = logging.getLogger("crosswire.web")


class WebListener:
    """Serves the API once it is open; its connections have slots of their own.

    The one that is made is `http`; `named` gives others for the same application.
    """

    def __init__(self, server: Server) -> None:
        self.address = Address("", 0)
        self.app = App(server)
        self._name = "http"
        self._tls: ssl.SSLContext | None = None
        self._server = server
        self._state = ServerState()
        self._listening: asyncio.Server | TlsAcceptor | None = None
        self._config = uvicorn.Config(
            self.app,
            http=H11Protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            h11_max_incomplete_event_size=_HEAD_BYTES,
        )
        self._config.load()
        # Its warnings about invalid requests lack the peer's address: `send_400_response` logs it.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)

    def named(self, name: str, tls: ssl.SSLContext | None) -> WebListener:
        """A listener of this name for the same application."""
        twin = copy(self)
        twin._name, twin._tls, twin._state = name, tls, ServerState()
        return twin

    async def open(self, address: Address) -> Address:
        """Listen; returns the address with the port that was taken. Raises ConfigError."""
        loop = asyncio.get_running_loop()
        make = functools.partial(_HttpConnection, self._config, self._state, self._server)
        context = self._server.context
        try:
            if self._tls is not None:
                failed = functools.partial(context.count, "failed", "http", "TlsHandshake")
                self._listening = TlsAcceptor(make, self._tls, context.handshakes, failed)
                port = await self._listening.open(address.host, address.port)
            else:
                self._listening = await loop.create_server(
                    make, address.host, address.port, backlog=1024
                )
                port = self._listening.sockets[0].getsockname()[1]
        except OSError as error:
            raise cannot_listen(self._name, address, error) from error
        self.address = Address(address.host, port)
        return self.address

    def close(self) -> None:
        """Accept no more connections, cancel replays and analyses; responses in progress are
        completed."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        self.app.requests.close()
        self.app.replays.cancel_all()
        self.app.analyses.cancel_all()
        for connection in list(self._state.connections):
            connection.shutdown()

    async def end_requests(self, is_hurried: Callable[[], bool]) -> None:
        """Wait for the requests in progress, a few seconds at most, unless `is_hurried`; what is
        left of them is refused. None of them uses the store any more when this returns."""
        for wake in list(self._server.context.on_reconfigured):
            # Live streams, which end with the hub.
            wake()
        await self.app.requests.end(_REQUESTS_S, is_hurried)
        await self.app.replays.finish()

    async def finish(self) -> None:
        """Wait for the last bytes of responses, a second at most, and abort the connections."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _FINISH_S
        while self._state.tasks and loop.time() < deadline:
            await asyncio.sleep(_POLL_S)
        await self.app.analyses.finish()
        for connection in list(self._state.connections):
            connection.transport.abort()

    def drop(self) -> None:
        """Close all connections now, and leave requests without a response."""
        self.app.replays.cancel_all()
        self.app.analyses.cancel_all()
        for connection in list(self._state.connections):
            connection.transport.abort()
        for task in list(self._state.tasks):
            task.cancel()


class _LimitedConnection(h11.Connection):
    """Measures a head before it is parsed. h11 itself limits only what is incomplete: a head that
    comes with one read may have as many bytes as that, and a field in each five of them."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Raises RemoteProtocolError."""
        if self.their_state is h11.IDLE:
            received = self.trailing_data[0]
            end = _END_OF_HEAD.search(received, 0, _HEAD_BYTES)
            if end is None and len(received) > _HEAD_BYTES:
                raise h11.RemoteProtocolError("the head is too long", error_status_hint=431)
            if received.count(b"\n", 0, _HEAD_BYTES if end is None else end.start()) > _HEAD_LINES:
                raise h11.RemoteProtocolError("the head has too many fields", error_status_hint=431)
        return super().next_event()


class _HttpConnection(H11Protocol):
    """One connection. It is aborted if a head or a request takes too long. If there are too many,
    the one that has been without a request for longest makes room: a peer that only connects keeps
    nobody out."""

    protocol: ClassVar[str] = "http"

    def __init__(self, config: uvicorn.Config, state: ServerState, server: Server) -> None:
        super().__init__(config, state, {})
        self.conn = _LimitedConnection(h11.SERVER, _HEAD_BYTES)
        self._context = server.context
        self._host = ""
        self._lost = False
        self._watch: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._account: MemoryAccount | None = None
        self._body_bytes = 0
        self._unsent_bytes = 0
        self._idle_since = 0.0
        self._is_refused = False
        self._first_bytes = b""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Requests find it in their state. Whom it identifies is judged for each of them.
        self.app_state["certificate"] = read_certificate(transport)
        self.app_state["refused"] = self._on_refused
        self.app_state["abort"] = transport.abort
        self.app_state["identified"] = self._on_identified
        self.app_state["streaming"] = self._on_streaming
        self.app_state["stored"] = self._on_stored
        self.app_state["check_room"] = self._check_room
        self.app_state["hold"] = self._hold
        peer = transport.get_extra_info("peername")
        self._host = str(peer[0]) if peer else ""
        with suppress(OSError):  # the peer has reset it already
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        context = self._context
        context.count("connections", "http")
        if context.http_slots.is_full:
            self._make_room()
        if not context.http_slots.enter(self, self._host):
            context.count("rejected", "http")
            transport.abort()
            return
        owner = context.owner_of(ANONYMOUS, self._host)
        if not self._claim_slot(owner):
            return
        self._account = context.budget.open(self, owner)
        self._idle_since = self.loop.time()
        self._expect(_HEAD_S)

    def _claim_slot(self, owner: str | None) -> bool:
        """Its slot counts for its user, or its address; the client is disconnected if others need
        it more."""
        context = self._context
        if owner and not context.http_slots.assign(self, owner, context.config.limits.share):
            context.count("rejected", "http")
            context.http_slots.leave(self)
            self.transport.abort()
            return False
        return True

    def _on_identified(self, principal: str) -> None:
        """A request is this user's: its body counts for the user's share of the memory."""
        if self._account is not None and self._account.is_open:
            owner = self._context.owner_of(principal, self._host)
            if self._claim_slot(owner):
                self._account.move(owner)

    def _on_streaming(self) -> None:
        """The response is a live stream, which has no end of its own."""
        self._expect(None)

    def _on_stored(self, count: int) -> None:
        """Bytes of the body are in a file, and no longer in memory."""
        if self._account is not None and self._account.is_open:
            self._account.add(-min(count, self._body_bytes))
            self._body_bytes -= min(count, self._body_bytes)

    def _check_room(self, size_bytes: int) -> None:
        """Raises ServiceUnavailable if a response of this size is too much: its user does not read
        others, for example."""
        if self._account is not None and not self._account.has_room(size_bytes):
            self._context.count("rejected", "http", "memory")
            raise ServiceUnavailable("too much waits to be read already: retry later")

    def _hold(self, change_bytes: int) -> None:
        """A handler holds this much more of its response, or less. Raises ServiceUnavailable."""
        if change_bytes > 0:
            self._check_room(change_bytes)
        if self._account is not None:
            self._account.add(change_bytes)

    def _note_unsent(self, size_bytes: int) -> None:
        """This many bytes of the response are not read."""
        change_bytes, self._unsent_bytes = size_bytes - self._unsent_bytes, size_bytes
        if self._account is not None:
            self._account.add(change_bytes)

    def _on_refused(self) -> None:
        """A request without valid credentials waits for its answer: it keeps nobody out either."""
        self._is_refused = True

    def _make_room(self) -> None:
        idle = [
            each
            for each in self._context.http_slots.occupants()
            if isinstance(each, _HttpConnection) and (each._is_idle or each._is_refused)
        ]
        if idle:
            longest = min(idle, key=lambda each: each._idle_since)
            self._context.count("turned_away", "http", "room")
            self._context.http_slots.leave(longest)
            longest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._end_stall()
        self._context.http_slots.leave(self)
        if self._account is not None:
            self._account.close()
        self._expect(None)
        super().connection_lost(exc)

    @property
    def is_gone(self) -> bool:
        return self._lost

    def data_received(self, data: bytes) -> None:
        was_idle = self._is_idle
        if not self._first_bytes:
            self._first_bytes = bytes(data[:_FIRST_BYTES])
        super().data_received(data)
        if self._account is not None and not self._is_idle:
            # What a handler has made of the body is its own; this is what the body takes.
            self._body_bytes += len(data)
            self._account.add(len(data))
        if not self._is_idle:
            self._expect(_REQUEST_S)
        elif was_idle and self._watch is None:
            self._expect(_HEAD_S)

    def pause_writing(self) -> None:
        """The client does not read: it may do so for a while, since a response occupies memory, and
        one of the log a reader's slot."""
        super().pause_writing()
        self._note_unsent(self.transport.get_write_buffer_size())
        if self._stall is None:
            self._stall = self.loop.call_later(_STALL_S, self._too_slow)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note_unsent(0)
        self._end_stall()

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def on_response_complete(self) -> None:
        self._expect(None)
        self._is_refused = False
        self._idle_since = self.loop.time()
        if self._account is not None:
            self._account.add(-self._body_bytes)
            self._body_bytes = 0
        super().on_response_complete()
        if not self._is_idle:
            self._expect(_REQUEST_S)

    def send_400_response(self, msg: str) -> None:
        self._context.count("failed", "http", "MalformedFrame")
        description = msg
        if (found := recognize(self._first_bytes)) not in (None, "HTTP"):
            description += f" The peer speaks {found}: it may have the wrong port"
        log_event(_log, logging.WARNING, "failed", address=self._host, description=description)
        super().send_400_response(msg)

    # Memory.

    def measure_memory(self) -> None:
        """What is sent and not read; the rest is reported as it arrives, and given back with the
        response."""
        if self._unsent_bytes and not self._lost:
            self._note_unsent(self.transport.get_write_buffer_size())

    def restrain(self, restrained: bool) -> None:
        """Read nothing more of the body, or continue."""
        if restrained:
            self._context.count("restrained", "http")
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()

    def evict(self) -> None:
        """Close the connection: HTTP has no goodbye in the middle of a request."""
        self._context.count("evicted", "http")
        self.transport.abort()

    @property
    def _is_idle(self) -> bool:
        """Between requests, or before the first."""
        return self.cycle is None or self.cycle.response_complete

    def _expect(self, within_s: float | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if within_s is not None and not self.transport.is_closing():
            self._watch = self.loop.call_later(within_s, self._too_slow)

    def _too_slow(self) -> None:
        self._context.count("failed", "http", "PeerTimeout")
        self.transport.abort()
