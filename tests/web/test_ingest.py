"""Batches over HTTP: a real hub, real bodies, and those that are not what they should be."""

from __future__ import annotations

import asyncio
import struct
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from crosswire.access import User
from crosswire.config import PLAIN_LISTENERS, Config
from crosswire.errors import RequestFailed
from crosswire.hub.policies import QueuePolicy, StagingLimits
from crosswire.pipeline.connector.address import HubAddress
from crosswire.server.server import Server
from crosswire.web.contract import ARROW
from crosswire.web.listener import WebListener
from tests.web.conftest import StartWeb, Taker, WebHub

WRITER = User(name="writer", token="a token for the writer", produce=("queue/#",))
OTHER = User(name="other", token="a token for another one", produce=("topic/#",))


def body(rows: dict[str, Any], **options: Any) -> bytes:
    """An Arrow stream with these columns."""
    batch = pa.record_batch(rows)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as out:
        out.write_batch(batch)
    return bytes(sink.getvalue())


def texts(*values: str, destination: str = "queue/q") -> bytes:
    return body({"destination": [destination] * len(values), "value": list(values)})


class Writer:
    """A producer, with a token if it has one; it asks once."""

    def __init__(self, web: WebHub, producer: str = "job", token: str = "") -> None:
        self._hub = HubAddress(f"http://127.0.0.1:{web.port}", token, patience_s=0)
        self._path = f"/v1/ingest/{producer}"

    async def stage(
        self, data: bytes, *, batch: int = 0, attempt: str = "a", part: int = 0, run: str = ""
    ) -> Any:
        path = f"{self._path}/{batch}/attempts/{attempt}"
        query = {"part": part, "run": run}
        return await asyncio.to_thread(self._hub.post_bytes, path, data, ARROW, query)

    async def commit(self, *named: tuple[str, int, int], batch: int = 0, run: str = "") -> Any:
        attempts = [
            {"attempt": attempt, "parts": parts, "messages": messages}
            for attempt, parts, messages in named
        ]
        asked = {"attempts": attempts, "run": run}
        return await asyncio.to_thread(self._hub.post, f"{self._path}/{batch}/commit", asked)

    async def abort(self, *, batch: int = 0) -> Any:
        return await asyncio.to_thread(self._hub.post, f"{self._path}/{batch}/abort", {})


async def failure_of(asking: Any) -> tuple[str, str]:
    with pytest.raises(RequestFailed) as caught:
        await asking
    return caught.value.code, caught.value.description


async def seen(web: WebHub, queue: str = "q") -> list[Any]:
    shown: list[Any] = (await web.get(f"/v1/queues/{queue}", messages=1000))["messages"]
    return shown


async def test_what_is_staged_is_seen_when_it_is_committed(web: WebHub) -> None:
    writer = Writer(web)
    taker = Taker(web, "queue/q", does="hold")
    assert await writer.stage(texts("1", "2")) == {"messages": 2, "committed": False}
    assert await writer.stage(texts("3"), part=1) == {"messages": 1, "committed": False}
    assert taker.given == []
    committed = {"batch": 0, "messages": 3, "done": True}
    assert await writer.commit(("a", 2, 3)) == committed
    assert [each["text"] for each in await seen(web)] == ["1", "2", "3"]
    assert len(taker.given) == 3
    assert await writer.commit(("a", 2, 3)) == committed
    assert await writer.stage(texts("1"), attempt="again") == {"messages": 0, "committed": True}
    assert len(await seen(web)) == 3


