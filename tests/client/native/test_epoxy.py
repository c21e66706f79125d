"""The Epoxy client and server on real sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop

from crosswire.bond import idl, marshal
from crosswire.client.native.dial import Backoff
from crosswire.client.native.epoxy import (
    CallReply,
    EpoxyClient,
    EpoxyPeer,
    EpoxyServer,
    IncomingCall,
    offer,
)
from crosswire.errors import (
    BondSchemaError,
    CallFailed,
    ConnectFailed,
    ConnectionLost,
    LocalProtocolError,
    RequestTimeout,
)
from crosswire.wire.epoxy.comm import ErrorCode, unmarshal_credentials, unmarshal_error
from crosswire.wire.epoxy.frames import EpoxyLimits
from tests.conftest import TlsPair
from tests.wire.vectors import FOLDER, load

MODULE = idl.load(FOLDER / "calc.bond")
CALC = MODULE.service("examples.calc.Calc")
PARAMS = MODULE.struct("examples.calc.Params")
RESULT = MODULE.struct("examples.calc.Result")
Params: Any = PARAMS.python_class
Result: Any = RESULT.python_class
ADD, DIV, SUB, MUL = range(4)
SOON = Backoff(0.01, 0.02)
EMPTY = bytes.fromhex("4342010000")


class Calculator:
    """Counts in a way that lets every kind of answer be asked for."""

    def __init__(self) -> None:
        self.notes: asyncio.Queue[Any] = asyncio.Queue()
        self.callers: list[EpoxyPeer] = []
        self.layers: list[bytes | None] = []

    async def calculate(self, params: Any, call: IncomingCall) -> Any:
        self.callers.append(call.peer)
        self.layers.append(call.layer_data)
        match params.operation:
            case 0:
                return Result(z=params.x + params.y)
            case 1 if params.y == 0:
                raise CallFailed(1234, "Divide by zero")
            case 1:
                return Result(z=params.x // params.y)
            case 2:
                await asyncio.sleep(0)
                return Result(z=params.x - params.y)
            case 3:
                return Result(z=params.x * params.y)
            case 4:
                raise ZeroDivisionError
            case 5:
                await asyncio.Event().wait()
        return None

    async def Note(self, params: Any) -> None:  # noqa: N802  as the service spells it
        self.notes.put_nowait(params)


async def with_layers(call: IncomingCall) -> CallReply:
    return CallReply(call.payload, layer_data=call.layer_data)


@pytest.fixture
def calculator() -> Calculator:
    return Calculator()


@pytest.fixture
async def server(calculator: Calculator) -> AsyncIterator[EpoxyServer]:
    server = EpoxyServer(
        [offer(CALC, calculator), {("test.Layers", "Echo"): with_layers}],
        limits=EpoxyLimits(goodbye_s=0.2, drain_s=0.5),
    )
    await server.listen()
    yield server
    await server.close()


def client_of(server: EpoxyServer, **options: Any) -> EpoxyClient:
    return EpoxyClient("127.0.0.1", server.port, backoff=SOON, **options)


class TestCalls:
    async def test_the_specifications_example(self, server: EpoxyServer) -> None:
        async with client_of(server) as client:
            result = await client.call(CALC, "Calculate", Params(x=67, y=87, operation=MUL))
        assert result == Result(z=5829)

    async def test_many_at_a_time_are_answered_each_its_own(self, server: EpoxyServer) -> None:
        async with client_of(server) as client:
            results = await asyncio.gather(
                *(
                    client.call(CALC, "Calculate", Params(x=n, y=n, operation=n % 2 * SUB))
                    for n in range(500)
                )
            )
        assert results == [Result(z=0 if n % 2 else 2 * n) for n in range(500)]

    async def test_a_handler_that_waits_does_not_hold_up_others(self, server: EpoxyServer) -> None:
        async with client_of(server) as client:
            waiting = [
                asyncio.create_task(client.call(CALC, "Calculate", Params(operation=5)))
                for _ in range(50)
            ]
            await asyncio.sleep(0)
            assert await client.call(CALC, "Calculate", Params(x=1, y=2)) == Result(z=3)
            for task in waiting:
                task.cancel()

    async def test_bytes_cross_untouched(self, server: EpoxyServer) -> None:
        fast = bytes.fromhex("4d46010010010043000000100200570000001003000300000000")
        async with client_of(server) as client:
            reply = await client.call_bytes("examples.calc.Calc", "Calculate", fast)
        assert reply == CallReply(bytes.fromhex("43420100308a5b00"))

    async def test_compact_binary_v2_is_understood(self, server: EpoxyServer) -> None:
        request = marshal.marshal(Params(x=1, y=2), PARAMS, protocol=marshal.COMPACT_V2)
        async with client_of(server) as client:
            reply = await client.call_bytes("examples.calc.Calc", "Calculate", request)
        assert marshal.unmarshal(reply.payload, RESULT) == Result(z=3)

    async def test_a_large_payload(self, server: EpoxyServer) -> None:
        payload = b"x" * 8_000_000
        async with client_of(server) as client:
            reply = await client.call_bytes("test.Layers", "Echo", payload)
        assert reply.payload == payload

    async def test_a_payload_that_is_too_large_is_reported_and_harms_nothing(
        self, server: EpoxyServer
    ) -> None:
        async with client_of(server, limits=EpoxyLimits(framelet_bytes=1000)) as client:
            with pytest.raises(LocalProtocolError, match="1001 bytes"):
                await client.call_bytes("test.Layers", "Echo", b"x" * 1001)
            assert (await client.call_bytes("test.Layers", "Echo", EMPTY)).payload == EMPTY

    async def test_a_timeout_and_its_late_response(self, server: EpoxyServer) -> None:
        async with client_of(server) as client:
            with pytest.raises(RequestTimeout, match=r"no response from examples\.calc\.Calc"):
                await client.call(CALC, "Calculate", Params(operation=5), timeout_s=0.05)
            assert await client.call(CALC, "Calculate", Params(x=1)) == Result(z=1)

    async def test_the_server_calls_the_client(
        self, server: EpoxyServer, calculator: Calculator
    ) -> None:
        async with client_of(server, handlers=offer(CALC, Calculator())) as client:
            await client.call(CALC, "Calculate", Params())
            (peer,) = calculator.callers
            result = await peer.call(CALC, "Calculate", Params(x=6, y=7, operation=MUL))
        assert result == Result(z=42)

    async def test_a_service_that_answers_with_nothing_answers_with_defaults(
        self, server: EpoxyServer
    ) -> None:
        async with client_of(server) as client:
            assert await client.call(CALC, "Calculate", Params(operation=9)) == Result()

    async def test_a_method_that_is_not_declared(self, server: EpoxyServer) -> None:
        async with client_of(server) as client:
            with pytest.raises(BondSchemaError, match="no method Nope"):
                await client.call(CALC, "Nope", Params())

    async def test_an_event_is_not_called(self, server: EpoxyServer) -> None:
        async with client_of(server) as client:
            with pytest.raises(LocalProtocolError, match="event"):
                await client.call(CALC, "Note", Params())


class TestErrors:
    async def test_carry_code_and_message(self, server: EpoxyServer) -> None:
        async with client_of(server) as client:
            with pytest.raises(CallFailed) as caught:
                await client.call(CALC, "Calculate", Params(x=1, operation=DIV))
        assert (caught.value.error_code, caught.value.description) == (1234, "Divide by zero")
        assert unmarshal_error(caught.value.data).error_code == 1234

    async def test_a_crash_is_internal_and_reveals_no_secrets(
        self, server: EpoxyServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with client_of(server) as client:
            with pytest.raises(CallFailed, match="internal-server-error") as caught:
                await client.call(CALC, "Calculate", Params(operation=4))
        assert "ZeroDivisionError" not in str(caught.value)
        assert unmarshal_error(caught.value.data).unique_id in caplog.text

    async def test_an_unknown_method(self, server: EpoxyServer) -> None:
        async with client_of(server) as client:
            with pytest.raises(CallFailed, match="method-not-found") as caught:
                await client.call_bytes("no.such.Service", "Foo", EMPTY)
        assert caught.value.error_code == ErrorCode.METHOD_NOT_FOUND

    async def test_an_event_that_is_called(self, server: EpoxyServer) -> None:
        async with client_of(server) as client:
            with pytest.raises(CallFailed, match="invalid-invocation"):
                await client.call_bytes("examples.calc.Calc", "Note", EMPTY)

    @pytest.mark.parametrize("payload", ["5858010000", "434201003002", "43420100290178"])
    async def test_a_payload_that_cannot_be_read(self, server: EpoxyServer, payload: str) -> None:
        async with client_of(server) as client:
            with pytest.raises(CallFailed, match="can't be read") as caught:
                await client.call_bytes("examples.calc.Calc", "Calculate", bytes.fromhex(payload))
        assert caught.value.error_code == ErrorCode.INTERNAL_SERVER_ERROR

    async def test_of_another_service_are_handed_on_as_they_came(self, server: EpoxyServer) -> None:
        async with client_of(server) as backend:

            async def forward(call: IncomingCall) -> CallReply:
                return await backend.call_bytes(call.service, call.method, call.payload)

            front = EpoxyServer({("examples.calc.Calc", "Calculate"): forward})
            await front.listen()
            async with client_of(front) as client:
                with pytest.raises(CallFailed) as caught:
                    await client.call(CALC, "Calculate", Params(operation=4))
            await front.close()
        assert unmarshal_error(caught.value.data).unique_id

    def test_a_class_that_lacks_a_method_is_no_service(self) -> None:
        class Half:
            async def calculate(self, params: Any) -> None:
                """Not all of it."""

        with pytest.raises(TypeError, match="Half has no coroutine method Note"):
            offer(CALC, Half())


async def test_what_a_real_client_sent_gets_what_a_real_server_answered(
    server: EpoxyServer,
) -> None:
    """Bond's C++ client pipelines after its config; the answers are those of Bond's C# server."""
    recorded = [
        (vector["direction"], bytes.fromhex(vector["wire"]))
        for vector in load("epoxy")
        if vector["name"].startswith("live-cpp-client-cs-server-")
    ]
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"".join(wire for sender, wire in recorded if sender == "client->server"))
    writer.write_eof()
    answered = b"".join(wire for sender, wire in recorded if sender == "server->client")
    assert await reader.read() == answered
    writer.close()


