"""Responses that clients do not read: they count for their user's memory, and are bounded."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.web.conftest import WebHub
from tests.web.test_log import PLANNED, plan, until

SIZE = 6 << 20


@asynccontextmanager
async def unread(web: WebHub, head: str, body: bytes = b"") -> AsyncIterator[None]:
    """A request whose response is not read."""
    lines = [*head.splitlines(), "host: localhost", f"content-length: {len(body)}"]
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(peer, ("127.0.0.1", web.port))
        await loop.sock_sendall(peer, "\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        yield


async def read_request(web: WebHub) -> tuple[str, bytes]:
    planned = await plan(web, "queue/a")
    body = {key: planned[key] for key in PLANNED} | {"destinations": ["queue/a"]}
    head = "POST /v1/log/read HTTP/1.1\ncontent-type: application/json"
    return head, json.dumps(body).encode()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_it_counts_until_the_client_leaves(web: WebHub, is_stream: bool) -> None:
    (identifier,) = await web.produce("queue/a", "x" * SIZE)
    request = f"GET /v1/messages/{identifier} HTTP/1.1", b""
    if is_stream:
        request = await read_request(web)
    budget = web.server.context.budget
    async with unread(web, *request):
        # The kernel takes some of it.
        await until(lambda: budget.held_bytes > SIZE // 4)
    await until(lambda: budget.held_bytes < 1 << 16)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_without_room_a_large_response_is_refused(web: WebHub, is_stream: bool) -> None:
    (identifier,) = await web.produce("queue/a", "x" * SIZE)
    head, body = f"GET /v1/messages/{identifier} HTTP/1.1", b""
    if is_stream:
        head, body = await read_request(web)
    budget = web.server.context.budget
    limits = budget.limit_bytes, budget.share_bytes
    budget.configure(SIZE // 2, SIZE // 2)
    status, answer = await web.ask(f"{head}\nhost: localhost", body)
    assert (status, json.loads(answer)["error"]) == (503, "unavailable")
    assert (await web.ask("GET /v1/state HTTP/1.1\nhost: localhost"))[0] == 200
    budget.configure(*limits)
    assert (await web.ask(f"{head}\nhost: localhost", body))[0] == 200
