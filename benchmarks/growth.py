"""What twice as much of something costs the hub: a goal is at most 2.1 × for twice the work.

    python benchmarks/growth.py [--only queues] [--rounds 3] [--scale 1.0]

queues         durable sends spread over N queues, four to each, in batches of 1,000
backlog        N messages that wait in a queue: sent without a consumer, then taken and settled
connections    N producers, each with a consumer and a queue of its own, 16 messages under way each
subscriptions  messages published to N named subscriptions, delivered and settled; without sockets

Each row is the least CPU time of the hub over the rounds (all its threads, without the lake, which
has nothing that grows with these), per unit of work, and that of all work compared with the row
before it; and the least and most units a second, of the hub and its load on the same processors.
The loads use MicroMsg2. With `--trees`, two trees of this repository take turns, and the second is
compared with the first, round by round:

    python benchmarks/growth.py --only queues --rounds 5 --trees ../before .
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import log
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import uvloop
from hub_core import PEER, Taker, envelopes

from crosswire.cli.bench.contract import Line, Work, consumer_of, producer_of
from crosswire.cli.bench.hub import StartedHub, started_hub
from crosswire.hub.hub import Hub
from crosswire.store.rocks import RocksStore
from crosswire.wire.micromsg2.frames import message_prefix

GOAL = 2.1
BATCH = 1000
UNDER_WAY = 16
PUBLISHED = 40
NO_LAKE = "[lake]\nmessages = false\nledger = false\n"


class Measured(NamedTuple):
    """Work, the hub's CPU seconds for it, and the time that it took."""

    units: int
    cpu_s: float
    elapsed_s: float


def _watch(cpu_s: Callable[[], float]) -> Callable[[int], Measured]:
    """Begin to measure; the returned function ends it."""
    used, began = cpu_s(), time.perf_counter()
    return lambda count: Measured(count, cpu_s() - used, time.perf_counter() - began)


class Spread:
    """A producer that sends to many queues, in turn, and waits for what it has sent."""

    def __init__(self, hub: StartedHub, queues: int) -> None:
        self._work = Work(via="micromsg2", destination="queue/q", ports=hub.ports, window=BATCH)
        self._producer = producer_of(self._work)
        self._line = Line(self._work, self._producer)
        payload = self._work.payload
        self._messages = [
            (message_prefix(f"queue/q{each}".encode(), b""), payload) for each in range(queues)
        ]
        self._next = 0

    def send(self, count: int) -> None:
        """Send this many messages, a batch at a time."""
        messages, connection = self._messages, self._line.connection
        while count > 0:
            size = min(BATCH, count)
            run = [messages[(self._next + each) % len(messages)] for each in range(size)]
            self._next += size
            connection.send_run(run)  # type: ignore[attr-defined]
            self._line.write()
            left = size
            while left > 0:
                left -= self._producer.answered(self._line.read())
            count -= size

    def close(self) -> None:
        """End the connection."""
        self._line.close()


@contextmanager
def _hub() -> Iterator[StartedHub]:
    with started_hub("micromsg2", config=NO_LAKE) as hub:
        yield hub


def queues(number: int) -> Measured:
    """Messages, and the hub's CPU seconds for them."""
    with _hub() as hub:
        spread = Spread(hub, number)
        # They are created, and every one has a message, before the clock starts.
        spread.send(max(number, 2 * BATCH))
        count = max(4 * number, 10 * BATCH)
        stop = _watch(hub.cpu_s)
        spread.send(count)
        measured = stop(count)
        spread.close()
    return measured


def backlog(number: int) -> Measured:
    """Messages, and the CPU seconds to send all of them and then to deliver and settle them."""
    with _hub() as hub:
        work = Work(via="micromsg2", destination="queue/q0", ports=hub.ports)
        spread = Spread(hub, 1)
        stop = _watch(hub.cpu_s)
        spread.send(number)
        consumer = consumer_of(work)
        line = Line(work, consumer)
        taken = 0
        while taken < number:
            taken += consumer.take(line.read())
            line.write()
        measured = stop(number)
        line.close()
        spread.close()
    return measured


