"""Replicas under load in all five protocols, while leaders are killed, paused and asked to stop.

    python -m tests.replication.chaos --rounds 20 --seed 1 --results FILE

A line of JSON for each run is appended to FILE, and the last line printed is the sum of all runs in
it: a long run may be made of several.

Each round has one fault and ends when a replica leads and has acknowledged something. The last line
is `N takeovers, N acknowledged, N lost, N returned, N doubled`:

    lost       acknowledged to a producer, and never delivered
    returned   delivered again, though its settlement was in a group that was acknowledged
    doubled    delivered under two ids, or an id that two messages had
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from crosswire.client.native.dial import Backoff
from crosswire.client.native.emp import EmpClient
from crosswire.errors import ClientError
from tests.e2e.parties import PARTIES, EmqpParty, Party
from tests.postgres.cluster import ClusterPool
from tests.replication.replicas import Balancer, ReplicaCluster, ReplicaProcess

AT_ONCE: Final = 2
LARGE_BYTES: Final = 60 << 20
_SETTINGS: Final = "retain_s = 3\ncopies = 2\n"
_CONSUMED: Final = ("queue/q0", "queue/q1")
_KEPT: Final = ("queue/k0", "queue/k1")
"""Consumed when the faults are over: what is delivered at once is not missed later, whatever became
of it in the log."""
_ROUND_S: Final = 90.0
_ARRIVE_S: Final = 60.0
_PLANTED_S: Final = 10.0
_MARK_S: Final = 0.1


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

    def __str__(self) -> str:
        return (
            f"{self.takeovers} takeovers, {self.acknowledged} acknowledged, {self.lost} lost, "
            f"{self.returned} returned, {self.doubled} doubled"
        )


class _Delivered(msgspec.Struct):
    payload: str
    is_settled: bool = False


class Traffic:
    """Producers of all protocols; consumers of EMP, which know ids and what is settled for sure."""

    def __init__(self, ports: dict[str, int]) -> None:
        self.attempted = 0
        self.acknowledged: set[str] = set()
        self.payloads: dict[str, set[int]] = {}
        self.ids: dict[int, _Delivered] = {}
        self.returned: list[int] = []
        self.doubled_ids: list[int] = []
        self.running = True
        self._ports = ports
        self._loop = asyncio.get_running_loop()

    async def produce(self, party: Party, number: int) -> None:
        """One message after the other; what was not acknowledged is not sent again."""
        count, queues = 0, (*_CONSUMED, *_KEPT)
        while self.running:
            payload = f"{party.name} {number} {count}"
            count += 1
            self.attempted += 1
            try:
                await party.produce(queues[count % len(queues)], payload.encode(), "text/plain")
            except ClientError:
                # A client that has ended raises without waiting: others need the loop, too.
                await asyncio.sleep(0.01)
                continue
            # eMQP sends without a receipt: nobody knows what was acknowledged.
            if not isinstance(party, EmqpParty):
                self.acknowledged.add(payload)
            else:
                await asyncio.sleep(0.01)

    async def send_large(self, number: int, size: int) -> None:
        """One message that is several records of the log."""
        text = f"large {number} " + "x" * size
        self.attempted += 1
        with suppress(ClientError):
            async with EmpClient("127.0.0.1", self._ports["emp"]) as client:
                await client.request("$publish", {"destination": _KEPT[0], "text": text})
                self.acknowledged.add(_shortened(text))

    async def consume(self, queue: str) -> None:
        """Settles what comes, and again and again publishes on the same connection: when that is
        acknowledged, all that was settled before it on this connection is durable."""
        answered: list[tuple[float, int]] = []

        async def take(data: dict[str, Any]) -> None:
            self._take(data)
            answered.append((self._loop.time(), data["id"]))

        async with EmpClient(
            "127.0.0.1",
            self._ports["emp"],
            handlers={"$deliver": take},
            backoff=Backoff(0.02, 0.3),
        ) as client:
            await client.request("$subscribe", {"destination": queue})
            last, since = None, 0.0
            while True:
                await asyncio.sleep(_MARK_S)
                peer = await client.peer()
                now = self._loop.time()
                if peer is not last:
                    last, since = peer, now
                try:
                    await peer.request("$publish", {"destination": "queue/marks", "text": "mark"})
                except ClientError:
                    continue
                # On this connection, and answered a while before: the answer is written when the
                # handler has returned.
                sure = [each for each in answered if since < each[0] < now - _MARK_S / 2]
                for _, identifier in sure:
                    self.ids[identifier].is_settled = True
                answered[:] = [each for each in answered if each[0] >= now - _MARK_S / 2]

    def _take(self, data: dict[str, Any]) -> None:
        identifier, payload = data["id"], _shortened(data["text"])
        known = self.ids.get(identifier)
        if known is not None and known.payload != payload:
            self.doubled_ids.append(identifier)
        elif known is not None and known.is_settled:
            self.returned.append(identifier)
        if known is None:
            self.ids[identifier] = _Delivered(payload)
        self.payloads.setdefault(payload, set()).add(identifier)

    @property
    def lost(self) -> set[str]:
        return self.acknowledged - self.payloads.keys()

    @property
    def doubled(self) -> int:
        return len(self.doubled_ids) + sum(len(ids) > 1 for ids in self.payloads.values())


def _shortened(payload: str) -> str:
    return payload if len(payload) < 1000 else f"{payload[:40]}, {len(payload)} characters"


class Chaos:
    """The faults; each method returns when another replica leads."""

    def __init__(self, cluster: ReplicaCluster, traffic: Traffic, chance: random.Random) -> None:
        self.cluster = cluster
        self.traffic = traffic
        self.slowest_s: dict[str, float] = {}
        self._chance = chance
        self._large = 0

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
        led = self.takeovers
        began = asyncio.get_running_loop().time()
        fault: Callable[[ReplicaProcess], Awaitable[None]] = getattr(self, name)
        await fault(leader)
        assert self.takeovers > led
        took_s = max(each.led_at for each in self.cluster.replicas) - began
        self.slowest_s[name] = max(took_s, self.slowest_s.get(name, 0.0))
        known = len(self.traffic.acknowledged)
        await _until(lambda: len(self.traffic.acknowledged) > known)

    @property
    def takeovers(self) -> int:
        return sum(each.times_led for each in self.cluster.replicas)


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
)


async def run(
    pool: ClusterPool,
    folder: Path,
    rounds: int,
    seed: int,
    report: Callable[[str], None],
    *,
    planted: str = "",
) -> ChaosResult:
    """Rounds of faults: all of them in turn, each turn from another one on. `planted` names a fault
    of the hubs that the result has to show."""
    chance = random.Random(seed)
    cluster = ReplicaCluster(pool.take(), folder, settings=_SETTINGS)
    if planted:
        for replica in cluster.replicas:
            replica.program = ("tests.replication.planted", planted)
    balancer = Balancer(cluster)
    await balancer.start()
    try:
        await cluster.start()
        traffic = Traffic(balancer.ports)
        chaos = Chaos(cluster, traffic, chance)
        async with AsyncExitStack() as stack:
            consumers = [asyncio.ensure_future(traffic.consume(queue)) for queue in _CONSUMED]
            producers = []
            for kind in PARTIES:
                for number in range(AT_ONCE):
                    party = await stack.enter_async_context(kind(balancer.ports))
                    producers.append(asyncio.ensure_future(traffic.produce(party, number)))
            for number in range(rounds):
                name = FAULTS[(number + seed - 1) % len(FAULTS)]
                async with asyncio.timeout(_ROUND_S):
                    await chaos.round(name)
                report(f"{number + 1} {name}: {len(traffic.acknowledged)} acknowledged")
            traffic.running = False
            # Requests that were lost with a leader end when their time is over.
            arrive_s = _PLANTED_S if planted else _ARRIVE_S
            await asyncio.wait(producers, timeout=arrive_s)
            consumers += [asyncio.ensure_future(traffic.consume(queue)) for queue in _KEPT]
            with suppress(TimeoutError):  # what is missing is in the result
                await _until(lambda: not traffic.lost, within_s=arrive_s)
            for each in (*producers, *consumers):
                each.cancel()
            for ended in await asyncio.gather(*producers, *consumers, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended
        for replica in cluster.replicas:
            await replica.end(signal.SIGKILL)
        return ChaosResult(
            takeovers=chaos.takeovers,
            acknowledged=len(traffic.acknowledged),
            lost=len(traffic.lost),
            returned=len(traffic.returned),
            doubled=traffic.doubled,
            attempted=traffic.attempted,
            slowest_s=chaos.slowest_s,
            digests={} if planted else await cluster.digests(),
        )
    finally:
        await balancer.close()
        await cluster.close()


async def _until(condition: Callable[[], bool], *, within_s: float = _ROUND_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def _sum(results: list[ChaosResult]) -> ChaosResult:
    first = results[0]
    for each in results[1:]:
        for name in ("takeovers", "acknowledged", "lost", "returned", "doubled", "attempted"):
            setattr(first, name, getattr(first, name) + getattr(each, name))
        for name, slowest_s in each.slowest_s.items():
            first.slowest_s[name] = max(slowest_s, first.slowest_s.get(name, 0.0))
    return first


def main() -> int:
    """0 if nothing was lost, returned or doubled, and all stores are equal."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    pool = ClusterPool()
    try:
        with tempfile.TemporaryDirectory(prefix="crosswire-chaos-") as folder:
            result = asyncio.run(
                run(
                    pool,
                    Path(folder),
                    options.rounds,
                    options.seed,
                    lambda text: print(text, flush=True),
                )
            )
    finally:
        pool.close()
    for name, slowest_s in sorted(result.slowest_s.items()):
        print(f"{name}: the slowest takeover took {slowest_s:.1f} s")
    are_equal = len(set(result.digests.values())) == 1
    print(f"stores are {'equal' if are_equal else 'different'}; {result.attempted} attempted")
    if options.results is not None:
        with options.results.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")
        lines = options.results.read_bytes().splitlines()
        result = _sum([msgspec.json.decode(line, type=ChaosResult) for line in lines])
    print(result)
    return 0 if are_equal and not (result.lost or result.returned or result.doubled) else 1


if __name__ == "__main__":
    sys.exit(main())
