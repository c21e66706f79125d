"""Throughput of the hub's core, compared with the bare disk: no sockets, payloads of 128 bytes.

Run it with `python benchmarks/hub_core.py`; `--messages` makes it longer or shorter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import zlib
from collections import deque
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, TypeAlias

import rocksdict
import uvloop

from crosswire.commitlog.body import GroupBody
from crosswire.commitlog.contract import Receipt
from crosswire.envelope import Envelope
from crosswire.hub.attachment import Attachment, Delivery, Notice, Window
from crosswire.hub.hub import Hub
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.policies import HubConfig, TopicPolicy
from crosswire.store.memory import MemoryStore
from crosswire.store.rocks import RocksStore

GROUP = 1000
ROUNDS = 5
PAYLOAD = bytes(range(128))
CRC = zlib.crc32(PAYLOAD)
PEER = LedgerPeer("bench", "bench-1")

Rows: TypeAlias = tuple[list[bytes], list[bytes]]
"""Keys and values of one group."""


class Taker:
    """A receiver that settles each delivery at once, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        self.count += len(deliveries)
        attachment.settle([each.envelope.id for each in deliveries], time.time())

    def notice(self, attachment: Attachment, notice: Notice) -> None:  # noqa: ARG002
        raise SystemExit(f"unexpected: {notice}")

    def broken(self, error: Exception) -> None:
        raise SystemExit(f"a receiver raised {error!r}")


def envelopes(destination: str, kind: Any, count: int, *, durable: bool = True) -> list[Envelope]:
    return [
        Envelope(
            destination=destination,
            kind=kind,
            payload=PAYLOAD,
            protocol="bench",
            connection="bench-1",
            durable=durable,
            crc=CRC,
        )
        for _ in range(count)
    ]


class Remembering(MemoryStore):
    """A store that keeps what the hub has it write, group by group, and writes nothing."""

    def __init__(self) -> None:
        self.rows: list[Rows] = []
        super().__init__()

    def _write(self, batch: GroupBody) -> None:
        operations = batch.operations  # type: ignore[attr-defined]
        # Rows of groups that the log no longer holds are dropped now and then: not a message's.
        operations = [each for each in operations if each[1] is not None or each[0][:1] != b"g"]
        if any(value is None for _, value, _ in operations):
            raise SystemExit("the hub does more than put")
        self.rows.append(([each[0] for each in operations], [each[1] for each in operations]))


def hub_rows(messages: int) -> list[Rows]:
    """The rows that the hub writes for sends in groups of 1,000: messages, ledger, counters."""
    store = Remembering()
    hub = Hub(store, now=time.time(), random=Random(1), clock=time.time)
    store.reserve(1)
    store.rows.clear()
    for batch in sends(messages):
        hub.produce(batch, time.time())
        hub.commits.commit_now()
    return store.rows


def bare_rocks(path: Path, groups: list[Rows]) -> float:
    """The rows that the hub writes, in write batches, each synced; rows a second.

    The engine is opened as the hub opens it. Keys and records are made before the clock starts:
    what is timed is filling the batches, writing and syncing them.
    """
    db = RocksStore(path / "bare")._db
    synced = rocksdict.WriteOptions()
    synced.sync = True
    start = time.perf_counter()
    for keys, values in groups:
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, value in zip(keys, values, strict=True):
            batch.put(key, value)
        db.write(batch, synced)
    took = time.perf_counter() - start
    db.close()
    return len(groups) * GROUP / took


def bare_sqlite(path: Path, groups: list[Rows]) -> float:
    """The same rows in a table, a transaction each."""
    db = sqlite3.connect(path / "bare.sqlite", isolation_level=None)
    db.execute("pragma journal_mode = wal")
    db.execute("pragma synchronous = full")
    db.execute("create table rows (key blob primary key, value blob) without rowid")
    start = time.perf_counter()
    for keys, values in groups:
        db.execute("begin")
        db.executemany("insert or replace into rows values (?, ?)", zip(keys, values, strict=True))
        db.execute("commit")
    rate = len(groups) * GROUP / (time.perf_counter() - start)
    db.close()
    return rate


