"""Replicas of a hub in the simulation: real servers over the model of a replicated log.

The log is a machine of its own on the simulated network. What its servers do wrong is decided by
the model (`commitlog.model`), when they answer by the world: each attempt takes virtual time, and a
replica that is cut off from the log waits for its answer in vain.
"""

from __future__ import annotations

import asyncio
from typing import Final

from crosswire.commitlog.body import read_body
from crosswire.commitlog.contract import ReplicatedLog
from crosswire.commitlog.model import ModelEngine, ModelServers, _ServerHistory
from crosswire.commitlog.records import (
    Genesis,
    GroupAssembler,
    LogRecord,
    RecordChain,
    RecordKind,
    RecordPosition,
    decode_record,
)
from crosswire.commitlog.replicated import EngineAnswer, EngineLog, FetchedRecords
from crosswire.config import Config, ReplicationSettings
from crosswire.errors import ConnectFailed, LogUnavailable, StoreDamaged, StoreError
from crosswire.gateways.context import Clock
from crosswire.server.server import Server
from crosswire.store.keys import LOCAL
from crosswire.store.memory import MemoryReplica, MemoryStore
from crosswire.store.replica import LOG_POSITION
from crosswire.store.rocks_replica import record_content
from crosswire.testing.simulation.durable import DurableMessages
from crosswire.testing.simulation.hub import HubMachine, QuietWatchdog
from crosswire.testing.simulation.world import SimulatedProcess, World

__all__ = ["LOG_HOST", "ReplicaMachine", "ReplicatedHub", "SimulatedServers"]

LOG_HOST: Final = "10.0.9.1"
TAKEOVER_S: Final = 2.0
_RETAIN_S: Final = 8.0
_UNANSWERED_S: Final = 2.0
_LOG_ID: Final = b"simulated log id"
_AGAIN_S: Final = 1.0
_CLOCKS_S: Final = (0.0, 1.5, -1.5)
"""How far the clocks of replicas are off: more than the time between two records."""
_COPIES: Final = 2
_SILENT_S: Final = 3 * TAKEOVER_S + 1.0
"""A leader whose records the log has not confirmed for this long serves nobody any more."""


class SimulatedServers(ModelServers):
    """The servers of the log, and everything that was ever durable on them.

    `archive` has every record that had its copies: no failover may take one of them away, and none
    is removed here when the log is trimmed.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        super().__init__()
        self.random = world.random
        self.archive: list[LogRecord] = []
        self.durable = DurableMessages()
        self.answer_s = (0.0002, 0.003)
        """The least and the greatest time of an attempt."""

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self._world.now

    @now_s.setter
    def now_s(self, _value: float) -> None:
        """Time is the world's."""

    async def pause(self, seconds: float) -> None:
        """An attempt travels, or a server works on it."""
        await asyncio.sleep(seconds + self.random.uniform(*self.answer_s))

    def make(self, genesis: LogRecord) -> None:
        """Raises LogForeign if there is a log already."""
        super().make(genesis)
        self._keep_copied()

    def copy_all(self) -> None:
        """Copies have all that the primary has."""
        super().copy_all()
        self._keep_copied()

    def _keep_copied(self) -> None:
        history = self.history
        for each in history.records:
            if len(self.archive) < each.number <= history.copied:
                self._keep(decode_record(each.data, number=each.number))

    def _keep(self, record: LogRecord) -> None:
        """What a log of one leader at a time looks like."""
        if self.archive:
            last = self.archive[-1]
            if record.predecessor != last.digest:
                self._world.violate(f"record {record.number} does not stand on the one before it")
            if record.kind is not RecordKind.TAKEOVER and record.term != last.term:
                self._world.violate(
                    f"record {record.number} is of term {record.term}, after term {last.term}"
                )
            if record.time_us < last.time_us:
                self._world.violate(f"the time of record {record.number} runs back")
        self.archive.append(record)
        self.durable.note(bytes(record.body))

    def create(self) -> None:
        """Make the log, with the content of an empty hub."""
        at_us = int(self._world.machine(LOG_HOST).wall() * 1e6)
        chain = RecordChain(_LOG_ID, b"simulated writer")
        self.make(chain.genesis(Genesis("n"), at_us))
        for body in record_content(MemoryStore(), 1 << 20, 1 << 20):
            for record in chain.group(body, at_us):
                self.append(record)
        self.append(chain.heartbeat(at_us))
        self.copy_all()