def connections(number: int) -> Measured:
    """Messages, and the hub's CPU seconds, with this many pairs of producer and consumer."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096 + 4 * number, most), most))
    with _hub() as hub, selectors.DefaultSelector() as selector:
        pairs = []
        for each in range(number):
            work = Work(
                via="micromsg2", destination=f"queue/q{each}", ports=hub.ports, window=UNDER_WAY
            )
            consumer, producer = consumer_of(work), producer_of(work)
            taking, sending = Line(work, consumer), Line(work, producer)
            selector.register(taking.socket, selectors.EVENT_READ, (taking, consumer, None))
            selector.register(sending.socket, selectors.EVENT_READ, (sending, None, producer))
            pairs.append((sending, producer, taking))

        def run(rounds: int) -> int:
            total = rounds * UNDER_WAY * number
            sent = {line: UNDER_WAY for line, _, _ in pairs}
            for line, producer, _ in pairs:
                producer.send(UNDER_WAY)
                line.write()
            answered = taken = 0
            while answered < total or taken < total:
                for key, _ in selector.select(60):
                    line, consumer, producer = key.data
                    events = line.read()
                    if consumer is not None:
                        taken += consumer.take(events)
                    else:
                        count = producer.answered(events)
                        answered += count
                        more = min(count, rounds * UNDER_WAY - sent[line])
                        sent[line] += more
                        producer.send(more)
                    line.write()
            return total

        run(2)
        stop = _watch(hub.cpu_s)
        measured = stop(run(12))
        for sending, _, taking in pairs:
            sending.close()
            taking.close()
    return measured


async def _subscriptions(folder: Path, number: int) -> Measured:
    hub = Hub(RocksStore(folder / "store"), now=time.time(), random=Random(1), clock=time.time)
    hub.commits.start(asyncio.get_running_loop())
    taker = Taker()
    for each in range(number):
        hub.subscribe("topic/bench", taker, time.time(), peer=PEER, name=f"s{each}", window=100)
    await hub.committed()
    stop = _watch(time.process_time)
    for _ in range(PUBLISHED):
        await hub.produce(envelopes("topic/bench", "publish", 1), time.time())
    while taker.count < PUBLISHED * number:
        await asyncio.sleep(0.001)
    await hub.committed()
    measured = stop(taker.count)
    await hub.commits.close()
    return measured


def subscriptions(number: int) -> Measured:
    """Deliveries, and the CPU seconds for them."""
    folder = Path(tempfile.mkdtemp(prefix="crosswire-bench-"))
    try:
        return uvloop.run(_subscriptions(folder, number))
    finally:
        shutil.rmtree(folder)


SECTIONS: dict[str, tuple[str, Callable[[int], Measured], list[int]]] = {
    "queues": ("messages", queues, [1, 1000, 2000, 4000, 8000, 16_000]),
    "backlog": ("messages", backlog, [20_000, 40_000, 80_000, 160_000]),
    "connections": ("messages", connections, [16, 32, 64, 128, 256]),
    "subscriptions": ("deliveries", subscriptions, [125, 250, 500, 1000]),
}
"""By name: the unit of work, what measures it, and the numbers."""


def compare(name: str, numbers: list[int], rounds: int, trees: list[str]) -> None:
    """Measure two trees in turns, each in a process of its own, and print both."""
    print("| of | number | tree | CPU µs each | a second | beside the first |")
    print("|---|---|---|---|---|---|")
    for number in numbers:
        found: dict[str, list[Measured]] = {tree: [] for tree in trees}
        for round_number in range(rounds):
            for tree in trees[:: -1 if round_number % 2 else 1]:
                found[tree].append(_measure_tree(tree, name, number))
        first = found[trees[0]]
        for tree, taken in found.items():
            times = sorted(1e6 * each.cpu_s / each.units for each in taken)
            rates = sorted(each.units / each.elapsed_s for each in taken)
            factors = [two.cpu_s / one.cpu_s for one, two in zip(first, taken, strict=True)]
            print(
                f"| {name} | {number:,} | {tree} | {times[0]:.1f} … {times[-1]:.1f} |"
                f" {rates[0]:,.0f} … {rates[-1]:,.0f} | {median(factors):.2f} ×"
                f" ({min(factors):.2f} … {max(factors):.2f}) |",
                flush=True,
            )


def _measure_tree(tree: str, name: str, number: int) -> Measured:
    # This script with the package of that tree.
    environment = {**os.environ, "PYTHONPATH": str(Path(tree, "src").resolve())}
    command = [sys.executable, __file__, "--one", name, str(number)]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return Measured(*json.loads(run.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", choices=SECTIONS, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="factor for the numbers")
    parser.add_argument("--numbers", type=int, nargs="+", help="instead of those of a section")
    parser.add_argument("--trees", nargs=2, metavar="DIR")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(SECTIONS[options.one[0]][1](int(options.one[1]))))
        return
    print(f"{os.cpu_count()} cores, {os.getloadavg()[0]:.1f} programs at a time at the start\n")
    if not options.trees:
        print("| of | number | work | CPU µs each | all of it | twice costs | a second |")
        print("|---|---|---|---|---|---|---|")
    for name in options.only or SECTIONS:
        unit, measure, numbers = SECTIONS[name]
        numbers = [max(int(each * options.scale), 1) for each in options.numbers or numbers]
        if options.trees:
            compare(name, numbers, options.rounds, options.trees)
            continue
        found: dict[int, list[Measured]] = {}
        # In turns: what else runs on the machine hits all of them.
        for _ in range(options.rounds):
            for number in numbers:
                found.setdefault(number, []).append(measure(number))
        before: tuple[int, float] | None = None
        for number, taken in found.items():
            count, used = taken[0].units, min(each.cpu_s for each in taken)
            rates = [count / each.elapsed_s for each in taken]
            line = f"| {name} | {number:,} | {count:,} {unit} | {1e6 * used / count:.1f} | "
            line += f"{used:.2f} s | "
            if before is not None and count > before[0]:
                # Rows need not be twice the one before: a smaller scale, or the first of queues.
                factor = (used / before[1]) ** (log(2) / log(count / before[0]))
                line += f"{factor:.2f} × {'' if factor <= GOAL else f'(goal {GOAL})'} "
            print(f"{line}| {min(rates):,.0f} … {max(rates):,.0f} |", flush=True)
            before = (count, used)
    print(f"\n{os.getloadavg()[0]:.1f} programs at a time in the last minute")


if __name__ == "__main__":
    main()
