"""A hub under load that is killed, or whose machine loses power, again and again.

`python -m tests.store.crash --rounds 200` runs the long version and prints what came of it.

The child sends, publishes and settles as fast as it can, and reports everything that the hub
acknowledged, after the fact. The parent kills it, opens what it left, and compares. For a power cut
the child also reports, after every synced write, how long each log file is: what follows that may
be dropped, torn or written out of order.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec

from crosswire.commitlog.contract import Receipt
from crosswire.envelope import Envelope
from crosswire.hub.attachment import Attachment, Delivery, Notice, Window
from crosswire.hub.hub import Hub
from crosswire.hub.ledger import LedgerPeer
from crosswire.store.contract import StoreLimits
from crosswire.store.rocks import RocksStore

LIMITS = StoreLimits(buffer_bytes=256 * 1024, spare_bytes=0)
PEER = LedgerPeer("crash", "crash-1")
QUEUE, TOPIC, NAME = "queue/crash", "topic/crash/a", "crash"


class Tally(msgspec.Struct):
    """What the promise is about, over all rounds."""

    rounds: int = 0
    attempted: int = 0
    acknowledged: int = 0
    settled: int = 0
    recovered: int = 0
    lost: int = 0
    returned: int = 0
    duplicated: int = 0
    reused_ids: int = 0

    def __str__(self) -> str:
        return "  ".join(f"{name} {getattr(self, name)}" for name in self.__struct_fields__)

    @property
    def kept_promise(self) -> bool:
        return not (self.lost or self.returned or self.duplicated or self.reused_ids)


# ------------------------------------------------------------------------------------------ child


class ReportingStore(RocksStore):
    """Reports how long its logs are whenever all of that is on disk."""

    def _sync(self) -> None:
        sizes = []
        for each in self.path.glob("*.log"):
            # One that is gone by now is sorted into tables, which are synced.
            with suppress(FileNotFoundError):
                sizes.append(f"{each.name}={each.stat().st_size}")
        super()._sync()
        report("durable", " ".join(sizes))


def report(word: str, rest: str) -> None:
    os.write(1, f"{word} {rest}\n".encode())


class Settler:
    """Settles most of what it gets, and reports it when that is on disk."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.hub: Hub
        self.taken: list[str] = []

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        chosen = [each for each in deliveries if self.random.random() < 0.7]
        keys = [each.envelope.payload.decode()[:24].strip() for each in chosen]
        if chosen:
            report("settling", " ".join(keys))
            attachment.settle([each.id for each in chosen], time.time())
            self.taken += keys

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        raise AssertionError(notice)

    def broken(self, error: Exception) -> None:
        raise SystemExit(f"a receiver raised {error!r}")

    def settled(self, keys: list[str]) -> None:
        report("settled", " ".join(keys))


async def load(path: str, life: int, seed: int) -> None:
    random = Random(seed)
    store = ReportingStore(path, LIMITS)
    hub = Hub(store, now=time.time(), random=random, clock=time.time)
    hub.commits.start(asyncio.get_running_loop())
    settler = Settler(random)
    settler.hub = hub
    window = Window(200)
    hub.consume(QUEUE, settler, time.time(), peer=PEER, window=window)
    hub.subscribe(TOPIC, settler, time.time(), peer=PEER, window=200, name=NAME)
    await hub.committed()
    report("ready", "")
    count = 0
    while True:
        batch = []
        for _ in range(random.randint(1, 40)):
            count += 1
            key = f"{life}-{count}"
            destination = random.choice((QUEUE, TOPIC))
            kind = "send" if destination == QUEUE else "publish"
            filler = b"." * random.choice((0, 100, 3000))
            batch.append(
                Envelope(
                    destination=destination, kind=kind, payload=key.encode().ljust(24) + filler
                )
            )
        keys = [each.payload[:24].decode().strip() for each in batch]
        report("attempted", " ".join(keys))
        taken, settler.taken = settler.taken, []
        receipt = hub.produce(batch, time.time())
        acknowledge(receipt, keys)
        if taken:
            # On disk when asked for, and at the latest with what was sent after it.
            settled = receipt if random.random() < 0.5 else hub.committed()
            settled.add_done_callback(lambda _, taken=taken: settler.settled(taken))
        window.grant(20, time.time())
        await asyncio.sleep(random.choice((0, 0, 0.001, 0.007)))


def acknowledge(receipt: Receipt, keys: list[str]) -> None:
    def done_callback(done: Receipt) -> None:
        if done.error is None and not done.refused:
            pairs = zip(keys, done.ids, strict=True)
            report("acknowledged", " ".join(f"{key}:{identifier}" for key, identifier in pairs))

    receipt.add_done_callback(done_callback)


# ----------------------------------------------------------------------------------------- parent


