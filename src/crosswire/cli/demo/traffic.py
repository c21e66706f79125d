"""The demo's traffic: five scenes at once, invalid bytes, cut connections, and a kill."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from crosswire.cli.demo.calculator import Calculator
from crosswire.cli.demo.chat import Chat
from crosswire.cli.demo.folder import DemoFolder
from crosswire.cli.demo.invalid_bytes import send_invalid_bytes
from crosswire.cli.demo.jobs import Jobs
from crosswire.cli.demo.orders import Orders
from crosswire.cli.demo.process import HubProcess
from crosswire.cli.demo.progress import DemoProgress
from crosswire.cli.demo.scene import HOST, Scene
from crosswire.cli.demo.ticks import Ticks
from crosswire.cli.hub import Api
from crosswire.plurals import plural

__all__ = ["DemoTraffic"]

_POLL_S = 0.2
_SETTLE_S = 30.0


class DemoTraffic:
    """Starts the hub and runs the scenes; they have the counts when `run` returns."""

    def __init__(self, folder: DemoFolder, seconds: float, progress: DemoProgress) -> None:
        self._hub = HubProcess(folder.config, folder.log)
        self._folder = folder
        self._seconds = seconds
        self._progress = progress
        self._ports: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.scenes: list[Scene] = []

    async def run(self) -> None:
        """Run until all acknowledged messages have arrived, or 30 s after the last was sent.

        Raises CrosswireError if the hub does not start, or the error of a scene that failed.
        """
        progress = self._progress
        try:
            self._ports = await self._hub.start()
            progress.line(
                f"1  A hub, process {self._hub.pid}, on {plural(len(self._ports), 'free port')}; "
                f"store, lake and tap are in {self._folder.folder}"
            )
            await self._run_scenes()
        finally:
            await self._end()

    def abandon(self) -> None:
        """Kill the hub if it still runs."""
        self._hub.abandon()

    async def _run_scenes(self) -> None:
        progress, chat = self._progress, Chat(self._ports)
        self.scenes = [
            Orders(self._ports),
            Jobs(self._ports),
            chat,
            Calculator(self._ports),
            Ticks(self._ports),
        ]
        progress.line(f"2  Traffic in all five protocols at once, for {self._seconds:g} s")
        wide = max(len(scene.route) for scene in self.scenes)
        for scene in self.scenes:
            progress.line(f"     {scene.title:<7} {scene.route:<{wide}}  {scene.description}")
        ending = asyncio.Event()
        progress.restart()
        loop = asyncio.get_running_loop()
        start = loop.time()
        self._tasks = [asyncio.create_task(scene.run(ending)) for scene in self.scenes]
        steps: list[tuple[float, Callable[[], Awaitable[str]]]] = [
            (0.1, self._send_invalid_bytes),
            (0.25, lambda: self._cut(chat)),
            (0.5, self._kill),
            (0.75, lambda: self._cut(chat)),
        ]
        for share, step in steps:
            await self._until(start + share * self._seconds)
            begun = loop.time()
            progress.event(await step())
            # The restart of the hub does not shorten the traffic after it.
            start += loop.time() - begun
        await self._until(start + self._seconds)
        ending.set()
        progress.event("senders stopped")
        await self._settle()
        progress.event("receivers finished")

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._hub.stop()

    # The steps.

    async def _send_invalid_bytes(self) -> str:
        count = await send_invalid_bytes(self._ports)
        return f"{plural(count, 'connection')} sent invalid bytes to all ports; the hub closed them"

    async def _cut(self, chat: Chat) -> str:
        await chat.cut()
        return "the chat's connections are cut; its links resume"

    async def _kill(self) -> str:
        """Kill the hub while messages are unacknowledged, and start it again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                while not any(scene.under_way for scene in self.scenes):
                    await asyncio.sleep(0)
        old = self._hub.pid
        under_way = sum(scene.under_way for scene in self.scenes)
        acknowledged = sum(len(scene.acknowledged) for scene in self.scenes)
        await self._hub.kill()
        self._progress.event(
            f"kill -9 {old}: {plural(acknowledged, 'message')} acknowledged, {under_way} under way"
        )
        await self._hub.start()
        return f"restarted as process {self._hub.pid} on the same files; clients reconnect"

    # Waiting.

    async def _until(self, moment: float) -> None:
        while (left := moment - asyncio.get_running_loop().time()) > 0:
            self._show_counts()
            await asyncio.sleep(min(_POLL_S, left))

    def _show_counts(self) -> None:
        """Show the counts. Raises the error of a scene that failed."""
        for task in self._tasks:
            if task.done() and (error := task.exception()) is not None:
                raise error
        counts = "  ".join(f"{each.title} {len(each.acknowledged):,}" for each in self.scenes)
        self._progress.show(f"{counts}  acknowledged")

    async def _settle(self) -> None:
        """Wait until everything acknowledged has arrived or is a dead letter, 30 s at most."""
        api = Api(f"http://{HOST}:{self._ports['http']}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                while any(scene.lost or scene.is_busy for scene in self.scenes):
                    await asyncio.sleep(_POLL_S)
                    self._show_counts()
                    await self._find_dead_letters(api)

    async def _find_dead_letters(self, api: Api) -> None:
        there: dict[str, Any] = await asyncio.to_thread(api.get, "/v1/dead")
        queues = {each["queue"] for each in there["queues"]}
        for scene in self.scenes:
            if scene.queue in queues:
                found: dict[str, Any] = await asyncio.to_thread(
                    api.get, "/v1/dead/letters", queue=scene.queue, limit=1000
                )
                scene.find_dead_letters(found["letters"])
