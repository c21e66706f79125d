"""eMQP peers and the hub, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import pytest

from crosswire.access import User
from crosswire.client.native.dial import Backoff
from crosswire.client.native.emp import EmpClient
from crosswire.client.native.emqp import EmqpClient, EmqpPeer, EmqpSubscriber, connect_peer
from crosswire.config import ConnectionLimits, EmqpSettings
from crosswire.errors import ClientError, RequestFailed, StoreFailed
from crosswire.hub.policies import QueuePolicy, Retry
from crosswire.server.server import Server
from crosswire.store.contract import StoreLimits
from crosswire.wire.contract import Event
from crosswire.wire.emqp.events import (
    Acknowledged,
    PeerLeaving,
    Registered,
    ReplyReceived,
    RequestReceived,
    ScheduleReceived,
    UnscheduleReceived,
)
from crosswire.wire.emqp.frames import Kbai, serialize
from crosswire.wire.zmtp.curve import CurveClient, encode_key, public_key_of
from crosswire.wire.zmtp.mechanisms import Mechanism
from tests.gateways.conftest import StartServer, port_of

E = TypeVar("E", bound=Event)
JOB = b'["run", {"path": "jobs", "callable": "f"}]'
SOON = Backoff(0.01, 0.02)


class Raw(EmqpPeer):
    """A peer that shows what it receives, and does nothing by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[Event] = []
        self._news = asyncio.Event()

    def handle_event(self, event: Event) -> None:
        super().handle_event(event)
        self.received.append(event)
        self._news.set()

    def all(self, kind: type[E]) -> list[E]:
        return [event for event in self.received if isinstance(event, kind)]

    async def next(self, kind: type[E]) -> E:
        """The next of its kind, which is then forgotten."""
        async with asyncio.timeout(10):
            while not (found := self.all(kind)):
                self._news.clear()
                await self._news.wait()
        self.received.remove(found[0])
        return found[0]

    # As a worker.

    def offer(self, slots: int = 1) -> None:
        for _ in range(slots):
            self.connection.send_ready()
        self.session.wake()

    async def job(self) -> RequestReceived:
        return await self.next(RequestReceived)

    def reply(self, job: RequestReceived, value: Any = True) -> None:
        self.connection.send_reply(json.dumps({"value": value}).encode(), job.msgid)
        self.session.wake()

    # As a client.

    def ask(self, queue: str, headers: str = "", message: bytes = JOB) -> str:
        msgid = self.connection.send_request(queue, headers, message)
        self.session.wake()
        return msgid

    async def receipt(self) -> str:
        event = await self.next(ReplyReceived)
        assert event.request is None
        return event.message.decode()

    async def result(self) -> tuple[str | None, Any]:
        event = await self.next(ReplyReceived)
        return event.request, json.loads(event.message)


DOORS = {"client": "clients", "scheduler": "clients", "worker": "workers", "admin": "admin"}


@asynccontextmanager
async def peer(server: Server, role: str, **options: Any) -> AsyncIterator[Raw]:
    raw = Raw()
    port = port_of(server, f"emqp-{DOORS.get(role, role + 's')}")
    await connect_peer(raw, role, "127.0.0.1", port, **options)
    if role in ("worker", "scheduler"):
        await raw.next(Registered)
    try:
        yield raw
    finally:
        await raw.close()


def worker(server: Server, *queues: str, weight: int = 10, **options: Any) -> Any:
    named = [(weight, name) for name in queues or ("default",)]
    return peer(server, "worker", queues=named, **options)


def emqp(server: Server, **options: Any) -> EmqpClient:
    return EmqpClient(
        "127.0.0.1",
        port_of(server, "emqp-clients"),
        subscribers_port=port_of(server, "emqp-subscribers"),
        backoff=SOON,
        **options,
    )


def emp(server: Server, **handlers: Any) -> EmpClient:
    return EmpClient("127.0.0.1", port_of(server, "emp"), handlers=handlers, backoff=SOON)


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.002)


def length(server: Server, name: str) -> int:
    return server.hub.queue(f"queue/{name}").length


QUICK = QueuePolicy(retry=Retry(first_delay_s=0.001, longest_delay_s=0.01))


class TestRequests:
    async def test_a_worker_gets_it_as_it_was(self, server: Server) -> None:
        async with peer(server, "client") as client, worker(server, "mail") as raw:
            raw.offer()
            msgid = client.ask("mail", "x:1,flag", b"any\xff bytes")
            job = await raw.job()
            assert (job.msgid, job.queue, job.headers) == (msgid, "mail", "x:1,flag")
            assert job.message == b"any\xff bytes"
            assert await client.receipt() == msgid

    async def test_handing_it_over_settles_it(self, server: Server) -> None:
        async with peer(server, "client") as client, worker(server) as raw:
            raw.offer()
            client.ask("default")
            await raw.job()
        assert length(server, "default") == 0

    async def test_buffered_requests_get_their_receipt_too(self, server: Server) -> None:
        async with peer(server, "client") as client:
            msgid = client.ask("default")
            assert await client.receipt() == msgid
            assert length(server, "default") == 1

    async def test_a_worker_gets_no_more_than_it_offered(self, server: Server) -> None:
        async with peer(server, "client") as client, worker(server) as raw:
            raw.offer(2)
            for _ in range(3):
                client.ask("default")
                await client.receipt()
            await raw.job()
            await raw.job()
            assert length(server, "default") == 1
            raw.offer()
            await raw.job()

    async def test_the_higher_weight_comes_first(self, server: Server) -> None:
        async with peer(server, "client") as client:
            for queue in ("low", "high", "low", "high"):
                client.ask(queue)
                await client.receipt()
            async with peer(server, "worker", queues=[(5, "low"), (20, "high")]) as raw:
                jobs = []
                for _ in range(4):
                    raw.offer()
                    jobs.append((await raw.job()).queue)
        assert jobs == ["high", "high", "low", "low"]

    async def test_a_heavier_worker_is_preferred(self, server: Server) -> None:
        async with (
            peer(server, "client") as client,
            worker(server, weight=1) as light,
            worker(server, weight=2) as heavy,
        ):
            light.offer(2)
            heavy.offer(2)
            await until(lambda: sum(each.free_slots for each in wires(server)) == 4)
            for _ in range(3):
                client.ask("default")
                await client.receipt()
            await light.job()
            assert len(heavy.all(RequestReceived)) == 2

    async def test_an_empty_queue_name_means_the_default(self, server: Server) -> None:
        async with peer(server, "client") as client, worker(server) as raw:
            raw.offer()
            client.ask("")
            assert (await raw.job()).queue == ""

    async def test_what_makes_no_sense_is_counted_and_the_rest_served(self, server: Server) -> None:
        async with peer(server, "client") as client:
            client.ask("a\x00b")
            client.ask("x" * 300)
            good = client.ask("fine")
            assert await client.receipt() == good
        assert server.context.counters["ignored", "emqp", "InvalidDestination"] == 2

    async def test_requests_with_one_id_are_answered_in_turn(self, server: Server) -> None:
        async with peer(server, "client") as client, worker(server) as raw:
            raw.offer(2)
            for _ in range(2):
                client.connection.send_request("default", "reply-requested", JOB, msgid="same")
            client.session.wake()
            for value in (1, 2):
                raw.reply(await raw.job(), value)
            await client.receipt()
            await client.receipt()
            assert [(await client.result())[1]["value"] for _ in range(2)] == [1, 2]


