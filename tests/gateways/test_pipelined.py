"""Thousands of calls on one connection, whose answers come on that same connection."""

from __future__ import annotations

import asyncio

import pytest

from crosswire.bond import hub_module, marshal
from crosswire.server.server import Server
from crosswire.wire.contract import Event
from crosswire.wire.emp.events import RequestReceived, ResponseReceived
from crosswire.wire.epoxy import events as epoxy_events
from tests.gateways.wires import Peer, emp, epoxy

_NUMBER = 1500


def answer(peer: Peer) -> None:
    """Every request, as soon as it comes."""

    def react(event: Event) -> None:
        if isinstance(event, RequestReceived):
            peer.wire.send_success(event.id, event.data)
        elif isinstance(event, epoxy_events.RequestReceived):
            peer.wire.send_response(event.conversation_id, event.payload)
        peer.session.wake()

    peer.react = react


def call(peer: Peer, service: str) -> None:
    for _ in range(_NUMBER):
        peer.wire.send_request(service, b"{}")
    peer.session.wake()


@pytest.mark.slow
async def test_emp_peer_calls_itself(server: Server) -> None:
    async with emp(server) as peer:
        await peer.ask("$serve", services=["me"])
        answer(peer)
        call(peer, "me")
        assert all(each.succeeded for each in await peer.several(ResponseReceived, _NUMBER))


@pytest.mark.slow
async def test_emp_peers_call_each_other(server: Server) -> None:
    async with emp(server) as a, emp(server) as b:
        await a.ask("$serve", services=["a"])
        await b.ask("$serve", services=["b"])
        answer(a)
        answer(b)
        call(a, "b")
        call(b, "a")
        got = await asyncio.gather(*(each.several(ResponseReceived, _NUMBER) for each in (a, b)))
        assert all(response.succeeded for each in got for response in each)


async def test_emp_ping_is_answered_while_calls_wait(server: Server) -> None:
    """None of the calls is answered: only a pong can come."""
    async with emp(server) as provider, emp(server) as peer:
        await provider.ask("$serve", services=["stuck"])
        call(peer, "stuck")
        # Its first ping is due; nothing else comes that could move the deadline.
        peer.wire.handle_deadline(peer.wire.next_deadline())
        assert peer.wire._awaiting_pong
        peer.session.wake()
        async with asyncio.timeout(20):
            while peer.wire._awaiting_pong:
                await asyncio.sleep(0)
        assert (peer.end, peer.wire.pending) == (None, _NUMBER)


async def test_emp_requests_that_fail_at_once_leave_others_their_turn(server: Server) -> None:
    async with emp(server) as peer:
        call(peer, "nobody")
        await peer.until(lambda: bool(peer.all(ResponseReceived)))
        assert len(peer.all(ResponseReceived)) < _NUMBER
        answers = await peer.several(ResponseReceived, _NUMBER)
        assert [each.code for each in answers] == ["unknown_op"] * _NUMBER


def struct(name: str, **values: object) -> bytes:
    form = hub_module().struct(f"crosswire.{name}")
    return marshal.marshal(form.python_class(**values), form)


async def test_epoxy_peer_calls_itself(server: Server) -> None:
    async with epoxy(server) as peer:
        peer.wire.send_request("crosswire.Hub", "Serve", struct("Services", services=["me"]))
        peer.session.wake()
        await peer.several(epoxy_events.ResponseReceived, 1)
        answer(peer)
        payload = struct("Blob", data=b"x", content_type="text/plain")
        for _ in range(_NUMBER):
            peer.wire.send_request("me", "m", payload)
        peer.session.wake()
        answers = await peer.several(epoxy_events.ResponseReceived, _NUMBER)
        assert all(each.payload is not None for each in answers)
