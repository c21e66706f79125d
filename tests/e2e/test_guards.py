"""What a hub does not put up with, in every protocol: each peer that goes too far is refused in its
protocol's own words, counted, and logged once."""

from __future__ import annotations

import asyncio
import logging
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import msgspec
import pytest

import crosswire
from crosswire.access import User
from crosswire.bond import hub_module
from crosswire.client.native.dial import Backoff
from crosswire.client.native.emp import EmpClient
from crosswire.client.native.emqp import EmqpPeer, EmqpSubscriber, connect_peer
from crosswire.client.native.epoxy import EpoxyClient
from crosswire.client.native.micromsg2 import MicroMsg2Client, MicroMsg2Delivery
from crosswire.client.native.relink import RelinkClient
from crosswire.config import Config, ConnectionLimits, ProtocolLimits, TlsFiles
from crosswire.errors import (
    ClientError,
    ConfigError,
    ConnectFailed,
    HandshakeFailed,
    HubError,
    RequestFailed,
    TlsFailed,
)
from crosswire.gateways.relink.links import Links
from crosswire.listeners import LISTENERS, PLAIN_LISTENERS
from crosswire.server.server import GATEWAYS, Server
from crosswire.wire import protocol
from crosswire.wire.contract import Row
from crosswire.wire.emp.frames import EmpLimits
from crosswire.wire.emqp.frames import EmqpLimits
from crosswire.wire.epoxy.frames import EpoxyLimits
from crosswire.wire.micromsg2.frames import MicroMsg2Limits
from crosswire.wire.relink.frames import RelinkLimits
from tests.conftest import TlsPair
from tests.e2e.bridging import ports_of, until
from tests.e2e.parties import (
    EmpParty,
    EmqpParty,
    EpoxyParty,
    MicroMsg2Party,
    Party,
    RelinkParty,
)
from tests.e2e.pipe import pipe_to
from tests.gateways.conftest import StartServer, port_of

LISTENER = {
    "emp": "emp",
    "emqp": "emqp-clients",
    "relink": "relink",
    "epoxy": "epoxy",
    "micromsg2": "micromsg2",
}
PROTOCOLS = list(LISTENER)
SECURE = ["emp", "relink", "epoxy", "micromsg2"]
PARTY: dict[str, type[Party]] = {
    "emp": EmpParty,
    "emqp": EmqpParty,
    "relink": RelinkParty,
    "epoxy": EpoxyParty,
    "micromsg2": MicroMsg2Party,
}


def limits(**options: Any) -> ProtocolLimits:
    """The same for all protocols."""
    return ProtocolLimits(
        emp=EmpLimits(**options),
        emqp=EmqpLimits(**options),
        relink=RelinkLimits(**options),
        epoxy=EpoxyLimits(**options),
        micromsg2=MicroMsg2Limits(**options),
    )


class Raw:
    """A peer of bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, server: Server, listener: str) -> Raw:
        return cls(*await asyncio.open_connection("127.0.0.1", port_of(server, listener)))

    async def goodbye(self, name: str) -> Row | None:
        """The last frame that came before the end, if any did."""
        async with asyncio.timeout(10):
            data = await self.reader.read()
        self.writer.close()
        entry = protocol(name)
        rows = entry.decoder(entry.roles[-1]).rows(data)
        return rows[-1] if rows else None


def shown(row: Row | None) -> tuple[str, Any]:
    """A goodbye's frame, and its code or name."""
    if row is None:
        return "", None
    fields = row.fields or {}
    return row.frame or "", next(
        (fields[key] for key in ("error_code", "code", "name") if key in fields), None
    )