class Truth:
    """What must hold, from the children's reports."""

    def __init__(self) -> None:
        self.acknowledged: set[str] = set()
        self.settling: set[str] = set()
        self.settled: set[str] = set()
        self.ids: set[int] = set()
        self.durable: dict[str, int] = {}
        self.tally = Tally()

    def learn(self, output: bytes) -> None:
        whole = output[: output.rfind(b"\n") + 1]
        for line in whole.decode().splitlines():
            word, _, rest = line.partition(" ")
            items = rest.split()
            if word == "attempted":
                self.tally.attempted += len(items)
            elif word == "acknowledged":
                for item in items:
                    key, identifier = item.split(":")
                    self.tally.reused_ids += int(identifier) in self.ids
                    self.ids.add(int(identifier))
                    self.acknowledged.add(key)
                self.tally.acknowledged += len(items)
            elif word == "settling":
                self.settling.update(items)
            elif word == "settled":
                self.settled.update(items)
                self.tally.settled += len(items)
            elif word == "durable":
                self.durable = {name: int(size) for name, size in (i.split("=") for i in items)}

    def compare(self, path: Path) -> None:
        """Open what is left and hold it against what was promised."""
        store = RocksStore(path, LIMITS)
        hub = Hub(store, now=time.time(), random=Random(0))
        queue = hub.queue(QUEUE)
        subscription = hub.subscriptions.get(NAME)
        kept = queue.browse(0, 1 << 30)
        kept += subscription.browse(0, 1 << 30) if subscription is not None else []
        found = Counter(each.payload[:24].decode().strip() for each in kept)
        asyncio.run(hub.commits.close())
        tally = self.tally
        tally.rounds += 1
        tally.recovered = len(found)
        tally.duplicated += sum(count - 1 for count in found.values())
        tally.lost += len(self.acknowledged - self.settling - set(found))
        tally.returned += len(self.settled & set(found))
        # What was being settled when it died may be there or not; from now on it is as found.
        self.acknowledged = set(found)
        self.settling.clear()
        self.settled -= set(found)


def run_round(path: Path, truth: Truth, life: int, random: Random, *, power: bool) -> Path:
    """One life and death. Gives the directory to go on with."""
    seed = random.getrandbits(32)
    arguments = ["--load", str(path), "--life", str(life), "--seed", str(seed)]
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.store.crash", *arguments], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    output = b""
    while b"ready" not in output:
        chunk = os.read(child.stdout.fileno(), 1 << 16)
        if not chunk:
            raise RuntimeError("the child died on its own")
        output += chunk
    ends = time.monotonic() + random.choice((random.uniform(0, 0.03), random.uniform(0, 0.4)))
    os.set_blocking(child.stdout.fileno(), False)
    while time.monotonic() < ends:
        output += child.stdout.read() or b""
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    child.wait()
    output += child.stdout.read() or b""
    child.stdout.close()
    truth.learn(output)
    if power:
        path = cut_power(path, truth.durable, random)
    truth.compare(path)
    return path


def cut_power(path: Path, durable: dict[str, int], random: Random) -> Path:
    """What a disk may hold: all that was synced, and anything or nothing of the rest."""
    after = path.with_name(f"{path.name.split('.')[0]}.{random.getrandbits(32):x}")
    shutil.copytree(path, after)
    shutil.rmtree(path)
    for log in after.glob("*.log"):
        safe = durable.get(log.name, 0)
        content = log.read_bytes()
        tail = bytearray(content[safe:])
        match random.choice(("dropped", "torn", "reordered", "kept")):
            case "dropped":
                tail.clear()
            case "torn":
                del tail[random.randint(0, len(tail)) :]
            case "reordered":
                for start in range(0, len(tail), 512):
                    if random.random() < 0.5:
                        end = min(start + 512, len(tail))
                        tail[start:end] = bytes(end - start)
        log.write_bytes(content[:safe] + bytes(tail))
    return after


def crash(rounds: int, seed: int, *, power: bool, directory: Path, chatty: bool = False) -> Tally:
    random = Random(seed)
    truth = Truth()
    path = directory / "data"
    for life in range(rounds):
        path = run_round(path, truth, life, random, power=power)
        if chatty and (life + 1) % 10 == 0:
            print(truth.tally, flush=True)
    return truth.tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--power", action="store_true", help="cut the power instead of killing")
    parser.add_argument("--load", metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--life", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        asyncio.run(load(options.load, options.life, options.seed))
        return
    with tempfile.TemporaryDirectory(prefix="crosswire-crash-") as directory:
        print(f"seed {options.seed}", flush=True)
        tally = crash(
            options.rounds,
            options.seed,
            power=options.power,
            directory=Path(directory),
            chatty=True,
        )
    print(tally)
    raise SystemExit(not tally.kept_promise)


if __name__ == "__main__":
    main()
