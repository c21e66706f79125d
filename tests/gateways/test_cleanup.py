"""Whatever a peer sends, however it ends and whatever fails: the hub keeps nothing of it.

Every listener, every kind of beginning, every kind of end, in one read and in several; afterwards
slots, connections, consumers, providers, calls and links are what they were, and others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crosswire.client.native.emp import EmpClient
from crosswire.config import (
    PLAIN_LISTENERS,
    Config,
    ConnectionLimits,
    LakeSettings,
    ProtocolLimits,
)
from crosswire.hub.attachment import DeliveryGap
from crosswire.hub.policies import ServicePolicy
from crosswire.server.server import GATEWAYS, Server
from crosswire.web.listener import WebListener
from crosswire.wire.contract import ConnectionFailed
from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emqp.events import PeerLeaving
from crosswire.wire.relink.events import MessageReceived
from crosswire.wire.relink.frames import RelinkLimits
from tests.gateways.conftest import StartServer, port_of
from tests.gateways.wire_peers import (
    FIRST_BYTES,
    OPENINGS,
    VIOLATION,
    Held,
    Opening,
    WirePeer,
    relink_hello,
    until,
)

ENDS = ["violation", "violation-eof", "eof", "rst"]
openings = pytest.mark.parametrize("opening", OPENINGS, ids=lambda each: each.name)
listeners = pytest.mark.parametrize("listener", sorted(GATEWAYS))


def openings_of(listener: str) -> list[Opening]:
    return [each for each in OPENINGS if each.listener == listener]


def named(name: str) -> Opening:
    return next(each for each in OPENINGS if each.name == name)


class Watched:
    """A hub with an uninvolved peer, and what was held before the others came."""

    def __init__(self, server: Server, bystander: EmpClient, taken: asyncio.Queue[Any]) -> None:
        self.server = server
        self._bystander = bystander
        self._taken = taken
        self._peers: list[WirePeer] = []
        self.before = Held.by(server)

    async def opened(self, opening: Opening, *, is_read: bool = False) -> WirePeer:
        """A peer that is connected, and perhaps has sent its steps."""
        peer = self.peer(opening.listener)
        await peer.open(opening)
        if is_read:
            for step in opening.steps:
                await peer.write_and_be_read(peer.bytes_of([step]))
        return peer

    def peer(self, listener: str) -> WirePeer:
        peer = WirePeer(self.server, listener)
        self._peers.append(peer)
        return peer

    async def close_peers(self) -> None:
        for peer in self._peers:
            await peer.close()

    def held(self) -> Held:
        return Held.by(self.server)

    async def is_as_before(self) -> None:
        """Everything is given back, HTTP answers and the uninvolved peer works."""
        try:
            await until(lambda: self.held() == self.before, 5)
        except TimeoutError:
            assert self.held() == self.before  # shows what is left over
        data = {"destination": "queue/bystander", "text": "x"}
        assert "id" in await self._bystander.request("$publish", data)
        await asyncio.wait_for(self._taken.get(), 5)
        assert await ask(self.server, "GET /healthz") == 200
        await until(lambda: self.held() == self.before, 5)


async def ask(server: Server, request: str) -> int:
    """The status of what HTTP answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server, "http"))
    writer.write(f"{request} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return int(answer.split()[1])


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    """Links without a connection are forgotten at once, so that what is left over shows."""
    listen = dict.fromkeys(PLAIN_LISTENERS, "127.0.0.1:0")
    limits = ProtocolLimits(relink=RelinkLimits(link_s=0.05))
    config = Config(
        data=str(tmp_path / "data"),
        listen=listen,
        drain_s=0.2,
        limits=limits,
        services=ServicePolicy(deadline_s=0.2),
        lake=LakeSettings(messages=False, ledger=False),
    )
    server = Server(config, http=WebListener)
    await server.start()
    taken: asyncio.Queue[Any] = asyncio.Queue()

    async def deliver(data: Any) -> None:
        taken.put_nowait(data)

    async def busy(_data: Any) -> None:
        await asyncio.Event().wait()

    handlers = {"$deliver": deliver, "busy": busy}
    async with (
        EmpClient("127.0.0.1", port_of(server, "emp"), handlers=handlers) as bystander,
        EmpClient("127.0.0.1", port_of(server, "emp"), handlers=handlers) as provider,
    ):
        await bystander.request("$subscribe", {"destination": "queue/bystander"})
        await provider.request("$serve", {"services": ["busy"]})
        watched = Watched(server, bystander, taken)
        yield watched
        await watched.close_peers()
    await server.stop()


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


# ------------------------------------------------------------------------- what a peer can do


@listeners
async def test_first_bytes_that_mean_nothing(
    watched: Watched, caplog: pytest.LogCaptureFixture, listener: str
) -> None:
    for data in FIRST_BYTES:
        for end in ENDS[1:]:
            peer = watched.peer(listener)
            await peer.connect()
            peer.write(data + (VIOLATION if "violation" in end else b""))
            await peer.end(end)
            await until(lambda peer=peer: peer.gateway.left)
    await watched.is_as_before()
    assert errors(caplog) == []


@openings
async def test_a_legal_opening_that_ends_badly(
    watched: Watched, caplog: pytest.LogCaptureFixture, opening: Opening
) -> None:
    """In one read with what comes before, and in reads of their own."""
    for end in ENDS:
        for at_once in (True, False):
            peer = watched.peer(opening.listener)
            await peer.open(opening)
            tail = VIOLATION if "violation" in end else b""
            if at_once:
                peer.write(peer.bytes_of(opening.steps) + tail)
            else:
                for step in opening.steps:
                    await peer.write_and_be_read(peer.bytes_of([step]))
                peer.write(tail)
            await peer.end(end)
            await until(lambda peer=peer: peer.gateway.left)
    await watched.is_as_before()
    assert errors(caplog) == []


@pytest.mark.parametrize("endpoint", ["queue/q?consume", "queue/q", "nowhere", "service/r?serve"])
@pytest.mark.parametrize("tail", [VIOLATION, b"", bytes(8)], ids=["violation", "end", "early"])
async def test_a_relink_hello_and_the_end_in_one_segment(
    watched: Watched, caplog: pytest.LogCaptureFixture, endpoint: str, tail: bytes
) -> None:
    peer = watched.peer("relink")
    await peer.connect()
    peer.write(relink_hello(endpoint) + tail)
    await peer.end("eof")
    await until(lambda: peer.gateway.left)
    await watched.is_as_before()
    assert errors(caplog) == []


# ------------------------------------------------------------------------------- what can fail


class Injected(RuntimeError):
    """A fault of ours."""


class Fault:
    """Raises whenever it is called, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_args: Any, **_options: Any) -> Any:
        self.calls += 1
        raise Injected("for the test")


def tracebacks(caplog: pytest.LogCaptureFixture) -> int:
    """How often our fault was logged with where it came from, since the last time."""
    count = sum(
        each.levelno == logging.ERROR and each.exc_info is not None and each.exc_info[0] is Injected
        for each in caplog.records
    )
    caplog.clear()
    return count


@listeners
async def test_an_exception_in_receive(
    watched: Watched, caplog: pytest.LogCaptureFixture, listener: str
) -> None:
    """Logged once, counted, and the connection ends; also when it ended in the same read."""
    failed = watched.server.hub.callbacks.failed
    for opening in openings_of(listener):
        for end in ("", "violation", "eof") if opening.steps else ():
            peer = await watched.opened(opening)
            sent = peer.bytes_of(opening.steps)
            fault = peer.gateway.receive = Fault()  # type: ignore[method-assign]
            failed.clear()
            peer.write(sent + (VIOLATION if end == "violation" else b""))
            await peer.end(end)
            await until(lambda peer=peer: peer.gateway.left)
            await watched.is_as_before()
            assert failed == {f"{peer.gateway.protocol} receive": 1}
            assert tracebacks(caplog) == fault.calls == 1


@listeners
async def test_an_exception_in_leaving(
    watched: Watched, caplog: pytest.LogCaptureFixture, listener: str
) -> None:
    """What the protocol's own part of leaving should have done is done by who looks for it."""
    for opening in openings_of(listener):
        peer = await watched.opened(opening)
        fault = peer.gateway.leave = Fault()  # type: ignore[method-assign]
        for step in opening.steps:
            await peer.write_and_be_read(peer.bytes_of([step]))
        peer.abort()
        await until(lambda peer=peer: peer.gateway.left)
        watched.server.leftovers.look()
        watched.server.leftovers.look()
        await watched.is_as_before()
        assert tracebacks(caplog) == fault.calls == 1


@pytest.mark.failing_callbacks
@listeners
@pytest.mark.parametrize("entry", ["deliver", "request", "notice", "cancel"])
async def test_an_exception_in_what_the_hub_calls(
    watched: Watched, caplog: pytest.LogCaptureFixture, listener: str, entry: str
) -> None:
    """It ends the connection of the receiver it came from, and nobody else's."""
    loop = watched.server.hub._core.loop
    for opening in openings_of(listener):
        peer = await watched.opened(opening, is_read=True)
        attachments, providers = list(peer.gateway.attachments), list(peer.gateway.providers)
        held: list[Any] = attachments if entry in ("deliver", "notice") else [*providers]
        if peer.gateway.left or not held:
            peer.abort()
            continue
        fault = Fault()
        setattr(held[0].receiver, entry, fault)
        match entry:
            case "deliver":
                loop.deliver(held[0], [])
            case "notice":
                loop.notice(held[0], DeliveryGap(1, 2, "for the test"))
            case "request":
                loop.call("request", held[0], held[0].receiver.request, held[0], [])
            case _:
                loop.call("cancel", held[0], held[0].receiver.cancel, held[0], [])
        await until(lambda peer=peer: peer.gateway.left)
        await watched.is_as_before()
        assert tracebacks(caplog) == fault.calls == 1


@listeners
@pytest.mark.parametrize("entry", ["handle_drain", "stops", "goes on"])
async def test_an_exception_when_the_peer_stops_or_goes_on_reading(
    watched: Watched, caplog: pytest.LogCaptureFixture, listener: str, entry: str
) -> None:
    for opening in openings_of(listener):
        peer = await watched.opened(opening)
        session, fault = peer.gateway.session, Fault()
        if entry == "handle_drain":
            peer.gateway.handle_drain = fault  # type: ignore[method-assign]
        elif entry == "stops":
            session.on_congestion = fault
        session.pause_writing()
        if entry == "goes on":
            session.on_congestion = fault
        session.resume_writing()
        await until(lambda peer=peer: peer.gateway.left)
        await watched.is_as_before()
        assert tracebacks(caplog) == fault.calls >= 1


WIRE = ["receive_data", "receive_eof", "events", "data_to_send", "fail", "close"]


@pytest.mark.failing_callbacks
@listeners
@pytest.mark.parametrize("entry", WIRE)
async def test_an_exception_in_the_connection(watched: Watched, listener: str, entry: str) -> None:
    """Even one that can't end: then its socket is all there is to end."""
    opening = openings_of(listener)[-1]
    for end in ("eof", "rst", "delete"):
        peer = await watched.opened(opening)
        setattr(peer.gateway.session.connection, entry, Fault())
        if entry == "fail":
            peer.gateway.receive = Fault()  # type: ignore[method-assign]
        peer.write(peer.bytes_of(opening.steps) + VIOLATION)
        if end == "delete":
            peer.gateway.disconnect()
        else:
            await peer.end(end)
        await until(lambda peer=peer: peer.gateway.left)
        await watched.is_as_before()


@listeners
async def test_an_exception_before_there_is_a_connection(
    watched: Watched,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    listener: str,
) -> None:
    fault = Fault()
    gateway: Any = watched.server.listeners[listener]
    monkeypatch.setattr(gateway.gateway, "connect", fault)
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(watched.server, listener))
    writer.write(b"hello")
    with contextlib.suppress(OSError):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    monkeypatch.undo()
    await watched.is_as_before()
    assert tracebacks(caplog) == fault.calls == 1


