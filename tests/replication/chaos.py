"""Replicas under load in all five protocols, while leaders are killed, paused and asked to stop.

    python -m tests.replication.chaos --rounds 20 --seed 1 --results FILE

Rounds are done in runs of 10, each with servers and replicas of its own. A line of JSON for each is
appended to FILE, and the last line printed is the sum of all runs in it. Rounds that are in FILE
already are not repeated, so that a long run can be continued.

Each round has one fault and ends when a replica leads and has acknowledged something. The last line
is `N takeovers, N acknowledged, N lost, N returned, N doubled`:

    lost       acknowledged to a producer, and never delivered, or not in the lake
    returned   delivered again, though its settlement was in a group that was acknowledged
    doubled    delivered under two ids, or an id that two messages had, or twice in the lake
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from crosswire.lake.compaction import compact
from crosswire.lake.files import find_all
from tests.e2e.parties import PARTIES
from tests.postgres.cluster import ClusterPool
from tests.replication.replicas import Balancer, ReplicaCluster, ReplicaProcess
from tests.replication.traffic import (
    ARRIVE_S,
    CONSUMED,
    KEPT,
    Traffic,
    await_lake,
    missing,
    surplus,
)

AT_ONCE: Final = 2
LARGE_BYTES: Final = 60 << 20
_RUN_ROUNDS: Final = 10
_DISK_BYTES: Final = 1 << 30
_SETTINGS: Final = "retain_s = 3\ncopies = 2\n"
_ROUND_S: Final = 90.0
_PLANTED_S: Final = 10.0
_TO_OLD: Final = 5
_TABLE_BYTES: Final = 3 << 20
_COUNTS: Final = (
    "takeovers",
    "acknowledged",
    "lost",
    "returned",
    "doubled",
    "attempted",
    "rounds",
    "in_lake",
)


class ChaosResult(msgspec.Struct):
    """What the line at the end says, and what each store has."""

    takeovers: int
    acknowledged: int
    lost: int
    returned: int
    doubled: int
    attempted: int
    slowest_s: dict[str, float]
    digests: dict[str, str]
    rounds: int = 0
    in_lake: int = 0

    def __str__(self) -> str:
        return (
            f"{self.takeovers} takeovers, {self.acknowledged} acknowledged, {self.lost} lost, "
            f"{self.returned} returned, {self.doubled} doubled"
        )


class Chaos:
    """The faults; each method returns when another replica leads."""

    def __init__(self, cluster: ReplicaCluster, traffic: Traffic, chance: random.Random) -> None:
        self.cluster = cluster
        self.traffic = traffic
        self.slowest_s: dict[str, float] = {}
        self._chance = chance
        self._large = 0
        self._sent = 0
        self._led = 0

    async def kill(self, leader: ReplicaProcess) -> None:
        """The leader's process is gone."""
        await leader.end(signal.SIGKILL)
        await self.cluster.leader()
        await leader.start()

    async def stop(self, leader: ReplicaProcess) -> None:
        """An operator stops the leader."""
        code = await leader.end(signal.SIGTERM)
        assert code == 0, f"{leader.name} ended with {code}: {leader.words()}"
        await self.cluster.leader()
        await leader.start()

    async def pause(self, leader: ReplicaProcess) -> None:
        """The leader's machine stands still, and goes on as if nothing had happened."""
        leader.send(signal.SIGSTOP)
        await self.cluster.leader(other_than=leader)
        leader.send(signal.SIGCONT)
        await _until(lambda: not leader.leads)

    async def both_lead(self, leader: ReplicaProcess) -> None:
        """As `pause`; the old leader has messages to process when it goes on, and serves them
        beside the new one."""
        leader.send(signal.SIGSTOP)
        await self.cluster.leader(other_than=leader)
        port = leader.port("emp")
        assert port is not None
        self._sent += 1
        sends = [
            asyncio.ensure_future(self.traffic.send_to(port, f"to the old {self._sent} {number}"))
            for number in range(_TO_OLD)
        ]
        # The system takes their connections in the meantime.
        await asyncio.sleep(0.1)
        leader.send(signal.SIGCONT)
        await _until(lambda: not leader.leads)
        await asyncio.gather(*sends)

    async def late_publish(self, leader: ReplicaProcess) -> None:
        """The leader stands still between a seal of the lake and the renaming of its files; another
        takes over, its files are compacted, and the first one goes on."""
        flag, lake = self.cluster.folder / f"{leader.name}.stop", self.cluster.folder / "lake"
        terms = {each.term for each in find_all(lake, ("messages",))}
        flag.touch()
        await _until(lambda: not flag.exists())
        following = await self.cluster.leader(other_than=leader)
        await _until(
            lambda: max(each.term for each in find_all(lake, ("messages",))) > max(terms, default=0)
        )
        # A day that is still written to is not compacted; here its writer stands still meanwhile.
        following.send(signal.SIGSTOP)
        try:
            await asyncio.to_thread(lambda: list(compact(lake, before="9999-12-31")))
        finally:
            following.send(signal.SIGCONT)
        leader.send(signal.SIGCONT)
        await _until(lambda: not leader.leads)
        await self.cluster.leader()

    async def full_disk(self, leader: ReplicaProcess) -> None:
        """A replica has no room. A leader hands over or ends; a standby does not take over."""
        victim = self._chance.choice(self.cluster.replicas)
        ballast = victim.data / "ballast"
        filling = asyncio.ensure_future(_fill(ballast))
        try:
            if victim is leader:
                await self.cluster.leader(other_than=victim)
                await _until(lambda: not victim.leads)
            else:
                await self._shows(victim, lambda state: bool(state["fault"]))
                await self.kill(leader)
                assert not victim.leads
        finally:
            filling.cancel()
            await asyncio.wait({filling})
            ballast.unlink()
        if not victim.is_running:
            await victim.start()
        await self._shows(victim, lambda state: not state["fault"] and not state["trouble"])

    async def damage(self, leader: ReplicaProcess) -> None:
        """A table of a replica is damaged, and it leads. It finds out, resigns, and gets another's
        data."""
        victim = self._chance.choice([each for each in self.cluster.replicas if each is not leader])
        self._large += 1
        await self.traffic.send_large(self._large, _TABLE_BYTES)
        await self._caught_up(leader)
        await victim.end(signal.SIGKILL)
        table = max((victim.data / "store").glob("*.sst"), key=lambda each: each.stat().st_size)
        size = table.stat().st_size
        # Its own keys are in the first blocks: without them it does not start.
        spared = self._chance.choice((0, size // 10))
        with table.open("r+b") as file:
            for at in range(spared, size - size // 10, 4096):
                file.seek(at)
                file.write(b"\xff" * 40)
        known = _installed(victim)
        try:
            await victim.start()
        except AssertionError as refused:
            assert "Remove its data directory" in str(refused), refused
            shutil.rmtree(victim.data / "store")
            await victim.start()
            await self._shows(victim, lambda state: not state["fault"])
            await self.kill(leader)
            return
        async with asyncio.timeout(_ROUND_S):
            while _installed(victim) == known:
                assert victim.is_running, victim.words()
                if victim.leads:
                    # What it reads of it is not in its memory yet.
                    await victim.ask("/v1/queues/k0?messages=100")
                else:
                    leading = await self.cluster.leader()
                    wish = json.dumps({"to": victim.name})
                    await leading.ask("/v1/replication/hand-over", "POST", wish)
                await asyncio.sleep(0.2)
        await self._shows(victim, lambda state: not state["fault"])
        if self.takeovers == self._led:
            await self.kill(await self.cluster.leader())

    async def _shows(
        self, replica: ReplicaProcess, condition: Callable[[dict[str, Any]], bool]
    ) -> None:
        """Returns when a replica's own state is as it should be."""
        async with asyncio.timeout(_ROUND_S):
            while True:
                with suppress(OSError):
                    _, state = await replica.ask("/v1/replication")
                    if condition(state):
                        return
                await asyncio.sleep(0.1)

    async def hand_over(self, leader: ReplicaProcess) -> None:
        """An operator wants another leader."""
        status, answer = await leader.ask("/v1/replication/hand-over", "POST", "{}")
        assert status == 200, answer
        await _until(lambda: not leader.leads)
        await self.cluster.leader()

    async def kill_two(self, leader: ReplicaProcess) -> None:
        """One is left of three."""
        others = [each for each in self.cluster.replicas if each is not leader]
        victim = self._chance.choice(others)
        # What two of them have may be trimmed: without the third nobody could lead before one of
        # the two is back.
        await self._caught_up(leader)
        await asyncio.gather(leader.end(signal.SIGKILL), victim.end(signal.SIGKILL))
        await self.cluster.leader()
        await leader.start()
        await victim.start()

    async def _caught_up(self, leader: ReplicaProcess) -> None:
        """All replicas have on their disks what the leader has now."""
        _, state = await leader.ask("/v1/replication")
        newest = state["applied"]
        async with asyncio.timeout(_ROUND_S):
            while True:
                synced = [each["synced"] for each in state["replicas"]]
                if len(synced) == len(self.cluster.replicas) and min(synced) >= newest:
                    return
                await asyncio.sleep(0.1)
                _, state = await leader.ask("/v1/replication")

    async def cut(self, leader: ReplicaProcess) -> None:
        """Statements of the log are cancelled and connections ended, then the leader is killed."""
        await self._end_backends()
        await self.kill(leader)

    async def unsafe(self, leader: ReplicaProcess) -> None:
        """For a moment the log's settings ask for no copies; then the leader is killed."""
        primary = self.cluster.postgres.primary
        await asyncio.to_thread(primary.set, "synchronous_standby_names", "")
        known = len(self.traffic.acknowledged)
        await asyncio.sleep(0.5)
        # What was confirmed before the settings changed may still arrive.
        allowed = 2 * AT_ONCE * len(PARTIES)
        assert len(self.traffic.acknowledged) - known <= allowed, "acknowledged without copies"
        await asyncio.to_thread(primary.set, "synchronous_standby_names", "ANY 1 (n0, n1, n2)")
        await self.kill(leader)

    async def pause_standby(self, leader: ReplicaProcess) -> None:
        """A standby stands still while the leader is killed, and goes on when another leads."""
        victim = self._chance.choice([each for each in self.cluster.replicas if each is not leader])
        victim.send(signal.SIGSTOP)
        await leader.end(signal.SIGKILL)
        await self.cluster.leader()
        victim.send(signal.SIGCONT)
        await leader.start()

    async def fail_over(self, leader: ReplicaProcess) -> None:
        """The log's primary is gone, and a standby of it is promoted; then the leader is killed."""
        await asyncio.to_thread(self.cluster.postgres.failover)
        await self.kill(leader)
        await asyncio.to_thread(self.cluster.postgres.rejoin)

    async def cancel_waiting(self, leader: ReplicaProcess) -> None:
        """Commits wait for copies and are cancelled, so that they are visible and have none; then
        the primary is gone, and they with it."""
        postgres = self.cluster.postgres
        await asyncio.to_thread(postgres.hold_copies, True)
        await asyncio.sleep(0.3)
        await self._end_backends()
        await asyncio.to_thread(postgres.failover)
        await self.kill(leader)
        await asyncio.to_thread(postgres.rejoin)

    async def stop_database(self, leader: ReplicaProcess) -> None:
        """The primary's machine stands still for a moment, the leader is killed meanwhile."""
        primary = self.cluster.postgres.primary
        primary.signal_all(signal.SIGSTOP)
        await asyncio.sleep(0.5)
        await leader.end(signal.SIGKILL)
        primary.signal_all(signal.SIGCONT)
        await self.cluster.leader()
        await leader.start()

    async def kill_database_standby(self, leader: ReplicaProcess) -> None:
        """One copy of the log is away while a replica takes over."""
        victim = self._chance.choice(self.cluster.postgres.standbys)
        await asyncio.to_thread(victim.kill)
        await self.kill(leader)
        await asyncio.to_thread(victim.start)

    async def wal_hole(self, leader: ReplicaProcess) -> None:
        """A standby's write-ahead log has a hole: what follows it is read from the log again."""
        victim = self._chance.choice([each for each in self.cluster.replicas if each is not leader])
        await victim.end(signal.SIGKILL)
        newest = max((victim.data / "store").glob("*.log"), key=lambda path: path.stat().st_mtime)
        size = newest.stat().st_size
        if size > 8192:
            with newest.open("r+b") as file:
                file.seek(size // 2)
                file.write(bytes(512))
        await victim.start()
        await self.kill(leader)

    async def start_local(self, leader: ReplicaProcess) -> None:
        """Somebody starts a replica's directory as a hub of its own: it is refused."""
        victim = self._chance.choice([each for each in self.cluster.replicas if each is not leader])
        await victim.end(signal.SIGKILL)
        alone = ReplicaProcess(self.cluster.folder, f"{victim.name}-alone", "local")
        alone.config.write_text(
            alone.config.read_text().replace(f'"{alone.data}"', f'"{victim.data}"')
        )
        try:
            await alone.start()
        except AssertionError as refused:
            assert "replication leave" in str(refused), refused
        else:
            raise AssertionError("a replica's directory was used by a hub alone")
        await victim.start()
        await self.kill(leader)

    async def long_pause(self, leader: ReplicaProcess) -> None:
        """A standby stands still until what it needs is trimmed: it fetches a checkpoint."""
        victim = self._chance.choice([each for each in self.cluster.replicas if each is not leader])
        # In the first round it may not have reported anything yet.
        await self._caught_up(leader)
        victim.send(signal.SIGSTOP)
        _, state = await leader.ask("/v1/replication")
        behind = next(each["synced"] for each in state["replicas"] if each["name"] == victim.name)
        first = 0
        async with asyncio.timeout(_ROUND_S):
            while first <= behind + 1:
                await asyncio.sleep(0.2)
                first = await self._first_record()
        victim.send(signal.SIGCONT)
        async with asyncio.timeout(_ROUND_S):
            while True:
                _, state = await victim.ask("/v1/replication")
                if state["applied"] >= first:
                    break
                await asyncio.sleep(0.1)
        await self.kill(leader)

    async def _first_record(self) -> int:
        schema = self.cluster.schema
        found = await asyncio.to_thread(
            self.cluster.postgres.primary.query, f"SELECT min(number) FROM {schema}.records"
        )
        return int(found[0][0] or 0)

    async def large(self, leader: ReplicaProcess) -> None:
        """The leader is killed while a large message is on its way into the log, in parts."""
        self._large += 1
        size = LARGE_BYTES if self._large == 1 else LARGE_BYTES // 4
        sent = asyncio.ensure_future(self.traffic.send_large(self._large, size))
        await asyncio.sleep(self._chance.random() * 2)
        await self.kill(leader)
        await sent

    async def _end_backends(self) -> None:
        primary = self.cluster.postgres.primary
        for how in ("pg_cancel_backend", "pg_terminate_backend"):
            chosen = "WHERE application_name LIKE 'crosswire%%'"
            await asyncio.to_thread(
                primary.query, f"SELECT {how}(pid) FROM pg_stat_activity {chosen}"
            )

    async def round(self, name: str) -> None:
        """One fault, until something is acknowledged after it."""
        # In the middle of traffic: producers of all protocols are connected and busy by then.
        wanted = len(self.traffic.acknowledged) + self._chance.randint(50, 300)
        await _until(lambda: len(self.traffic.acknowledged) >= wanted)
        leader = await self.cluster.leader()
        self._led = self.takeovers
        began = asyncio.get_running_loop().time()
        fault: Callable[[ReplicaProcess], Awaitable[None]] = getattr(self, name)
        await fault(leader)
        assert self.takeovers > self._led
        took_s = max(each.led_at for each in self.cluster.replicas) - began
        self.slowest_s[name] = max(took_s, self.slowest_s.get(name, 0.0))
        known = len(self.traffic.acknowledged)
        await _until(lambda: len(self.traffic.acknowledged) > known)

    @property
    def takeovers(self) -> int:
        return sum(each.times_led for each in self.cluster.replicas)


async def _fill(ballast: Path) -> None:
    """Take all room of a file system, also what is given back later: a store has a reserve."""
    with ballast.open("wb") as file:
        while True:
            room = os.statvfs(ballast)
            with suppress(OSError):
                free = room.f_bavail * room.f_frsize
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)
            await asyncio.sleep(0.02)


def _installed(replica: ReplicaProcess) -> int:
    """How many times it has got another replica's data."""
    return replica.log.read_text().count("a checkpoint is installed")


FAULTS: Final = (
    "kill",
    "stop",
    "pause",
    "hand_over",
    "cut",
    "kill_two",
    "fail_over",
    "unsafe",
    "pause_standby",
    "cancel_waiting",
    "stop_database",
    "kill_database_standby",
    "wal_hole",
    "start_local",
    "large",
    "long_pause",
    "both_lead",
    "late_publish",
    "full_disk",
    "damage",
)


async def run(
    pool: ClusterPool,
    folder: Path,
    rounds: int,
    seed: int,
    report: Callable[[str], None],
    *,
    offset: int = 0,
    with_lake: bool = True,
    planted: str = "",
) -> ChaosResult:
    """Rounds of faults: all of them in turn, from the one with the number `offset` on. `planted`
    names a fault of the hubs that the result has to show."""
    chance = random.Random(seed)
    lake = folder / "lake" if with_lake else None
    cluster = ReplicaCluster(pool.take(), folder, settings=_SETTINGS, lake=lake)
    for replica in cluster.replicas:
        flag = folder / f"{replica.name}.stop"
        replica.program = ("tests.replication.late_publisher", str(flag))
        if planted:
            replica.program = ("tests.replication.planted", planted)
    faults = FAULTS if os.geteuid() == 0 else [each for each in FAULTS if each != "full_disk"]
    names = [faults[(offset + number) % len(faults)] for number in range(rounds)]
    balancer = Balancer(cluster)
    await balancer.start()
    with ExitStack() as disks:
        if "full_disk" in names:
            for replica in cluster.replicas:
                disks.enter_context(_small_disk(replica.data))
        try:
            return await _run(cluster, balancer, names, chance, report, lake, bool(planted))
        finally:
            await balancer.close()
            await cluster.close()


async def _run(
    cluster: ReplicaCluster,
    balancer: Balancer,
    names: list[str],
    chance: random.Random,
    report: Callable[[str], None],
    lake: Path | None,
    is_planted: bool,
) -> ChaosResult:
    await cluster.start()
    traffic = Traffic(balancer.ports)
    chaos = Chaos(cluster, traffic, chance)
    async with AsyncExitStack() as stack:
        consumers = [asyncio.ensure_future(traffic.consume(queue)) for queue in CONSUMED]
        producers = [asyncio.ensure_future(traffic.multicast(0))]
        for kind in PARTIES:
            for number in range(AT_ONCE):
                party = await stack.enter_async_context(kind(balancer.ports))
                producers.append(asyncio.ensure_future(traffic.produce(party, number)))

        async def end_traffic() -> None:
            for each in (*producers, *consumers):
                each.cancel()
            await asyncio.gather(*producers, *consumers, return_exceptions=True)

        # Before the clients are closed, also where a round has failed.
        stack.push_async_callback(end_traffic)
        for number, name in enumerate(names, 1):
            began = time.monotonic()
            try:
                async with asyncio.timeout(_ROUND_S):
                    await chaos.round(name)
            except AssertionError as error:
                if not is_planted:
                    raise
                # A replica that has applied what the log never had does not start again. What the
                # others lack is counted all the same.
                report(f"{number} {name}: {error}")
                break
            took_s = time.monotonic() - began
            report(f"{number} {name}: {len(traffic.acknowledged)} acknowledged, {took_s:.1f} s")
        traffic.running = False
        # Requests that were lost with a leader end when their time is over.
        arrive_s = _PLANTED_S if is_planted else ARRIVE_S
        await asyncio.wait(producers, timeout=arrive_s)
        consumers += [asyncio.ensure_future(traffic.consume(queue)) for queue in KEPT]
        with suppress(TimeoutError):  # what is missing is in the result
            await _until(lambda: not traffic.lost, within_s=arrive_s)
        for each in (*producers, *consumers):
            each.cancel()
        for ended in await asyncio.gather(*producers, *consumers, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
    in_lake: dict[str, list[int]] = {}
    if lake is not None and not is_planted:
        in_lake = await await_lake(lake, traffic.acknowledged)
    for replica in cluster.replicas:
        await replica.end(signal.SIGKILL)
    lost, doubled = len(traffic.lost), traffic.doubled
    if lake is not None and not is_planted:
        lost += len(missing(traffic.acknowledged, in_lake))
        doubled += surplus(in_lake)
    return ChaosResult(
        takeovers=chaos.takeovers,
        acknowledged=len(traffic.acknowledged),
        lost=lost,
        returned=len(traffic.returned),
        doubled=doubled,
        attempted=traffic.attempted,
        slowest_s=chaos.slowest_s,
        digests={} if is_planted else await cluster.digests(),
        rounds=len(names),
        in_lake=sum(map(len, in_lake.values())),
    )


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own, which can be filled. Only root can mount one."""
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES},mode=700", "tmpfs", str(folder)],
        check=True,
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


async def _until(condition: Callable[[], bool], *, within_s: float = _ROUND_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def _sum(results: list[ChaosResult]) -> ChaosResult:
    first = results[0]
    for each in results[1:]:
        for name in _COUNTS:
            setattr(first, name, getattr(first, name) + getattr(each, name))
        for name, slowest_s in each.slowest_s.items():
            first.slowest_s[name] = max(slowest_s, first.slowest_s.get(name, 0.0))
    return first


def _are_equal(result: ChaosResult) -> bool:
    return len(set(result.digests.values())) == 1


def main() -> int:
    """0 if nothing was lost, returned or doubled, and all stores are equal."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=20, help="those in FILE included")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each has the next")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    results: list[ChaosResult] = []
    if options.results is not None and options.results.exists():
        lines = options.results.read_bytes().splitlines()
        results = [msgspec.json.decode(line, type=ChaosResult) for line in lines]
    while (done := sum(each.rounds for each in results)) < options.rounds:
        rounds = min(_RUN_ROUNDS, options.rounds - done)
        result = _run_once(rounds, options.seed + len(results), done)
        results.append(result)
        if options.results is not None:
            with options.results.open("ab") as file:
                file.write(msgspec.json.encode(result) + b"\n")
        print(f"after {done + rounds} rounds: {result}", flush=True)
    are_equal = all(_are_equal(each) for each in results)
    result = _sum(results)
    for name, slowest_s in sorted(result.slowest_s.items()):
        print(f"{name}: the slowest takeover took {slowest_s:.1f} s")
    print(
        f"stores are {'equal' if are_equal else 'different'}; {result.rounds} rounds, "
        f"{result.attempted} attempted, {result.in_lake} in the lake"
    )
    print(result)
    return 0 if are_equal and not (result.lost or result.returned or result.doubled) else 1


def _run_once(rounds: int, seed: int, offset: int) -> ChaosResult:
    pool = ClusterPool()
    try:
        with tempfile.TemporaryDirectory(prefix="crosswire-chaos-") as folder:
            return asyncio.run(
                run(
                    pool,
                    Path(folder),
                    rounds,
                    seed,
                    lambda text: print(text, flush=True),
                    offset=offset,
                )
            )
    finally:
        pool.close()


if __name__ == "__main__":
    sys.exit(main())
