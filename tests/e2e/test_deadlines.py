"""The hub's own deadlines, on the event loop that the product runs on."""

from __future__ import annotations

import asyncio

from crosswire.server.server import Server
from tests.gateways.conftest import StartServer


async def test_deadlines_are_kept_however_they_move(start_server: StartServer) -> None:
    """Each one is asked for while a later one is waited for already."""
    server: Server = await start_server()
    fired: asyncio.Queue[float] = asyncio.Queue()
    for delay_s in (0.09, 0.06, 0.03, 0.0):
        due = server.context.now() + delay_s
        server.hub.call_at(due, lambda now, due=due: fired.put_nowait(now - due))
    late = [await asyncio.wait_for(fired.get(), 5) for _ in range(4)]
    server.hub.call_at(server.context.now() + 0.01, lambda now: fired.put_nowait(0.0))
    await asyncio.wait_for(fired.get(), 5)
    assert min(late) >= 0
