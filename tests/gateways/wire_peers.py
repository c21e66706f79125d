"""Peers made of a wire connection and a real socket, which can end in any way; and what a hub holds
for its peers, to compare before and after."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from crosswire.bond import marshal
from crosswire.gateways.emqp.broker import Broker
from crosswire.gateways.epoxy.messages import PUBLICATION, SERVICES, SUBSCRIPTION
from crosswire.gateways.gateway import Gateway
from crosswire.gateways.relink.links import Links
from crosswire.server.server import Server
from crosswire.wire.contract import Connection
from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emqp.connection import EmqpConnection
from crosswire.wire.emqp.states import State as EmqpState
from crosswire.wire.epoxy.connection import EpoxyConnection
from crosswire.wire.micromsg2.connection import MicroMsg2Connection
from crosswire.wire.micromsg2.extensions import Offer, batch_ack
from crosswire.wire.micromsg2.values import Extension
from crosswire.wire.relink.connection import RelinkConnection
from crosswire.wire.relink.handshake import LinkTerms
from crosswire.wire.relink.link import Link
from tests.gateways.conftest import port_of

VIOLATION = b"\xff" * 64
"""No protocol has a frame that starts so."""

Step = Callable[[Any], object]


async def until(condition: Callable[[], object], within_s: float = 3.0) -> None:
    """Wait for something that the event loop brings about."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.001)


class Held(NamedTuple):
    """What a hub holds for its peers."""

    slots: dict[str, int]
    gateways: frozenset[str]
    consumers: dict[str, int]
    subscribers: int
    providers: dict[str, int]
    calls: int
    links: frozenset[int]
    identities: int
    workers: int
    schedulers: int
    accounts: int
    memory_bytes: int
    call_bytes: int
    newcomers: int
    held_shares: int
    addresses: int

    @classmethod
    def by(cls, server: Server) -> Held:
        hub, context = server.hub, server.context
        broker, links = context.shared(Broker), context.shared(Links)
        consumers = {each.destination: len(each.consumers) for each in hub.queues()}
        for each in hub.subscriptions.all():
            consumers[each.destination] = len(each.consumers)
        return cls(
            slots=dict(context.connection_slots._by_host),
            gateways=frozenset(context.gateways),
            consumers={name: count for name, count in consumers.items() if count},
            subscribers=len(list(hub.subscriptions._subscribers)),
            providers={name: len(each) for name, each in hub.services.providers().items()},
            calls=len(hub.services._calls),
            links=frozenset(links._ends),
            identities=sum(map(len, broker.routers.values())),
            workers=len(broker.workers),
            schedulers=len(broker.schedulers),
            # One without bytes is there as long as its socket.
            accounts=sum(
                bool(account.held_bytes)
                for owner in context.budget._owners.values()
                for account in owner.accounts
            ),
            memory_bytes=context.budget.held_bytes,
            call_bytes=hub.services._bytes_share.total,
            newcomers=len(context.newcomers),
            held_shares=len(hub.turns.held),
            addresses=len(hub.holders._addresses),
        )


class Opening(NamedTuple):
    """A legal beginning: a connection, when it is open, and what it then sends."""

    name: str
    listener: str
    make: Callable[[float], Any]
    steps: Sequence[Step]
    is_open: Callable[[Any], bool] | None = None


class WirePeer:
    """The far end of a gateway, in the same event loop."""

    def __init__(self, server: Server, listener: str) -> None:
        self._server = server
        self._listener = listener
        self.received = 0
        self.events: list[Any] = []

    async def connect(
        self, connection: Connection | None = None, *, tls: ssl.SSLContext | None = None
    ) -> None:
        known = set(self._server.context.gateways)
        self.reader, self.writer = await asyncio.open_connection(
            "127.0.0.1", port_of(self._server, self._listener), ssl=tls
        )
        await until(lambda: set(self._server.context.gateways) - known)
        self.gateway: Gateway = self._server.context.gateways[
            (set(self._server.context.gateways) - known).pop()
        ]
        if connection is not None:
            self.connection = connection

    async def open(self, opening: Opening, *, tls: ssl.SSLContext | None = None) -> None:
        await self.connect(opening.make(asyncio.get_running_loop().time()), tls=tls)
        is_open = opening.is_open or (lambda _: bool(self.events))
        await self.pump(lambda: is_open(self.connection))

    async def pump(self, condition: Callable[[], object]) -> None:
        """Let both sides talk until something is so."""
        async with asyncio.timeout(10):
            while True:
                self.write(b"".join(self.connection.data_to_send()))
                self.events += self.connection.events()
                if condition():
                    return
                data = await self.reader.read(65536)
                assert data, "the hub closed the connection"
                self.received += len(data)
                self.connection.receive_data(data, asyncio.get_running_loop().time())

    def write(self, data: bytes) -> None:
        if data:
            self.writer.write(data)

    def bytes_of(self, steps: Sequence[Step]) -> bytes:
        for step in steps:
            step(self.connection)
        return b"".join(self.connection.data_to_send())

    async def write_and_be_read(self, data: bytes) -> None:
        """So that what comes next is not in the same read."""
        session = self.gateway.session
        session.read_at = never = -1.0  # not every loop's clock moves between two reads
        self.write(data)
        await until(lambda: session.read_at != never or self.gateway.left)

    async def end(self, kind: str) -> None:
        with contextlib.suppress(OSError):
            if kind == "rst":
                self.abort()
            elif kind.endswith("eof"):
                self.writer.write_eof()

    def abort(self) -> None:
        """With a RST."""
        sock = self.writer.get_extra_info("socket")
        if sock is None or sock.fileno() < 0:  # closed
            return
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


