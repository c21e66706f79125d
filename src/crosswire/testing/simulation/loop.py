"""Event loops on a virtual timeline: one for each simulated process, all on one thread.

A `VirtualLoop` never waits. It runs the callbacks that are ready at the world's present time, and
the world decides which process runs next and how far time advances. So a run depends on nothing but
its seed, a day passes in seconds, and a process that crashes simply never runs again.

Everything that would leave the process goes through the loop: sockets (`create_server`,
`create_connection`) are the simulated network's, and work for threads (`run_in_executor`) is done
on this thread, a little later. Programs that use asyncio run on it unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop
from typing import Any, Final, Protocol, TypeVar

__all__ = ["LoopHost", "VirtualLoop"]

T = TypeVar("T")

_NEVER: Final = float("inf")


class LoopHost(Protocol):
    """The process that a loop belongs to."""

    def now(self) -> float:
        """The virtual time."""

    def work_s(self) -> float:
        """How long a piece of work on another thread takes."""

    def listen(self, factory: Callable[[], Any], host: str, port: int) -> Any:
        """A server on the simulated network. Raises OSError."""

    async def connect(self, factory: Callable[[], Any], host: str, port: int) -> Any:
        """Transport and protocol of a connection on the simulated network. Raises OSError."""

    def failed(self, what: str, error: BaseException | None) -> None:
        """A callback or a task of this process raised, and nobody handled it."""


class _NoSelector:
    """Nothing real to wait for: asyncio asks a selector for events in each turn."""

    def select(self, _timeout: float | None) -> list[Any]:
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """The event loop of one simulated process."""

    def __init__(self, host: LoopHost) -> None:
        self._is_live = False  # asyncio asks while it prepares the loop
        super().__init__()
        self._is_live = True
        self._host = host
        self._selector = _NoSelector()
        self.set_exception_handler(self._on_failure)

    # What the world asks and does.

    def next_time(self) -> float:
        """When this loop has something to do; infinity if it has nothing to do at all."""
        if self._ready:  # type: ignore[attr-defined]
            return 0.0
        # The world asks after each step of any process: this is what a simulation does most.
        scheduled = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            heappop(scheduled)._scheduled = False
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
        when: float = scheduled[0]._when if scheduled else _NEVER
        return when

    def run_turn(self) -> None:
        """Run what is ready, and timers that are due."""
        asyncio._set_running_loop(self)
        try:
            self._run_once()  # type: ignore[attr-defined]
        finally:
            asyncio._set_running_loop(None)

    def end(self) -> None:
        """Close it, with all that waits in it."""
        self._is_live = False
        self.close()

    # What asyncio asks.

    def time(self) -> float:
        """The virtual time."""
        return self._host.now()

    def is_running(self) -> bool:
        """Always: between two turns the process only waits."""
        return self._is_live

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no events of real sockets."""

    def _write_to_self(self) -> None:
        """Nothing to wake: the loop does not wait."""

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        """There is one thread."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, _executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Do it on this thread, after the time that it may have taken on another one."""
        done: asyncio.Future[T] = self.create_future()
        self.call_later(self._host.work_s(), _work, done, func, args)
        return done

    async def create_server(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        """Listen on the simulated network."""
        return self._host.listen(protocol_factory, host, port)

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        """Connect on the simulated network."""
        return await self._host.connect(protocol_factory, host, port)

    def _on_failure(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._host.failed(str(context.get("message")), context.get("exception"))


def _work(done: asyncio.Future[T], func: Callable[..., T], args: tuple[Any, ...]) -> None:
    if done.cancelled():
        return
    try:
        result = func(*args)
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(result)