class _SimulatedEngine(ModelEngine):
    """A replica's access to the servers, over the network."""

    def __init__(self, servers: SimulatedServers, world: World, host: str) -> None:
        super().__init__(servers, asyncio.sleep)
        self._world = world
        self._host = host

    def _can_pass(self) -> bool:
        return self._world.network.can_pass(self._host, LOG_HOST) and self.servers.is_reachable

    async def _wait_in_vain(self) -> None:
        if not self._can_pass():
            await asyncio.sleep(self._world.random.uniform(0.0, _UNANSWERED_S))

    def _reach(self) -> _ServerHistory:
        if not self._can_pass():
            raise LogUnavailable("no server of the log can be reached")
        return super()._reach()

    async def offer(self, record: LogRecord) -> EngineAnswer:
        """Try once to append."""
        await self._wait_in_vain()
        return await super().offer(record)

    async def confirm(self, record: LogRecord) -> EngineAnswer:
        """Try once to prove that the head is durable."""
        await self._wait_in_vain()
        return await super().confirm(record)

    async def fetch(self, after: int, limit_bytes: int) -> FetchedRecords:
        """Records as the primary has them, or a stale copy."""
        await self._wait_in_vain()
        return await super().fetch(after, limit_bytes)


class _SimulatedCheckpoints:
    """Copies the rows of another machine's disk."""

    def __init__(self, machine: ReplicaMachine) -> None:
        self._machine = machine
        self._rows: dict[bytes, bytes] = {}

    def fetch(self, address: str, log_id: bytes) -> RecordPosition:
        """Raises ConnectFailed if the machine can't be reached."""
        machine = self._machine
        host = address.removeprefix("http://")
        source = next(each for each in machine.group.replicas if each.host == host)
        if source is machine:
            machine.world.violate(f"{host} fetches a checkpoint from itself")
        if not source.is_up or not machine.world.network.can_pass(machine.host, host):
            raise ConnectFailed(f"{address} can't be reached")
        self._rows = {
            key: value for key, value in source.disk.rows.items() if not LOCAL[0] <= key < LOCAL[1]
        }
        if source.disk.unreadable & self._rows.keys():
            raise StoreDamaged("the checkpoint is damaged")
        machine.world.note(f"{machine.host} fetches a checkpoint from {host}")
        packed = self._rows[LOG_POSITION]
        assert packed.startswith(log_id)
        return RecordPosition(int.from_bytes(packed[16:24]), packed[24:])

    def install(self) -> None:
        """Make them this machine's own."""
        self._machine.disk.replace(self._rows)


class ReplicaMachine(HubMachine):
    """A machine with one of the replicas."""

    def __init__(self, world: World, host: str, group: ReplicatedHub) -> None:
        super().__init__(world, host)
        self.group = group
        self._joined = b""
        """The id of its log, which a data directory has in a file of its own."""

    @property
    def serving(self) -> Server | None:
        """Its server, if it leads and its listeners are open."""
        server = self.server if self.is_up else None
        return server if server is not None and server.is_leading and server.started_at else None

    def config(self) -> Config:
        """As a hub alone, over the log."""
        return super().config_with(
            ReplicationSettings(
                log="postgresql://model",
                name=self.host,
                advertise=f"http://{self.host}",
                takeover_s=TAKEOVER_S,
                retain_s=_RETAIN_S,
            )
        )

    def _make_server(self) -> Server:
        server = Server(
            self.config(),
            clock=Clock(self.machine.wall, self.machine.monotonic),
            watchdog=QuietWatchdog(),
            open_log=self._open_log,
            open_replica=self._open_replica,
            fetcher=lambda _: _SimulatedCheckpoints(self),
            make_encoder=None,
        )
        server.on_role = self._on_role
        return server

    def _on_role(self) -> None:
        server = self.server
        leads = server is not None and server.is_leading
        self.world.note(f"{self.host} {'leads' if leads else 'leads no more'}")
        self.group.on_role()

    def _open_log(self, _config: Config) -> ReplicatedLog:
        return EngineLog(_SimulatedEngine(self.group.log, self.world, self.host))

    def _open_replica(self, config: Config, log_id: bytes) -> MemoryReplica | None:
        self._joined = self._joined or log_id
        if not self._joined:
            return None
        store = MemoryReplica(self.disk, config.store)
        if not store.log_id:
            store.join(self._joined)
        return store

    async def _serve(self, process: SimulatedProcess, server: Server) -> None:
        """A replica that stops with an error ends its process; a supervisor starts it again."""
        await super()._serve(process, server)
        assert server.replica is not None
        error = await server.replica.failed
        if not isinstance(error, StoreError):
            # The log was never damaged, made anew or misused in this world.
            self.world.violate(f"{process.name} stops: {error!r}", error)
        raise error


