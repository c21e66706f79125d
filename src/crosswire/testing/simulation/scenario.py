"""One seed: a hub, its clients, a plan of faults, and the judgement."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Final

import msgspec

from crosswire.testing.simulation.clients import SPEAKERS, Consumer, Producer
from crosswire.testing.simulation.faults import FaultPlan, Injector, draw_plan
from crosswire.testing.simulation.hub import HubMachine
from crosswire.testing.simulation.observations import Observations
from crosswire.testing.simulation.world import World

__all__ = ["Outcome", "run_seed"]

_HOST: Final = "10.0.0.1"
_FAULTS_S: Final = 30.0
_LIVELY_S: Final = 180.0
"""When faults have ended, everything is delivered within this time."""


class Outcome(msgspec.Struct, kw_only=True):
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


def run_seed(seed: int, plan: FaultPlan | None = None) -> Outcome:
    """Simulate one seed, with its own faults or these."""
    choices = Random(seed ^ 0x5EED)
    drawn = draw_plan(choices, _FAULTS_S, 12)
    world = World(seed)
    hub = HubMachine(world, _HOST)
    seen = Observations(world, max_attempts=5)

    def on_end(one: str, other: str) -> None:
        for name in (one, other):
            if not name.startswith("hub-"):
                seen.disturbed(name)

    world.network.on_end = on_end
    injector = Injector(world, hub, seen)
    injector.plan(drawn if plan is None else plan)
    queues = [f"queue/q{index}" for index in range(choices.randint(1, 3))]
    producers: list[Producer] = []

    def populate() -> None:
        hub.start()
        names = list(SPEAKERS)
        for index in range(choices.randint(1, 4)):
            process = world.process(f"producer-{index}", f"10.0.1.{index}")
            speaker = SPEAKERS[choices.choice(names)](hub)
            producer = Producer(process.name, speaker, choices.choice(queues), seen)
            producers.append(producer)
            injector.clients.append(process.host)
            process.start(producer.run(process, choices.randint(20, 300), choices.uniform(0.01, 0.1)))
        for index, queue in enumerate(queues):
            for other in range(choices.randint(1, 2)):
                process = world.process(f"consumer-{index}-{other}", f"10.0.2.{index}{other}")
                speaker = SPEAKERS["micromsg2"](hub)
                injector.clients.append(process.host)
                consumer = Consumer(process.name, speaker, queue, queue, seen)
                process.start(consumer.run(process))

    world.at(0.0, populate)
    world.run(_FAULTS_S + 15.0)

    def is_done() -> bool:
        return all(each.is_finished for each in producers) and not seen.missing(queues, ())

    if not world.violations and not world.run(world.now + _LIVELY_S, is_done):
        late = seen.missing(queues, ())
        if not world.violations:
            world.violate(
                f"{len(late)} messages are not delivered {_LIVELY_S:.0f} s after the last fault, "
                f"such as {late[0].message if late else 'none'}; finished: "
                f"{[each.is_finished for each in producers]}"
            )
    seen.check_suspicions()
    acknowledged = sum(life.acknowledged_at is not None for life in seen.lives.values())
    outcome = Outcome(
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
