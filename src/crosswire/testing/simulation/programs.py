"""Programs as processes on machines of their own, which end and are started again."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from crosswire.testing.simulation.world import SimulatedProcess, World

__all__ = ["ProgramHost"]


class ProgramHost:
    """A machine with one program; `run` is called with a new process at each start."""

    def __init__(
        self,
        world: World,
        name: str,
        host: str,
        run: Callable[[SimulatedProcess], Coroutine[Any, Any, None]],
        *,
        is_held: bool,
    ) -> None:
        self.name = name
        self.host = host
        self.is_held = is_held
        """Whether the hub keeps what it had for a while when it ends: its protocol has links."""
        self._world = world
        self._run = run
        self._process: SimulatedProcess | None = None

    @property
    def is_up(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.is_running

    def start(self) -> None:
        """Start it, unless it runs."""
        if not self.is_up:
            self._process = process = self._world.process(self.name, self.host)
            process.start(self._run(process))

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._world.kill(self._process)

    def pause(self, seconds: float) -> None:
        """It does not run for this long."""
        if self._process is not None:
            self._process.paused_until = self._world.now + seconds

    def cut_power(self) -> None:
        """Its machine stops, and no peer is notified."""
        self._world.cut_power(self.host)

    def restore_power(self) -> None:
        """Its machine and the program start again."""
        self._world.restore_power(self.host)
        self.start()
