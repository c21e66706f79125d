"""Deliveries in the ledger are those that the tap saw on the wire, connection by connection."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crosswire.bond import hub_module, marshal
from crosswire.config import LakeSettings, ProtocolLimits, TapSettings
from crosswire.lake.schemas import BACKWARD, DATA, FORWARD
from crosswire.server.server import Server
from crosswire.wire import protocol
from crosswire.wire.epoxy.frames import Message as EpoxyMessage
from crosswire.wire.relink.frames import Message as RelinkMessage
from crosswire.wire.relink.frames import RelinkLimits
from tests.gateways.conftest import StartServer, start_server
from tests.gateways.test_epoxy import Inbox, epoxy, publish, settle, subscribe
from tests.gateways.test_relink import abandon, client, cut, link_of, send, take, take_parts, until
from tests.lake.crash import read_lake

__all__ = ["start_server"]

LAKE = LakeSettings(tap=TapSettings(listeners=("epoxy", "relink")), seal_s=0.05)
DELIVERY = hub_module().struct("crosswire.Delivery")
WINDOW = 16
COUNT = 120

Deliveries = dict[str, Counter[int]]
"""By connection, how often each message was given."""


def sent_frames(lake: Path, name: str) -> Iterator[tuple[str, Any]]:
    """The frames that the hub sent, with their connection."""
    entry = protocol(name)
    decoders: dict[str, dict[str, Any]] = {}
    columns = ["seq", "connection", "protocol", "direction", "kind", "data"]
    for row in read_lake(lake, "wire", columns):
        if (row["protocol"], row["kind"]) != (name, DATA):
            continue
        if row["connection"] not in decoders:
            # How the hub's bytes are read may depend on the handshake of its peer.
            peer = entry.decoder(entry.roles[0])
            own = entry.decoder(entry.roles[-1], peer=peer)
            decoders[row["connection"]] = {FORWARD: peer, BACKWARD: own}
        for _, _, frame in decoders[row["connection"]][row["direction"]].feed(row["data"]):
            if row["direction"] == BACKWARD:
                yield row["connection"], frame


def on_the_wire(lake: Path) -> Deliveries:
    ids = {
        row["payload"]: row["id"] for row in read_lake(lake, "messages", ["seq", "id", "payload"])
    }
    found: Deliveries = defaultdict(Counter)
    for connection, frame in sent_frames(lake, "epoxy"):
        if isinstance(frame, EpoxyMessage) and frame.method_name == "Deliver":
            assert frame.payload is not None
            found[connection][marshal.unmarshal(frame.payload, DELIVERY).id] += 1
    for connection, frame in sent_frames(lake, "relink"):
        if isinstance(frame, RelinkMessage):
            found[connection][ids[b"".join(frame.parts)]] += 1
    return dict(found)


def in_the_ledger(lake: Path) -> Deliveries:
    found: Deliveries = defaultdict(Counter)
    for row in read_lake(lake, "ledger", ["seq", "id", "step", "connection"]):
        if row["step"] == "delivered":
            found[row["connection"]][row["id"]] += 1
    return dict(found)


async def stopped(server: Server) -> Path:
    await server.stop()
    return Path(server.config.data) / "lake"


@pytest.mark.parametrize(
    ("destination", "named"), [("queue/q", {}), ("topic/t", {"name": "n"}), ("topic/t", {})]
)
async def test_a_subscriber_whose_window_is_full(
    start_server: StartServer, destination: str, named: dict[str, str]
) -> None:
    """It lags, so that the hub reads from disk what it gets next; it settles some, goes away, and
    comes back for the rest, if that is kept for it."""
    server = await start_server(lake=LAKE)
    is_kept = bool(named) or destination.startswith("queue/")
    inbox = Inbox()
    async with epoxy(server) as publisher:
        async with epoxy(server, inbox) as first:
            await subscribe(first, destination, window=WINDOW, **named)
            for number in range(COUNT):
                await publish(publisher, destination, b"%d" % number)
            got = [await inbox.next() for _ in range(WINDOW)]
            await settle(first, *got[:4])
            got += [await inbox.next() for _ in range(4)]
            assert inbox.got.empty()
        if is_kept:
            async with epoxy(server, inbox) as second:
                await subscribe(second, destination, window=WINDOW, **named)
                for _ in range(COUNT - 4):
                    await settle(second, await inbox.next())
    lake = await stopped(server)
    wire = on_the_wire(lake)
    assert in_the_ledger(lake) == wire
    counts = [WINDOW + 4, COUNT - 4] if is_kept else [WINDOW + 4]
    assert sorted(each.total() for each in wire.values()) == counts


@pytest.mark.parametrize("comes_back", [True, False], ids=["resumed", "forgotten"])
async def test_a_link_without_a_connection(start_server: StartServer, comes_back: bool) -> None:
    """What is published meanwhile was not delivered by the connection that is closed: by the next
    one, or never."""
    link_s = 60.0 if comes_back else 0.2
    limits = ProtocolLimits(relink=RelinkLimits(link_s=link_s))
    server = await start_server(lake=LAKE, limits=limits)
    async with client(server, "topic/t?subscribe") as subscriber:
        (closed,) = server.context.gateways
        await send(server, "topic/t", *(b"%d" % number for number in range(20)))
        for _ in range(10):
            await take_parts(subscriber)
        # Sent, and not consumed.
        for _ in range(10):
            await take(subscriber)
        (cut if comes_back else abandon)(subscriber)
        await until(server, lambda: closed not in server.context.gateways)
        await send(server, "topic/t", *(b"%d" % number for number in range(20, 90)))
        if comes_back:
            for _ in range(70):
                await take_parts(subscriber)
        else:
            await until(server, lambda: link_of(server, subscriber) is None)
            subscriber.link.detach(ended=True)
    lake = await stopped(server)
    wire = on_the_wire(lake)
    assert in_the_ledger(lake) == wire
    assert sorted(each.total() for each in wire.values()) == ([20, 70] if comes_back else [20])


@pytest.mark.parametrize("endpoint", ["topic/t?subscribe", "topic/t?subscribe&name=n", "queue/q"])
async def test_a_link_that_is_cut_while_it_is_served(
    start_server: StartServer, endpoint: str
) -> None:
    """Each connection carried what the ledger has of it, and each message was delivered once; a
    link that is resumed repeats what was not acknowledged, as TCP does."""
    server = await start_server(lake=LAKE)
    consumed = endpoint if "subscribe" in endpoint else f"{endpoint}?consume"
    payloads = [b"%d:" % number + bytes(5_000) for number in range(COUNT)]
    async with client(server, consumed) as consumer, client(server, endpoint.split("?")[0]) as own:
        for start in range(0, COUNT, 10):
            for payload in payloads[start : start + 10]:
                await own.sender().send(payload)
            for number in range(max(start - 5, 0), start + 5):
                assert await take_parts(consumer) == (payloads[number],)
            cut(consumer)
        for number in range(COUNT - 5, COUNT):
            assert await take_parts(consumer) == (payloads[number],)
    lake = await stopped(server)
    wire, ledger = on_the_wire(lake), in_the_ledger(lake)
    assert len(wire) > 5
    for connection, delivered in ledger.items():
        assert delivered <= wire[connection]
    assert sum(ledger.values(), Counter()) == Counter(range(1, COUNT + 1))
