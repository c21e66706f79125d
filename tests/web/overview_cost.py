"""What the console's requests cost a hub with very many queues and connections.

    python -m tests.web.overview_cost [--queues 100000] [--connections 10000] [--rounds 7]

A hub in its own process gets the queues (one in a hundred is a topic), each with a message, and
the connections, which all consume one queue. Then each request of the console's overview and lists
is made several times, while a probe, one more connection, sends pings: the longest time between a
ping and its pong is how long the event loop was held. Of all rounds of a request the median counts,
since other programs hold the probe up as well, but not every time. The hub's own measure of its
turns is not disturbed by them.
"""

from __future__ import annotations

import argparse
import http.client
import os
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import msgspec

from crosswire.cli.bench.hub import StartedHub, started_hub
from crosswire.wire.emp.frames import Hello, Ping, Request, serialize, serialize_call

__all__ = ["OVERVIEW", "REQUESTS", "SEARCHES", "RequestCost", "measure"]

OVERVIEW = "/v1/state"
REQUESTS = (
    OVERVIEW,
    "/v1/stats",
    "/v1/stats/busiest?limit=10",
    "/v1/queues?sort=age&state=backlog&limit=6",
    "/v1/queues?limit=50",
    "/v1/queues?limit=1000",
    "/v1/queues?sort=length&limit=50",
    "/v1/queues?sort=size&limit=50",
    "/v1/queues?sort=age&limit=50",
    "/v1/queues?sort=in&limit=50",
    "/v1/queues?sort=out&limit=50",
    "/v1/queues?sort=consumers&limit=50",
    "/v1/queues?sort=dead&limit=50",
    "/v1/queues?state=dead&limit=50",
    "/v1/queues?state=paused&limit=50",
    "/v1/queues?contains=99&limit=50",
    "/v1/queues?contains=nothing&limit=50",
    "/v1/queues/many/q77?messages=20",
    "/v1/queues/busy?messages=1000",
    "/v1/consumers?queue=busy&limit=50",
    "/v1/consumers?queue=busy&sort=held&limit=1000",
    "/v1/dead?limit=10",
    "/v1/connections?sort=in&limit=50",
    "/v1/connections?sort=age&limit=50",
    "/v1/connections?contains=emp-1-ff&limit=50",
    "/v1/connections/closed?limit=50",
    "/v1/services?limit=50",
    "/v1/topics?sort=in&limit=50",
    "/v1/subscriptions?sort=lag&limit=50",
    "/v1/users",
    "/metrics",
)
"""What the console asks for on its overview and lists, and what monitoring does."""
SEARCHES = (
    "/v1/messages?destination=queue/many/q77&limit=20",
    "/v1/messages?text=nothing&limit=20",
    "/v1/log",
)
"""What reads the whole log, or names everything: it may take as long as it takes, in turns."""

_HELLO = serialize(Hello(1))
_PING = serialize(Ping())
_BUSY = "queue/busy"
"""What all connections consume."""
_BATCH = 2_000
_PAUSE_S = 0.2
_IDLE_S = 2.0
"""As long as the longest requests take: a longer time has a longer longest wait."""


class RequestCost(msgspec.Struct, frozen=True):
    """Medians over the rounds of a request, in seconds."""

    path: str
    took_s: float
    """Until the response was there."""
    cpu_s: float
    """The hub's CPU time meanwhile, the probe's pings included."""
    held_s: float
    """The probe's longest wait meanwhile."""
    worst_s: float
    """The longest wait of all rounds."""
    turn_s: float
    """The longest turn of the event loop by its thread's own clock, which other programs don't
    run: rounded up to the next bucket of `crosswire_loop_turn_seconds`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queues", type=int, default=100_000)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    idle, costs = measure(options.queues, options.connections, options.rounds)
    print(f"load average of the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(
        f"{options.queues:,} queues, {options.connections:,} connections; the probe's longest wait"
    )
    print(f"  {'without a request':<50}{idle * 1000:>31.1f} ms")
    for each in costs:
        print(
            f"  {each.path:<50}answered in {each.took_s * 1000:>7.1f} ms,"
            f" {each.cpu_s * 1000:>6.1f} ms of CPU,"
            f" waited {each.held_s * 1000:>6.1f} ms, at worst {each.worst_s * 1000:>6.1f} ms,"
            f" a turn at most {each.turn_s * 1000:>4.0f} ms"
        )


def measure(queues: int, connections: int, rounds: int) -> tuple[float, list[RequestCost]]:
    """The probe's longest wait without a request, and the cost of each request."""
    config = (
        f"[connections]\nconnections = {connections + 10}\n"
        f"connections_per_address = {connections + 10}\n"
        f"[store]\ndestinations = {queues + 1000}\n"
        # The connections don't answer pings: they only are there.
        "[limits.emp]\nping_interval_s = 3600\n[lake]\nmessages = false\nledger = false\n"
    )
    with started_hub("emp", "http", config=config) as hub, ExitStack() as opened:
        with closing(_Http(hub)) as first:
            _fill(first, queues)
        for _ in range(connections):
            _consume(opened.enter_context(_connection(hub)))
        # New ones: the hub closes those that are idle for as long as all this takes.
        with closing(_Http(hub)) as second:
            _send(second, [_BUSY] * (2 * connections))
            _wait_for_totals(second, queues, connections)
        with probing(hub) as probe:
            idle = statistics.median(_idle(probe) for _ in range(rounds))
            third = opened.enter_context(closing(_Http(hub)))
            paths = (*REQUESTS, *SEARCHES)
            costs = [_cost(hub, third, probe, path, rounds) for path in paths]
    return idle, costs


