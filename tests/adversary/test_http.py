"""Requests over HTTP that take long: many messages, many queues, plans, readers that don't read."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from crosswire.cli.hub import Api
from crosswire.errors import ConnectFailed, RequestFailed
from crosswire.pipeline.connector.address import HubAddress
from tests.adversary.harness import (
    ATTEMPTS,
    LEAST_S,
    TIMES,
    TOKEN,
    USERS,
    Target,
    running,
)

pytestmark = pytest.mark.alone

QUEUES = 5_000
MESSAGES = 50_000


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A hub without users that has many queues."""
    with running(tmp_path_factory.mktemp("crowded")) as target:
        post_queues(target, "first")
        yield target


def api(target: Target) -> Api:
    return Api(target.url)


def post(target: Target, messages: list[dict[str, object]]) -> None:
    api(target).post("/v1/messages", {"messages": messages})


def post_queues(target: Target, name: str) -> None:
    post(target, [{"destination": f"queue/{name}{n}", "text": ""} for n in range(QUEUES)])


def post_messages(target: Target) -> None:
    post(target, [{"destination": "queue/q", "text": ""}] * MESSAGES)


def post_too_many(target: Target) -> None:
    with pytest.raises(RequestFailed):
        post(target, [{"destination": "queue/never", "text": ""}] * 100_000)


def look(target: Target) -> None:
    for path in ("/v1/state", "/v1/queues?limit=1000", "/v1/topics", "/v1/log", "/v1/dead"):
        api(target).get(path)


def plan(target: Target) -> None:
    for count in (100, 60_000):
        body = {"destinations": [f"topic/{n}/+" for n in range(count)]}
        try:
            api(target).post("/v1/log/plan", body)
        except RequestFailed as refused:
            assert count > 1_000, refused


def assert_served(target: Target, attack: Callable[[], object], size_bytes: int) -> None:
    """The neighbour waits about as long as beside a polite peer that sends as much."""
    for _ in range(ATTEMPTS):
        polite = target.cost_of(partial(target.echo, size_bytes))
        cost = target.cost_of(attack)
        if cost.worst_s <= max(LEAST_S, TIMES * polite.worst_s):
            return
    raise AssertionError(f"{cost}; a polite peer: {polite}")


ATTACKS: dict[str, tuple[Callable[[Target], None], int]] = {
    "messages": (post_messages, 2_000_000),
    "too many messages": (post_too_many, 4_000_000),
    "lists": (look, 100_000),
    "plan": (plan, 1_000_000),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_request_that_takes_long(crowded: Target, name: str) -> None:
    attack, size_bytes = ATTACKS[name]
    assert_served(crowded, lambda: attack(crowded), size_bytes)


def test_new_queues(crowded: Target) -> None:
    names = iter(range(ATTEMPTS))
    assert_served(crowded, lambda: post_queues(crowded, f"new{next(names)}-"), 300_000)


OTHERS = """
[[users]]
name = "anna"
token = "the-secret-of-anna"
produce = ["queue/mallory/q"]
consume = ["queue/mallory/q"]
"""


def test_readers_that_do_not_read_keep_nobody_out(tmp_path: Path) -> None:
    with running(tmp_path, USERS + OTHERS) as target:
        where = HubAddress(target.url, "the-secret-of-anna", 0.0)
        messages = [{"destination": "queue/mallory/q", "text": "x" * 10_000}] * 700
        where.post("/v1/messages", {"messages": messages})
        asked = {"destinations": ["queue/mallory/q"]}
        planned = where.post("/v1/log/plan", asked)
        names = ("node", "starts", "ends", "first", "behind")
        body = asked | {name: planned[name] for name in names}
        data = json.dumps(body).encode()
        head = (
            "POST /v1/log/read HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {TOKEN}\r\ncontent-length: {len(data)}\r\n\r\n"
        ).encode()
        with contextlib.ExitStack() as silent:
            for _ in range(40):
                peer = silent.enter_context(socket.socket())
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                peer.connect(("127.0.0.1", target.port("http")))
                peer.sendall(head + data)
            rows = sum(batch.num_rows for batch, _ in where.batches("/v1/log/read", body))
            assert rows > 0


def test_plans_do_not_keep_a_hub_from_stopping(tmp_path: Path) -> None:
    """SIGTERM while plans with as many patterns as are allowed are being made."""
    with running(tmp_path) as target:
        names = [f"topic/{a}/{b}" for a in range(5) for b in range(1000)]
        post(target, [{"destination": name, "text": ""} for name in names])
        body = {"destinations": [f"topic/+/{n}" for n in range(100)] + names[:900]}

        def ask() -> None:
            with contextlib.suppress(Exception):  # the hub stops
                api(target).post("/v1/log/plan", body)

        asking = [threading.Thread(target=ask) for _ in range(20)]
        for each in asking:
            each.start()
        time.sleep(0.2)  # some are under way: that is all that matters
        began = time.monotonic()
        code, _ = target.hub.end(signal.SIGTERM)
        took_s = time.monotonic() - began
        for each in asking:
            each.join()
        # Two seconds are for goodbyes; without a limit it takes most of a minute.
        assert code == 0 and took_s < 15.0


def test_requests_in_progress_end_before_the_store_is_closed(tmp_path: Path) -> None:
    """SIGTERM while searches and reads of the log are in progress, one after the other."""
    stopped = threading.Event()
    broken: list[str] = []
    with running(tmp_path) as target:
        for _ in range(4):
            post(target, [{"destination": "queue/q", "text": "x" * 1000}] * 5_000)
        where = HubAddress(target.url, "", 0.0)
        asked = {"destinations": ["queue/q"]}
        planned = where.post("/v1/log/plan", asked)
        names = ("node", "starts", "ends", "first", "behind")
        body = asked | {name: planned[name] for name in names}

        def search() -> None:
            api(target).get("/v1/messages", text="nowhere", limit=1000)

        def read() -> None:
            for _ in where.batches("/v1/log/read", body):
                pass

        def repeat(act: Callable[[], None]) -> None:
            while not stopped.is_set():
                try:
                    act()
                except ConnectFailed:
                    return
                except RequestFailed as refused:
                    if "stopping" not in str(refused):
                        broken.append(str(refused))

        asking = [threading.Thread(target=repeat, args=(act,)) for act in (search, read) * 3]
        for each in asking:
            each.start()
        look(target)
        code, log = target.hub.end(signal.SIGTERM)
        stopped.set()
        for each in asking:
            each.join()
    assert code == 0
    assert broken == []
    assert "damage" not in log and "Traceback" not in log, log
