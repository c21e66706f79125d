"""One seed: a hub, its clients, a plan of faults, and the judgement."""

from __future__ import annotations

import gc
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any, Final, Protocol

import msgspec

from crosswire.hub.ledger import LedgerRun
from crosswire.hub.policies import QueuePolicy, Retry, TopicPolicy
from crosswire.testing.simulation.audit import Audit
from crosswire.testing.simulation.clients import (
    AVERAGE_BATCH,
    PROTOCOLS,
    PROVIDER,
    SimulatedCaller,
    SimulatedConsumer,
    SimulatedLinkProducer,
    SimulatedProducer,
    SimulatedProvider,
    SimulatedTicker,
)
from crosswire.testing.simulation.faults import (
    LOCAL_KINDS,
    REPLICA_KINDS,
    FaultPlan,
    Injector,
    draw_plan,
)
from crosswire.testing.simulation.files import SimulatedFiles
from crosswire.testing.simulation.hub import HubGroup, HubMachine, LocalHub
from crosswire.testing.simulation.memory_audit import MemoryAudit
from crosswire.testing.simulation.observations import Observations
from crosswire.testing.simulation.operators import (
    STAGED,
    TICKS,
    SimulatedScheduler,
    SimulatedStager,
)
from crosswire.testing.simulation.programs import ProgramHost
from crosswire.testing.simulation.replicas import ReplicatedHub
from crosswire.testing.simulation.world import SimulatedProcess, World
from crosswire.wire.relink.frames import RelinkLimits

__all__ = ["SeedOutcome", "has_lake", "is_replicated", "run_quietly", "run_seed"]

_HOSTS: Final = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
_REPLICATED_EVERY: Final = 3
_LAKES: Final = 0.2
"""How many of the seeds have a lake."""
_WORK_S: Final = (0.01, 0.02, 0.2)
"""What consumers need for some messages: those that need long have several when they leave."""
_WATCH_S: Final = 0.25
_MEMORY_S: Final = 0.5
_LINK_WINDOW: Final = RelinkLimits().window
_COMMITTED_S: Final = 2.0
"""Whatever has changed is in a commit group that is sealed within this time, without faults."""
_RESTARTED_S: Final = 30.0
_FAULTS_S: Final = 15.0
_SETTLED_S: Final = 5.0
"""How long a hub without faults needs to commit and sync what is left, or to get its clients back
after a restart."""
_MAX_ATTEMPTS: Final = 5
_LIVELY_S: Final = 180.0
"""When faults have ended, everything is delivered within this time."""


class FiniteProgram(Protocol):
    """A program that ends."""

    name: str
    is_finished: bool


class SeedOutcome(msgspec.Struct, kw_only=True):
    """What one seed showed."""

    seed: int
    violations: list[str]
    history: list[str]
    plan: FaultPlan
    simulated_s: float
    turns: int
    messages: int
    acknowledged: int
    faults: dict[str, int]
    errors: dict[str, int]


def run_seed(seed: int, plan: FaultPlan | None = None) -> SeedOutcome:
    """Simulate one seed, with its own faults or these. Every third seed has replicas."""
    # What a world leaves is collected at once, when it is over: all of it is in use until then.
    was_collecting = gc.isenabled()
    gc.disable()
    scenario = _Scenario(seed, plan)
    try:
        return scenario.run()
    finally:
        scenario.close()
        if was_collecting:
            gc.enable()


def is_replicated(seed: int) -> bool:
    """Whether the hub of this seed has replicas."""
    return seed % _REPLICATED_EVERY == 0


def has_lake(seed: int) -> bool:
    """Whether the hub of this seed writes a lake: what is drawn first."""
    return _choices(seed).random() < _LAKES


def _choices(seed: int) -> Random:
    return Random(seed ^ 0x5EED)


def run_quietly(seed: int) -> SeedOutcome:
    """Like `run_seed`, without what programs and hubs log about the faults: thousands of lines that
    nobody reads."""
    logging.disable(logging.CRITICAL)
    return run_seed(seed)