TAP = ["received", "sent", "peer_finished", "finished", "closed"]


@pytest.mark.parametrize("callback", TAP)
async def test_an_exception_in_the_tap(
    watched: Watched, caplog: pytest.LogCaptureFixture, callback: str
) -> None:
    """The connection goes on without it."""

    def ignore(*_args: Any) -> None:
        pass

    fault = Fault()
    tap: Any = SimpleNamespace(**dict.fromkeys(TAP, ignore) | {callback: fault})
    peer = await watched.opened(named("emp-publish"))
    peer.gateway.session.tap = tap
    peer.events.clear()
    peer.connection.send_request("$echo", b"{}")
    await peer.pump(lambda: peer.events)
    if callback == "finished":
        peer.gateway.disconnect()
    await peer.end("eof")
    await until(peer.gateway.session.gone.done)
    assert peer.gateway.left
    await watched.is_as_before()
    assert watched.server.hub.callbacks.failed == {"tap": 1}
    assert tracebacks(caplog) == fault.calls == 1


@pytest.mark.parametrize("name", ["emp-queue", "micromsg2-queue", "epoxy-queue", "emqp-worker"])
async def test_the_peer_gets_the_internal_error(watched: Watched, name: str) -> None:
    """As its protocol reports it; a worker gets DISCONNECT, and Relink has nothing for it."""
    peer = await watched.opened(named(name))
    peer.gateway.receive = Fault()  # type: ignore[method-assign]
    peer.events.clear()
    peer.write(peer.bytes_of(named(name).steps))
    with contextlib.suppress(AssertionError):
        await peer.pump(lambda: peer.connection.closed)
    end = peer.events[-1]
    if isinstance(end, ConnectionFailed):
        assert "internal" in str(end.error).lower()
    else:
        assert isinstance(end, PeerLeaving)
    await watched.is_as_before()


