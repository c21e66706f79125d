"""A hub under siege: peers that mean no good come in numbers, and the others don't notice."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import RunningHub
from tests.e2e.attack import HELLO
from tests.e2e.parties import EmpParty, MicroMsg2Party

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
SECONDS = 2.0
QUIET_S = 0.5
SLOWEST_S = 1.0
MOST_GROWTH_BYTES = 150 * 1024 * 1024


class Besieged:
    """A hub as a program, and what it prints."""

    def __init__(self, data: Path) -> None:
        self.hub = RunningHub(data)
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.hub.process.stderr is not None
        for line in self.hub.process.stderr:
            self.lines.append(json.loads(line))

    @property
    def ports(self) -> dict[str, int]:
        return {name: self.hub.port(name) for name in self.hub.ready["listen"]}

    @property
    def memory_bytes(self) -> int:
        status = Path(f"/proc/{self.hub.process.pid}/status").read_text()
        found = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(found.split()[1]) * 1024

    def stop(self) -> int:
        self.hub.process.terminate()
        code = self.hub.process.wait(timeout=30)
        self._reader.join(timeout=10)
        for stream in (self.hub.process.stdout, self.hub.process.stderr):
            assert stream is not None
            stream.close()
        return code


@pytest.fixture(scope="module")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Besieged]:
    besieged = Besieged(tmp_path_factory.mktemp("siege") / "data")
    yield besieged
    assert besieged.stop() == 0


class Pair:
    """An EMP producer and a MicroMsg2 consumer, who mind their own business."""

    def __init__(self, producer: EmpParty, consumer: MicroMsg2Party) -> None:
        self._producer = producer
        self._consumer = consumer

    async def work(self, seconds: float) -> list[float]:
        """How long each message took, from the producer to the consumer, one after the other."""
        queue = f"queue/work-{time.monotonic_ns()}"
        inbox = await self._consumer.consume(queue)
        taken: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            payload = len(taken).to_bytes(4)
            began = time.perf_counter()
            async with asyncio.timeout(10):
                _, got = await asyncio.gather(self._producer.produce(queue, payload), inbox.get())
            taken.append(time.perf_counter() - began)
            assert got.payload == payload
        return sorted(taken)


def shown(taken: list[float]) -> str:
    middle, late = taken[len(taken) // 2], taken[int(len(taken) * 0.99)]
    return (
        f"{len(taken)} messages, p50 {1e3 * middle:.1f} ms, p99 {1e3 * late:.1f} ms, "
        f"slowest {1e3 * taken[-1]:.1f} ms"
    )


@pytest.mark.parametrize("kind", ["garbage", "slow", "silent", "unread"])
async def test_others_don_t_notice(besieged: Besieged, kind: str) -> None:
    """Every message arrives, none takes long, and the hub does not grow."""
    listeners = [f"{name}={besieged.ports[name]}" for name in HELLO]
    async with EmpParty(besieged.ports) as producer, MicroMsg2Party(besieged.ports) as consumer:
        pair = Pair(producer, consumer)
        quiet = await pair.work(QUIET_S)
        before = besieged.memory_bytes
        attack = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.attack", kind, str(SECONDS), *listeners],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        try:
            meanwhile = await pair.work(SECONDS)
            growth = besieged.memory_bytes - before
            count = int(attack.communicate(timeout=30)[0])
        finally:
            attack.kill()
            attack.wait()
    print(f"\n{kind}, {count} connections: {shown(meanwhile)}; the hub grew by {growth >> 20} MiB")
    print(f"without them: {shown(quiet)}")
    assert meanwhile[-1] < SLOWEST_S
    assert growth < MOST_GROWTH_BYTES


def test_each_is_logged_once(besieged: Besieged) -> None:
    """Runs after the attacks, which left their lines."""
    failed = [line["connection"] for line in besieged.lines if line["event"] == "failed"]
    assert failed
    assert len(failed) == len(set(failed))