class _Scenario:
    """A world with a hub and programs, drawn from a seed."""

    def __init__(self, seed: int, plan: FaultPlan | None) -> None:
        self.seed = seed
        self.world = world = World(seed)
        self.choices = _choices(seed)
        self.replicated: ReplicatedHub | None = None
        self.hub: HubGroup
        if is_replicated(seed):
            self.hub = self.replicated = ReplicatedHub(world, _HOSTS)
            self.replicated.on_role = self._on_role
        else:
            self.hub = LocalHub(world, _HOSTS[0])
        kinds = LOCAL_KINDS if self.replicated is None else REPLICA_KINDS
        # From a source of its own: other faults do not mean other programs.
        drawn = draw_plan(Random(seed ^ 0xFA17), _FAULTS_S, 12, kinds)
        self.plan = drawn if plan is None else plan
        self.seen = Observations(world, self.hub.durable, max_attempts=_MAX_ATTEMPTS)
        self.folder: Path | None = None
        self._files: SimulatedFiles | None = None
        if self.choices.random() < _LAKES:
            self.folder = Path(mkdtemp(prefix="crosswire-simulation-"))
            # The room for a lake depends on that of a store.
            (self.folder / "store").mkdir()
            for machine in self.hub.machines:
                machine.folder = self.folder
            if self.replicated is None:
                # The lake of replicas is on a file system that they share.
                self._files = SimulatedFiles(self.folder, Random(seed ^ 0xF11E))
                self._files.open()
                self.hub.machines[0].files = self._files
        lake = None if self.folder is None else self.folder / "lake"
        self.audit = Audit(world, self.hub, self.seen, max_attempts=_MAX_ATTEMPTS, lake=lake)
        self.memory = MemoryAudit(world)
        self._windows: dict[str, int] = {}
        """Of consumers, by host."""
        self._waiting_step: tuple[LedgerRun, float] | None = None
        """The first step that is in no commit group of a hub alone, and since when."""
        self.hosts: dict[str, ProgramHost] = {}
        """Programs that may end and be started again: those that have nothing to remember."""
        self._programs: list[ProgramHost] = []
        self.finite: list[FiniteProgram] = []
        """Programs that end."""
        self.operators: list[SimulatedStager | SimulatedScheduler] = []
        world.network.on_end = self._on_end
        self.injector = Injector(world, self.hub, self.seen, self.hosts)

    def close(self) -> None:
        """End everything."""
        self.world.close()
        if self._files is not None:
            self._files.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _on_end(self, one: str, other: str) -> None:
        for name in (one, other):
            if not name.startswith("hub-"):
                self.seen.disturbed(name)

    def _on_role(self) -> None:
        self.seen.disturbed("hub")

    # Who is there.

    def _populate(self) -> None:
        choices = self.choices
        policies = {}
        for index in range(3):
            # A short window in memory: most of a queue is on disk, and read from there. Long
            # delays: what was refused waits when the hub ends. Not both: what waits is in memory.
            window_bytes, first_delay_s = choices.choice(
                ((1 << 24, 0.1), (1 << 24, 2.0), (2000, 0.1))
            )
            policies[f"q{index}"] = QueuePolicy(
                window_messages=choices.choice((1024, 1024, 6)),
                window_bytes=window_bytes,
                retry=Retry(first_delay_s=first_delay_s),
            )
        for machine in self.hub.machines:
            machine.queues = policies
            machine.topics = {"n0": TopicPolicy(durable=False)}
        self.hub.start()
        queues = [f"queue/q{index}" for index in range(choices.randint(1, 3))]
        topics = [f"topic/t{index}" for index in range(choices.choice((0, 1, 1)))]
        for index, queue in enumerate(queues):
            refusing = choices.choice((0.0, 0.0, 0.1, 0.5))
            for other in range(choices.randint(1, 2)):
                window = choices.choice((1, 4, 32))
                name, host = f"consumer-{index}-{other}", f"10.0.2.{index}{other}"
                work_s = choices.choice(_WORK_S)
                at_once = choices.choice((1, 1, window, window))
                self._start(
                    SimulatedConsumer, name, host, queue, "", window, refusing, work_s, at_once
                )
        for index, topic in enumerate(topics):
            name, host = f"subscriber-{index}", f"10.0.3.{index}"
            self._start(SimulatedConsumer, name, host, topic, "s", 8, 0.0, choices.choice(_WORK_S))
            if choices.random() < 0.5:
                # When others have published already.
                late_s = choices.uniform(0.5, 8.0)
                self._start(
                    SimulatedConsumer, "latecomer", "10.0.3.9", topic, "l", 8, 0.0, 0.01, 1, late_s
                )
        for index in range(choices.randint(1, 4)):
            where = choices.choice([*queues, *topics] * 2 + ["topic/n0"])
            count = choices.randint(20, 300)
            # While faults happen, and a little less or longer.
            pause_s = choices.uniform(0.3, 1.2) * _FAULTS_S * AVERAGE_BATCH / count
            name, host = f"producer-{index}", f"10.0.1.{index}"
            kind = SimulatedProducer if choices.random() < 0.85 else SimulatedLinkProducer
            self._start(kind, name, host, where, count, pause_s)
        if choices.random() < 0.5:
            self._start(SimulatedProvider, PROVIDER, "10.0.4.1", "service/echo")
            calls = choices.randint(5, 50)
            self._start(SimulatedCaller, "caller", "10.0.4.2", "service/echo", calls, 0.1)

        if choices.random() < 0.3:
            self._operate(SimulatedStager, "stager", "10.0.5.1", choices.randint(2, 8))
            self._start(SimulatedConsumer, "taker", "10.0.5.2", STAGED, "", 16, 0.0, _WORK_S[0])
        if choices.random() < 0.3:
            interval_s = choices.uniform(0.1, 1.0)
            self._operate(SimulatedScheduler, "scheduler", "10.0.5.3", interval_s, _FAULTS_S + 16.0)
            self._start(SimulatedTicker, "ticker", "10.0.5.4", TICKS)

    def _operate(self, kind: type[Any], name: str, host: str, *arguments: Any) -> None:
        process = self.world.process(name, host)
        program = kind(process, self.hub, self.seen)
        self.finite.append(program)
        self.operators.append(program)
        self.world.note(f"{name} runs on {host}: {arguments}")
        process.start(program.run(*arguments))

    def _start(self, kind: type[Any], name: str, host: str, *arguments: Any) -> None:
        # eMQP has no named subscriptions.
        named = kind is SimulatedConsumer and bool(arguments[1])
        protocol = self.choices.choice([each for each in PROTOCOLS if not named or each != "emqp"])
        if kind is SimulatedLinkProducer:
            protocol = "relink"
        self.world.note(f"{name} speaks {protocol} from {host}: {arguments}")
        if kind is SimulatedConsumer:
            # A Relink link has the hub's own window.
            self._windows[host] = _LINK_WINDOW if protocol == "relink" else arguments[2]

        def run(process: SimulatedProcess) -> Coroutine[Any, Any, None]:
            program = kind(process, protocol, self.hub, self.seen)
            if kind in (SimulatedProducer, SimulatedLinkProducer, SimulatedCaller):
                self.finite.append(program)
            running: Coroutine[Any, Any, None] = program.run(*arguments)
            return running

        started = ProgramHost(self.world, name, host, run, is_held=protocol == "relink")
        started.start()
        self._programs.append(started)
        if kind in (SimulatedConsumer, SimulatedProvider, SimulatedTicker):
            self.hosts[name] = started

    # What is looked at all the time.

    def _watch(self) -> None:
        replicated = self.replicated
        if replicated is None:
            self._watch_disk()
        else:
            replicated.check_prefixes()
            replicated.check_terms()
            if not self.seen.damages:
                replicated.check_trimmed()
            if replicated.leaders > 1:
                self.injector.counts["two leaders"] = self.injector.counts.get("two leaders", 0) + 1
            if not replicated.is_steady():
                # Until a leader notices that it was replaced, it hands out what others get, too.
                self.seen.disturbed("hub")
        self.world.at(self.world.now + _WATCH_S, self._watch)

    def _watch_disk(self) -> None:
        """No message is stored twice, and nothing waits for a commit that nobody begins."""
        machine, world = self.hub.machines[0], self.world
        for key in machine.disk.doubled_messages()[:1]:
            world.violate(f"{key} was stored twice")
        server = machine.serving
        if server is not None and server.hub.store.last_error is None:
            self.seen.check_refused(machine.disk.stores)
        elif server is not None and self._is_undisturbed(machine):
            world.violate("the disk is well, and the hub has not tried again to write")
        # What is noted in the ledger first, if it is in no group yet.
        step = None if server is None else next(iter(server.hub.ledger.open_runs), None)
        if step is None or not self._is_undisturbed(machine):
            self._waiting_step = None
        elif self._waiting_step is None or self._waiting_step[0] is not step:
            self._waiting_step = step, world.now
        elif world.now - self._waiting_step[1] > _COMMITTED_S:
            world.violate(
                f"what happened to messages of {step.destination} has waited for a commit since"
                f" {self._waiting_step[1]:.3f} s"
            )

    def _is_undisturbed(self, machine: HubMachine) -> bool:
        """Whether nothing was done to it for longer than a commit, or another attempt, takes."""
        if not machine.disk.is_well:
            return False  # A fault that lasts is noted only when it begins and when it ends.
        process, since = machine.process, self.world.now - _COMMITTED_S
        is_awake = process is not None and process.paused_until < since
        return is_awake and self.seen.is_calm("hub", _COMMITTED_S)

    def _watch_memory(self) -> None:
        server = self.hub.serving
        if server is not None:
            self.memory.check(server)
        self.world.at(self.world.now + _MEMORY_S, self._watch_memory)

    # The course of events.

    def run(self) -> SeedOutcome:
        """Faults, then quiet, then the judgement, then one more loss of power."""
        world = self.world
        self.injector.plan(self.plan)
        world.at(0.0, self._populate)
        world.at(_WATCH_S, self._watch)
        world.at(_MEMORY_S, self._watch_memory)
        world.run(_FAULTS_S + 15.0)
        if not world.violations:
            self._await_delivery()
        if not world.violations:
            world.run(world.now + _SETTLED_S)
            for each in self.operators:
                self.audit.expected.update(each.expected)
            self.audit.check_end()
            server = self.hub.serving
            if server is not None:
                self.memory.check_windows(server, self._windows)
            if self.replicated is not None:
                # Standbys follow within a few polls.
                world.run(world.now + _RESTARTED_S, self.replicated.is_equal)
                self.replicated.check_end()
        if not world.violations:
            self._end_programs()
        if not world.violations:
            self._cut_power_at_last()
        self.seen.check_suspicions()
        return self._outcome()

    def _await_delivery(self) -> None:
        world = self.world

        def is_done() -> bool:
            is_over = all(each.is_finished for each in self.finite)
            return is_over and self.audit.is_all_delivered()

        is_delivered = world.run(world.now + _LIVELY_S, _now_and_then(world, is_done))
        if not is_delivered and not world.violations:
            busy = [each.name for each in self.finite if not each.is_finished]
            world.violate(
                f"{_LIVELY_S:.0f} s after the last fault {self.audit.describe_missing()}, and not"
                f" finished: {busy}"
            )

    def _end_programs(self) -> None:
        """What the hub had for them is gone when they are; and what comes back later must be seen
        in the queues, and not be consumed once more."""
        world = self.world
        for each in self._programs:
            each.kill()
        has_links = any(each.is_held for each in self._programs)
        world.run(self.seen.forgotten_at(has_links=has_links) + _SETTLED_S)
        server = self.hub.serving
        if server is None:
            world.violate("the hub is not up, though all faults have ended")
        else:
            self.memory.check_end(server)

    def _cut_power_at_last(self) -> None:
        """What was promised survives the loss of power, whatever the plan of faults has."""
        world = self.world
        self.seen.disturbed("hub")
        for machine in self.hub.machines:
            machine.cut_power()
        for machine in self.hub.machines:
            machine.restore_power()
        self.hub.start()
        world.run(world.now + _SETTLED_S)
        # A replica that finds out now that its disk is damaged leads no more.
        is_well = _now_and_then(world, self.audit.is_as_before)
        world.run(world.now + _RESTARTED_S, is_well)
        if not world.violations:
            self.audit.check_restarted()

    def _outcome(self) -> SeedOutcome:
        lives = self.seen.lives.values()
        return SeedOutcome(
            seed=self.seed,
            violations=self.world.violations,
            history=self.world.history,
            plan=self.plan,
            simulated_s=self.world.now,
            turns=self.world.turns,
            messages=len(lives),
            acknowledged=sum(life.acknowledged_at is not None for life in lives),
            faults=self.injector.counts,
            errors=dict(Counter(self.seen.errors)),
        )


def _now_and_then(world: World, check: Callable[[], bool]) -> Callable[[], bool]:
    """A check that costs something, made twice in a simulated second."""
    next_check = world.now

    def checked() -> bool:
        nonlocal next_check
        if world.now < next_check:
            return False
        next_check = world.now + 0.5
        return check()

    return checked