class TestEvents:
    async def test_are_sent(self, server: EpoxyServer, calculator: Calculator) -> None:
        async with client_of(server) as client:
            await client.send_event(CALC, "Note", Params(x=1, y=2))
            assert await calculator.notes.get() == Params(x=1, y=2)

    async def test_both_ways(self, server: EpoxyServer, calculator: Calculator) -> None:
        ours = Calculator()
        async with client_of(server, handlers=offer(CALC, ours)) as client:
            await client.call(CALC, "Calculate", Params())
            await calculator.callers[0].send_event(CALC, "Note", Params(x=5, y=6))
            assert await ours.notes.get() == Params(x=5, y=6)

    async def test_many_arrive_in_order(self, server: EpoxyServer, calculator: Calculator) -> None:
        async with client_of(server) as client:
            for n in range(300):
                await client.send_event(CALC, "Note", Params(x=n))
            notes = [await calculator.notes.get() for _ in range(300)]
        assert [note.x for note in notes] == list(range(300))

    @pytest.mark.parametrize("method", ["Calculate", "Nope"])
    async def test_what_nobody_takes_is_counted_and_not_answered(
        self, server: EpoxyServer, calculator: Calculator, method: str
    ) -> None:
        async with client_of(server) as client:
            await client.send_event_bytes("examples.calc.Calc", method, EMPTY)
            await client.call(CALC, "Calculate", Params())
            assert calculator.callers[0].events_dropped == 1

    async def test_come_too_fast_and_are_counted(self) -> None:
        gate = asyncio.Event()

        async def slow(call: IncomingCall) -> None:
            await gate.wait()

        async def dropped(call: IncomingCall) -> bytes:
            return EMPTY

        handlers = {("s", "Slow"): slow, ("s", "Fast"): dropped}
        server = EpoxyServer(handlers, limits=EpoxyLimits(goodbye_s=0.2))
        await server.listen()
        async with client_of(server) as client:
            for _ in range(2000):
                await client.send_event_bytes("s", "Slow", EMPTY)
            call = asyncio.create_task(client.call_bytes("s", "Fast", EMPTY))
            while not any(peer.events_dropped for peer in server.peers):
                await asyncio.sleep(0)
            gate.set()
            await call
            (peer,) = server.peers
            assert 0 < peer.events_dropped < 1000
        await server.close()


