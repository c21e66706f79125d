"""A whole hub with its lake, under load, that is killed again and again, or whose encoder is.

`python -m tests.lake.crash --rounds 100` runs the long version and prints what came of it; with
`--attacks 50` the lake's encoder is suspended, resumed and killed as often in every life.

The child runs a server, publishes to it over real sockets as fast as it can, with a consumer that
settles most of it and a service that is called, and prints everything that was acknowledged. The
parent kills it, at any moment, and in the end holds the lake against what was promised.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pyarrow.parquet as pq

from crosswire.client.native.emp import EmpClient, Json
from crosswire.config import PLAIN_LISTENERS, Config, LakeSettings, TapSettings
from crosswire.errors import RequestFailed
from crosswire.hub.policies import TopicPolicy
from crosswire.lake.files import find
from crosswire.lake.verification import LakeFault, verify
from crosswire.server import lake_encoder, lake_feed
from crosswire.server.server import Server

__all__ = ["Outcome", "crash", "read_lake"]

ENCODER = b"crosswire.server.lake_process"
PATIENCE_S = 0.2
"""How long the hub waits for its encoder where that is attacked."""


class Outcome(msgspec.Struct):
    """What the promise is about, over all rounds."""

    rounds: int = 0
    acknowledged: int = 0
    messages: int = 0
    missing: int = 0
    doubled: int = 0
    not_accepted: int = 0
    not_in_lake: int = 0
    ledger_rows: int = 0
    wire_rows: int = 0
    lost_rows: int = 0
    gaps: int = 0
    suspended: int = 0
    killed: int = 0
    faults: list[LakeFault] = []

    @property
    def kept_promise(self) -> bool:
        wrong = self.missing or self.doubled or self.not_accepted or self.not_in_lake
        return not (wrong or self.gaps or self.faults)


# ------------------------------------------------------------------------------------------ child


def report(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def settings(path: str, seal_s: float, seal_bytes: int) -> Config:
    listen = dict.fromkeys(PLAIN_LISTENERS, "off") | {"emp": "127.0.0.1:0"}
    tap = TapSettings(listeners=("emp",))
    return Config(
        data=path,
        listen=listen,
        drain_s=0.5,
        topics={"passing": TopicPolicy(durable=False)},
        lake=LakeSettings(
            tap=tap, seal_s=seal_s, seal_bytes=seal_bytes, memory_bytes=4 * seal_bytes
        ),
    )


async def live(path: str, life: int, seed: int, *, calm: bool, attacked: bool) -> None:
    random = Random(seed)
    if attacked:
        # Every seal is an order for the encoder, a suspended one is noticed soon, and the next one
        # is started at once.
        lake_feed._ENCODER_BYTES = 1  # type: ignore[misc]
        lake_encoder._ANSWER_S = PATIENCE_S  # type: ignore[misc]
        lake_feed._RETRY_S = 0.01  # type: ignore[misc]
    seal_bytes = 1 << 20 if calm else random.choice((1 << 12, 1 << 16, 1 << 20))
    server = Server(settings(path, random.choice((0.02, 0.1, 0.3)), seal_bytes))
    addresses = await server.start()
    report("ready")
    if calm:
        await server.stop()
        return
    port = addresses["emp"].port

    async def deliver(_data: Json) -> Json:
        if random.random() < 0.1:
            raise RequestFailed("busy", "not now")
        return {}

    async def serve(data: Json) -> Json:
        return data

    taker = EmpClient("127.0.0.1", port, handlers={"$deliver": deliver, "ask": serve})
    giver = EmpClient("127.0.0.1", port)
    async with taker, giver:
        await taker.request("$subscribe", {"destination": "queue/q", "window": 50})
        await taker.request("$subscribe", {"destination": "topic/t", "name": "named"})
        await taker.request("$serve", {"services": ["ask"]})
        await asyncio.gather(*(load(giver, life, number, random) for number in range(20)))


async def load(client: EmpClient, life: int, number: int, random: Random) -> None:
    count = 0
    while True:
        count += 1
        key = f"{life}-{number}-{count}"
        filler = "." * random.choice((0, 50, 2000))
        destination = random.choice(("queue/q", "topic/t", "queue/elsewhere", "topic/passing"))
        asked = {"destination": destination, "json": [key, filler], "key": key}
        if random.random() < 0.1:
            await client.request("ask", {"key": key})
            continue
        await client.request("$publish", asked)
        if destination != "topic/passing":
            report(f"acknowledged {key}")


# ----------------------------------------------------------------------------------------- parent


def run_life(path: Path, life: int, random: Random, attack: Attack | None = None) -> list[str]:
    """Runs a hub and kills it; gives the keys of the messages that it acknowledged.

    Half of the hubs are killed at any moment, also before the first message. The others are killed
    after a number of acknowledgements, which a loaded machine reaches later, but does reach. With
    an attack on its encoder that comes first.
    """
    child = start(path, life, random.getrandbits(32), *(["--attacked"] if attack else []))
    assert child.stdout is not None
    try:
        output = read_until(child, b"ready", 1, time.monotonic())
        if attack is not None:
            output += attack.run(child)
        ends = time.monotonic() + random.uniform(0, 0.3)
        least = random.choice((0, random.randrange(50, 500)))
        output += read_until(child, b"acknowledged ", least, ends)
    finally:
        child.kill()
        rest, _ = child.communicate()
    output += rest
    whole = output[: output.rfind(b"\n") + 1].decode().split("\n")
    return [line.split()[1] for line in whole if line.startswith("acknowledged ")]


class Attack:
    """Suspends, resumes and kills the encoder of a hub while that goes on acknowledging."""

    def __init__(self, random: Random, count: int) -> None:
        self._random = random
        self._count = count
        self.suspended = 0
        self.killed = 0

    def run(self, child: subprocess.Popen[bytes]) -> bytes:
        """What the hub printed meanwhile."""
        output, done = b"", 0
        while done < self._count:
            output += self._more(child, self._random.randrange(1, 60))
            encoder = encoder_of(child.pid)
            if encoder is not None:
                done += 1
                output += self._hit(child, encoder)
        return output

    def _hit(self, child: subprocess.Popen[bytes], encoder: int) -> bytes:
        output = b""
        with suppress(ProcessLookupError):  # the hub has given it up meanwhile
            if self._random.random() < 0.4:
                os.kill(encoder, signal.SIGKILL)
                self.killed += 1
                return output
            os.kill(encoder, signal.SIGSTOP)
            self.suspended += 1
            output = self._more(child, self._random.randrange(1, 60))
            if self._random.random() < 0.3:
                # For so long that the hub takes another one.
                output += read_until(child, b"", 0, time.monotonic() + 2 * PATIENCE_S)
            os.kill(encoder, signal.SIGCONT)
        return output

    def _more(self, child: subprocess.Popen[bytes], count: int) -> bytes:
        return read_until(child, b"acknowledged ", count, time.monotonic())


def encoder_of(hub: int) -> int | None:
    """The process that makes the files of a hub's lake."""
    for children in Path(f"/proc/{hub}/task").glob("*/children"):
        with suppress(OSError):
            for each in children.read_text().split():
                if ENCODER in Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0"):
                    return int(each)
    return None


