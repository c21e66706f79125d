"""Campaigns against a real hub under load in all five protocols."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Final

from crosswire.client.connect import connect
from crosswire.errors import CrosswireError
from crosswire.testing.simulation.clients import PROTOCOLS
from tests.campaigns.disk_shim import DiskFaults, DiskShim
from tests.campaigns.hub import HubProcess
from tests.campaigns.load import Load
from tests.campaigns.runner import CampaignSkipped, Findings

__all__ = [
    "cut_clocks",
    "fail_disks",
    "fill_disks",
    "judge_soak",
    "kill_hubs",
    "open_and_close",
    "send_garbage",
    "soak",
]

_FAKETIME: Final = (
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib/faketime/libfaketime.so.1",
)
_DISK_BYTES: Final = 96 << 20


async def _finish(load: Load, findings: Findings) -> None:
    findings.lost += await load.finish()
    findings.attempted += load.attempted
    findings.acknowledged += len(load.acknowledged)
    findings.returned += load.returned
    findings.wrong += load.wrong
    findings.add("delivered", load.delivered)


@asynccontextmanager
async def _under_load(
    hub: HubProcess, seed: int, findings: Findings, *, pause_s: float = 0.005
) -> AsyncIterator[Load]:
    """A hub that is up, and programs that use it; what they saw is counted at the end."""
    assert await hub.start(), hub.log.read_text()[-2000:]
    load = Load(hub, seed, pause_s=pause_s)
    began = time.monotonic()
    load.start()
    try:
        await load.success_after(began)
        yield load
        if not hub.is_running:
            assert await hub.start(), hub.log.read_text()[-2000:]
        await _finish(load, findings)
    finally:
        await load.finish(drain_s=0.0)
        await hub.end(signal.SIGKILL)


# ------------------------------------------------------------------------------------------- kills


async def kill_hubs(folder: Path, rounds: int, seed: int) -> Findings:
    """SIGKILL at a random moment under load, and a start, while programs go on."""
    findings, random = Findings(), Random(seed)
    hub = HubProcess(folder / "hub", lake=bool(seed % 2))
    async with _under_load(hub, seed, findings) as load:
        for _ in range(rounds):
            await asyncio.sleep(random.uniform(0.0, 0.5))
            load.disturbed()
            killed_at = time.monotonic()
            await hub.end(signal.SIGKILL)
            assert await hub.start(), hub.log.read_text()[-2000:]
            findings.unavailable_s += await load.success_after(killed_at)
            load.disturbed()
            findings.rounds += 1
    return findings


# ------------------------------------------------------------------------------------------- disks


async def fail_disks(folder: Path, rounds: int, seed: int) -> Findings:
    """Writes and syncs of the store fail for a moment, or are cut short; half of the time the hub
    is killed meanwhile."""
    findings, random = Findings(), Random(seed)
    shim = DiskShim(folder)
    hub = HubProcess(folder / "hub", environment=shim.environment)
    async with _under_load(hub, seed, findings) as load:
        for _ in range(rounds):
            kind = random.choice(("write EIO", "write ENOSPC", "sync EIO", "short write"))
            per_mille = random.choice((50, 300, 1000))
            faults = {
                "write EIO": DiskFaults(writes=per_mille),
                "write ENOSPC": DiskFaults(writes=per_mille, write_errno=errno.ENOSPC),
                "sync EIO": DiskFaults(syncs=per_mille),
                "short write": DiskFaults(short_writes=per_mille),
            }[kind]
            load.disturbed()
            began = time.monotonic()
            shim.set(faults)
            await asyncio.sleep(random.uniform(0.05, 0.6))
            if random.random() < 0.5 and hub.is_running:
                await hub.end(signal.SIGKILL)
                findings.add("killed", 1)
            shim.set(DiskFaults())
            if not hub.is_running:
                await hub.end()
                assert await hub.start(), hub.log.read_text()[-2000:]
            load.disturbed()
            await load.success_after(time.monotonic())
            findings.unavailable_s += time.monotonic() - began
            findings.add(kind, 1)
            findings.rounds += 1
            await asyncio.sleep(random.uniform(0.0, 0.2))
            load.disturbed()
    return findings


async def fill_disks(folder: Path, rounds: int, seed: int) -> Findings:
    """A small file system is filled to its last bytes while programs send, and freed again; half of
    the time the hub is killed while it is full."""
    findings, random = Findings(), Random(seed)
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(disk)],
        capture_output=True,
    )
    if mounted.returncode:
        raise CampaignSkipped(f"no file system can be mounted: {mounted.stderr.decode().strip()}")
    try:
        hub = HubProcess(disk / "hub", folder=folder)
        async with _under_load(hub, seed, findings) as load:
            for _ in range(rounds):
                load.disturbed()
                filler = disk / "filler"
                room = os.statvfs(disk)
                free = room.f_bavail * room.f_frsize
                with suppress(OSError), filler.open("wb") as file:
                    file.write(bytes(max(free - random.choice((0, 4096, 100_000)), 0)))
                began = time.monotonic()
                await asyncio.sleep(random.uniform(0.1, 0.8))
                if random.random() < 0.5:
                    await hub.end(signal.SIGKILL)
                    findings.add("killed", 1)
                filler.unlink(missing_ok=True)
                if not hub.is_running:
                    await hub.end()
                    assert await hub.start(), hub.log.read_text()[-2000:]
                await load.success_after(time.monotonic())
                load.disturbed()
                findings.unavailable_s += time.monotonic() - began
                findings.rounds += 1
            findings.add("refused", load.refused)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)
    return findings


# ------------------------------------------------------------------------------------------ clocks


async def cut_clocks(folder: Path, rounds: int, seed: int) -> Findings:
    """The wall clock jumps by up to a day, both ways, while the hub runs, by libfaketime."""
    named = os.environ.get("FAKETIME_LIBRARY", "")
    library = next((each for each in (named, *_FAKETIME) if each and Path(each).exists()), None)
    if library is None:
        raise CampaignSkipped("libfaketime is not installed (FAKETIME_LIBRARY names another path)")
    findings, random = Findings(), Random(seed)
    offset = folder / "offset"
    offset.write_text("+0s")
    hub = HubProcess(
        folder / "hub",
        environment={
            "LD_PRELOAD": library,
            "FAKETIME_TIMESTAMP_FILE": str(offset),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        },
    )
    async with _under_load(hub, seed, findings) as load:
        for _ in range(rounds):
            offset.write_text(f"{random.uniform(-86_400, 86_400):+.0f}s")
            await asyncio.sleep(random.uniform(0.05, 0.4))
            if random.random() < 0.2:
                load.disturbed()
                await hub.end(signal.SIGKILL)
                assert await hub.start(), hub.log.read_text()[-2000:]
                findings.add("killed", 1)
            began = time.monotonic()
            findings.unavailable_s += await load.success_after(began)
            load.disturbed()
            findings.rounds += 1
        offset.write_text("+0s")
    return findings


# ------------------------------------------------------------------------------------- connections


async def send_garbage(folder: Path, rounds: int, seed: int) -> Findings:
    """Connections that send random bytes, or the beginning of something valid, beside programs
    whose acknowledgements are measured."""
    findings, random = Findings(), Random(seed)
    hub = HubProcess(folder / "hub")
    async with _under_load(hub, seed, findings) as load:
        await asyncio.sleep(1.0)
        before = load.latencies_s[:]
        load.latencies_s.clear()
        ports = list(hub.ports.values())
        limit = asyncio.Semaphore(50)

        async def attack() -> None:
            async with limit:
                # Resets and refusals are what it is for.
                with suppress(OSError):
                    reader, writer = await asyncio.open_connection(
                        "127.0.0.1", random.choice(ports)
                    )
                    writer.write(random.randbytes(random.choice((1, 8, 64, 1000, 20_000))))
                    with suppress(OSError, TimeoutError):
                        await asyncio.wait_for(reader.read(4096), random.uniform(0.0, 0.2))
                    writer.close()
                    with suppress(OSError):
                        await writer.wait_closed()
                findings.rounds += 1

        await asyncio.gather(*(attack() for _ in range(rounds)))
        during = load.latencies_s[:]
        findings.details["p99 ms before"] = _p99_ms(before)
        findings.details["p99 ms during"] = _p99_ms(during)
        findings.wrong += not hub.is_running
    return findings


def _p99_ms(seconds: list[float]) -> float:
    return round(1000 * statistics.quantiles(seconds, n=100)[98], 1) if len(seconds) > 1 else 0.0


async def open_and_close(folder: Path, rounds: int, seed: int) -> Findings:
    """Clients of all protocols connect, send one message, and leave."""
    findings = Findings()
    hub = HubProcess(folder / "hub")
    async with _under_load(hub, seed, findings, pause_s=0.05) as load:
        descriptors, memory = hub.descriptors(), hub.memory_bytes()
        limit = asyncio.Semaphore(20)

        async def visit(number: int) -> None:
            async with limit:
                protocol = PROTOCOLS[number % len(PROTOCOLS)]
                try:
                    async with connect(hub.url(protocol), timeout_s=30.0) as client:
                        await client.publish("queue/visits", b"visit")
                except CrosswireError:
                    findings.wrong += 1
                findings.rounds += 1

        await asyncio.gather(*(visit(number) for number in range(rounds)))
        ends = time.monotonic() + 20.0
        while hub.descriptors() > descriptors + 5 and time.monotonic() < ends:
            await asyncio.sleep(0.1)
        findings.details["descriptors more"] = hub.descriptors() - descriptors
        findings.details["memory MiB more"] = round((hub.memory_bytes() - memory) / (1 << 20), 1)
        findings.details["p99 ms"] = _p99_ms(load.latencies_s)
        findings.wrong += hub.descriptors() > descriptors + 5
    return findings


# -------------------------------------------------------------------------------------------- soak


_FILLED_S: Final = 1800
"""After this time of such load the hub's caches are full; docs/operating.md has their sizes."""
_GROWTH_MIB: Final = 8.0
"""What memory may grow by afterwards: 12 bytes for each message of half an hour."""


