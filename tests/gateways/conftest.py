"""A real hub on free ports, in a directory of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop

from crosswire.config import PLAIN_LISTENERS, Config
from crosswire.server.server import GATEWAYS, Server

StartServer = Callable[..., Awaitable[Server]]
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    """Tests with the marker `loops` run on the product's event loop as well."""
    loops: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
    if item.get_closest_marker("loops") is not None:
        loops["uvloop"] = uvloop.new_event_loop
    return loops


@pytest.fixture
async def start_server(tmp_path: Path) -> AsyncIterator[StartServer]:
    """Starts a server with all listeners on free ports; options are those of Config, and `clock`.

    Stop one by hand and start the next to see what a restart keeps: they share a directory.
    """
    servers: list[Server] = []

    async def start(**options: Any) -> Server:
        listen = {name: "127.0.0.1:0" if name in GATEWAYS else "off" for name in PLAIN_LISTENERS}
        listen |= {"https": "off"} | options.pop("listen", {})
        options.setdefault("drain_s", 0.2)
        clock = options.pop("clock", None)
        config = Config(data=str(tmp_path / "data"), listen=listen, **options)
        server = Server(config, clock=clock)
        await server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        await nothing_left_over(server)
        await server.stop()


async def nothing_left_over(server: Server) -> None:
    """The hub holds nothing for peers that are gone, and nothing had to be given back before."""
    if server.context.draining:
        return
    server.leftovers.look()
    await asyncio.sleep(0.001)  # who was just about to leave has left
    server.leftovers.look()
    assert server.leftovers.healed == {}


@pytest.fixture
async def server(start_server: StartServer) -> Server:
    return await start_server()


def port_of(server: Server, listener: str) -> int:
    return server.listeners[listener].address.port
