"""One seed: a hub, its clients, a plan of faults, and the judgement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import Any, Final

import msgspec

from crosswire.plurals import plural
from crosswire.testing.simulation.clients import (
    PROTOCOLS,
    Caller,
    Consumer,
    Producer,
    Program,
    Provider,
    decode_message,
)
from crosswire.testing.simulation.faults import FaultPlan, Injector, draw_plan
from crosswire.testing.simulation.hub import HubMachine
from crosswire.testing.simulation.observations import DeliveryKey, Observations
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
    programs: list[Program] = []

    def start(kind: type[Any], name: str, host: str, *arguments: Any) -> None:
        process = world.process(name, host)
        injector.clients.append(host)
        # eMQP has no named subscriptions.
        named = kind is Consumer and bool(arguments[1])
        protocol = choices.choice([each for each in PROTOCOLS if not named or each != "emqp"])
        program = kind(process, protocol, hub, seen)
        world.note(f"{name} speaks {program.protocol} from {host}: {arguments}")
        process.start(program.run(*arguments))
        if isinstance(program, Producer | Caller):
            programs.append(program)

    def populate() -> None:
        hub.start()
        queues = [f"queue/q{index}" for index in range(choices.randint(1, 3))]
        topics = [f"topic/t{index}" for index in range(choices.randint(0, 1))]
        for index, queue in enumerate(queues):
            refusing = choices.choice((0.0, 0.0, 0.1, 0.5))
            for other in range(choices.randint(1, 2)):
                window = choices.choice((1, 4, 32))
                host = f"10.0.2.{index}{other}"
                start(Consumer, f"consumer-{index}-{other}", host, queue, "", window, refusing)
        for index, topic in enumerate(topics):
            start(Consumer, f"subscriber-{index}", f"10.0.3.{index}", topic, "s", 8, 0.0)
        for index in range(choices.randint(1, 4)):
            where = choices.choice(queues + topics)
            count, pause_s = choices.randint(20, 300), choices.uniform(0.01, 0.1)
            start(Producer, f"producer-{index}", f"10.0.1.{index}", where, count, pause_s)
        if choices.random() < 0.5:
            start(Provider, "provider", "10.0.4.1", "service/echo")
            start(Caller, "caller", "10.0.4.2", "service/echo", choices.randint(5, 50), 0.1)

    world.at(0.0, populate)
    world.run(_FAULTS_S + 15.0)

    next_check = world.now

    def is_done() -> bool:
        nonlocal next_check
        if world.now < next_check:
            return False
        next_check = world.now + 0.5
        return all(each.is_finished for each in programs) and not missing()

    def missing() -> list[DeliveryKey]:
        return seen.missing(_dead(hub, seen.subscriptions))

    if not world.violations and not world.run(world.now + _LIVELY_S, is_done):
        late = missing()
        busy = [each.name for each in programs if not each.is_finished]
        if not world.violations:
            world.violate(
                f"{_LIVELY_S:.0f} s after the last fault {plural(len(late), 'message')} are not"
                f" delivered ({', '.join(str(each.message) for each in late[:3])}), and not"
                f" finished: {busy}"
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


def _dead(hub: HubMachine, groups: Iterable[str]) -> set[DeliveryKey]:
    """Messages that the hub keeps as dead letters."""
    found: set[DeliveryKey] = set()
    if hub.is_up and hub.is_ready:
        assert hub.server is not None
        for group in groups:
            if group.startswith("queue/"):
                letters = hub.server.hub.dead_letters.list(f"{group}/dead", count=100_000)
                for letter in letters:
                    found.add(DeliveryKey(group, decode_message(letter.envelope.payload)))
    return found
