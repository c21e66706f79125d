"""Five protocols on one hub for a quarter of a minute, with a kill in the middle."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from crosswire.cli.demo.calculator import Calculator
from crosswire.cli.demo.chat import Chat
from crosswire.cli.demo.jobs import Jobs
from crosswire.cli.demo.orders import Orders
from crosswire.cli.demo.process import HubProcess
from crosswire.cli.demo.scene import Scene
from crosswire.cli.demo.ticks import Ticks
from crosswire.cli.demo.trouble import make_trouble
from crosswire.cli.table import print_table

__all__ = ["configure", "run"]

_SETTLE_S = 30.0


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    parser.add_argument("--data", default="demo-data", help="where the hub keeps it (made anew)")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long traffic is made")
    parser.add_argument("--json", action="store_true", help="the outcome as a JSON object")


def run(options: argparse.Namespace) -> int:
    scenes = uvloop.run(_play(Path(options.data), options.seconds))
    lost = sum(len(scene.lost) for scene in scenes)
    if options.json:
        flows = {scene.title: scene.outcome() for scene in scenes}
        print(msgspec.json.encode({"flows": flows, "lost": lost}).decode())
    else:
        _show(scenes)
    acknowledged = sum(len(scene.acknowledged) for scene in scenes)
    if lost:
        print(f"\n{lost} of {acknowledged:,} acknowledged messages were lost.", file=sys.stderr)
        return 1
    print(
        f"\nNothing was lost: all {acknowledged:,} messages that the hub acknowledged arrived, "
        "although it was killed in the middle.",
        file=sys.stderr,
    )
    data = options.data
    print(f"Go on by hand:  crosswire serve --data {data} & crosswire queue list", file=sys.stderr)
    return 0


async def _play(data: Path, seconds: float) -> list[Scene]:
    shutil.rmtree(data, ignore_errors=True)
    bond = Path(__file__).with_name("calc.bond")
    hub = HubProcess(data, bond)
    ports = await hub.start()
    _say(f"hub {hub.pid} is up: {', '.join(sorted(ports))}")
    scenes: list[Scene] = [Orders(ports), Jobs(ports), Chat(ports), Calculator(ports), Ticks(ports)]
    for scene in scenes:
        _say(f"  {scene.title}: {scene.story}")
    curtain = asyncio.Event()
    acts = [asyncio.create_task(scene.play(curtain)) for scene in scenes]
    try:
        await _progress(scenes, seconds / 2)
        await make_trouble(ports)
        _say("  strangers sent garbage to every port; nobody else noticed")
        _say(f"  kill -9 {hub.pid}, in the middle of it all")
        await hub.kill()
        await hub.start()
        _say(f"  hub {hub.pid} is up again on the same files; everybody reconnects")
        await _progress(scenes, seconds / 2)
        curtain.set()
        await _settle(scenes)
    finally:
        for act in acts:
            act.cancel()
        results = await asyncio.gather(*acts, return_exceptions=True)
        await hub.stop()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return scenes


async def _progress(scenes: list[Scene], seconds: float) -> None:
    end = asyncio.get_running_loop().time() + seconds
    while (left := end - asyncio.get_running_loop().time()) > 0:
        await asyncio.sleep(min(1.0, left))
        counts = "  ".join(f"{scene.title} {len(scene.acknowledged):,}" for scene in scenes)
        _say(f"  acknowledged so far:  {counts}")


async def _settle(scenes: list[Scene]) -> None:
    """Wait until everything acknowledged has arrived, or has had every chance to."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SETTLE_S):
            while any(scene.lost or scene.is_busy for scene in scenes):
                await asyncio.sleep(0.1)


def _show(scenes: list[Scene]) -> None:
    print()
    head = ("flow", "way", "tried", "acknowledged", "arrived", "again", "lost", "and")
    rows = []
    for scene in scenes:
        outcome = scene.outcome()
        counts = [f"{outcome[name]:,}" for name in ("tried", "acknowledged", "arrived", "again")]
        rows.append((scene.title, scene.way, *counts, outcome["lost"], scene.aside()))
    print_table(head, rows)


def _say(text: str) -> None:
    print(text, file=sys.stderr)
