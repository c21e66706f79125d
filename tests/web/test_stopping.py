"""Requests that are in progress when the hub stops: they end first, then the store is closed."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pyarrow as pa
import pytest

from crosswire.errors import StoreFailed
from crosswire.server.server import Server
from crosswire.web.app import App
from crosswire.web.listener import WebListener
from tests.web.conftest import StartWeb, WebHub

SEARCH = "GET /v1/messages?text=nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n"
UPLOAD = (
    "POST /v1/analyses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n"
    "content-length: 1000\r\n\r\nabc"
)
STREAM = "GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n"


@asynccontextmanager
async def asking(web: WebHub, request: str) -> AsyncIterator[asyncio.StreamReader]:
    """A connection with this request, which the hub has begun to serve."""
    peer = socket.socket()
    # Little of a response is in the system's buffers.
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.connect(("127.0.0.1", web.port))
    reader, writer = await asyncio.open_connection(sock=peer)
    try:
        writer.write(request.encode())
        await until(lambda: app_of(web).requests.count > 0)
        yield reader
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def app_of(web: WebHub) -> App:
    listener = web.server.listeners["http"]
    assert isinstance(listener, WebListener)
    return listener.app


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.001)


async def stop_undamaged(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    hub = server.hub
    with caplog.at_level(logging.INFO):
        await server.stop()
    assert hub.store.damages.entries == []
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []


async def long_read(web: WebHub) -> str:
    """A request for 480 messages, which are more than fit into any buffer."""
    for _ in range(8):
        await web.produce("queue/a", *(["x" * 50_000] * 60))
    plan = await web.post("/v1/log/plan", {"destinations": ["queue/a"]})
    names = ("node", "starts", "ends", "first", "behind")
    body = json.dumps({"destinations": ["queue/a"], **{name: plan[name] for name in names}})
    head = "POST /v1/log/read HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}"


def status_of(response: bytes) -> int:
    return int(response.split()[1])


async def test_a_search_ends_before_the_store_is_closed(
    web: WebHub, caplog: pytest.LogCaptureFixture
) -> None:
    await web.produce("queue/a", *(["something"] * 3_000))
    async with asking(web, SEARCH) as reader:
        await stop_undamaged(web.server, caplog)
        response = await asyncio.wait_for(reader.read(), 10)
    # It has a few seconds, which are enough unless the machine is very busy.
    assert status_of(response) in (200, 503)
    assert json.loads(response.partition(b"\r\n\r\n")[2])


async def test_a_request_that_takes_too_long_is_refused(
    web: WebHub, caplog: pytest.LogCaptureFixture
) -> None:
    async with asking(web, UPLOAD) as reader:
        web.server.hurry()
        await stop_undamaged(web.server, caplog)
        response = await asyncio.wait_for(reader.read(), 10)
    assert status_of(response) == 503
    assert json.loads(response.partition(b"\r\n\r\n")[2]) == {
        "error": "busy",
        "description": "the hub is stopping: retry when it runs again",
    }


async def test_a_live_stream_ends_with_the_hub(
    web: WebHub, caplog: pytest.LogCaptureFixture
) -> None:
    async with asking(web, STREAM) as reader:
        await asyncio.wait_for(reader.readuntil(b"connected"), 10)
        await stop_undamaged(web.server, caplog)
        rest = await asyncio.wait_for(reader.read(), 10)
    assert b'event: end\ndata: {"reason":"the hub is stopping"}' in rest
    assert rest.endswith(b"\r\n0\r\n\r\n")


async def test_a_read_of_the_log_ends_in_order(
    web: WebHub, caplog: pytest.LogCaptureFixture
) -> None:
    async with asking(web, await long_read(web)) as reader:
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        stopping = asyncio.create_task(stop_undamaged(web.server, caplog))
        await until(lambda: web.server.log is not None and web.server.log.ends_streams)
        received = await asyncio.wait_for(_chunks(reader), 20)
        await stopping
    with pa.ipc.open_stream(received) as batches:
        messages = sum(batch.num_rows for batch in batches)
    # Whole batches, and not all of them: the client continues there.
    assert 0 < messages < 480


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """The whole body. Raises IncompleteReadError if it is cut off."""
    found = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        found += (await reader.readexactly(size + 2))[:-2]
    return found


async def test_a_response_that_nobody_reads_is_cut_off(
    web: WebHub, caplog: pytest.LogCaptureFixture
) -> None:
    async with asking(web, await long_read(web)) as reader:
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        web.server.hurry()
        await stop_undamaged(web.server, caplog)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await asyncio.wait_for(_chunks(reader), 20)


async def test_nothing_is_reported_as_damaged_after_the_end(start_web: StartWeb) -> None:
    web = await start_web()
    await web.produce("queue/a", "1")
    store = web.hub.store
    await web.server.stop()
    with pytest.raises(StoreFailed, match="closed"):
        store.report_damage("tables", "the database is closed")
    assert store.damages.entries == []
