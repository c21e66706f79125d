"""The genuine EventMQ 0.3.13 against our eMQP: its clients and daemons, and its brokers.

It is installed once, without its pins, into a virtual environment of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import venv
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from crosswire.client.native.dial import Backoff
from crosswire.client.native.emqp import EmqpClient, EmqpSubscriber
from crosswire.client.native.emqp.worker import Worker
from crosswire.errors import RequestTimeout
from crosswire.wire.emqp.events import (
    CommandIgnored,
    PeerInformed,
    PeerLeaving,
    ReplyReceived,
    RequestReceived,
    ScheduleReceived,
    ShutdownRequested,
    SlotOffered,
    UnscheduleReceived,
)
from crosswire.wire.emqp.jobs import serialize_job
from tests.shared_folder import make_once
from tests.wire.emqp.broker import TestBroker

FOLDER = Path(__file__).parent.parent.parent / ".venv-eventmq"
EVENTMQ = "eventmq==0.3.13"
# Current versions of what it asks for in old ones.
NEEDED = ["pyzmq", "six", "monotonic", "croniter", "future", "psutil", "redis"]
SOON = Backoff(0.01, 0.05)

JOBS = """
import time

def plain(a, b=2):
    return {"sum": a + b}

def raises():
    raise ValueError("it broke")

def slow(seconds):
    time.sleep(seconds)
    return "late"

def touch(path):
    open(path, "w").close()

class K:
    def __init__(self, base=0):
        self.base = base

    def add(self, number):
        return self.base + number
"""

CLIENT = """
import json, sys
from eventmq.client import messages
from eventmq.sender import Sender

socket = Sender()
socket.zsocket.rcvtimeo = 20000
socket.connect(sys.argv[1])
"""

STAY = "sys.stdin.read()\n"
"""What it has sent may not have left when it ends: behind this it lives until it is killed."""


def install() -> None:
    """Make the environment. Raises CalledProcessError if a package can't be installed."""
    venv.create(FOLDER, with_pip=True)
    pip = [FOLDER / "bin" / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *NEEDED], check=True, capture_output=True)
    subprocess.run([*pip, "--no-deps", EVENTMQ], check=True, capture_output=True)


@pytest.fixture(scope="session")
def eventmq() -> Path:
    """The `bin` of an environment with the genuine EventMQ in it."""
    try:
        make_once(FOLDER, EVENTMQ, install)
    except subprocess.CalledProcessError as error:
        why = f"{EVENTMQ} can't be installed from a package index: {error.stderr.decode()}"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    return FOLDER / "bin"


@pytest.fixture
def run(eventmq: Path, tmp_path: Path) -> Callable[..., Any]:
    """Starts one of its programs, or a script, and ends it with the test."""
    (tmp_path / "jobs_demo.py").write_text(JOBS)

    @asynccontextmanager
    async def start(program: str, *args: str, **settings: str) -> AsyncIterator[Any]:
        script = ["-c", program] if "\n" in program else [str(eventmq / program)]
        process = await asyncio.create_subprocess_exec(
            str(eventmq / "python"),
            *script,
            *args,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if "\n" in program else subprocess.PIPE,
            start_new_session=True,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(tmp_path),
                "PYTHONUNBUFFERED": "1",
                "EVENTMQ_CONFIG_FILE": str(tmp_path / "none.conf"),
                "EVENTMQ_WAL": str(tmp_path / "wal.log"),
                **{f"EVENTMQ_{name}": value for name, value in settings.items()},
            },
        )
        try:
            yield process
        finally:
            # A job manager has children, which are in the group that we gave it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()

    return start


@pytest.fixture
async def broker() -> AsyncIterator[TestBroker]:
    async with TestBroker() as broker:
        yield broker