def sends(messages: int) -> list[list[Envelope]]:
    return [envelopes("queue/bench", "send", GROUP) for _ in range(messages // GROUP)]


async def durable_sends(path: Path, messages: int) -> float:
    """Groups of 1,000, one being built while another is synced; messages a second.

    Envelopes are what the hub is given, as rows are what bare batches are given: they are made
    before the clock starts. It stops when the last receipt is done.
    """
    store = RocksStore(path / "sends")
    hub = Hub(store, now=time.time(), random=Random(1), clock=time.time)
    hub.commits.start(asyncio.get_running_loop())
    batches = sends(messages)
    waiting: deque[Receipt] = deque()
    start = time.perf_counter()
    for batch in batches:
        waiting.append(hub.produce(batch, time.time()))
        await asyncio.sleep(0)
        while len(waiting) > 1:
            await waiting.popleft()
    while waiting:
        await waiting.popleft()
    rate = messages / (time.perf_counter() - start)
    await hub.commits.close()
    return rate


def beside_bare(path: Path, messages: int) -> tuple[float, float]:
    """Medians of bare batches and of the hub's sends, in turns: what else runs hits both."""
    groups = hub_rows(messages)
    bare, ours = [], []
    for index in range(ROUNDS):
        here = path / f"round-{index}"
        bare.append(bare_rocks(here, groups))
        ours.append(uvloop.run(durable_sends(here, messages)))
        shutil.rmtree(here)
    return median(bare), median(ours)


async def through_queue(path: Path, messages: int) -> float:
    """Sent, committed, delivered and settled."""
    store = RocksStore(path / "through")
    hub = Hub(store, now=time.time(), random=Random(1), clock=time.time)
    hub.commits.start(asyncio.get_running_loop())
    taker = Taker()
    hub.consume("queue/bench", taker, time.time(), peer=PEER, window=1000)
    waiting: deque[Receipt] = deque()
    start = time.perf_counter()
    for _ in range(messages // GROUP):
        waiting.append(hub.produce(envelopes("queue/bench", "send", GROUP), time.time()))
        await asyncio.sleep(0)
        while len(waiting) > 1:
            await waiting.popleft()
    while waiting:
        await waiting.popleft()
    await hub.committed()
    rate = messages / (time.perf_counter() - start)
    if taker.count != messages:
        raise SystemExit(f"{taker.count} of {messages} were delivered")
    await hub.commits.close()
    return rate


async def publishes(path: Path, messages: int, batch: int) -> float:
    store = RocksStore(path / f"publishes-{batch}")
    config = HubConfig(topic=TopicPolicy(durable=False))
    hub = Hub(store, config, now=time.time(), random=Random(1), clock=time.time)
    hub.commits.start(asyncio.get_running_loop())
    taker = Taker()
    hub.subscribe("topic/bench", taker, time.time(), peer=PEER, window=10_000)
    start = time.perf_counter()
    for _ in range(messages // batch):
        hub.produce(envelopes("topic/bench", "publish", batch), time.time())
        await asyncio.sleep(0)
    rate = messages / (time.perf_counter() - start)
    if taker.count != messages:
        raise SystemExit(f"{taker.count} of {messages} were delivered")
    await hub.commits.close()
    return rate


async def one_at_a_time(path: Path, rounds: int) -> tuple[float, float]:
    """Medians in ms: a durable send until it is acknowledged, and the bare fsync."""
    store = RocksStore(path / "single")
    hub = Hub(store, now=time.time(), random=Random(1), clock=time.time)
    hub.commits.start(asyncio.get_running_loop())
    hub.consume("queue/bench", Taker(), time.time(), peer=PEER, window=10)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        await hub.produce(envelopes("queue/bench", "send", 1), time.time())
        times.append(time.perf_counter() - start)
    await hub.commits.close()
    db = rocksdict.Rdict(str(path / "fsync"), rocksdict.Options(raw_mode=True))
    synced = rocksdict.WriteOptions()
    synced.sync = True
    bare = []
    for each in range(rounds):
        start = time.perf_counter()
        db.put(each.to_bytes(8), PAYLOAD * 2, synced)
        bare.append(time.perf_counter() - start)
    db.close()
    return sorted(times)[rounds // 2] * 1e3, sorted(bare)[rounds // 2] * 1e3


def heads(path: Path, settled: int) -> tuple[float, float, float]:
    """Median µs to take the head of a queue after ten settled messages, in a store that has nothing
    else; after many; and after ten again, in another queue of a store with these many."""
    store = RocksStore(path / "heads")
    hub = Hub(store, now=time.time(), random=Random(1))

    def settle(queue: str, count: int) -> None:
        taker = Taker()
        consumer = hub.consume(queue, taker, time.time(), peer=PEER, window=1000)
        for first in range(0, count, GROUP):
            hub.produce(envelopes(queue, "send", min(GROUP, count - first)), time.time())
            hub.commits.commit_now()
        hub.commits.commit_now()
        consumer.close(time.time())

    def take(queue: str) -> float:
        """Reopening the queue is what would have to find its head."""
        hub.produce(envelopes(queue, "send", 1), time.time())
        hub.commits.commit_now()
        times = []
        for _ in range(51):
            # Without the recent ledger, which would leave the processor's caches cold.
            again = Hub(store, HubConfig(recent_rows=1), now=time.time(), random=Random(1))
            start = time.perf_counter()
            taker = Taker()
            window = Window(1, granted=True)
            consumer = again.consume(queue, taker, time.time(), peer=PEER, window=window)
            times.append(time.perf_counter() - start)
            if taker.count != 1:
                raise SystemExit("the head is not there")
            consumer.close(time.time())
        return sorted(times)[25] * 1e6

    settle("queue/bench", 10)
    few = take("queue/bench")
    settle("queue/bench", settled)
    settle("queue/beside", 10)
    many, beside = take("queue/bench"), take("queue/beside")
    asyncio.run(hub.commits.close())
    return few, many, beside


def peak_mb() -> float:
    """Peak memory of this process alone; `getrusage` includes the peak of the parent process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def fill(path: str, messages: int) -> None:
    """In a separate process: queue this many messages, print length and peak memory."""
    store = RocksStore(path)
    hub = Hub(store, now=time.time(), random=Random(1))
    for _ in range(messages // GROUP):
        hub.produce(envelopes("queue/bench", "send", GROUP), time.time())
        hub.commits.commit_now()
    print(json.dumps({"length": hub.queue("queue/bench").length, "peak_mb": peak_mb()}), flush=True)


def restart(path: str) -> None:
    start = time.perf_counter()
    store = RocksStore(path)
    hub = Hub(store, now=time.time(), random=Random(1))
    taker = Taker()
    window = Window(1, granted=True)
    hub.consume("queue/bench", taker, time.time(), peer=PEER, window=window)
    took = time.perf_counter() - start
    found = {"s": took, "length": hub.queue("queue/bench").length, "got": taker.count}
    print(json.dumps({**found, "peak_mb": peak_mb()}), flush=True)


def child(*arguments: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, *arguments], check=True, capture_output=True, text=True
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=300_000)
    parser.add_argument("--queued", type=int, default=1_000_000)
    parser.add_argument("--fill", metavar="DIR")
    parser.add_argument("--restart", metavar="DIR")
    options = parser.parse_args()
    if options.fill:
        fill(options.fill, options.queued)
        return
    if options.restart:
        restart(options.restart)
        return
    path = Path(tempfile.mkdtemp(prefix="crosswire-bench-"))
    try:
        measure(path, options.messages, options.queued)
    finally:
        shutil.rmtree(path)


def measure(path: Path, messages: int, queued: int) -> None:
    bare, ours = beside_bare(path, messages)
    print(f"bare rocksdict batches     {bare:>12,.0f} /s")
    print(f"sqlite3, synchronous=full  {bare_sqlite(path, hub_rows(messages)):>12,.0f} /s")
    print(f"durable sends with ledger  {ours:>12,.0f} /s   {ours / bare:.2f} of bare")
    print(f"…delivered and settled     {uvloop.run(through_queue(path, messages)):>12,.0f} /s")
    for batch in (100, GROUP):
        rate = uvloop.run(publishes(path, messages, batch))
        print(f"publishes, batches of {batch:<5}{rate:>12,.0f} /s")
    one, fsync = uvloop.run(one_at_a_time(path, 300))
    print(f"one at a time, median      {one:>12.3f} ms  bare fsync {fsync:.3f} ms")
    few, many, beside = heads(path, queued)
    print(f"head after 10 settled      {few:>12.0f} µs")
    print(f"head after {queued:<10,}      {many:>12.0f} µs")
    print(f"…after 10 beside these     {beside:>12.0f} µs")
    filled = child("--fill", str(path / "queued"), "--queued", str(queued))
    print(f"{queued:,} queued           {filled['peak_mb']:>12.0f} MB at most")
    again = child("--restart", str(path / "queued"))
    print(f"restart with them          {again['s']:>12.2f} s   {again['peak_mb']:.0f} MB")
    if again["length"] != queued - 1 or again["got"] != 1:
        raise SystemExit(f"restarted with {again}")


if __name__ == "__main__":
    main()
