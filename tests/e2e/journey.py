"""Which functions one message passes: an EMP publish that a MicroMsg2 consumer gets.

    python -m tests.e2e.journey

prints them by file, in the order in which they are first entered. `docs/architecture.md` describes
this journey, and test_architecture.py compares the two.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

import crosswire
from crosswire.client.native.emp import EmpClient
from crosswire.client.native.micromsg2 import MicroMsg2Client
from crosswire.commitlog.contract import CommitGroup
from crosswire.config import Config, LakeSettings
from crosswire.hub import turns
from crosswire.hub.commits import CommitStage
from crosswire.hub.ledger import Ledger, Step
from crosswire.listeners import PLAIN_LISTENERS
from crosswire.server.server import Server
from crosswire.store.contract import StoreLimits

SOURCES = Path(crosswire.__file__).parent
PUBLISHES = 40
"""Enough for what is looked up every tenth of a second: each takes the 5 ms after which the row of
its delivery is committed."""
QUEUE = "queue/orders"

TIMEKEEPING = frozenset(
    {
        "Activities.begin",
        "Activity.begin",
        "CommitPath._sync_soon",
        "LakeFeed._run",
        "RocksStore._look_at_manifest",
        "Timekeeper._check_memory",
        "Timekeeper._check_newcomers",
        "Timekeeper._close_idle",
        "Timekeeper._keep_time",
        "Timekeeper._run_timers",
        "Watchdog._run",
        "Watchdog.check",
    }
)
"""Entered by timers, threads and tasks of their own, whether a message is on its way or not, and
what begins anew every few seconds."""


class Journey:
    """The functions of our sources that are entered while it is `on`, in order."""

    def __init__(self) -> None:
        self.on = False
        self.entered: dict[tuple[str, str], None] = {}

    def install(self) -> None:
        """For this thread, and those that it starts."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def remove(self) -> None:
        """From this thread; others don't enter anything while it is off."""
        threading.setprofile(None)
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call" or not self.on:
            return
        name = self._name(frame)
        if name is None or name in self.entered or self._is_timekeeping(frame):
            return
        self.entered[name] = None

    def _is_timekeeping(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_qualname in TIMEKEEPING:
                return True
            frame = frame.f_back
        return False

    @staticmethod
    def _name(frame: FrameType) -> tuple[str, str] | None:
        """File and function; None for comprehensions and for what is not ours."""
        path = Path(frame.f_code.co_filename)
        name = frame.f_code.co_qualname.replace(".<locals>", "")
        if name.endswith(">") or SOURCES not in path.parents:
            return None
        return path.relative_to(SOURCES).as_posix(), name


def config(data: Path) -> Config:
    """EMP and MicroMsg2 only, and a disk that is never waited for: every run takes one path."""
    listen = {
        name: "127.0.0.1:0" if name in ("emp", "micromsg2") else "off" for name in PLAIN_LISTENERS
    }
    return Config(
        data=str(data),
        listen=listen,
        drain_s=0.2,
        store=StoreLimits(patience_s=0),
        lake=LakeSettings(seal_s=3600),
    )


class DeliveryRecords:
    """Waits until the ledger's row of a delivery is committed.

    That row is in a group of its own, a few milliseconds after the message's. Nobody waits for it,
    so without this a journey would have that group's functions or not, as slow as the clients are.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._committed = asyncio.Event()

    def take(self, _group: CommitGroup) -> None:
        """A commit listener."""
        if any(run.step is Step.DELIVERED for run in self._ledger.committed_runs):
            self._committed.set()

    async def next(self) -> None:
        """Returns when one was committed since the last call."""
        await self._committed.wait()
        self._committed.clear()


async def settled(server: Server) -> None:
    """Returns when the queue is empty and everything is on disk."""
    while server.hub.queue(QUEUE).length:
        await asyncio.sleep(0.001)
    await server.hub.commits.flush()


async def publish(
    server: Server,
    loop: asyncio.AbstractEventLoop,
    journey: Journey,
    deliveries: DeliveryRecords,
) -> None:
    """Some messages that warm up, then some that count. Runs on a thread of its own."""

    async def on_hub(coroutine: Coroutine[Any, Any, None]) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))

    ports = {name: listener.address.port for name, listener in server.listeners.items()}
    host = "127.0.0.1"
    async with (
        EmpClient(host, ports["emp"]) as producer,
        MicroMsg2Client(host, ports["micromsg2"]) as consumer,
        consumer.subscribe(QUEUE) as subscription,
    ):
        for number in range(2 * PUBLISHES):
            journey.on = number >= PUBLISHES
            request = producer.request("$publish", {"destination": QUEUE, "json": number})
            acknowledged = asyncio.ensure_future(request)
            delivery = await anext(subscription)
            await acknowledged
            assert msgspec.json.decode(delivery.payload) == number
            await on_hub(deliveries.next())
            journey.on = False
            delivery.acknowledge()
            # What a settlement does must not be in the next message's journey.
            await on_hub(settled(server))


async def trace(data: Path) -> dict[tuple[str, str], None]:
    """File and function of all that a message passes, in the order of the first entry."""
    journey = Journey()
    server = Server(config(data))
    journey.install()
    # Tracing makes everything slow: no turn of the event loop ends before its work is done.
    before, turns.TURN_S = turns.TURN_S, 60.0  # type: ignore[misc]
    try:
        await server.start()
        deliveries = DeliveryRecords(server.hub.ledger)
        server.hub.commits.add_listener(CommitStage.LAKE, deliveries.take)
        # Clients use the same sources, on a thread that is not traced.
        loop = asyncio.get_running_loop()
        failure = await asyncio.to_thread(_run_clients, server, loop, journey, deliveries)
        await server.stop()
    finally:
        journey.remove()
        turns.TURN_S = before  # type: ignore[misc]
    if failure is not None:
        raise failure
    return journey.entered


def _run_clients(
    server: Server,
    loop: asyncio.AbstractEventLoop,
    journey: Journey,
    deliveries: DeliveryRecords,
) -> BaseException | None:
    sys.setprofile(None)
    try:
        asyncio.run(publish(server, loop, journey, deliveries))
    except BaseException as error:
        return error
    return None


def by_file(entered: dict[tuple[str, str], None]) -> dict[str, list[str]]:
    """Functions of each file."""
    files: dict[str, list[str]] = {}
    for file, function in entered:
        files.setdefault(file, []).append(function)
    return files


def main() -> None:
    """Print the journey."""
    with tempfile.TemporaryDirectory() as folder:
        entered = asyncio.run(trace(Path(folder) / "data"))
    files = by_file(entered)
    for file, functions in files.items():
        print(f"{file}: {', '.join(functions)}")
    print(f"{len(files)} files, {len(entered)} functions", file=sys.stderr)


if __name__ == "__main__":
    main()
