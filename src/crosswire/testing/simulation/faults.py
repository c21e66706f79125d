"""The faults that a world suffers: what, when, and how it ends.

A plan is a list of faults with times, drawn from the seed. It can be cut down: a failing seed is
run again without some of them, until none can be left out.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

import msgspec

from crosswire.testing.simulation.hub import HubMachine
from crosswire.testing.simulation.observations import Observations
from crosswire.testing.simulation.world import World

_ALL: Final = 1 << 30
_PAIRED: Final = frozenset({"write error", "sync error", "disk full", "slow disk"})
"""A hub whose disk fails often ends while it does."""

__all__ = ["KINDS", "Fault", "FaultPlan", "Injector", "draw_plan"]


class Fault(msgspec.Struct, frozen=True):
    """One fault: its kind, when it begins, how long it lasts, and how hard it is (0 to 1)."""

    kind: str
    at: float
    lasts_s: float
    strength: float

    def __str__(self) -> str:
        return (
            f"{self.at:8.3f} s  {self.kind} for {self.lasts_s:.3f} s (strength {self.strength:.2f})"
        )


FaultPlan = list[Fault]


class Injector:
    """Applies faults to a world with one hub."""

    def __init__(self, world: World, hub: HubMachine, observations: Observations) -> None:
        self._world = world
        self._hub = hub
        self._observations = observations
        self.counts: dict[str, int] = {}
        self.clients: list[str] = []
        """Hosts of clients."""

    def plan(self, faults: FaultPlan) -> None:
        """Have them happen at their times."""
        for fault in faults:
            self._world.at(fault.at, lambda fault=fault: self._inject(fault))  # type: ignore[misc]

    def _inject(self, fault: Fault) -> None:
        self._world.note(f"fault: {fault.kind} for {fault.lasts_s:.3f} s")
        self.counts[fault.kind] = self.counts.get(fault.kind, 0) + 1
        KINDS[fault.kind](self, fault)

    def _later(self, fault: Fault, action: Callable[[], None]) -> None:
        self._world.at(fault.at + fault.lasts_s, action)

    # The hub's process and machine.

    def kill(self, fault: Fault) -> None:
        """SIGKILL; it is started again after a while."""
        if self._hub.is_up:
            self._observations.disturbed("hub")
            self._observations.disturbed("crash")
            self._hub.kill()
            self._later(fault, self._start)

    def power_cut(self, fault: Fault) -> None:
        """The machine loses power."""
        if not self._hub.has_power:
            return
        self._observations.disturbed("hub")
        self._observations.disturbed("crash")
        self._hub.cut_power()
        self._later(fault, self._power_on)

    def _power_on(self) -> None:
        self._hub.restore_power()
        self._start()

    def _start(self) -> None:
        if not self._hub.is_up and self._hub.has_power:
            self._observations.disturbed("hub")
            self._hub.start()

    def restart(self, fault: Fault) -> None:
        """SIGTERM, and a start when it has stopped."""
        if self._hub.is_up:
            self._observations.disturbed("hub")
            self._hub.stop()
            self._later(fault, self._start_stopped)

    def _start_stopped(self) -> None:
        # Draining may take longer than the fault lasts.
        if self._hub.is_up and self._hub.is_stopping:
            self._world.at(self._world.now + 0.5, self._start_stopped)
        else:
            self._start()

    def pause(self, fault: Fault) -> None:
        """SIGSTOP: the process does not run for a while, and time goes on."""
        if self._hub.process is not None and self._hub.is_up:
            self._observations.disturbed("hub")
            self._hub.process.paused_until = self._world.now + fault.lasts_s
            self._later(fault, lambda: self._observations.disturbed("hub"))

    def clock_jump(self, fault: Fault) -> None:
        """The wall clock is set, forward or back, and later set right."""
        machine = self._hub.machine
        jump_s = (fault.strength - 0.5) * 7200
        machine.wall_offset_s += jump_s

        def set_right() -> None:
            machine.wall_offset_s -= jump_s

        self._later(fault, set_right)

    # The disk.

    def disk_full(self, fault: Fault) -> None:
        """No room for a while."""
        disk = self._hub.disk
        self._observations.disturbed("hub")
        disk.is_full = True

        def freed() -> None:
            self._observations.disturbed("hub")
            disk.is_full = False

        self._later(fault, freed)

    def write_error(self, fault: Fault) -> None:
        """Some writes fail, or all of them for a while."""
        disk = self._hub.disk
        self._observations.disturbed("hub")
        disk.failing_writes = 1 + int(fault.strength * 6) if fault.strength < 0.5 else _ALL

        def recovered() -> None:
            self._observations.disturbed("hub")
            disk.failing_writes = 0

        self._later(fault, recovered)

    def sync_error(self, fault: Fault) -> None:
        """Some syncs fail, or all of them for a while."""
        disk = self._hub.disk
        self._observations.disturbed("hub")
        disk.failing_syncs = 1 + int(fault.strength * 4) if fault.strength < 0.5 else _ALL

        def recovered() -> None:
            self._observations.disturbed("hub")
            disk.failing_syncs = 0

        self._later(fault, recovered)

    def slow_disk(self, fault: Fault) -> None:
        """Syncs take long."""
        disk = self._hub.disk
        before = disk.sync_s
        self._observations.disturbed("hub")
        disk.sync_s = (0.05, 0.05 + fault.strength)

        def recovered() -> None:
            self._observations.disturbed("hub")
            disk.sync_s = before

        self._later(fault, recovered)

    # The network.

    def cut(self, fault: Fault) -> None:
        """Some connections are reset."""
        self._world.network.cut_connections(self._hub.host, at_most=1 + int(fault.strength * 5))

    def partition(self, fault: Fault) -> None:
        """One client's host can't reach the hub."""
        if self.clients:
            host = self.clients[int(fault.strength * len(self.clients)) % len(self.clients)]
            self._observations.disturbed("network")
            self._world.network.partition(self._hub.host, host)

            def healed() -> None:
                self._observations.disturbed("network")
                self._world.network.heal()

            self._later(fault, healed)

    def slow_network(self, fault: Fault) -> None:
        """Delays grow, and reads return little."""
        network = self._world.network
        self._observations.disturbed("network")
        before = network.delay_s, network.most_bytes
        network.delay_s = (0.001, 0.02 + 0.1 * fault.strength)
        network.most_bytes = 1 + int(200 * fault.strength)

        def recovered() -> None:
            self._observations.disturbed("network")
            network.delay_s, network.most_bytes = before

        self._later(fault, recovered)


KINDS: Final[dict[str, Callable[[Injector, Fault], None]]] = {
    "kill": Injector.kill,
    "power cut": Injector.power_cut,
    "restart": Injector.restart,
    "pause": Injector.pause,
    "clock jump": Injector.clock_jump,
    "disk full": Injector.disk_full,
    "write error": Injector.write_error,
    "sync error": Injector.sync_error,
    "slow disk": Injector.slow_disk,
    "cut connections": Injector.cut,
    "partition": Injector.partition,
    "slow network": Injector.slow_network,
}


def draw_plan(random: Random, duration_s: float, most: int) -> FaultPlan:
    """Some faults within a time; which kinds are frequent differs from seed to seed."""
    kinds = random.sample(list(KINDS), random.randint(1, len(KINDS)))
    faults = [
        Fault(
            random.choice(kinds),
            # More of them early, while producers send.
            random.triangular(0.5, duration_s, 0.5),
            min(random.expovariate(1.0), 10.0),
            random.random(),
        )
        for _ in range(random.randint(0, most))
    ]
    for fault in list(faults):
        if fault.kind in _PAIRED and random.random() < 0.5:
            at = fault.at + random.uniform(0.0, min(fault.lasts_s, 1.0))
            end = random.choice(("power cut", "kill"))
            faults.append(Fault(end, at, random.uniform(0.1, 2.0), 0.0))
    return sorted(faults, key=lambda fault: fault.at)
