"""When the disk is waited for, and when a thread is asked."""

from __future__ import annotations

import asyncio
import threading

import pytest

from crosswire.commitlog.local import Syncer
from crosswire.errors import StoreError
from crosswire.store.contract import StoreLimits
from crosswire.store.memory import MemoryStore
from tests.store.committing import commit_path

PATIENCE_S = 0.001
KNOWN = 10
"""This number of quick syncs makes a disk quick of which nothing was known."""


class Disk:
    """Takes `takes_s`, by a clock of its own."""

    now_s = 0.0
    takes_s = 0.0

    def sync(self) -> StoreError | None:
        self.now_s += self.takes_s
        return None


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr("crosswire.commitlog.local.perf_counter", lambda: disk.now_s)
    return disk


def sync(syncer: Syncer, disk: Disk, *took_s: float) -> None:
    for disk.takes_s in took_s:
        syncer.sync_now()


def test_a_disk_is_slow_until_it_is_known_to_be_quick(disk: Disk) -> None:
    syncer = Syncer(disk.sync, PATIENCE_S)
    assert not syncer.is_quick
    sync(syncer, disk, *[0.0002] * KNOWN)
    assert syncer.is_quick


def test_a_little_more_now_and_then_is_nothing(disk: Disk) -> None:
    syncer = Syncer(disk.sync, PATIENCE_S)
    sync(syncer, disk, *[0.0002] * KNOWN, *[0.0002, 0.0002, 0.003] * 10)
    assert not syncer.is_quick
    sync(syncer, disk, *[0.0002] * KNOWN, 0.003)
    assert syncer.is_quick


def test_one_that_took_very_long_counts_for_dozens(disk: Disk) -> None:
    syncer = Syncer(disk.sync, PATIENCE_S)
    sync(syncer, disk, *[0.0002] * KNOWN, 1.0, *[0.0002] * 36)
    assert not syncer.is_quick
    sync(syncer, disk, *[0.0002] * 36)
    assert syncer.is_quick


def test_without_patience_no_disk_is_quick(disk: Disk) -> None:
    syncer = Syncer(disk.sync, 0.0)
    sync(syncer, disk, *[0.0] * 100)
    assert not syncer.is_quick


class WhereStore(MemoryStore):
    """Knows which threads have synced it."""

    def __init__(self, patience_s: float) -> None:
        self.threads: list[str] = []
        super().__init__(limits=StoreLimits(spare_bytes=0, patience_s=patience_s))

    def _sync(self) -> None:
        self.threads.append(threading.current_thread().name)
        super()._sync()


async def threads_of(store: WhereStore, *counts: int) -> list[str]:
    """Which threads sync groups with these numbers of messages, when the disk is known."""
    path = commit_path(store)
    path.start(asyncio.get_running_loop())
    store.threads.clear()
    next_id = 1
    for count in (*[1] * KNOWN, *counts):
        store.append_run(1, next_id, [b"x"] * count)
        path.request()
        await path.flush()
        next_id += count
    await path.close()
    return store.threads[KNOWN : KNOWN + len(counts)]


async def test_few_messages_are_synced_by_the_loop_and_many_by_a_thread() -> None:
    here = threading.current_thread().name
    threads = await threads_of(WhereStore(30.0), 1, 4, 5, 1000, 1)
    assert threads == [here, here, "crosswire-store", "crosswire-store", here]


async def test_a_slow_disk_is_never_waited_for() -> None:
    assert await threads_of(WhereStore(0.0), 1, 1) == ["crosswire-store"] * 2
