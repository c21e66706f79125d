"""The contract of a commit log, on the local one."""

from __future__ import annotations

import asyncio
import threading

import pytest

from crosswire.commitlog.contract import Append, CommitGroup
from crosswire.commitlog.local import LocalLog
from crosswire.errors import StoreError, StoreFailed, StoreFull
from crosswire.store.memory import MemoryDisk, MemoryStore


class Engine:
    """Notes what is done to it; fails, or waits for `may_sync`, when it is to."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.write_error: StoreError | None = None
        self.sync_error: StoreError | None = None
        self.may_sync = threading.Event()
        self.may_sync.set()

    def write_group(self, group: CommitGroup) -> None:
        if self.write_error is not None:
            raise self.write_error
        self.steps.append("write")

    def sync_group(self, group: CommitGroup) -> None:
        assert self.may_sync.wait(30)
        if self.sync_error is not None:
            raise self.sync_error
        self.steps.append("sync")


class Body:
    def put(self, key: bytes, value: bytes) -> None: ...
    def delete(self, key: bytes) -> None: ...
    def delete_range(self, begin: bytes, end: bytes) -> None: ...


def group(*, sync: bool = True, urgent: bool = True, count: int = 1) -> CommitGroup:
    group = CommitGroup(Body())
    group.sync, group.urgent, group.appended_count = sync, urgent, count
    return group


def test_a_group_is_synced_before_the_append_is_done() -> None:
    engine = Engine()
    append = LocalLog(engine, 0.0).append(group())
    assert append.done and append.error is None
    assert engine.steps == ["write", "sync"]


def test_what_asks_for_no_disk_is_only_written() -> None:
    engine = Engine()
    append = LocalLog(engine, 0.0).append(group(sync=False))
    assert append.done and append.error is None
    assert engine.steps == ["write"]


@pytest.mark.parametrize("error", [StoreFull("no room"), StoreFailed("broken")])
def test_a_failed_write_or_sync_is_the_answer(error: StoreError) -> None:
    engine = Engine()
    log = LocalLog(engine, 0.0)
    engine.write_error = error
    append = log.append(group())
    assert append.done and append.error is error and engine.steps == []
    engine.write_error, engine.sync_error = None, error
    append = log.append(group())
    assert append.done and append.error is error and engine.steps == ["write"]
    engine.sync_error = None
    assert log.append(group()).error is None


async def test_an_append_is_not_done_while_the_disk_works() -> None:
    engine = Engine()
    log = LocalLog(engine, 0.0)
    log.start(asyncio.get_running_loop())
    engine.may_sync.clear()
    ended: list[Append] = []
    append = log.append(group())
    append.add_done_callback(ended.append)
    for _ in range(10):
        await asyncio.sleep(0)
    assert engine.steps == ["write"] and not append.done and not ended
    engine.may_sync.set()
    await append
    assert engine.steps == ["write", "sync"] and append.done and ended == [append]
    append.add_done_callback(ended.append)
    assert len(ended) == 2
    log.stop()


async def test_awaiting_a_failed_append_raises_its_error() -> None:
    engine = Engine()
    log = LocalLog(engine, 0.0)
    log.start(asyncio.get_running_loop())
    engine.sync_error = StoreFailed("broken")
    with pytest.raises(StoreFailed, match="broken"):
        await log.append(group())
    engine.sync_error, engine.write_error = None, StoreFull("no room")
    with pytest.raises(StoreFull):
        await log.append(group())
    log.stop()


@pytest.mark.parametrize("is_quick", [False, True])
async def test_a_group_is_written_before_it_is_durable(is_quick: bool) -> None:
    """Whether the loop waits for the disk or the thread does the sync."""
    engine = Engine()
    log = LocalLog(engine, 30.0 if is_quick else 0.0)
    log.start(asyncio.get_running_loop())
    for _ in range(10):
        await log.append(group())
    engine.steps.clear()
    written = group()
    written.on_written = lambda: engine.steps.append("written")
    append = log.append(written)
    assert append.done is is_quick
    assert "written" in engine.steps
    await append
    assert sorted(engine.steps) == ["sync", "write", "written"]
    if is_quick:
        assert engine.steps == ["write", "written", "sync"]
    log.stop()


async def test_the_loop_waits_for_few_messages_only_and_if_somebody_waits() -> None:
    log = LocalLog(Engine(), 30.0)
    log.start(asyncio.get_running_loop())
    for _ in range(10):
        await log.append(group(count=1000))
    for few, is_done in (
        (group(), True),
        (group(count=4), True),
        (group(count=5), False),
        (group(urgent=False), False),
    ):
        append = log.append(few)
        assert append.done is is_done
        await append
    log.stop()


async def test_blocking_needs_no_other_turn_of_the_loop() -> None:
    engine = Engine()
    log = LocalLog(engine, 0.0)
    log.start(asyncio.get_running_loop())
    assert log.append(group(count=1000), blocking=True).done
    assert engine.steps == ["write", "sync"]
    log.stop()


def test_what_was_appended_survives_a_power_cut() -> None:
    disk = MemoryDisk()
    store = MemoryStore(disk)
    log = LocalLog(store, 0.0)
    store.append(1, 1, b"x")
    store.group.sync = True
    sealed = store.seal()
    assert log.append(sealed).error is None
    disk.cut_power()
    assert MemoryStore(disk).fetch(1, [1]) == [b"x"]
