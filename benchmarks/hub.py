"""CPU time, throughput, latency and memory of a hub on real sockets, compared with EventMQ.

Every row starts its servers as separate programs and loads them from other processes on the same
machine. It prints the hub's CPU time per message, of all its threads: on a machine with other
programs that figure is the most reliable one.

    python benchmarks/hub.py [--only emqp] [--scale 1.0] [--eventmq PYTHON]

eMQP     REQUESTs from a client to a worker, both on pyzmq in this process; EventMQ's own router is
         in `.venv-eventmq`, which the interoperability tests make
topics   one publisher, one subscriber or a hundred, nothing on disk
queues   sent, on disk, delivered and settled; ledger and messages table are on
latency  one at a time, compared with the disk's fsync
calls    from one protocol to another and back, one at a time
memory   idle connections
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from crosswire.cli.bench.contract import BenchEnd, Line, Work, producer_of
from crosswire.cli.bench.hub import StartedHub, started_hub
from crosswire.cli.bench.run import Figures as Loaded
from crosswire.cli.bench.run import load, one_at_a_time
from crosswire.listeners import PLAIN_LISTENERS
from crosswire.wire.contract import Connection, ConnectionOpened
from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emp.events import RequestReceived, ResponseReceived
from crosswire.wire.micromsg2.connection import MicroMsg2Connection
from crosswire.wire.micromsg2.events import MessageReceived, Opened
from crosswire.wire.micromsg2.extensions import Offer, batch_ack
from crosswire.wire.micromsg2.values import Extension

WINDOW = 256
BODY_BYTES = 128
WARM_UP = 2000
LATENCIES = 2000
REQUESTS = 20_000
CONNECTIONS = 1000
NOT_DURABLE = "[topics.bench]\ndurable = false\n"
EMQP_LISTENERS = ("emqp-clients", "emqp-workers")
VERSION = b"eMQP/1.0"

ROUTER = """
import json, logging, sys
from eventmq import router
ports = json.loads(sys.argv[1])
if sys.argv[2] == "silent":
    logging.disable(logging.CRITICAL)
print(json.dumps(ports), flush=True)
front, back, admin = ["tcp://127.0.0.1:%d" % port for port in ports]
router.Router().start(front, back, admin)
"""


# ------------------------------------------------------------------------------------ programs


@dataclass(frozen=True)
class Program:
    """A running server."""

    pid: int
    ports: dict[str, int]

    def cpu_s(self) -> float:
        """CPU time of all its threads so far."""
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e9

    def settle(self) -> None:
        """Wait until it has processed its input; EventMQ's router is never completely idle."""
        used = -1.0
        while (now := self.cpu_s()) - used > 0.05:
            used = now
            time.sleep(0.2)