class TestLayerData:
    async def test_goes_with_request_and_response(self, server: EpoxyServer) -> None:
        async with client_of(server) as client:
            reply = await client.call_bytes("test.Layers", "Echo", EMPTY, layer_data=b"layer")
        assert reply == CallReply(EMPTY, b"layer")

    async def test_identifies_the_client(self, server: EpoxyServer, calculator: Calculator) -> None:
        async with client_of(server, token="s3cret") as client:
            await client.call(CALC, "Calculate", Params())
        (layer,) = calculator.layers
        assert layer is not None and unmarshal_credentials(layer) == "s3cret"


class TestConnections:
    async def test_calls_in_flight_fail_when_the_connection_dies(
        self, server: EpoxyServer, calculator: Calculator
    ) -> None:
        async with client_of(server) as client:
            await client.call(CALC, "Calculate", Params())
            task = asyncio.create_task(client.call(CALC, "Calculate", Params(operation=5)))
            await asyncio.sleep(0)
            calculator.callers[0].session.transport.abort()
            with pytest.raises(ConnectionLost, match="may or may not have been done"):
                await task

    async def test_a_client_reconnects_by_itself(self, server: EpoxyServer) -> None:
        async with client_of(server) as client:
            await client.call(CALC, "Calculate", Params())
            for peer in list(server.peers):
                await peer.close()
            assert await client.call(CALC, "Calculate", Params(x=1), timeout_s=5) == Result(z=1)

    async def test_a_server_that_closes_answers_what_it_was_asked(self) -> None:
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def slow(call: IncomingCall) -> bytes:
            asked.set()
            await go_on.wait()
            return call.payload

        server = EpoxyServer({("s", "Slow"): slow})
        await server.listen()
        async with client_of(server) as client:
            call = asyncio.create_task(client.call_bytes("s", "Slow", EMPTY))
            await asked.wait()
            closing = asyncio.create_task(server.close())
            await asyncio.sleep(0)
            go_on.set()
            assert (await call).payload == EMPTY
            await closing

    async def test_nobody_listening_is_reported_at_once(self) -> None:
        server = EpoxyServer({})
        port = await server.listen()
        await server.close()
        with pytest.raises(ConnectFailed, match=f"can't connect to 127.0.0.1:{port}"):
            await EpoxyClient("127.0.0.1", port).__aenter__()

    async def test_a_closed_client_raises(self, server: EpoxyServer) -> None:
        async with client_of(server) as client:
            pass
        with pytest.raises(ConnectionLost, match="closed"):
            await client.call(CALC, "Calculate", Params())

    async def test_a_peer_that_does_not_read_is_not_written_to_without_end(
        self, server: EpoxyServer
    ) -> None:
        from crosswire.wire.epoxy.frames import ConfigFrame, Message, MessageType, serialize

        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(serialize(ConfigFrame()))
        request = Message(1, MessageType.REQUEST, "test.Layers", "Echo", payload=b"x" * 100_000)
        data = serialize(request)
        for _ in range(400):
            writer.write(data)
        while not server.peers or not next(iter(server.peers)).session.congested:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        (peer,) = server.peers
        assert peer.session.transport.get_write_buffer_size() < 20_000_000
        writer.transport.abort()
        del reader

    async def test_tls(self, calculator: Calculator, tls: TlsPair) -> None:
        server = EpoxyServer(offer(CALC, calculator), tls=tls.server)
        port = await server.listen()
        async with EpoxyClient("127.0.0.1", port, tls=tls.client) as client:
            result = await client.call(CALC, "Calculate", Params(x=67, y=87, operation=MUL))
            assert result == Result(z=5829)
            await asyncio.wait_for(client.close(), 2)
        await server.close()

    def test_uvloop(self) -> None:
        async def talk() -> Any:
            server = EpoxyServer(offer(CALC, Calculator()))
            await server.listen()
            async with client_of(server) as client:
                result = await client.call(CALC, "Calculate", Params(x=67, y=87, operation=MUL))
            await server.close()
            return result

        assert uvloop.run(talk()) == Result(z=5829)

    async def test_a_failed_tls_handshake_leaves_nothing(
        self, tls: TlsPair, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.CRITICAL, "asyncio")
        server = EpoxyServer({}, tls=tls.server)
        port = await server.listen()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(bytes.fromhex("010043470100000000"))
        await reader.read()
        writer.close()
        assert not server.peers
        await server.close()