class Log:
    """What was logged about connections that went too far."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "crosswire.gateways")
        self._caplog = caplog

    def lines(self, event: str) -> list[dict[str, Any]]:
        return [
            record.__dict__["crosswire_fields"]
            for record in self._caplog.records
            if record.name == "crosswire.gateways" and record.getMessage() == event
        ]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    return Log(caplog)


# ---------------------------------------------------------------------------------------- strangers


class TestStrangers:
    @pytest.mark.parametrize("listener", sorted(PLAIN_LISTENERS))
    def test_without_users_only_this_machine_comes_in(self, listener: str) -> None:
        config = Config(listen={listener: "0.0.0.0:0"})
        assert set(config.exposed()) == {listener}

    async def test_another_address_is_refused(self, start_server: StartServer) -> None:
        with pytest.raises(ConfigError, match="--insecure"):
            await start_server(listen={"emp": "0.0.0.0:0"})

    async def test_unless_one_insists(self, start_server: StartServer) -> None:
        server = await start_server(listen={"emp": "0.0.0.0:0"}, insecure=True)
        assert server.listeners["emp"].address.host == "0.0.0.0"

    async def test_or_there_are_users(self, start_server: StartServer) -> None:
        user = User(name="anna", certificate="anna")
        server = await start_server(listen={"emp": "0.0.0.0:0"}, users=(user,))
        async with EmpClient("127.0.0.1", port_of(server, "emp")) as client:
            with pytest.raises(RequestFailed, match="forbidden"):
                await client.request("$publish", {"destination": "queue/q", "text": ""})


# ---------------------------------------------------------------------------------------------- TLS


class Authority(NamedTuple):
    """Who signs: a server's certificate, and that of a client called anna."""

    files: TlsFiles
    anna: ssl.SSLContext
    nobody: ssl.SSLContext


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory, tls: TlsPair) -> Authority:
    folder = tmp_path_factory.mktemp("authority")
    key, certificate = folder / "key.pem", folder / "anna.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    subprocess.run(
        [*make.split(), "-keyout", key, "-out", certificate, "-subj", "/CN=anna.example"],
        check=True,
        capture_output=True,
    )
    anna = ssl.create_default_context(cafile=tls.certificate)
    anna.load_cert_chain(certificate, key)
    files = TlsFiles(certificate=str(tls.certificate), key=str(tls.key), client_ca=str(certificate))
    return Authority(files, anna, ssl.create_default_context(cafile=tls.certificate))


ANNA = User(name="anna", certificate="anna.example", produce=("queue/a",), call=("service/#",))


async def start_secure(start_server: StartServer, files: TlsFiles) -> Server:
    listen = dict.fromkeys(LISTENERS, "off")
    listen |= {f"{name}-tls": "127.0.0.1:0" for name in SECURE if name in GATEWAYS}
    return await start_server(listen=listen, tls=files, users=(ANNA,))


async def publish_securely(
    name: str, server: Server, context: ssl.SSLContext, destination: str = "queue/a"
) -> None:
    """Raises HubError for a refusal."""
    url = f"{name}+tls://localhost:{port_of(server, f'{name}-tls')}"
    async with crosswire.connect(url, tls=context) as client:
        await client.publish(destination, b"x")


