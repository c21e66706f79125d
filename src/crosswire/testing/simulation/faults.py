"""The faults that a world suffers: what, when, and how it ends.

A plan is a list of faults with times, drawn from the seed. It can be cut down: a failing seed is
run again without some of them, until none can be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

import msgspec

from crosswire.commitlog.model import ModelFault
from crosswire.hub.policies import Retry
from crosswire.testing.simulation.disturbances import held
from crosswire.testing.simulation.hub import HubGroup, HubMachine
from crosswire.testing.simulation.network import SlowReads
from crosswire.testing.simulation.observations import Observations
from crosswire.testing.simulation.programs import ProgramHost
from crosswire.testing.simulation.replicas import LOG_HOST, ReplicatedHub, SimulatedServers
from crosswire.testing.simulation.world import World

_ALL: Final = 1 << 30
_LEADERS_PART: Final = 7
"""Of ten faults of replicas, how many are the leader's."""
_WINDOWS: Final = (1, 6, 40, 1024)
_WINDOW_BYTES: Final = (1000, 20_000, 1 << 24)
_DELAYS_S: Final = (0.05, 0.1, 0.2)
_LONG: Final = frozenset({"log cut off", "log outage", "log errors", "stale log", "unsafe log"})
"""These end a term only if they last longer than a takeover takes."""
_LATE: Final = 0.15
_MOST_KINDS: Final = 6
_PAIRED: Final = frozenset({"write error", "sync error", "disk full", "slow disk"})
"""A hub whose disk fails often ends while it does."""

