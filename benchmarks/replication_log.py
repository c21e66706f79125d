"""How long an append to a log in PostgreSQL takes: a primary and two synchronous standbys.

Usage: python benchmarks/replication_log.py [APPENDS]

The servers are those of the tests, on this machine and in memory where there is a /dev/shm: the
figures are the cost of the log itself, without disks and without a network.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from time import perf_counter, thread_time

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.commitlog.postgres_harness import PostgresHarness
from tests.postgres.cluster import ClusterPool

from crosswire.commitlog.postgres.engine import postgres_log
from crosswire.commitlog.records import RecordChain, Takeover

SIZES = (1 << 10, 128 << 10, 900 << 10, 4000 << 10)


async def measure(harness: PostgresHarness, appends: int) -> None:
    await harness.start()
    genesis = await harness.create()
    # Not through the proxies of the tests.
    log = postgres_log(harness.url(ports=[server.port for server in harness.cluster.servers]))
    harness.opened.append(log)
    await log.open()
    chain = RecordChain(harness.log_id, b"w" * 16, position=genesis.position)
    await log.append(chain.takeover(Takeover("a"), 1))
    for size in SIZES:
        times, cpu_s = [], 0.0
        for _ in range(max(20, appends * SIZES[0] // size if size > SIZES[1] else appends)):
            record = chain.group(bytes(size), 1)[0]
            start, used_s = perf_counter(), thread_time()
            await log.append(record)
            times.append(perf_counter() - start)
            cpu_s += thread_time() - used_s
        times.sort()
        median, high = times[len(times) // 2], times[len(times) * 99 // 100]
        print(
            f"append of {size >> 10:5} KiB: p50 {median * 1e3:6.2f} ms, p99 {high * 1e3:6.2f} ms, "
            f"the hub's own {cpu_s / len(times) * 1e3:.2f} ms, {len(times)} appends"
        )
    await harness.close()


def main() -> None:
    appends = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    pool = ClusterPool()
    try:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(measure(PostgresHarness(pool.take(), Path(folder)), appends))
    finally:
        pool.close()


if __name__ == "__main__":
    main()
