"""What only a real disk can do to a store: damage, and too little room."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from crosswire.envelope import Envelope
from crosswire.errors import StoreFailed, StoreFull
from crosswire.hub.hub import Hub
from crosswire.hub.ledger import LedgerPeer
from crosswire.store.contract import Page, StoreLimits
from crosswire.store.rocks import RocksStore
from tests.hub.parties import Recorder
from tests.store.committing import close, commit

PEER = LedgerPeer("test", "test-1")


def sends(count: int, size: int = 200, queue: str = "queue/a") -> list[Envelope]:
    payloads = [bytes([index % 256]) * size for index in range(count)]
    return [
        Envelope(destination=queue, kind="send", payload=each, crc=zlib.crc32(each))
        for each in payloads
    ]


def damage_table(path: Path, index: float) -> None:
    table = max(path.glob("*.sst"), key=lambda each: each.stat().st_size)
    with table.open("r+b") as file:
        file.seek(int(table.stat().st_size * index))
        file.write(b"\xff" * 40)


def test_a_damaged_block_is_passed_over_and_reported(tmp_path: Path) -> None:
    store = RocksStore(tmp_path)
    assert store.number("queue/a") == 1
    for identifier in range(1, 2001):
        store.append(1, identifier, Random(identifier).randbytes(200))
    commit(store)
    store._db.flush()
    asyncio.run(close(store))
    damage_table(tmp_path, 0.5)
    store = RocksStore(tmp_path)
    pages: list[Page] = []
    store.read([1], after=0, count=5000, done=pages.append)
    seen = [record[1] for record in pages[0].records]
    assert 1800 < len(seen) < 2000
    assert seen[0] == 1 and seen[-1] == 2000
    found = store.damage[0].messages()
    assert found is not None
    number, first, last = found
    assert number == 1
    assert set(range(1, 2001)) - set(seen) == set(range(first, last + 1))
    asyncio.run(close(store))


def test_a_damaged_queue_serves_what_is_left(tmp_path: Path) -> None:
    store = RocksStore(tmp_path)
    hub = Hub(store, now=1.0, random=Random(1))
    envelopes = [
        Envelope(destination="queue/a", kind="send", payload=Random(each).randbytes(200))
        for each in range(2000)
    ]
    hub.produce(envelopes, 1.0)
    hub.commits.commit_now()
    store._db.flush()
    asyncio.run(hub.commits.close())
    damage_table(tmp_path, 0.5)
    store = RocksStore(tmp_path)
    hub = Hub(store, now=2.0, random=Random(1))
    taker = Recorder(settles=True)
    hub.consume("queue/a", taker, 2.0, peer=PEER, window=100)
    assert 1800 < len(taker.deliveries) < 2000
    assert hub.queue("queue/a").length == 0
    assert store.damage
    asyncio.run(hub.commits.close())


def test_a_damaged_record_is_set_aside(tmp_path: Path) -> None:
    store = RocksStore(tmp_path)
    hub = Hub(store, now=1.0, random=Random(1))
    ids = hub.produce(sends(3), 1.0).ids
    hub.commits.commit_now()
    number = store.number("queue/a")
    record = store.fetch(number, [ids[1]])[0]
    assert record is not None
    store.retain(number, ids[1], record[:-1] + b"\x00")
    hub.commits.commit_now()
    asyncio.run(hub.commits.close())
    store = RocksStore(tmp_path)
    hub = Hub(store, now=2.0, random=Random(1))
    taker = Recorder(settles=True)
    hub.consume("queue/a", taker, 2.0, peer=PEER, window=100)
    assert [each.id for each in taker.deliveries] == [ids[0], ids[2]]
    hub.commits.commit_now()
    assert list(hub.damage.messages()) == [("queue/a", ids[1], record[:-1] + b"\x00")]
    assert [row.step for row in hub.trace(ids[1])] == ["accepted", "damaged"]
    assert len(hub.reports) == 1
    asyncio.run(hub.commits.close())


def test_a_damaged_log_costs_a_group_not_the_rest(tmp_path: Path) -> None:
    store = RocksStore(tmp_path)
    hub = Hub(store, now=1.0, random=Random(1))
    for _ in range(3):
        hub.produce(sends(10, size=4000), 1.0)
        hub.commits.commit_now()
    del store, hub
    log = max(tmp_path.glob("*.log"), key=lambda each: each.stat().st_size)
    copy = tmp_path / "copy"
    copy.mkdir()
    for each in tmp_path.iterdir():
        if each.is_file() and each.name != "LOCK":
            (copy / each.name).write_bytes(each.read_bytes())
    content = bytearray((copy / log.name).read_bytes())
    content[60_000:60_040] = b"\xff" * 40
    (copy / log.name).write_bytes(content)
    store = RocksStore(copy)
    pages: list[Page] = []
    store.read([1], after=0, count=100, done=pages.append)
    assert len(pages[0].records) == 20
    asyncio.run(close(store))


def test_a_directory_is_for_one_at_a_time(tmp_path: Path) -> None:
    store = RocksStore(tmp_path)
    with pytest.raises(StoreFailed):
        RocksStore(tmp_path)
    asyncio.run(close(store))


def test_another_boot_means_that_power_was_lost(tmp_path: Path) -> None:
    store = RocksStore(tmp_path)
    assert not store.power_lost
    asyncio.run(close(store))
    store = RocksStore(tmp_path)
    assert not store.power_lost
    batch = store._batch()
    batch.put(b"!running", b"another boot")
    store._write(batch)
    store._db.close()
    store = RocksStore(tmp_path)
    assert store.power_lost
    asyncio.run(close(store))


def test_below_the_spare_room_producers_are_refused(tmp_path: Path) -> None:
    store = RocksStore(tmp_path, StoreLimits(spare_bytes=1 << 60))
    hub = Hub(store, now=1.0, random=Random(1))
    receipt = hub.produce(sends(2), 1.0)
    assert receipt.done and receipt.ids == [0, 0]
    assert all(isinstance(error, StoreFull) for error in receipt.refused.values())
    asyncio.run(hub.commits.close())


@pytest.mark.parametrize("is_readable", [True, False])
def test_an_engine_that_can_not_be_opened_again_yet_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_readable: bool
) -> None:
    """After a failed write it is closed, and the disk may go on failing for a while."""
    store = RocksStore(tmp_path)
    hub = Hub(store, now=1.0, random=Random(1))
    receipt = hub.produce(sends(3), 1.0)
    hub.commits.commit_now()
    asyncio.run(hub.commits.close())
    store = RocksStore(tmp_path)
    hub = Hub(store, now=2.0, random=Random(1))

    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    taker = Recorder(settles=True)
    with monkeypatch.context() as failing:
        failing.setattr(store, "_open_with", fail)
        if not is_readable:
            failing.setattr(store, "_open_to_read", fail)
        store.last_error = StoreFailed("a write failed")
        assert not store.mend()
        if is_readable:
            hub.consume("queue/a", taker, 2.0, peer=PEER, window=20)
            assert [each.id for each in taker.deliveries] == receipt.ids
            assert next(iter(store.view().ids(store.number("queue/a"), after=0, upto=9)))
        else:
            with pytest.raises(StoreFailed, match="can't be opened again"):
                hub.consume("queue/a", taker, 2.0, peer=PEER, window=20)
            with pytest.raises(StoreFailed, match="can't be opened again"):
                store.view()
        assert store.damage == []
    assert store.mend()
    store.last_error = None
    if not is_readable:
        hub.consume("queue/a", taker, 3.0, peer=PEER, window=20)
        assert [each.id for each in taker.deliveries] == receipt.ids
    receipt = hub.produce(sends(1), 3.0)
    hub.commits.commit_now()
    assert taker.deliveries[-1].id == receipt.ids[0]
    asyncio.run(hub.commits.close())
    assert RocksStore(tmp_path).damage == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_stops_producers_not_consumers(small_disk: Path) -> None:
    limits = StoreLimits(spare_bytes=0, buffer_bytes=64 << 20)
    store = RocksStore(small_disk / "data", limits)
    hub = Hub(store, now=1.0, random=Random(1))
    accepted: list[int] = []
    for _ in range(40):
        receipt = hub.produce(sends(10, size=100_000), 1.0)
        hub.commits.commit_now()
        if receipt.error is not None or receipt.refused:
            break
        accepted += receipt.ids
    assert isinstance(receipt.error, StoreFull)
    taker = Recorder(settles=True)
    hub.consume("queue/a", taker, 2.0, peer=PEER, window=20)
    assert [each.id for each in taker.deliveries] == accepted
    assert hub.produce(sends(1), 2.0).refused
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    assert hub.commits.commit_now() is None
    receipt = hub.produce(sends(1), 3.0)
    hub.commits.commit_now()
    assert receipt.done and receipt.error is None and not receipt.refused
    assert taker.deliveries[-1].id == receipt.ids[0]
    asyncio.run(hub.commits.close())
    store = RocksStore(small_disk / "data", limits)
    hub = Hub(store, now=4.0, random=Random(1))
    assert hub.queue("queue/a").browse(0, 1000) == []
    asyncio.run(hub.commits.close())