def read_until(child: subprocess.Popen[bytes], word: bytes, least: int, ends: float) -> bytes:
    """What a child prints until it printed the word `least` times and a moment is reached."""
    assert child.stdout is not None
    output = b""
    while (left := ends - time.monotonic()) > 0 or output.count(word) < least:
        # Without an end of time for the count: a child that ends is noticed.
        wait_s = left if output.count(word) >= least else None
        if select.select([child.stdout], [], [], wait_s)[0]:
            chunk = os.read(child.stdout.fileno(), 1 << 16)
            if not chunk:
                raise RuntimeError(f"the hub ended with exit code {child.wait()}")
            output += chunk
    return output


def start(path: Path, life: int, seed: int, *extra: str) -> subprocess.Popen[bytes]:
    arguments = ["--live", str(path), "--life", str(life), "--seed", str(seed), *extra]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.lake.crash", *arguments], stdout=subprocess.PIPE
    )


def read_lake(lake: Path, table: str, columns: list[str]) -> list[dict[str, Any]]:
    """All rows of a table, in order of seq."""
    rows: list[dict[str, Any]] = []
    for file in find(lake, (table,)):
        rows += pq.read_table(file.path, columns=columns, partitioning=None).to_pylist()
    return sorted(rows, key=lambda row: row["seq"])


def crash(rounds: int, seed: int, path: Path, *, attacks: int = 0, chatty: bool = False) -> Outcome:
    random = Random(seed)
    acknowledged: set[str] = set()
    attack = Attack(random, attacks) if attacks else None
    for life in range(rounds):
        acknowledged.update(run_life(path, life, random, attack))
        if chatty and (life + 1) % 10 == 0:
            print(f"{life + 1} lives, {len(acknowledged)} acknowledged", flush=True)
    last = start(path, rounds, seed, "--calm")
    last.communicate()
    if last.returncode:
        raise RuntimeError("the last life did not end well")
    outcome = compare(path / "lake", acknowledged, rounds)
    if attack is not None:
        outcome.suspended, outcome.killed = attack.suspended, attack.killed
    return outcome


def compare(lake: Path, acknowledged: set[str], rounds: int) -> Outcome:
    messages = read_lake(lake, "messages", ["seq", "id", "key", "destination"])
    ledger = read_lake(lake, "ledger", ["seq", "id", "step", "destination", "detail"])
    wire = read_lake(lake, "wire", ["seq", "kind"])
    # A dead letter is a message of its own, with everything but the id of the one that died.
    alive = [row for row in messages if not row["destination"].endswith("/dead")]
    keys = Counter(row["key"] for row in alive if row["key"])
    ids = Counter(row["id"] for row in messages)
    accepted = {
        row["id"]: row["destination"]
        for row in ledger
        if row["step"] == "accepted" and row["detail"] != "not durable"
    }
    stored = {each for each, where in accepted.items() if not where.startswith("service/")}
    return Outcome(
        rounds=rounds,
        acknowledged=len(acknowledged),
        messages=len(messages),
        missing=len(acknowledged - set(keys)),
        doubled=sum(count - 1 for count in (*keys.values(), *ids.values())),
        not_accepted=len(set(ids) - set(accepted)),
        not_in_lake=len(stored - set(ids)),
        ledger_rows=len(ledger),
        wire_rows=len(wire),
        lost_rows=sum(row["kind"] == "lost" for row in wire),
        gaps=len(read_lake(lake, "gaps", ["seq"])),
        faults=list(verify(lake)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--attacks", type=int, default=0, help="on the encoder, in every life")
    parser.add_argument("--live", metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--life", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--calm", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--attacked", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.live:
        calm, attacked = options.calm, options.attacked
        asyncio.run(live(options.live, options.life, options.seed, calm=calm, attacked=attacked))
        return
    with tempfile.TemporaryDirectory(prefix="crosswire-lake-") as directory:
        print(f"seed {options.seed}", flush=True)
        folder, attacks = Path(directory), options.attacks
        outcome = crash(options.rounds, options.seed, folder, attacks=attacks, chatty=True)
    print(outcome)
    raise SystemExit(not outcome.kept_promise)


if __name__ == "__main__":
    main()
