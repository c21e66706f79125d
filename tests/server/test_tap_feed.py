"""The tap on a real hub: what was on the wire is in the lake, secrets excepted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crosswire.access import User
from crosswire.client.native.emp import EmpClient
from crosswire.config import Config, LakeSettings, TapSettings
from crosswire.lake.schemas import BACKWARD, DATA, FIN, FORWARD, GAP, LOST, OPEN, RESET
from crosswire.lake.tap_spool import Peers, Spool, WireRow
from crosswire.lake.verification import verify
from crosswire.server.server import Server
from crosswire.server.tap_feed import TapFeed
from crosswire.wire.emp.decoder import EmpDecoder
from crosswire.wire.emp.frames import Hello, serialize
from tests.gateways.conftest import StartServer, port_of
from tests.lake.crash import read_lake

TAPPED = LakeSettings(tap=TapSettings(listeners=("emp",)), seal_s=0.02)
COLUMNS = [
    "seq",
    "connection",
    "direction",
    "kind",
    "offset",
    "length",
    "data",
    "protocol",
    "listener",
    "acceptor_port",
]


def rows(server: Server) -> list[dict[str, Any]]:
    return read_lake(Path(server.config.data) / "lake", "wire", COLUMNS)


def stream(found: list[dict[str, Any]], direction: str) -> bytes:
    return b"".join(
        row["data"] for row in found if row["kind"] == DATA and row["direction"] == direction
    )


async def test_both_directions_are_recorded_from_open_to_end(start_server: StartServer) -> None:
    server = await start_server(lake=TAPPED)
    async with EmpClient("127.0.0.1", port_of(server, "emp")) as client:
        await client.request("$echo", {"x": 1})
    await server.stop()
    found = rows(server)
    assert (found[0]["kind"], found[0]["protocol"], found[0]["listener"]) == (OPEN, "emp", "emp")
    assert {row["acceptor_port"] for row in found} == {port_of(server, "emp")}
    for direction, role in ((FORWARD, "client"), (BACKWARD, "server")):
        mine = [row for row in found if row["direction"] == direction]
        ends = [row["offset"] for row in mine if row["kind"] == FIN]
        assert set(ends) <= {len(stream(found, direction))}
        frames = [row.frame for row in EmpDecoder(role).rows(stream(found, direction))]
        assert frames[0] == "hello"
        assert ("request" if role == "client" else "response") in frames
    assert FIN in [row["kind"] for row in found if row["direction"] == BACKWARD]
    assert not list(verify(Path(server.config.data) / "lake"))


async def test_what_is_not_tapped_is_not_recorded(start_server: StartServer) -> None:
    settings = LakeSettings(tap=TapSettings(listeners=("epoxy",)))
    server = await start_server(lake=settings)
    async with EmpClient("127.0.0.1", port_of(server, "emp")) as client:
        await client.request("$echo", {})
    await server.stop()
    assert rows(server) == []


async def test_a_sample_takes_some_connections_whole(start_server: StartServer) -> None:
    settings = LakeSettings(tap=TapSettings(listeners=("emp",), sample=0.5))
    server = await start_server(lake=settings)
    for _ in range(30):
        async with EmpClient("127.0.0.1", port_of(server, "emp")) as client:
            await client.request("$echo", {})
    await server.stop()
    found = rows(server)
    connections = {row["connection"] for row in found}
    assert 3 < len(connections) < 27
    for name in connections:
        kinds = [row["kind"] for row in found if row["connection"] == name]
        assert (kinds[0], kinds[-1]) == (OPEN, FIN)


async def test_a_token_is_not_recorded(start_server: StartServer) -> None:
    secret = "very-secret-token"
    users = (User(name="ann", token=secret),)
    server = await start_server(lake=TAPPED, users=users)
    async with EmpClient("127.0.0.1", port_of(server, "emp")) as client:
        await client.request("$authenticate", {"token": secret})
    await server.stop()
    said = stream(rows(server), FORWARD)
    assert b'"$authenticate"' in said and b"*" * len(secret) in said
    lake = Path(server.config.data) / "lake"
    assert not [
        path
        for path in lake.rglob("*.*")
        if path.is_file() and secret.encode() in path.read_bytes()
    ]


async def test_a_connection_that_the_hub_closes_ends_in_both_directions(
    start_server: StartServer,
) -> None:
    settings = LakeSettings(tap=TapSettings(listeners=("emqp-clients",)))
    server = await start_server(lake=settings)
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server, "emqp-clients"))
    writer.write(b"no greeting of ZeroMQ")
    await reader.read()
    writer.close()
    await server.stop()
    found = rows(server)
    assert len(stream(found, FORWARD)) == len(b"no greeting of ZeroMQ")
    ends = {row["direction"] for row in found if row["kind"] in (FIN, RESET)}
    assert ends == {FORWARD, BACKWARD}


async def test_a_connection_that_breaks_is_reset(start_server: StartServer) -> None:
    server = await start_server(lake=TAPPED)
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server, "emp"))
    writer.write(serialize(Hello(1)))
    await reader.readexactly(12)
    sock = writer.get_extra_info("socket")
    linger = (1).to_bytes(4, "little") + bytes(4)
    sock.setsockopt(1, 13, linger)  # SO_LINGER of 0 s: closing sends RST
    writer.transport.abort()
    async with asyncio.timeout(5):
        while server.context.gateways:
            await asyncio.sleep(0.005)
    await server.stop()
    assert [row["kind"] for row in rows(server)][-2:] == [RESET, RESET]


async def test_rows_are_sealed_soon_while_the_hub_runs(start_server: StartServer) -> None:
    server = await start_server(lake=TAPPED)
    async with EmpClient("127.0.0.1", port_of(server, "emp")) as client:
        await client.request("$echo", {})
        await until(lambda: any(row["kind"] == DATA for row in rows(server)))
        assert {row["listener"] for row in rows(server)} == {"emp"}
        assert server.context.gateways


class Wires:
    """A feed without sockets."""

    def __init__(self, lake: Path, memory_bytes: int = 1 << 20, **options: Any) -> None:
        settings = LakeSettings(
            tap=TapSettings(listeners=("emp",)), seal_s=0.01, memory_bytes=memory_bytes
        )
        self.lake = lake
        self.lost = 0
        self.feed = TapFeed(settings, lake, "n1", count=self.count, **options)

    def count(self, *_what: str, by: int = 1) -> None:
        self.lost += by

    def add(self, offset: int, size: int) -> None:
        peers = Peers("c", "emp", "emp")
        if not offset:
            self.feed.add(WireRow(peers, FORWARD, OPEN, 0, 0, 1_790_000_000_000_000))
        data = bytes(size)
        self.feed.add(WireRow(peers, FORWARD, DATA, offset, size, 1_790_000_000_000_000, data))

    def kinds(self) -> list[str]:
        return [row["kind"] for row in read_lake(self.lake, "wire", ["seq", "kind"])]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_too_much_at_once_is_lost_and_told(tmp_path: Path) -> None:
    wires = Wires(tmp_path, memory_bytes=2000)
    await wires.feed.start()
    for offset in range(0, 10_000, 1000):
        wires.add(offset, 1000)
    assert wires.lost == 9
    await until(wires.kinds)
    wires.add(10_000, 5)
    await wires.feed.stop()
    assert wires.kinds() == [OPEN, DATA, LOST, GAP, DATA]
    assert not list(verify(tmp_path))


async def test_a_spool_that_can_not_be_opened_is_tried_again(tmp_path: Path) -> None:
    tries = 0

    def broken(*arguments: Any, **options: Any) -> Spool:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError(28, "No space left on device")
        return Spool(*arguments, **options)

    wires = Wires(tmp_path, spool=broken)
    await wires.feed.start()
    wires.add(0, 10)
    await until(lambda: tries >= 3)
    wires.add(10, 10)
    await wires.feed.stop()
    assert wires.kinds() == [LOST, DATA]


async def test_without_room_rows_are_lost_and_told(tmp_path: Path) -> None:
    """What is left of the disk is the store's."""
    looks = 0

    def has_room() -> bool:
        nonlocal looks
        looks += 1
        return looks > 3

    wires = Wires(tmp_path, has_room=has_room)
    await wires.feed.start()
    wires.add(0, 10)
    await until(lambda: looks > 3)
    wires.add(10, 10)
    await wires.feed.stop()
    assert wires.kinds() == [LOST, DATA]
    assert not list(verify(tmp_path))


