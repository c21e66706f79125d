"""Analyses of captures that users have uploaded: each read by a process of its own, held for a
while for the user who uploaded it.

Limits hold for all analyses together and for those of a user, so that nobody can fill the disk or
keep others out. A user's oldest one makes room for his next.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from crosswire.analyzer.job import CaptureJob, CaptureOutcome
from crosswire.analyzer.results import ResultReader
from crosswire.errors import InvalidInput, ServiceUnavailable, UnknownMessage
from crosswire.logs import log_event
from crosswire.server.server import Server

__all__ = ["HeldAnalyses", "HeldAnalysis"]

_FOLDER: Final = "analyses"
_MOST: Final = 16
_MOST_EACH: Final = 4
_RUNNING: Final = 2
_THREADS: Final = 2
_KEPT_S: Final = 15 * 60.0
"""After it was last used."""
_WALL_S: Final = 60.0
_CPU_S: Final = 30
_MEMORY_BYTES: Final = 1 << 30
_OUTPUT_BYTES: Final = 128 << 20
_WRITTEN_BYTES: Final = 1 << 20
_STDERR: Final = 2000

_log = logging.getLogger("crosswire.web")

T = TypeVar("T")


class HeldAnalysis:
    """One analysis and its files."""

    def __init__(self, folder: Path, principal: str, name: str) -> None:
        self.id = folder.name
        self.principal = principal
        self.name = name
        self.state: Literal["receiving", "waiting", "running", "ready", "failed"] = "receiving"
        self.error = ""
        self.notes: list[str] = []
        self.size_bytes = 0
        self.created_at = time.time()
        self.used_at = time.monotonic()
        self.frames: dict[str, int] = {}
        """How many there are, by name."""
        self.protocols: dict[str, int] = {}
        """How many frames there are, by protocol."""
        self.violations = 0
        self.folder = folder

    @property
    def expires_at(self) -> float:
        """When it is removed unless it is used before."""
        return time.time() + self.used_at + _KEPT_S - time.monotonic()

    @property
    def capture(self) -> Path:
        """What was uploaded; removed when it was read."""
        return self.folder / "capture"

    @property
    def results(self) -> Path:
        """What the analyzer has written."""
        return self.folder / "frames.db"

    @property
    def is_done(self) -> bool:
        """Whether nothing more happens to it."""
        return self.state in ("ready", "failed")


class HeldAnalyses:
    """All analyses of a server. Their files are in its data directory, and removed with them; what
    a killed server has left is removed when the next one is made."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._held: dict[str, HeldAnalysis] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running = asyncio.Semaphore(_RUNNING)
        self._own: dict[str, asyncio.Lock] = {}
        """Of users whose captures are read: one at a time, so that others have a turn, too."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="crosswire-analyses")
        self._timer: asyncio.TimerHandle | None = None
        self._is_clean = False

    def of(self, principal: str) -> list[HeldAnalysis]:
        """Those of a user, the newest first."""
        return [each for each in reversed(self._held.values()) if each.principal == principal]

    def get(self, identifier: str, principal: str) -> HeldAnalysis:
        """One of a user. Raises UnknownMessage."""
        held = self._held.get(identifier)
        if held is None or held.principal != principal:
            raise UnknownMessage(f"there is no analysis {identifier!r}: it may have expired")
        held.used_at = time.monotonic()
        return held

    def remove(self, identifier: str, principal: str) -> None:
        """Remove one of a user. Raises UnknownMessage."""
        self._drop(self.get(identifier, principal))

    async def receive(
        self, chunks: AsyncIterator[bytes], principal: str, job: CaptureJob, name: str
    ) -> HeldAnalysis:
        """Take in a capture, and begin to read it; `job` has what the user knows about it. Raises
        ServiceUnavailable, and what `chunks` raises."""
        held = self._reserve(principal, name)
        try:
            await self._store(held, chunks)
        except BaseException as error:
            self._drop(held)
            if isinstance(error, OSError):
                raise ServiceUnavailable(f"it can't be stored: {error.strerror}") from error
            raise
        if held.id not in self._held:
            raise ServiceUnavailable("the hub is stopping")
        held.state = "waiting"
        job = msgspec.structs.replace(
            job,
            path=str(held.capture),
            results=str(held.results),
            name=name or "the capture",
            memory_bytes=_MEMORY_BYTES,
            cpu_s=_CPU_S,
            output_bytes=_OUTPUT_BYTES,
        )
        task = asyncio.create_task(self._analyze(held, job))
        self._tasks[held.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(held.id, None))
        return held

    def cancel_all(self) -> None:
        """End all processes and remove all analyses."""
        for held in list(self._held.values()):
            self._drop(held)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def finish(self) -> None:
        """Wait for the processes that were ended."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._threads.shutdown(cancel_futures=True)

    # Slots and files.

    def _reserve(self, principal: str, name: str) -> HeldAnalysis:
        self._expire()
        own = [each for each in self._held.values() if each.principal == principal]
        most = _MOST_EACH if principal else _MOST
        if len(own) >= most or len(self._held) >= _MOST:
            done = [each for each in own if each.is_done]
            if not done:
                raise ServiceUnavailable("there are too many analyses: retry in a minute")
            self._drop(min(done, key=lambda each: each.used_at))
        parent = Path(self._server.config.data) / _FOLDER
        if not self._is_clean:
            shutil.rmtree(parent, ignore_errors=True)
            self._is_clean = True
        folder = parent / secrets.token_hex(8)
        try:
            folder.mkdir(parents=True, mode=0o700)
        except OSError as error:
            raise ServiceUnavailable(f"it can't be stored: {error.strerror}") from error
        held = self._held[folder.name] = HeldAnalysis(folder, principal, name)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_KEPT_S / 15, self._tick)
        return held

    async def _store(self, held: HeldAnalysis, chunks: AsyncIterator[bytes]) -> None:
        waiting = bytearray()
        with held.capture.open("wb", buffering=0) as file:
            async for chunk in chunks:
                held.size_bytes += len(chunk)
                waiting += chunk
                if len(waiting) >= _WRITTEN_BYTES:
                    await self.in_thread(file.write, bytes(waiting))
                    waiting.clear()
            await self.in_thread(file.write, bytes(waiting))
        if not held.size_bytes:
            raise InvalidInput("the capture is empty")

    def _tick(self) -> None:
        self._timer = None
        self._expire()
        if self._held:
            self._timer = asyncio.get_running_loop().call_later(_KEPT_S / 15, self._tick)

    def _expire(self) -> None:
        now = time.monotonic()
        for held in list(self._held.values()):
            if held.is_done and now - held.used_at > _KEPT_S:
                self._drop(held)

    def _drop(self, held: HeldAnalysis) -> None:
        self._held.pop(held.id, None)
        task = self._tasks.get(held.id)
        if task is not None and task is not asyncio.current_task():
            # It removes the files when the process has ended.
            task.cancel()
        else:
            shutil.rmtree(held.folder, ignore_errors=True)

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run it on a thread for analyses: the hub's others are not kept busy by their searches."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    # The process.

    @asynccontextmanager
    async def _turn_of(self, principal: str) -> AsyncIterator[None]:
        if not principal:
            yield
            return
        own = self._own.setdefault(principal, asyncio.Lock())
        async with own:
            yield
        if not any(each.principal == principal for each in self._held.values()):
            self._own.pop(principal, None)

    async def _analyze(self, held: HeldAnalysis, job: CaptureJob) -> None:
        try:
            async with self._turn_of(held.principal), self._running:
                held.state = "running"
                outcome = await self._run(job)
            held.capture.unlink(missing_ok=True)
            held.notes = outcome.notes
            if not outcome.error:
                found = await self.in_thread(ResultReader(held.results).names)
                held.frames, held.protocols, held.violations = found
            held.error, held.state = outcome.error, "failed" if outcome.error else "ready"
        except InvalidInput as error:
            held.error, held.state = f"it can't be analyzed: {error}", "failed"
        except OSError as error:
            # Its text names files of the server: who uploaded it need not administer the hub.
            held.error, held.state = f"it can't be analyzed: {error.strerror}", "failed"
            log_event(_log, logging.ERROR, "a capture can't be analyzed", reason=str(error))
        finally:
            held.used_at = time.monotonic()
            if held.id not in self._held:
                shutil.rmtree(held.folder, ignore_errors=True)

    async def _run(self, job: CaptureJob) -> CaptureOutcome:
        """Run a process that reads the capture; it is killed if it takes too long."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "crosswire.analyzer",
            msgspec.json.encode(job).decode(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(_WALL_S):
                answer, errors = await process.communicate()
        except TimeoutError:
            return _cut(job, f"reading it takes longer than {_WALL_S:g} s")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode == 0:
            return msgspec.json.decode(answer, type=CaptureOutcome)
        if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return _cut(job, f"reading it takes more than {job.cpu_s} s of processor time")
        log_event(
            _log,
            logging.ERROR,
            "the analyzer failed",
            code=process.returncode,
            description=errors.decode(errors="replace")[-_STDERR:],
        )
        return CaptureOutcome(error="it can't be read: the analyzer failed, see the hub's log")


def _cut(job: CaptureJob, reason: str) -> CaptureOutcome:
    """What was written before the process was killed can be read, if that is anything."""
    try:
        frames, _, _ = ResultReader(Path(job.results)).names()
    except InvalidInput:
        frames = {}
    if not frames:
        return CaptureOutcome(error=reason)
    return CaptureOutcome(
        notes=[f"{reason}: only the first {sum(frames.values())} frames are shown"]
    )
