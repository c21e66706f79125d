"""Executors of a worker's jobs: in threads, or in processes, which can be stopped."""

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
    """Runs some jobs at a time. Cancelling `run` abandons the job."""

    async def run(self, function: Callable[..., Any], method: str | None, job: Job) -> Any:
        """The result of the function, or of a method of a new object of the class `function`."""
        try:
            if inspect.iscoroutinefunction(getattr(function, method) if method else function):
                return await call(function, method, job)
            return await self._run(function, method, job)
        except SystemExit:
            raise RuntimeError("the job tried to exit the program") from None

    def check(self, function: Callable[..., Any]) -> None:
        """Raises ValueError if the function could not be run here."""
        if not callable(function):
            raise ValueError(f"{function!r} can't be called")

    @abstractmethod
    async def _run(self, function: Callable[..., Any], method: str | None, job: Job) -> Any:
        """Run a function that is no coroutine function."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the jobs that can be stopped."""


def call(function: Callable[..., Any], method: str | None, job: Job) -> Any:
    """Call the function, or the method of a new object, with the job's arguments."""
    if method is not None:
        function = getattr(function(*job.class_args, **job.class_kwargs), method)
    return function(*job.args, **job.kwargs)


class ThreadJobExecutor(JobExecutor):
    """Runs jobs in threads. A thread can't be stopped: cancelling `run` waits for its end."""

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
        """Begin no more jobs; running threads can't be stopped."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class ProcessJobExecutor(JobExecutor):
    """Runs each job in a process, which is kept for the next job, and killed to stop one."""

    def __init__(self, slots: int) -> None:
        self._threads = ThreadPoolExecutor(slots, "emqp-process")
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()

    def check(self, function: Callable[..., Any]) -> None:
        """Raises ValueError if another process could not import the function."""
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
        """Kill all processes."""
        for process in list(self._all):
            process.kill()
        self._threads.shutdown(wait=True)
        for process in list(self._all):
            self._discard(process)
        self._idle.clear()

    def _discard(self, process: _Process) -> None:
        """Kill a process that no thread waits for, and free its pipe."""
        process.kill()
        process.close()
        self._all.discard(process)


class _ProcessDied(Exception):
    """The process of a job ended before the job."""


class _Failed(Exception):
    """An exception of a job, as text: the original may not be picklable."""


class _Process:
    """A process that runs one job after the other."""

    def __init__(self) -> None:
        self._pipe: Connection | None = None
        self._process: SpawnProcess | None = None
        self._killed = False

    def do(self, function: Callable[..., Any], method: str | None, job: Job) -> Any:
        """Run a job, in a thread that waits for the process. Raises _Failed or _ProcessDied."""
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
        """Kill the process, from any thread; it may be gone, or not started."""
        self._killed = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Free the process and its pipe; only after `kill`, when no thread waits for it."""
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
    """The main function of the process. It ignores Ctrl-C, which the worker acts on."""
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
            pipe.send((True, f"the result can't be pickled: {error}"))