@pytest.mark.parametrize("name", SECURE)
class TestTls:
    async def test_a_certificate_identifies_the_peer(
        self, start_server: StartServer, authority: Authority, name: str
    ) -> None:
        server = await start_secure(start_server, authority.files)
        await publish_securely(name, server, authority.anna)
        assert server.hub.queue("queue/a").length == 1

    async def test_and_what_it_may_not_do(
        self, start_server: StartServer, authority: Authority, name: str
    ) -> None:
        server = await start_secure(start_server, authority.files)
        with pytest.raises(HubError):
            await publish_securely(name, server, authority.anna, "queue/b")
        assert server.context.counters["forbidden", name] == 1

    async def test_without_one_it_is_nobody(
        self, start_server: StartServer, authority: Authority, name: str
    ) -> None:
        server = await start_secure(start_server, authority.files)
        with pytest.raises(HubError):
            await publish_securely(name, server, authority.nobody)

    async def test_where_one_is_required_nobody_gets_in(
        self, start_server: StartServer, authority: Authority, name: str
    ) -> None:
        files = TlsFiles(
            certificate=authority.files.certificate,
            key=authority.files.key,
            client_ca=authority.files.client_ca,
            client_certificates="required",
        )
        server = await start_secure(start_server, files)
        with pytest.raises((HandshakeFailed, HubError), match="a client certificate"):
            await publish_securely(name, server, authority.nobody)
        assert server.context.counters["connections", name] == 0

    async def test_a_hub_that_is_not_trusted_gets_nothing(
        self, start_server: StartServer, authority: Authority, name: str
    ) -> None:
        server = await start_secure(start_server, authority.files)
        with pytest.raises(TlsFailed, match="certificate verify failed"):
            await publish_securely(name, server, ssl.create_default_context())

    async def test_bytes_that_are_no_tls_end_there(
        self, start_server: StartServer, authority: Authority, name: str
    ) -> None:
        server = await start_secure(start_server, authority.files)
        raw = await Raw.connect(server, f"{name}-tls")
        raw.writer.write(b"GET / HTTP/1.0\r\n\r\n" * 10)
        async with asyncio.timeout(10):
            answer = await raw.reader.read()
        raw.writer.close()
        # TLS's own goodbye, if any: an alert record.
        assert answer[:1] in (b"", b"\x15")
        assert server.context.counters["connections", name] == 0
        await publish_securely(name, server, authority.anna)
        assert server.hub.queue("queue/a").length == 1


async def test_a_named_subscription_over_relink_is_its_users(
    start_server: StartServer, authority: Authority
) -> None:
    listen = {"relink-tls": "127.0.0.1:0"}
    anna = User(name="anna", certificate="anna.example", consume=("topic/#", "queue/#"))
    server = await start_server(listen=listen, tls=authority.files, users=(anna,))
    hub, now = server.hub, server.context.now()
    dead = hub.subscriptions.named("n", "topic/secret", "", None, now, "bert").dead_letters
    hub.store.number(dead)

    def client(endpoint: str) -> RelinkClient:
        port = port_of(server, "relink-tls")
        return RelinkClient("localhost", port, endpoint, tls=authority.anna)

    async with client("topic/t?subscribe&name=n"):
        assert [(each.owner, each.definition.pattern) for each in hub.subscriptions.all()] == [
            ("anna", "t"),
            ("bert", "secret"),
        ]
    for endpoint in ("topic/u?subscribe&name=n", f"{dead}?consume"):
        with pytest.raises(ConnectFailed):
            await client(endpoint).__aenter__()
    assert server.context.counters["forbidden", "relink"] == 1
    own = hub.subscriptions.get("n", "anna")
    assert own is not None
    hub.store.number(own.dead_letters)
    async with client(f"{own.dead_letters}?consume"):
        assert hub.is_consumed(own.dead_letters)


@pytest.mark.parametrize("is_connected", [True, False])
@pytest.mark.parametrize("endpoint", ["queue/a", "queue/a?consume", "service/s?serve"])
async def test_links_end_with_their_rights(
    start_server: StartServer, authority: Authority, endpoint: str, is_connected: bool
) -> None:
    every = ("queue/#", "service/#")
    anna = User(name="anna", certificate="anna.example", produce=every, consume=every, serve=every)
    listen = {"relink-tls": "127.0.0.1:0"}
    server = await start_server(listen=listen, tls=authority.files, users=(anna,))
    links = server.context.shared(Links)
    # The hub forgets the link: who leaves has nobody to part from.
    port = port_of(server, "relink-tls")
    client = RelinkClient("localhost", port, endpoint, tls=authority.anna, close_timeout_s=0.1)
    await client.__aenter__()
    if not is_connected:
        client.session.abort()
        await until(lambda: not server.context.gateways)
    assert len(links._ends) == 1
    poorer = User(name="anna", certificate="anna.example")
    server.reload(msgspec.structs.replace(server.config, users=(poorer,)))
    assert not links._ends and not hub_holds(server)
    with suppress(ClientError):
        await client.__aexit__(None, None, None)


def hub_holds(server: Server) -> bool:
    return server.hub.is_consumed("queue/a") or server.hub.is_served("service/s")


