"""Client certificates: who vouches for them, which names count, and what a reload takes away."""

from __future__ import annotations

import asyncio
import http.client
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crosswire.access import Access, User
from crosswire.client.native.emp import EmpClient
from crosswire.client.native.epoxy import EpoxyClient
from crosswire.client.native.micromsg2 import MicroMsg2Client
from crosswire.client.native.relink import RelinkClient
from crosswire.config import LISTENERS, TlsFiles
from crosswire.errors import ClientError
from crosswire.server.server import GATEWAYS, Server
from crosswire.web.listener import WebListener
from tests.certificates import Authority, make_certificate
from tests.gateways.conftest import StartServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("authorities")


@pytest.fixture(scope="module")
def first(folder: Path) -> Authority:
    return Authority(folder, "first")


@pytest.fixture(scope="module")
def second(folder: Path) -> Authority:
    return Authority(folder, "second")


@pytest.fixture(scope="module")
def hub_files(folder: Path) -> TlsFiles:
    certificate, key = make_certificate(folder, "hub")
    return TlsFiles(certificate=str(certificate), key=str(key))


def trusting(files: TlsFiles, folder: Path, *authorities: Authority) -> TlsFiles:
    bundle = folder / ("-".join(each.name for each in authorities) + ".bundle")
    bundle.write_text("".join(each.certificate.read_text() for each in authorities))
    return msgspec.structs.replace(files, client_ca=str(bundle))


def presenting(files: TlsFiles, certificate: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files.certificate)
    if certificate is not None:
        context.load_cert_chain(certificate)
    return context


EVERYTHING = ("queue/#", "topic/#", "service/#")
ANNA = User(
    name="anna",
    certificate="anna",
    produce=EVERYTHING,
    consume=EVERYTHING,
    serve=EVERYTHING,
    administer=True,
)
OPEN = {f"{name}-tls": "127.0.0.1:0" for name in GATEWAYS if f"{name}-tls" in LISTENERS}
LISTEN = dict.fromkeys(LISTENERS, "off") | OPEN


def port(server: Server, name: str) -> int:
    return server.listeners[name].address.port


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def clients(server: Server, tls: ssl.SSLContext) -> dict[str, Any]:
    """A client of each protocol that has TLS, which does nothing."""
    return {
        "emp": EmpClient("127.0.0.1", port(server, "emp-tls"), tls=tls),
        "epoxy": EpoxyClient("127.0.0.1", port(server, "epoxy-tls"), tls=tls),
        "micromsg2": MicroMsg2Client("127.0.0.1", port(server, "micromsg2-tls"), tls=tls),
        "relink": RelinkClient("127.0.0.1", port(server, "relink-tls"), "queue/q?consume", tls=tls),
    }


@pytest.mark.parametrize("protocol", ["emp", "epoxy", "micromsg2", "relink"])
async def test_an_authority_that_is_removed(
    start_server: StartServer,
    folder: Path,
    hub_files: TlsFiles,
    first: Authority,
    second: Authority,
    protocol: str,
) -> None:
    both = trusting(hub_files, folder, first, second)
    server = await start_server(tls=both, users=(ANNA,), listen=LISTEN)
    gateways = server.context.gateways
    old = presenting(hub_files, first.sign("/CN=anna"))
    new = presenting(hub_files, second.sign("/CN=anna"))
    mine, others = clients(server, old)[protocol], clients(server, new)[protocol]
    await mine.__aenter__()
    await until(lambda: gateways)
    (connected,) = gateways
    await others.__aenter__()
    await until(lambda: len(gateways) == 2)
    assert {each.principal for each in gateways.values()} == {"anna"}

    server.reload(msgspec.structs.replace(server.config, tls=trusting(hub_files, folder, second)))
    # At once for who is connected, and only for those: the other has the same name in it.
    await until(lambda: connected not in gateways)
    assert [each.principal for each in gateways.values()] == ["anna"]
    # And for new handshakes, with the tickets of the old ones as well.
    with pytest.raises((ClientError, TimeoutError)):
        async with asyncio.timeout(5), clients(server, old)[protocol]:
            await until(lambda: len(gateways) == 2)
    assert len([each for each in gateways.values() if each.principal]) == 1
    again = clients(server, new)[protocol]
    await again.__aenter__()
    await until(lambda: len([each for each in gateways.values() if each.principal]) == 2)
    for client in (mine, others, again):
        with suppress(ClientError):
            await client.__aexit__(None, None, None)


async def test_a_handshake_that_ends_after_the_reload_is_judged_by_the_new_authorities(
    start_server: StartServer, folder: Path, hub_files: TlsFiles, first: Authority
) -> None:
    server = await start_server(
        tls=trusting(hub_files, folder, first), users=(ANNA,), listen=LISTEN
    )
    tls = presenting(hub_files, first.sign("/CN=anna"))
    # The listener still has the old context: only what is accepted has changed.
    server.context.authorities = frozenset()
    async with EmpClient("127.0.0.1", port(server, "emp-tls"), tls=tls):
        assert [each.principal for each in server.context.gateways.values()] == [""]


