"""A hub as a whole: what it refuses to start with, reloads, and sends away."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from crosswire.access import User
from crosswire.client.native.emp import EmpClient
from crosswire.config import Config, ConnectionLimits, ScheduleEntry, TlsFiles
from crosswire.errors import ConfigError, RequestFailed, StoreFull
from crosswire.hub.policies import QueuePolicy
from crosswire.listeners import PLAIN_LISTENERS
from crosswire.server.server import Server
from tests.e2e.bridging import until
from tests.gateways.conftest import StartServer, port_of

ANNA = User(name="anna", token="a-secret-of-anna", produce=("queue/#",))
TICK = ScheduleEntry(id="tick", destination="queue/t", interval_s=3600, text="t", nohaste=True)


def with_changes(server: Server, **changes: object) -> Config:
    config: Config = msgspec.structs.replace(server.config, **changes)
    return config


async def test_rights_are_taken_from_who_is_connected(start_server: StartServer) -> None:
    server = await start_server(users=(ANNA,))
    async with EmpClient("127.0.0.1", port_of(server, "emp")) as client:
        await client.request("$authenticate", {"token": ANNA.token})
        await client.request("$publish", {"destination": "queue/q", "text": "x"})
        poorer = msgspec.structs.replace(ANNA, produce=())
        assert server.reload(with_changes(server, users=(poorer,))) == []
        with pytest.raises(RequestFailed, match="forbidden"):
            await client.request("$publish", {"destination": "queue/q", "text": "x"})


async def test_policies_hold_for_queues_in_use(start_server: StartServer) -> None:
    server = await start_server()
    async with EmpClient("127.0.0.1", port_of(server, "emp")) as client:
        await client.request("$publish", {"destination": "queue/q", "text": "x"})
        server.reload(with_changes(server, queues={"q": QueuePolicy(max_length=1)}))
        with pytest.raises(RequestFailed, match="refused"):
            await client.request("$publish", {"destination": "queue/q", "text": "x"})


async def test_schedules_follow_the_configuration(start_server: StartServer) -> None:
    server = await start_server(schedules=(TICK,))
    due = server.hub.schedules.all()[0].next_due
    server.reload(with_changes(server, schedules=(TICK,), drain_s=0.1))
    assert server.hub.schedules.all()[0].next_due == due
    changed = msgspec.structs.replace(TICK, interval_s=60)
    server.reload(with_changes(server, schedules=(changed,)))
    assert server.hub.schedules.all()[0].interval_s == 60
    await server.hub.committed()
    server.reload(with_changes(server, schedules=()))
    assert server.hub.schedules.all() == []


async def test_a_schedule_that_has_fired_as_often_as_it_should_stays_away(
    start_server: StartServer,
) -> None:
    once = ScheduleEntry(
        id="once", destination="queue/q", interval_s=0.1, text="x", run_count=1, missed="skip"
    )
    server = await start_server(schedules=(once,))
    await until(lambda: server.hub.depth("queue/q")[0] == 1)
    assert server.hub.schedules.all() == []
    server.reload(with_changes(server, schedules=(once,), drain_s=0.1))
    assert server.hub.schedules.all() == []
    more = msgspec.structs.replace(once, run_count=2)
    server.reload(with_changes(server, schedules=(more,), drain_s=0.1))
    assert [each.id for each in server.hub.schedules.all()] == ["once"]


async def test_what_needs_a_restart_is_told_and_left_alone(start_server: StartServer) -> None:
    server = await start_server()
    data, listen = server.config.data, server.config.listen
    waiting = server.reload(with_changes(server, data="elsewhere", listen={}, drain_s=0.1))
    assert waiting == ["data", "listen"]
    assert (server.config.data, server.config.listen) == (data, listen)
    assert server.config.drain_s == 0.1


async def test_a_reload_with_a_mistake_changes_nothing(start_server: StartServer) -> None:
    server = await start_server()
    bond = msgspec.structs.replace(server.config.bond, files=("no.bond",))
    with pytest.raises(ConfigError, match=r"no\.bond"):
        server.reload(with_changes(server, bond=bond, users=(ANNA,)))
    assert server.context.access.open


async def test_the_last_user_of_an_open_address_stays(start_server: StartServer) -> None:
    anna = User(name="anna", certificate="anna")
    server = await start_server(users=(anna,), listen={"emp": "0.0.0.0:0"})
    with pytest.raises(ConfigError, match="all rights"):
        server.reload(with_changes(server, users=()))
    assert not server.context.access.open


async def test_who_says_nothing_and_waits_for_nothing_is_sent_away(
    start_server: StartServer,
) -> None:
    server = await start_server(connections=ConnectionLimits(idle_s=0.2))
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server, "emp"))
    writer.write(bytes.fromhex("000000080000000001000000"))
    async with EmpClient("127.0.0.1", port_of(server, "emp")) as consumer:
        peer = await consumer.peer()
        await consumer.request("$subscribe", {"destination": "queue/q"})
        assert b"idle for 0.2 s" in await asyncio.wait_for(reader.read(), 10)
        assert not peer.ended.done()
    writer.close()
    assert server.context.counters["failed", "emp", "PeerTimeout"] == 1


async def test_a_hub_in_a_hurry_does_not_wait_for_answers(start_server: StartServer) -> None:
    server = await start_server(drain_s=600)
    taken = asyncio.Event()

    async def never(_data: object) -> None:
        taken.set()
        await asyncio.Event().wait()

    async with EmpClient("127.0.0.1", port_of(server, "emp"), handlers={"$deliver": never}) as peer:
        await peer.request("$subscribe", {"destination": "queue/q"})
        await peer.request("$publish", {"destination": "queue/q", "text": "x"})
        await taken.wait()
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        assert not stopping.done()
        server.hurry()
        await asyncio.wait_for(stopping, 10)


# TLS.


def make_certificate(folder: Path, name: str) -> TlsFiles:
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    curve = "ec_paramgen_curve:prime256v1"
    command = f"openssl req -x509 -newkey ec -pkeyopt {curve} -nodes -days 2 -subj /CN={name}"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    return TlsFiles(certificate=str(certificate), key=str(key))


async def test_a_renewed_certificate_is_used_without_a_restart(
    start_server: StartServer, tmp_path: Path
) -> None:
    first, second = make_certificate(tmp_path, "first"), make_certificate(tmp_path, "second")
    server = await start_server(tls=first, listen={"emp-tls": "127.0.0.1:0"} | _off("emp-tls"))
    for files in (first, second):
        server.reload(with_changes(server, tls=files))
        trust = ssl.create_default_context(cafile=files.certificate)
        async with EmpClient("127.0.0.1", port_of(server, "emp-tls"), tls=trust) as client:
            assert await client.request("$echo", {"a": 1}) == {"a": 1}


async def test_a_failed_tls_handshake_is_counted(start_server: StartServer, tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "server")
    server = await start_server(tls=files, listen={"emp-tls": "127.0.0.1:0"} | _off("emp-tls"))
    trust = ssl.create_default_context(cafile=files.certificate)
    async with EmpClient("127.0.0.1", port_of(server, "emp-tls"), tls=trust):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server, "emp-tls"))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.read()
        writer.close()
        async with asyncio.timeout(10):
            while not server.context.counters["failed", "emp", "TlsHandshake"]:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
    assert server.context.counters["failed", "emp", "TlsHandshake"] == 1


def _off(kept: str) -> dict[str, str]:
    names = {"emp-tls", "relink-tls", "epoxy-tls", "micromsg2-tls"} - {kept}
    return dict.fromkeys(names, "off")


async def test_a_client_certificate_says_who_a_peer_is(
    start_server: StartServer, tmp_path: Path
) -> None:
    files, anna = make_certificate(tmp_path, "hub"), make_certificate(tmp_path, "anna")
    tls = msgspec.structs.replace(files, client_ca=anna.certificate)
    user = User(name="anna", certificate="anna", produce=("queue/#",))
    listen = {"emp-tls": "127.0.0.1:0"} | _off("emp-tls")
    server = await start_server(tls=tls, users=(user,), listen=listen)
    trust = ssl.create_default_context(cafile=files.certificate)
    asked = {"destination": "queue/q", "text": "x"}
    async with EmpClient("127.0.0.1", port_of(server, "emp-tls"), tls=trust) as stranger:
        with pytest.raises(RequestFailed, match="forbidden"):
            await stranger.request("$publish", asked)
    trust.load_cert_chain(anna.certificate, anna.key)
    async with EmpClient("127.0.0.1", port_of(server, "emp-tls"), tls=trust) as client:
        assert "id" in await client.request("$publish", asked)


class _Door:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def close(self) -> None:
        self.calls.append("close")

    async def end_requests(self, is_hurried: Callable[[], bool]) -> None:
        self.calls.append("end_requests")

    async def finish(self) -> None:
        self.calls.append("finish")


async def test_a_stop_that_can_not_write_says_so_and_closes_all(tmp_path: Path) -> None:
    off = dict.fromkeys(PLAIN_LISTENERS, "off")
    server = Server(Config(data=str(tmp_path), listen=off))
    await server.start()
    door = _Door()
    server.listeners["http"] = door  # type: ignore[assignment]
    store = server.hub.store

    def fails(_batch: object) -> None:
        raise StoreFull("there is no room on the disk")

    store._write = fails  # type: ignore[method-assign]
    store.save("test", b"key", b"value")
    with pytest.raises(StoreFull, match=r"it has stopped, but .*: there is no room on the disk"):
        await server.stop()
    assert door.calls[-1] == "finish"
    assert door.calls.index("end_requests") > door.calls.index("close")
    again = Server(Config(data=str(tmp_path), listen=off))
    await again.start()
    await again.stop()
