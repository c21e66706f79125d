"""What changes the hub for good is answered when it is on disk, in every protocol."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from crosswire.bond import hub_module
from crosswire.client.native.emp import EmpClient, Json
from crosswire.client.native.epoxy import EpoxyClient
from crosswire.client.native.relink import RelinkClient
from crosswire.errors import RequestFailed
from crosswire.hub.policies import QueuePolicy, Retry
from crosswire.server.server import Server
from tests.cli.conftest import StartHub, start_hub
from tests.gateways.conftest import port_of
from tests.web.conftest import StartWeb, Taker, WebHub

__all__ = ["start_hub"]

HUB = hub_module().service("crosswire.Hub")
SCHEDULE = {"destination": "queue/later", "text": "x", "interval_s": 3600, "nohaste": True}
QUEUED = {"destination": "queue/kept", "text": "x"}


class Gate:
    """Keeps what is written from being synced, as a slow disk does, until it is opened."""

    def __init__(self, server: Server) -> None:
        self.wanted = asyncio.Event()
        self._syncer: Any = server.hub.commits._log._syncer

    def __enter__(self) -> Gate:
        self._syncer._average_s = 1.0
        self._syncer.order = self.wanted.set
        return self

    def __exit__(self, *_: object) -> None:
        del self._syncer.order
        if self.wanted.is_set():
            self._syncer.order()


async def refuse(_data: Json) -> Json:
    raise RequestFailed("busy", "not now")


def emp(server: Server) -> EmpClient:
    return EmpClient("127.0.0.1", port_of(server, "emp"), handlers={"$deliver": refuse})


Handler = Callable[[Json], Awaitable[Json]]
Operation = Callable[[WebHub], Awaitable[Any]]
Step = tuple[Operation, Operation]
"""What has to be there before, and the operation itself."""


async def nothing(_web: WebHub) -> None:
    pass


def by_emp(op: str, data: Json) -> Operation:
    async def ask(web: WebHub) -> Any:
        async with emp(web.server) as client:
            return await client.request(op, data)

    return ask


def by_epoxy(method: str, **values: Any) -> Operation:
    async def ask(web: WebHub) -> Any:
        async with EpoxyClient("127.0.0.1", port_of(web.server, "epoxy")) as client:
            request = HUB.method(method).request.python_class(**values)
            return await client.call(HUB, method, request)

    return ask


async def link_with_a_name(web: WebHub) -> None:
    port = port_of(web.server, "relink")
    async with RelinkClient("127.0.0.1", port, "topic/t?subscribe&name=lasting"):
        pass


def post(path: str, **body: Any) -> Operation:
    return lambda web: web.post(path, body)


def delete(path: str) -> Operation:
    return lambda web: web.delete(path)


async def schedule(web: WebHub) -> None:
    await web.post("/v1/schedules", SCHEDULE | {"id": "s"})


async def subscription(web: WebHub) -> None:
    await by_emp("$subscribe", {"destination": "topic/t", "name": "gone"})(web)


async def dead_letter(web: WebHub) -> None:
    taker = Taker(web, "queue/q", does="refuse")
    await web.produce("queue/q", "x")
    taker.consumer.close(web.server.context.now())


async def empty_queue(web: WebHub) -> None:
    web.hub.queue("queue/kept")


async def edit(web: WebHub) -> Any:
    (dead_letter,) = (await web.get("/v1/dead/letters", queue="q"))["letters"]
    return await web.patch(f"/v1/dead/letters/{dead_letter['id']}", {"queue": "q", "text": "y"})


OPERATIONS: dict[str, Step] = {
    "emp publish": (nothing, by_emp("$publish", QUEUED)),
    "emp schedule": (nothing, by_emp("$schedule", SCHEDULE)),
    "emp unschedule": (schedule, by_emp("$unschedule", {"schedule": "s"})),
    "emp subscribe": (nothing, by_emp("$subscribe", {"destination": "topic/t", "name": "n"})),
    "epoxy publish": (nothing, by_epoxy("Publish", destination="queue/kept")),
    "epoxy subscribe": (nothing, by_epoxy("Subscribe", destination="topic/t", name="n")),
    "relink subscribe": (nothing, link_with_a_name),
    "http produce": (nothing, post("/v1/messages", messages=[QUEUED])),
    "http schedule": (nothing, post("/v1/schedules", **SCHEDULE)),
    "http unschedule": (schedule, delete("/v1/schedules/s")),
    "http remove subscription": (subscription, delete("/v1/subscriptions/gone")),
    "http purge queue": (post("/v1/messages", messages=[QUEUED]), post("/v1/queues/kept/purge")),
    "http delete queue": (empty_queue, delete("/v1/queues/kept")),
    "http edit dead letter": (dead_letter, edit),
    "http purge dead letters": (dead_letter, post("/v1/dead/purge", queue="q", all=True)),
    "http replay dead letters": (dead_letter, post("/v1/dead/replays", queue="q", all=True)),
}


@pytest.mark.parametrize("name", OPERATIONS)
async def test_an_answer_waits_for_the_disk(start_web: StartWeb, name: str) -> None:
    listen = dict.fromkeys(("emp", "epoxy", "relink"), "127.0.0.1:0")
    policy = QueuePolicy(retry=Retry(max_attempts=1))
    web = await start_web(listen=listen, queues={"q": policy})
    before, operation = OPERATIONS[name]
    await before(web)
    await web.hub.committed()
    async with emp(web.server) as bystander:
        with Gate(web.server) as gate:
            answer = asyncio.ensure_future(operation(web))
            await asyncio.wait_for(gate.wanted.wait(), 10)
            for _ in range(10):
                # Whatever was written to a socket before has arrived when this is answered.
                await bystander.request("$echo", {})
            assert not answer.done()
        await asyncio.wait_for(answer, 10)


async def test_a_subscription_that_waits_for_the_disk_gets_all_of_it(start_web: StartWeb) -> None:
    """Deliveries that come before the answer follow it."""
    web = await start_web(listen={"emp": "127.0.0.1:0"})
    got: asyncio.Queue[Json] = asyncio.Queue()

    async def deliver(data: Json) -> Json:
        got.put_nowait(data)
        return {}

    await web.produce("topic/t", "a", "b")
    port = port_of(web.server, "emp")
    async with EmpClient("127.0.0.1", port, handlers={"$deliver": deliver}) as client:
        asked = {"destination": "topic/t", "name": "n", "from": "earliest"}
        answer = await client.request("$subscribe", asked)
        await client.request("$publish", {"destination": "topic/t", "text": "c"})
        received = [await asyncio.wait_for(got.get(), 10) for _ in range(3)]
    assert [each["text"] for each in received] == ["a", "b", "c"]
    assert {each["subscription"] for each in received} == {answer["subscription"]}


async def test_what_was_answered_outlives_a_kill(start_hub: StartHub) -> None:
    """Killed right after each answer: what was added is there, what was removed is gone."""
    got: asyncio.Queue[Json] = asyncio.Queue()

    async def deliver(data: Json) -> Json:
        got.put_nowait(data)
        return {}

    @asynccontextmanager
    async def killed(deliver: Handler = refuse) -> AsyncIterator[EmpClient]:
        hub = await asyncio.to_thread(start_hub)
        handlers = {"$deliver": deliver}
        async with EmpClient("127.0.0.1", hub.port("emp"), handlers=handlers) as client:
            yield client
            hub.process.send_signal(signal.SIGKILL)
        hub.process.wait(timeout=10)

    async with killed() as client:
        await client.request("$subscribe", {"destination": "topic/t", "name": "n"})
        added = (await client.request("$schedule", SCHEDULE))["schedule"]
    async with killed() as client:
        listed = (await client.request("$list_schedules", {}))["schedules"]
        assert [each["schedule"] for each in listed] == [added]
        await client.request("$publish", {"destination": "topic/t", "text": "kept for n"})
        await client.request("$unschedule", {"schedule": added})
    async with killed(deliver) as client:
        assert (await client.request("$list_schedules", {}))["schedules"] == []
        # It has been subscribed all the time, from before the message was published.
        await client.request("$subscribe", {"destination": "topic/t", "name": "n"})
        assert (await asyncio.wait_for(got.get(), 10))["text"] == "kept for n"
