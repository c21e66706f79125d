"""What a hub costs and how fast it is, on real sockets, beside what it replaces.

Every row starts its servers as programs of their own, puts the same load on each of them, one after
the other in one run, and prints ratios: they say more than figures of a machine that is shared.

    python benchmarks/hub.py [--only emqp] [--requests 20000] [--eventmq PYTHON]

eMQP: REQUESTs from a client to a worker, both on pyzmq in this process, which shares the machine
with the server; EventMQ's own router is taken from `.venv-eventmq`, which the tests of
interoperability make. CPU time is that of all threads of the server.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

WINDOW = 256
BODY_BYTES = 128
WARM_UP = 2000
LATENCIES = 2000
EMQP_DOORS = ("emqp-clients", "emqp-workers")
VERSION = b"eMQP/1.0"

ROUTER = """
import json, sys
from eventmq import router
ports = json.loads(sys.argv[1])
print(json.dumps(ports), flush=True)
front, back, admin = ["tcp://127.0.0.1:%d" % port for port in ports]
router.Router().start(front, back, admin)
"""


# ------------------------------------------------------------------------------------ programs


@dataclass(frozen=True)
class Program:
    """A server that runs."""

    pid: int
    ports: dict[str, int]

    def cpu_s(self) -> float:
        """CPU time that it has used so far, all its threads."""
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e9

    def settle(self) -> None:
        """Wait until it is done with what it was given; EventMQ's router is never quite idle."""
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
def crosswire(*doors: str) -> Iterator[Program]:
    """A hub with these listeners, in a directory of its own."""
    from crosswire.config import LISTENERS

    with tempfile.TemporaryDirectory(prefix="crosswire-bench-") as folder:
        listen = [f"{name}=127.0.0.1:0" if name in doors else f"{name}=off" for name in LISTENERS]
        command = [str(Path(sys.executable).with_name("crosswire")), "serve", "--json"]
        command += ["--data", folder]
        for each in listen:
            command += ["--listen", each]
        with _running(command) as (pid, said):
            ports = {name: int(at.rpartition(":")[2]) for name, at in said["listen"].items()}
            yield Program(pid, ports)


@contextmanager
def eventmq(python: Path) -> Iterator[Program]:
    """EventMQ's own router."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    with _running([str(python), "-c", ROUTER, json.dumps(ports)]) as (pid, said):
        yield Program(pid, dict(zip(EMQP_DOORS, said, strict=False)))


# ---------------------------------------------------------------------------------------- eMQP


class Figures(NamedTuple):
    """Of one server: requests a second, µs of its CPU time and µs until the worker has it."""

    per_second: float
    cpu_us: float
    p50_us: float


class EmqpLoad:
    """A client and a worker on pyzmq: REQUESTs in, jobs out, a READY for every job."""

    def __init__(self, program: Program, headers: bytes) -> None:
        import zmq

        self._context = zmq.Context()
        self._client, self._worker = (self._socket(program.ports[door]) for door in EMQP_DOORS)
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
        """One message of the worker's; True if it was a job."""
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
        """Receipts; gives how many there were."""
        count = 0
        try:
            while True:
                self._client.recv_multipart(self._no_wait)
                count += 1
        except self._again:
            return count

    def run(self, requests: int) -> float:
        """Seconds for so many requests, at most WINDOW under way."""
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
    print(f"eMQP: REQUESTs client → worker, {BODY_BYTES} bytes, {WINDOW} under way")
    genuine: Figures | None = None
    if python.exists():
        with eventmq(python) as program:
            genuine = _emqp_figures(program, b"", options.requests // 4)
        _print("EventMQ 0.3.13, its router", genuine, None)
    else:
        print(f"  no EventMQ to compare with: {python} is not there")
    for label, headers in (("crosswire", b""), ("crosswire, guarantee (fsync)", b"guarantee")):
        with crosswire(*EMQP_DOORS) as program:
            figures = _emqp_figures(program, headers, options.requests)
        _print(label, figures, genuine)
    print("  goals: CPU at most 1/10, 4 × the requests/s (3 × with guarantee), p50 at most 1/2")


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


# ---------------------------------------------------------------------------------------- all

SECTIONS: dict[str, Callable[[argparse.Namespace], None]] = {"emqp": emqp}
"""What can be measured, by name; each prints its own rows."""


def main() -> None:
    here = Path(__file__).parent.parent
    parser = argparse.ArgumentParser(description="Benchmarks of a whole hub.")
    parser.add_argument("--only", choices=sorted(SECTIONS), action="append")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--eventmq", default=here / ".venv-eventmq" / "bin" / "python")
    options = parser.parse_args()
    for name in options.only or SECTIONS:
        SECTIONS[name](options)


if __name__ == "__main__":
    main()