def wires(server: Server) -> list[Any]:
    return [
        each.session.connection
        for each in server.context.gateways.values()
        if each.listener == "emqp-workers"
    ]


class TestResults:
    async def test_a_result_comes_in_a_second_reply(self, server: Server) -> None:
        async with peer(server, "client") as client, worker(server) as raw:
            raw.offer()
            msgid = client.ask("default", "reply-requested")
            job = await raw.job()
            assert job.headers == "reply-requested"
            raw.reply(job, {"sum": 3})
            assert await client.receipt() == msgid
            assert await client.result() == (msgid, {"value": {"sum": 3}})

    async def test_nobody_gets_a_result_without_asking(self, server: Server) -> None:
        async with peer(server, "client") as client, worker(server) as raw:
            raw.offer(2)
            client.ask("default", "guarantee")
            job = await raw.job()
            assert job.headers == "guarantee,reply-requested"
            raw.reply(job)
            await client.receipt()
            await until(lambda: length(server, "default") == 0)
            last = client.ask("default")
            assert await client.receipt() == last

    async def test_a_client_that_came_back_gets_its_result(self, server: Server) -> None:
        async with worker(server) as raw:
            raw.offer()
            async with named_client(server, b"me") as first:
                msgid = first.ask("default", "reply-requested")
                job = await raw.job()
            async with named_client(server, b"me") as second:
                await until(lambda: b"me" in list(broker(server).routers["emqp-clients"]))
                raw.reply(job, 7)
                assert await second.result() == (msgid, {"value": 7})

    async def test_the_end_of_the_worker_is_reported(self, server: Server) -> None:
        async with peer(server, "client") as client:
            async with worker(server) as raw:
                raw.offer()
                msgid = client.ask("default", "reply-requested")
                await raw.job()
                raw.session.transport.abort()
            await client.receipt()
            expected = {"error": "provider_lost", "attempts": 1}
            assert await client.result() == (msgid, expected)

    async def test_a_consumer_without_results_answers_true(self, server: Server) -> None:
        async def deliver(_data: Any) -> Any:
            return {}

        async with peer(server, "client") as client, emp(server, **{"$deliver": deliver}) as other:
            await other.request("$subscribe", {"destination": "queue/q"})
            msgid = client.ask("q", "reply-requested")
            await client.receipt()
            assert await client.result() == (msgid, {"value": True})


def broker(server: Server) -> Any:
    from crosswire.gateways.emqp.broker import Broker

    return server.context.shared(Broker)


@asynccontextmanager
async def named_client(server: Server, identity: bytes) -> AsyncIterator[Raw]:
    """A client that calls itself by this name."""
    from crosswire.client.native.dial import dial
    from crosswire.wire.emqp.connection import EmqpConnection

    raw = Raw()
    await dial(
        "127.0.0.1",
        port_of(server, "emqp-clients"),
        lambda now: EmqpConnection("client", now, identity=identity),
        raw,
    )
    await raw.opened
    try:
        yield raw
    finally:
        await raw.close()


