"""How long one large message keeps the event loop busy, in milliseconds for each MiB.

Usage: python benchmarks/large_messages.py [ROUNDS]

A hub of its own takes texts by EMP, to a queue, one at a time. Its own histogram of turns
(`crosswire_loop_turn_seconds`, by the thread's clock) gives the time.
"""

from __future__ import annotations

import asyncio
import re
import sys
import urllib.request

import crosswire
from crosswire.testing import RunningHub, running_hub

MEGABYTES = (1, 2, 4, 8, 16, 32)


def busy_s(hub: RunningHub) -> float:
    """What all turns took so far."""
    with urllib.request.urlopen(f"http://{hub.listen['http']}/metrics") as response:
        text = response.read().decode()
    found = re.search(r"^crosswire_loop_turn_seconds_sum (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


async def measure(rounds: int) -> None:
    async with running_hub() as hub, crosswire.connect(hub.url("emp")) as client:
        await client.publish("queue/large", "x")
        for size in MEGABYTES:
            body = "x" * (size << 20)
            times = []
            for _ in range(rounds):
                before = busy_s(hub)
                await client.publish("queue/large", body)
                times.append((busy_s(hub) - before) * 1000)
            each = [time / size for time in times]
            print(
                f"{size:3} MiB  {min(times):7.1f} to {max(times):7.1f} ms"
                f"  {min(each):5.1f} to {max(each):5.1f} ms for each MiB"
            )


if __name__ == "__main__":
    asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
