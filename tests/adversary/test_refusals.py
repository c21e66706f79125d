"""What a user is told about what others have: in all five protocols the same as of what nobody has.

The names of the two are as long as each other, so that even lengths can't differ.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest

import crosswire
from crosswire.client.connect import connect
from crosswire.testing import RunningHub, running_hub
from crosswire.web.app import OPERATIONS
from crosswire.web.contract import ARROW
from crosswire.wire.zmtp.curve import encode_key, public_key_of
from tests.conftest import TlsPair

PROTOCOLS = ("emp", "emqp", "relink", "epoxy", "micromsg2")
ANNA, BERT = "a token that is anna's", "a token that is bert's"
ROOT = "a token that is root's"
EXISTING, MISSING = "bert/secret", "bert/absent"


@pytest.fixture(scope="module")
def keys() -> tuple[bytes, bytes]:
    """The hub's secret CURVE key, and anna's."""
    return secrets.token_bytes(32), secrets.token_bytes(32)


@pytest.fixture(scope="module")
def hub(tls: TlsPair, keys: tuple[bytes, bytes]) -> Iterator[RunningHub]:
    """Anna and bert have rights to names of their own."""

    def rights(name: str) -> str:
        own = f"['queue/{name}/#', 'topic/{name}/#', 'queue/{name}']"
        return f"""
        produce = {own}
        consume = {own}
        call = ['service/{name}/#']
        serve = ['service/{name}/#']
        """

    config = f"""
        [tls]
        certificate = '{tls.certificate}'
        key = '{tls.key}'
        client_ca = '{tls.certificate}'
        [emqp]
        curve_secret_key = '{encode_key(keys[0])}'
        [[users]]
        name = 'anna'
        token = "{ANNA}"
        certificate = 'localhost'
        curve_key = '{encode_key(public_key_of(keys[1]))}'
        {rights("anna")}
        [[users]]
        name = 'bert'
        token = "{BERT}"
        {rights("bert")}
        [[users]]
        name = 'root'
        token = "{ROOT}"
        administer = true
    """
    with running_hub(config=config, tls=True) as running:
        yield running


@pytest.fixture
async def bert(hub: RunningHub) -> AsyncIterator[crosswire.Client]:
    """He has a queue, a topic, a named subscription, its dead letters and a service."""

    async def answer(_call: crosswire.Message) -> str:
        return "x"

    async with connect(hub.url("emp"), token=BERT) as client:
        await client.publish(f"queue/{EXISTING}", "x")
        await client.publish(f"topic/{EXISTING}", "x")
        async with client.subscribe(f"topic/{EXISTING}", name="secret", start="earliest") as taken:
            await taken.receive(10)
        await client.schedule(f"queue/{EXISTING}", "x", interval_s=1000.0, nohaste=True)
        service = await client.serve(f"service/{EXISTING}", answer)
        yield client
        await service.close(grace_s=0)


@pytest.fixture(params=PROTOCOLS)
def anna(
    request: pytest.FixtureRequest, hub: RunningHub, tls: TlsPair, keys: tuple[bytes, bytes]
) -> Callable[[], crosswire.Client]:
    """Makes a client of hers: Relink ends a connection that is refused."""
    options: dict[str, Any] = {"timeout_s": 1.0, "connect_timeout_s": 1.0}
    name = request.param
    url = hub.url(name if name == "emqp" else f"{name}+tls")
    if name == "emqp":
        options["curve_server"] = encode_key(public_key_of(keys[0]))
        options["curve_secret"] = encode_key(keys[1])
    else:
        options["ca"] = tls.certificate
        if name == "relink":
            options |= {"certificate": tls.certificate, "key": tls.key}
        else:
            options["token"] = ANNA
    return lambda: connect(url, **options)


Ask = Callable[[crosswire.Client, str], Awaitable[object]]
ASKED: dict[str, Ask] = {
    "send": lambda client, name: client.publish(f"queue/{name}", "x"),
    "publish": lambda client, name: client.publish(f"topic/{name}", "x"),
    "consume": lambda client, name: client.subscribe(f"queue/{name}").receive(1),
    "subscribe": lambda client, name: client.subscribe(f"topic/{name}").receive(1),
    "call": lambda client, name: client.call(f"service/{name}", "x"),
    "dead letters": lambda client, name: client.subscribe(
        f"queue/@bert.{name.removeprefix('bert/')}/dead"
    ).receive(1),
}


async def answer_to(make: Callable[[], crosswire.Client], ask: Ask, name: str) -> str:
    """How it is refused, without the name that was asked for; empty if there is no answer."""
    try:
        async with make() as client:
            await ask(client, name)
    except crosswire.CrosswireError as error:
        text = f"{type(error).__name__}: {error}"
        for each in (name, name.removeprefix("bert/")):
            text = text.replace(each, "NAME")
        return text
    return ""


@pytest.mark.parametrize("kind", ASKED)
async def test_what_exists_is_not_revealed(
    anna: Callable[[], crosswire.Client], bert: crosswire.Client, kind: str
) -> None:
    assert bert.protocol == "emp"
    existing, missing = await asyncio.gather(
        answer_to(anna, ASKED[kind], EXISTING), answer_to(anna, ASKED[kind], MISSING)
    )
    assert existing == missing
    assert "secret" not in existing
    # What an eMQP client publishes is never answered.
    assert bool(existing) != (kind == "publish" and anna().protocol == "emqp")


NAMED = sorted({(each.method, each.path) for each in OPERATIONS if "{" in each.path})
"""All operations over HTTP about one thing."""
BODIES = {
    "commit": b'{"attempts": [], "run": ""}',
    "move": b'{"to": "queue/anna/x", "count": 1}',
}


def asked_over_http(hub: RunningHub, method: str, path: str, token: str) -> tuple[int, str]:
    """Status and body of the response."""
    body = BODIES.get(path.rpartition("/")[2], b"{}") if method in ("POST", "PATCH") else None
    kind = ARROW if "/attempts/" in path else "application/json"
    headers = {"authorization": f"Bearer {token}", "content-type": kind}
    url = f"http://{hub.listen['http']}{path}"
    asked = urllib.request.Request(url, body, headers, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def names_of(hub: RunningHub, path: str) -> tuple[str, str]:
    """What the path's parameter may be: of something that bert has, and of nothing."""

    def listed(what: str, key: str) -> str:
        _, text = asked_over_http(hub, "GET", f"/v1/{what}", ROOT)
        rows = json.loads(text)[what]
        return str(next(row[key] for row in rows if row.get("principal", "bert") == "bert"))

    kind = path.split("/")[2]
    if kind in ("queues", "topics"):
        return EXISTING, MISSING
    if kind == "connections":
        return listed(kind, "id"), "emp-999999"
    if kind == "schedules":
        return listed(kind, "id"), "emp-1-1/999999999"
    if kind in ("messages", "dead"):
        return str(message_of_bert(hub)), str((1 << 50) + 7)
    return "secret", "absent"