class ReplicatedHub:
    """Three replicas and their log."""

    def __init__(self, world: World, hosts: list[str]) -> None:
        self.world = world
        self.log = SimulatedServers(world)
        self.replicas = [ReplicaMachine(world, host, self) for host in hosts]
        self.machines: list[HubMachine] = list(self.replicas)
        self.on_role = _ignore
        self._prefixes = {each.host: _Prefix() for each in self.replicas}
        for each, offset_s in zip(self.replicas, _CLOCKS_S, strict=True):
            each.machine.wall_offset_s = offset_s

    @property
    def durable(self) -> DurableMessages:
        """What the log has."""
        return self.log.durable

    @property
    def serving(self) -> Server | None:
        """The leader's server. Where two lead for a while, that of the newer term."""
        found = [each.serving for each in self.replicas]
        leading = [each for each in found if each is not None]
        return max(leading, key=_term, default=None)

    def start(self) -> None:
        """Start all replicas."""
        if not self.log.archive:
            self.log.create()
        for each in self.machines:
            if not each.is_up:
                each.start()

    @property
    def leaders(self) -> int:
        """How many replicas think that they lead: one may not know yet that it was replaced."""
        return sum(each.serving is not None for each in self.replicas)

    def is_steady(self) -> bool:
        """Whether one replica leads, and the log has confirmed something a moment ago."""
        leading = [each for each in self.replicas if each.serving is not None]
        if len(leading) != 1:
            return False
        server, machine = leading[0].serving, leading[0].machine
        assert server is not None and server.replica is not None
        commits = server.replica.commits
        return commits is not None and machine.monotonic() - commits.confirmed_at < 1.0

    def check_prefixes(self) -> None:
        """Every store is what the log's records make, up to its position."""
        for each in self.replicas:
            self._prefixes[each.host].check(self.world, self.log, each)

    def check_terms(self) -> None:
        """A leader without its log stops, and the log keeps what too few replicas have."""
        for each in self.replicas:
            server, process = each.serving, each.process
            if server is None or server.replica is None or process is None:
                continue
            commits = server.replica.commits
            if commits is None or process.paused_until > self.world.now - 1.0:
                continue
            silent_s = each.machine.monotonic() - commits.confirmed_at
            if silent_s > _SILENT_S:
                self.world.violate(f"{each.host} leads, and the log is silent for {silent_s:.1f} s")

    def check_trimmed(self) -> None:
        """What was removed from the log is on the disks of enough replicas."""
        records = self.log.history.records
        removed = records[0].number - 1 if records else 0
        holders = [each.host for each in self.replicas if _synced_record(each) >= removed]
        if len(holders) < _COPIES:
            self.world.violate(f"the log begins after record {removed}, and only {holders} have it")

    def is_equal(self) -> bool:
        """Whether all replicas have everything but the last record, which the next one proves."""
        newest = len(self.log.archive)
        return all(
            each.is_up
            and each.server is not None
            and each.server.replica is not None
            and each.server.replica.store.position.number >= newest - 1
            for each in self.replicas
        )

    def check_end(self) -> None:
        """All replicas have everything, and one of them leads."""
        self.check_prefixes()
        if not self.is_equal():
            positions = [
                f"{each.host} has record"
                f" {int.from_bytes(each.disk.rows.get(LOG_POSITION, b'')[16:24])}"
                for each in self.replicas
            ]
            self.world.violate(
                f"replicas lag, though all faults have ended: the log has"
                f" {len(self.log.archive)}, {', '.join(positions)}"
            )


def _synced_record(replica: ReplicaMachine) -> int:
    """The last record that a loss of power leaves it."""
    return int.from_bytes(replica.disk.synced_rows.get(LOG_POSITION, b"")[16:24])


def _term(server: Server) -> int:
    return 0 if server.replica is None else server.replica.succession.term


def _ignore() -> None:
    """Nobody is interested."""


class _Prefix:
    """What one replica's disk must have."""

    def __init__(self) -> None:
        self._checked = 0
        """The last change of the disk that was compared."""
        self._begin()

    def _begin(self) -> None:
        self._rows: dict[bytes, bytes] = {}
        self._number = 0
        self._assembler = GroupAssembler()

    def check(self, world: World, log: SimulatedServers, replica: ReplicaMachine) -> None:
        """Compare it with the log."""
        rows = replica.disk.rows
        if LOG_POSITION not in rows or replica.disk.changes == self._checked:
            return
        self._checked = replica.disk.changes
        number = int.from_bytes(rows[LOG_POSITION][16:24])
        if number > len(log.archive):
            world.violate(f"{replica.host} has applied record {number}, which is not durable")
            return
        if number < self._number:
            # A power cut: the disk has an older state.
            self._begin()
        for record in log.archive[self._number : number]:
            self._repeat(record)
        self._number = number
        unshared = (LOG_POSITION,)
        found = {
            key: value
            for key, value in rows.items()
            if key not in unshared and not LOCAL[0] <= key < LOCAL[1]
        }
        if found != self._rows:
            differing = [
                key
                for key in sorted(found.keys() | self._rows.keys())
                if found.get(key) != self._rows.get(key)
            ]
            world.violate(
                f"{replica.host} is no prefix of the log: at record {number} it differs in"
                f" {len(differing)} keys, such as {differing[0]!r}"
            )

    def _repeat(self, record: LogRecord) -> None:
        body = self._assembler.add(record)
        if body is None:
            return
        for kind, first, second in read_body(body):
            if kind == 1:
                self._rows[first] = second
            elif kind == 2:
                self._rows.pop(first, None)
            else:
                for key in [each for each in self._rows if first <= each < second]:
                    del self._rows[key]
