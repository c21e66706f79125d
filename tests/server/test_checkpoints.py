"""Checkpoints of a hub: how long they are kept, and which files of the lake belong to them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from crosswire.errors import DestinationFull, StoreFailed, UnknownMessage
from crosswire.hub.seals import Seal
from crosswire.lake.files import LakeFile, file_name
from crosswire.server import checkpoints
from crosswire.server.checkpoints import Checkpoints, LiveCheckpoint
from crosswire.store.contract import StoreLimits
from crosswire.store.memory import MemoryStore
from crosswire.store.rocks import RocksStore
from tests.store.committing import commit


@pytest.fixture
def store(tmp_path: Path) -> RocksStore:
    store = RocksStore(tmp_path / "store", StoreLimits(spare_bytes=0))
    store.append(store.number("queue/q"), store.reserve(1), b"record")
    commit(store)
    return store


async def made(live: LiveCheckpoint) -> None:
    async with asyncio.timeout(20):
        while live.state == "running":
            await asyncio.sleep(0.01)
    assert live.state == "ready", live.error


async def test_what_nobody_uses_is_removed(
    store: RocksStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_UNUSED_S", 0.0)
    monkeypatch.setattr(checkpoints, "_CHECK_S", 0.01)
    kept = Checkpoints(store, tmp_path, tmp_path / "lake")
    kept.start()
    live = kept.create()
    async with asyncio.timeout(20):
        while live.state == "running" or live.folder.exists():
            await asyncio.sleep(0.01)
    assert kept.all() == []
    with pytest.raises(UnknownMessage):
        kept.get(live.id)
    await kept.stop()
    store.close()


async def test_there_are_few_at_a_time_and_none_is_left(store: RocksStore, tmp_path: Path) -> None:
    kept = Checkpoints(store, tmp_path, tmp_path / "lake")
    kept.start()
    lives = [kept.create() for _ in range(4)]
    with pytest.raises(DestinationFull):
        kept.create()
    for each in lives:
        await made(each)
    kept.remove(lives[0].id)
    await made(kept.create())
    await kept.stop()
    assert list((tmp_path / "checkpoints").iterdir()) == []
    (tmp_path / "checkpoints" / "of-a-killed-hub").mkdir()
    Checkpoints(store, tmp_path, tmp_path / "lake").start()
    assert not (tmp_path / "checkpoints").exists()
    store.close()


async def test_a_store_in_memory_has_none(tmp_path: Path) -> None:
    with pytest.raises(StoreFailed):
        Checkpoints(MemoryStore(), tmp_path, tmp_path / "lake").create()


def test_files_belong_to_it_up_to_the_last_seal() -> None:
    def file(table: str, node: str, first: int, last: int) -> LakeFile:
        return LakeFile(table, "2026-11-16", node, first, last, Path(file_name(node, first, last)))

    seal = Seal(first_row=11, last_row=20, first_seq=6, last_seq=9, newest=9, first_gap=3)
    belongs = checkpoints._belonging("own", seal)
    assert belongs(file("ledger", "own", 1, 10)) and belongs(file("ledger", "own", 11, 20))
    assert not belongs(file("ledger", "own", 21, 30))
    assert belongs(file("messages", "own", 6, 9)) and not belongs(file("messages", "own", 10, 12))
    assert belongs(file("gaps", "own", 1, 2)) and not belongs(file("gaps", "own", 3, 3))
    assert belongs(file("wire", "own", 99, 100)) and belongs(file("ledger", "other", 99, 100))
    with pytest.raises(checkpoints.LakeError, match="compacted"):
        belongs(file("ledger", "own", 15, 25))