__all__ = [
    "KINDS",
    "LOCAL_KINDS",
    "REPLICA_KINDS",
    "Fault",
    "FaultPlan",
    "Injector",
    "draw_plan",
]


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
    """Applies faults to a world with one hub, alone or replicated, and its programs."""

    def __init__(
        self,
        world: World,
        hub: HubGroup,
        observations: Observations,
        programs: dict[str, ProgramHost],
    ) -> None:
        self._world = world
        self._hub = hub
        self._observations = observations
        self._programs = programs
        """By name; those that can be ended and started again."""
        self.counts: dict[str, int] = {}

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

    def _machine(self, fault: Fault) -> HubMachine:
        """The one that it happens to: mostly that of the leader, if there are several."""
        machines = self._hub.machines
        serving = [each for each in machines if each.serving is not None]
        chance = int(fault.strength * 1000)
        if serving and chance % 10 < _LEADERS_PART:
            return serving[-1]
        return machines[chance % len(machines)]

    # The hub's process and machine.

    def kill(self, fault: Fault) -> None:
        """SIGKILL; it is started again after a while."""
        machine = self._machine(fault)
        if machine.is_up:
            self._crashed()
            machine.kill()
            self._later(fault, lambda: self._start(machine))

    def power_cut(self, fault: Fault) -> None:
        """The machine loses power."""
        machine = self._machine(fault)
        if machine.has_power:
            self._lost_power(machine)
            self._later(fault, lambda: self._power_on(machine))

    def _lost_power(self, machine: HubMachine) -> None:
        self._crashed()
        # Clients notice when they send, or by probes.
        self._observations.disturbed("network")
        machine.cut_power()

    def _crashed(self) -> None:
        self._observations.disturbed("hub")
        self._observations.disturbed("crash")

    def _power_on(self, machine: HubMachine) -> None:
        self._observations.disturbed("network")
        machine.restore_power()
        self._start(machine)

    def _start(self, machine: HubMachine) -> None:
        if not machine.is_up and machine.has_power:
            self._observations.disturbed("hub")
            machine.start()

    def restart(self, fault: Fault) -> None:
        """SIGTERM, and a start when it has stopped."""
        machine = self._machine(fault)
        if machine.is_up:
            self._observations.disturbed("hub")
            machine.stop()
            self._later(fault, lambda: self._start_stopped(machine))

    def _start_stopped(self, machine: HubMachine) -> None:
        # Draining may take longer than the fault lasts.
        if machine.is_up and machine.is_stopping:
            self._world.at(self._world.now + 0.5, lambda: self._start_stopped(machine))
        else:
            self._start(machine)

    def reconfigure(self, fault: Fault) -> None:
        """A restart, or a reload, with a configuration of yesterday or tomorrow."""
        chance = int(fault.strength * 1000)
        changes = {
            "window_messages": _WINDOWS[chance % len(_WINDOWS)],
            "window_bytes": _WINDOW_BYTES[chance % len(_WINDOW_BYTES)],
            "retry": Retry(first_delay_s=_DELAYS_S[chance % len(_DELAYS_S)]),
        }
        for machine in self._hub.machines:
            machine.queues = {
                name: msgspec.structs.replace(policy, **changes)
                for name, policy in machine.queues.items()
            }
        machine, server = self._machine(fault), self._hub.serving
        if fault.strength < 0.5 and server is not None and machine.serving is server:
            process = machine.process
            assert process is not None
            config = msgspec.structs.replace(server.config, queues=machine.queues)
            process.loop.call_soon(server.reload, config)
        else:
            self.restart(fault)

    def damage(self, fault: Fault) -> None:
        """The machine loses power; when it is on again, some of what was on its disk is not, or
        can't be read."""
        # Of replicas always the same one: where all are damaged, nobody can lead.
        machine = self._hub.machines[-1]
        if machine.has_power:
            self._lost_power(machine)
            self._observations.damages += 1
            damaged = machine.disk.damage(int(fault.strength * 4), strength=fault.strength)
            if len(self._hub.machines) == 1:
                self._observations.damaged(damaged)
            self._later(fault, lambda: self._power_on(machine))

    def pause(self, fault: Fault) -> None:
        """SIGSTOP: the process does not run for a while, and time goes on."""
        process = self._machine(fault).process
        if process is not None and process.is_running:
            self._stood_still()
            process.paused_until = self._world.now + fault.lasts_s
            self._later(fault, self._stood_still)

    def _stood_still(self) -> None:
        self._observations.disturbed("hub")
        self._observations.disturbed("still")

    def clock_jump(self, fault: Fault) -> None:
        """The wall clock is set, forward or back, and later set right."""
        machine = self._machine(fault).machine
        jump_s = (fault.strength - 0.5) * 7200
        machine.wall_offset_s += jump_s

        def set_right() -> None:
            machine.wall_offset_s -= jump_s

        self._later(fault, set_right)

    # Programs.

    def end_program(self, fault: Fault) -> None:
        """A program is killed, and started again."""
        program = self._ending_program(fault)
        if program is not None:
            program.kill()
            self._later(fault, program.start)

    def _ending_program(self, fault: Fault) -> ProgramHost | None:
        program = self._program(fault)
        if program is None or not program.is_up:
            return None
        self._observations.disturbed(program.name)
        if program.is_held:
            self._observations.disturbed(held(program.name))
        return program

    def half_open(self, fault: Fault) -> None:
        """A program's machine loses power. Its connections are half open: the hub finds out when it
        sends, or by probes."""
        program = self._ending_program(fault)
        if program is None:
            return
        self._observations.disturbed("network")
        program.cut_power()

        def power_on() -> None:
            self._observations.disturbed("network")
            self._observations.disturbed(program.name)
            program.restore_power()

        self._later(fault, power_on)

    def pause_program(self, fault: Fault) -> None:
        """A program does not run for a while: it reads nothing, and settles nothing."""
        program = self._program(fault)
        if program is not None and program.is_up:
            self._observations.disturbed("network")
            program.pause(fault.lasts_s)
            self._later(fault, lambda: self._observations.disturbed("network"))

    def slow_reader(self, fault: Fault) -> None:
        """A program's machine reads a few bytes at a time, and what is sent to it piles up."""
        program = self._program(fault)
        if program is None:
            return
        slow = self._world.network.slow_readers
        self._observations.disturbed("network")
        slow[program.host] = SlowReads(1 + int(400 * fault.strength), 0.02)

        def recovered() -> None:
            self._observations.disturbed("network")
            slow.pop(program.host, None)

        self._later(fault, recovered)

    def _program(self, fault: Fault) -> ProgramHost | None:
        names = list(self._programs)
        return self._programs[names[int(fault.strength * 997) % len(names)]] if names else None

    # The disk.

    def disk_full(self, fault: Fault) -> None:
        """No room for a while."""
        disk = self._machine(fault).disk
        self._observations.disturbed("hub")
        disk.is_full = True

        def freed() -> None:
            self._observations.disturbed("hub")
            disk.is_full = False

        self._later(fault, freed)

    def write_error(self, fault: Fault) -> None:
        """Some writes fail, or all of them for a while."""
        disk = self._machine(fault).disk
        self._observations.disturbed("hub")
        disk.failing_writes = 1 + int(fault.strength * 6) if fault.strength < 0.5 else _ALL

        def recovered() -> None:
            self._observations.disturbed("hub")
            disk.failing_writes = 0

        self._later(fault, recovered)

    def sync_error(self, fault: Fault) -> None:
        """Some syncs fail, or all of them for a while."""
        disk = self._machine(fault).disk
        self._observations.disturbed("hub")
        disk.failing_syncs = 1 + int(fault.strength * 4) if fault.strength < 0.5 else _ALL
        # Before a disk reports an error it may try for long: more is collected meanwhile.
        disk.is_slow_to_fail = int(fault.strength * 1000) % 2 == 0

        def recovered() -> None:
            self._observations.disturbed("hub")
            disk.failing_syncs = 0

        self._later(fault, recovered)

    def slow_disk(self, fault: Fault) -> None:
        """Syncs take long."""
        disk = self._machine(fault).disk
        before = disk.sync_s
        self._observations.disturbed("hub")
        disk.sync_s = (0.05, 0.05 + fault.strength)

        def recovered() -> None:
            self._observations.disturbed("hub")
            disk.sync_s = before

        self._later(fault, recovered)

    # The network.

    def cut(self, fault: Fault) -> None:
        """Some connections are reset, or all of them."""
        host = self._machine(fault).host
        self._observations.disturbed("cut")
        at_most = 1 + int(fault.strength * 12) if fault.strength < 0.5 else _ALL
        self._world.network.cut_connections(host, at_most=at_most)

    def partition(self, fault: Fault) -> None:
        """One program's machine can't reach the hub."""
        program = self._program(fault)
        if program is not None:
            self._cut_off([(each.host, program.host) for each in self._hub.machines], fault)

    def _cut_off(self, links: list[tuple[str, str]], fault: Fault) -> None:
        network, seen = self._world.network, self._observations
        seen.disturbed("network")
        for one, other in links:
            network.partition(one, other)

        def healed() -> None:
            seen.disturbed("network")
            for one, other in links:
                network.heal(one, other)

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

    # The replicated log.

    def hand_over(self, _fault: Fault) -> None:
        """An operator has the leader hand over."""
        for machine in self._hub.machines:
            server, process = machine.serving, machine.process
            if server is not None and server.replica is not None and process is not None:
                self._observations.disturbed("hub")
                process.loop.call_soon(server.replica.hand_over)

    def log_cut(self, fault: Fault) -> None:
        """One replica can't reach the log."""
        self._observations.disturbed("hub")
        self._cut_off([(self._machine(fault).host, LOG_HOST)], fault)

    def log_outage(self, fault: Fault) -> None:
        """Nobody can reach it."""
        self._observations.disturbed("hub")
        self._cut_off([(each.host, LOG_HOST) for each in self._hub.machines], fault)

    def log_failover(self, _fault: Fault) -> None:
        """A copy becomes primary: what was not copied is gone."""
        self._observations.disturbed("hub")
        self._log.failover()

    def log_errors(self, fault: Fault) -> None:
        """Answers are lost, attempts come late or not at all, or have no copies."""
        rate = 0.02 + 0.3 * fault.strength
        self._change_rates(
            fault,
            dict.fromkeys(
                (
                    ModelFault.UNANSWERED,
                    ModelFault.NOT_LANDED,
                    ModelFault.LATE,
                    ModelFault.NOT_COPIED,
                ),
                rate / 4,
            ),
        )

    def log_unsafe(self, fault: Fault) -> None:
        """The servers' settings ask for no copies, for some attempts."""
        self._change_rates(fault, {ModelFault.UNSAFE: 0.5 * fault.strength})

    def log_stale(self, fault: Fault) -> None:
        """Readers ask servers that lack the newest records."""
        self._change_rates(fault, {ModelFault.STALE: 0.8 * fault.strength})

    @property
    def _log(self) -> SimulatedServers:
        assert isinstance(self._hub, ReplicatedHub), "only replicas have such a log"
        return self._hub.log

    def _change_rates(self, fault: Fault, rates: dict[ModelFault, float]) -> None:
        log = self._log
        self._observations.disturbed("hub")
        log.rates.update(rates)

        def recovered() -> None:
            self._observations.disturbed("hub")
            for each in rates:
                log.rates.pop(each, None)

        self._later(fault, recovered)


