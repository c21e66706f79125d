"""The simulator's programs and invariants on a real hub, in a process of its own.

    python -m tests.campaigns.real_simulation --seed 7

What the hub does and when is up to the machine. The plan of faults comes from the seed, and can be
repeated: the hub is killed, restarted and stopped, and a preloaded library fails, cuts short and
delays what it writes. Programs report what they see to the same observations. When they are done,
the store is opened in this process, and the same audit looks into it.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from crosswire.config import Config, LakeSettings
from crosswire.errors import CrosswireError
from crosswire.listeners import PLAIN_LISTENERS
from crosswire.server.server import Server
from crosswire.testing.simulation.audit import Audit
from crosswire.testing.simulation.clients import (
    PROTOCOLS,
    PROVIDER,
    Program,
    SimulatedCaller,
    SimulatedConsumer,
    SimulatedLinkProducer,
    SimulatedProducer,
    SimulatedProvider,
)
from crosswire.testing.simulation.faults import Fault, FaultPlan
from crosswire.testing.simulation.observations import Observations
from tests.campaigns.disk_shim import DiskFaults, DiskShim
from tests.campaigns.hub import HubProcess
from tests.campaigns.runner import CampaignSkipped, Findings

__all__ = ["draw_real_plan", "run_real_seed", "run_real_seeds"]

_MAX_ATTEMPTS: Final = 5
_PATIENCE: Final = 4.0
"""How much longer than in the simulation everything may take, on a machine that is busy."""
_SETTLED_S: Final = 3.0
_LIVELY_S: Final = 180.0
_DISK: Final[dict[str, Callable[[float], DiskFaults]]] = {
    "write error": lambda strength: DiskFaults(writes=_per_mille(strength)),
    "disk full": lambda strength: DiskFaults(writes=_per_mille(strength), write_errno=errno.ENOSPC),
    "sync error": lambda strength: DiskFaults(syncs=_per_mille(strength)),
    "short writes": lambda strength: DiskFaults(short_writes=_per_mille(strength)),
    "slow disk": lambda strength: DiskFaults(sync_ms=1 + int(200 * strength)),
}
_KINDS: Final = ("kill", "restart", "pause", *_DISK)


def _per_mille(strength: float) -> int:
    return 30 + int(970 * strength)


def draw_real_plan(random: Random, duration_s: float, most: int) -> FaultPlan:
    """Some faults, one after the other."""
    faults = []
    for _ in range(random.randint(1, most)):
        lasts_s = min(random.expovariate(2.0), 1.0)
        at = random.uniform(0.2, duration_s)
        faults.append(Fault(random.choice(_KINDS), at, lasts_s, random.random()))
    return sorted(faults, key=lambda fault: fault.at)


class _RealWorld:
    """The machine that this runs on."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.violations: list[str] = []
        self.begin()

    def begin(self) -> None:
        """Time begins when the hub is up."""
        self._began = time.monotonic()

    @property
    def now(self) -> float:
        return time.monotonic() - self._began

    def violate(self, text: str, cause: BaseException | None = None) -> None:
        del cause
        self.violations.append(f"{self.now:.3f} s: {text}")


class _RealProcess(NamedTuple):
    name: str
    world: _RealWorld


class _Everything:
    """What is durable can't be seen from outside of a hub: kills and the end show it."""

    def __contains__(self, _key: object) -> bool:
        return True


class _RealAddress:
    def __init__(self, hub: HubProcess) -> None:
        self.host = "127.0.0.1"
        self.ports = hub.ports


class _RealHub:
    """As programs and the audit see it."""

    def __init__(self, hub: HubProcess) -> None:
        self.machines = [_RealAddress(hub)]
        self.serving: Server | None = None


