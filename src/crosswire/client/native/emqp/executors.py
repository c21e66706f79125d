"""Where a worker's jobs run: threads, or processes that can be stopped."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import pickle
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from crosswire.wire.emqp.jobs import Job

__all__ = ["JobExecutor", "ProcessJobExecutor", "ThreadJobExecutor"]

_SPAWN = multiprocessing.get_context("spawn")


class JobExecutor(ABC):
    """Room for some jobs at a time. Cancelling `run` gives up on the job."""

    async def run(self, function: Callable[..., Any], method: str | None, job: Job) -> Any:
        """What the function gives, or a method of a new object of the class `function`."""
        try:
            if inspect.iscoroutinefunction(getattr(function, method) if method else function):
                return await call(function, method, job)
            return await self._run(function, method, job)
        except SystemExit:
            raise RuntimeError("the job wanted to end the program") from None

    def check(self, function: Callable[..., Any]) -> None:
        """Raises ValueError if the function could not be run here."""
        if not callable(function):
            raise ValueError(f"{function!r} can't be called")

    @abstractmethod
    async def _run(self, function: Callable[..., Any], method: str | None, job: Job) -> Any: ...

    @abstractmethod
    async def close(self) -> None:
        """Stop what can be stopped."""


def call(function: Callable[..., Any], method: str | None, job: Job) -> Any:
    if method is not None:
        function = getattr(function(*job.class_args, **job.class_kwargs), method)
    return function(*job.args, **job.kwargs)


class ThreadJobExecutor(JobExecutor):
    """A thread can't be stopped: whoever gives up on a job waits for its end all the same."""

    def __init__(self, slots: int) -> None:
        self._threads = ThreadPoolExecutor(slots, "emqp-job")

    async def _run(self, function: Callable[..., Any], method: str | None, job: Job) -> Any:
        future = self._threads.submit(call, function, method, job)
        waiting = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not future.cancel():
                await asyncio.wait([waiting])
            raise

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class ProcessJobExecutor(JobExecutor):
    """A process for each job that runs at a time, kept for the next one, killed with its job."""

    def __init__(self, slots: int) -> None:
        self._threads = ThreadPoolExecutor(slots, "emqp-process")
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()

    def check(self, function: Callable[..., Any]) -> None:
        super().check(function)
        if inspect.iscoroutinefunction(function):
            return
        try:
            pickle.dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(f"another process can't find {function!r}: {error}") from None

    async def _run(self, function: Callable[..., Any], method: str | None, job: Job) -> Any:
        process = self._idle.pop() if self._idle else None
        if process is None:
            process = _Process()
            self._all.add(process)
        loop = asyncio.get_running_loop()
        waiting = loop.run_in_executor(self._threads, process.do, function, method, job)
        try:
            value = await asyncio.shield(waiting)
        except asyncio.CancelledError:
            process.kill()
            await asyncio.wait([waiting])
            waiting.exception()
            self._discard(process)
            raise
        except _ProcessDied:
            self._discard(process)
            raise
        except Exception:
            self._idle.append(process)
            raise
        self._idle.append(process)
        return value

    async def close(self) -> None:
        for process in list(self._all):
            process.kill()
        self._threads.shutdown(wait=True)
        for process in list(self._all):
            self._discard(process)
        self._idle.clear()

    def _discard(self, process: _Process) -> None:
        """Nobody waits for it any more."""
        process.kill()
        process.close()
        self._all.discard(process)


class _ProcessDied(Exception):
    """The process is gone, and its job with it."""


class _Failed(Exception):
    """What a job raised, in the words that it had for it."""


class _Process:
    """A process that does one job after the other."""

    def __init__(self) -> None:
        self._pipe: Connection | None = None
        self._process: SpawnProcess | None = None
        self._killed = False

    def do(self, function: Callable[..., Any], method: str | None, job: Job) -> Any:
        """Called in a thread, which waits for the process. Raises _Failed or _Died."""
        try:
            if self._pipe is None:
                self._start()
            assert self._pipe is not None
            if self._killed:
                raise EOFError
            self._pipe.send((function, method, job))
            failed, value = self._pipe.recv()
        except (EOFError, OSError):
            raise _ProcessDied("the job's process died") from None
        if failed:
            raise _Failed(value)
        return value

    def kill(self) -> None:
        """From any thread; harmless to a process that is gone, or was never started."""
        self._killed = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Give back what it held; only when it was killed and no thread waits for it."""
        if self._process is not None and self._pipe is not None:
            self._process.join()
            self._process.close()
            self._pipe.close()
            self._process = self._pipe = None

    def _start(self) -> None:
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._pipe, self._process = ours, process


def _serve(pipe: Connection) -> None:
    """The process's whole life. The terminal's Ctrl-C is for the worker to act on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            function, method, job = pipe.recv()
        except EOFError:
            return
        try:
            answer = (False, call(function, method, job))
        except Exception as error:
            answer = (True, str(error) or type(error).__name__)
        try:
            pipe.send(answer)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            pipe.send((True, f"the result can't leave its process: {error}"))
