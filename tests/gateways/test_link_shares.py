"""Links of two users: each has a share, and nobody's link is forgotten for another's."""

from __future__ import annotations

import asyncio

import pytest

from crosswire.access import User
from crosswire.config import ConnectionLimits, ProtocolLimits
from crosswire.errors import QuotaExceeded
from crosswire.gateways.relink.consumers import ConsumeEnd
from crosswire.gateways.relink.endpoints import parse_endpoint
from crosswire.gateways.relink.link_end import LinkEnd
from crosswire.gateways.relink.links import Links
from crosswire.hub.ledger import LedgerPeer
from crosswire.server.server import Server
from crosswire.wire.relink.handshake import LinkTerms
from tests.gateways.conftest import StartServer
from tests.gateways.wires import relink

EACH = 5
USERS = tuple(
    User(name=name, certificate=name, produce=("queue/#",), consume=("queue/#",))
    for name in ("anna", "bert")
)
LIMITS = ConnectionLimits(connections=4 * EACH)


def cut_link(server: Server, user: str, endpoint: str = "queue/q") -> LinkEnd:
    """A new link of a user without a connection."""
    links = server.context.shared(Links)
    terms = LinkTerms(endpoint=endpoint)
    end = links.open(terms, LedgerPeer("relink", "", user), parse_endpoint(endpoint))
    links.part(end)
    return end


async def test_a_share_of_links(start_server: StartServer) -> None:
    server = await start_server(users=USERS, connections=LIMITS)
    bert = [cut_link(server, "bert") for _ in range(EACH)]
    anna = [cut_link(server, "anna") for _ in range(3 * EACH)]
    assert [end.forgotten for end in anna] == [True] * (2 * EACH) + [False] * EACH
    assert not any(end.forgotten for end in bert)


async def test_connected_links_are_not_forgotten_for_a_new_one(start_server: StartServer) -> None:
    server = await start_server(users=USERS, connections=LIMITS)
    links = server.context.shared(Links)
    connected = [cut_link(server, "anna") for _ in range(EACH)]
    for end in connected:
        links._rejoin(end)
    with pytest.raises(QuotaExceeded, match="links of one user"):
        cut_link(server, "anna")
    cut_link(server, "bert")
    for end in connected:
        links.forget(end)
    cut_link(server, "anna")


async def test_what_a_link_without_a_connection_holds_counts(start_server: StartServer) -> None:
    server = await start_server(users=USERS, limits=ProtocolLimits(memory_bytes=1 << 28))
    budget = server.context.budget
    end = cut_link(server, "anna", "queue/q?consume")
    assert isinstance(end, ConsumeEnd)
    cut = server.context.shared(Links)._cut[end.id]
    end._held_bytes = 1 << 20
    cut.measure_memory()
    assert budget.owner("anna").held_bytes == budget.held_bytes == 1 << 20
    end._held_bytes = 1 << 29
    cut.measure_memory()
    for passed_s in (0.0, 1.0, 10.0):
        budget.check(asyncio.get_running_loop().time() + passed_s)
    assert end.forgotten and budget.held_bytes == 0
    assert server.context.counters["evicted", "relink"] == 1


async def test_links_of_a_hub_that_has_ended_hold_nothing(start_server: StartServer) -> None:
    """A replica that leads again has another hub, and the same budget."""
    server = await start_server(users=USERS)
    budget = server.context.budget
    end = cut_link(server, "anna", "queue/q?consume")
    assert isinstance(end, ConsumeEnd)
    end._held_bytes = 1 << 20
    server.context.shared(Links)._cut[end.id].measure_memory()
    assert budget.held_bytes == 1 << 20
    server.context.end()
    assert budget.held_bytes == 0 and not budget.owner("anna").accounts
    # Its peer's socket may be closed after that, too.
    server.context.shared(Links).part(end)
    assert budget.held_bytes == 0 and not budget.owner("anna").accounts
    server.context.shared(Links).forget(end)


async def test_too_many_queues_end_the_link(start_server: StartServer) -> None:
    """As the protocol asks, without an internal error."""
    server = await start_server()
    server.hub._destinations.owners._share.configure(0, 1.0)
    async with relink(server, "queue/new") as peer:
        peer.wire.link.send(0, [b"x"])
        peer.session.wake()
        async with asyncio.timeout(10):
            while peer.end is None:
                await asyncio.sleep(0.001)
    assert not server.hub.callbacks.failed
