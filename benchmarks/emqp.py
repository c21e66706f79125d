"""The CPU time of a REQUEST from a client to a worker, compared with EventMQ's router and libzmq.

The first row is our part alone: bytes of a client in, bytes for a worker out, in one process,
without sockets. The others are whole programs on real sockets, all under the same load from libzmq;
they are measured by the CPU time of their process, all threads included: the elapsed time depends
more on the load generator than on them. Ours and the genuine router also send the client a receipt;
the bare forwarder only receives and sends. The rows alternate, and the best round of each counts.

    python benchmarks/emqp.py [requests] [python with eventmq 0.3.13]

The second argument defaults to .venv-eventmq/bin/python, which the interoperability tests make.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

VERSION = b"eMQP/1.0"
BODY = (
    b'["run", {"callable": "plain", "path": "jobs_demo", "args": [1], "kwargs": {"b": 5}, '
    b'"class_args": [], "class_kwargs": {}}]'
)
BATCH = 64
WARM_UP = 500
GOAL_US = 8.0
TURNS = 3


# ----------------------------------------------------------------------------- in one process


def codec() -> float:
    """Seconds of CPU time for a request: off a client's bytes and into a worker's."""
    from crosswire.wire.emqp.connection import EmqpConnection
    from crosswire.wire.emqp.events import PeerInformed, RequestReceived

    def pump(a: EmqpConnection, b: EmqpConnection) -> None:
        for _ in range(8):
            b.receive_data(b"".join(a.data_to_send()), 0.0)
            a.receive_data(b"".join(b.data_to_send()), 0.0)

    client = EmqpConnection("client", 0.0, next_id=lambda: str(uuid4()))
    front = EmqpConnection("broker", 0.0, listener="emqp-clients")
    worker = EmqpConnection("worker", 0.0, queues=((10, "default"),))
    back = EmqpConnection("broker", 0.0, listener="emqp-workers")
    pump(client, front)
    pump(worker, back)
    for event in back.events():
        if isinstance(event, PeerInformed):
            back.send_ack(event.msgid)
    front.events()
    back.free_slots = sys.maxsize
    back.data_to_send()
    for _ in range(BATCH):
        client.send_request("default", "reply-requested", BODY)
    data = b"".join(client.data_to_send())
    turns = []
    for _ in range(300):
        started = time.process_time()
        front.receive_data(data, 0.0)
        for event in front.events():
            if isinstance(event, RequestReceived):
                back.send_request(event.queue, event.headers, event.message, msgid=event.msgid)
        sent = back.data_to_send()
        turns.append(time.process_time() - started)
    assert b"".join(sent) == data
    return sorted(turns)[len(turns) // 2] / BATCH


# ------------------------------------------------------------------------------- the programs


async def serve_ours() -> None:
    """A broker without queues: every request is forwarded to the one worker."""
    from crosswire.session import Session
    from crosswire.wire.contract import Event
    from crosswire.wire.emqp.connection import EmqpConnection
    from crosswire.wire.emqp.events import PeerInformed, RequestReceived

    class Peer:
        session: Session

        def handle_events(self, events: list[Event]) -> None:
            nonlocal worker
            connection: Any = self.session.connection
            for event in events:
                if isinstance(event, RequestReceived):
                    connection.send_receipt(event.msgid)
                    worker.connection.send_request(
                        event.queue, event.headers, event.message, msgid=event.msgid
                    )
                elif isinstance(event, PeerInformed):
                    worker = self.session
                    connection.send_ack(event.msgid)
            if worker is not None:
                worker.wake()

        def handle_drain(self) -> None: ...

    def accept(listener: str) -> Session:
        return Session(
            lambda now: EmqpConnection(
                "broker", now, listener=listener, next_id=lambda: str(uuid4())
            ),
            Peer(),
        )

    worker: Any = None
    loop = asyncio.get_running_loop()
    ports = []
    for listener in ("emqp-clients", "emqp-workers"):
        server = await loop.create_server(lambda at=listener: accept(at), "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    await asyncio.Event().wait()


def serve_libzmq() -> None:
    """A minimal forwarder, ROUTER to ROUTER; a worker's first message has its identity."""
    import zmq

    context = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
    for each in (front, back):
        each.set_hwm(0)
    ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in (front, back)]
    print(json.dumps(ports), flush=True)
    worker = back.recv_multipart()[0]
    back.send_multipart([worker, b"", VERSION, b"ACK", b"1", b"1"])
    poller = zmq.Poller()
    poller.register(front, zmq.POLLIN)
    poller.register(back, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if back in ready:
            back.recv_multipart()
        if front in ready:
            message = front.recv_multipart()
            message[0] = worker
            back.send_multipart(message)


EVENTMQ = """
import json, logging, sys
from eventmq import conf, router
if sys.argv[1] == "silent":
    logging.disable(logging.CRITICAL)
ports = json.loads(sys.argv[2])
print(json.dumps(ports), flush=True)
front, back, admin = ["tcp://127.0.0.1:%d" % port for port in ports]
router.Router().start(front, back, admin)
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


# ----------------------------------------------------------------------------------- the load


def cpu_s(pid: int) -> float:
    """CPU time that a process has used so far, all its threads."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e9


def load(ports: list[int], pid: int, requests: int) -> float:
    """Seconds of CPU time that the program with this pid spends on a request."""
    import zmq

    context = zmq.Context()
    client, worker = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    for each, port in zip((client, worker), ports, strict=False):
        each.set_hwm(0)
        each.linger = 0
        each.rcvtimeo = 60_000
        each.identity = str(uuid4()).encode()
        each.connect(f"tcp://127.0.0.1:{port}")

    def command(to: Any, name: bytes, *parts: bytes) -> None:
        to.send_multipart([b"", VERSION, name, str(uuid4()).encode(), *parts])

    def send(count: int) -> None:
        """In batches, so that neither side has to hold more than a few."""
        waiting = 0
        for _ in range(count):
            command(client, b"REQUEST", b"default", b"reply-requested", BODY)
            waiting += 1
            while waiting >= BATCH or (waiting and _ == count - 1):
                waiting -= worker.recv_multipart()[2] == b"REQUEST"
        while client.poll(0):
            client.recv_multipart()

    command(worker, b"INFORM", b'[[10, "default"]]', b"worker")
    while worker.recv_multipart()[2] != b"ACK":
        pass
    for _ in range(requests + WARM_UP):
        command(worker, b"READY")
    settle(pid)
    send(WARM_UP)
    before = cpu_s(pid)
    send(requests)
    spent = cpu_s(pid) - before
    context.destroy(linger=0)
    return spent / requests


def settle(pid: int) -> None:
    """Wait until the program has processed its input; EventMQ's router is never completely idle."""
    used = -1.0
    while (now := cpu_s(pid)) - used > 0.1:
        used = now
        time.sleep(0.3)


def measure(command: list[str], requests: int) -> float:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as program:
        try:
            assert program.stdout is not None
            ports = json.loads(program.stdout.readline())
            return load(ports, program.pid, requests)
        finally:
            program.kill()


def main() -> None:
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    here = Path(__file__)
    genuine = here.parent.parent / ".venv-eventmq" / "bin" / "python"
    if len(sys.argv) > 2:
        genuine = Path(sys.argv[2])
    programs = {
        "crosswire, on sockets": [sys.executable, str(here), "ours"],
        "libzmq, a bare forwarder": [sys.executable, str(here), "libzmq"],
    }
    if genuine.exists():
        start = [str(genuine), "-c", EVENTMQ]
        programs["EventMQ 0.3.13, its router"] = [*start, "loud"]
        programs["EventMQ 0.3.13, its router, its log turned off"] = [*start, "silent"]
    else:
        print(f"no EventMQ: {genuine} does not exist")
    alone = "crosswire, decode and encode only"
    best = dict.fromkeys([alone, *programs], float("inf"))
    for _ in range(TURNS):
        best[alone] = min(best[alone], codec())
        for label, command in programs.items():
            ports = json.dumps(free_ports(3))
            best[label] = min(best[label], measure([*command, ports], requests))
    print(f"CPU time for a REQUEST of 7 frames, {len(BODY)} bytes of message")
    for label, seconds in best.items():
        times = seconds / best[alone]
        print(f"  {label:<46}{seconds * 1e6:>9.2f} µs {times:>8.1f} ×")
    print(f"  goals: at most {GOAL_US:g} µs; libzmq at least 3 ×, EventMQ at least 10 ×")


if __name__ == "__main__":
    if sys.argv[1:2] == ["ours"]:
        import uvloop

        uvloop.run(serve_ours())
    elif sys.argv[1:2] == ["libzmq"]:
        serve_libzmq()
    else:
        os.environ.setdefault("PYTHONUNBUFFERED", "1")
        main()