def message_of_bert(hub: RunningHub) -> int:
    _, text = asked_over_http(hub, "GET", f"/v1/queues/{EXISTING}?messages=1", BERT)
    identifier: int = json.loads(text)["messages"][0]["id"]
    return identifier


@pytest.mark.parametrize(("method", "path"), NAMED)
async def test_nor_over_http(
    hub: RunningHub, bert: crosswire.Client, method: str, path: str
) -> None:
    assert bert.protocol == "emp"

    def ask() -> list[tuple[int, str]]:
        found = []
        for name in names_of(hub, path):
            filled = re.sub(r"\{batch:id\}|\{file:path\}|\{attempt\}", "0", path)
            filled = re.sub(r"\{[^}]*\}", quote(name), filled)
            status, text = asked_over_http(hub, method, filled, ANNA)
            found.append((status, text.replace(filled, "PATH").replace(name, "NAME")))
        return found

    existing, missing = await asyncio.to_thread(ask)
    assert existing == missing
    assert "secret" not in existing[1]
    # Her own batches alone have the names of producers; everything else is refused.
    assert existing[0] >= 400 or path.startswith("/v1/ingest/")


async def test_a_schedule_of_another_user_is_an_unknown_one(
    hub: RunningHub, bert: crosswire.Client
) -> None:
    """EMP alone has ids of schedules."""
    schedule = await bert.schedule(f"queue/{EXISTING}", "x", interval_s=1000.0, nohaste=True)
    async with connect(hub.url("emp"), token=ANNA) as client:
        texts = set()
        for identifier in (str(schedule), "emp-1-1/999999999"):
            with pytest.raises(crosswire.CrosswireError) as refused:
                await client.unschedule(identifier)
            texts.add(str(refused.value).replace(identifier, "ID"))
        assert len(texts) == 1
    await bert.unschedule(str(schedule))
