"""What peers pipeline by the hundreds: nothing of it grows the call stack, or harms others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crosswire.bond import hub_module, marshal
from crosswire.client.native.dial import Backoff
from crosswire.client.native.emqp import EmqpSubscriber
from crosswire.config import BondFiles, ConnectionLimits, ProtocolLimits
from crosswire.envelope import Envelope
from crosswire.gateways.payloads import JSON
from crosswire.hub.ledger import LedgerPeer as LedgerPeer
from crosswire.hub.services import Answer, Call
from crosswire.server.server import Server
from crosswire.wire.emp.events import RequestReceived, ResponseReceived
from crosswire.wire.emqp.events import ReplyReceived
from crosswire.wire.epoxy import events as epoxy_events
from crosswire.wire.micromsg2.events import MessageReceived
from crosswire.wire.relink.events import MessageReceived as RelinkMessage
from crosswire.wire.relink.frames import RelinkLimits
from tests.gateways.conftest import StartServer, port_of
from tests.gateways.wires import Peer, emp, emqp, epoxy, micromsg2, relink

CALC = Path(__file__).parents[2] / "examples" / "calc.bond"


def codes(responses: list[ResponseReceived]) -> list[str]:
    return [each.code for each in responses]


def pipeline(peer: Peer, requests: list[tuple[str, bytes]]) -> None:
    """All of them in one write."""
    for op, data in requests:
        peer.wire.send_request(op, data)
    peer.session.wake()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0)


def assert_whole(server: Server) -> None:
    assert not server.hub.callbacks.failed


# ----------------------------------------------------------------------------------------- callers


@pytest.mark.slow
@pytest.mark.parametrize("number", [90, 5000])
async def test_calls_that_nobody_serves(server: Server, number: int) -> None:
    async with emp(server) as peer:
        pipeline(peer, [("nobody", b"{}")] * number)
        assert codes(await peer.several(ResponseReceived, number)) == ["unknown_op"] * number
        assert (await peer.ask("$echo", still="here")).data == b'{"still":"here"}'
    assert_whole(server)


async def test_refused_publishes_between_others(server: Server) -> None:
    async with emp(server) as peer:
        pipeline(peer, [("$publish", b"{}"), ("$echo", b"{}")] * 1000)
        expected = ["invalid_request", ""] * 1000
        assert codes(await peer.several(ResponseReceived, 2000)) == expected
    assert_whole(server)


async def test_others_get_what_was_committed_together_with_such_calls(
    start_server: StartServer,
) -> None:
    """All of it in one turn of the loop, and so in one group: theirs, and what would recurse."""
    server = await start_server()
    others = 60
    published = msgspec.json.encode({"destination": "queue/q", "text": "x"})
    async with emp(server) as driver, emp(server) as other, emp(server) as consumer:
        consumer.react = lambda event: (
            consumer.wire.send_success(event.id) if isinstance(event, RequestReceived) else None
        )
        await consumer.ask("$subscribe", destination="queue/q")
        pipeline(driver, [("$publish", published)] + [("nobody", b"{}")] * 200)
        pipeline(other, [("$publish", published)] * others)
        answered = await driver.several(ResponseReceived, 201)
        assert codes(answered) == [""] + ["unknown_op"] * 200
        assert codes(await other.several(ResponseReceived, others)) == [""] * others
        await consumer.until(lambda: len(consumer.all(RequestReceived)) == others + 1)
        pipeline(driver, [("$publish", published)] + [("nobody", b"{}")] * 200)
        await driver.several(ResponseReceived, 201)
        await consumer.until(lambda: len(consumer.all(RequestReceived)) == others + 2)
    assert_whole(server)
    await server.stop()
    server = await start_server()
    assert server.hub.queue("queue/q").length == 0


@pytest.mark.parametrize("op", ["$publish", "$subscribe", "$schedule"])
async def test_data_that_is_nested_as_deeply_as_can_be_read(server: Server, op: str) -> None:
    """Just below the depth at which it is no data at all the connection is kept, too."""
    async with emp(server) as peer:
        for depth in range(700, 1000):
            nested = b"[" * depth + b"]" * depth
            data = b'{"destination":"queue/q","interval_s":60,"json":%b,"x":%b}' % (nested, nested)
            peer.wire.send_request(op, data)
        peer.session.wake()
        assert {"", "invalid_request"} >= set(codes(await peer.several(ResponseReceived, 300)))
    assert_whole(server)


# --------------------------------------------------------------------------------------- providers


async def test_a_provider_that_leaves_while_many_wait(server: Server) -> None:
    """Every caller is answered, and nobody is listed as a provider any more."""
    async with emp(server) as first, emp(server) as second, epoxy(server) as third:
        async with emp(server) as provider:
            await provider.ask("$serve", services=["slow"])
            for caller in (first, second):
                pipeline(caller, [("slow", b"{}")] * 300)
            payload = marshal.marshal(
                hub_module().struct("crosswire.Services").python_class(services=[]),
                hub_module().struct("crosswire.Services"),
            )
            for _ in range(300):
                third.wire.send_request("slow", "", payload)
            third.session.wake()
            # As many as its window has, from three callers; the rest waits.
            await provider.until(lambda: len(provider.all(RequestReceived)) >= 256)
        for caller in (first, second):
            answered = codes(await caller.several(ResponseReceived, 300))
            assert set(answered) == {"provider_lost", "unknown_op"}
        errors = await third.several(epoxy_events.ResponseReceived, 300)
        assert all(each.error is not None for each in errors)
        await until(lambda: not server.hub.services.providers())
        await until(lambda: len(server.context.gateways) == 3)
    assert_whole(server)


class Answers:
    def __init__(self) -> None:
        self.given: list[Answer] = []

    def __call__(self, _call: Call, answer: Answer) -> None:
        self.given.append(answer)

    async def all(self, number: int) -> None:
        await until(lambda: len(self.given) == number)


def call(server: Server, number: int, **fields: Any) -> Answers:
    """Calls of one who asks for many at a time, whatever its protocol."""
    answers = Answers()
    requests = [Envelope(kind="request", protocol="test", **fields) for _ in range(number)]
    peer = LedgerPeer("test", "caller")
    server.hub.call(requests, server.context.now(), answered=answers, peer=peer)
    return answers


async def test_requests_that_a_provider_with_a_schema_can_not_be_sent(
    start_server: StartServer,
) -> None:
    server = await start_server(bond=BondFiles(files=(str(CALC),)))
    services = hub_module().struct("crosswire.Services")
    asked = services.python_class(services=["examples.calc.Calc"])
    async with epoxy(server) as provider, emp(server) as caller:
        provider.wire.send_request("crosswire.Hub", "Serve", marshal.marshal(asked, services))
        provider.session.wake()
        await provider.several(epoxy_events.ResponseReceived, 1)
        unreadable = call(
            server,
            400,
            destination="service/examples.calc.Calc/Calculate",
            payload=b"[]",
            content_type=JSON,
        )
        assert {getattr(each, "code", "") for each in unreadable.given} == {"invalid_request"}
        assert len(unreadable.given) == 400
        pipeline(caller, [("examples.calc.Calc/Calculate", b'{"x":"?"}')] * 400)
        answered = await caller.several(ResponseReceived, 400)
        assert codes(answered) == ["invalid_request"] * 400
        # It goes on serving.
        pipeline(caller, [("examples.calc.Calc/Calculate", b'{"x":2,"y":3}')])
        asked = (await provider.several(epoxy_events.RequestReceived, 1))[0]
        provider.wire.send_response(asked.conversation_id, asked.payload)
        provider.session.wake()
        assert codes(await caller.several(ResponseReceived, 1)) == [""]
    assert_whole(server)


async def test_calls_that_a_micromsg2_provider_can_not_be_sent(server: Server) -> None:
    async with micromsg2(server, acks=100) as provider, emp(server) as caller:
        provider.wire.send_serve("service/s")
        provider.session.wake()
        await until(lambda: server.hub.is_served("service/s"))
        answers = call(
            server, 420, destination="service/s", properties={"long": "x" * 65_600}, payload=b""
        )
        await answers.all(420)
        assert {getattr(each, "code", "") for each in answers.given} == {"invalid_request"}
        pipeline(caller, [("s", b'{"n":1}')])
        request = (await provider.several(MessageReceived, 1))[0]
        provider.wire.send_message(request.properties["reply-to"], b'{"n":2}')
        provider.session.wake()
        assert (await caller.several(ResponseReceived, 1))[0].data == b'{"n":2}'
    assert_whole(server)


async def test_a_relink_provider_that_consumes_nothing(start_server: StartServer) -> None:
    """It answers but acknowledges no request: more than a channel holds are refused to callers."""
    server = await start_server(limits=ProtocolLimits(relink=RelinkLimits(window=2)))
    async with relink(server, "service/s?serve", id_size=0) as provider:
        await until(lambda: server.hub.is_served("service/s"))
        for _ in range(2):
            answers = call(server, 1, destination="service/s", payload=b"?")
            await provider.several(RelinkMessage, 1)
            provider.wire.send_message(0, b"!")
            provider.session.wake()
            await answers.all(1)
        for _ in range(2):
            answers = call(server, 400, destination="service/s", payload=b"?")
            await answers.all(400)
            assert {getattr(each, "code", "") for each in answers.given} == {"refused"}
        assert provider.end is None
    assert_whole(server)


async def test_an_emqp_call_of_a_provider_that_is_leaving_ends(server: Server) -> None:
    """The retries that its headers ask for don't keep the provider from leaving."""
    async with emqp(server, "client") as client, epoxy(server) as provider:
        services = hub_module().struct("crosswire.Services")
        asked = marshal.marshal(services.python_class(services=["s"]), services)
        provider.wire.send_request("crosswire.Hub", "Serve", asked)
        provider.session.wake()
        await provider.several(epoxy_events.ResponseReceived, 1)
        gateway = next(each for each in server.context.gateways.values() if each.providers)
        # Its goodbye is on its way: it takes no call, and is still listed.
        gateway.session.connection.close()
        client.wire.send_request("s", "reply-requested,retry-count:100000000", b"{}")
        client.session.wake()
        gateway.session.wake()
        replies = await client.several(ReplyReceived, 2)
        assert any(b"error" in each.message for each in replies)
    assert_whole(server)