async def test_every_column_reaches_its_field(web: WebHub) -> None:
    expires = datetime(2040, 1, 1, tzinfo=UTC)
    header = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    values = [b"1", b"1.5", b"true", b"01", b"x", None, b"1e5", b"-3"]
    headers = [{"key": f"h{index}", "value": value} for index, value in enumerate(values)]
    rows = {
        "destination": ["queue/q", "queue/q"],
        "value": pa.array([b"\x00\xff", None], pa.binary()),
        "key": pa.array([b"k", None], pa.binary()),
        "headers": pa.array([headers, None], header),
        "correlation": ["c", None],
        "reply_to": ["queue/r", None],
        "content_type": ["image/png", None],
        "expires": pa.array([expires, None], pa.timestamp("us", "UTC")),
    }
    writer = Writer(web)
    await writer.stage(body(rows))
    await writer.commit(("a", 1, 2))
    full, bare = await seen(web)
    assert full["properties"] == {
        "h0": 1,
        "h1": 1.5,
        "h2": True,
        "h3": "01",
        "h4": "x",
        "h5": "",
        "h6": "1e5",
        "h7": -3,
    }
    names = ("base64", "key", "correlation", "reply_to", "content_type", "expires", "connection")
    assert [full[name] for name in names] == [
        "AP8=",
        "k",
        "c",
        "queue/r",
        "image/png",
        "2040-01-01T00:00:00Z",
        "ingest/job",
    ]
    left = ("content_type", "size_bytes")
    assert [bare[name] for name in left] == ["application/octet-stream", 0]
    assert not {"key", "properties", "expires"} & set(bare)


async def test_text_is_text_and_a_type_of_its_own_is_kept(web: WebHub) -> None:
    rows = {"destination": ["queue/q"] * 2, "value": ["é", "{}"], "content_type": [None, "a/b"]}
    writer = Writer(web)
    await writer.stage(body(rows))
    await writer.commit(("a", 1, 2))
    assert [each["content_type"] for each in await seen(web)] == ["text/plain", "a/b"]


async def test_an_aborted_batch_is_dropped(web: WebHub) -> None:
    writer = Writer(web)
    await writer.stage(texts("1"))
    assert await writer.abort() == {"attempts": 1}
    assert (await failure_of(writer.commit(("a", 1, 1))))[0] == "lost"


async def test_a_producer_has_its_order(web: WebHub) -> None:
    writer = Writer(web)
    await writer.commit(batch=4, run="one")
    code, words = await failure_of(writer.commit(batch=3, run="one"))
    assert code == "conflict" and "needs another `producer`" in words
    assert (await failure_of(writer.commit(batch=4, run="two")))[0] == "conflict"
    assert (await failure_of(writer.stage(texts("1"), batch=4, run="two")))[0] == "conflict"
    assert (await failure_of(writer.stage(texts("1"), batch=5, part=1)))[0] == "lost"


async def test_a_full_queue_refuses_the_batch_as_a_whole(start_web: StartWeb) -> None:
    web = await start_web(queues={"q": QueuePolicy(max_length=3)})
    writer = Writer(web)
    await writer.stage(texts("1", "2"))
    await writer.stage(texts("3", "4"), attempt="b")
    code, words = await failure_of(writer.commit(("a", 1, 2), ("b", 1, 2)))
    assert (code, "queue/q has no room for 4 messages" in words) == ("refused", True)
    await writer.commit(("a", 1, 2), batch=0)
    assert [each["text"] for each in await seen(web)] == ["1", "2"]


async def test_there_is_room_for_so_much(start_web: StartWeb) -> None:
    limits = StagingLimits(staged_bytes=200, part_bytes=1000)
    web = await start_web(ingest=limits)
    writer = Writer(web)
    code, words = await failure_of(writer.stage(texts("x" * 300)))
    assert (code, "staged_bytes" in words) == ("refused", True)
    code, words = await failure_of(writer.stage(texts("x" * 2000)))
    assert (code, words) == ("too_large", "a body has at most 1000 bytes")