@contextmanager
def _running(command: list[str]) -> Iterator[tuple[int, Any]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            yield process.pid, json.loads(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def crosswire(*listeners: str) -> Iterator[Program]:
    """A hub with these listeners, in a temporary directory."""
    with started_hub(*listeners) as hub:
        yield Program(hub.pid, hub.ports)


@contextmanager
def eventmq(python: Path, *, logs: bool) -> Iterator[Program]:
    """EventMQ's own router, which writes several lines to its log for each message."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    command = [str(python), "-c", ROUTER, json.dumps(ports), "loud" if logs else "silent"]
    with _running(command) as (pid, opened):
        yield Program(pid, dict(zip(EMQP_LISTENERS, opened, strict=False)))


# ---------------------------------------------------------------------------------------- eMQP


class Figures(NamedTuple):
    """Of one server: requests per second, CPU time per request, time until the worker has it."""

    per_second: float
    cpu_us: float
    p50_us: float


class EmqpLoad:
    """A client and a worker on pyzmq: REQUESTs in, jobs out, a READY for every job."""

    def __init__(self, program: Program, headers: bytes) -> None:
        import zmq

        self._context = zmq.Context()
        self._client, self._worker = (
            self._socket(program.ports[listener]) for listener in EMQP_LISTENERS
        )
        self._headers = headers
        self._body = json.dumps(["run", {"path": "jobs", "callable": "f"}]).encode()
        self._body = self._body.ljust(BODY_BYTES)
        self._number = 0
        self._again = zmq.Again
        self._no_wait = zmq.NOBLOCK
        self._worker.send_multipart(
            [b"", VERSION, b"INFORM", b"inform", b'[[10, "default"]]', b"worker"]
        )
        while self._worker.recv_multipart()[2] != b"ACK":
            pass
        for _ in range(2 * WINDOW):
            self._ready()

    def _socket(self, port: int) -> Any:
        import zmq

        dealer = self._context.socket(zmq.DEALER)
        dealer.set_hwm(0)
        dealer.linger = 0
        dealer.rcvtimeo = 60_000
        dealer.identity = f"bench-{port}".encode()
        dealer.connect(f"tcp://127.0.0.1:{port}")
        return dealer

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _ready(self) -> None:
        self._worker.send_multipart((b"", VERSION, b"READY", b"ready"))

    def _ask(self) -> None:
        self._number += 1
        msgid = b"%036d" % self._number
        self._client.send_multipart(
            (b"", VERSION, b"REQUEST", msgid, b"default", self._headers, self._body)
        )

    def _take(self, flags: int = 0) -> bool:
        """Receive one message as the worker; True if it was a job."""
        message = self._worker.recv_multipart(flags)
        if message[2] != b"REQUEST":
            return False
        if b"reply-requested" in message[5]:
            self._worker.send_multipart(
                (b"", VERSION, b"REPLY", b"reply", b'{"value": 1}', message[3])
            )
        self._ready()
        return True

    def _drain(self) -> int:
        """Receive the receipts that have arrived; returns their number."""
        count = 0
        try:
            while True:
                self._client.recv_multipart(self._no_wait)
                count += 1
        except self._again:
            return count

    def run(self, requests: int) -> float:
        """Seconds for this number of requests, at most WINDOW of them unfinished."""
        started = time.perf_counter()
        sent = done = 0
        while done < requests:
            while sent < requests and sent - done < WINDOW:
                self._ask()
                sent += 1
            done += self._take()
            try:
                while True:
                    done += self._take(self._no_wait)
            except self._again:
                self._drain()
        return time.perf_counter() - started

    def latencies(self, count: int) -> list[float]:
        """Seconds from the client's send to the worker's receive, one at a time."""
        times = []
        for _ in range(count):
            started = time.perf_counter()
            self._ask()
            while not self._take():
                pass
            times.append(time.perf_counter() - started)
            self._drain()
        return times


def _emqp_figures(program: Program, headers: bytes, requests: int) -> Figures:
    load = EmqpLoad(program, headers)
    try:
        program.settle()
        load.run(WARM_UP)
        before = program.cpu_s()
        seconds = load.run(requests)
        cpu_s = program.cpu_s() - before
        p50_s = statistics.median(load.latencies(LATENCIES))
    finally:
        load.close()
    return Figures(requests / seconds, 1e6 * cpu_s / requests, 1e6 * p50_s)


def emqp(options: argparse.Namespace) -> None:
    python = Path(options.eventmq)
    print(f"eMQP: REQUESTs client → worker, {BODY_BYTES} bytes, window {WINDOW}")
    genuine: Figures | None = None
    if python.exists():
        for label, logs in (
            ("EventMQ 0.3.13, its router", True),
            ("…with its log turned off", False),
        ):
            with eventmq(python, logs=logs) as program:
                genuine = _emqp_figures(program, b"", _scaled(REQUESTS // 4, options))
            _print(label, genuine, None)
    else:
        print(f"  no EventMQ to compare with: {python} does not exist")
    for label, headers in (("crosswire", b""), ("crosswire, guarantee (fsync)", b"guarantee")):
        with crosswire(*EMQP_LISTENERS) as program:
            figures = _emqp_figures(program, headers, _scaled(REQUESTS, options))
        _print(label, figures, genuine)
    print("  compared with EventMQ without its log")
    print("  goals: CPU at most 1/8, 4 × the requests/s (3 × with guarantee), p50 at most 1/1.4")


def _print(label: str, figures: Figures, genuine: Figures | None) -> None:
    line = f"  {label:<30}{figures.per_second:>9,.0f}/s {figures.cpu_us:>8.1f} µs CPU"
    line += f" {figures.p50_us:>8.0f} µs p50"
    if genuine is not None:
        line += (
            f"   {figures.per_second / genuine.per_second:.1f} × the requests, "
            f"1/{genuine.cpu_us / figures.cpu_us:.1f} the CPU, "
            f"1/{genuine.p50_us / figures.p50_us:.1f} the latency"
        )
    print(line)


# ------------------------------------------------------------------------------ topics, queues


@contextmanager
def _hub_for(via: str, config: str = "") -> Iterator[StartedHub]:
    listeners = [name for name in PLAIN_LISTENERS if name.partition("-")[0] == via]
    with started_hub(*listeners, config=config) as hub:
        yield hub


def _scaled(count: int, options: argparse.Namespace) -> int:
    return max(int(count * options.scale), 100)


def _row(label: str, figures: Loaded, goal: int) -> None:
    assert figures.cpu_us is not None
    line = f"  {label:<44}{figures.per_second:>9,.0f}/s {figures.cpu_us:>7.2f} µs CPU"
    line += f" ({1e6 / figures.cpu_us:>9,.0f}/s of a core)"
    if goal:
        line += f"   goal {goal:>7,}/s: {figures.per_second / goal:.2f} ×"
    print(line, flush=True)


def topics(options: argparse.Namespace) -> None:
    print(f"Topics that are not durable, {BODY_BYTES} bytes")
    for via, count, window, goal in (
        ("micromsg2", 200_000, 4000, 150_000),
        ("relink", 200_000, 1000, 150_000),
        ("emp", 40_000, 1000, 40_000),
        ("emqp", 40_000, 1000, 0),
        ("epoxy", 20_000, 1000, 0),
    ):
        with _hub_for(via, NOT_DURABLE) as hub:
            work = Work(
                via=via, destination="topic/bench", ports=hub.ports, window=window, durable=False
            )
            figures = load(work, _scaled(count, options), hub.cpu_s, hub.wait_for_lake)
        _row(f"{via}, 1 → 1", figures, goal)
    for via in ("micromsg2", "relink"):
        with _hub_for(via, NOT_DURABLE) as hub:
            work = Work(
                via=via, destination="topic/bench", ports=hub.ports, consumers=100, durable=False
            )
            figures = load(work, _scaled(10_000, options), hub.cpu_s, hub.wait_for_lake)
        _row(f"{via}, 1 → 100, deliveries", figures, 300_000)


def queues(options: argparse.Namespace) -> None:
    print(f"Durable queues, {BODY_BYTES} bytes, window 1,000: sent, fsynced, delivered, settled")
    for via, count, goal in (
        ("relink", 100_000, 40_000),
        ("micromsg2", 100_000, 40_000),
        ("emp", 40_000, 0),
        ("emqp", 40_000, 0),
        ("epoxy", 20_000, 0),
    ):
        with _hub_for(via) as hub:
            work = Work(via=via, destination="queue/bench", ports=hub.ports)
            figures = load(work, _scaled(count, options), hub.cpu_s, hub.wait_for_lake)
        _row(via, figures, goal)


# ------------------------------------------------------------------------------------- latency


def _fsync_us(count: int = 300) -> float:
    """The median time of an fsync of a small record."""
    times = []
    with tempfile.NamedTemporaryFile(prefix="crosswire-bench-") as file:
        for _ in range(count):
            os.write(file.fileno(), b"x" * 300)
            started = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def latency(options: argparse.Namespace) -> None:
    print("Durable queues, one at a time, p50")
    for via in ("relink", "micromsg2", "emp"):
        with _hub_for(via) as hub:
            work = Work(via=via, destination="queue/bench", ports=hub.ports, window=10)
            before = _fsync_us()
            found = one_at_a_time(work, _scaled(500, options))
            disk_us = (before + _fsync_us()) / 2
        print(
            f"  {via:<12}{found.answered_us:>8.0f} µs acknowledged {found.delivered_us:>8.0f} µs "
            f"delivered; the disk's fsync {disk_us:>6.0f} µs: "
            f"{found.answered_us / disk_us:.1f} × (goal 2.0)",
            flush=True,
        )


class CallingEmp(BenchEnd):
    """EMP's end of a call, either one."""

    listener = "emp"

    def connect(self, now: float) -> Connection:
        self.wire = EmpConnection("client", now)
        return self.wire

    def open(self, line: Line) -> None:
        line.wait_for(ConnectionOpened)

    def serve(self, line: Line) -> None:
        self.wire.send_request("$serve", b'{"services":["echo"]}')
        line.write()
        line.wait_for(ResponseReceived)

    def ask(self) -> None:
        self.wire.send_request("echo", b'{"x":1}')

    def answer(self, line: Line) -> None:
        self.wire.send_success(line.wait_for(RequestReceived).id, b'{"y":2}')

    def receive(self, line: Line) -> None:
        assert line.wait_for(ResponseReceived).succeeded


class CallingMicroMsg2(BenchEnd):
    """MicroMsg2's end of a call, either one."""

    listener = "micromsg2"

    def connect(self, now: float) -> Connection:
        offer = Offer(required=(Extension("pub-sub", {}), batch_ack(100)))
        self.wire = MicroMsg2Connection("client", now, offer=offer)
        return self.wire

    def open(self, line: Line) -> None:
        line.wait_for(Opened)

    def serve(self, line: Line) -> None:
        self.wire.send_serve("service/echo")
        line.write()
        time.sleep(0.2)  # it has no response

    def ask(self) -> None:
        self.wire.send_message("service/echo", b'{"x":1}', {"reply-to": "reply/me"})

    def answer(self, line: Line) -> None:
        asked = line.wait_for(MessageReceived)
        self.wire.send_message(str(asked.properties["reply-to"]), b'{"y":2}')
        self.wire.acknowledge(asked.sequence)

    def receive(self, line: Line) -> None:
        answer = line.wait_for(MessageReceived)
        assert "error" not in answer.properties, answer
        self.wire.acknowledge(answer.sequence)


Calling = CallingEmp | CallingMicroMsg2


def call_times(
    asking: Calling, calling: Line, serving: Calling, answering: Line, count: int
) -> list[float]:
    """The seconds that each call takes, `count` of them one after the other."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        asking.ask()
        calling.write()
        serving.answer(answering)
        answering.write()
        asking.receive(calling)
        times.append(time.perf_counter() - started)
        calling.write()
    return times


def calls(options: argparse.Namespace) -> None:
    print("A call from one protocol to another and back, one at a time, p50")
    for label, caller, provider in (
        ("EMP calls MicroMsg2", CallingEmp, CallingMicroMsg2),
        ("MicroMsg2 calls EMP", CallingMicroMsg2, CallingEmp),
    ):
        with started_hub("emp", "micromsg2") as hub:
            work = Work(via="emp", destination="service/echo", ports=hub.ports)
            asking, serving = caller(work), provider(work)
            calling, answering = Line(work, asking), Line(work, serving)
            serving.serve(answering)
            times = call_times(asking, calling, serving, answering, _scaled(LATENCIES, options))
        found_us = 1e6 * statistics.median(times[len(times) // 10 :])
        print(f"  {label:<24}{found_us:>6.0f} µs (goal 400)", flush=True)


# -------------------------------------------------------------------------------------- memory


def memory(_options: argparse.Namespace) -> None:
    print(f"{CONNECTIONS:,} idle connections")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4 * CONNECTIONS, most), most))
    for via in ("emp", "emqp", "relink", "epoxy", "micromsg2"):
        with _hub_for(via) as hub:
            work = Work(via=via, destination="queue/bench", ports=hub.ports)
            lines = [Line(work, producer_of(work)) for _ in range(20)]
            before = hub.memory_bytes()
            lines += [Line(work, producer_of(work)) for _ in range(CONNECTIONS)]
            time.sleep(1.0)
            each = (hub.memory_bytes() - before) / CONNECTIONS
            for line in lines:
                line.close()
        print(f"  {via:<12}{each / 1024:>6.1f} KiB each (goal 40 KB)", flush=True)


# ---------------------------------------------------------------------------------------- all

SECTIONS: dict[str, Callable[[argparse.Namespace], None]] = {
    "emqp": emqp,
    "topics": topics,
    "queues": queues,
    "latency": latency,
    "calls": calls,
    "memory": memory,
}
"""The sections by name; each prints its rows."""


def main() -> None:
    here = Path(__file__).parent.parent
    parser = argparse.ArgumentParser(description="Benchmarks of a whole hub.")
    parser.add_argument("--only", choices=SECTIONS, action="append")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor for the numbers of messages"
    )
    parser.add_argument("--eventmq", default=here / ".venv-eventmq" / "bin" / "python")
    options = parser.parse_args()
    _print_load()
    for name in options.only or SECTIONS:
        SECTIONS[name](options)
    _print_load()


def _print_load() -> None:
    """Print the load of the machine: it affects rates and latencies more than CPU times."""
    minute = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, {minute:.1f} programs at a time in the last minute", flush=True)


if __name__ == "__main__":
    main()
