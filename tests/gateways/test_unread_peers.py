"""A peer that the hub does not read from for now, for whatever reason, and that goes away: that is
noticed all the same, at every listener and on both event loops. Who is only slow stays."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from crosswire import session
from crosswire.client.native.emp import EmpClient
from crosswire.config import PLAIN_LISTENERS, ConnectionLimits, ProtocolLimits, TlsFiles
from crosswire.hub.policies import QueuePolicy
from crosswire.server.server import GATEWAYS, Server
from crosswire.wire.emp.events import RequestReceived
from crosswire.wire.emp.frames import EmpLimits
from crosswire.wire.epoxy.events import ResponseReceived as EpoxyResponse
from crosswire.wire.epoxy.frames import EpoxyLimits
from tests.conftest import TlsPair
from tests.gateways.conftest import StartServer, port_of
from tests.gateways.wire_peers import OPENINGS, Opening, Step, WirePeer, until
from tests.gateways.wires import emp, emqp, relink

pytestmark = pytest.mark.loops

ENDS = ["close", "eof", "rst"]
ends = pytest.mark.parametrize("how", ENDS)
POLL_S = 0.03
TLS_TAKES = 300 * 1024
"""More than what TLS reads ahead; less than that and what the kernel buffers."""


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    assert session.POLL_S <= 1.5, "two polls must not take longer than 3 s"
    monkeypatch.setattr(session, "POLL_S", POLL_S)


def limits(drain_s: float = POLL_S) -> ProtocolLimits:
    return ProtocolLimits(
        emp=EmpLimits(pending_requests=2), epoxy=EpoxyLimits(pending_requests=2, drain_s=drain_s)
    )


def named(name: str) -> Opening:
    return next(each for each in OPENINGS if each.name == name)


@asynccontextmanager
async def bystander(server: Server) -> AsyncIterator[EmpClient]:
    """An uninvolved peer, which serves `busy` and never answers; it works to the end."""

    async def busy(_data: Any) -> None:
        await asyncio.Event().wait()

    async with EmpClient("127.0.0.1", port_of(server, "emp"), handlers={"busy": busy}) as client:
        await client.request("$serve", {"services": ["busy"]})
        yield client
        message = {"destination": "queue/bystander", "text": "x"}
        assert "id" in await client.request("$publish", message)


async def end(peer: WirePeer, how: str) -> None:
    if how == "close":
        peer.writer.close()
    else:
        await peer.end(how)


async def is_noticed(server: Server, peer: WirePeer) -> None:
    """It is gone, with its socket and all that it held."""
    await until(lambda: peer.gateway.left)
    assert peer.gateway not in server.context.connection_slots
    assert peer.gateway.id not in server.context.gateways
    peer.abort()
    await until(peer.gateway.session.gone.done)


async def stop_reading(peer: WirePeer, steps: list[Step]) -> None:
    """Send what makes the hub stop reading, and something that it then doesn't read."""
    peer.write(peer.bytes_of(steps))
    await until(lambda: peer.gateway.session._reading_paused)
    peer.write(peer.bytes_of(steps))


@ends
async def test_who_the_owner_has_no_room_for(start_server: StartServer, how: str) -> None:
    """At every listener."""
    server = await start_server(limits=limits())
    peers: dict[str, WirePeer] = {}
    async with bystander(server):
        for listener in GATEWAYS:
            opening = next(each for each in OPENINGS if each.listener == listener)
            peer = peers[listener] = WirePeer(server, listener)
            await peer.open(opening)
            peer.gateway.session.hold_reading(True)
            peer.write(peer.bytes_of(opening.steps))
        for peer in peers.values():
            await end(peer, how)
        with suppress(TimeoutError):
            await until(lambda: all(each.gateway.left for each in peers.values()))
        assert [name for name, each in peers.items() if not each.gateway.left] == []
        for peer in peers.values():
            await is_noticed(server, peer)


@ends
@pytest.mark.parametrize("name", ["emp-call", "epoxy-call"])
async def test_who_is_owed_too_many_answers(start_server: StartServer, name: str, how: str) -> None:
    server = await start_server(limits=limits())
    opening = named(name)
    async with bystander(server):
        peer = WirePeer(server, opening.listener)
        await peer.open(opening)
        await stop_reading(peer, [opening.steps[0]] * 3)
        assert not peer.gateway.session.connection.wants_data
        await end(peer, how)
        await is_noticed(server, peer)


async def congest(start_server: StartServer) -> tuple[Server, WirePeer, int]:
    """A consumer that does not read, and how many messages the queue has for it."""
    server = await start_server(connections=ConnectionLimits(congested_bytes=65536))
    opening = named("emp-queue")
    peer = WirePeer(server, "emp")
    await peer.open(opening)
    await peer.write_and_be_read(peer.bytes_of(opening.steps))
    peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
    message = {"destination": "queue/q", "text": "x" * (4 << 20)}
    async with bystander(server) as producer:
        for sent in range(1, 20):
            await producer.request("$publish", message)
            if peer.gateway.session.congested:
                return server, peer, sent
    raise AssertionError("never congested")


