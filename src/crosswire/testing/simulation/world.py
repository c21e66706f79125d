"""The virtual timeline: processes, machines, time, and what was done in which order.

The world runs one turn of one process at a time. Among those that are ready it picks by chance, so
that seeds try different interleavings; when nobody is ready, time advances to the next event. All
chance comes from one seeded generator, and while a world runs, the clocks and random sources of the
standard library are the world's: a seed that is run twice does the same things in the same order.
"""

from __future__ import annotations

import asyncio
import os
import random as standard_random
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any, Final
from unittest import mock

from crosswire.commitlog import leader
from crosswire.hub import turns
from crosswire.testing.simulation.loop import VirtualLoop
from crosswire.testing.simulation.network import Network, VirtualServer

__all__ = ["Machine", "SimulatedProcess", "World"]

START_S: Final = 1_750_000_000.0
"""The wall clock's time at the beginning of every world."""
_MOST_WAITS: Final = 100
_NEVER: Final = float("inf")
_TURN_S: Final = 20e-6
"""What a turn of a process takes on average: without it, nothing would ever be late."""
_MOST_TURNS: Final = 2_000_000
"""A world that takes more turns than this goes round in a circle."""


class Machine:
    """A computer: a name in the network, and clocks."""

    def __init__(self, world: World, host: str) -> None:
        self._world = world
        self.host = host
        self.wall_offset_s = 0.0
        """How far its wall clock is off."""
        self.booted_at = world.now

    def wall(self) -> float:
        """Seconds since 1970, as its clock has it."""
        return START_S + self._world.now + self.wall_offset_s

    def monotonic(self) -> float:
        """Seconds since it was switched on."""
        return self._world.now - self.booted_at + 1000.0