# ----------------------------------------------------------------------------------------- too many

# Before both sides have sent hello eMQP and Relink can't report what is wrong: they hang up.
ROOM = {
    "emp": ("error", 2),
    "emqp": ("zmtp-greeting", None),
    "relink": ("", None),
    "epoxy": ("protocol-error", "connection-rejected"),
    "micromsg2": ("error", "limit"),
}
TIME = {
    "emp": ("error", 1),
    "emqp": ("zmtp-greeting", None),
    "relink": ("", None),
    "epoxy": ("protocol-error", "timeout"),
    "micromsg2": ("error", "handshake"),
}


@pytest.mark.parametrize("name", PROTOCOLS)
class TestConnections:
    @pytest.mark.parametrize("limit", ["connections", "connections_per_address"])
    async def test_one_too_many_is_refused_by_name(
        self, start_server: StartServer, log: Log, name: str, limit: str
    ) -> None:
        server = await start_server(connections=ConnectionLimits(**{limit: 1}))
        first = await Raw.connect(server, LISTENER[name])
        await until(lambda: len(server.context.gateways) == 1)
        second = await Raw.connect(server, LISTENER[name])
        assert shown(await second.goodbye(name)) == ROOM[name]
        assert server.context.counters["rejected", name] == 1
        assert [line["error"] for line in log.lines("failed")] == ["ServiceUnavailable"]
        first.writer.close()

    async def test_who_leaves_makes_room(self, start_server: StartServer, name: str) -> None:
        server = await start_server(connections=ConnectionLimits(connections=1))
        first = await Raw.connect(server, LISTENER[name])
        await until(lambda: len(server.context.gateways) == 1)
        first.writer.close()
        await until(lambda: not server.context.gateways)
        async with PARTY[name](ports_of(server)) as party:
            await party.produce("queue/q", b"x")
        assert server.hub.queue("queue/q").length == 1

    async def test_a_handshake_has_its_time(
        self, start_server: StartServer, log: Log, name: str
    ) -> None:
        server = await start_server(limits=limits(handshake_s=0.1))
        raw = await Raw.connect(server, LISTENER[name])
        assert shown(await raw.goodbye(name)) == TIME[name]
        assert server.context.counters["failed", name, "PeerTimeout"] == 1
        assert [line["error"] for line in log.lines("failed")] == ["PeerTimeout"]

    async def test_a_slow_handshake_gets_no_more_of_it(
        self, start_server: StartServer, name: str
    ) -> None:
        """A byte now and then does not start the time anew."""
        server = await start_server(limits=limits(handshake_s=0.2))
        raw = await Raw.connect(server, LISTENER[name])
        hello = HELLO[name]

        async def drip() -> None:
            for index in range(len(hello) - 1):
                raw.writer.write(hello[index : index + 1])
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        await raw.goodbye(name)
        dripping.cancel()
        assert server.context.counters["failed", name, "PeerTimeout"] == 1

    async def test_who_neither_speaks_nor_waits_is_sent_away(
        self, start_server: StartServer, log: Log, name: str
    ) -> None:
        server = await start_server(connections=ConnectionLimits(idle_s=0.2))
        async with PARTY[name](ports_of(server)) as party:
            await party.produce("queue/q", b"x")
            await until(lambda: server.context.counters["failed", name, "PeerTimeout"] > 0)
        assert log.lines("failed")[0]["description"] == "idle for 0.2 s"

    async def test_who_waits_for_messages_may_be_silent(
        self, start_server: StartServer, name: str
    ) -> None:
        server = await start_server()
        async with PARTY[name](ports_of(server)) as party:
            inbox = await party.consume("queue/q")
            # Not a short limit: on a busy machine, that would end the party before it consumes.
            much_later = asyncio.get_running_loop().time() + 1000
            for gateway in list(server.context.gateways.values()):
                gateway.close_idle(1.0, much_later)
            async with PARTY["emp"](ports_of(server)) as producer:
                await producer.produce("queue/q", b"x")
            async with asyncio.timeout(10):
                assert (await inbox.get()).payload == b"x"


