"""Who may ask what, and what no question may do to the hub."""

from __future__ import annotations

import asyncio
import re

import msgspec
import pytest

from crosswire.access import User
from crosswire.config import ConnectionLimits, HttpSettings
from crosswire.errors import RequestFailed
from crosswire.logs import fields_of
from crosswire.web.api import OPERATIONS
from tests.web.conftest import StartWeb, WebHub

ROOT = User(name="root", token="the-secret-of-root", administer=True)
ANNA = User(name="anna", token="a-secret-of-anna", produce=("queue/orders",))


async def status_of(web: WebHub, path: str, token: str | None = None) -> int:
    bearer = f"\nauthorization: Bearer {token}" if token else ""
    return (await web.ask(f"GET {path} HTTP/1.1\nhost: 127.0.0.1{bearer}"))[0]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:7380", 200),
        ("[::1]:7380", 200),
        ("localhost", 200),
        ("hub.example.org:7380", 200),
        ("evil.example", 421),
        ("", 421),
        ("[", 400),
        ("[::1", 400),
    ],
)
async def test_only_its_own_names_reach_the_hub(
    start_web: StartWeb, host: str, status: int
) -> None:
    web = await start_web(http=HttpSettings(hosts=("hub.example.org",)))
    assert (await web.ask(f"GET /v1/queues HTTP/1.1\nhost: {host}"))[0] == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:7380", 200),
        ("http://evil.example", 403),
        ("null", 403),
        ("[", 403),
        ("http://[", 400),
    ],
)
async def test_pages_from_elsewhere_are_refused(web: WebHub, origin: str, status: int) -> None:
    head = f"GET /v1/queues HTTP/1.1\nhost: localhost:7380\norigin: {origin}"
    assert (await web.ask(head))[0] == status


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_only_json_is_taken(web: WebHub, kind: str) -> None:
    header = f"\ncontent-type: {kind}" if kind else ""
    head = f"POST /v1/queues/q/purge HTTP/1.1\nhost: localhost{header}"
    assert (await web.ask(head, b"{}"))[0] == 415


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"messages": [{}]}', b"\xff", b"[" * 100_000])
async def test_a_body_that_is_wrong_is_told(web: WebHub, body: bytes) -> None:
    head = "POST /v1/messages HTTP/1.1\nhost: localhost\ncontent-type: application/json"
    status, answer = await web.ask(head, body)
    assert (status, b'"error":"invalid_request"' in answer) == (400, True)


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_has_a_limit(start_web: StartWeb, announced: bool) -> None:
    web = await start_web(http=HttpSettings(body_bytes=100))
    size = "content-length: 101\r\n" if announced else "transfer-encoding: chunked\r\n"
    head = "POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    body = b"x" * 101 if announced else b"65\r\n" + b"x" * 101 + b"\r\n0\r\n\r\n"
    whole = (head + "connection: close\r\n" + size + "\r\n").encode() + body
    assert (await web.raw(whole))[0] == 413


@pytest.mark.parametrize("path", ["/v1", "/v1/nothing", "/v1/messages/x", "/../etc/passwd"])
async def test_other_paths_are_not_there(web: WebHub, path: str) -> None:
    status, body = await web.ask(f"GET {path} HTTP/1.1\nhost: localhost")
    assert (status, b'"error":"not_found"' in body) == (404, True)


async def test_another_method_is_refused(web: WebHub) -> None:
    assert (await web.ask("DELETE /v1/state HTTP/1.1\nhost: localhost"))[0] == 405


async def test_wrong_queries_are_told(web: WebHub) -> None:
    for query in ("limit=x", "limit=0", "limit=100000"):
        assert (await web.ask(f"GET /v1/queues?{query} HTTP/1.1\nhost: localhost"))[0] == 400


async def test_with_users_administration_needs_the_right(start_web: StartWeb) -> None:
    web = await start_web(users=(ROOT, ANNA))
    for path in ("/v1/state", "/metrics", "/v1/damage", "/v1/ingest"):
        assert await status_of(web, path) == 401
        assert await status_of(web, path, "not-anybodys-token") == 401
        assert await status_of(web, path, ANNA.token) == 403
        assert await status_of(web, path, ROOT.token) == 200