def second_half_growth_mib(memory: Sequence[int]) -> float:
    """How much memory grew in the second half of what was sampled, in bytes: from the middle of
    its first tenth to that of its last, as samples vary with what is under way."""
    half = memory[len(memory) // 2 :]
    tenth = max(len(half) // 10, 1)
    return (statistics.median(half[-tenth:]) - statistics.median(half[:tenth])) / (1 << 20)


def judge_soak(memory: Sequence[int], findings: Findings) -> None:
    """Growth is wrong once caches are full; in a shorter soak it is counted only."""
    growth = second_half_growth_mib(memory)
    findings.details["MiB more in the second half"] = round(growth, 1)
    if len(memory) >= 2 * _FILLED_S and growth > _GROWTH_MIB:
        findings.wrong += 1
        findings.details["memory"] = f"grew by {growth:.1f} MiB after caches were full"


async def soak(folder: Path, rounds: int, seed: int) -> Findings:
    """Steady load; a round is a second. Memory, descriptors and latency are sampled."""
    findings = Findings()
    hub = HubProcess(folder / "hub", lake=True)
    async with _under_load(hub, seed, findings, pause_s=0.02) as load:
        memory, descriptors = [hub.memory_bytes()], [hub.descriptors()]
        for _ in range(rounds):
            await asyncio.sleep(1.0)
            memory.append(hub.memory_bytes())
            descriptors.append(hub.descriptors())
        findings.rounds += rounds
        for moment, size in (("first", memory[0]), ("last", memory[-1]), ("most", max(memory))):
            findings.details[f"MiB at {moment}"] = round(size / (1 << 20), 1)
        judge_soak(memory, findings)
        findings.details["descriptors at first"] = descriptors[0]
        findings.details["descriptors at most"] = max(descriptors)
        findings.details["p99 ms"] = _p99_ms(load.latencies_s)
    return findings