class SimulatedProcess:
    """A program on a machine: its event loop, from its start to its end."""

    def __init__(self, world: World, name: str, machine: Machine) -> None:
        self.world = world
        self.name = name
        self.machine = machine
        self.host = machine.host
        self.loop = VirtualLoop(self)
        self.is_running = True
        self.paused_until = 0.0

    def start(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine as a task of this process."""
        task = self.loop.create_task(work)
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.failed("ended", error)

    def next_time(self) -> float:
        """When it can run next."""
        return max(self.loop.next_time(), self.paused_until)

    # For its loop.

    def now(self) -> float:
        """The virtual time."""
        return self.world.now

    def work_s(self) -> float:
        """How long a piece of work on another thread takes."""
        return self.world.random.uniform(0.0001, 0.005)

    def listen(self, factory: Callable[[], Any], host: str, port: int) -> VirtualServer:
        """A server on the simulated network. Raises OSError."""
        return self.world.network.listen(self, factory, host, port)

    async def connect(self, factory: Callable[[], Any], host: str, port: int) -> Any:
        """Transport and protocol of a connection on the simulated network. Raises OSError."""
        return await self.world.network.connect(self, factory, host, port)

    def failed(self, what: str, error: BaseException | None) -> None:
        """Something raised that nobody handled: no program of ours may do that."""
        if self.is_running:
            self.world.violate(f"{self.name}: {what}: {error!r}", error)


class World:
    """Everything that is simulated, from one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.now = 0.0
        self.turns = 0
        self.network = Network(self)
        self.machines: dict[str, Machine] = {}
        self.processes: list[SimulatedProcess] = []
        self.violations: list[str] = []
        self.causes: list[BaseException] = []
        self.history: list[str] = []
        """What happened, for people: faults, starts, ends, violations."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._current: SimulatedProcess | None = None
        self._ended: list[SimulatedProcess] = []

    # Building.

    def machine(self, host: str) -> Machine:
        """The machine of that name, made on first use."""
        if host not in self.machines:
            self.machines[host] = Machine(self, host)
        return self.machines[host]

    def process(self, name: str, host: str) -> SimulatedProcess:
        """A new process on a machine."""
        process = SimulatedProcess(self, name, self.machine(host))
        self.processes.append(process)
        return process

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call it at a virtual time, or now if that has passed."""
        heappush(self._events, (max(when, self.now), next(self._numbers), action))

    def note(self, text: str) -> None:
        """Add a line to the history."""
        self.history.append(f"{self.now:12.6f}  {text}")

    def violate(self, text: str, cause: BaseException | None = None) -> None:
        """Something is wrong that never may be."""
        self.note(f"VIOLATION: {text}")
        self.violations.append(text)
        if cause is not None:
            self.causes.append(cause)

    # Ends of processes and machines.

    def kill(self, process: SimulatedProcess) -> None:
        """SIGKILL: it never runs again, and its system closes what it had open."""
        self._end(process, quietly=False)

    def _end(self, process: SimulatedProcess, *, quietly: bool) -> None:
        if not process.is_running:
            return
        process.is_running = False
        self.processes.remove(process)
        # Kept: what its coroutines would do when they are collected must not happen in the run.
        self._ended.append(process)
        self.network.lose_process(process, quietly=quietly)

    def cut_power(self, host: str) -> None:
        """All processes of a machine end, and no peer is notified."""
        for process in [each for each in self.processes if each.host == host]:
            self._end(process, quietly=True)
        self.network.power_off(host)

    def restore_power(self, host: str) -> None:
        """The machine is on again."""
        self.machines[host].booted_at = self.now
        self.network.power_on(host)

    # Running.

    def run(self, until: float, finished: Callable[[], bool] | None = None) -> bool:
        """Run to a virtual time, or until `finished`; gives whether that came first."""
        with self._borrowed_sources():
            while not self.violations and self.turns < _MOST_TURNS:
                if finished is not None and finished():
                    return True
                if not self._step(until):
                    return False
        if self.turns >= _MOST_TURNS:
            self.violate(f"nothing ends: {self.turns} turns")
        return False

    def _step(self, until: float) -> bool:
        """Advance to what is next, and do it; False if there is nothing up to `until`."""
        process_at = _NEVER
        ready: list[SimulatedProcess] = []
        for process in self.processes:
            at = max(process.loop.next_time(), process.paused_until)
            if at <= self.now:
                ready.append(process)
            if at < process_at:
                process_at = at
        event_at = self._events[0][0] if self._events else _NEVER
        next_at = min(process_at, event_at)
        if next_at > until:
            self.now = max(self.now, until)
            return False
        self.now = max(self.now, next_at)
        if event_at <= process_at:
            heappop(self._events)[2]()
            return True
        if not ready:
            ready = [each for each in self.processes if each.next_time() <= self.now]
        process = ready[0] if len(ready) == 1 else self.random.choice(ready)
        self._current = process
        process.loop.run_turn()
        self._current = None
        self.turns += 1
        self.now += self.random.expovariate(1 / _TURN_S)
        return True

    @contextmanager
    def _borrowed_sources(self) -> Iterator[None]:
        """Clocks and chance of the standard library are the world's while it runs."""
        state = standard_random.getstate()
        standard_random.seed(self.random.getrandbits(64))
        with (
            mock.patch.object(time, "time", self._wall),
            mock.patch.object(time, "monotonic", self._monotonic),
            mock.patch.object(os, "urandom", self.random.randbytes),
            # Who measures how long something took gets the virtual time, too: how much of a read
            # is processed at once depends on it.
            mock.patch.object(turns, "perf_counter", self._monotonic),
            mock.patch.object(turns, "thread_time", self._monotonic),
            # A replica counts how long the log has been silent.
            mock.patch.object(leader, "clock_gettime", self._boot_time),
            # What `secrets` reads.
            mock.patch.object(standard_random, "_urandom", self.random.randbytes),
        ):
            try:
                yield
            finally:
                standard_random.setstate(state)

    def _wall(self) -> float:
        return START_S + self.now if self._current is None else self._current.machine.wall()

    def _monotonic(self) -> float:
        return self.now if self._current is None else self._current.machine.monotonic()

    def _boot_time(self, _clock: int) -> float:
        return self._monotonic()

    def close(self) -> None:
        """End all tasks, without letting them do anything."""
        for process in [*self.processes, *self._ended]:
            process.is_running = False
            asyncio._set_running_loop(process.loop)
            try:
                for task in asyncio.all_tasks(process.loop):
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    _close(task.get_coro())
            finally:
                asyncio._set_running_loop(None)
            process.loop.end()
        self.processes.clear()


def _close(coroutine: Any) -> None:
    """End it where it is, from the innermost call outwards. What one does on its way out may wait
    again, for a loop that is over: then it is ended there, too."""
    calls = []
    while coroutine is not None and hasattr(coroutine, "cr_await"):
        calls.append(coroutine)
        coroutine = coroutine.cr_await
    with warnings.catch_warnings():
        # It may begin something that never runs.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        for each in reversed(calls):
            for _ in range(_MOST_WAITS):
                with suppress(BaseException):
                    each.close()
                if each.cr_frame is None:
                    break
