"""What a fault of ours leaves behind is found, reported and given back; what is in use never is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from crosswire.config import ProtocolLimits
from crosswire.gateways.context import GatewayContext
from crosswire.gateways.relink.links import Links
from crosswire.server.leftovers import LeftoverCheck
from crosswire.server.server import Server
from crosswire.wire.relink.frames import RelinkLimits
from tests.gateways.conftest import StartServer, nothing_left_over
from tests.gateways.wire_peers import OPENINGS, Held, WirePeer, until

BY_NAME = {each.name: each for each in OPENINGS}


async def opened(server: Server, name: str) -> WirePeer:
    """A peer that has said all it has to say, and was heard."""
    opening = BY_NAME[name]
    peer = WirePeer(server, opening.listener)
    await peer.open(opening)
    for step in opening.steps:
        await peer.write_and_be_read(peer.bytes_of([step]))
    return peer


def without_leaving(peer: WirePeer) -> None:
    peer.gateway._leave = lambda _end: None  # type: ignore[method-assign]


def restored(peer: WirePeer) -> None:
    vars(peer.gateway).pop("_leave", None)


def without_own_part(peer: WirePeer) -> None:
    peer.gateway.leave = lambda: None  # type: ignore[method-assign]


def forgetful(peer: WirePeer) -> None:
    peer.gateway.attachments.clear()
    peer.gateway.providers.clear()


LEAKS: list[tuple[str, Callable[[WirePeer], None], set[str]]] = [
    ("emp-hello", without_leaving, {"slot", "connection"}),
    ("emp-queue", without_leaving, {"slot", "connection", "consumer"}),
    ("emp-named", without_leaving, {"slot", "connection", "consumer"}),
    ("emp-topic", without_leaving, {"slot", "connection", "subscriber"}),
    ("emp-serve", without_leaving, {"slot", "connection", "provider"}),
    ("emp-queue", forgetful, {"consumer"}),
    ("epoxy-named", forgetful, {"consumer"}),
    ("micromsg2-topic", forgetful, {"subscriber"}),
    ("micromsg2-serve", forgetful, {"provider"}),
    ("emqp-subscribe", forgetful, {"subscriber"}),
    ("emqp-worker", forgetful, {"consumer", "provider"}),
    ("emqp-worker", without_own_part, {"identity", "worker"}),
    ("emqp-scheduler", without_own_part, {"identity", "scheduler"}),
    ("emqp-status", without_own_part, {"identity"}),
    ("relink-consume", without_own_part, {"link"}),
    ("relink-serve", without_own_part, {"link"}),
    ("relink-consume", without_leaving, {"slot", "connection", "link"}),
]


@pytest.mark.parametrize(
    ("name", "leak", "kinds"), LEAKS, ids=lambda each: getattr(each, "__name__", None)
)
async def test_what_leaks_is_reported_and_given_back(
    start_server: StartServer,
    caplog: pytest.LogCaptureFixture,
    name: str,
    leak: Callable[[WirePeer], None],
    kinds: set[str],
) -> None:
    server = await start_server(limits=_short_links())
    before = Held.by(server)
    peer = await opened(server, name)
    leak(peer)
    peer.abort()
    await until(peer.gateway.session.gone.done)
    restored(peer)
    assert Held.by(server) != before
    server.leftovers.look()
    assert server.leftovers.healed == {}  # it might just be about to leave
    server.leftovers.look()
    await until(lambda: Held.by(server) == before)
    assert set(server.leftovers.healed) <= kinds
    assert server.leftovers.healed
    reported = {each.crosswire_fields["kind"] for each in _reports(caplog)}
    assert reported == set(server.leftovers.healed)
    for kind in reported:
        assert server.context.counters["left over", peer.gateway.protocol, kind] >= 1
    server.leftovers.healed.clear()


async def test_a_connection_whose_owner_was_never_told_of_its_end(
    start_server: StartServer,
) -> None:
    server = await start_server()
    before = Held.by(server)
    peer = await opened(server, "emp-queue")
    peer.gateway.session.connection.close()  # and nobody wakes the session
    server.leftovers.look()
    server.leftovers.look()
    assert server.leftovers.healed == {"unfinished": 1}
    assert Held.by(server) == before
    server.leftovers.healed.clear()
    await peer.close()


async def test_a_connection_that_is_not_listed_or_not_counted(start_server: StartServer) -> None:
    server = await start_server()
    peer = await opened(server, "emp-queue")
    held = Held.by(server)
    del server.context.gateways[peer.gateway.id]
    server.leftovers.look()
    server.leftovers.look()
    assert Held.by(server) == held
    server.context.connection_slots.leave(peer.gateway)
    server.leftovers.look()
    server.leftovers.look()
    assert Held.by(server) == held
    assert server.leftovers.healed == {"unlisted": 1, "uncounted": 1}
    server.leftovers.healed.clear()
    await peer.close()


async def test_a_slot_of_something_that_is_gone(start_server: StartServer) -> None:
    class Gone:
        protocol: ClassVar[str] = "http"
        is_gone = True

    server = await start_server()
    server.context.connection_slots.add(Gone(), "192.0.2.1")
    server.leftovers.look()
    server.leftovers.look()
    assert len(server.context.connection_slots) == 0
    assert server.leftovers.healed == {"slot": 1}
    server.leftovers.healed.clear()


@pytest.mark.parametrize("fault", ["no clock", "late clock"])
async def test_a_link_that_nobody_would_forget(start_server: StartServer, fault: str) -> None:
    server = await start_server()
    links = server.context.shared(Links)
    peer = await opened(server, "relink-consume")
    peer.abort()
    await until(lambda: links._cut)
    (identifier,) = links._cut
    if fault == "no clock":
        del links._cut[identifier]
    else:
        links._cut[identifier].since -= 1000
    server.leftovers.look()
    server.leftovers.look()
    assert server.leftovers.healed == {"link": 1}
    assert list(links._cut) == ([identifier] if fault == "no clock" else [])
    server.leftovers.healed.clear()


async def test_what_is_in_use_is_left_alone(start_server: StartServer) -> None:
    """Peers of every kind come, work and go in every way while it looks all the time."""
    server = await start_server(limits=_short_links())
    stop = asyncio.Event()

    async def look() -> None:
        while not stop.is_set():
            server.leftovers.look()
            await asyncio.sleep(0)

    async def use(name: str) -> None:
        for end in ("eof", "rst"):
            peer = await opened(server, name)
            await peer.end(end)
            await until(lambda peer=peer: peer.gateway.left)
            await peer.close()

    looking = asyncio.create_task(look())
    for opening in OPENINGS:
        if opening.name != "epoxy-call":  # waits for its answer
            await use(opening.name)
    stop.set()
    await looking
    await nothing_left_over(server)


async def test_it_looks_by_itself_in_slices(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosswire.server.leftovers._INTERVAL_S", 0.01)
    monkeypatch.setattr("crosswire.server.leftovers._SLICE", 3)
    server = await start_server()
    for number in range(50):
        server.hub.queue(f"queue/q{number}")
    peer = await opened(server, "emp-queue")
    forgetful(peer)
    peer.abort()
    await until(lambda: server.leftovers.healed == {"consumer": 1})
    server.leftovers.healed.clear()


async def test_a_source_that_raises_does_not_stop_it(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosswire.server.leftovers._INTERVAL_S", 0.001)
    server = await start_server()
    raised = 0

    def source(_site: GatewayContext) -> Any:
        nonlocal raised
        raised += 1
        raise RuntimeError("for the test")

    check = LeftoverCheck(server.context, [source])
    check.start()
    await until(lambda: raised > 2)
    check.stop()
    assert server.hub.callbacks.failed["leftovers"] == raised


def _short_links() -> ProtocolLimits:
    return ProtocolLimits(relink=RelinkLimits(link_s=0.05))


def _reports(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [
        each
        for each in caplog.records
        if each.getMessage() == "left over" and each.levelno == logging.ERROR
    ]