HELLO = {
    "emp": bytes.fromhex("000000080000000001000000"),
    "emqp": b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48),
    "relink": bytes(8),
    "epoxy": bytes.fromhex("010043470100000000"),
    "micromsg2": b"\x01\x00\x00\x09crosswire",
}
"""How they begin."""


# ----------------------------------------------------------------------------------------- too much


@pytest.mark.parametrize("name", PROTOCOLS)
class TestSizes:
    async def test_a_frame_that_is_too_large(
        self, start_server: StartServer, log: Log, name: str
    ) -> None:
        server = await start_server(limits=limits(frame_bytes=65536))
        with pytest.raises(TOO_LARGE):
            async with asyncio.timeout(2.0), PARTY[name](ports_of(server)) as party:
                await party.produce("queue/q", bytes(200_000))
        assert server.context.counters["failed", name, "FrameTooLarge"] >= 1
        assert log.lines("failed")[0]["error"] == "FrameTooLarge"

    async def test_the_largest_that_fits_passes(self, start_server: StartServer, name: str) -> None:
        server = await start_server(limits=limits(frame_bytes=65536))
        async with PARTY[name](ports_of(server)) as party:
            await party.produce("queue/q", bytes(40_000))
        assert server.hub.queue("queue/q").length == 1


TOO_LARGE = (ClientError, TimeoutError)
"""Clients that connect again by themselves, and then send it again, never come to an end."""


# ------------------------------------------------------------------------------- too many of a kind


Ask = Callable[[str], Awaitable[Any]]
_BOND = hub_module()


class OneConnection(NamedTuple):
    """A native client: those of the library have a connection for each subscription."""

    subscribe: Ask
    serve: Ask


@asynccontextmanager
async def one_connection(server: Server, name: str) -> AsyncIterator[OneConnection]:
    port = port_of(server, name)
    if name == "emp":
        async with EmpClient("127.0.0.1", port) as emp:
            yield OneConnection(
                lambda topic: emp.request("$subscribe", {"destination": topic}),
                lambda service: emp.request("$serve", {"services": [service]}),
            )
    elif name == "epoxy":
        hub = _BOND.service("crosswire.Hub")
        subscription = _BOND.struct("crosswire.Subscription").python_class
        services = _BOND.struct("crosswire.Services").python_class
        async with EpoxyClient("127.0.0.1", port) as epoxy:
            yield OneConnection(
                lambda topic: epoxy.call(hub, "Subscribe", subscription(destination=topic)),
                lambda service: epoxy.call(hub, "Serve", services(services=[service])),
            )
    else:

        async def respond(call: MicroMsg2Delivery) -> tuple[bytes, dict[str, Any]]:
            return bytes(call.payload), {}

        async with MicroMsg2Client("127.0.0.1", port) as micromsg2:
            yield OneConnection(
                lambda topic: micromsg2.subscribe(topic).__aenter__(),
                lambda service: micromsg2.serve(f"service/{service}", respond),
            )


@pytest.mark.parametrize("name", ["emp", "epoxy", "micromsg2"])
class TestSubscriptions:
    async def test_one_too_many_is_refused(
        self, start_server: StartServer, log: Log, name: str
    ) -> None:
        server = await start_server(connections=ConnectionLimits(subscriptions=2))
        async with one_connection(server, name) as peer:
            for number in range(2):
                await peer.subscribe(f"topic/t{number}")
            await refused(peer.subscribe("topic/t2"), server, name)
        assert server.context.counters["limited", name, "subscriptions"] == 1
        assert [line["limit"] for line in log.lines("limited")] == ["subscriptions"]

    async def test_and_one_service_too_many(
        self, start_server: StartServer, log: Log, name: str
    ) -> None:
        server = await start_server(connections=ConnectionLimits(subscriptions=2))
        async with one_connection(server, name) as peer:
            for number in range(2):
                await peer.serve(f"s{number}")
            await refused(peer.serve("s2"), server, name)
        assert server.context.counters["limited", name, "services"] == 1
        assert [line["limit"] for line in log.lines("limited")] == ["services"]