class TestFailures:
    async def test_a_guaranteed_job_of_a_dead_worker_goes_to_another(self, server: Server) -> None:
        async with peer(server, "client") as client, worker(server) as second:
            async with worker(server) as first:
                first.offer()
                msgid = client.ask("default", "guarantee,reply-requested")
                await first.job()
                first.session.transport.abort()
            second.offer()
            job = await second.job()
            assert job.msgid == msgid
            second.reply(job, 1)
            await client.receipt()
            assert await client.result() == (msgid, {"value": 1})

    @pytest.mark.parametrize("taken", [False, True])
    async def test_the_first_worker_may_finish_after_all(self, server: Server, taken: bool) -> None:
        async with peer(server, "client") as client, worker(server) as other:
            async with worker(server) as raw:
                raw.offer()
                msgid = client.ask("default", "guarantee,reply-requested")
                job = await raw.job()
                await client.receipt()
                raw.session.transport.abort()
            if taken:
                other.offer()
                await other.job()
            async with worker(server) as back:
                back.reply(job, "at last")
                assert await client.result() == (msgid, {"value": "at last"})
            assert length(server, "default") == 0

    async def test_a_job_is_retried_as_often_as_it_asks(self, start_server: StartServer) -> None:
        server = await start_server(queues={"default": QUICK})
        async with peer(server, "client") as client, worker(server) as raw:
            raw.offer(7)
            msgid = client.ask("default", "reply-requested,retry-count:6")
            for _ in range(7):
                job = await raw.job()
                assert (job.msgid, job.headers) == (msgid, "reply-requested,retry-count:6")
                raw.reply(job, "TimeoutError")
            await client.receipt()
            assert await client.result() == (msgid, {"error": "timeout", "attempts": 7})
        await until(lambda: server.hub.dead_letters.list("queue/default/dead"))
        (letter,) = server.hub.dead_letters.list("queue/default/dead")
        assert (letter.cause, len(letter.attempts)) == ("timeout", 7)

    async def test_without_a_count_a_timeout_is_final(self, server: Server) -> None:
        async with peer(server, "client") as client, worker(server) as raw:
            raw.offer()
            client.ask("default", "timeout:5")
            job = await raw.job()
            assert job.headers == "timeout:5,reply-requested"
            raw.reply(job, "TimeoutError")
            await until(lambda: server.hub.queue("queue/default/dead").length == 1)

    async def test_our_own_timeout_comes_two_seconds_later(self, server: Server) -> None:
        async with peer(server, "client") as client, worker(server) as raw:
            raw.offer()
            msgid = client.ask("default", "timeout:5,reply-requested")
            job = await raw.job()
            await client.receipt()
            gateway = next(iter(broker(server).workers))
            (job_there,) = gateway.jobs()
            now = server.context.now()
            broker(server)._on_time(job_there.since + 6.9)
            assert list(gateway.jobs()) == [job_there]
            broker(server)._on_time(max(now, job_there.since + 7.1))
            assert await client.result() == (msgid, {"error": "timeout", "attempts": 1})
            raw.reply(job, "too late")
            raw.offer()
            again = client.ask("default")
            await raw.job()
            assert await client.receipt() == again

    async def test_any_other_reply_is_success(self, server: Server) -> None:
        async with peer(server, "client") as client, worker(server) as raw:
            raw.offer()
            client.ask("default", "retry-count:3")
            raw.reply(await raw.job(), "ValueError: it broke")
            await until(lambda: length(server, "default") == 0)
        assert server.hub.queue("queue/default/dead").length == 0


class TestUnknownQueues:
    async def test_a_worker_of_default_gets_what_nobody_consumes(self, server: Server) -> None:
        async with peer(server, "client") as client, worker(server) as raw:
            raw.offer()
            client.ask("nobodys")
            assert (await raw.job()).queue == "nobodys"

    async def test_and_what_waited_before_it_came(self, server: Server) -> None:
        async with peer(server, "client") as client:
            client.ask("nobodys")
            await client.receipt()
            async with worker(server) as raw:
                raw.offer()
                assert (await raw.job()).queue == "nobodys"

    async def test_and_what_comes_there_without_a_request(self, server: Server) -> None:
        async with emqp(server) as client, worker(server) as raw:
            raw.offer(2)
            await client.schedule(JOB, queue="nobodys", interval_s=60)
            assert (await raw.job()).queue == "nobodys"
            (schedule,) = server.hub.schedules.all()
            async with worker(server) as second:
                second.offer()
                for _ in range(2):
                    server.hub.inject(schedule.envelope.replace(), server.context.now())
                assert (await raw.job()).queue == (await second.job()).queue == "nobodys"

    async def test_but_not_what_somebody_consumes(self, server: Server) -> None:
        got: asyncio.Queue[Any] = asyncio.Queue()

        async def deliver(data: Any) -> Any:
            got.put_nowait(data)
            return {}

        async with peer(server, "client") as client, worker(server) as raw:
            async with emp(server, **{"$deliver": deliver}) as other:
                client.ask("theirs")
                await client.receipt()
                await other.request("$subscribe", {"destination": "queue/theirs"})
                await asyncio.wait_for(got.get(), 10)
                raw.offer()
                client.ask("theirs")
                assert (await asyncio.wait_for(got.get(), 10))["json"] == json.loads(JOB)
            assert raw.all(RequestReceived) == []
            client.ask("theirs")
            assert (await raw.job()).queue == "theirs"

    async def test_nor_what_another_protocol_sent(self, server: Server) -> None:
        async with peer(server, "client") as client, worker(server) as raw, emp(server) as other:
            raw.offer(2)
            client.ask("mixed")
            await raw.job()
            await other.request("$publish", {"destination": "queue/mixed", "json": 1})
            client.ask("mixed")
            await raw.job()
        assert length(server, "mixed") == 1

    async def test_hold_keeps_it_for_its_own_worker(self, start_server: StartServer) -> None:
        server = await start_server(emqp=EmqpSettings(unknown_queue="hold"))
        async with peer(server, "client") as client, worker(server) as stranger:
            stranger.offer()
            client.ask("mine")
            await client.receipt()
            async with worker(server, "mine") as raw:
                raw.offer()
                await raw.job()
            assert stranger.all(RequestReceived) == []


class TestRestart:
    async def test_guaranteed_requests_survive(self, start_server: StartServer) -> None:
        server = await start_server()
        async with peer(server, "client") as client:
            msgid = client.ask("mail", "guarantee,x:1")
            assert await client.receipt() == msgid
        await server.stop()
        server = await start_server()
        async with worker(server, "mail") as raw:
            raw.offer()
            job = await raw.job()
        assert (job.msgid, job.headers) == (msgid, "guarantee,x:1,reply-requested")

    async def test_workers_of_default_know_what_was_asked_before(
        self, start_server: StartServer
    ) -> None:
        server = await start_server()
        async with peer(server, "client") as client:
            client.ask("nobodys", "guarantee")
            await client.receipt()
        await server.stop()
        server = await start_server()
        async with worker(server) as raw:
            raw.offer()
            assert (await raw.job()).queue == "nobodys"

    async def test_schedules_survive(self, start_server: StartServer) -> None:
        server = await start_server()
        async with emqp(server) as client:
            await client.schedule(JOB, interval_s=3600, nohaste=True)
            await until(lambda: server.hub.schedules.all())
        await server.stop()
        server = await start_server()
        assert [each.interval_s for each in server.hub.schedules.all()] == [3600]


