"""The eMQP client, subscriber and worker on real sockets."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from crosswire.client.native.dial import Backoff
from crosswire.client.native.emqp import EmqpClient, EmqpSubscriber
from crosswire.client.native.emqp.worker import Worker
from crosswire.errors import (
    ConnectFailed,
    ConnectionLost,
    PeerTimeout,
    RequestFailed,
    RequestTimeout,
)
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed
from crosswire.wire.emqp.events import (
    CommandIgnored,
    PeerInformed,
    PeerLeaving,
    PublishReceived,
    ReplyReceived,
    RequestReceived,
    ScheduleReceived,
    SlotOffered,
    UnscheduleReceived,
)
from crosswire.wire.emqp.frames import EmqpLimits
from crosswire.wire.emqp.jobs import serialize_job
from crosswire.wire.zmtp.mechanisms import PlainClient, PlainServer
from tests.wire.emqp.broker import TestBroker

SOON = Backoff(0.01, 0.02)
THIS = "tests.client.native.test_emqp"


def add(a: int, b: int = 2) -> dict[str, int]:
    return {"sum": a + b}


def fail(words: str = "it broke") -> None:
    raise ValueError(words)


def linger(seconds: float) -> str:
    time.sleep(seconds)
    return "late"


def leave() -> None:
    raise SystemExit(1)


def vanish() -> None:
    os._exit(1)


def whoami() -> int:
    return os.getpid()


def odd() -> object:
    return {1, 2} - {1} and object()


async def nap(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "rested"


class Adder:
    def __init__(self, base: int = 0) -> None:
        self._base = base

    def add(self, number: int) -> int:
        return self._base + number

    def secret(self) -> str:
        return "secret"


@pytest.fixture
async def broker() -> AsyncIterator[TestBroker]:
    async with TestBroker() as broker:
        yield broker


def client_of(broker: TestBroker, **options: Any) -> EmqpClient:
    return EmqpClient(
        "127.0.0.1",
        broker.ports["emqp-clients"],
        subscribers_port=broker.ports["emqp-subscribers"],
        backoff=SOON,
        **options,
    )


def worker_of(broker: TestBroker, *functions: Callable[..., Any], **options: Any) -> Worker:
    worker = Worker("127.0.0.1", broker.ports["emqp-workers"], backoff=SOON, **options)
    for function in functions:
        worker.allow(function)
    return worker


class TestClient:
    async def test_a_request_is_taken(self, broker: TestBroker) -> None:
        async with client_of(broker) as client:
            assert await client.request(b"\xff", queue="q", properties={"a": 1}) is None
        (event,) = broker.events(RequestReceived)
        assert (event.queue, event.headers, event.message) == ("q", "a:1", b"\xff")

    async def test_all_headers(self, broker: TestBroker) -> None:
        async with client_of(broker) as client:
            await client.request(b"", guarantee=True, retry_count=2, timeout_s=5)
        (event,) = broker.events(RequestReceived)
        assert event.headers == "guarantee,retry-count:2,timeout:5"

    async def test_who_wants_no_receipt_does_not_wait_for_one(self, broker: TestBroker) -> None:
        sent = [b"%d" % number for number in range(100)]
        async with client_of(broker) as client:
            (guest,) = broker.at("emqp-clients")
            guest.session.transport.pause_reading()
            for each in sent:
                await client.request(each, receipt=False)
            assert broker.events(RequestReceived) == []
            guest.session.transport.resume_reading()
            await broker.until(lambda: len(broker.events(RequestReceived)) == len(sent))
        assert [event.message for event in broker.events(RequestReceived)] == sent

    async def test_no_result_in_time(self, broker: TestBroker) -> None:
        async with client_of(broker) as client:
            with pytest.raises(RequestTimeout, match="no result from queue q"):
                await client.request(b"", queue="q", reply_requested=True, wait_s=0.05)

    async def test_the_broker_gave_up(self, broker: TestBroker) -> None:
        async with client_of(broker) as client:
            asking = asyncio.create_task(client.request(b"", reply_requested=True))
            (event,) = await broker.until(lambda: broker.events(RequestReceived))
            (guest,) = broker.at("emqp-clients")
            guest.connection.send_result(b'{"error": "timeout", "attempts": 3}', event.msgid)
            guest.session.wake()
            with pytest.raises(RequestFailed, match=r"timeout \(attempts: 3\)"):
                await asking

    async def test_a_result_that_is_none(self, broker: TestBroker) -> None:
        async with client_of(broker) as client:
            asking = asyncio.create_task(client.call("m.f"))
            (event,) = await broker.until(lambda: broker.events(RequestReceived))
            (guest,) = broker.at("emqp-clients")
            guest.connection.send_result(b"what?", event.msgid)
            guest.session.wake()
            with pytest.raises(RequestFailed, match="not a worker's result"):
                await asking

    async def test_what_is_under_way_fails_when_the_connection_dies(
        self, broker: TestBroker
    ) -> None:
        async with client_of(broker) as client:
            asking = asyncio.create_task(client.request(b"", reply_requested=True))
            await broker.until(lambda: broker.events(RequestReceived))
            broker.at("emqp-clients")[0].session.transport.abort()
            with pytest.raises(ConnectionLost, match="may or may not"):
                await asking

    async def test_reconnects_by_itself(self, broker: TestBroker) -> None:
        async with client_of(broker) as client:
            await client.request(b"1")
            broker.at("emqp-clients")[0].session.transport.abort()
            await broker.until(lambda: not broker.at("emqp-clients"))
            await broker.until(lambda: broker.at("emqp-clients"))
            assert await client.request(b"2", wait_s=10) is None

    async def test_nobody_there(self) -> None:
        async with TestBroker() as broker:
            port = broker.ports["emqp-clients"]
        with pytest.raises(ConnectFailed, match=f"can't connect to 127.0.0.1:{port}"):
            await EmqpClient("127.0.0.1", port).__aenter__()

    async def test_the_wrong_door(self, broker: TestBroker) -> None:
        with pytest.raises(ConnectFailed, match="no handshake"):
            await EmqpClient("127.0.0.1", broker.ports["emqp-subscribers"]).__aenter__()

    async def test_a_closed_client_raises(self, broker: TestBroker) -> None:
        async with client_of(broker) as client:
            pass
        with pytest.raises(ConnectionLost, match="closed"):
            await client.request(b"")

    async def test_schedules(self, broker: TestBroker) -> None:
        async with client_of(broker) as client:
            message = serialize_job("m.f")
            await client.schedule(message, queue="q", interval_s=60, nohaste=True, run_count=3)
            await client.schedule(message, cron="* * * * *", guarantee=True)
            await client.unschedule(message)
            await broker.until(lambda: broker.events(UnscheduleReceived))
        first, second = broker.events(ScheduleReceived)
        assert (first.interval_s, first.headers) == (60, "nohaste,run_count:3")
        assert (second.cron, second.headers, second.queue) == ("* * * * *", "guarantee", "default")

    @pytest.mark.parametrize("when", [{}, {"interval_s": 1.0, "cron": "@daily"}])
    async def test_a_schedule_is_of_one_kind(self, broker: TestBroker, when: Any) -> None:
        async with client_of(broker) as client:
            with pytest.raises(ValueError, match="either"):
                await client.schedule(b"", **when)

    async def test_a_mechanism(self) -> None:
        async with TestBroker(mechanism=PlainServer(lambda *who: who == ("a", "b"))) as broker:
            async with client_of(broker, mechanism=PlainClient("a", "b")) as client:
                await client.request(b"")
            with pytest.raises(ConnectFailed):
                await client_of(broker, mechanism=PlainClient("a", "x")).__aenter__()


class TestSubscriber:
    async def test_gets_what_is_published_under_its_topics(self, broker: TestBroker) -> None:
        async with client_of(broker) as client, client.subscribe("a", "b") as messages:
            await broker.until(lambda: len(broker.at("emqp-subscribers")[0].prefixes) == 2)
            await client.publish("c", b"0")
            await client.publish("a1", b"1")
            await client.publish("b", b"\xff", properties={"n": 1})
            assert await anext(messages) == ("a1", b"1")
            assert await anext(messages) == ("b", b"\xff")
        assert broker.events(PublishReceived)[-1].headers == "n:1"

    async def test_reconnects_and_subscribes_again(self, broker: TestBroker) -> None:
        port = broker.ports["emqp-subscribers"]
        async with EmqpSubscriber("127.0.0.1", port, ["t"], backoff=SOON) as messages:
            await broker.until(lambda: broker.at("emqp-subscribers")[0].prefixes)
            broker.at("emqp-subscribers")[0].session.transport.abort()
            await broker.until(lambda: not broker.at("emqp-subscribers"))
            await broker.until(lambda: any(g.prefixes for g in broker.at("emqp-subscribers")))
            broker.publish("t", b"again")
            assert await anext(messages) == ("t", b"again")

    async def test_closing_ends_the_iteration(self, broker: TestBroker) -> None:
        port = broker.ports["emqp-subscribers"]
        async with EmqpSubscriber("127.0.0.1", port) as messages:
            await broker.until(lambda: broker.at("emqp-subscribers")[0].prefixes)
            reading = asyncio.create_task(anext(messages, None))
            await asyncio.sleep(0)
        assert await reading is None

    async def test_a_slow_reader_makes_the_broker_wait_and_misses_nothing(
        self, broker: TestBroker
    ) -> None:
        port = broker.ports["emqp-subscribers"]
        async with EmqpSubscriber("127.0.0.1", port, window=10) as messages:
            await broker.until(lambda: broker.at("emqp-subscribers")[0].prefixes)
            for number in range(50):
                broker.publish("t", b"%d" % number + b"x" * 100_000)
            got = [await anext(messages) for _ in range(50)]
        assert [message.rstrip(b"x") for _, message in got] == [b"%d" % n for n in range(50)]


class TestWorker:
    async def test_does_jobs(self, broker: TestBroker) -> None:
        async with worker_of(broker, add), client_of(broker) as client:
            assert await client.call(f"{THIS}.add", [1], {"b": 5}) == {"sum": 6}

    async def test_offers_its_slots(self, broker: TestBroker) -> None:
        async with worker_of(broker, slots=3, queues=[(20, "heavy"), (10, "default")]):
            await broker.until(lambda: len(broker.events(SlotOffered)) == 3)
        (event,) = broker.events(PeerInformed)
        assert event.queues == ((20, "heavy"), (10, "default"))

    async def test_many_jobs_get_each_their_own_result(self, broker: TestBroker) -> None:
        async with worker_of(broker, add), client_of(broker) as client:
            asked = [client.call(f"{THIS}.add", [n]) for n in range(200)]
            assert await asyncio.gather(*asked) == [{"sum": n + 2} for n in range(200)]

    async def test_never_does_more_at_a_time_than_it_has_slots_for(
        self, broker: TestBroker
    ) -> None:
        now, most = 0, 0
        lock = threading.Lock()

        def count() -> None:
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
            time.sleep(0.005)
            with lock:
                now -= 1

        worker = worker_of(broker, slots=3, jobs={"m.count": count})
        async with worker, client_of(broker) as client:
            await asyncio.gather(*(client.call("m.count") for _ in range(20)))
        assert most == 3

    async def test_methods_are_called_on_a_new_object(self, broker: TestBroker) -> None:
        worker = worker_of(broker)
        worker.allow_methods(Adder, "add")
        async with worker, client_of(broker) as client:
            made = {"class_kwargs": {"base": 7}}
            assert await client.call(f"{THIS}:Adder.add", [5], **made) == 12
            assert "not allowed" in await client.call(f"{THIS}:Adder.secret")

    async def test_coroutines_run_on_the_loop(self, broker: TestBroker) -> None:
        async with worker_of(broker, nap), client_of(broker) as client:
            assert await client.call(f"{THIS}.nap", [0]) == "rested"

    @pytest.mark.parametrize("name", ["os.getcwd", f"{THIS}.fail", "tests.client.nosuch.f"])
    async def test_what_is_not_allowed_is_not_even_imported(
        self, broker: TestBroker, name: str
    ) -> None:
        async with worker_of(broker, add), client_of(broker) as client:
            assert await client.call(name) == f"{name} is not allowed here"

    async def test_what_is_no_call_is_refused(self, broker: TestBroker) -> None:
        async with worker_of(broker, add), client_of(broker) as client:
            answer = await client.request(b"\xff\0", reply_requested=True)
            assert answer == b'{"value":"the message is not a call"}'
            assert await client.call(f"{THIS}.add", [1]) == {"sum": 3}

    async def test_without_reply_requested_there_is_none(self, broker: TestBroker) -> None:
        async with worker_of(broker, add, slots=1), client_of(broker) as client:
            await client.request(serialize_job(f"{THIS}.add", [1]))
            await broker.until(lambda: len(broker.events(SlotOffered)) == 2)
        assert broker.events(ReplyReceived) == []

    async def test_an_exception_is_reported_as_its_words(self, broker: TestBroker) -> None:
        async with worker_of(broker, fail), client_of(broker) as client:
            assert await client.call(f"{THIS}.fail") == "it broke"
            assert await client.call(f"{THIS}.fail", [""]) == "ValueError"
            assert "argument" in await client.call(f"{THIS}.fail", [1, 2, 3])

    async def test_a_job_can_not_end_the_program(self, broker: TestBroker) -> None:
        async with worker_of(broker, leave, add), client_of(broker) as client:
            assert "tried to exit" in await client.call(f"{THIS}.leave")
            assert await client.call(f"{THIS}.add", [1]) == {"sum": 3}

    async def test_a_result_that_json_can_not_hold(self, broker: TestBroker) -> None:
        async with worker_of(broker, odd), client_of(broker) as client:
            assert "not JSON" in await client.call(f"{THIS}.odd")

    async def test_a_coroutine_that_takes_too_long_is_stopped(self, broker: TestBroker) -> None:
        async with worker_of(broker, nap, slots=1), client_of(broker) as client:
            assert await client.call(f"{THIS}.nap", [60], timeout_s=0.05) == "TimeoutError"
            assert await client.call(f"{THIS}.nap", [0]) == "rested"

    async def test_a_thread_that_takes_too_long_keeps_its_slot(self, broker: TestBroker) -> None:
        async with worker_of(broker, linger, slots=1), client_of(broker) as client:
            assert await client.call(f"{THIS}.linger", [0.3], timeout_s=0.05) == "TimeoutError"
            assert len(broker.events(SlotOffered)) == 1
            assert await client.call(f"{THIS}.linger", [0]) == "late"
            assert len(broker.events(ReplyReceived)) == 2

    async def test_a_full_name_is_needed(self, broker: TestBroker) -> None:
        worker = worker_of(broker)
        with pytest.raises(ValueError, match="full name"):
            worker.allow(add, name="add")
        with pytest.raises(ValueError, match="no method"):
            worker.allow_methods(Adder, "nope")
        with pytest.raises(ValueError, match="can't be called"):
            worker.allow(3, name="m.three")  # type: ignore[type-var]
        with pytest.raises(ValueError, match="at least 1 slot"):
            worker_of(broker, slots=0)


class TestStopping:
    async def test_finishes_what_it_has_and_hands_it_in(self, broker: TestBroker) -> None:
        worker = worker_of(broker, linger, slots=1)
        await worker.start()
        async with client_of(broker) as client:
            asking = asyncio.create_task(client.call(f"{THIS}.linger", [0.1]))
            while not worker.busy:
                await asyncio.sleep(0)
            await worker.stop()
            assert await asking == "late"
        assert broker.events(PeerLeaving) and worker.stopped.is_set()
        assert len(broker.events(SlotOffered)) == 1
        await worker.stop()

    async def test_the_end_is_clean(self, broker: TestBroker) -> None:
        worker = worker_of(broker)
        await worker.start()
        await worker.stop()
        await broker.until(lambda: not broker.guests)
        assert broker.events(ConnectionClosed) == [ConnectionClosed(clean=True)]

    async def test_what_takes_too_long_is_given_up(self, broker: TestBroker) -> None:
        worker = worker_of(broker, nap, slots=1)
        await worker.start()
        async with client_of(broker) as client:
            await client.request(serialize_job(f"{THIS}.nap", [60]))
            while not worker.busy:
                await asyncio.sleep(0)
            await worker.stop(grace_s=0.05)
        assert not worker.busy


class TestBrokerGone:
    async def test_the_conversation_is_restarted_and_results_handed_in(
        self, broker: TestBroker
    ) -> None:
        worker = worker_of(broker, linger, slots=2)
        async with worker, client_of(broker) as client:
            asking = asyncio.create_task(client.call(f"{THIS}.linger", [0.2]))
            while not worker.busy:
                await asyncio.sleep(0)
            broker.at("emqp-workers")[0].session.transport.abort()
            assert await asking == "late"
        assert len(broker.events(PeerInformed)) == 2

    async def test_a_slot_in_use_is_not_offered_again(self, broker: TestBroker) -> None:
        worker = worker_of(broker, nap, slots=2)
        async with worker, client_of(broker) as client:
            await client.request(serialize_job(f"{THIS}.nap", [60]))
            while not worker.busy:
                await asyncio.sleep(0)
            broker.at("emqp-workers")[0].session.transport.abort()
            await broker.until(lambda: len(broker.events(PeerInformed)) == 2)
            await broker.until(lambda: len(broker.events(SlotOffered)) >= 3)
            await worker.stop(grace_s=0)
        await broker.until(lambda: broker.events(PeerLeaving))
        assert len(broker.events(SlotOffered)) == 3

    async def test_a_broker_that_does_not_know_us_any_more(self, broker: TestBroker) -> None:
        async with worker_of(broker, add), client_of(broker) as client:
            (guest,) = broker.at("emqp-workers")
            guest.connection.send_disconnect()
            guest.session.wake()
            await broker.until(lambda: len(broker.events(PeerInformed)) == 2)
            assert await client.call(f"{THIS}.add", [1]) == {"sum": 3}

    async def test_a_broker_that_leaves_gets_the_results_and_is_looked_for(
        self, broker: TestBroker
    ) -> None:
        async with worker_of(broker, linger) as worker, client_of(broker) as client:
            asking = asyncio.create_task(client.call(f"{THIS}.linger", [0.2]))
            while not worker.busy:
                await asyncio.sleep(0)
            (guest,) = broker.workers
            guest.connection.leave()
            guest.session.wake()
            assert await asking == "late"
            await broker.until(lambda: len(broker.events(PeerInformed)) == 2)
            assert broker.events(ConnectionClosed)[0].clean

    async def test_silence_is_noticed(self) -> None:
        quick = EmqpLimits(heartbeat_interval_s=0.05, silence_s=0.2)
        async with TestBroker(limits=quick) as broker, worker_of(broker, limits=quick):
            await broker.until(lambda: broker.workers)
            broker.at("emqp-workers")[0].session.transport.pause_reading()
            (failed,) = await broker.until(lambda: broker.events(ConnectionFailed))
            assert isinstance(failed.error, PeerTimeout)
            await broker.until(lambda: len(broker.events(PeerInformed)) == 2)

    async def test_heartbeats_keep_it_alive(self) -> None:
        quick = EmqpLimits(heartbeat_interval_s=0.1, silence_s=1.0)
        async with TestBroker(limits=quick) as broker:
            async with worker_of(broker, add, nap, limits=quick), client_of(broker) as client:
                assert await client.call(f"{THIS}.nap", [1.5]) == "rested"
            assert len(broker.events(PeerInformed)) == 1

    async def test_nobody_lets_us_in(self) -> None:
        quick = EmqpLimits(silence_s=0.1)
        async with TestBroker() as broker:
            broker.refuse_workers = True
            with pytest.raises(ConnectFailed, match="silent"):
                await worker_of(broker, limits=quick).start()


@pytest.mark.slow
class TestProcesses:
    async def test_jobs_run_in_a_process_that_is_kept(self, broker: TestBroker) -> None:
        worker = worker_of(broker, whoami, fail, slots=1, isolation="process")
        async with worker, client_of(broker) as client:
            first = await client.call(f"{THIS}.whoami")
            assert await client.call(f"{THIS}.fail") == "it broke"
            assert first == await client.call(f"{THIS}.whoami") != os.getpid()

    async def test_a_job_that_takes_too_long_is_killed_and_its_slot_free(
        self, broker: TestBroker
    ) -> None:
        worker = worker_of(broker, linger, vanish, slots=1, isolation="process")
        async with worker, client_of(broker) as client:
            started = time.monotonic()
            assert await client.call(f"{THIS}.linger", [60], timeout_s=0.2) == "TimeoutError"
            assert await client.call(f"{THIS}.vanish") == "the job's process died"
            assert await client.call(f"{THIS}.linger", [0]) == "late"
            assert time.monotonic() - started < 30

    async def test_what_another_process_can_not_find_is_refused(self, broker: TestBroker) -> None:
        worker = worker_of(broker, isolation="process")
        with pytest.raises(ValueError, match="can't find"):
            worker.allow(lambda: None, name="m.f")
        await worker.stop()


async def test_no_command_of_ours_was_ignored(broker: TestBroker) -> None:
    async with worker_of(broker, add), client_of(broker) as client:
        await client.call(f"{THIS}.add", [1])
        await client.publish("t", b"")
        await client.schedule(b"", interval_s=5)
    await broker.until(lambda: broker.events(ScheduleReceived))
    assert broker.events(CommandIgnored) == []
