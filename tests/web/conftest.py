"""A real hub with its door for HTTP, on a free port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from crosswire.cli.hub import Api
from crosswire.config import LISTENERS, Config
from crosswire.hub.attachment import Attachment, Consumer, Delivery, Notice
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.policies import QueuePolicy, Retry
from crosswire.server.server import Server
from crosswire.web.listener import WebListener


class WebHub:
    """A server and questions to it; they are asked from a thread, as a client would."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.hub = server.hub
        self.port = server.listeners["http"].address.port

    async def get(self, path: str, *, token: str | None = None, **query: object) -> Any:
        return await asyncio.to_thread(self._api(token).get, path, **query)

    async def post(self, path: str, body: dict[str, Any], *, token: str | None = None) -> Any:
        return await asyncio.to_thread(self._api(token).post, path, body)

    async def patch(self, path: str, body: dict[str, Any], *, token: str | None = None) -> Any:
        return await asyncio.to_thread(self._api(token).patch, path, body)

    async def delete(self, path: str, *, token: str | None = None) -> Any:
        return await asyncio.to_thread(self._api(token).delete, path)

    def _api(self, token: str | None) -> Api:
        return Api(f"http://127.0.0.1:{self.port}", token)

    async def produce(self, destination: str, *texts: str, **more: Any) -> list[int]:
        messages = [{"destination": destination, "text": text, **more} for text in texts]
        ids: list[int] = (await self.post("/v1/messages", {"messages": messages}))["ids"]
        return ids

    async def raw(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of what is answered to these bytes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            answer = await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), body

    async def ask(self, head: str, body: bytes = b"") -> tuple[int, bytes]:
        """Like `raw`, with the rest of a request around its first lines."""
        lines = [*head.splitlines(), "connection: close", f"content-length: {len(body)}"]
        return await self.raw("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


StartWeb = Callable[..., Awaitable[WebHub]]


@pytest.fixture
async def start_web(tmp_path: Path) -> AsyncIterator[StartWeb]:
    """Starts a hub; options are those of Config, and `clock`."""
    servers: list[Server] = []

    async def start(**options: Any) -> WebHub:
        listen = dict.fromkeys(LISTENERS, "off") | {"http": "127.0.0.1:0"}
        listen |= options.pop("listen", {})
        options.setdefault("drain_s", 0.2)
        clock = options.pop("clock", None)
        config = Config(data=str(tmp_path / "data"), listen=listen, **options)
        server = Server(config, http=WebListener, clock=clock)
        await server.start()
        servers.append(server)
        return WebHub(server)

    yield start
    for server in servers:
        await server.stop()


@pytest.fixture
async def web(start_web: StartWeb) -> WebHub:
    """One whose queue `q` gives up at the first refusal."""
    policy = QueuePolicy(retry=Retry(max_attempts=1))
    return await start_web(queues={"q": policy})


class Taker:
    """A consumer inside the hub: settles, refuses or holds what it is given."""

    def __init__(self, web: WebHub, destination: str, *, does: str, window: int = 100) -> None:
        self.does = does
        self.given: list[int] = []
        self._web = web
        peer = LedgerPeer("test", "taker-1", "anna")
        self.consumer: Consumer = web.hub.consume(
            destination, self, web.server.context.now(), peer=peer, window=window
        )

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        ids = [delivery.id for delivery in deliveries]
        self.given += ids
        now = self._web.server.context.now()
        if self.does == "settle":
            attachment.settle(ids, now)
        elif self.does == "refuse":
            attachment.refuse(ids, now, cause="can't")

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        raise AssertionError(notice)

    def broken(self, error: Exception) -> None:
        raise AssertionError(error)

    def leave(self) -> None:
        self.consumer.close(self._web.server.context.now())


async def bury(web: WebHub, *texts: str, **more: Any) -> list[int]:
    """Dead letters of `q`; gives their ids there."""
    await web.produce("queue/q", *texts, **more)
    taker = Taker(web, "queue/q", does="refuse")
    await web.hub.committed()
    await web.hub.committed()
    taker.leave()
    return [dead_letter.id for dead_letter in web.hub.dead_letters.list("queue/q/dead")]