@ends
async def test_who_does_not_read(start_server: StartServer, how: str) -> None:
    server, peer, sent = await congest(start_server)
    async with bystander(server):
        await end(peer, how)
        await is_noticed(server, peer)
    assert server.hub.queue("queue/q").length == sent


async def test_who_is_only_slow_stays(start_server: StartServer) -> None:
    _, peer, sent = await congest(start_server)
    far = peer.gateway.session
    await asyncio.sleep(5 * POLL_S)
    assert far.congested and not peer.gateway.left
    peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
    await peer.pump(lambda: sum(isinstance(e, RequestReceived) for e in peer.events) == sent)
    assert not far.congested
    await peer.close()


@pytest.mark.parametrize("protocol", ["relink", "emqp"])
async def test_producers_for_a_full_queue_lock_nobody_out(
    start_server: StartServer, protocol: str
) -> None:
    """They come, send and go; every slot would be taken for good."""
    server = await start_server(
        connections=ConnectionLimits(connections=3), queues={"full": QueuePolicy(max_length=1)}
    )
    async with emp(server) as first:
        await first.ask("$publish", destination="queue/full", text="x")
    for _ in range(5):
        await until(lambda: len(server.context.connection_slots) < 3)
        dialled = relink(server, "queue/full") if protocol == "relink" else emqp(server, "client")
        async with dialled as peer:
            gateway = list(server.context.gateways.values())[-1]
            for _ in range(5):
                if protocol == "relink":
                    peer.wire.send_message(0, b"x")
                else:
                    peer.wire.send_request("full", "guarantee", b'["run",{}]')
            peer.session.wake()
            await until(lambda: gateway.session._reading_paused)  # noqa: B023
            peer.session.transport.close()
    await until(lambda: len(server.context.connection_slots) == 0)
    async with emp(server) as last:
        assert (await last.ask("$echo")).succeeded


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("much", [False, True], ids=["little", "much"])
async def test_with_tls(start_server: StartServer, tls: TlsPair, how: str, much: bool) -> None:
    """With little on the socket TLS reads it all and finds the end; with much it does not."""
    files = TlsFiles(certificate=str(tls.certificate), key=str(tls.key))
    server = await start_server(
        tls=files, listen=dict.fromkeys(PLAIN_LISTENERS, "off") | {"emp-tls": "127.0.0.1:0"}
    )
    peer = WirePeer(server, "emp-tls")
    await peer.open(named("emp-hello"), tls=tls.client)
    peer.gateway.session.hold_reading(True)
    if much:
        peer.connection.send_request("$echo", b'{"a":"%s"}' % (b"x" * TLS_TAKES))
        peer.write(b"".join(peer.connection.data_to_send()))
        await until(lambda: not peer.writer.transport.get_write_buffer_size())
    if how == "fin":
        # Without TLS's goodbye, for whose answer it would wait.
        with socket.socket(fileno=os.dup(peer.writer.get_extra_info("socket").fileno())) as raw:
            raw.shutdown(socket.SHUT_WR)
    else:
        peer.abort()
    await is_noticed(server, peer)
    async with EmpClient("localhost", port_of(server, "emp-tls"), tls=tls.client) as client:
        assert await client.request("$echo", {"a": 1}) == {"a": 1}


async def test_a_short_pause_costs_nothing_of_what_was_sent_before_the_end(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server()
    peer = WirePeer(server, "emp")
    await peer.open(named("emp-hello"))
    far = peer.gateway.session
    far.hold_reading(True)
    monkeypatch.setattr(session, "POLL_S", 30.0)  # after the one that is planned
    for _ in range(10):
        peer.connection.send_request("$publish", b'{"destination":"queue/q","text":"x"}')
    peer.write(b"".join(peer.connection.data_to_send()))
    await end(peer, "eof")
    await until(lambda: far._end_seen_at is not None)
    far.hold_reading(False)
    await until(lambda: peer.gateway.left)
    assert server.hub.queue("queue/q").length == 10
    await peer.close()


async def test_epoxy_peers_may_close_their_half_and_wait(start_server: StartServer) -> None:
    server = await start_server(limits=limits(drain_s=30.0))
    peer = WirePeer(server, "epoxy")
    await peer.open(named("epoxy-config"))
    far = peer.gateway.session
    far.hold_reading(True)
    publish = named("epoxy-publish").steps[0]
    peer.write(peer.bytes_of([publish] * 5))
    await end(peer, "eof")
    await until(lambda: far._end_seen_at is not None)
    await asyncio.sleep(3 * POLL_S)
    assert not peer.gateway.left
    far.hold_reading(False)
    await peer.pump(lambda: sum(isinstance(e, EpoxyResponse) for e in peer.events) == 5)
    assert server.hub.queue("queue/q").length == 5
    await until(far.gone.done)
    await peer.close()