# ------------------------------------------------------------------------------- legal beginnings


def _emp(op: str, **data: Any) -> Step:
    return lambda peer: peer.send_request(op, msgspec.json.encode(data))


def _epoxy(method: str, kind: Any = None, service: str = "crosswire.Hub", **fields: Any) -> Step:
    payload = (
        b"CB\x01\x00\x00" if kind is None else marshal.marshal(kind.python_class(**fields), kind)
    )
    return lambda peer: peer.send_request(service, method, payload)


def _micromsg2(now: float) -> MicroMsg2Connection:
    wanted = (batch_ack(100), Extension("pub-sub", {}))
    return MicroMsg2Connection("client", now, offer=Offer(identity="t", optional=wanted))


def _relink(endpoint: str, **terms: Any) -> Callable[[float], RelinkConnection]:
    return lambda now: RelinkConnection(
        "connector", now, link=Link("connector", LinkTerms(endpoint=endpoint, **terms))
    )


def _emqp(role: str, name: bytes = b"") -> Callable[[float], EmqpConnection]:
    return lambda now: EmqpConnection(role, now, identity=name, queues=((10, "w"),))


def _registered(peer: EmqpConnection) -> bool:
    return peer.state is EmqpState.REGISTERED


def _emp_peer(now: float) -> EmpConnection:
    return EmpConnection("client", now)


def _epoxy_peer(now: float) -> EpoxyConnection:
    return EpoxyConnection("client", now)


def _shutdown(peer: RelinkConnection) -> None:
    peer.send_shutdown()


def _message(peer: RelinkConnection) -> None:
    peer.send_message(0, b"x")