def at(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


def free_ports(count: int) -> list[int]:
    """The genuine brokers can't be told to take any that is free."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def client_of(port: int, **options: Any) -> EmqpClient:
    return EmqpClient("127.0.0.1", port, backoff=SOON, **options)


async def answer_of(process: Any) -> Any:
    """What a script printed as its last line."""
    output, _ = await asyncio.wait_for(process.communicate(), 30)
    return json.loads(output.splitlines()[-1])


# ---------------------------------------------------------------- its peers, at a broker of ours


class TestItsClient:
    async def test_asks_and_is_answered_by_our_worker(self, run: Any, broker: TestBroker) -> None:
        worker = Worker("127.0.0.1", broker.ports["emqp-workers"])
        worker.allow(lambda a, b=2: {"sum": a + b}, name="jobs_demo.plain")
        ask = f"""{CLIENT}
msgid = messages.defer_job(socket, "jobs_demo.plain", args=(1,), kwargs={{"b": 4}},
    reply_requested=True, guarantee=True, retry_count=3, timeout=5, queue="default")
print(json.dumps([msgid, socket.recv_multipart(), socket.recv_multipart()]))
"""
        async with worker, run(ask, at(broker.ports["emqp-clients"])) as process:
            msgid, receipt, result = await answer_of(process)
        assert (receipt[:3], receipt[4:]) == (["", "eMQP/1.0", "REPLY"], [msgid])
        assert (json.loads(result[4]), result[5]) == ({"value": {"sum": 5}}, msgid)
        (event,) = broker.events(RequestReceived)
        assert event.headers == "reply-requested,guarantee,retry-count:3,timeout:5"

    async def test_schedules_and_unschedules(self, run: Any, broker: TestBroker) -> None:
        ask = f"""{CLIENT}
for more in {{}}, {{"unschedule": True}}:
    messages.schedule(socket, "jobs_demo.plain", interval_secs=60, args=(1,), **more)
messages.schedule(socket, "jobs_demo.plain", cron="* * * * *", headers=("nohaste",))
{STAY}"""
        async with run(ask, at(broker.ports["emqp-clients"])):
            await broker.until(lambda: len(broker.events(ScheduleReceived)) == 2)
        first, second = broker.events(ScheduleReceived)
        (gone,) = broker.events(UnscheduleReceived)
        assert (first.interval_s, first.cron, first.headers) == (60, None, "guarantee")
        assert (second.interval_s, second.cron, second.headers) == (None, "* * * * *", "nohaste")
        assert gone.message == first.message

    async def test_publishes_to_our_subscriber(self, run: Any, broker: TestBroker) -> None:
        say = f"""{CLIENT}
messages.send_publish_request(socket, "topic", ["update", "1"])
{STAY}"""
        async with EmqpSubscriber("127.0.0.1", broker.ports["emqp-subscribers"]) as messages:
            await broker.until(lambda: broker.at("emqp-subscribers")[0].prefixes)
            async with run(say, at(broker.ports["emqp-publishers"])):
                assert await asyncio.wait_for(anext(messages), 20) == ("topic", b'["update", "1"]')

    async def test_subscribes_to_our_publisher(self, run: Any, broker: TestBroker) -> None:
        listen = """
import json, sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.rcvtimeo = 20000
socket.setsockopt(zmq.SUBSCRIBE, b"to")
socket.connect(sys.argv[1])
print(json.dumps([part.decode() for part in socket.recv_multipart()]))
"""
        async with run(listen, at(broker.ports["emqp-subscribers"])) as process:
            await broker.until(lambda: any(g.prefixes for g in broker.at("emqp-subscribers")))
            async with client_of(broker.ports["emqp-clients"]) as client:
                await client.publish("other", b"0")
                await client.publish("topic", b"1")
            assert await answer_of(process) == ["topic", "1"]


class TestItsJobManager:
    async def test_does_our_clients_jobs(self, run: Any, broker: TestBroker) -> None:
        where = at(broker.ports["emqp-workers"])
        async with (
            run("emq-jobmanager", "-B", where, "-J", "2"),
            client_of(broker.ports["emqp-clients"]) as client,
        ):
            await broker.until(lambda: len(broker.events(SlotOffered)) == 2)
            (informed,) = broker.events(PeerInformed)
            assert (informed.peer, informed.queues) == ("worker", ((10, "default"),))
            assert await client.call("jobs_demo.plain", [1], {"b": 5}) == {"sum": 6}
            assert await client.call("jobs_demo:K.add", [5], class_kwargs={"base": 7}) == 12
            assert await client.call("jobs_demo.raises") == "it broke"
            assert await client.call("jobs_demo.slow", [30], timeout_s=1) == "TimeoutError"
            assert len(broker.events(ReplyReceived)) == 4
        assert broker.events(CommandIgnored) == []

    async def test_says_goodbye_and_finishes(self, run: Any, broker: TestBroker) -> None:
        where = at(broker.ports["emqp-workers"])
        async with (
            run("emq-jobmanager", "-B", where, "-J", "1") as process,
            client_of(broker.ports["emqp-clients"]) as client,
        ):
            await broker.until(lambda: broker.events(SlotOffered))
            asking = asyncio.create_task(client.call("jobs_demo.slow", [1.5]))
            await broker.until(lambda: broker.workers[0].connection.free_slots == 0)
            process.send_signal(signal.SIGTERM)
            await broker.until(lambda: broker.events(PeerLeaving))
            assert await asking == "late"

    async def test_registers_again_when_it_is_sent_away(self, run: Any, broker: TestBroker) -> None:
        where = at(broker.ports["emqp-workers"])
        async with (
            run("emq-jobmanager", "-B", where, "-J", "1"),
            client_of(broker.ports["emqp-clients"]) as client,
        ):
            await broker.until(lambda: broker.events(SlotOffered))
            broker.workers[0].connection.send_disconnect()
            broker.workers[0].session.wake()
            await broker.until(lambda: len(broker.events(PeerInformed)) == 2)
            assert await client.call("jobs_demo.plain", [1]) == {"sum": 3}


class TestItsScheduler:
    async def test_is_told_and_asks_in_time(self, run: Any, broker: TestBroker) -> None:
        job = serialize_job("jobs_demo.plain", [9])
        async with (
            run("emq-scheduler", SCHEDULER_ADDR=at(broker.ports["emqp-clients"])),
            client_of(broker.ports["emqp-clients"]) as client,
        ):
            (informed,) = await broker.until(lambda: broker.events(PeerInformed))
            assert informed.peer == "scheduler"
            await client.schedule(job, interval_s=1)
            await broker.until(lambda: len(broker.events(RequestReceived)) >= 2)
            await client.unschedule(job)
        first = broker.events(RequestReceived)[0]
        assert (first.queue, first.headers) == ("default", "reply-requested")
        assert json.loads(first.message) == json.loads(job)


async def test_its_shell_at_our_administration(run: Any, broker: TestBroker) -> None:
    async with run("emq-cli", "--addr", at(broker.ports["emqp-admin"])) as process:
        words = b"status\nshow_workers\nshow_schedulers\nshutdown\nquit\n"
        output, _ = await asyncio.wait_for(process.communicate(words), 30)
    for command in ("STATUS", "ROUTER_SHOW_WORKERS", "ROUTER_SHOW_SCHEDULERS"):
        assert f"{{'command': '{command}'}}" in output.decode()
    (event,) = broker.events(ShutdownRequested)
    assert "'ACK'" in output.decode() and event.msgid in output.decode()


# ---------------------------------------------------------------------- its brokers, our peers


async def ready(process: Any, words: bytes) -> None:
    """A broker says in its log that it listens."""
    async with asyncio.timeout(30):
        while words not in (line := await process.stderr.readline()):
            assert line, "it has ended"


class Router:
    """Where the genuine router listens, and what it says of itself."""

    def __init__(self, ports: list[int]) -> None:
        self.clients, self.workers, self.admin = ports


@pytest.fixture
async def router(run: Any) -> AsyncIterator[Router]:
    router = Router(free_ports(3))
    started = run(
        "emq-router",
        FRONTEND_ADDR=at(router.clients),
        BACKEND_ADDR=at(router.workers),
        ADMINISTRATIVE_ADDR=at(router.admin),
    )
    async with started as process:
        await ready(process, b"Listening for administrative commands")
        reading = asyncio.create_task(process.stderr.read())
        yield router
        reading.cancel()


class TestItsRouter:
    async def test_gives_our_worker_our_clients_jobs(self, router: Router) -> None:
        done: asyncio.Queue[int] = asyncio.Queue()

        async def plain(number: int) -> None:
            done.put_nowait(number)

        worker = Worker("127.0.0.1", router.workers, slots=64, jobs={"jobs_demo.plain": plain})
        async with worker, client_of(router.clients) as client:
            # It gives no receipt for what it buffers: so wait until it knows one of the slots.
            await client.request(serialize_job("jobs_demo.plain", [0]), receipt=False)
            assert await asyncio.wait_for(done.get(), 20) == 0
            jobs = [serialize_job("jobs_demo.plain", [number]) for number in range(1, 40)]
            requests = (client.request(job, wait_s=10) for job in jobs)
            receipts = await asyncio.gather(*requests, return_exceptions=True)
            # When it gets to know the others is up to it.
            assert not all(isinstance(each, BaseException) for each in receipts)
            found = [await asyncio.wait_for(done.get(), 20) for _ in range(39)]
            assert sorted(found) == list(range(1, 40))

    async def test_keeps_results_to_itself(self, router: Router) -> None:
        worker = Worker("127.0.0.1", router.workers, jobs={"jobs_demo.plain": int})
        async with worker, client_of(router.clients) as client:
            with pytest.raises(RequestTimeout):
                await client.call("jobs_demo.plain", wait_s=0.5)

    async def test_gives_our_worker_its_own_clients_jobs(self, run: Any, router: Router) -> None:
        got: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def plain(*args: int, **kwargs: int) -> None:
            got.set_result((args, kwargs))

        ask = f"""{CLIENT}
messages.defer_job(socket, "jobs_demo.plain", args=(1, 2), kwargs={{"b": 3}})
socket.recv_multipart()
"""
        worker = Worker("127.0.0.1", router.workers, jobs={"jobs_demo.plain": plain})
        async with worker, run(ask, at(router.clients)):
            assert await asyncio.wait_for(got, 20) == ((1, 2), {"b": 3})

    async def test_gives_its_job_manager_our_clients_jobs(
        self, run: Any, router: Router, tmp_path: Path
    ) -> None:
        proof = tmp_path / "done"
        async with (
            run("emq-jobmanager", "-B", at(router.workers), "-J", "1"),
            client_of(router.clients) as client,
        ):
            # It buffers what comes before the job manager does, and gives no receipt for that.
            await client.request(serialize_job("jobs_demo.touch", [str(proof)]), receipt=False)
            async with asyncio.timeout(30):
                while not proof.exists():
                    await asyncio.sleep(0.02)
        assert proof.read_bytes() == b""

    async def test_forgets_our_worker_when_it_says_goodbye(self, run: Any, router: Router) -> None:
        async def workers() -> str:
            async with run("emq-cli", "--addr", at(router.admin)) as process:
                output, _ = await asyncio.wait_for(process.communicate(b"show_workers\n"), 30)
                return str(output.decode())

        async with Worker("127.0.0.1", router.workers, queues=[(5, "heavy")]):
            assert "heavy" in await workers()
        assert "'connected_workers': {}" in await workers()


async def test_its_pubsub_between_our_client_and_our_subscriber(run: Any) -> None:
    incoming, outgoing = free_ports(2)
    started = run(
        "emq-pubsub",
        PUBLISHER_INCOMING_ADDR=at(incoming),
        PUBLISHER_OUTGOING_ADDR=at(outgoing),
    )
    async with started as process:
        await ready(process, b"Listening for subscribers")
        reading = asyncio.create_task(process.stderr.read())
        async with (
            EmqpSubscriber("127.0.0.1", outgoing, ["to"]) as messages,
            client_of(incoming) as client,
        ):
            first = asyncio.create_task(anext(messages))
            # A subscription takes its time to get through, and nobody says when it has.
            while not first.done():
                await client.publish("topic", b"1")
                await asyncio.wait([first], timeout=0.05)
            assert await first == ("topic", b"1")
        reading.cancel()
