"""One seed: a hub, its clients, a plan of faults, and the judgement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, Final

import msgspec

from crosswire.hub.policies import QueuePolicy
from crosswire.testing.simulation.audit import Audit
from crosswire.testing.simulation.clients import (
    PROTOCOLS,
    Program,
    SimulatedCaller,
    SimulatedConsumer,
    SimulatedProducer,
    SimulatedProvider,
)
from crosswire.testing.simulation.faults import FaultPlan, Injector, draw_plan
from crosswire.testing.simulation.hub import HubMachine
from crosswire.testing.simulation.observations import Observations
from crosswire.testing.simulation.world import World

__all__ = ["SeedOutcome", "run_seed"]

_HOST: Final = "10.0.0.1"
_FAULTS_S: Final = 30.0
_SETTLED_S: Final = 5.0
"""How long a hub without faults needs to commit and sync what is left, or to get its clients back
after a restart."""
_MAX_ATTEMPTS: Final = 5
_LIVELY_S: Final = 180.0
"""When faults have ended, everything is delivered within this time."""


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
    """Simulate one seed, with its own faults or these."""
    choices = Random(seed ^ 0x5EED)
    drawn = draw_plan(choices, _FAULTS_S, 12)
    world = World(seed)
    hub = HubMachine(world, _HOST)
    seen = Observations(world, max_attempts=_MAX_ATTEMPTS)

    def on_end(one: str, other: str) -> None:
        for name in (one, other):
            if not name.startswith("hub-"):
                seen.disturbed(name)

    world.network.on_end = on_end
    injector = Injector(world, hub, seen)
    injector.plan(drawn if plan is None else plan)
    programs: list[Program] = []

    def start(kind: type[Any], name: str, host: str, *arguments: Any) -> None:
        process = world.process(name, host)
        injector.clients.append(host)
        # eMQP has no named subscriptions.
        named = kind is SimulatedConsumer and bool(arguments[1])
        protocol = choices.choice([each for each in PROTOCOLS if not named or each != "emqp"])
        program = kind(process, protocol, hub, seen)
        world.note(f"{name} speaks {program.protocol} from {host}: {arguments}")
        process.start(program.run(*arguments))
        if isinstance(program, SimulatedProducer | SimulatedCaller):
            programs.append(program)

    def populate() -> None:
        for index in range(3):
            # A short window in memory: most of a queue is on disk, and read from there.
            window_messages = choices.choice((1024, 1024, 6))
            hub.queues[f"q{index}"] = QueuePolicy(window_messages=window_messages)
        hub.start()
        queues = [f"queue/q{index}" for index in range(choices.randint(1, 3))]
        topics = [f"topic/t{index}" for index in range(choices.randint(0, 1))]
        for index, queue in enumerate(queues):
            refusing = choices.choice((0.0, 0.0, 0.1, 0.5))
            for other in range(choices.randint(1, 2)):
                window = choices.choice((1, 4, 32))
                host = f"10.0.2.{index}{other}"
                start(
                    SimulatedConsumer,
                    f"consumer-{index}-{other}",
                    host,
                    queue,
                    "",
                    window,
                    refusing,
                )
        for index, topic in enumerate(topics):
            start(SimulatedConsumer, f"subscriber-{index}", f"10.0.3.{index}", topic, "s", 8, 0.0)
        for index in range(choices.randint(1, 4)):
            where = choices.choice(queues + topics)
            count, pause_s = choices.randint(20, 300), choices.uniform(0.01, 0.1)
            start(SimulatedProducer, f"producer-{index}", f"10.0.1.{index}", where, count, pause_s)
        if choices.random() < 0.5:
            start(SimulatedProvider, "provider", "10.0.4.1", "service/echo")
            start(
                SimulatedCaller, "caller", "10.0.4.2", "service/echo", choices.randint(5, 50), 0.1
            )

    world.at(0.0, populate)
    world.run(_FAULTS_S + 15.0)

    audit = Audit(world, hub, seen, max_attempts=_MAX_ATTEMPTS)

    def is_done() -> bool:
        return all(each.is_finished for each in programs) and audit.is_all_delivered()

    if not world.violations and not world.run(world.now + _LIVELY_S, _now_and_then(world, is_done)):
        busy = [each.name for each in programs if not each.is_finished]
        if not world.violations:
            world.violate(
                f"{_LIVELY_S:.0f} s after the last fault {audit.describe_missing()}, and not"
                f" finished: {busy}"
            )
    if not world.violations:
        world.run(world.now + _SETTLED_S)
        audit.check_end()
    if not world.violations:
        # What was promised survives the loss of power, whatever the plan of faults has.
        seen.disturbed("hub")
        hub.cut_power()
        hub.restore_power()
        hub.start()
        world.run(world.now + _SETTLED_S)
        if not world.violations:
            audit.check_restarted()
    seen.check_suspicions()
    acknowledged = sum(life.acknowledged_at is not None for life in seen.lives.values())
    outcome = SeedOutcome(
        seed=seed,
        violations=world.violations,
        history=world.history,
        plan=drawn if plan is None else plan,
        simulated_s=world.now,
        turns=world.turns,
        messages=len(seen.lives),
        acknowledged=acknowledged,
        faults=injector.counts,
        errors=dict(Counter(seen.errors)),
    )
    world.close()
    return outcome


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
