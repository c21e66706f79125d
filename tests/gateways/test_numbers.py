"""Numbers and names that can't be used, in every operation of every protocol and of HTTP.

Each is refused in the protocol's own way, and then nothing has happened: the store is as it was,
nobody consumes or serves, others are served, and a hub that is started on the same data starts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from crosswire.config import PLAIN_LISTENERS, Config
from crosswire.errors import CallFailed, ConnectFailed, LinkLost, RequestFailed
from crosswire.server.server import Server
from crosswire.web.listener import WebListener
from tests.gateways.test_emp import emp
from tests.gateways.test_emqp import peer as emqp_peer
from tests.gateways.test_epoxy import epoxy, make, publish, serve, subscribe
from tests.gateways.test_micromsg2 import error_of, micro, until
from tests.gateways.test_relink import client as relink
from tests.web.conftest import WebHub

# As JSON: Python would not write some of them.
BEYOND = ["9223372036854775808", "-9223372036854775809", "1" * 30, "1" * 400, "1e400", "-1e400"]
NEGATIVE = ["-1", "-9223372036854775808"]
STARTS = ["1" * 30, "9223372036854775808", "-1", "0001-01-01", "1969-12-31", "1e400", "nan", "inf"]
STARTS += ["٣", "1" * 5000, "10000-01-01", "0001-01-01T00:00:00+23:59"]
INTERVALS = ["0", "0.05", "-1", "1e9", "1e400", "1" * 30]
NAMES = ["queue/", "queue//a", "queue/a//b", "queue/a/", "queue/+", "queue/a/#", "queue/@a/dead"]
NAMES += ["topic//a", "topic/a//b", "topic/@a", "queue/\u0000", "queue/" + "a" * 300]
UNPUBLISHED = [*NAMES, "topic/a+", "topic/+", "topic/#"]
SERVICES = ["a//b", "+", "a/#", "@a", ""]


# ----------------------------------------------------------------------------- the hub around them


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with running(tmp_path) as server:
        yield server
        assert not server.hub.reports
    async with running(tmp_path) as again:
        assert not again.hub.reports
        await check_others(again)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Server]:
    listen = dict.fromkeys(PLAIN_LISTENERS, "127.0.0.1:0")
    config = Config(data=str(folder / "data"), listen=listen, drain_s=0.1)
    server = Server(config, http=WebListener)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def state_of(server: Server) -> Any:
    """All that an operation could leave."""
    hub = server.hub
    await hub.committed()
    rows = [
        *hub.store._scan(b"d", b"e"),
        *hub.store._scan(b"m", b"n"),
        *hub.store._scan(b"s", b"t"),
    ]
    # What a connection that came and went leaves: its link's rows are gone with it.
    kept = {
        key: value for key, value in rows if not key.startswith((b"sseal/", b"sboot/", b"sclock/"))
    }
    return (
        kept,
        dict(hub.store.destinations()),
        [each.id for each in hub.schedules.all()],
        [each.name for each in hub.subscriptions.all()],
        hub.services.providers(),
        sum(len(queue.consumers) for queue in hub.queues()),
        sum(len(gateway.attachments) for gateway in server.context.gateways.values()),
    )


@asynccontextmanager
async def unchanged(server: Server) -> AsyncIterator[None]:
    before = await state_of(server)
    yield
    assert await state_of(server) == before
    await check_others(server)


async def check_others(server: Server) -> None:
    """A peer that has nothing to do with it; it is there before and after."""
    async with emp(server) as client:
        assert await client.request("$echo", {"n": 1}) == {"n": 1}


def ignored(server: Server) -> int:
    counters = server.context.counters
    return sum(count for what, count in counters.items() if what[:2] == ("ignored", "emqp"))


# --------------------------------------------------------------------------------------------- EMP


def emp_requests() -> list[tuple[str, str]]:
    """Operations and their data, as JSON."""
    found: list[tuple[str, str]] = []

    def add(op: str, values: list[str], data: str) -> None:
        found.extend((op, data.replace("VALUE", value)) for value in values)

    queue, topic = '{"destination":"queue/new"', '{"destination":"topic/new"'
    numbers = [*BEYOND, *NEGATIVE]
    add("$publish", BEYOND, queue + ',"text":"x","properties":{"n":VALUE}}')
    add("$publish", quoted(UNPUBLISHED), '{"destination":VALUE,"text":"x"}')
    add("$subscribe", [*numbers, "0", "65536", "1.5", '"1"'], queue + ',"window":VALUE}')
    for name in ("", ',"name":"named"'):
        add("$subscribe", [*numbers, "1.5"], topic + name + ',"from":VALUE}')
        add("$subscribe", quoted(STARTS), topic + name + ',"from":VALUE}')
        add("$subscribe", ['"="'], topic + name + ',"filter":VALUE}')
    add("$subscribe", ['"="'], queue + ',"filter":VALUE}')
    add("$subscribe", quoted(NAMES), '{"destination":VALUE}')
    add("$schedule", INTERVALS, queue + ',"text":"x","interval_s":VALUE}')
    every = ',"text":"x","interval_s":60'
    add("$schedule", numbers, queue + every + ',"run_count":VALUE}')
    add("$schedule", BEYOND, queue + every + ',"properties":{"n":VALUE}}')
    add("$schedule", quoted(UNPUBLISHED), '{"destination":VALUE' + every + "}")
    add("$unsubscribe", numbers, '{"subscription":VALUE}')
    add("$serve", quoted(SERVICES), '{"services":[VALUE]}')
    return found


def quoted(texts: list[str]) -> list[str]:
    return [json.dumps(text) for text in texts]


async def test_emp(server: Server) -> None:
    async with emp(server) as client, unchanged(server):
        for op, data in emp_requests():
            with pytest.raises(RequestFailed) as caught:
                await client.request_json(op, data.encode())
            assert caught.value.code == "invalid_request", (op, data)


async def test_emp_gives_back_integers_of_any_size(server: Server) -> None:
    async with emp(server) as client:
        data = b'{"n":%s,"f":1e400}' % (b"1" * 400)
        assert await client.request_json("$echo", data) == data


async def test_what_is_just_allowed(server: Server) -> None:
    most = 2**63 - 1
    async with emp(server) as client:
        for number in (most, -most - 1):
            asked = {"destination": "queue/q", "text": "x", "properties": {"n": number}}
            await client.request("$publish", asked)
        for start in (most, str(most), "1970-01-01", "9999-12-31T23:59:59Z", 0):
            await client.request("$subscribe", {"destination": "topic/t", "from": start})
        named = {"destination": "topic/t", "name": "future", "from": most, "window": 65_535}
        await client.request("$subscribe", named)
        for interval_s in (0.1, 10 * 365 * 86_400):
            asked = {"destination": "queue/s", "text": "x", "run_count": most, "nohaste": True}
            await client.request("$schedule", {**asked, "interval_s": interval_s})
        await client.request("$publish", {"destination": "topic/t", "text": "x"})


# ------------------------------------------------------------------------------------------- Epoxy


async def test_epoxy(server: Server) -> None:
    async with epoxy(server) as client, unchanged(server):
        asked: list[Any] = []
        for real in (nan, inf, -inf):
            properties = {"n": make("Value", real=real)}
            asked.append(lambda given=properties: publish(client, "queue/new", properties=given))
        for name in UNPUBLISHED:
            asked.append(lambda given=name: publish(client, given))
        for name, start in product(("", "named"), STARTS):
            asked.append(
                lambda name=name, start=start: subscribe(
                    client, "topic/new", name=name, start=start
                )
            )
        for window in (65_536, 2**32 - 1):
            asked.append(lambda given=window: subscribe(client, "queue/new", window=given))
        for name in NAMES:
            asked.append(lambda given=name: subscribe(client, given))
        for name in SERVICES:
            asked.append(lambda given=name: serve(client, given))
        for operation in asked:
            with pytest.raises(CallFailed):
                await operation()
    async with epoxy(server) as client:
        # 0 is the default, as the structs have it.
        assert await subscribe(client, "queue/default", window=0) == 1


# ------------------------------------------------------------------------------------------ Relink


async def test_relink(server: Server) -> None:
    endpoints = [f"topic/new?subscribe&from={start}" for start in STARTS[:-1]]
    endpoints += [f"{endpoint}&name=named" for endpoint in endpoints]
    endpoints += [name for name in UNPUBLISHED if "\u0000" not in name and len(name) < 250]
    endpoints += [f"{name}?consume" for name in NAMES if name.startswith("queue") and name < "r"]
    endpoints += [f"service/{name}?serve" for name in SERVICES]
    async with unchanged(server):
        for endpoint in endpoints:
            with pytest.raises(ConnectFailed):
                await relink(server, endpoint).__aenter__()


async def test_relink_properties(server: Server) -> None:
    async with unchanged(server):
        for value in BEYOND:
            link = relink(server, "queue/new")
            await link.__aenter__()
            await link.sender().send(b'{"n":%s}' % value.encode(), b"payload")
            with pytest.raises(LinkLost):
                await link.sender().consumed(timeout_s=10)
            await link.close()


async def test_relink_timeouts_of_calls(server: Server) -> None:
    async with emp(server, work=echo) as provider:
        await provider.request("$serve", {"services": ["work"]})
        async with relink(server, "service/work") as caller:
            for value in ("-1", "1e300", "9223372036854775807"):
                await caller.sender(1).send(b'{"timeout":%s}' % value.encode(), b"{}")
                answer = await asyncio.wait_for(anext(caller.receiver(1)), 10)
                answer.consume()
                assert json.loads(bytes(answer.parts[0]))["error"] == "invalid_request"


async def echo(data: Any) -> Any:
    return data


# --------------------------------------------------------------------------------------- MicroMsg2


async def test_micromsg2(server: Server) -> None:
    commands: list[tuple[str, dict[str, Any]]] = []
    for name, start in product((None, "named"), STARTS):
        commands.append(("topic/new", {"name": name, "start": start}))
    for window in (0, 65_536, 10**30):
        commands.append(("queue/new", {"window": window}))
    commands += [(name, {}) for name in NAMES if name.isprintable()]
    async with unchanged(server):
        for destination, options in commands:
            async with micro(server) as client:
                peer = await client.peer()
                peer.connection.send_subscribe(destination, **options)
                peer.session.wake()
                assert await error_of(client) in ("malformed", "unknown-destination"), options


async def test_micromsg2_timeouts_of_calls(server: Server) -> None:
    async with emp(server, work=echo) as provider, micro(server) as client:
        await provider.request("$serve", {"services": ["work"]})
        for timeout in (-1, -0.5, 1e300, 2**63 - 1):
            with pytest.raises(RequestFailed) as caught:
                await client.call("service/work", b"{}", {"timeout": timeout})
            assert caught.value.code == "invalid_request"


# -------------------------------------------------------------------------------------------- eMQP


async def test_emqp(server: Server) -> None:
    version = b"eMQP/1.0"
    intervals = [b"0", b"0.05", b"-5", b"1" * 30, b"1e400", b"nan", b"inf", b"999999999999999"]
    commands: list[list[bytes]] = []
    for interval in intervals:
        head = [b"", version, b"SCHEDULE", b"1", b"new", b""]
        commands.append([*head, interval, b'["run", {}]', b""])
        commands.append([*head[:5], b"interval:" + interval, b'["run", {}]'])
    for name in NAMES:
        queue = name.removeprefix("queue/").encode()
        if name.startswith("queue/") and queue:
            commands.append([b"", version, b"REQUEST", b"1", queue, b"", b'["run", {}]'])
            commands.append([b"", version, b"SCHEDULE", b"1", queue, b"", b"60", b"[]", b""])
    for name in UNPUBLISHED:
        topic = name.removeprefix("topic/").encode()
        if name.startswith("topic/"):
            commands.append([b"", version, b"PUBLISH", b"1", topic, b"x"])
    async with unchanged(server), emqp_peer(server, "client") as client:
        for parts in commands:
            before = ignored(server)
            client.connection._zmtp.send_message(parts)
            client.session.wake()
            await until(lambda before=before: ignored(server) > before)


async def test_emqp_weights(server: Server) -> None:
    async with emqp_peer(server, "worker", queues=[(10, "there")]) as worker:
        await until(lambda: server.hub.is_consumed("queue/there"))
        async with unchanged(server):
            for weight in ("1" * 30, "1e400", "-1e400", "1.5", "NaN"):
                before = ignored(server)
                queues = b'[[%s, "new"]]' % weight.encode()
                parts = [b"", b"eMQP/1.0", b"INFORM", b"i", queues, b"worker"]
                worker.connection._zmtp.send_message(parts)
                worker.session.wake()
                await until(lambda before=before: ignored(server) > before)


# -------------------------------------------------------------------------------------------- HTTP


def http_requests() -> list[tuple[str, str]]:
    """The first line of a request, and its body."""
    found: list[tuple[str, str]] = []

    def add(values: list[str], path: str, body: str = "") -> None:
        line = f"{'POST' if body else 'GET'} /v1/{path}"
        for value in values:
            found.append((line.replace("VALUE", value), body.replace("VALUE", value)))

    numbers = [*BEYOND, *NEGATIVE]
    for path in (
        "queues?limit=VALUE",
        "topics?limit=VALUE",
        "connections?limit=VALUE",
        "queues/there?messages=VALUE",
        "queues/there?messages=1&after=VALUE",
        "topics/there?messages=1&after=VALUE",
        "dead/letters?queue=there&after=VALUE",
        "dead/letters?queue=there&limit=VALUE",
        "schedules/every?count=VALUE",
        "messages/VALUE",
        "dead/letters/VALUE?queue=there",
        "dead/replays/VALUE",
    ):
        add([*numbers, "nan", "inf", "1.5"], path)
    new, every = '{"destination":"queue/new","text":"x"', ',"interval_s":60'
    log = '{"destinations":["queue/there"]'
    add(numbers, "schedules", new + every + ',"run_count":VALUE}')
    add(numbers, "schedules/preview", '{"interval_s":60,"count":VALUE}')
    add(numbers, "dead/purge", '{"queue":"there","ids":[VALUE]}')
    add(numbers, "dead/replays", '{"queue":"there","ids":[VALUE]}')
    add(numbers, "dead/replays", '{"queue":"there","all":true,"rate":VALUE}')
    add(numbers, "ingest/p/VALUE/commit", '{"attempts":[]}')
    named = '{"attempt":"a","parts":VALUE,"messages":1}'
    add(numbers, "ingest/p/1/commit", '{"attempts":[' + named + "]}")
    for name in ("limit", "parts", "first", "behind"):
        add(numbers, "log/plan", log + f',"{name}":VALUE}}')
    for name in ("since", "until"):
        add(BEYOND, "log/plan", log + f',"{name}":VALUE}}')
    for name in ("starts", "ends"):
        add(BEYOND, "log/plan", log + f',"{name}":{{"*":VALUE}}}}')
    add(BEYOND, "messages", '{"messages":[' + new + ',"properties":{"n":VALUE}}]}')
    add(BEYOND, "schedules", new + every + ',"properties":{"n":VALUE}}')
    add(INTERVALS, "schedules", new + ',"interval_s":VALUE}')
    add(INTERVALS, "schedules/preview", '{"interval_s":VALUE}')
    names = quoted(UNPUBLISHED)
    add(names, "messages", '{"messages":[{"destination":VALUE,"text":"x"}]}')
    add(names, "schedules", '{"destination":VALUE,"text":"x"' + every + "}")
    return found


async def test_http(server: Server) -> None:
    web = WebHub(server)
    await web.produce("queue/there/dead", "a letter")
    await web.produce("queue/there", "x")
    await web.produce("topic/there", "x")
    every = {"destination": "queue/there", "id": "every", "text": "x", "cron": "0 0 1 1 *"}
    await web.post("/v1/schedules", every)
    async with unchanged(server):
        for line, body in http_requests():
            head = f"{line} HTTP/1.1\nhost: localhost\ncontent-type: application/json"
            status, answer = await web.ask(head, body.encode())
            assert 400 <= status < 500, (status, line, body, answer)