KINDS: Final[dict[str, Callable[[Injector, Fault], None]]] = {
    "kill": Injector.kill,
    "power cut": Injector.power_cut,
    "restart": Injector.restart,
    "other configuration": Injector.reconfigure,
    "damage at rest": Injector.damage,
    "pause": Injector.pause,
    "clock jump": Injector.clock_jump,
    "disk full": Injector.disk_full,
    "write error": Injector.write_error,
    "sync error": Injector.sync_error,
    "slow disk": Injector.slow_disk,
    "cut connections": Injector.cut,
    "partition": Injector.partition,
    "slow network": Injector.slow_network,
    "end of a program": Injector.end_program,
    "half-open": Injector.half_open,
    "slow reader": Injector.slow_reader,
    "pause of a program": Injector.pause_program,
    "hand-over": Injector.hand_over,
    "log cut off": Injector.log_cut,
    "log outage": Injector.log_outage,
    "log failover": Injector.log_failover,
    "log errors": Injector.log_errors,
    "unsafe log": Injector.log_unsafe,
    "stale log": Injector.log_stale,
}
_OF_REPLICAS: Final = (
    "hand-over",
    "log cut off",
    "log outage",
    "log failover",
    "log errors",
    "unsafe log",
    "stale log",
)
LOCAL_KINDS: Final = tuple(each for each in KINDS if each not in _OF_REPLICAS)
"""What happens to a hub alone."""
REPLICA_KINDS: Final = tuple(KINDS)
"""What happens to replicas."""


def draw_plan(
    random: Random, duration_s: float, most: int, kinds: Sequence[str] = LOCAL_KINDS
) -> FaultPlan:
    """Some faults within a time, of a few kinds: which ones differs from seed to seed."""
    frequent = random.sample(kinds, random.randint(1, _MOST_KINDS))
    faults = [
        _draw(random, random.choice(frequent), duration_s) for _ in range(random.randint(0, most))
    ]
    for fault in list(faults):
        if fault.kind in _PAIRED and random.random() < 0.5:
            at = fault.at + random.uniform(0.0, min(fault.lasts_s, 1.0))
            end = random.choice(("power cut", "kill"))
            faults.append(Fault(end, at, random.uniform(0.1, 2.0), random.random()))
    return sorted(faults, key=lambda fault: fault.at)


def _draw(random: Random, kind: str, duration_s: float) -> Fault:
    # More of them early, while producers send; some when only slow consumers are at work.
    at = random.triangular(0.5, duration_s, 0.5)
    if random.random() < _LATE:
        at += duration_s / 2
    average_s = 4.0 if kind in _LONG else 1.0
    return Fault(kind, at, min(random.expovariate(1.0 / average_s), 10.0), random.random())
