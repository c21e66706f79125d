"""Durable sends to a hub whose log is local, and to one with replicas on a log in PostgreSQL.

Usage: python benchmarks/replicas.py [SECONDS]

Everything is on this machine: hubs, a primary and two synchronous standbys, and the sender, which
is one client of EMP with messages of 128 bytes. The servers of PostgreSQL are in memory where there
is a /dev/shm. So the ratio of both columns is the cost of the log without its disks and network.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.postgres.cluster import ClusterPool
from tests.replication.replicas import ReplicaCluster, ReplicaProcess

from crosswire.client.native.emp import EmpClient

IN_FLIGHT = (1, 32, 1000)
ROUNDS = 3
TEXT = "x" * 128


async def send(port: int, in_flight: int, seconds: float) -> tuple[float, float, float]:
    """Messages per second, and p50 and p99 of how long one takes."""
    times: list[float] = []
    end = perf_counter() + seconds

    async def one_after_the_other(client: EmpClient) -> None:
        while perf_counter() < end:
            start = perf_counter()
            await client.request("$publish", {"destination": "queue/bench", "text": TEXT})
            times.append(perf_counter() - start)

    async with EmpClient("127.0.0.1", port) as client:
        await asyncio.gather(*(one_after_the_other(client) for _ in range(in_flight)))
    times.sort()
    return len(times) / seconds, times[len(times) // 2], times[len(times) * 99 // 100]


async def appended_bytes(replica: ReplicaProcess) -> int:
    _, metrics = await replica.ask("/metrics")
    found = re.search(r"^crosswire_log_appended_bytes_total (\d+)", metrics, re.M)
    return int(found[1]) if found else 0


async def measure(pool: ClusterPool, folder: Path, seconds: float) -> None:
    local = ReplicaProcess(folder, "local", "local")
    await local.start()
    cluster = ReplicaCluster(pool.take(), folder, size=2)
    leader = await cluster.start()
    try:
        for in_flight in IN_FLIGHT:
            rates: dict[str, float] = {}
            for name, hub in (("local", local), ("log in PostgreSQL", leader)):
                port = hub.port("emp")
                assert port is not None
                before = await appended_bytes(hub)
                # The best of some rounds: other work on the machine only ever slows one down.
                found = [await send(port, in_flight, seconds) for _ in range(ROUNDS)]
                rate, median, high = max(found)
                rates[name] = rate
                line = (
                    f"{in_flight:5} in flight, {name:17}: {rate:8,.0f} /s, "
                    f"p50 {median * 1e3:7.2f} ms, p99 {high * 1e3:7.2f} ms"
                )
                sent = sum(each[0] for each in found) * seconds
                after = await appended_bytes(hub)
                if after > before:
                    line += f", {(after - before) / sent:5.0f} bytes appended a message"
                print(line, flush=True)
            ratio = rates["log in PostgreSQL"] / rates["local"]
            print(f"{in_flight:5} in flight: {ratio:.2f} of local")
    finally:
        await cluster.close()
        await local.end()


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 3.0
    pool = ClusterPool()
    try:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(measure(pool, Path(folder), seconds))
    finally:
        pool.close()


if __name__ == "__main__":
    main()
