"""Shares over HTTP: of users and, without users, of the addresses of other machines.

No test can rely on a second machine: requests are given to the application as the listener does,
with the address that they would have.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest

from crosswire.access import User
from crosswire.config import HttpSettings, ProtocolLimits
from crosswire.store.contract import StoreLimits
from crosswire.web.app import App
from tests.web.conftest import StartWeb

FAR, OTHER, NEAR = "203.0.113.5", "2001:db8::1", "127.0.0.1"


class Client:
    """A client at an address."""

    def __init__(self, app: App, host: str) -> None:
        self._app = app
        self._host = host

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and body of the answer."""
        data = msgspec.json.encode(body)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(data)),
            ],
            "client": (self._host, 5),
            "server": ("localhost", 80),
            "state": {
                "identified": lambda _: None,
                "certificate": None,
                "check_room": lambda _: None,
                "hold": lambda _: None,
            },
        }
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        answer = b"".join(each.get("body", b"") for each in sent)
        return sent[0]["status"], msgspec.json.decode(answer)

    async def is_refused(self, name: str) -> bool:
        """Whether a message to this queue is refused, for what its address has created."""
        message = {"destination": f"queue/{name}", "text": "x"}
        status, answer = await self.post("/v1/messages", {"messages": [message]})
        assert status == 200 or "of one user or address" in answer["description"], answer
        return status != 200


@pytest.fixture
def limits() -> StoreLimits:
    return StoreLimits(destinations=40)


async def test_destinations(start_web: StartWeb, limits: StoreLimits) -> None:
    web = await start_web(store=limits)
    app = App(web.server)
    far, other, near = (Client(app, each) for each in (FAR, OTHER, NEAR))
    for number in range(10):
        assert not await far.is_refused(str(number))
    assert await far.is_refused("more")
    status, _ = await far.post("/v1/queues", {"name": "more"})
    assert status != 200
    assert not await other.is_refused("other")
    for number in range(10, 20):
        assert not await near.is_refused(str(number))


async def test_schedules(start_web: StartWeb) -> None:
    web = await start_web(limits=ProtocolLimits(schedules=8))
    app = App(web.server)
    schedule = {"destination": "queue/q", "text": "x", "interval_s": 1000.0}
    far, other = Client(app, FAR), Client(app, OTHER)
    assert [(await far.post("/v1/schedules", schedule))[0] for _ in range(3)] == [200, 200, 503]
    assert (await other.post("/v1/schedules", schedule))[0] == 200


async def test_one_user_does_not_hold_all_connections(start_web: StartWeb) -> None:
    """The last quarter is for users with less than their share: here, two connections."""
    anna = User(name="anna", token="the-token-of-anna", consume=("queue/a",))
    bob = User(name="bob", token="the-token-of-bob", consume=("queue/a",))
    web = await start_web(users=(anna, bob), http=HttpSettings(connections=8))
    writers = []

    async def is_accepted(user: User) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
        writers.append(writer)
        head = (
            f"GET /v1/tail?destination=queue/a HTTP/1.1\r\nauthorization: Bearer {user.token}\r\n"
        )
        writer.write(f"{head}host: 127.0.0.1\r\n\r\n".encode())
        with contextlib.suppress(ConnectionResetError):
            return bool(await asyncio.wait_for(reader.read(16), 10))
        return False

    try:
        assert [await is_accepted(anna) for _ in range(8)] == [True] * 6 + [False] * 2
        assert await is_accepted(bob)
    finally:
        for writer in writers:
            writer.close()
