"""The genuine EventMQ 0.3.13, with only its broker swapped: our hub stands in its place."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crosswire.client.native.emqp import EmqpSubscriber
from crosswire.client.native.emqp.worker import Worker
from crosswire.config import EmqpSettings
from crosswire.gateways.emqp.broker import Broker
from crosswire.server.server import Server
from crosswire.wire.emqp.jobs import serialize_job
from tests.gateways.conftest import StartServer, port_of, server, start_server
from tests.interop.test_eventmq import CLIENT, STAY, answer_of, at, client_of, eventmq, run

__all__ = ["eventmq", "run", "server", "start_server"]


def where(server: Server, door: str) -> str:
    return at(port_of(server, f"emqp-{door}"))


def job_manager(run: Any, server: Server, jobs: int = 1, **settings: str) -> Any:
    return run("emq-jobmanager", "-B", where(server, "workers"), "-J", str(jobs), **settings)


async def until(true: Callable[[], Any], timeout_s: float = 40.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.02)


def slots(server: Server) -> int:
    return sum(worker.connection.free_slots for worker in server.context.shared(Broker).workers)


async def test_its_client_and_its_job_manager(run: Any, server: Server, tmp_path: Path) -> None:
    proof = tmp_path / "done"
    ask = f"""{CLIENT}
msgid = messages.defer_job(socket, "jobs_demo.touch", args=({str(proof)!r},), queue="default")
print(json.dumps([msgid, socket.recv_multipart()]))
"""
    async with job_manager(run, server), run(ask, where(server, "clients")) as process:
        msgid, receipt = await answer_of(process)
        assert (receipt[:3], receipt[4:]) == (["", "eMQP/1.0", "REPLY"], [msgid])
        await until(proof.exists)


async def test_results_come_back_to_its_client_too(run: Any, server: Server) -> None:
    ask = f"""{CLIENT}
msgid = messages.defer_job(socket, "jobs_demo.plain", args=(1,), kwargs={{"b": 4}},
    reply_requested=True, guarantee=True, retry_count=3, timeout=5, queue="other")