async def test_what_a_kill_left_is_sealed_even_if_the_tap_is_off(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = await start_server()
    await server.stop()
    lake = Path(server.config.data) / "lake"
    spool = Spool(lake, server.hub.node, memory_bytes=1 << 20)
    spool.add([WireRow(Peers("c", "emp", "emp"), FORWARD, OPEN, 0, 0, 1)], 1)
    server = await start_server(lake=LakeSettings(retention_days=0))
    await server.stop()
    assert [row["kind"] for row in rows(server)] == [OPEN, LOST]


def test_only_listeners_that_exist_can_be_tapped() -> None:
    from crosswire.config import check

    config, mistakes = check('[lake.tap]\nlisteners = ["emp", "http", "nope"]\n')
    assert config is None
    assert [mistake.line for mistake in mistakes] == [2, 2]
    assert isinstance(check('[lake.tap]\nlisteners = ["emp"]\nsample = 0.1\n')[0], Config)
    assert check("[lake.tap]\nsample = 2\n")[0] is None


@pytest.mark.parametrize("setting", ["messages", "ledger"])
async def test_a_table_can_be_switched_off(start_server: StartServer, setting: str) -> None:
    server = await start_server(lake=LakeSettings(**{setting: False}))  # type: ignore[arg-type]
    async with EmpClient("127.0.0.1", port_of(server, "emp")) as client:
        await client.request("$publish", {"destination": "queue/q", "json": 1})
    await server.stop()
    lake = Path(server.config.data) / "lake"
    found = {name: len(read_lake(lake, name, ["seq"])) for name in ("messages", "ledger")}
    other = "ledger" if setting == "messages" else "messages"
    assert found == {setting: 0, other: 1}
