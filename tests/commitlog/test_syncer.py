"""When the disk is waited for, and for how long."""

from __future__ import annotations

import asyncio
import threading

import pytest

from crosswire.commitlog.contract import Receipt
from crosswire.commitlog.local import Syncer
from crosswire.errors import HubError, StoreError, StoreFailed
from crosswire.hub.commits import CommitStage
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


class GatedStore(MemoryStore):
    """A disk that waits in `_sync` while `gate` is closed, and fails if it is told to."""

    def __init__(self, patience_s: float) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False
        self.threads: set[str] = set()
        super().__init__(limits=StoreLimits(spare_bytes=0, patience_s=patience_s))

    def _sync(self) -> None:
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(30.0)
        if self.fails:
            raise StoreFailed("the disk is broken")
        super()._sync()


class Groups:
    """Commits groups of a store whose disk is known to be quick."""

    def __init__(self, store: GatedStore) -> None:
        self.store = store
        self.path = commit_path(store)
        self._next_id = 1

    async def start(self) -> None:
        self.path.start(asyncio.get_running_loop())
        for _ in range(KNOWN):
            await self.commit(1)
        self.store.threads.clear()

    def request(self, count: int) -> Receipt:
        self.store.append_run(1, self._next_id, [b"x"] * count)
        self._next_id += count
        return self.path.committed()

    async def commit(self, count: int) -> None:
        self.request(count)
        await self.path.flush()

    async def is_waited_for(self, count: int) -> bool:
        """Whether a group of this size is durable at the end of the turn that asked for it."""
        receipt = self.request(count)
        await asyncio.sleep(0)
        is_done = receipt.done
        await self.path.flush()
        return is_done


async def test_few_messages_are_waited_for_and_many_are_not() -> None:
    groups = Groups(GatedStore(30.0))
    await groups.start()
    assert [await groups.is_waited_for(count) for count in (1, 4, 5, 1000, 1)] == [
        True, True, False, False, True,
    ]  # fmt: skip
    await groups.path.close()
    # Never on the loop's thread: it could not go on before the disk is done.
    assert groups.store.threads == {"crosswire-store"}


async def test_a_slow_disk_is_never_waited_for() -> None:
    groups = Groups(GatedStore(0.0))
    await groups.start()
    assert not await groups.is_waited_for(1)
    await groups.path.close()


@pytest.mark.parametrize("fails", [False, True])
async def test_the_loop_goes_on_after_its_patience(fails: bool) -> None:
    """A disk that was quick until now: the outcome comes later, and once."""
    store = GatedStore(0.05)
    groups = Groups(store)
    await groups.start()
    waited_s: list[float] = []
    groups.path.add_listener(CommitStage.TELEMETRY, lambda group: waited_s.append(group.waited_s))
    store.gate.clear()
    receipt = groups.request(1)
    outcomes: list[HubError | None] = []
    receipt.add_done_callback(lambda done: outcomes.append(done.error))
    async with asyncio.timeout(20):
        # It comes back to us although the disk is not done, and cannot be before we let it.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not receipt.done
        store.fails = fails
        store.gate.set()
        while not receipt.done:
            await asyncio.sleep(0.001)
    assert [error is not None for error in outcomes] == [fails]
    # Counted on its own; by two clocks that need not agree to the last digit.
    assert fails or (len(waited_s) == 1 and waited_s[0] > 0.04)
    store.fails = False
    await groups.path.close()


async def test_an_error_within_the_patience_is_the_group_s() -> None:
    store = GatedStore(30.0)
    groups = Groups(store)
    await groups.start()
    store.fails = True
    receipt = groups.request(1)
    await asyncio.sleep(0)
    assert receipt.done and receipt.error is not None
    store.fails = False
    await groups.path.close()


def test_the_outcome_goes_to_one_of_both_however_close_they_are() -> None:
    """The thread finishes about when the loop's patience ends."""
    loop = asyncio.new_event_loop()
    done: list[StoreError | None] = []
    failed = StoreFailed("this one")
    took_s = 0.0

    def sync() -> StoreError | None:
        threading.Event().wait(took_s)
        return failed

    syncer = Syncer(sync, 0.001)
    syncer.start(loop, done.append)
    for number in range(200):
        done.clear()
        took_s = 0.001 + 0.0004 * (number % 5 - 2) / 2
        synced = syncer.order_and_wait()
        if synced is None:
            while not done:
                loop.run_until_complete(asyncio.sleep(0.0001))
        else:
            assert synced.error is failed
            loop.run_until_complete(asyncio.sleep(0))
        assert done == ([failed] if synced is None else [])
    syncer.stop()
    loop.close()
