"""The traffic: five scenes at once, strangers, cuts, a kill in the middle; then the count."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from crosswire.cli.demo.calculator import Calculator
from crosswire.cli.demo.chat import Chat
from crosswire.cli.demo.folder import DemoFolder
from crosswire.cli.demo.jobs import Jobs
from crosswire.cli.demo.orders import Orders
from crosswire.cli.demo.process import HubProcess
from crosswire.cli.demo.scene import HOST, Scene
from crosswire.cli.demo.ticker import Ticker
from crosswire.cli.demo.ticks import Ticks
from crosswire.cli.demo.trouble import make_trouble
from crosswire.cli.hub import Api

__all__ = ["DemoRun"]

_LOOK_S = 0.2
_SETTLE_S = 30.0


class DemoRun:
    """One performance; `scenes` have the counts when it is over."""

    def __init__(self, folder: DemoFolder, seconds: float, ticker: Ticker) -> None:
        self._hub = HubProcess(folder.config, folder.log)
        self._folder = folder
        self._seconds = seconds
        self._ticker = ticker
        self._ports: dict[str, int] = {}
        self._acts: list[asyncio.Task[None]] = []
        self.scenes: list[Scene] = []

    async def perform(self) -> None:
        """Raises CrosswireError if the hub does not start, or what a scene did not expect."""
        ticker = self._ticker
        try:
            self._ports = await self._hub.start()
            ticker.line(
                f"1  A hub, process {self._hub.pid}, on {len(self._ports)} free ports; its store, "
                f"lake and tap are in {self._folder.folder}"
            )
            await self._act()
        finally:
            await self._end()

    def abandon(self) -> None:
        """Leave no hub running, whatever happened."""
        self._hub.abandon()

    async def _act(self) -> None:
        ticker, chat = self._ticker, Chat(self._ports)
        self.scenes = [
            Orders(self._ports),
            Jobs(self._ports),
            chat,
            Calculator(self._ports),
            Ticks(self._ports),
        ]
        ticker.line(f"2  Traffic in all five protocols at once, for {self._seconds:g} s")
        wide = max(len(scene.way) for scene in self.scenes)
        for scene in self.scenes:
            ticker.line(f"     {scene.title:<7} {scene.way:<{wide}}  {scene.story}")
        curtain = asyncio.Event()
        ticker.restart()
        loop = asyncio.get_running_loop()
        start = loop.time()
        self._acts = [asyncio.create_task(scene.play(curtain)) for scene in self.scenes]
        script: list[tuple[float, Callable[[], Awaitable[str]]]] = [
            (0.1, self._strangers),
            (0.25, lambda: self._cut(chat)),
            (0.5, self._kill),
            (0.75, lambda: self._cut(chat)),
        ]
        for share, act in script:
            await self._until(start + share * self._seconds)
            begun = loop.time()
            ticker.event(await act())
            # However long a hub takes to come back, there is as much traffic after it.
            start += loop.time() - begun
        await self._until(start + self._seconds)
        curtain.set()
        ticker.event("nothing more is sent")
        await self._settle()
        ticker.event("the receivers have had time to take what there was")

    async def _end(self) -> None:
        for act in self._acts:
            act.cancel()
        await asyncio.gather(*self._acts, return_exceptions=True)
        await self._hub.stop()

    # What happens.

    async def _strangers(self) -> str:
        count = await make_trouble(self._ports)
        return f"{count} strangers have sent garbage to all ports and were shown out"

    async def _cut(self, chat: Chat) -> str:
        await chat.cut()
        return "the chat's links are cut; they go on where they were"

    async def _kill(self) -> str:
        """In the middle of it: when something is on its way."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                while not any(scene.under_way for scene in self.scenes):
                    await asyncio.sleep(0)
        old = self._hub.pid
        under_way = sum(scene.under_way for scene in self.scenes)
        acknowledged = self._acknowledged
        await self._hub.kill()
        self._ticker.event(
            f"kill -9 {old}: {acknowledged} messages acknowledged, {under_way} under way"
        )
        await self._hub.start()
        return f"process {self._hub.pid} is the hub now, on the same files; everybody comes back"

    # Waiting.

    @property
    def _acknowledged(self) -> str:
        return f"{sum(len(scene.acknowledged) for scene in self.scenes):,}"

    async def _until(self, moment: float) -> None:
        while (left := moment - asyncio.get_running_loop().time()) > 0:
            self._look()
            await asyncio.sleep(min(_LOOK_S, left))

    def _look(self) -> None:
        """Show how things stand; a scene that failed ends it all."""
        for act in self._acts:
            if act.done() and (error := act.exception()) is not None:
                raise error
        counts = "  ".join(f"{each.title} {len(each.acknowledged):,}" for each in self.scenes)
        self._ticker.show(f"{counts}  acknowledged")

    async def _settle(self) -> None:
        """Wait until everything acknowledged has arrived, or has had every chance to."""
        api = Api(f"http://{HOST}:{self._ports['http']}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                while any(scene.lost or scene.is_busy for scene in self.scenes):
                    await asyncio.sleep(_LOOK_S)
                    self._look()
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
