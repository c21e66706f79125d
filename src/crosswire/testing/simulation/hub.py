"""A hub in the simulation: the real server on a simulated disk, network and clock."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

from crosswire.commitlog.contract import CommitLog
from crosswire.commitlog.local import LocalLog, Sync
from crosswire.config import Config, LakeSettings, ReplicationSettings
from crosswire.errors import LogError, StoreError
from crosswire.gateways.context import Clock
from crosswire.hub.policies import QueuePolicy, TopicPolicy
from crosswire.listeners import PLAIN_LISTENERS
from crosswire.server.server import Server
from crosswire.server.watchdog import Watchdog
from crosswire.store.contract import Store, StoreLimits
from crosswire.testing.simulation.disk import SimulatedDisk, SimulatedStore, VirtualSyncer
from crosswire.testing.simulation.durable import DurableMessages
from crosswire.testing.simulation.files import SimulatedFiles
from crosswire.testing.simulation.world import Machine, SimulatedProcess, World

__all__ = ["HubGroup", "HubMachine", "LocalHub", "QuietWatchdog"]

_FIRST_PORT: Final = 5000


class QuietWatchdog(Watchdog):
    """Does not start a thread: a simulated process is never blocked."""

    def start(self) -> None:
        """No thread."""

    def stop(self) -> None:
        """Nothing to end."""


class HubMachine:
    """A machine with a disk, on which a hub is started, killed and started again."""

    def __init__(self, world: World, host: str) -> None:
        self.world = world
        self.host = host
        self.machine: Machine = world.machine(host)
        self.disk = SimulatedDisk(world.random)
        self.server: Server | None = None
        self.process: SimulatedProcess | None = None
        self.starts = 0
        self.is_stopping = False
        self.is_ready = False
        self.has_power = True
        self.queues: dict[str, QueuePolicy] = {}
        """Policies of queues, by name."""
        self.topics: dict[str, TopicPolicy] = {}
        self.folder: Path | None = None
        """Where its lake is, on a real file system; without it, there is none."""
        self.files: SimulatedFiles | None = None
        """What of that folder a power cut loses; nothing without it."""
        self.ports = {
            name: _FIRST_PORT + index
            for index, name in enumerate(each for each in PLAIN_LISTENERS if each != "http")
        }

    @property
    def is_up(self) -> bool:
        """Whether a process runs; its listeners may not be open yet."""
        return self.process is not None and self.process.is_running

    @property
    def serving(self) -> Server | None:
        """Its server, if listeners are open."""
        return self.server if self.is_up and self.is_ready else None

    def config(self) -> Config:
        """All five protocols, and what the simulation can't have switched off."""
        return self.config_with(ReplicationSettings())

    def config_with(self, replication: ReplicationSettings) -> Config:
        """The same, with this log."""
        listen = {name: f"{self.host}:{port}" for name, port in self.ports.items()}
        return Config(
            data="/simulated" if self.folder is None else str(self.folder),
            listen={**listen, "http": "off"},
            insecure=True,
            drain_s=1.0,
            queues=self.queues,
            topics=self.topics,
            store=StoreLimits(patience_s=0, spare_bytes=1),
            lake=LakeSettings(messages=False, ledger=False)
            if self.folder is None
            else LakeSettings(seal_s=1.0),
            replication=replication,
        )

    def start(self) -> None:
        """Start a hub; it may fail, like any process, if the disk does."""
        self.starts += 1
        self.is_stopping = self.is_ready = False
        self.process = process = self.world.process(f"hub-{self.host}.{self.starts}", self.host)
        self.world.note(f"{process.name} starts")
        process.start(self._run(process))

    def _make_server(self) -> Server:
        return Server(
            self.config(),
            clock=Clock(self.machine.wall, self.machine.monotonic),
            watchdog=QuietWatchdog(),
            open_store=self._open_store,
            make_log=self._make_log,
            make_encoder=None,
        )

    async def _run(self, process: SimulatedProcess) -> None:
        """A process that fails with a clear error ends; a supervisor starts it again."""
        server = self.server = self._make_server()
        try:
            await self._serve(process, server)
        except (StoreError, LogError) as error:
            self.world.note(f"{process.name} ends: {error}")
            self.world.at(self.world.now, lambda: self.world.kill(process))
            self.world.at(self.world.now + 1.0, self._start_again)

    async def _serve(self, process: SimulatedProcess, server: Server) -> None:
        """Start, and whatever has to be awaited then. Raises StoreError, LogError."""
        await server.start()
        if self.process is process:
            self.is_ready = True
            if self.is_stopping:
                process.start(self._stop(process, server))

    def _start_again(self) -> None:
        if not self.is_up and self.has_power:
            self.start()

    def _open_store(self, config: Config) -> Store:
        return SimulatedStore(self.disk, config.store)

    def _make_log(self, store: Store) -> CommitLog:
        def make_syncer(sync: Sync, _patience_s: float) -> VirtualSyncer:
            return VirtualSyncer(sync, self.disk, self.world.random)

        return LocalLog(store, 0.0, syncer=make_syncer)

    def stop(self) -> None:
        """Send SIGTERM. A hub that is already stopping then stops at once."""
        if self.process is not None and self.server is not None and self.is_up:
            self.world.note(f"{self.process.name} is asked to stop")
            if self.is_stopping:
                self.server.hurry()
                return
            self.is_stopping = True
            # During the start it is what `serve` does next, as soon as it has started.
            if self.is_ready:
                self.process.start(self._stop(self.process, self.server))

    async def _stop(self, process: SimulatedProcess, server: Server) -> None:
        try:
            await server.stop()
            self.world.note(f"{process.name} has stopped")
        except (StoreError, LogError) as error:
            self.world.note(f"{process.name} has stopped: {error}")
        # Not in its own turn: the loop must not end under the feet of what it runs.
        self.world.at(self.world.now, lambda: self.world.kill(process))

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None and self.is_up:
            self.world.note(f"{self.process.name} is killed")
            self.world.kill(self.process)

    def cut_power(self) -> None:
        """The machine stops; what was not synced may be lost."""
        self.world.note(f"{self.host} loses power")
        self.has_power = False
        self.world.cut_power(self.host)
        self.disk.cut_power()
        if self.files is not None:
            self.files.cut_power()

    def restore_power(self) -> None:
        """The machine is on again; `start` starts the hub."""
        self.world.note(f"{self.host} has power again")
        self.has_power = True
        self.world.restore_power(self.host)


class HubGroup(Protocol):
    """The hub that programs use: one machine, or replicas on several."""

    machines: list[HubMachine]

    @property
    def durable(self) -> DurableMessages:
        """What would survive a loss of power now."""

    @property
    def serving(self) -> Server | None:
        """The server that programs are connected to; None if there is none now."""

    def start(self) -> None:
        """Start what does not run."""


class LocalHub:
    """A hub alone."""

    def __init__(self, world: World, host: str) -> None:
        self.machines = [HubMachine(world, host)]

    @property
    def durable(self) -> DurableMessages:
        """What the disk has."""
        return self.machines[0].disk.durable

    @property
    def serving(self) -> Server | None:
        """Its server, if listeners are open."""
        return self.machines[0].serving

    def start(self) -> None:
        """Start it, if it does not run."""
        if not self.machines[0].is_up:
            self.machines[0].start()
