"""The cost of the lake: durable publishes per second with and without it, alternating.

Run it with `python benchmarks/lake.py`; `--seconds` is the length of a turn. Turns with and without
a lake alternate, so that changes of the machine's load affect both.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from random import Random

import uvloop

from crosswire.client.native.dial import dial
from crosswire.client.native.emp import EmpPeer
from crosswire.config import PLAIN_LISTENERS, Config, LakeSettings, TapSettings
from crosswire.envelope import Envelope
from crosswire.hub.hub import Hub
from crosswire.hub.policies import HubConfig
from crosswire.server.lake_encoder import LakeEncoder
from crosswire.server.lake_feed import STEP_NAMES, LakeFeed
from crosswire.server.server import Server
from crosswire.store.rocks import RocksStore
from crosswire.wire.emp.connection import EmpConnection

PAYLOAD = bytes(range(128))
CRC = zlib.crc32(PAYLOAD)
GROUP = 1000
PUBLISH = b'{"destination":"topic/bench","text":"' + b"x" * 128 + b'"}'


def envelopes(count: int) -> list[Envelope]:
    return [
        Envelope(
            destination="topic/bench",
            kind="publish",
            payload=PAYLOAD,
            protocol="bench",
            connection="bench-1",
            crc=CRC,
        )
        for _ in range(count)
    ]


async def core(path: Path, lake: LakeSettings | None, seconds: float) -> float:
    """Groups of a thousand directly into the hub, two of them unacknowledged."""
    store = RocksStore(path / "store")
    config = HubConfig(lake=lake is not None)
    hub = Hub(store, config, now=time.time(), random=Random(1), clock=time.time)
    hub.commits.start(asyncio.get_running_loop())
    feed = None
    if lake is not None:
        encoder = LakeEncoder(path / "lake", hub.node, STEP_NAMES)
        feed = LakeFeed(hub, lake, path / "lake", count=lambda *_, **__: None, encoder=encoder)
        await feed.start()
    waiting = []
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        waiting.append(hub.produce(envelopes(GROUP), time.time()))
        if len(waiting) > 2:
            await waiting.pop(0)
        done += GROUP
    for receipt in waiting:
        await receipt
    rate = done / (time.perf_counter() - start)
    if feed is not None:
        await feed.stop()
    await hub.commits.close()
    return rate


async def sockets(path: Path, lake: LakeSettings, seconds: float) -> float:
    """EMP over loopback: four connections, 256 concurrent publishes on each."""
    listen = dict.fromkeys(PLAIN_LISTENERS, "off") | {"emp": "127.0.0.1:0"}
    server = Server(Config(data=str(path), listen=listen, lake=lake))
    port = (await server.start())["emp"].port
    peers = []
    for _ in range(4):
        peer = EmpPeer({})
        await dial("127.0.0.1", port, lambda now: EmpConnection("client", now), peer)
        await peer.opened
        peers.append(peer)
    done, start = 0, time.perf_counter()

    async def publish(peer: EmpPeer) -> None:
        nonlocal done
        while time.perf_counter() - start < seconds:
            await peer.request_json("$publish", PUBLISH)
            done += 1

    await asyncio.gather(*(publish(peer) for peer in peers for _ in range(256)))
    rate = done / (time.perf_counter() - start)
    for peer in peers:
        await peer.close()
    await server.stop()
    return rate


OFF = LakeSettings(messages=False, ledger=False)
ON = LakeSettings()
TAPPED = LakeSettings(tap=TapSettings(listeners=("emp",)))


async def turn(what: str, name: str, seconds: float) -> float:
    gc.collect()
    settings = {"off": OFF, "on": ON, "on, tapped": TAPPED}[name]
    with tempfile.TemporaryDirectory(prefix="crosswire-bench-") as folder:
        if what == "core":
            return await core(Path(folder), None if name == "off" else settings, seconds)
        return await sockets(Path(folder), settings, seconds)


async def compare(seconds: float, turns: int) -> None:
    for what, title, names in (
        ("core", "hub core, durable publishes of 128 bytes", ("off", "on")),
        (
            "sockets",
            "EMP on loopback, client and hub in one process",
            ("off", "on", "on, tapped"),
        ),
    ):
        rates: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(turns):
            for name in names:
                rates[name].append(await turn(what, name, seconds))
        print(title)
        base = statistics.median(rates["off"])
        for name in names:
            rate = statistics.median(rates[name])
            print(f"  lake {name:<12}{rate:>12,.0f}/s {rate / base:>7.2f} ×")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    uvloop.run(compare(options.seconds, options.turns))


if __name__ == "__main__":
    main()
