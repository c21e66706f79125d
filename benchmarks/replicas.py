"""A hub whose log is local, and one with replicas on a log in PostgreSQL: rates, latencies, and how
long takeovers take.

Usage: python benchmarks/replicas.py [SECONDS]

Everything is on this machine: hubs, a primary and two standbys, and the clients. The servers of
PostgreSQL are in memory where there is a /dev/shm. So the ratio to the local log is the cost of the
log without its disks and network. Messages have 128 bytes; takeovers are those of hubs with
`takeover_s = 2`. Each figure has the range of three rounds, in turn with the others; the ratios are
those of the rounds.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.e2e.parties import RelinkParty
from tests.postgres.cluster import ClusterPool, PostgresServer
from tests.replication.replicas import TAKEOVER_S, ReplicaCluster, ReplicaProcess

from crosswire.client.native.emp import EmpClient
from crosswire.commitlog.postgres.engine import SETTLE_S

IN_FLIGHT = (1, 32, 1000)
ROUNDS = 3
TAKEOVERS = 5
DELIVERIES = 100
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
    return len(times) / seconds, *_quantiles(times)


def _quantiles(times: list[float]) -> tuple[float, float]:
    times.sort()
    return times[len(times) // 2], times[len(times) * 99 // 100]


async def deliver(hub: ReplicaProcess) -> tuple[float, float]:
    """How long a message takes from its producer to a consumer of Relink, p50 and p99, one at a
    time."""
    ports = {name: hub.port(name) or 0 for name in ("emp", "relink")}
    times: list[float] = []
    async with RelinkParty(ports) as party, EmpClient("127.0.0.1", ports["emp"]) as client:
        inbox = await party.consume("queue/relink")
        for _ in range(DELIVERIES):
            start = perf_counter()
            request = {"destination": "queue/relink", "text": TEXT}
            sent = asyncio.ensure_future(client.request("$publish", request))
            await inbox.get()
            times.append(perf_counter() - start)
            await sent
    return _quantiles(times)


async def appended_bytes(replica: ReplicaProcess) -> int:
    _, metrics = await replica.ask("/metrics")
    found = re.search(r"^crosswire_log_appended_bytes_total (\d+)", metrics, re.M)
    return int(found[1]) if found else 0


async def measure(pool: ClusterPool, folder: Path, seconds: float) -> None:
    local = ReplicaProcess(folder, "local", "local")
    await local.start()
    cluster = ReplicaCluster(pool.take(), folder, size=3)
    leader = await cluster.start()
    primary = cluster.postgres.primary
    print(f"load average of the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    try:
        kinds = {"local": (local, 0), "1 standby": (leader, 1), "2 standbys": (leader, 2)}
        for in_flight in IN_FLIGHT:
            await _compare(kinds, primary, in_flight, seconds)
        for name, (hub, copies) in kinds.items():
            await _require_copies(primary, copies)
            median, high = await deliver(hub)
            print(f"Relink, {name:10}: p50 {median * 1e3:.2f} ms, p99 {high * 1e3:.2f} ms")
        primary.set("synchronous_standby_names", "ANY 1 (n0, n1, n2)")
        await _measure_takeovers(cluster)
    finally:
        await cluster.close()
        await local.end()


async def _require_copies(primary: PostgresServer, copies: int) -> None:
    if copies:
        primary.set("synchronous_standby_names", f"ANY {copies} (n0, n1, n2)")
        # Nothing is confirmed for a moment after that.
        await asyncio.sleep(2 * SETTLE_S)


async def _compare(
    kinds: dict[str, tuple[ReplicaProcess, int]],
    primary: PostgresServer,
    in_flight: int,
    seconds: float,
) -> None:
    """One kind after the other, several times: other work on the machine meets all of them."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in kinds}
    appended: dict[str, int] = dict.fromkeys(kinds, 0)
    for _ in range(ROUNDS):
        for name, (hub, copies) in kinds.items():
            await _require_copies(primary, copies)
            port = hub.port("emp")
            assert port is not None
            before = await appended_bytes(hub)
            found[name].append(await send(port, in_flight, seconds))
            appended[name] += await appended_bytes(hub) - before
    for name, rounds in found.items():
        rates, medians, highs = (sorted(each) for each in zip(*rounds, strict=True))
        line = (
            f"{in_flight:5} in flight, {name:10}: {rates[0]:6,.0f} to {rates[-1]:6,.0f} /s, "
            f"p50 {medians[0] * 1e3:.2f} to {medians[-1] * 1e3:.2f} ms, "
            f"p99 {highs[0] * 1e3:.2f} to {highs[-1] * 1e3:.2f} ms"
        )
        if appended[name]:
            sent = sum(each[0] for each in rounds) * seconds
            ratios = sorted(
                each[0] / local[0] for each, local in zip(rounds, found["local"], strict=True)
            )
            line += (
                f", {appended[name] / sent:4.0f} bytes a message, "
                f"{ratios[0]:.2f} to {ratios[-1]:.2f} of local"
            )
        print(line, flush=True)


async def _measure_takeovers(cluster: ReplicaCluster) -> None:
    loop = asyncio.get_running_loop()
    for name, how in (("planned", signal.SIGTERM), ("after a kill", signal.SIGKILL)):
        times = []
        for _ in range(TAKEOVERS):
            leader = await cluster.leader()
            # A standby that reports can be handed over to.
            while True:
                _, state = await leader.ask("/v1/replication")
                if sum(each["role"] == "standby" for each in state["replicas"]) == 2:
                    break
                await asyncio.sleep(0.2)
            began = loop.time()
            ending = asyncio.ensure_future(leader.end(how))
            following = await cluster.leader(other_than=leader)
            times.append(following.led_at - began)
            await ending
            await leader.start()
        times.sort()
        print(
            f"takeover {name}: p50 {times[len(times) // 2]:.2f} s, max {times[-1]:.2f} s of"
            f" {len(times)}, takeover_s = {TAKEOVER_S:g}",
            flush=True,
        )


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