class _RealScenario:
    def __init__(self, folder: Path, seed: int, duration_s: float) -> None:
        self.world = _RealWorld(seed)
        self.choices = Random(seed ^ 0x5EED)
        self.duration_s = duration_s
        self.plan = draw_real_plan(self.choices, duration_s, 5)
        self.shim = DiskShim(folder)
        self.process = HubProcess(folder / "hub", environment=self.shim.environment)
        self.hub = _RealHub(self.process)
        self.seen = Observations(
            self.world, _Everything(), max_attempts=_MAX_ATTEMPTS, patience=_PATIENCE
        )
        self.programs: list[tuple[Program, asyncio.Task[None]]] = []
        self.finite: list[Program] = []

    async def run(self) -> None:
        """Faults, then quiet, then the judgement."""
        assert await self.process.start(), self.process.log.read_text()[-2000:]
        self.world.begin()
        try:
            self._populate()
            for fault in self.plan:
                await asyncio.sleep(max(fault.at - self.world.now, 0.0))
                await self._inject(fault)
            await self._await_delivery()
        finally:
            await self._end_programs()
            await self.process.end(signal.SIGTERM)
        await self._judge()

    def _populate(self) -> None:
        choices = self.choices
        queues = [f"queue/q{index}" for index in range(2)]
        for index, queue in enumerate(queues):
            window, refusing = choices.choice((1, 4, 32)), choices.choice((0.0, 0.2))
            at_once = choices.choice((1, window))
            self._start(
                SimulatedConsumer, f"consumer-{index}", queue, "", window, refusing, 0.01, at_once
            )
        self._start(SimulatedConsumer, "subscriber", "topic/t0", "s", 8, 0.0, 0.01)
        for index, where in enumerate([*queues, choices.choice(queues), "topic/t0"]):
            kind = SimulatedProducer if choices.random() < 0.8 else SimulatedLinkProducer
            count = choices.randint(20, 60)
            self._start(kind, f"producer-{index}", where, count, self.duration_s / count)
        self._start(SimulatedProvider, PROVIDER, "service/echo")
        self._start(SimulatedCaller, "caller", "service/echo", 10, self.duration_s / 20)

    def _start(self, kind: type[Any], name: str, *arguments: Any) -> None:
        # eMQP has no named subscriptions, and a call without a provider becomes a job there.
        without = ("emqp",) if name in ("subscriber", "caller") else ()
        protocol = self.choices.choice([each for each in PROTOCOLS if each not in without])
        program = kind(_RealProcess(name, self.world), protocol, self.hub, self.seen)
        running: Coroutine[Any, Any, None] = program.run(*arguments)
        self.programs.append((program, asyncio.create_task(running)))
        if kind in (SimulatedProducer, SimulatedLinkProducer, SimulatedCaller):
            self.finite.append(program)

    async def _inject(self, fault: Fault) -> None:
        self.seen.disturbed("hub")
        if fault.kind in _DISK:
            self.shim.set(_DISK[fault.kind](fault.strength))
            await asyncio.sleep(fault.lasts_s)
            if fault.strength < 0.5:
                await self._kill()
            self.shim.set(DiskFaults())
        elif fault.kind == "kill":
            await self._kill()
            await asyncio.sleep(fault.lasts_s)
        elif fault.kind == "restart":
            await self.process.end(signal.SIGTERM)
        else:
            await self._pause(fault.lasts_s)
        if not self.process.is_running:
            # A hub whose disk failed may have ended by itself.
            self.seen.disturbed("crash")
            await self.process.end()
            assert await self.process.start(), self.process.log.read_text()[-2000:]
        self.seen.disturbed("hub")

    async def _kill(self) -> None:
        self.seen.disturbed("crash")
        await self.process.end(signal.SIGKILL)

    async def _pause(self, seconds: float) -> None:
        self.seen.disturbed("still")
        self.seen.disturbed("network")
        assert self.process.process is not None
        self.process.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.process.process.send_signal(signal.SIGCONT)
        self.seen.disturbed("still")

    async def _await_delivery(self) -> None:
        """Until all is settled, or what is left seems to be dead letters."""
        world, ends = self.world, self.world.now + _LIVELY_S
        missing, since = -1, world.now
        while world.now < ends and not world.violations:
            self._check_programs()
            left = len(self.seen.missing())
            if left != missing:
                missing, since = left, world.now
            is_over = all(each.is_finished for each in self.finite)
            # Without anything missing, programs still have to settle what they did last.
            if is_over and world.now - since > (5 * _SETTLED_S if left else _SETTLED_S):
                return
            await asyncio.sleep(0.05)
        busy = [each.name for each in self.finite if not each.is_finished]
        if not world.violations:
            world.violate(f"{missing} messages are not delivered, and not finished: {busy}")

    def _check_programs(self) -> None:
        for program, task in self.programs:
            if task.done() and not program.is_finished:
                self.world.violate(f"{program.name} ended: {task.exception()!r}")

    async def _end_programs(self) -> None:
        for _, task in self.programs:
            task.cancel()
        await asyncio.gather(*(task for _, task in self.programs), return_exceptions=True)
        for program, _ in self.programs:
            for client in program.clients:
                with suppress(CrosswireError):
                    await client.close()

    async def _judge(self) -> None:
        """Look into the store, and at the ledger."""
        self.seen.check_suspicions()
        config = Config(
            data=str(self.process.data),
            listen=dict.fromkeys(PLAIN_LISTENERS, "off"),
            insecure=True,
            lake=LakeSettings(messages=False, ledger=False),
        )
        server = Server(config)
        await server.start()
        try:
            self.hub.serving = server
            audit = Audit(self.world, self.hub, self.seen, max_attempts=_MAX_ATTEMPTS)
            if not self.world.violations and not audit.is_all_delivered():
                self.world.violate(f"lost: {audit.describe_missing()}")
            if not self.world.violations:
                audit.check_end()
        finally:
            await server.stop()


async def run_real_seed(folder: Path, seed: int, *, duration_s: float = 4.0) -> Findings:
    """The plan of one seed; its violations are in the details. Raises CampaignSkipped."""
    scenario = _RealScenario(folder, seed, duration_s)
    await scenario.run()
    lives = scenario.seen.lives.values()
    findings = Findings(
        rounds=1,
        attempted=len(lives),
        acknowledged=sum(life.acknowledged_at is not None for life in lives),
        wrong=int(bool(scenario.world.violations)),
    )
    for fault in scenario.plan:
        findings.add(fault.kind, 1)
    if scenario.world.violations:
        findings.details[f"seed {seed}"] = scenario.world.violations[0][:200]
    return findings


async def run_real_seeds(folder: Path, rounds: int, seed: int) -> Findings:
    """Seeds of this part: each has room for a thousand."""
    total = Findings()
    for number in range(seed * 1000, seed * 1000 + rounds):
        own = folder / str(number)
        own.mkdir()
        found = await run_real_seed(own, number)
        for name in ("rounds", "attempted", "acknowledged", "wrong"):
            setattr(total, name, getattr(total, name) + getattr(found, name))
        for name, value in found.details.items():
            if isinstance(value, int):
                total.add(name, value)
            else:
                total.details[name] = value
        if not found.wrong:
            shutil.rmtree(own)
    return total


def main(arguments: list[str] | None = None) -> int:
    """Run one seed and print what it showed; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.real_simulation")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long faults happen")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(prefix="crosswire-real-"))
    try:
        found = asyncio.run(run_real_seed(folder, options.seed, duration_s=options.seconds))
    except CampaignSkipped as reason:
        print(f"not run: {reason}")
        return 0
    print(found)
    if not found.wrong:
        shutil.rmtree(folder)
        return 0
    print(f"the files are in {folder}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