class TestServices:
    async def test_a_worker_answers_calls_of_other_protocols(self, server: Server) -> None:
        async with worker(server, "add") as raw, emp(server) as caller:
            raw.offer()
            asking = asyncio.create_task(caller.request("add", {"a": 1}))
            job = await raw.job()
            assert (job.queue, job.message) == ("add", b'{"a":1}')
            headers = job.headers.split(",")
            assert headers[0] == "reply-requested"
            assert "content-type:application%2Fjson" in headers
            raw.reply(job, 2)
            assert await asking == {"value": 2}

    async def test_a_call_waits_for_a_slot_and_comes_first(self, server: Server) -> None:
        async with (
            worker(server, "q") as raw,
            emp(server) as caller,
            peer(server, "client") as client,
        ):
            client.ask("q")
            await client.receipt()
            asking = asyncio.create_task(caller.request("q/method", {}))
            await until(lambda: server.hub.services._calls)
            raw.offer()
            job = await raw.job()
            assert job.queue == "q/method"
            raw.reply(job)
            await asking
            assert length(server, "q") == 1
            raw.offer()
            await raw.job()

    async def test_a_job_that_takes_too_long_is_a_timeout(self, server: Server) -> None:
        async with worker(server, "slow") as raw, emp(server) as caller:
            raw.offer()
            asking = asyncio.create_task(caller.request("slow", {}))
            raw.reply(await raw.job(), "TimeoutError")
            with pytest.raises(RequestFailed) as caught:
                await asking
        assert caught.value.code == "timeout"

    async def test_a_worker_that_leaves_is_a_lost_provider(self, server: Server) -> None:
        async with emp(server) as caller:
            async with worker(server, "gone") as raw:
                raw.offer()
                asking = asyncio.create_task(caller.request("gone", {}))
                await raw.job()
            with pytest.raises(RequestFailed) as caught:
                await asking
        assert caught.value.code == "provider_lost"

    async def test_a_client_asks_a_provider_of_another_protocol(self, server: Server) -> None:
        async def add(data: Any) -> Any:
            return {"sum": data["a"] + 1}

        async with emp(server, add=add) as provider, peer(server, "client") as client:
            await provider.request("$serve", {"services": ["add"]})
            msgid = client.ask("add", "reply-requested", b'{"a": 4}')
            assert await client.receipt() == msgid
            assert await client.result() == (msgid, {"sum": 5})

    async def test_but_a_worker_that_named_the_queue_comes_first(self, server: Server) -> None:
        async def never(_data: Any) -> Any:
            raise AssertionError

        async with (
            emp(server, q=never) as provider,
            worker(server, "q") as raw,
            peer(server, "client") as client,
        ):
            await provider.request("$serve", {"services": ["q"]})
            raw.offer()
            msgid = client.ask("q", "reply-requested")
            raw.reply(await raw.job(), "the worker's")
            assert await client.receipt() == msgid
            assert await client.result() == (msgid, {"value": "the worker's"})

    async def test_a_providers_failure_is_reported(self, server: Server) -> None:
        async def fail(_data: Any) -> Any:
            raise RequestFailed("broken", "it broke")

        async with emp(server, fail=fail) as provider, peer(server, "client") as client:
            await provider.request("$serve", {"services": ["fail"]})
            msgid = client.ask("fail", "reply-requested,guarantee", b"{}")
            replies = [await client.next(ReplyReceived) for _ in range(2)]
        assert {event.request for event in replies} == {None, msgid}
        (result,) = [json.loads(event.message) for event in replies if event.request]
        assert result == {"error": "broken: it broke", "attempts": 1}

    async def test_a_refusal_of_the_hub_is_not_taken_for_a_providers(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def echo(data: Any) -> Any:
            return data

        def fail(_count: int) -> int:
            raise StoreFailed("no ids")

        async with emp(server, echo=echo) as provider, peer(server, "client") as client:
            await provider.request("$serve", {"services": ["echo"]})
            monkeypatch.setattr(server.hub.store, "reserve", fail)
            client.ask("echo", "reply-requested", b"{}")
            reply = await client.next(ReplyReceived)
        assert json.loads(reply.message) == {
            "error": "refused: the hub's disk takes nothing more",
            "attempts": 1,
        }


class TestBridges:
    async def test_properties_and_bytes_reach_a_worker(self, server: Server) -> None:
        async with worker(server, "q") as raw, emp(server) as other:
            raw.offer()
            properties = {"n": 1, "f": 0.5, "b": True, "s": "a,b", "timeout": 9, "t": "12"}
            asked = {"destination": "queue/q", "text": "h\u00e9", "properties": properties}
            await other.request("$publish", asked)
            job = await raw.job()
            assert job.message == "h\u00e9".encode()
            from crosswire.wire.emqp.headers import Headers

            headers = Headers.parse(job.headers)
            assert headers.properties() == properties | {"content-type": "text/plain"}
            assert (headers.reply_requested, headers.timeout_s) == (True, None)
            assert length(server, "q") == 1
            raw.reply(job)
            await until(lambda: length(server, "q") == 0)

    async def test_a_request_reaches_another_protocol(self, server: Server) -> None:
        got: asyncio.Queue[Any] = asyncio.Queue()

        async def deliver(data: Any) -> Any:
            got.put_nowait(data)
            return {}

        async with peer(server, "client") as client, emp(server, **{"$deliver": deliver}) as other:
            client.ask("q", "guarantee,n:1,f:0.5,b:true,s:a%2Cb,content-type:text%2Fplain", b"hi")
            await client.receipt()
            await other.request("$subscribe", {"destination": "queue/q"})
            data = await asyncio.wait_for(got.get(), 10)
        assert data["text"] == "hi"
        assert data["properties"] == {"n": 1, "f": 0.5, "b": True, "s": "a,b"}


class TestTopics:
    async def test_prefixes(self, server: Server) -> None:
        async with emqp(server) as client, client.subscribe("to", "other/x", "top") as messages:
            await until(lambda: any(each.attachments for each in subscribers(server)))
            for topic in ("nothing", "topic", "other/y", "other/x/z"):
                await client.publish(topic, topic.encode())
            assert await asyncio.wait_for(anext(messages), 10) == ("topic", b"topic")
            assert await asyncio.wait_for(anext(messages), 10) == ("other/x/z", b"other/x/z")

    async def test_from_the_publishers_door(self, server: Server) -> None:
        port = port_of(server, "emqp-publishers")
        async with (
            EmqpClient("127.0.0.1", port) as publisher,
            emqp(server) as client,
            client.subscribe("") as messages,
        ):
            await until(lambda: any(each.attachments for each in subscribers(server)))
            await publisher.publish("t", b"1")
            assert await asyncio.wait_for(anext(messages), 10) == ("t", b"1")

    async def test_from_and_to_another_protocol(self, server: Server) -> None:
        got: asyncio.Queue[Any] = asyncio.Queue()

        async def deliver(data: Any) -> Any:
            got.put_nowait(data)
            return {}

        async with (
            emqp(server) as client,
            client.subscribe("a/") as messages,
            emp(server, **{"$deliver": deliver}) as other,
        ):
            await other.request("$subscribe", {"destination": "topic/a/+"})
            await until(lambda: any(each.attachments for each in subscribers(server)))
            await client.publish("a/b", b'{"x": 1}', properties={"n": 5})
            data = await asyncio.wait_for(got.get(), 10)
            assert (data["json"], data["properties"]) == ({"x": 1}, {"n": 5})
            assert await asyncio.wait_for(anext(messages), 10) == ("a/b", b'{"x": 1}')
            await other.request("$publish", {"destination": "topic/a/c", "text": "y"})
            assert await asyncio.wait_for(anext(messages), 10) == ("a/c", b"y")

    async def test_unsubscribing(self, server: Server) -> None:
        async with peer(server, "subscriber") as raw, emqp(server) as client:
            raw.connection.send_subscribe("a")
            raw.connection.send_subscribe("b")
            raw.session.wake()
            await until(lambda: any(each._prefixes == {b"a", b"b"} for each in subscribers(server)))
            raw.connection.send_unsubscribe("a")
            raw.session.wake()
            await until(lambda: any(each._prefixes == {b"b"} for each in subscribers(server)))
            from crosswire.wire.emqp.events import PublicationReceived

            await client.publish("a", b"1")
            await client.publish("b", b"2")
            assert (await raw.next(PublicationReceived)).topic == "b"


def subscribers(server: Server) -> list[Any]:
    return [g for g in server.context.gateways.values() if g.listener == "emqp-subscribers"]


class TestSchedules:
    async def test_an_interval_fires_at_once_and_again(self, server: Server) -> None:
        async with emqp(server) as client, worker(server, "timed") as raw:
            raw.offer(2)
            await client.schedule(JOB, queue="timed", interval_s=0.1, guarantee=True)
            first, second = await raw.job(), await raw.job()
            assert (first.queue, first.message) == ("timed", JOB)
            assert first.headers == "guarantee,reply-requested"
            assert first.msgid != second.msgid

    async def test_the_same_call_replaces_and_ends_its_schedule(self, server: Server) -> None:
        async with emqp(server) as client:
            await client.schedule(JOB, interval_s=100, nohaste=True)
            await until(lambda: server.hub.schedules.all())
            await client.schedule(JOB, cron="0 0 * * *")
            await until(lambda: server.hub.schedules.all()[0].cron)
            assert [each.cron for each in server.hub.schedules.all()] == ["0 0 * * *"]
            await client.unschedule(JOB)
            await until(lambda: not server.hub.schedules.all())

    async def test_run_count(self, server: Server) -> None:
        async with emqp(server) as client, worker(server) as raw:
            raw.offer(3)
            await client.schedule(JOB, interval_s=0.1, run_count=2)
            await raw.job()
            await raw.job()
            await until(lambda: not server.hub.schedules.all())
            assert raw.all(RequestReceived) == []

    @pytest.mark.parametrize("count", ["-1", "9" * 30, str(2**63), "nan", "1.5", "", "x", "1e3"])
    async def test_a_run_count_that_is_none_is_ignored(self, server: Server, count: str) -> None:
        async with peer(server, "client") as client:
            headers = b"run_count:" + count.encode()
            parts = [b"", b"eMQP/1.0", b"SCHEDULE", b"1", b"q", headers, b"0.5", JOB, b""]
            client.connection._zmtp.send_message(parts)
            client.session.wake()
            await until(lambda: server.context.counters["ignored", "emqp", "InvalidSchedule"])
            assert server.hub.schedules.all() == []

    async def test_a_cron_that_is_too_long_is_ignored(self, start_server: StartServer) -> None:
        for settings in (EmqpSettings(), EmqpSettings(scheduler="external")):
            server = await start_server(emqp=settings)
            async with emqp(server) as client:
                await client.schedule(JOB, cron="1," * 100_000 + "1 * * * *")
                await until(lambda: server.context.counters["ignored", "emqp", "InvalidSchedule"])  # noqa: B023
                assert not server.hub.schedules.all() and not broker(server)._for_schedulers
            await server.stop()

    async def test_seven_frames(self, server: Server) -> None:
        async with peer(server, "client") as client:
            for name, headers in ((b"SCHEDULE", b"cron:0%200%20*%20*%20*"), (b"UNSCHEDULE", b"")):
                parts = [b"", b"eMQP/1.0", name, b"1", b"q", headers, JOB]
                client.connection._zmtp.send_message(parts)
                client.session.wake()
                before = server.hub.schedules.all()
                await until(lambda before=before: server.hub.schedules.all() != before)  # type: ignore[misc]
                found = [each.cron for each in server.hub.schedules.all()]
                assert found == (["0 0 * * *"] if name == b"SCHEDULE" else [])

    async def test_a_cron_that_is_none_is_ignored(self, server: Server) -> None:
        async with emqp(server) as client:
            await client.schedule(JOB, cron="when it suits")
            await until(lambda: server.context.counters["ignored", "emqp", "InvalidSchedule"])
            assert server.hub.schedules.all() == []

    async def test_an_external_scheduler_is_handed_them(self, start_server: StartServer) -> None:
        server = await start_server(emqp=EmqpSettings(scheduler="external"))
        async with emqp(server) as client:
            await client.schedule(JOB, interval_s=5, nohaste=True)
            await until(lambda: broker(server)._for_schedulers)
            async with peer(server, "scheduler") as scheduler:
                event = await scheduler.next(ScheduleReceived)
                assert (event.interval_s, event.headers, event.message) == (5, "nohaste", JOB)
                await client.schedule(b"[1]", cron="* * * * *")
                assert (await scheduler.next(ScheduleReceived)).cron == "* * * * *"
                await client.unschedule(JOB)
                assert (await scheduler.next(UnscheduleReceived)).message == JOB
                # The deployed one would fall over a fraction: the hub keeps it itself.
                await client.schedule(b"[2]", interval_s=99.5, nohaste=True)
                await until(lambda: len(server.hub.schedules.all()) == 1)
            assert len(server.hub.schedules.all()) == 1

    async def test_a_schedulers_requests_are_served(self, server: Server) -> None:
        async with peer(server, "scheduler") as scheduler, worker(server) as raw:
            raw.offer()
            msgid = scheduler.ask("default", "reply-requested")
            raw.reply(await raw.job())
            assert await scheduler.receipt() == msgid


class TestWorkers:
    async def test_a_stranger_is_sent_away(self, server: Server) -> None:
        from crosswire.wire.zmtp.connection import ZmtpConnection
        from crosswire.wire.zmtp.events import MessageReceived

        class Stranger(Raw):
            pass

        raw = Stranger()
        from crosswire.client.native.dial import dial

        await dial(
            "127.0.0.1",
            port_of(server, "emqp-workers"),
            lambda now: ZmtpConnection("connector", now, socket_type="DEALER", identity=b"w"),
            raw,
        )
        await raw.opened
        for _ in range(2):
            raw.session.connection.send_message(  # type: ignore[attr-defined]
                [b"", b"eMQP/1.0", b"HEARTBEAT", b"1", b"2.5"]
            )
        raw.session.wake()
        assert (await raw.next(MessageReceived)).parts[2] == b"DISCONNECT"
        raw.session.transport.abort()
        await raw.ended

    async def test_after_kbai_results_are_taken_and_nothing_is_given(self, server: Server) -> None:
        async with peer(server, "client") as client, worker(server) as raw:
            raw.offer(2)
            msgid = client.ask("default", "reply-requested,guarantee")
            job = await raw.job()
            await client.receipt()
            raw.connection.leave()
            raw.session.wake()
            await until(lambda: not broker(server).workers)
            client.ask("default")
            await client.receipt()
            raw.reply(job, 5)
            assert await client.result() == (msgid, {"value": 5})
            assert raw.all(RequestReceived) == []

    async def test_another_inform_starts_anew(self, server: Server) -> None:
        async with peer(server, "client") as client, worker(server, "old") as raw:
            raw.offer()
            parts = [b"", b"eMQP/1.0", b"INFORM", b"i", b"[40, 'new']", b"worker"]
            raw.connection._zmtp.send_message(parts)
            raw.session.wake()
            await raw.next(Acknowledged)
            client.ask("old")
            await client.receipt()
            assert raw.all(RequestReceived) == []
            raw.offer()
            client.ask("new")
            assert (await raw.job()).queue == "new"

    async def test_an_identity_that_returns_replaces_its_old_self(self, server: Server) -> None:
        async with named_client(server, b"me") as first, named_client(server, b"me") as second:
            await asyncio.wait_for(first.ended, 10)
            msgid = second.ask("default")
            assert await second.receipt() == msgid

    async def test_malformed_peers_harm_nobody(self, server: Server) -> None:
        async with worker(server) as raw, peer(server, "client") as client:
            for listener in ("clients", "workers", "admin", "publishers", "subscribers"):
                port = port_of(server, f"emqp-{listener}")
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
                answer = await asyncio.wait_for(reader.read(), 10)
                assert answer[:1] in (b"", b"\xff")  # no more than our greeting
                writer.close()
            client.connection._zmtp.send_message([b"", b"eMQP/1.0", b"REQUEST", b"\xff"])
            client.connection._zmtp.send_message([b"nonsense"])
            raw.offer()
            msgid = client.ask("default")
            assert (await raw.job()).msgid == msgid


class TestFullQueues:
    async def test_the_reply_is_withheld_until_there_is_room(
        self, start_server: StartServer
    ) -> None:
        server = await start_server(queues={"q": QueuePolicy(max_length=1)})
        async with peer(server, "client") as client:
            asked = [client.ask("q") for _ in range(3)]
            assert await client.receipt() == asked[0]
            await until(lambda: not client_wire(server).wants_data)
            async with worker(server, "q") as raw:
                raw.offer(3)
                assert [(await raw.job()).msgid for _ in range(3)] == asked
            assert [await client.receipt() for _ in range(2)] == asked[1:]
            await until(lambda: client_wire(server).wants_data)


def client_wire(server: Server) -> Any:
    (wire,) = [
        each.session.connection
        for each in server.context.gateways.values()
        if each.listener == "emqp-clients"
    ]
    return wire


async def test_a_client_that_never_reads_can_go_on_asking(start_server: StartServer) -> None:
    server = await start_server(connections=ConnectionLimits(congested_bytes=65536))
    count = 5_000
    async with peer(server, "client") as client:
        client.session.transport.pause_reading()
        (gateway,) = server.context.gateways.values()
        for session, option in (
            (client.session, socket.SO_RCVBUF),
            (gateway.session, socket.SO_SNDBUF),
        ):
            kernel = session.transport.get_extra_info("socket")
            kernel.setsockopt(socket.SOL_SOCKET, option, 4096)
        for number in range(count):
            # Receipts carry the id: long ones fill the buffers soon.
            client.connection.send_request("q", "", b"", msgid=f"{number:0250}")
        client.session.wake()
        await until(lambda: length(server, "q") == count)
        assert server.context.counters["dropped", "emqp", "receipt"] > 0
        client.session.transport.abort()


async def test_what_is_remembered_of_requests_counts(server: Server) -> None:
    """Each has other headers: some thousand of them are remembered, and begun anew then."""
    budget = server.context.budget
    async with peer(server, "client") as client:
        for number in range(1500):
            client.connection.send_request("q", f"guarantee,x-{number:04}{'x' * 300}", b"")
            if number == 900:
                client.session.wake()
                await until(lambda: length(server, "q") == 901)
                at_900 = budget.held_bytes
        client.session.wake()
        await until(lambda: length(server, "q") == 1500)
        assert 900 * 2_000 < at_900 < 900 * 4_000
        assert budget.held_bytes < at_900
    await until(lambda: not server.context.gateways)
    assert budget.held_bytes == 0


class TestAdministration:
    async def test_status(self, server: Server) -> None:
        async with (
            peer(server, "admin") as admin,
            peer(server, "client") as client,
            worker(server, "a") as raw,
            peer(server, "scheduler"),
        ):
            raw.offer(2)
            client.ask("a", "guarantee")
            await raw.job()
            client.ask("waits")
            await client.receipt()
            answers = {}
            for command in ("HELLO", "STATUS", "ROUTER_SHOW_WORKERS", "ROUTER_SHOW_SCHEDULERS"):
                admin.connection.send_admin(command)
                admin.session.wake()
                if command != "HELLO":
                    answers[command] = json.loads((await admin.next(ReplyReceived)).message)
        status = answers["STATUS"]
        assert status["inflight_messages_by_queue"] == {"a": 1}
        assert status["waiting_messages_by_queue"] == {"waits": 1}
        assert status["processed_messages_by_queue"] == {"a": 1}
        shown = answers["ROUTER_SHOW_WORKERS"]
        (name,) = shown["connected_workers"]
        assert shown["connected_workers"][name]["queues"] == [[10, "a"]]
        assert shown["connected_workers"][name]["available_slots"] == 1
        assert shown["connected_queues"] == {"a": [[10, name]]}
        assert len(answers["ROUTER_SHOW_SCHEDULERS"]["connected_schedulers"]) == 1

    async def test_disconnect_stops_emqp_and_nothing_else(self, server: Server) -> None:
        async with (
            peer(server, "admin") as admin,
            peer(server, "client") as client,
            worker(server) as raw,
            peer(server, "scheduler") as scheduler,
            emp(server) as other,
        ):
            raw.offer(2)
            msgid = client.ask("default", "reply-requested")
            job = await raw.job()
            await client.receipt()
            admin.connection.send_disconnect()
            admin.session.wake()
            await admin.next(Acknowledged)
            await raw.next(PeerLeaving)
            await scheduler.next(PeerLeaving)
            raw.reply(job, "done")
            assert await client.result() == (msgid, {"value": "done"})
            for each in (admin, client, raw, scheduler):
                await asyncio.wait_for(each.ended, 10)
            with pytest.raises(ClientError):
                await connect_peer(Raw(), "client", "127.0.0.1", port_of(server, "emqp-clients"))
            assert await other.request("$echo", {"still": 1}) == {"still": 1}


KEYS = {name: bytes([number]) * 32 for number, name in enumerate(("hub", "anna", "boss"), 1)}


class TestRights:
    def users(self) -> tuple[User, ...]:
        keys = {name: encode_key(public_key_of(key)) for name, key in KEYS.items()}
        return (
            User(
                name="anna",
                curve_key=keys["anna"],
                produce=("queue/a", "topic/a"),
                consume=("queue/a", "topic/a"),
            ),
            User(name="boss", curve_key=keys["boss"], administer=True),
        )

    def mechanism(self, name: str) -> Mechanism:
        public = public_key_of(KEYS["hub"])
        return CurveClient(public, KEYS[name], lambda size: bytes(range(size)))

    async def start(self, start_server: StartServer) -> Server:
        key = encode_key(KEYS["hub"])
        return await start_server(users=self.users(), emqp=EmqpSettings(curve_secret_key=key))

    async def test_what_is_not_allowed_is_ignored(self, start_server: StartServer) -> None:
        server = await self.start(start_server)
        anna = self.mechanism("anna")
        async with (
            peer(server, "client", mechanism=anna) as client,
            peer(server, "worker", mechanism=anna, queues=[(1, "b"), (1, "a")]) as raw,
        ):
            raw.offer(2)
            client.ask("b")
            allowed = client.ask("a")
            assert await client.receipt() == allowed
            assert (await raw.job()).queue == "a"
            assert [each.principal for each in broker(server).workers] == ["anna"]
        assert server.context.counters["forbidden", "emqp"] == 2

    async def test_queues_that_requests_create_count_for_the_user(
        self, start_server: StartServer
    ) -> None:
        users = tuple(msgspec.structs.replace(each, produce=("queue/#",)) for each in self.users())
        key = EmqpSettings(curve_secret_key=encode_key(KEYS["hub"]))
        server = await start_server(users=users, emqp=key, store=StoreLimits(destinations=40))
        async with peer(server, "client", mechanism=self.mechanism("anna")) as client:
            for number in range(12):
                client.ask(f"anna{number}")
            for _ in range(10):
                await client.receipt()
            await until(lambda: server.context.counters["ignored", "emqp", "QuotaExceeded"] == 2)
        async with peer(server, "client", mechanism=self.mechanism("boss")) as client:
            asked = client.ask("boss")
            assert await client.receipt() == asked
        assert len(server.hub.store.destinations()) == 11

    async def test_a_schedule_of_the_same_call_is_another_users_own(
        self, start_server: StartServer
    ) -> None:
        users = tuple(msgspec.structs.replace(each, produce=("queue/#",)) for each in self.users())
        key = EmqpSettings(curve_secret_key=encode_key(KEYS["hub"]))
        server = await start_server(users=users, emqp=key)
        schedules = server.hub.schedules
        async with (
            peer(server, "client", mechanism=self.mechanism("anna")) as anna,
            peer(server, "client", mechanism=self.mechanism("boss")) as boss,
        ):
            for each in (anna, boss):
                each.connection.send_schedule("q", "", b"same", interval_s=1000.0)
                each.session.wake()
            await until(lambda: len(schedules.all()) == 2)
            boss.connection.send_unschedule("q", "", b"same", interval_s=1000.0)
            boss.session.wake()
            await until(lambda: len(schedules.all()) == 1)
            assert [each.envelope.principal for each in schedules.all()] == ["anna"]

    async def test_topics(self, start_server: StartServer) -> None:
        server = await self.start(start_server)
        anna = self.mechanism("anna")
        port = port_of(server, "emqp-subscribers")
        async with (
            EmqpSubscriber("127.0.0.1", port, mechanism=anna) as messages,
            emqp(server, mechanism=anna) as client,
        ):
            await until(lambda: any(each.attachments for each in subscribers(server)))
            now = server.context.now()
            from crosswire.envelope import Envelope

            for topic in ("topic/b", "topic/a"):
                server.hub.produce([Envelope(destination=topic, kind="publish")], now)
            await client.publish("b", b"1")
            await client.publish("a", b"2")
            assert await asyncio.wait_for(anext(messages), 10) == ("a", b"")
            assert await asyncio.wait_for(anext(messages), 10) == ("a", b"2")

    async def test_only_who_may_administer_stops_it(self, start_server: StartServer) -> None:
        server = await self.start(start_server)
        async with peer(server, "admin", mechanism=self.mechanism("anna")) as admin:
            admin.connection.send_disconnect()
            admin.session.wake()
            await until(lambda: server.context.counters["forbidden", "emqp"])
        assert not broker(server).stopping
        async with peer(server, "admin", mechanism=self.mechanism("boss")) as admin:
            admin.connection.send_disconnect()
            admin.session.wake()
            await admin.next(Acknowledged)
        assert broker(server).stopping

    async def test_unknown_keys_and_clear_text_stay_outside(
        self, start_server: StartServer
    ) -> None:
        server = await self.start(start_server)
        stranger = CurveClient(public_key_of(KEYS["hub"]), bytes([9]) * 32, bytes)
        for mechanism in (stranger, None):
            with pytest.raises(ClientError):
                await connect_peer(
                    Raw(),
                    "client",
                    "127.0.0.1",
                    port_of(server, "emqp-clients"),
                    mechanism=mechanism,
                )

    async def test_nobody_takes_anothers_name(self, start_server: StartServer) -> None:
        server = await self.start(start_server)
        router = broker(server).routers["emqp-clients"]
        async with peer(server, "client", mechanism=self.mechanism("anna")) as first:
            (name,) = list(router)
            from crosswire.client.native.dial import dial
            from crosswire.wire.emqp.connection import EmqpConnection

            thief = Raw()
            await dial(
                "127.0.0.1",
                port_of(server, "emqp-clients"),
                lambda now: EmqpConnection(
                    "client", now, identity=name, mechanism=self.mechanism("boss")
                ),
                thief,
            )
            await thief.opened
            await until(lambda: len(router) == 2)
            assert router.get(name).principal == "anna"
            assert not first.ended.done()
            await thief.close()


# -------------------------------------------------------------------------------------- goodbyes


def send_goodbye(raw: Raw, spelling: str) -> None:
    """As deployed clients do, where our own has no word for it."""
    raw.connection._zmtp.send_message(serialize(Kbai("bye", spelling)))


@pytest.mark.parametrize("spelling", ["KBAI", "KBYE"])
@pytest.mark.parametrize("role", ["client", "scheduler"])
async def test_a_request_after_a_goodbye_is_served(
    server: Server, role: str, spelling: str
) -> None:
    async with peer(server, role) as asker, peer(server, "worker", queues=((10, "q"),)) as worker:
        worker.offer(2)
        before = asker.ask("q", "reply-requested")
        send_goodbye(asker, spelling)
        after = asker.ask("q", "reply-requested,guarantee")
        for _ in range(2):
            worker.reply(await worker.job())
        replies = [await asker.next(ReplyReceived) for _ in range(4)]
    assert {each.message.decode() for each in replies if each.request is None} == {before, after}
    assert {each.request for each in replies if each.request} == {before, after}


async def test_a_publication_after_a_goodbye_is_published(server: Server) -> None:
    port = port_of(server, "emqp-subscribers")
    listening = EmqpSubscriber("127.0.0.1", port, ["news"], backoff=SOON)
    async with peer(server, "publisher") as publisher, listening as subscriber:
        async with asyncio.timeout(10):
            while not any(each.attachments for each in server.context.gateways.values()):
                await asyncio.sleep(0)
        send_goodbye(publisher, "KBYE")
        publisher.connection.send_publish("news", b"x")
        publisher.session.wake()
        assert await asyncio.wait_for(anext(aiter(subscriber)), 10) == ("news", b"x")