async def test_health_and_the_document_need_nobody(start_web: StartWeb) -> None:
    web = await start_web(users=(ROOT,))
    for path in ("/healthz", "/readyz", "/openapi.json"):
        assert await status_of(web, path) == 200


async def test_producing_needs_its_own_right(start_web: StartWeb) -> None:
    web = await start_web(users=(ROOT, ANNA))
    allowed = {"messages": [{"destination": "queue/orders", "text": "x"}]}
    forbidden = {"messages": [{"destination": "queue/other", "text": "x"}]}
    assert (await web.post("/v1/messages", allowed, token=ANNA.token))["ids"] == [1]
    for token, body in ((ANNA.token, forbidden), (ROOT.token, allowed)):
        with pytest.raises(RequestFailed) as caught:
            await web.post("/v1/messages", body, token=token)
        assert caught.value.code == "forbidden"
    assert web.server.context.counters["forbidden", "http"] == 2


async def test_a_head_that_does_not_end_is_cut_off(
    web: WebHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosswire.web.listener._HEAD_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    writer.write(b"GET / HTTP/1.1\r\n")
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    assert web.server.context.counters["failed", "http", "PeerTimeout"] == 1


@pytest.mark.parametrize(
    ("hello", "title"),
    [
        (bytes.fromhex("000000080000000001000000"), "EMP"),
        (b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48), "eMQP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "TLS"),
    ],
)
async def test_a_peer_with_the_wrong_port_is_recognized(
    web: WebHub, caplog: pytest.LogCaptureFixture, hello: bytes, title: str
) -> None:
    status, _ = await web.raw(hello + b"\r\n\r\n")
    assert status == 400
    (record,) = (each for each in caplog.records if each.name == "crosswire.web")
    assert f"The peer speaks {title}" in str(fields_of(record)["description"])


async def test_a_head_that_is_too_long_is_refused(web: WebHub) -> None:
    status, _ = await web.raw(b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000)
    assert status == 400
    assert web.server.context.counters["failed", "http", "MalformedFrame"] == 1


async def test_connections_are_counted(start_web: StartWeb) -> None:
    web = await start_web(connections=ConnectionLimits(connections_per_address=1))
    _, first = await asyncio.open_connection("127.0.0.1", web.port)
    while not web.server.context.counters["connections", "http"]:
        await asyncio.sleep(0)
    reader, second = await asyncio.open_connection("127.0.0.1", web.port)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    for writer in (first, second):
        writer.close()
    assert web.server.context.counters["rejected", "http"] == 1


async def test_a_mistake_of_ours_is_told_and_logged(
    web: WebHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_self: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr("crosswire.hub.services.Services.names", fail)
    status, body = await web.ask("GET /v1/services HTTP/1.1\nhost: localhost")
    assert (status, b'"error":"internal"' in body, b"secret" in body) == (500, True, False)
    assert "a secret" in caplog.text


async def test_what_was_asked_before_a_stop_is_answered(start_web: StartWeb) -> None:
    web = await start_web()
    asking = asyncio.create_task(web.produce("queue/q", "x"))
    while not web.server.context.counters["produced", "http"]:
        await asyncio.sleep(0)
    await web.server.stop()
    assert await asking == [1]


def _asked_with(value: str) -> list[tuple[str, str]]:
    """Every operation that reads a query, with each of its members set to this value."""
    return [
        (operation.method, re.sub(r"{\w+(:\w+)?}", "1", operation.path) + f"?{field.name}={value}")
        for operation in OPERATIONS
        if operation.query is not None and operation.method in ("GET", "DELETE")
        for field in msgspec.structs.fields(operation.query)
    ]


@pytest.mark.parametrize("value", ["-1", "99999999999999999999", "1e400", "%00", "%ff", "["])
async def test_no_value_in_a_query_is_our_fault(web: WebHub, value: str) -> None:
    for method, path in _asked_with(value):
        status, answer = await web.ask(f"{method} {path} HTTP/1.1\nhost: localhost")
        assert status < 500, (method, path, answer)
