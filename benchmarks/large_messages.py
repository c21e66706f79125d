"""How long one large message keeps the event loop busy, in milliseconds for each MiB.

Usage: python benchmarks/large_messages.py [ROUNDS]

A hub of its own takes texts by EMP, and bytes by each protocol, to a queue, one at a time. Its own
histogram of turns (`crosswire_loop_turn_seconds`, by the thread's clock) gives the time of all
turns together, and the bound below which each of them was. How long a text takes depends on its
characters: plain ones are copied, others are decoded and encoded one by one.
"""

from __future__ import annotations

import asyncio
import re
import sys
import urllib.request
from itertools import pairwise

import crosswire
from crosswire.testing import RunningHub, running_hub

PROTOCOLS = ("emp", "epoxy", "micromsg2", "relink", "emqp")
MEGABYTES = (1, 2, 4, 8, 16, 32)
FEW = (4, 16)
TEXTS = {"plain": "x", "accents": "xé", "escapes": "é\n"}
_NAME = "crosswire_loop_turn_seconds"


def turns(hub: RunningHub) -> tuple[float, dict[float, int]]:
    """What all turns took so far, and how many were up to each bound."""
    with urllib.request.urlopen(f"http://{hub.listen['http']}/metrics") as response:
        text = response.read().decode()
    total = re.search(rf"^{_NAME}_sum (\S+)$", text, re.MULTILINE)
    assert total is not None
    found = re.findall(rf'^{_NAME}_bucket{{le="([^"]+)"}} (\d+)$', text, re.MULTILINE)
    return float(total[1]), {float(bound): int(count) for bound, count in found}


def longest_s(before: dict[float, int], after: dict[float, int]) -> float:
    """The bound of the longest turn in between."""
    new = {bound: after[bound] - before[bound] for bound in after}
    longer = [high for low, high in pairwise(new) if new[high] > new[low]]
    return max(longer, default=next(iter(new)))


async def measure(rounds: int) -> None:
    async with running_hub() as hub:
        print("protocol   payload   MiB            ms   ms for each MiB   longest turn, up to")
        for protocol in PROTOCOLS:
            async with crosswire.connect(hub.url(protocol)) as client:
                await client.publish("queue/large", "x")
                payloads: dict[str, tuple[str | bytes, tuple[int, ...]]] = {"bytes": (b"\xff", FEW)}
                if protocol == "emp":
                    payloads |= {name: (text, MEGABYTES) for name, text in TEXTS.items()}
                for name, (piece, sizes) in payloads.items():
                    for size in sizes:
                        times, longest = await measure_one(hub, client, piece, size, rounds)
                        each = [time / size for time in times]
                        print(
                            f"{protocol:10} {name:8}  {size:3}  {min(times):6.1f}–{max(times):6.1f}"
                            f"    {min(each):5.1f}–{max(each):5.1f}        {longest * 1000:5.0f} ms"
                        )


async def measure_one(
    hub: RunningHub, client: crosswire.Client, piece: str | bytes, size: int, rounds: int
) -> tuple[list[float], float]:
    """Milliseconds of each round, and the bound of the longest turn in seconds."""
    count = (size << 20) // len(piece.encode() if isinstance(piece, str) else piece)
    times, longest = [], 0.0
    for _ in range(rounds):
        before_s, before = turns(hub)
        await client.publish("queue/large", piece * count)
        after_s, after = turns(hub)
        times.append((after_s - before_s) * 1000)
        longest = max(longest, longest_s(before, after))
    return times, longest


if __name__ == "__main__":
    asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
