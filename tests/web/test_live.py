"""Live streams: events of the hub, tails, and frames of a connection."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest

from crosswire.access import User
from crosswire.client.native.emp import EmpClient
from crosswire.config import LakeSettings, TapSettings
from crosswire.hub.policies import TopicPolicy
from crosswire.web.event_stream import EventBuffer
from crosswire.web.stream_slots import StreamSlots
from tests.web.conftest import StartWeb, WebHub

ROOT = User(name="root", token="the-secret-of-root", administer=True)
WATCH = User(name="watch", token="the-secret-of-watch", observe=True)
ANNA = User(name="anna", token="the-secret-of-anna", produce=("queue/a",), consume=("queue/a",))
POORER = User(name="anna", token="the-secret-of-anna", produce=("queue/a",))
USERS = (ROOT, WATCH, ANNA)


class Events:
    """Reads server-sent events of one response."""

    def __init__(self, reader: asyncio.StreamReader, status: int) -> None:
        self.status = status
        self._reader = reader
        self._buffer = b""
        self._is_over = False

    async def next(self, kind: str) -> Any:
        """The data of the next event of this kind; the others are skipped."""
        async with asyncio.timeout(10):
            while True:
                while b"\n\n" not in self._buffer:
                    size = int(await self._reader.readline(), 16)
                    if not size:
                        raise EOFError
                    self._buffer += (await self._reader.readexactly(size + 2))[:-2]
                text, _, self._buffer = self._buffer.partition(b"\n\n")
                fields = dict(line.split(b": ", 1) for line in text.split(b"\n"))
                if fields.get(b"event") == kind.encode():
                    return json.loads(fields[b"data"])

    async def ends(self) -> str:
        """The reason of the end, after which nothing follows."""
        reason: str = (await self.next("end"))["reason"]
        with pytest.raises(EOFError):
            await self.next("nothing")
        return reason


@asynccontextmanager
async def watching(
    web: WebHub, path: str, token: str | None = None, **query: str
) -> AsyncIterator[Events]:
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    bearer = f"authorization: Bearer {token}\r\n" if token else ""
    target = f"{path}?{urlencode(query)}" if query else path
    writer.write(f"GET {target} HTTP/1.1\r\nhost: localhost\r\n{bearer}\r\n".encode())
    try:
        async with asyncio.timeout(10):
            status = int((await reader.readline()).split()[1])
            while (await reader.readline()).strip():
                pass
        yield Events(reader, status)
    finally:
        writer.close()


async def test_a_tail_shows_messages_and_consumes_none(web: WebHub) -> None:
    async with watching(web, "/v1/tail", destination="queue/a") as tail:
        await web.produce("queue/b", "other")
        (identifier,) = await web.produce("queue/a", "tea\n\nevent: end", properties={"n": 1})
        message = await tail.next("message")
        assert (message["id"], message["text"]) == (identifier, "tea\n\nevent: end")
        assert message["properties"] == {"n": 1}
    assert (await web.get("/v1/queues/a"))["length"] == 1
    assert (await web.get("/v1/queues/a"))["consumers"] == []


async def test_a_tail_of_topics_with_a_filter(start_web: StartWeb) -> None:
    web = await start_web(topics={"t/light": TopicPolicy(durable=False)})
    web.hub.topic("topic/t/light")
    async with watching(web, "/v1/tail", destination="topic/t/+", filter="n>N1") as tail:
        await web.produce("topic/t/x", "no", properties={"n": 1})
        await web.produce("topic/t/x", "yes", properties={"n": 2})
        assert (await tail.next("message"))["text"] == "yes"
        await web.produce("topic/t/light", "light", properties={"n": 2})
        assert (await tail.next("message"))["text"] == "light"
    async with asyncio.timeout(10):
        while web.hub.subscriptions.subscribers():
            await asyncio.sleep(0.01)


async def test_a_tail_leaves_out_what_is_too_much(web: WebHub) -> None:
    async with watching(web, "/v1/tail", destination="queue/a") as tail:
        await web.produce("queue/a", *["x"] * 5000)
        lost = 0
        shown = await tail.next("message")
        assert shown["text"] == "x"
        lost = (await tail.next("lost"))["events"]
        assert lost > 0


async def test_rights_that_are_taken_away_end_a_tail_at_once(start_web: StartWeb) -> None:
    web = await start_web(users=USERS)
    async with watching(web, "/v1/tail", ANNA.token, destination="queue/a") as tail:
        assert tail.status == 200
        config = msgspec.structs.replace(web.server.config, users=(ROOT, POORER))
        web.server.reload(config)
        assert "may not consume queue/a" in await tail.ends()


@pytest.mark.parametrize(
    ("user", "path", "query", "status"),
    [
        (WATCH, "/v1/tail", {"destination": "queue/a"}, 403),
        (ANNA, "/v1/tail", {"destination": "queue/b"}, 403),
        (ROOT, "/v1/tail", {"destination": "queue/b"}, 200),
        (ROOT, "/v1/tail", {"destination": "nowhere"}, 400),
        (ANNA, "/v1/events", {}, 403),
        (WATCH, "/v1/events", {}, 200),
        (ROOT, "/v1/connections/none/frames", {}, 404),
    ],
)
async def test_who_may_watch_what(
    start_web: StartWeb, user: User, path: str, query: dict[str, str], status: int
) -> None:
    web = await start_web(users=USERS)
    async with watching(web, path, user.token, **query) as stream:
        assert stream.status == status


async def test_streams_are_limited_and_freed(web: WebHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosswire.web.stream_slots._STREAMS", 1)
    async with watching(web, "/v1/events") as first:
        await first.next("state")
        async with watching(web, "/v1/events") as second:
            assert second.status == 503
    async with asyncio.timeout(10):
        while True:
            async with watching(web, "/v1/events") as again:
                if again.status == 200:
                    break


async def test_events_of_the_hub(start_web: StartWeb) -> None:
    web = await start_web(listen={"emp": "127.0.0.1:0"})
    port = web.server.listeners["emp"].address.port
    async with watching(web, "/v1/events") as events:
        assert (await events.next("state"))["draining"] is False
        async with EmpClient("127.0.0.1", port) as client:
            await client.request("$echo", {})
            connected = await events.next("connected")
        left = await events.next("disconnected")
        assert connected["connection"] == left["connection"] and left["reason"] == "closed"
        logging.getLogger("crosswire.lake").warning("the lake is full")
        assert (await events.next("trouble"))["text"] == "the lake is full"
        web.hub.store.report_damage("record", "message 7 is damaged")
        assert (await events.next("state"))["damage"] == 1


async def test_a_stream_lasts_longer_than_a_request_may(
    web: WebHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosswire.web.listener._REQUEST_S", 0.05)
    async with watching(web, "/v1/tail", destination="queue/a") as tail:
        await asyncio.sleep(0.2)
        await web.produce("queue/a", "later")
        assert (await tail.next("message"))["text"] == "later"


async def test_frames_of_a_connection_are_decoded_and_masked(start_web: StartWeb) -> None:
    lake = LakeSettings(tap=TapSettings(listeners=("emp",)))
    web = await start_web(users=USERS, listen={"emp": "127.0.0.1:0"}, lake=lake)
    port = web.server.listeners["emp"].address.port
    async with EmpClient("127.0.0.1", port, token=ANNA.token) as client:
        await client.request("$echo", {})
        (row,) = (await web.get("/v1/connections", token=ROOT.token))["connections"]
        path = f"/v1/connections/{row['id']}/frames"
        async with watching(web, path, WATCH.token) as refused:
            assert refused.status == 403
        tapped = web.server.context.gateways[row["id"]].session.tap
        async with watching(web, path, ANNA.token) as own:
            assert own.status == 200
        async with watching(web, path, ROOT.token) as frames:
            for number in range(4):
                await client.request("$echo", {"n": number})
            await client.request("$authenticate", {"token": ANNA.token})
            await client.request("$echo", {"n": 99})
            seen = []
            while not seen or seen[-1].get("fields", {}).get("data") != {"n": 99}:
                seen.append(await frames.next("frame"))
            assert {each["direction"] for each in seen} == {"forward", "backward"}
            (secret,) = [e for e in seen if e.get("fields", {}).get("op") == "$authenticate"]
            assert set(secret["fields"]["data"]["token"]) == {"*"} and secret["masked"]
            assert "the-secret" not in json.dumps(seen)
            assert ANNA.token is not None and ANNA.token.encode().hex() not in json.dumps(seen)
            assert any(each.get("hex") for each in seen)
        async with asyncio.timeout(10):
            while web.server.context.gateways[row["id"]].session.tap is not tapped:
                await asyncio.sleep(0.01)


async def test_frames_end_with_the_connection(start_web: StartWeb) -> None:
    web = await start_web(listen={"emp": "127.0.0.1:0"})
    port = web.server.listeners["emp"].address.port
    async with EmpClient("127.0.0.1", port) as client:
        await client.request("$echo", {})
        (row,) = (await web.get("/v1/connections"))["connections"]
        async with watching(web, f"/v1/connections/{row['id']}/frames") as frames:
            await web.delete(f"/v1/connections/{row['id']}")
            assert (await frames.ends()).startswith("the connection is closed: closed by")


async def test_frames_of_a_busy_connection_are_sampled(
    start_web: StartWeb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosswire.web.frames._BYTES_PER_S", 10_000)
    web = await start_web(listen={"emp": "127.0.0.1:0"})
    port = web.server.listeners["emp"].address.port
    async with EmpClient("127.0.0.1", port) as client:
        await client.request("$echo", {})
        (row,) = (await web.get("/v1/connections"))["connections"]
        async with watching(web, f"/v1/connections/{row['id']}/frames") as frames:
            for _ in range(40):
                await client.request("$echo", {"text": "x" * 1000})
            assert (await frames.next("lost"))["events"] > 0
            stopping = asyncio.Event()

            async def keep_talking() -> None:
                while not stopping.is_set():
                    await client.request("$echo", {"short": True})
                    await asyncio.sleep(0.02)

            talking = asyncio.create_task(keep_talking())
            async with asyncio.timeout(10):
                while (await frames.next("frame")).get("fields", {}).get("data") != {"short": True}:
                    pass
            stopping.set()
            await talking


def test_streams_that_nobody_reads_share_their_memory() -> None:
    slots = StreamSlots()
    buffers = [EventBuffer(slots) for _ in range(60)]
    for _ in buffers:
        slots.enter("")
    for buffer in buffers:
        for _ in range(100):
            buffer.put("message", "x" * 100_000)
    assert all(buffer.is_full for buffer in buffers)
    buffered = sum(len(chunk) for each in buffers for chunk in iter(each.take, b""))
    assert buffered < 80 << 20
