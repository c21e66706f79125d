"""TLS handshakes have turns, whatever pieces they arrive in, and what follows them is served."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from crosswire.gateways.slots import PassingSockets
from crosswire.server import tls_acceptor
from crosswire.server.tls_acceptor import TlsAcceptor
from tests.conftest import TlsPair

PEERS = 24
PATIENCE_S = 20


class Site:
    """A listener whose connections echo; it counts those that are made in one turn."""

    def __init__(self, tls: TlsPair) -> None:
        self.failures = 0
        self.made: Counter[int] = Counter()
        self._turn = 0
        self.acceptor = TlsAcceptor(lambda: Echo(self), tls.server, PassingSockets(100), self._fail)
        self.port = 0
        self.transports: list[asyncio.Transport] = []
        self.received: list[bytes] = []
        self._peers: list[Peer] = []

    async def connect(self, context: ssl.SSLContext) -> Peer:
        peer = Peer(context)
        self._peers.append(peer)
        await peer.connect(self.port)
        return peer

    async def close(self) -> None:
        self.acceptor.close()
        for transport in self.transports:
            transport.abort()
        for peer in self._peers:
            peer.writer.transport.abort()
        await asyncio.sleep(0.05)  # loops close sockets in later turns

    async def open(self) -> None:
        self.port = await self.acceptor.open("127.0.0.1", 0)
        self._count()

    def _count(self) -> None:
        self._turn += 1
        asyncio.get_running_loop().call_soon(self._count)

    def _fail(self) -> None:
        self.failures += 1

    def note(self) -> None:
        self.made[self._turn] += 1


class Echo(asyncio.Protocol):
    def __init__(self, site: Site) -> None:
        self._site = site

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._site.transports.append(transport)
        self._number = len(self._site.received)
        self._site.received.append(b"")
        self._site.note()

    def data_received(self, data: bytes) -> None:
        self._site.received[self._number] += data
        self._transport.write(data)


class Peer:
    """A TLS client that decides when it sends which bytes."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = tls.wrap_bio(self._incoming, self.outgoing, server_hostname="127.0.0.1")

    async def connect(self, port: int) -> None:
        self._reader, self.writer = await asyncio.open_connection("127.0.0.1", port)

    async def shake_hands(self, piece_bytes: int = 1 << 16) -> bytes:
        """All but the last bytes of the handshake, which are returned."""
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                await self.send(self.outgoing.read(), piece_bytes)
                await self._receive()
            else:
                return self.outgoing.read()

    async def send(self, data: bytes, piece_bytes: int = 1 << 16) -> None:
        for start in range(0, len(data), piece_bytes):
            self.writer.write(data[start : start + piece_bytes])
            await self.writer.drain()
            await asyncio.sleep(0)

    async def _receive(self) -> None:
        data = await self._reader.read(1 << 16)
        if not data:
            raise ConnectionResetError("the site has closed it")
        self._incoming.write(data)

    async def echo(self, data: bytes) -> bytes:
        self.tls.write(data)
        await self.send(self.outgoing.read())
        while True:
            try:
                return self.tls.read()
            except ssl.SSLWantReadError:
                await self._receive()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """Hubs run on uvloop, tests and simulations on asyncio's own loop."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


@pytest.fixture
def site(runner: asyncio.Runner, tls: TlsPair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(tls_acceptor, "HANDSHAKE_S", PATIENCE_S)
    site = Site(tls)
    runner.run(site.open())
    yield site
    runner.run(site.close())


async def begin_handshakes(site: Site, tls: TlsPair) -> list[tuple[Peer, bytes]]:
    """Peers whose handshakes lack only their last bytes, which are with them."""
    peers = [await site.connect(tls.client) for _ in range(PEERS)]
    begun = [(peer, await peer.shake_hands()) for peer in peers]
    assert not site.made
    return begun


def test_the_ends_of_many_handshakes_have_turns(
    runner: asyncio.Runner, site: Site, tls: TlsPair
) -> None:
    async def shake_hands() -> list[bytes]:
        async with asyncio.timeout(PATIENCE_S):
            begun = await begin_handshakes(site, tls)
            for peer, end in begun:
                peer.writer.write(end)
            return [await peer.echo(b"hello") for peer, _ in begun]

    assert runner.run(shake_hands()) == [b"hello"] * PEERS
    assert sum(site.made.values()) == PEERS
    # Up to four are let in at a time; each is read in one of the turns after that.
    assert max(site.made.values()) <= 2 * tls_acceptor._CONTINUED_AT_ONCE, site.made


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_handshake_may_come_byte_by_byte(
    runner: asyncio.Runner, site: Site, tls: TlsPair, version: ssl.TLSVersion
) -> None:
    context = ssl.create_default_context(cafile=tls.certificate)
    context.minimum_version = context.maximum_version = version

    async def shake_hands() -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            peer = await site.connect(context)
            await peer.send(await peer.shake_hands(piece_bytes=1), piece_bytes=1)
            return await peer.echo(b"hello")

    assert runner.run(shake_hands()) == b"hello"
    assert not site.acceptor._arrivals.get_map() and not site.failures


async def fail(site: Site, context: ssl.SSLContext, *, leave: bool) -> None:
    async with asyncio.timeout(PATIENCE_S):
        peer = await site.connect(context)
        await peer.shake_hands()
        if leave:
            peer.writer.close()
        while not site.failures:
            await asyncio.sleep(0.01)


def test_who_leaves_in_the_middle_is_counted(
    runner: asyncio.Runner, site: Site, tls: TlsPair
) -> None:
    runner.run(fail(site, tls.client, leave=True))
    assert not site.acceptor._arrivals.get_map() and not site.made


def test_who_sends_nothing_more_is_disconnected(
    runner: asyncio.Runner, site: Site, tls: TlsPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_acceptor, "HANDSHAKE_S", 0.2)
    runner.run(fail(site, tls.client, leave=False))
    assert not site.acceptor._arrivals.get_map() and not site.made


def test_who_leaves_right_after_the_end_waits_for_its_turn(
    runner: asyncio.Runner, site: Site, tls: TlsPair
) -> None:
    """The end of a socket is no way around the turns, and what came before it is served."""

    async def shake_hands() -> list[bytes]:
        async with asyncio.timeout(PATIENCE_S):
            for peer, end in await begin_handshakes(site, tls):
                peer.tls.write(b"hello")
                peer.writer.write(end + peer.outgoing.read())
                peer.writer.write_eof()
            while sum(site.made.values()) < PEERS or not all(site.received):
                await asyncio.sleep(0.01)
            return site.received

    assert runner.run(shake_hands()) == [b"hello"] * PEERS
    assert max(site.made.values()) <= 2 * tls_acceptor._CONTINUED_AT_ONCE, site.made
    assert not site.failures


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_a_listener_that_can_not_be_opened_keeps_no_file(
    runner: asyncio.Runner, tls: TlsPair, host: str
) -> None:
    """Of a name without an address, and of an address of another machine."""

    async def open_files() -> int:
        acceptor = Site(tls).acceptor
        with pytest.raises(OSError):
            await acceptor.open(host, 0)
        assert acceptor._arrivals.get_map() is None
        return len(list(Path("/proc/self/fd").iterdir()))

    # The first one may start what resolves names.
    first, *others = [runner.run(open_files()) for _ in range(4)]
    assert others == [first] * 3