class _Http:
    """A connection to the hub's API, kept open."""

    def __init__(self, hub: StartedHub) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", hub.ports["http"], timeout=300)

    def send(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """The body of the response. Raises RuntimeError for a failure."""
        self._connection.request(method, path, body, {"content-type": "application/json"})
        response = self._connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise RuntimeError(f"{method} {path}: {response.status} {data[:200]!r}")
        return data

    def close(self) -> None:
        self._connection.close()


def _fill(hub: _Http, queues: int) -> None:
    # One in a hundred is a topic.
    _send(hub, [f"{'queue' if n % 100 else 'topic'}/many/q{n}" for n in range(queues)])


def _send(hub: _Http, destinations: list[str]) -> None:
    """A message to each."""
    for start in range(0, len(destinations), _BATCH):
        batch = destinations[start : start + _BATCH]
        messages = [{"destination": each, "text": "x"} for each in batch]
        hub.send("POST", "/v1/messages", msgspec.json.encode({"messages": messages}))


@contextmanager
def _connection(hub: StartedHub) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", hub.ports["emp"]), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_HELLO)
        assert _receive(connection)[0] == 0, "the hub's hello"
        yield connection


def _consume(connection: socket.socket) -> None:
    subscribe = msgspec.json.encode({"destination": _BUSY, "window": 4})
    connection.sendall(serialize(Request(1, serialize_call("$subscribe", subscribe))))
    assert b'"success"' in (answer := _receive(connection)), answer


def _receive(connection: socket.socket) -> bytes:
    """The body of the next frame."""
    data = b""
    size = 4
    while len(data) < size:
        more = connection.recv(65_536)
        if not more:
            raise ConnectionError("the hub closed the connection")
        data += more
        if len(data) >= 4:
            size = 4 + int.from_bytes(data[:4])
    return data[4:]


def _wait_for_totals(hub: _Http, queues: int, connections: int) -> None:
    """Until the hub has counted all queues: of very many it does so now and then."""
    for _ in range(600):
        state = msgspec.json.decode(hub.send("GET", OVERVIEW))
        if (
            state["queues"] + state["topics"] >= queues
            and state["connections"].get("emp") == connections
        ):
            return
        time.sleep(0.1)
    raise TimeoutError(f"the hub does not count {queues} queues and {connections} connections")


class Probe:
    """Sends a ping all the time; `longest` is the longest wait since it was set to 0."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.is_over = False

    def run(self, connection: socket.socket) -> None:
        """In a thread of its own, until `is_over`."""
        while not self.is_over:
            connection.sendall(_PING)
            start = time.perf_counter()
            _receive(connection)
            self.longest = max(self.longest, time.perf_counter() - start)
            time.sleep(0.0005)


@contextmanager
def probing(hub: StartedHub) -> Iterator[Probe]:
    """A connection with a probe."""
    probe = Probe()
    with _connection(hub) as connection:
        thread = threading.Thread(target=probe.run, args=(connection,))
        thread.start()
        try:
            yield probe
        finally:
            probe.is_over = True
            thread.join()


def _idle(probe: Probe) -> float:
    probe.longest = 0.0
    time.sleep(_IDLE_S)
    return probe.longest


def _cost(started: StartedHub, hub: _Http, probe: Probe, path: str, rounds: int) -> RequestCost:
    took, used, held, turns = [], [], [], []
    for _ in range(rounds):
        time.sleep(_PAUSE_S)
        before = _turns(hub)
        probe.longest = 0.0
        start, cpu_s = time.perf_counter(), started.cpu_s()
        hub.send("GET", path)
        took.append(time.perf_counter() - start)
        used.append(started.cpu_s() - cpu_s)
        # The loop may still be held for a moment by what follows a response.
        time.sleep(0.01)
        held.append(probe.longest)
        turns.append(max((bound for bound in (_turns(hub) - before)), default=0.0))
    medians = [statistics.median(each) for each in (took, used, held)]
    return RequestCost(path, *medians, max(held), statistics.median(turns))


def _turns(hub: _Http) -> Counter[float]:
    """How many turns of the event loop took at most this long, and longer than the bound before."""
    counts: Counter[float] = Counter()
    below = 0
    for line in hub.send("GET", "/metrics").decode().splitlines():
        if line.startswith("crosswire_loop_turn_seconds_bucket"):
            bound, number = line.partition('le="')[2].split('"} ')
            counts[float(bound)] = int(number) - below
            below = int(number)
    return counts


if __name__ == "__main__":
    main()