OPENINGS = [
    Opening("emp-hello", "emp", _emp_peer, []),
    Opening("emp-queue", "emp", _emp_peer, [_emp("$subscribe", destination="queue/q")]),
    Opening("emp-topic", "emp", _emp_peer, [_emp("$subscribe", destination="topic/t")]),
    Opening("emp-named", "emp", _emp_peer, [_emp("$subscribe", destination="topic/t", name="emp")]),
    Opening("emp-serve", "emp", _emp_peer, [_emp("$serve", services=["e"])]),
    Opening("emp-call", "emp", _emp_peer, [_emp("busy", a=1), _emp("$echo", a=1)]),
    Opening(
        "emp-publish",
        "emp",
        _emp_peer,
        [_emp("$publish", destination="queue/q", text="x"), _emp("$list_ops"), _emp("nobody")],
    ),
    Opening("epoxy-config", "epoxy", _epoxy_peer, []),
    Opening(
        "epoxy-queue",
        "epoxy",
        _epoxy_peer,
        [_epoxy("Subscribe", SUBSCRIPTION, destination="queue/q")],
    ),
    Opening(
        "epoxy-named",
        "epoxy",
        _epoxy_peer,
        [_epoxy("Subscribe", SUBSCRIPTION, destination="topic/t", name="epoxy")],
    ),
    Opening("epoxy-serve", "epoxy", _epoxy_peer, [_epoxy("Serve", SERVICES, services=["x"])]),
    Opening("epoxy-call", "epoxy", _epoxy_peer, [_epoxy("", service="busy")]),
    Opening(
        "epoxy-publish",
        "epoxy",
        _epoxy_peer,
        [
            _epoxy("Publish", PUBLICATION, destination="queue/q", payload=b"x"),
            lambda peer: peer.send_event("t", "", b"CB\x01\x00\x00"),
            _epoxy("", service="nobody"),
        ],
    ),
    Opening("micromsg2-hello", "micromsg2", _micromsg2, []),
    Opening("micromsg2-queue", "micromsg2", _micromsg2, [lambda p: p.send_subscribe("queue/q")]),
    Opening("micromsg2-topic", "micromsg2", _micromsg2, [lambda p: p.send_subscribe("topic/t")]),
    Opening(
        "micromsg2-named",
        "micromsg2",
        _micromsg2,
        [lambda p: p.send_subscribe("topic/t", name="micromsg2")],
    ),
    Opening("micromsg2-serve", "micromsg2", _micromsg2, [lambda p: p.send_serve("service/m")]),
    Opening(
        "micromsg2-call",
        "micromsg2",
        _micromsg2,
        [
            lambda p: p.send_message("service/busy", b"x", {"reply-to": "reply/1"}),
            lambda p: p.send_message("service/nobody", b"x", {"reply-to": "reply/2"}),
        ],
    ),
    Opening("micromsg2-send", "micromsg2", _micromsg2, [lambda p: p.send_message("queue/q", b"x")]),
    Opening("relink-consume", "relink", _relink("queue/q?consume"), []),
    Opening("relink-consume-shutdown", "relink", _relink("queue/q?consume"), [_shutdown]),
    Opening("relink-consume-message", "relink", _relink("queue/q?consume"), [_message]),
    Opening("relink-topic", "relink", _relink("topic/t?subscribe"), []),
    Opening("relink-topic-shutdown", "relink", _relink("topic/t?subscribe"), [_shutdown]),
    Opening("relink-named", "relink", _relink("topic/t?subscribe&name=r"), [_shutdown]),
    Opening("relink-produce", "relink", _relink("queue/q"), [_message]),
    Opening("relink-produce-shutdown", "relink", _relink("queue/q"), [_message, _shutdown]),
    Opening(
        "relink-transact",
        "relink",
        _relink("queue/q", connector_transactions=True),
        [_message, lambda peer: peer.send_commit(0), _message],
    ),
    Opening(
        "relink-transact-shutdown",
        "relink",
        _relink("queue/q", connector_transactions=True),
        [_message, lambda peer: peer.send_commit(0), _shutdown],
    ),
    Opening("relink-call", "relink", _relink("service/busy"), [_message]),
    Opening("relink-call-shutdown", "relink", _relink("service/busy"), [_message, _shutdown]),
    Opening(
        "relink-call-close",
        "relink",
        _relink("service/nobody"),
        [_message, lambda p: p.send_close(0)],
    ),
    Opening("relink-serve", "relink", _relink("service/r?serve"), []),
    Opening("relink-serve-shutdown", "relink", _relink("service/r?serve"), [_shutdown]),
    Opening("relink-refused", "relink", lambda now: _relink("queue/q?consume")(now), [_shutdown]),
    Opening(
        "emqp-status",
        "emqp-admin",
        _emqp("admin"),
        [lambda p: p.send_admin("STATUS"), lambda p: p.send_admin("ROUTER_SHOW_WORKERS")],
    ),
    Opening(
        "emqp-request",
        "emqp-clients",
        _emqp("client", b"named"),
        [
            lambda p: p.send_request("q", "guarantee", b"x"),
            lambda p: p.send_request("q", "", b"x"),
            lambda p: p.send_request("busy", "reply-requested", b"x"),
        ],
    ),
    Opening(
        "emqp-schedule",
        "emqp-clients",
        _emqp("client"),
        [lambda p: p.send_schedule("q", "", b'["run", {}]', interval_s=3600.0)],
    ),
    Opening("emqp-scheduler", "emqp-clients", _emqp("scheduler"), [], _registered),
    Opening(
        "emqp-worker",
        "emqp-workers",
        _emqp("worker", b"named"),
        [lambda p: p.send_ready(), lambda p: p.send_reply(b"late", "unknown")],
        _registered,
    ),
    Opening(
        "emqp-worker-leaves", "emqp-workers", _emqp("worker"), [lambda p: p.leave()], _registered
    ),
    Opening(
        "emqp-publish", "emqp-publishers", _emqp("publisher"), [lambda p: p.send_publish("t", b"x")]
    ),
    Opening(
        "emqp-subscribe", "emqp-subscribers", _emqp("subscriber"), [lambda p: p.send_subscribe("t")]
    ),
]
"""At least one for everything that a peer can be to the hub."""

FIRST_BYTES = [b"", b"\x00", b"GET / HTTP/1.1\r\n\r\n", bytes(64), VIOLATION]


def relink_hello(endpoint: str) -> bytes:
    """What a Relink connector sends that does not wait for the listener's version."""
    connection = _relink(endpoint)(0.0)
    first = b"".join(connection.data_to_send())
    connection.receive_data(bytes(8), 0.0)
    return first + b"".join(connection.data_to_send())


def total(counters: Counter[tuple[str, ...]], *prefix: str) -> int:
    return sum(count for key, count in counters.items() if key[: len(prefix)] == prefix)
