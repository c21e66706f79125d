"""Peers that send whatever a test wants, as much of it at once as it wants, and keep what comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, TypeVar

import msgspec

from crosswire.client.native.dial import dial
from crosswire.server.server import Server
from crosswire.session import Session
from crosswire.wire.contract import Connection, ConnectionClosed, ConnectionFailed, Event
from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emp.events import ResponseReceived
from crosswire.wire.emqp.connection import EmqpConnection
from crosswire.wire.epoxy.connection import EpoxyConnection
from crosswire.wire.micromsg2.connection import MicroMsg2Connection
from crosswire.wire.micromsg2.extensions import PUB_SUB, Offer, batch_ack
from crosswire.wire.micromsg2.frames import Extension
from crosswire.wire.relink.connection import RelinkConnection
from crosswire.wire.relink.frames import RelinkLimits
from crosswire.wire.relink.handshake import LinkTerms
from crosswire.wire.relink.link import Link
from tests.gateways.conftest import port_of

E = TypeVar("E", bound=Event)

WAIT_S = 30.0
_numbers = count(1)


class Peer:
    """A connection in the role of who dials. `react` is called with every event."""

    session: Session

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.end: Event | None = None
        self.react: Callable[[Event], None] | None = None
        self._news = asyncio.Event()

    @property
    def wire(self) -> Any:
        return self.session.connection

    def handle_events(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, ConnectionClosed | ConnectionFailed):
                self.end = event
            else:
                self.events.append(event)
                if self.react is not None:
                    self.react(event)
        self._news.set()

    def handle_drain(self) -> None:
        pass

    def all(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for what the hub sends; the end of the connection is a failure."""
        async with asyncio.timeout(WAIT_S):
            while not holds():
                assert self.end is None, self.end
                self._news.clear()
                await self._news.wait()

    async def several(self, kind: type[E], number: int) -> list[E]:
        """Wait for a number of a kind; gives them, and forgets all that came."""
        await self.until(lambda: len(self.all(kind)) >= number)
        found = self.all(kind)
        self.events.clear()
        return found

    # As an EMP peer.

    async def ask(self, op: str, **data: Any) -> ResponseReceived:
        self.wire.send_request(op, msgspec.json.encode(data))
        self.session.wake()
        return (await self.several(ResponseReceived, 1))[0]


@asynccontextmanager
async def dialled(
    server: Server, listener: str, connect: Callable[[float], Connection]
) -> AsyncIterator[Peer]:
    peer = Peer()
    session = await dial("127.0.0.1", port_of(server, listener), connect, peer)
    await peer.until(lambda: bool(peer.events))
    peer.events.clear()
    try:
        yield peer
    finally:
        session.transport.abort()
        async with asyncio.timeout(WAIT_S):
            await session.gone


def emp(server: Server) -> Any:
    return dialled(server, "emp", lambda now: EmpConnection("client", now))


def epoxy(server: Server) -> Any:
    return dialled(server, "epoxy", lambda now: EpoxyConnection("client", now))


def micromsg2(server: Server, *, acks: int | None = None) -> Any:
    given = (Extension(PUB_SUB), *((batch_ack(acks),) if acks else ()))
    offer = Offer(required=given, supported=frozenset(each.name for each in given))
    return dialled(server, "micromsg2", lambda now: MicroMsg2Connection("client", now, offer=offer))


def relink(server: Server, endpoint: str, *, id_size: int = 1) -> Any:
    limits = RelinkLimits()
    terms = LinkTerms(endpoint=endpoint, connector_id_size=id_size, listener_id_size=id_size)
    link = Link("connector", terms, limits=limits)
    return dialled(
        server, "relink", lambda now: RelinkConnection("connector", now, limits=limits, link=link)
    )


def emqp(server: Server, role: str, *, queues: Any = ()) -> Any:
    number = next(_numbers)
    door = {"client": "clients", "worker": "workers", "publisher": "publishers"}[role]
    return dialled(
        server,
        f"emqp-{door}",
        lambda now: EmqpConnection(
            role,
            now,
            queues=queues,
            identity=b"peer-%d" % number,
            next_id=lambda: f"m{next(_numbers)}",
        ),
    )
