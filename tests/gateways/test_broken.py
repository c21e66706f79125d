"""Gateways in which something raises: their peer is sent away, and nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from crosswire.bond import hub_module, marshal
from crosswire.envelope import Envelope
from crosswire.errors import ProviderLost
from crosswire.hub.ledger import LedgerPeer as LedgerPeer
from crosswire.hub.services import Answer
from crosswire.server.server import Server
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed
from crosswire.wire.emp.events import RequestReceived, ResponseReceived
from crosswire.wire.emqp.events import Registered
from crosswire.wire.epoxy import events as epoxy_events
from tests.gateways.wires import Peer, emp, emqp, epoxy, micromsg2, relink
from tests.hub.parties import Recorder

pytestmark = pytest.mark.failing_callbacks

PEER = LedgerPeer("test", "test")


def raising(*_: object) -> None:
    raise RuntimeError("no")


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0)


def struct(name: str, **values: Any) -> bytes:
    found = hub_module().struct(f"crosswire.{name}")
    return marshal.marshal(found.python_class(**values), found)


async def join(server: Server, protocol: str, stack: AsyncExitStack) -> Peer:
    """A peer that consumes queue/q and, where one connection can do both, serves service/s."""
    enter = stack.enter_async_context
    peer: Peer
    if protocol == "emp":
        peer = await enter(emp(server))
        await peer.ask("$subscribe", destination="queue/q")
        await peer.ask("$serve", services=["s"])
    elif protocol == "epoxy":
        peer = await enter(epoxy(server))
        wire = peer.wire
        subscription = struct("Subscription", destination="queue/q")
        wire.send_request("crosswire.Hub", "Subscribe", subscription)
        wire.send_request("crosswire.Hub", "Serve", struct("Services", services=["s"]))
        peer.session.wake()
        await peer.several(epoxy_events.ResponseReceived, 2)
    elif protocol == "micromsg2":
        peer = await enter(micromsg2(server, acks=10))
        peer.wire.send_subscribe("queue/q")
        peer.wire.send_serve("service/s")
        peer.session.wake()
    elif protocol == "relink":
        peer = await enter(relink(server, "queue/q?consume"))
    else:
        peer = await enter(emqp(server, "worker", queues=[(10, "q"), (10, "s")]))
        await peer.several(Registered, 1)
        peer.wire.send_ready()
        peer.session.wake()
    await until(lambda: server.hub.queue("queue/q").consumers)
    return peer


PROTOCOLS = ("emp", "emqp", "epoxy", "micromsg2", "relink")


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_delivery_that_raises_ends_the_connection(server: Server, protocol: str) -> None:
    hub, other = server.hub, Recorder()
    async with AsyncExitStack() as stack:
        peer = await join(server, protocol, stack)
        (consumer,) = hub.queue("queue/q").consumers
        consumer.receiver.deliver = raising  # type: ignore[method-assign]
        envelope = Envelope(destination="queue/q", kind="send", payload=b"x", protocol="test")
        await hub.produce([envelope], server.context.now())
        await until(lambda: peer.end is not None)
        assert isinstance(peer.end, ConnectionClosed | ConnectionFailed)
        await until(lambda: not server.context.gateways)
        assert not hub.queue("queue/q").consumers and not hub.services.providers()
        hub.consume("queue/q", other, server.context.now(), peer=PEER)
        assert [(each.envelope.payload, each.attempt) for each in other.deliveries] == [(b"x", 2)]
    assert hub.callbacks.failed == {"delivery": 1}


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_request_that_raises_ends_the_connection(server: Server, protocol: str) -> None:
    hub, answers = server.hub, list[Answer]()
    async with AsyncExitStack() as stack:
        if protocol == "relink":
            peer: Peer = await stack.enter_async_context(relink(server, "service/s?serve"))
        else:
            peer = await join(server, protocol, stack)
        await until(lambda: hub.is_served("service/s"))
        provider = hub.services._services["service/s"].providers[0]
        provider.receiver.request = raising  # type: ignore[method-assign]
        request = Envelope(destination="service/s", kind="request")
        hub.call(
            [request],
            server.context.now(),
            answered=lambda _, each: answers.append(each),
            peer=PEER,
        )
        await until(lambda: peer.end is not None)
        await until(lambda: not server.context.gateways)
        assert [type(each) for each in answers] == [ProviderLost]
        assert not hub.services.providers()
    assert hub.callbacks.failed == {"request": 1}


async def test_an_answer_that_raises_ends_the_callers_connection(server: Server) -> None:
    async with emp(server) as caller, emp(server) as other, emp(server) as provider:
        await provider.ask("$serve", services=["s"])
        provider.react = lambda event: (
            provider.wire.send_success(event.id) if isinstance(event, RequestReceived) else None
        )
        (gateway,) = [each for each in server.context.gateways.values() if each is not None][:1]
        gateway._as_object = raising  # type: ignore[attr-defined]
        caller.wire.send_request("s")
        caller.session.wake()
        await until(lambda: caller.end is not None)
        other.wire.send_request("s")
        other.session.wake()
        assert (await other.several(ResponseReceived, 1))[0].succeeded
    assert server.hub.callbacks.failed == {"answer": 1}


async def test_a_receipt_that_raises_ends_the_producers_connection(server: Server) -> None:
    data = b'{"destination":"queue/q","text":"x"}'
    async with emp(server) as broken, emp(server) as other:
        next(iter(server.context.gateways.values()))._fail = raising  # type: ignore[attr-defined]
        for peer in (broken, other):
            peer.wire.send_request("$publish", data)
            peer.wire.send_request("$publish", b"{}")
            peer.session.wake()
        await until(lambda: broken.end is not None)
        answers = await other.several(ResponseReceived, 2)
        assert [each.code for each in answers] == ["", "invalid_request"]
        assert server.hub.queue("queue/q").length == 2
    assert server.hub.callbacks.failed == {"receipt": 1}
