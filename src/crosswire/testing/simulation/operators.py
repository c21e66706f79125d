"""Programs that use what a hub offers beside its protocols: staged batches and schedules.

Over HTTP these are requests. Here each is a task in the hub's own process, and its answer may never
come: the process ends, or stands still. Then the same is asked again, as such programs do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random
from typing import Final, TypeVar

from crosswire.envelope import Envelope, message_kind
from crosswire.errors import (
    AttemptLost,
    BatchConflict,
    CrosswireError,
    NotLeading,
    StoreError,
)
from crosswire.hub.hub import Hub
from crosswire.hub.ingest.records import NamedAttempt, ProducerKey, StagedPart, pack
from crosswire.hub.schedules import Schedule
from crosswire.testing.simulation.clients import encode_message
from crosswire.testing.simulation.durable import MessageKey
from crosswire.testing.simulation.hub import HubGroup
from crosswire.testing.simulation.observations import Observations
from crosswire.testing.simulation.world import SimulatedProcess

__all__ = ["STAGED", "TICKS", "SimulatedScheduler", "SimulatedStager"]

STAGED: Final = "queue/staged"
TICKS: Final = "queue/ticks"
_ANSWER_S: Final = 10.0
_AGAIN_S: Final = 0.5
_LOST: Final = 0.1
"""How many answers get lost on their way."""

T = TypeVar("T")


class _Unanswered(Exception):
    """Nobody knows what became of a request."""


class _Operator:
    """Asks the hub that serves at the moment."""

    def __init__(self, process: SimulatedProcess, hub: HubGroup, seen: Observations) -> None:
        self.name = process.name
        self.is_finished = False
        self.expected: dict[str, int] = {}
        """How many messages a destination must have accepted, when this is finished."""
        self._world = process.world
        self._random: Random = process.world.random
        self._hub = hub
        self._seen = seen

    async def _ask(self, act: Callable[[Hub, float], Awaitable[T]]) -> T:
        """Raises what the hub raises, and _Unanswered."""
        machine = next((each for each in self._hub.machines if each.serving is not None), None)
        if machine is None:
            raise _Unanswered
        server, process = machine.serving, machine.process
        assert server is not None and process is not None
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            try:
                result = await act(server.hub, server.context.now())
            except CrosswireError as error:
                if not answer.done():
                    answer.set_exception(error)
            else:
                if not answer.done():
                    answer.set_result(result)

        process.loop.call_soon(lambda: process.start(work()))
        if self._random.random() < _LOST:
            await asyncio.sleep(_ANSWER_S)
            raise _Unanswered
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await answer
        except TimeoutError:
            raise _Unanswered from None

    async def _until_done(self, act: Callable[[Hub, float], Awaitable[T]]) -> T:
        """Ask until there is an answer; what a disk or a change of leaders refuses is temporary."""
        while True:
            try:
                return await self._ask(act)
            except (_Unanswered, StoreError, NotLeading):
                await asyncio.sleep(_AGAIN_S)


class SimulatedStager(_Operator):
    """Stages batches of messages and commits them. Attempts that no commit names are beside them:
    none of these may ever arrive."""

    async def run(self, batches: int) -> None:
        """Commit this many batches, each once."""
        owner = ProducerKey("", "stager")
        number = attempt = 0
        for batch in range(batches):
            keys, is_lost = [], False
            for _ in range(self._random.randint(1, 60)):
                number += 1
                keys.append(MessageKey(STAGED, self.name, number))
                self._seen.attempted(keys[-1])
            while True:
                attempt += 1
                try:
                    await self._stage(owner, batch, f"a{attempt}", keys)
                    await self._commit(owner, batch, f"a{attempt}", len(keys))
                    break
                except AttemptLost:
                    # What was staged before a crash, and not acknowledged, may be gone.
                    is_lost = True
                except BatchConflict:
                    # A part that comes too late: the commit was taken, its answer was lost.
                    if is_lost:
                        self._world.violate(f"batch {batch} was reported as lost, and is committed")
                    break
            self.expected[STAGED] = number
            for key in keys:
                self._seen.acknowledged(key)
            await asyncio.sleep(self._random.expovariate(1.0))
        self.is_finished = True

    async def _stage(
        self, owner: ProducerKey, batch: int, name: str, keys: list[MessageKey]
    ) -> None:
        """In two parts, and one part of an attempt that is given up."""
        # Its messages have numbers that nobody sent: a consumer that gets one reports it.
        wrong = [MessageKey(STAGED, self.name, -each.number) for each in keys[:3]]
        half = len(keys) // 2
        parts = ((f"{name}x", 0, wrong), (name, 0, keys[:half]), (name, 1, keys[half:]))
        for attempt, number, part in parts:
            packed = pack([_envelope(key) for key in part])
            await self._until_done(partial(_stage_part, owner, batch, attempt, number, packed))

    async def _commit(self, owner: ProducerKey, batch: int, name: str, count: int) -> None:
        async def commit(hub: Hub, now: float) -> None:
            decided = hub.staging.commit(owner, batch, [NamedAttempt(name, 2, count)], now)
            await decided.receipt

        await self._until_done(commit)


async def _stage_part(
    owner: ProducerKey,
    batch: int,
    attempt: str,
    number: int,
    part: StagedPart,
    hub: Hub,
    now: float,
) -> None:
    await hub.staging.stage(owner, batch, attempt, number, part, now)


def _envelope(key: MessageKey) -> Envelope:
    payload = encode_message(key, 20)
    return Envelope(
        destination=key.destination, kind=message_kind(key.destination), payload=payload
    )


class SimulatedScheduler(_Operator):
    """Adds a schedule, and removes it when faults have ended."""

    async def run(self, interval_s: float, until: float) -> None:
        """The number of fires is the number of messages that were accepted."""
        schedule = Schedule(
            id="tick",
            envelope=Envelope(destination=TICKS, kind=message_kind(TICKS), payload=b"tick"),
            interval_s=interval_s,
            missed=self._random.choice(("skip", "once", "all")),
        )

        async def add(hub: Hub, now: float) -> None:
            if hub.schedules.get(schedule.id) is None:
                hub.schedules.add(schedule, now)
            await hub.commits.committed()

        await self._until_done(add)
        await asyncio.sleep(until - self._world.now)

        fired: list[int] = []

        async def remove(hub: Hub, _now: float) -> int:
            if hub.schedules.get(schedule.id) is not None:
                fired.append(hub.schedules.remove(schedule.id).fired)
            elif not fired:
                self._world.violate("the schedule tick is gone")
                fired.append(0)
            # An earlier request that was not answered may have removed it.
            await hub.commits.committed()
            return fired[-1]

        self.expected[TICKS] = await self._until_done(remove)
        self.is_finished = True