# ------------------------------------------------------------------------------------- DELETE


async def delete(server: Server, connection: str) -> int:
    return await ask(server, f"DELETE /v1/connections/{connection}")


@listeners
async def test_deleting_a_connection_ends_it(watched: Watched, listener: str) -> None:
    for opening in openings_of(listener):
        peer = await watched.opened(opening, is_read=True)
        name = peer.gateway.id
        status = await delete(watched.server, name)
        # A link that was shut down, or misused, ends by itself about now.
        assert status == 200 or (status == 404 and listener == "relink" and opening.steps)
        await asyncio.wait_for(peer.reader.read(), 5)
        peer.writer.close()
        await until(lambda peer=peer: peer.gateway.left)
        assert await delete(watched.server, name) == 404
        await watched.is_as_before()


async def test_deleting_a_connection_whose_peer_does_not_go(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epoxy waits for the peer's close: not for ever, and nothing is given to it meanwhile."""
    monkeypatch.setattr("crosswire.session.CLOSE_S", 0.05)
    peer = await watched.opened(named("epoxy-queue"), is_read=True)
    assert await delete(watched.server, peer.gateway.id) == 200
    assert all(each.window.free < 0 for each in peer.gateway.attachments)
    await until(lambda: peer.gateway.left)
    await watched.is_as_before()


@pytest.mark.parametrize("is_lost", [False, True])
async def test_deleting_a_connection_that_was_left_over(watched: Watched, is_lost: bool) -> None:
    """Whatever fault kept it in the list: it is ended, or it is not there."""
    peer = await watched.opened(named("emp-queue"), is_read=True)
    gateway = peer.gateway
    gateway._leave = lambda _end: None  # type: ignore[method-assign]
    if is_lost:
        peer.abort()
        await until(gateway.session.gone.done)
    else:
        gateway.session.connection.close()
    del gateway._leave
    assert await delete(watched.server, gateway.id) == (404 if is_lost else 200)
    assert gateway.left
    await watched.is_as_before()


# ------------------------------------------------------------------------- seen in the field


async def test_garbage_on_the_relink_port_locks_nobody_out(start_server: StartServer) -> None:
    """Each of these kept its slot until the restart."""
    server = await start_server(connections=ConnectionLimits(connections=5))
    chance = random.Random(15)
    for number in range(50):
        peer = WirePeer(server, "relink")
        await peer.connect()
        peer.write(bytes(8) + chance.randbytes(56) if number % 2 else bytes(64))
        await peer.end("eof")
        await until(lambda peer=peer: peer.gateway.left)
        await peer.close()
    assert len(server.context.connection_slots) == 0
    async with EmpClient("127.0.0.1", port_of(server, "emp")) as client:
        assert await client.request("$echo", {"a": 1}) == {"a": 1}


async def test_a_consumer_that_broke_the_protocol_keeps_no_messages(
    start_server: StartServer,
) -> None:
    """A shutdown and a violation in one segment: its link stayed, took messages and kept them."""
    server = await start_server()
    opening = named("relink-consume-shutdown")
    peer = WirePeer(server, "relink")
    await peer.open(opening)
    async with EmpClient("127.0.0.1", port_of(server, "emp")) as producer:
        message = {"destination": "queue/q", "text": "x"}
        first = await producer.request("$publish", message)
        await peer.pump(lambda: any(isinstance(each, MessageReceived) for each in peer.events))
        peer.write(peer.bytes_of(opening.steps) + VIOLATION)
        await until(lambda: peer.gateway.left)
        second = await producer.request("$publish", message)
    taken: list[int] = []

    async def deliver(data: Any) -> None:
        taken.append(data["id"])

    handlers = {"$deliver": deliver}
    async with EmpClient("127.0.0.1", port_of(server, "emp"), handlers=handlers) as consumer:
        await consumer.request("$subscribe", {"destination": "queue/q"})
        await until(lambda: sorted(taken) == [first["id"], second["id"]])
    await peer.close()


async def test_a_peer_that_neither_reads_nor_closes_keeps_no_socket(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has sent its goodbye, and our last bytes to it can't be written."""
    monkeypatch.setattr("crosswire.session.LINGER_S", 0.005)
    server = await start_server(connections=ConnectionLimits(congested_bytes=65536))
    peer = WirePeer(server, "emp")
    await peer.connect(EmpConnection("client", 0.0))
    peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
    peer.write(b"".join(peer.connection.data_to_send()))
    peer.connection.receive_data(bytes.fromhex("000000080000000001000000"), 0.0)
    peer.connection.send_request("$echo", b'{"a":"%s"}' % (b"x" * (32 << 20)))
    peer.write(b"".join(peer.connection.data_to_send()))
    session = peer.gateway.session
    await until(lambda: session.congested, 10)
    peer.gateway.connection.receive_eof()  # type: ignore[attr-defined]  it went before all this
    session.wake()
    await until(session.gone.done)
    assert peer.gateway.left
    peer.abort()