async def refused(work: Awaitable[Any], server: Server, name: str) -> None:
    """MicroMsg2 refuses by hanging up, and its client would try again; the others answer."""
    if name == "micromsg2":
        await work
        await until(lambda: server.context.counters["failed", name, "DestinationFull"] == 1)
    else:
        with pytest.raises(RequestFailed):
            await work


async def test_a_worker_gets_as_many_queues_as_it_may(start_server: StartServer, log: Log) -> None:
    server = await start_server(connections=ConnectionLimits(subscriptions=2))
    worker = EmqpPeer()
    queues = [(10, f"q{number}") for number in range(4)]
    port = port_of(server, "emqp-workers")
    await connect_peer(worker, "worker", "127.0.0.1", port, queues=queues)
    await until(lambda: server.context.counters["limited", "emqp", "subscriptions"] == 2)
    assert len(log.lines("limited")) == 1
    await worker.close()


async def test_a_link_has_a_limit_of_channels(start_server: StartServer, log: Log) -> None:
    server = await start_server(limits=ProtocolLimits(relink=RelinkLimits(channels=2)))
    with pytest.raises(ClientError):
        async with RelinkClient("127.0.0.1", port_of(server, "relink"), "queue/q") as client:
            for channel in range(3):
                await client.sender(channel).send(b"x")
                await client.sender(channel).consumed(timeout_s=5.0)
    assert [line["error"] for line in log.lines("failed")] == ["LimitExceeded"]


async def test_a_subscriber_of_emqp_has_a_limit_of_topics(
    start_server: StartServer, log: Log
) -> None:
    small = ProtocolLimits(emqp=EmqpLimits(subscription_bytes=1000))
    server = await start_server(limits=small)
    topics = [f"topic-{number}" for number in range(100)]
    port = port_of(server, "emqp-subscribers")
    async with EmqpSubscriber("127.0.0.1", port, topics, backoff=Backoff(5.0, 5.0)):
        await until(lambda: bool(log.lines("failed")))
    assert ["subscription" in line["description"] for line in log.lines("failed")] == [True]


# ---------------------------------------------------------------------------- peers that don't read

COUNT = 96
SIZE_BYTES = 256 * 1024
DOOR = {**LISTENER, "emqp": "emqp-subscribers"}


@pytest.mark.parametrize("name", PROTOCOLS)
async def test_a_peer_that_does_not_read_holds_up_nobody_and_gets_it_later(
    start_server: StartServer, name: str
) -> None:
    """24 MiB are published; what waits for the peer in memory is bounded, the rest on disk."""
    server = await start_server(connections=ConnectionLimits(congested_bytes=SIZE_BYTES))
    ports = ports_of(server)
    payloads = [number.to_bytes(4) * (SIZE_BYTES // 4) for number in range(COUNT)]
    async with (
        pipe_to(ports[DOOR[name]]) as pipe,
        PARTY[name](ports) as reader,
        PARTY[name]({**ports, DOOR[name]: pipe.port}) as stuck,
        EmpParty(ports) as producer,
    ):
        inbox = await reader.consume("topic/t")
        late = await stuck.consume("topic/t")
        await until(lambda: attached(server) == 2)
        pipe.stall()
        most_waiting = 0
        for payload in payloads:
            await producer.produce("topic/t", payload)
            waiting = [
                each.session.transport.get_write_buffer_size()
                for each in server.context.gateways.values()
            ]
            most_waiting = max(most_waiting, *waiting)
            async with asyncio.timeout(10):
                assert (await inbox.get()).payload == payload
        assert most_waiting < 8 * SIZE_BYTES
        pipe.flow()
        for payload in payloads:
            async with asyncio.timeout(10):
                assert (await late.get()).payload == payload


def attached(server: Server) -> int:
    return sum(len(each.attachments) for each in server.context.gateways.values())
