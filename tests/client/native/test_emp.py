"""The EMP client and server on real sockets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from crosswire.client.native.dial import Backoff
from crosswire.client.native.emp import EmpClient, EmpServer, Json
from crosswire.errors import (
    ConnectFailed,
    ConnectionLost,
    RequestFailed,
    RequestTimeout,
)
from crosswire.wire.emp.frames import EmpLimits
from tests.conftest import TlsPair


async def echo(data: Json) -> Json:
    return data


async def fail(data: Json) -> Json:
    raise RequestFailed("unknown_job", "no such job", data=b'{"job_id":"x1"}')


async def crash(data: Json) -> Json:
    raise ZeroDivisionError


async def never(data: Json) -> Json:
    await asyncio.Event().wait()
    raise AssertionError


HANDLERS = {"echo": echo, "fail": fail, "crash": crash, "never": never}
SOON = Backoff(0.01, 0.02)


@pytest.fixture
async def server() -> AsyncIterator[EmpServer]:
    server = EmpServer(HANDLERS)
    await server.listen()
    yield server
    await server.close()


def client_of(server: EmpServer, **options: Any) -> EmpClient:
    return EmpClient("127.0.0.1", server.port, backoff=SOON, **options)


async def test_a_request_is_answered(server: EmpServer) -> None:
    async with client_of(server) as client:
        assert await client.request("echo", {"s": "h\u00e9llo"}) == {"s": "h\u00e9llo"}


async def test_json_crosses_unchanged_to_the_last_digit(server: EmpServer) -> None:
    async with client_of(server) as client:
        big = b'{"n":123456789012345678901234567890}'
        assert await client.request_json("echo", big) == big


@pytest.mark.parametrize(
    ("number", "becomes"),
    [
        ("1e400", math.inf),
        ("-1e999", -math.inf),
        ("9" * 400, int("9" * 400)),
        ("9" * 5000, math.inf),
    ],
    ids=["large", "small", "long", "longest"],
)
async def test_numbers_of_any_size_reach_the_handler(number: str, becomes: float) -> None:
    """The hub lets them pass: a handler that is not called would make dead letters of them."""
    got: list[Json] = []

    async def keep(data: Json) -> None:
        got.append(data)

    server_of_one = EmpServer({"keep": keep})
    await server_of_one.listen()
    try:
        async with client_of(server_of_one) as client:
            assert await client.request_json("keep", f'{{"n":{number}}}'.encode()) == b"{}"
    finally:
        await server_of_one.close()
    assert got == [{"n": becomes}]


async def test_many_requests_in_flight_are_answered_each_its_own(server: EmpServer) -> None:
    async with client_of(server) as client:
        replies = await asyncio.gather(*(client.request("echo", {"n": n}) for n in range(500)))
    assert replies == [{"n": n} for n in range(500)]


async def test_a_failure_carries_code_description_and_data(server: EmpServer) -> None:
    async with client_of(server) as client:
        with pytest.raises(RequestFailed) as caught:
            await client.request("fail")
    failure = caught.value
    assert (failure.code, failure.description, failure.data) == (
        "unknown_job",
        "no such job",
        b'{"job_id":"x1"}',
    )


async def test_an_unknown_operation_keeps_the_connection(server: EmpServer) -> None:
    async with client_of(server) as client:
        with pytest.raises(RequestFailed, match="unknown_op"):
            await client.request("nope")
        assert await client.request("echo") == {}


async def test_a_crashing_handler_is_an_internal_failure(server: EmpServer) -> None:
    async with client_of(server) as client:
        with pytest.raises(RequestFailed, match="internal"):
            await client.request("crash")


async def test_a_request_times_out(server: EmpServer) -> None:
    async with client_of(server) as client:
        with pytest.raises(RequestTimeout, match="no response to never"):
            await client.request("never", timeout_s=0.05)


async def test_the_server_asks_the_client(server: EmpServer) -> None:
    async with client_of(server, handlers={"hello": echo}) as client:
        await client.request("echo")
        (peer,) = server.peers
        assert await peer.request("hello", {"name": "Srv"}) == {"name": "Srv"}


async def test_requests_in_flight_fail_when_the_connection_dies(server: EmpServer) -> None:
    async with client_of(server) as client:
        await client.request("echo")
        (peer,) = server.peers
        task = asyncio.create_task(client.request("never"))
        await asyncio.sleep(0)
        peer.session.transport.abort()
        with pytest.raises(ConnectionLost, match="may or may not have been done"):
            await task


async def test_a_client_reconnects_by_itself(server: EmpServer) -> None:
    async with client_of(server) as client:
        await client.request("echo")
        for peer in list(server.peers):
            await peer.close()
        assert await client.request("echo", {"again": True}, timeout_s=5) == {"again": True}


async def test_nobody_listening_is_reported_at_once() -> None:
    server = EmpServer({})
    port = await server.listen()
    await server.close()
    with pytest.raises(ConnectFailed, match=f"can't connect to 127.0.0.1:{port}"):
        await EmpClient("127.0.0.1", port).__aenter__()


async def test_a_server_that_is_no_emp_server_fails_the_handshake() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    other = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    with pytest.raises(ConnectFailed, match="speaks HTTP, not EMP"):
        await EmpClient("127.0.0.1", port).__aenter__()
    other.close()


async def test_a_closed_client_raises(server: EmpServer) -> None:
    async with client_of(server) as client:
        pass
    with pytest.raises(ConnectionLost, match="closed"):
        await client.request("echo")


async def test_closing_sends_bye(server: EmpServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(bytes.fromhex("000000080000000001000000"))
    assert await reader.readexactly(12) == bytes.fromhex("000000080000000001000000")
    while not server.peers:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    await next(iter(server.peers)).close()
    assert await reader.read() == bytes.fromhex("0000000401000000")
    writer.close()


async def exchange(server: EmpServer, sent: bytes) -> bytes:
    """All that the server answers to these bytes, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"1195725856 bytes"),
        (bytes.fromhex("1603010200010001fc0303"), b"more than the"),
        (bytes.fromhex("ffffffff"), b"4294967295 bytes"),
        (bytes.fromhex("00000000"), b"no header"),
        (bytes.fromhex("000000080000000002000000"), b"unsupported version"),
        (bytes.fromhex("0000000402000000"), b"unexpected message"),
        (bytes.fromhex("000000080000000001000000") * 2, b"unexpected message"),
    ],
)
async def test_bad_bytes_get_hello_and_error_1(
    server: EmpServer, sent: bytes, expected: bytes
) -> None:
    answer = await exchange(server, sent)
    assert answer[:12] == bytes.fromhex("000000080000000001000000")
    assert answer[16:21] == bytes.fromhex("0400000001")
    assert expected in answer


async def test_a_peer_without_hello_is_sent_away() -> None:
    server = EmpServer({}, limits=EmpLimits(handshake_s=0.05))
    await server.listen()
    assert b"no hello in time" in await exchange(server, b"")
    await server.close()


async def test_a_hello_in_crumbs_does_not_extend_the_handshake() -> None:
    server = EmpServer({}, limits=EmpLimits(handshake_s=0.2))
    port = await server.listen()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.create_task(reader.read())
    for octet in bytes.fromhex("0000000800000000010000"):
        if answer.done():
            break
        writer.write(bytes([octet]))
        await asyncio.sleep(0.05)
    assert b"no hello in time" in await answer
    writer.close()
    await server.close()


async def test_tls(tls: TlsPair) -> None:
    server = EmpServer(HANDLERS, tls=tls.server)
    port = await server.listen()
    async with EmpClient("127.0.0.1", port, tls=tls.client) as client:
        assert await client.request("echo", {"a": 1}) == {"a": 1}
    await server.close()