async def test_rights_are_those_of_the_principal(start_web: StartWeb) -> None:
    web = await start_web(users=(WRITER, OTHER))
    writer, other = Writer(web, token=WRITER.token or ""), Writer(web, token=OTHER.token or "")
    wrong = Writer(web, token="somebody else's token")
    assert (await failure_of(wrong.stage(texts("1"))))[0] == "unauthenticated"
    assert (await failure_of(Writer(web).commit()))[0] == "unauthenticated"
    assert (await failure_of(other.stage(texts("1"))))[0] == "forbidden"
    await writer.stage(texts("1"))
    assert await other.abort() == {"attempts": 0}
    assert (await failure_of(other.commit(("a", 1, 1))))[0] == "lost"
    await writer.commit(("a", 1, 1))
    assert web.hub.queue("queue/q").length == 1


async def test_rights_that_were_taken_away_meanwhile_count(start_web: StartWeb) -> None:
    web = await start_web(users=(WRITER,))
    writer = Writer(web, token=WRITER.token or "")
    await writer.stage(texts("1"))
    poorer = User(name="writer", token=WRITER.token, produce=("queue/other",))
    web.server.reload(Config(data=web.server.config.data, users=(poorer,)))
    assert (await failure_of(writer.commit(("a", 1, 1))))[0] == "forbidden"


async def test_producers_are_listed_and_forgotten(web: WebHub) -> None:
    writer = Writer(web)
    await writer.commit(batch=7)
    await writer.stage(texts("1", "2"), batch=8)
    (producer,) = (await web.get("/v1/ingest"))["producers"]
    listed = await web.get("/v1/staged")
    (staged,) = listed["staged"]
    assert (producer["producer"], producer["batch"], producer["done"]) == ("job", 7, True)
    assert (staged["batch"], staged["attempts"], staged["messages"]) == (8, 1, 2)
    assert staged["size_bytes"] == listed["staged_bytes"] > 0
    assert await web.delete("/v1/ingest/job") == {"removed": "job"}
    assert await web.get("/v1/ingest") == {"producers": [], "next": ""}
    assert await web.get("/v1/staged") == {"staged": [], "staged_bytes": 0, "next": ""}
    assert (await failure_of(web.delete("/v1/ingest/job")))[0] == "not_found"


async def test_a_restarted_hub_knows_what_was_staged(tmp_path: Path) -> None:
    listen = dict.fromkeys(PLAIN_LISTENERS, "off") | {"http": "127.0.0.1:0"}
    config = Config(data=str(tmp_path), listen=listen, drain_s=0.1)
    first = Server(config, http=WebListener)
    await first.start()
    try:
        await Writer(WebHub(first)).stage(texts(*map(str, range(3000))))
    finally:
        await first.stop()
    second = Server(config, http=WebListener)
    await second.start()
    try:
        web = WebHub(second)
        assert (await Writer(web).commit(("a", 1, 3000)))["messages"] == 3000
        assert web.hub.queue("queue/q").length == 3000
    finally:
        await second.stop()


# What is not what it should be.


def keyless(rows: int) -> pa.Array:
    header = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    return pa.array([[{"key": None, "value": b"x"}]] * rows, header)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no Arrow stream"),
        (b"\xff\xff\xff\xff" + b"\xff" * 100, "no Arrow stream"),
        (texts("1")[:-20], "no Arrow stream"),
        (body({"value": ["x"]}), "the column destination is missing"),
        (body({"destination": ["queue/q"]}), "the column value is missing"),
        (body({"destination": ["queue/q"], "value": [1]}), "value can't be of type int64"),
        (body({"destination": ["queue/q"], "value": ["1"], "prize": ["1"]}), "no column prize"),
        (body({"destination": ["queue/q"], "value": ["1"], "headers": ["1"]}), "headers can't be"),
        (
            body({"destination": ["queue/q"], "value": ["1"], "headers": keyless(1)}),
            "row 0: a header has no key",
        ),
        (body({"destination": ["queue/q", None], "value": ["1", "2"]}), "row 1: the dest"),
        (texts("1", destination="queue/"), "has no name"),
        (texts("1", destination="service/s"), "nothing can be sent"),
        (texts("1", destination="topic/+"), "wildcards"),
        (
            body({"destination": ["queue/q"], "value": ["1"], "key": [b"\xff"]}),
            "key is not UTF-8",
        ),
        (
            body({"destination": ["queue/q"], "value": ["x" * 9999]}, compression="zstd"),
            "compressed",
        ),
        (
            body(
                {
                    "destination": pa.array(["queue/q"]).dictionary_encode(),
                    "value": ["x"],
                }
            ),
            "dictionaries",
        ),
        (body({"destination": ["queue/q"], "value": ["1"]}) + b"junk", None),
    ],
)
async def test_bodies_that_can_t_be_staged(web: WebHub, data: bytes, words: str | None) -> None:
    if words is None:
        assert (await Writer(web).stage(data))["messages"] == 1
        return
    code, description = await failure_of(Writer(web).stage(data))
    assert (code, words in description) == ("invalid_request", True), description
    assert web.hub.staging.attempts == 0