# ------------------------------------------------------------------------------------- subscribers


@pytest.mark.slow
async def test_an_emqp_subscriber_that_catches_up(start_server: StartServer) -> None:
    """Page by page from the disk, and not all of it into memory at once."""
    server = await start_server(connections=ConnectionLimits(congested_bytes=100_000))
    batches, size = 25, 1000
    most = 0
    async with EmqpSubscriber(
        "127.0.0.1",
        port_of(server, "emqp-subscribers"),
        ["t"],
        window=10,
        backoff=Backoff(0.01, 0.02),
    ) as subscriber:
        gateway = next(iter(server.context.gateways.values()))
        await until(lambda: bool(gateway.attachments))
        for batch in range(batches):
            envelopes = [
                Envelope(destination="topic/t", kind="publish", payload=b"%0*d" % (size, each))
                for each in range(batch * 1000, batch * 1000 + 1000)
            ]
            await server.hub.produce(envelopes, server.context.now())
        # It doesn't read: what its socket doesn't take is on disk only.
        assert any(each.is_lagging for each in server.hub.subscriptions.subscribers())
        async with asyncio.timeout(30):
            for number in range(batches * 1000):
                assert int((await anext(subscriber))[1]) == number
                most = max(most, gateway.session.transport.get_write_buffer_size())
    assert most < 3_000_000
    assert_whole(server)