async def test_a_resumed_session_ends_with_any_authority_of_its_time(
    start_server: StartServer,
    folder: Path,
    hub_files: TlsFiles,
    first: Authority,
    second: Authority,
) -> None:
    server = await start_server(
        tls=trusting(hub_files, folder, first, second), users=(ANNA,), listen=LISTEN
    )
    tls = presenting(hub_files, first.sign("/CN=anna"))
    tls.maximum_version = ssl.TLSVersion.TLSv1_2

    def connect(session: ssl.SSLSession | None) -> ssl.SSLSocket:
        import socket

        plain = socket.create_connection(("127.0.0.1", port(server, "emp-tls")))
        return tls.wrap_socket(plain, server_hostname="127.0.0.1", session=session)

    whole = await asyncio.to_thread(connect, None)
    resumed = await asyncio.to_thread(connect, whole.session)
    assert resumed.session_reused
    gateways = server.context.gateways
    await until(lambda: len(gateways) == 2)
    assert {each.principal for each in gateways.values()} == {"anna"}
    server.reload(msgspec.structs.replace(server.config, tls=trusting(hub_files, folder, first)))
    await until(lambda: len(gateways) == 1)
    whole.close()
    resumed.close()


NAMES = {
    "the common name": ("/CN=anna", "", "anna"),
    "two common names": ("/CN=anna/CN=bert", "", None),
    "an alternative name of that text": ("/CN=nobody", "DNS:anna", None),
    "a host": ("/CN=nobody", "DNS:Carl.example.org", "carl"),
    "a common name like a host's": ("/CN=dns:carl.example.org", "", None),
    "a URI": ("/CN=nobody", "URI:spiffe://example.org/dora", "dora"),
    "two users": ("/CN=anna", "DNS:carl.example.org", None),
    "one user twice": ("/CN=nobody", "DNS:carl.example.org,DNS:CARL.example.org", "carl"),
    "two common names and a host": ("/CN=anna/CN=bert", "DNS:carl.example.org", "carl"),
}


@pytest.mark.parametrize("kind", NAMES)
async def test_names_in_a_certificate(
    start_server: StartServer, folder: Path, hub_files: TlsFiles, first: Authority, kind: str
) -> None:
    users = (
        ANNA,
        User(name="bert", certificate="cn:bert"),
        User(name="carl", certificate="dns:carl.example.org"),
        User(name="dora", certificate="uri:spiffe://example.org/dora"),
    )
    server = await start_server(tls=trusting(hub_files, folder, first), users=users, listen=LISTEN)
    subject, alternatives, expected = NAMES[kind]
    tls = presenting(hub_files, first.sign(subject, alternatives))
    async with EmpClient("127.0.0.1", port(server, "emp-tls"), tls=tls):
        found = [each.principal for each in server.context.gateways.values()]
    assert found == [expected or ""]


def test_kinds_of_names_are_kept_apart() -> None:
    access = Access((User(name="anna", certificate="email:a@example.org"),))
    assert access.by_certificate({"email:a@example.org"}) == "anna"
    assert access.by_certificate({"cn:a@example.org", "cn:email:a@example.org"}) is None


# ------------------------------------------------------------------------------------------- HTTPS


def ask(server: Server, tls: ssl.SSLContext, **headers: str) -> int:
    connection = http.client.HTTPSConnection(
        "127.0.0.1", port(server, "https"), context=tls, timeout=10
    )
    try:
        connection.request("GET", "/v1/state", headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


async def test_https_has_the_hubs_certificate_and_its_clients(
    tmp_path: Path,
    folder: Path,
    hub_files: TlsFiles,
    first: Authority,
    second: Authority,
) -> None:
    from crosswire.config import Config

    bert = User(name="bert", token="the-secret-of-bert")
    config = Config(
        data=str(tmp_path / "data"),
        listen=dict.fromkeys(LISTENERS, "off") | {"https": "127.0.0.1:0"},
        tls=trusting(hub_files, folder, first),
        users=(ANNA, bert),
        drain_s=0,
    )
    server = Server(config, http=WebListener)
    await server.start()
    try:
        anna = presenting(hub_files, first.sign("/CN=anna"))
        nobody = presenting(hub_files, None)
        assert await asyncio.to_thread(ask, server, anna) == 200
        assert await asyncio.to_thread(ask, server, nobody) == 401
        # What the request names comes before what the connection has, and neither helps the other.
        token = "Bearer the-secret-of-bert"
        assert await asyncio.to_thread(ask, server, anna, authorization=token) == 403
        assert await asyncio.to_thread(ask, server, anna, authorization="Bearer x") == 401

        kept = http.client.HTTPSConnection("127.0.0.1", port(server, "https"), context=anna)
        await asyncio.to_thread(kept.request, "GET", "/v1/state")
        assert (await asyncio.to_thread(kept.getresponse)).read()
        tls = trusting(hub_files, folder, second)
        server.reload(msgspec.structs.replace(server.config, tls=tls))
        await asyncio.to_thread(kept.request, "GET", "/v1/state")
        assert (await asyncio.to_thread(kept.getresponse)).status == 401
        kept.close()
        with pytest.raises((OSError, http.client.HTTPException)):
            await asyncio.to_thread(ask, server, anna)
    finally:
        await server.stop()