async def test_offsets_that_lie_are_found(web: WebHub) -> None:
    data = texts("abcdefgh")
    index = data.index(struct.pack("<ii", 0, 8))
    lying = data[:index] + struct.pack("<ii", 0, 1 << 30) + data[index + 8 :]
    assert (await failure_of(Writer(web).stage(lying)))[0] == "invalid_request"


@pytest.mark.parametrize(
    "path", ["/v1/ingest/p/x/attempts/a", "/v1/ingest/p/-1/commit", "/v1/ingest/p/1"]
)
async def test_paths_that_are_none(web: WebHub, path: str) -> None:
    status, _ = await web.ask(f"POST {path} HTTP/1.1\nhost: localhost\ncontent-type: {ARROW}")
    assert status in (404, 405)


async def test_a_batch_beyond_all_numbers_is_refused(web: WebHub) -> None:
    assert (await failure_of(Writer(web).stage(texts("1"), batch=1 << 70)))[0] == "invalid_request"


async def test_other_types_of_bodies_are_refused(web: WebHub) -> None:
    path = "/v1/ingest/p/0/attempts/a?part=0"
    for kind in ("application/json", "text/plain"):
        status, _ = await web.ask(f"POST {path} HTTP/1.1\nhost: localhost\ncontent-type: {kind}")
        assert status == 415
    head = f"POST /v1/messages HTTP/1.1\nhost: localhost\ncontent-type: {ARROW}"
    assert (await web.ask(head, b"{}"))[0] == 415


async def test_many_bodies_at_once_don_t_stop_the_loop(web: WebHub) -> None:
    """Each is worth a while of parsing; whoever asks meanwhile is answered meanwhile."""
    values = ["x" * 20] * 20_000
    data = texts(*values)
    writer = Writer(web)
    staging = [asyncio.create_task(writer.stage(data, attempt=f"a{n}")) for n in range(8)]
    longest, last = 0.0, asyncio.get_running_loop().time()
    while not all(task.done() for task in staging):
        await asyncio.sleep(0.001)
        now = asyncio.get_running_loop().time()
        longest, last = max(longest, now - last), now
    assert [task.result()["messages"] for task in staging] == [20_000] * 8
    assert longest < 0.5
    answer = await writer.commit(*((f"a{n}", 1, 20_000) for n in range(8)))
    while not answer["done"]:
        answer = await writer.commit()
    assert web.hub.queue("queue/q").length == 160_000


async def test_names_of_columns_are_text(web: WebHub) -> None:
    """Also where Arrow itself doesn't check them."""
    named = body({"destination": ["queue/q"], "value": ["x"], "unknown_column": ["x"]})
    broken = named.replace(b"unknown_column", b"unknown_\xff\xfe\xfdumn")
    code, text = await failure_of(Writer(web).stage(broken))
    assert code == "invalid_request"
    assert text == "a column's name is not UTF-8"
