"""Attacks over HTTP with what one user may watch, stage and look at."""

from __future__ import annotations

import contextlib
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import quote, urlsplit

import pyarrow as pa
import pytest

from crosswire.errors import ClientError
from crosswire.pipeline.connector.address import HubAddress
from crosswire.web.contract import ARROW
from crosswire.wire.emp.frames import Ping, serialize
from tests.adversary.growth import connect, request
from tests.adversary.harness import PATIENCE_S
from tests.adversary.measured import ATTACKER_TOKEN, OBSERVER_TOKEN, Attack, MeasuredTarget


class Stream:
    """A live stream of the attacker, read by a thread."""

    def __init__(self, target: MeasuredTarget, path: str) -> None:
        self._connection = HTTPConnection(urlsplit(target.url).netloc, timeout=PATIENCE_S)
        headers = {"authorization": f"Bearer {ATTACKER_TOKEN}"}
        self._connection.request("GET", path, headers=headers)
        answer = self._connection.getresponse()
        assert answer.status == 200, answer.status
        self._thread = threading.Thread(target=_read, args=(answer,), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until its end."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        # Before it is closed, which would wait for the thread that reads.
        with contextlib.suppress(OSError):
            if self._connection.sock is not None:
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()


def _read(answer: HTTPResponse) -> None:
    try:
        while answer.read1(1 << 16):
            pass
    except (OSError, HTTPException):
        return  # the stream's end was not orderly


def attacker_api(target: MeasuredTarget) -> HubAddress:
    return HubAddress(target.url, ATTACKER_TOKEN, patience_s=PATIENCE_S)


def watched_frames(size: int, watchers: int) -> Attack:
    """A user watches its own connection, and sends as many of the smallest frames over it."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            api = attacker_api(target)
            before = {each["id"] for each in api.get("/v1/connections")["connections"]}
            peer = connect(stack, target, 1)[0]
            own = {each["id"] for each in api.get("/v1/connections")["connections"]} - before
            [name] = own
            path = f"/v1/connections/{name}/frames"
            streams = [stack.enter_context(Stream(target, path)) for _ in range(watchers)]
            frames = serialize(Ping()) * size
            yield
            peer.send(frames)
            request(peer, "$echo")
            peer.answers(1)
            peer.socket.close()
            for stream in streams:
                stream.wait()

    return attack


def tails(size: int, count: int) -> Attack:
    """Tails of a queue, and messages to it that are shown in part."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            for _ in range(count):
                stack.enter_context(Stream(target, "/v1/tail?destination=queue/tailed"))
            peer = connect(stack, target, 1)[0]
            for _ in range(20):
                request(peer, "$publish", destination="queue/tailed", text="x" * size)
            data = peer.bytes_to_send()
            yield
            peer.send(data)
            peer.answers(20)

    return attack


def filtered_tails(size: int, count: int) -> Attack:
    """Tails with filters of many terms, of which only the last doesn't hold."""
    terms = "".join(f"p{number}=N{number};" for number in range(50))
    properties = {f"p{number}": number for number in range(50)}

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            chosen = quote(f"{terms}last=N1")
            for _ in range(count):
                path = f"/v1/tail?destination=queue/filtered&filter={chosen}"
                stack.enter_context(Stream(target, path))
            peer = connect(stack, target, 1)[0]
            for _ in range(size):
                request(
                    peer, "$publish", destination="queue/filtered", text="x", properties=properties
                )
            data = peer.bytes_to_send()
            yield
            peer.send(data)
            peer.answers(size)

    return attack


def staged_parts(size: int, parts: int) -> Attack:
    """An attempt with as many destinations, to which parts of one message are added."""
    names = [f"queue/part{number}" for number in range(size)]

    def attack(target: MeasuredTarget) -> Iterator[None]:
        api, path = attacker_api(target), f"/v1/ingest/{uuid.uuid4().hex}/1"
        first, others = _arrow(names), _arrow(names[:1])
        yield
        for part in range(parts):
            body = others if part else first
            api.post_bytes(f"{path}/attempts/a", body, ARROW, {"part": part, "run": ""})
        named = {"attempt": "a", "parts": parts, "messages": size + parts - 1}
        api.post(f"{path}/commit", {"attempts": [named], "run": ""})

    return attack


def _arrow(names: list[str]) -> bytes:
    batch = pa.record_batch({"destination": names, "value": ["x"] * len(names)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as out:
        out.write_batch(batch)
    return bytes(sink.getvalue())


def peeks(size: int, count: int) -> Attack:
    """A queue of large messages, many of which are to be shown at once, by both lists."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            peer = connect(stack, target, 1)[0]
            for destination in ("queue/peeked", "topic/peeked"):
                for _ in range(count):
                    request(peer, "$publish", destination=destination, text="x" * size)
                    peer.answers(1)
            api = attacker_api(target)
            yield
            for path in ("/v1/queues/peeked", "/v1/topics/peeked"):
                shown, after = 0, 0
                while shown < count:
                    page = api.get(path, {"messages": 1000, "after": after})
                    assert page["messages"], (path, shown)
                    shown += len(page["messages"])
                    after = int(page["next"] or 0)

    return attack


def moved(size: int, count: int) -> Attack:
    """Large messages that are moved to another queue by one request of an administrator."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            peer = connect(stack, target, 1)[0]
            for _ in range(count):
                request(peer, "$publish", destination="queue/moved", text="x" * size)
                peer.answers(1)
            api = HubAddress(target.url, OBSERVER_TOKEN, patience_s=PATIENCE_S)
            yield
            asked = {"destination": "queue/target", "all": True}
            assert api.post("/v1/queues/moved/move", asked)["matched"] == count

    return attack


def long_lists() -> Attack:
    """Bodies of a MiB with as many numbers and texts as fit, which no operation takes."""
    bodies = (
        ("/v1/dead/replays", {"queue": "queue/q", "ids": [1] * 500_000}),
        ("/v1/log/plan", {"destinations": ["a"] * 250_000}),
    )

    def attack(target: MeasuredTarget) -> Iterator[None]:
        api = attacker_api(target)
        yield
        for path, body in bodies:
            with pytest.raises(ClientError):
                api.post(path, body, repeatable=False)

    return attack


HTTP_ATTACKS: dict[str, Attack] = {
    "watched-frames": watched_frames(3_000, 2),
    "tails": tails(1 << 16, 8),
    "filtered-tails": filtered_tails(2_000, 8),
    "staged-parts": staged_parts(5_000, 10),
    "peeks": peeks(1 << 18, 20),
    "moved": moved(1 << 20, 24),
    "long-lists": long_lists(),
}
