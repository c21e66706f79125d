"""Whatever a peer sends, however it ends and whatever fails: the hub keeps nothing of it.

Every listener, every kind of beginning, every kind of end, in one read and in several; afterwards
slots, connections, consumers, providers, calls and links are what they were, and others go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from crosswire.clients.emp import EmpClient
from crosswire.config import PLAIN_LISTENERS, Config, LakeSettings, ProtocolLimits
from crosswire.gateways.server import GATEWAYS, Server
from crosswire.hub.services import ServicePolicy
from crosswire.web.door import HttpDoor
from crosswire.wire.relink.frames import RelinkLimits
from tests.gateways.conftest import port_of
from tests.gateways.wire_peers import (
    FIRST_BYTES,
    OPENINGS,
    VIOLATION,
    Held,
    Opening,
    WirePeer,
    relink_hello,
    until,
)

ENDS = ["violation", "violation-eof", "eof", "rst"]


class Watched:
    """A hub with an uninvolved peer, and what was held before the others came."""

    def __init__(self, server: Server, bystander: EmpClient, taken: asyncio.Queue[Any]) -> None:
        self.server = server
        self._bystander = bystander
        self._taken = taken
        self._peers: list[WirePeer] = []
        self.before = Held.by(server)

    def peer(self, listener: str) -> WirePeer:
        peer = WirePeer(self.server, listener)
        self._peers.append(peer)
        return peer

    async def close_peers(self) -> None:
        for peer in self._peers:
            await peer.close()

    def held(self) -> Held:
        return Held.by(self.server)

    async def is_as_before(self) -> None:
        """Everything is given back, HTTP answers and the uninvolved peer works."""
        try:
            await until(lambda: self.held() == self.before, 5)
        except TimeoutError:
            assert self.held() == self.before  # shows what is left over
        data = {"destination": "queue/bystander", "text": "x"}
        assert "id" in await self._bystander.request("$publish", data)
        await asyncio.wait_for(self._taken.get(), 5)
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(self.server, "http"))
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200")
        await until(lambda: self.held() == self.before, 5)


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    """Links without a connection are forgotten at once, so that what is left over shows."""
    listen = dict.fromkeys(PLAIN_LISTENERS, "127.0.0.1:0")
    limits = ProtocolLimits(relink=RelinkLimits(link_s=0.05))
    config = Config(
        data=str(tmp_path / "data"),
        listen=listen,
        drain_s=0.2,
        limits=limits,
        services=ServicePolicy(deadline_s=0.2),
        lake=LakeSettings(messages=False, ledger=False),
    )
    server = Server(config, http=HttpDoor)
    await server.start()
    taken: asyncio.Queue[Any] = asyncio.Queue()

    async def deliver(data: Any) -> None:
        taken.put_nowait(data)

    async def busy(_data: Any) -> None:
        await asyncio.Event().wait()

    handlers = {"$deliver": deliver, "busy": busy}
    async with (
        EmpClient("127.0.0.1", port_of(server, "emp"), handlers=handlers) as bystander,
        EmpClient("127.0.0.1", port_of(server, "emp"), handlers=handlers) as provider,
    ):
        await bystander.request("$subscribe", {"destination": "queue/bystander"})
        await provider.request("$serve", {"services": ["busy"]})
        watched = Watched(server, bystander, taken)
        yield watched
        await watched.close_peers()
    await server.stop()


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


# ------------------------------------------------------------------------- what a peer can do


@pytest.mark.parametrize("listener", sorted(GATEWAYS))
async def test_first_bytes_that_mean_nothing(
    watched: Watched, caplog: pytest.LogCaptureFixture, listener: str
) -> None:
    for data in FIRST_BYTES:
        for end in ENDS[1:]:
            peer = watched.peer(listener)
            await peer.connect()
            peer.write(data + (VIOLATION if "violation" in end else b""))
            await peer.end(end)
            await until(lambda peer=peer: peer.gateway.left)
    await watched.is_as_before()
    assert errors(caplog) == []


@pytest.mark.parametrize("opening", OPENINGS, ids=lambda each: each.name)
async def test_a_legal_opening_that_ends_badly(
    watched: Watched, caplog: pytest.LogCaptureFixture, opening: Opening
) -> None:
    """In one read with what comes before, and in reads of their own."""
    for end in ENDS:
        for at_once in (True, False):
            peer = watched.peer(opening.listener)
            await peer.open(opening)
            tail = VIOLATION if "violation" in end else b""
            if at_once:
                peer.write(peer.say(opening.steps) + tail)
            else:
                for step in opening.steps:
                    await peer.write_and_be_read(peer.say([step]))
                peer.write(tail)
            await peer.end(end)
            await until(lambda peer=peer: peer.gateway.left)
    await watched.is_as_before()
    assert errors(caplog) == []


@pytest.mark.parametrize("endpoint", ["queue/q?consume", "queue/q", "nowhere", "service/r?serve"])
@pytest.mark.parametrize("tail", [VIOLATION, b"", bytes(8)], ids=["violation", "end", "early"])
async def test_a_relink_hello_and_the_end_in_one_segment(
    watched: Watched, caplog: pytest.LogCaptureFixture, endpoint: str, tail: bytes
) -> None:
    peer = watched.peer("relink")
    await peer.connect()
    peer.write(relink_hello(endpoint) + tail)
    await peer.end("eof")
    await until(lambda: peer.gateway.left)
    await watched.is_as_before()
    assert errors(caplog) == []