print(json.dumps([msgid, socket.recv_multipart(), socket.recv_multipart()]))
"""
    # Nobody consumes the queue `other`: a worker of `default` does it.
    async with job_manager(run, server), run(ask, where(server, "clients")) as process:
        msgid, receipt, result = await answer_of(process)
    assert receipt[4:] == [msgid]
    assert (json.loads(result[4]), result[5]) == ({"value": {"sum": 5}}, msgid)


async def test_its_job_manager_does_our_clients_jobs(run: Any, server: Server) -> None:
    async with job_manager(run, server, 2), client_of(port_of(server, "emqp-clients")) as client:
        assert await client.call("jobs_demo.plain", [1], {"b": 5}) == {"sum": 6}
        assert await client.call("jobs_demo:K.add", [5], class_kwargs={"base": 7}) == 12
        assert await client.call("jobs_demo.raises", guarantee=True, retry_count=2) == "it broke"
        assert await client.call("jobs_demo.plain", [2], guarantee=True, timeout_s=9) == {"sum": 4}
        answers = await asyncio.gather(
            *(client.call("jobs_demo.plain", [number], guarantee=True) for number in range(100))
        )
        assert answers == [{"sum": number + 2} for number in range(100)]
        assert server.hub.queue("queue/default").length == 0


async def test_it_finishes_its_jobs_when_it_is_stopped(run: Any, server: Server) -> None:
    async with (
        job_manager(run, server) as process,
        client_of(port_of(server, "emqp-clients")) as client,
    ):
        await until(lambda: slots(server) == 1)
        asking = asyncio.create_task(client.call("jobs_demo.slow", [1.5]))
        await until(lambda: slots(server) == 0)
        process.send_signal(signal.SIGTERM)
        assert await asking == "late"


async def test_a_guaranteed_job_outlives_a_killed_job_manager(run: Any, server: Server) -> None:
    async with client_of(port_of(server, "emqp-clients")) as client:
        async with job_manager(run, server):
            await until(lambda: slots(server) == 1)
            asking = asyncio.create_task(client.call("jobs_demo.slow", [2], guarantee=True))
            await until(lambda: slots(server) == 0)
        async with job_manager(run, server):
            assert await asking == "late"


async def test_it_registers_again_after_our_restart(run: Any, start_server: StartServer) -> None:
    server = await start_server()
    listen = {name: str(each.address) for name, each in server.listeners.items()}
    async with job_manager(run, server, 2):
        await until(lambda: slots(server) == 2)
        await server.stop()
        server = await start_server(listen=listen)
        async with client_of(port_of(server, "emqp-clients")) as client:
            assert await client.call("jobs_demo.plain", [1]) == {"sum": 3}


async def test_its_client_schedules_and_unschedules(run: Any, server: Server) -> None:
    done: asyncio.Queue[int] = asyncio.Queue()

    async def plain(number: int) -> None:
        done.put_nowait(number)

    def script(*more: str) -> str:
        call = 'messages.schedule(socket, "jobs_demo.plain", interval_secs=1, args=(9,)'
        return "\n".join([CLIENT, f"{call}, {', '.join(more)})", STAY])

    worker = Worker("127.0.0.1", port_of(server, "emqp-workers"), jobs={"jobs_demo.plain": plain})
    async with worker:
        async with run(script(), where(server, "clients")):
            for _ in range(2):
                assert await asyncio.wait_for(done.get(), 20) == 9
        (schedule,) = server.hub.schedules.all()
        assert (schedule.interval_s, schedule.envelope.destination) == (1, "queue/default")
        async with run(script("unschedule=True"), where(server, "clients")):
            await until(lambda: not server.hub.schedules.all())


async def test_its_scheduler_has_jobs_done(run: Any, start_server: StartServer) -> None:
    server = await start_server(emqp=EmqpSettings(scheduler="external"))
    done = asyncio.Event()

    async def plain(number: int) -> None:
        assert number == 9
        done.set()

    job = serialize_job("jobs_demo.plain", [9])
    worker = Worker("127.0.0.1", port_of(server, "emqp-workers"), jobs={"jobs_demo.plain": plain})
    async with (
        worker,
        run("emq-scheduler", SCHEDULER_ADDR=where(server, "clients")),
        client_of(port_of(server, "emqp-clients")) as client,
    ):
        await client.schedule(job, interval_s=1)
        await asyncio.wait_for(done.wait(), 40)
        assert server.hub.schedules.all() == []
        await client.unschedule(job)


async def test_its_publisher_and_a_subscriber(run: Any, server: Server) -> None:
    listen = """
import json, sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.rcvtimeo = 20000
socket.setsockopt(zmq.SUBSCRIBE, b"to")
socket.connect(sys.argv[1])
print(json.dumps([part.decode() for part in socket.recv_multipart()]))
"""
    say = f"""{CLIENT}
messages.send_publish_request(socket, "topic", ["update", "1"])
{STAY}"""

    def subscribed() -> int:
        gateways = server.context.gateways.values()
        return sum(bool(g.attachments) for g in gateways if g.listener == "emqp-subscribers")

    async with (
        run(listen, where(server, "subscribers")) as process,
        EmqpSubscriber("127.0.0.1", port_of(server, "emqp-subscribers"), ["topic"]) as messages,
    ):
        await until(lambda: subscribed() == 2)
        async with run(say, where(server, "publishers")):
            assert await answer_of(process) == ["topic", '["update", "1"]']
            assert await asyncio.wait_for(anext(messages), 10) == ("topic", b'["update", "1"]')


async def test_its_shell(run: Any, server: Server) -> None:
    async with job_manager(run, server):
        await until(lambda: slots(server) == 1)
        async with run("emq-cli", "--addr", where(server, "admin")) as process:
            words = b"status\nshow_workers\nshow_schedulers\nquit\n"
            output, _ = await asyncio.wait_for(process.communicate(words), 30)
    shown = "".join(output.decode().split())
    assert "'inflight_messages_by_queue':{}" in shown
    assert "'connected_queues':{'default':[[10," in shown
    assert "'connected_schedulers':{}" in shown


async def test_its_shell_stops_the_emqp_side(run: Any, server: Server) -> None:
    async with run("emq-cli", "--addr", where(server, "admin")) as process:
        output, _ = await asyncio.wait_for(process.communicate(b"shutdown\nquit\n"), 30)
    assert "'ACK'" in output.decode()
    assert server.context.shared(Broker).stopping
    assert server.listeners["emp"].address.port
