"""Reading what is damaged: scans that end, logs with holes, a checked list of tables."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from random import Random

import pytest

from crosswire.errors import RecordUnreadable, StoreFailed, StoreFull
from crosswire.server.store_repair import verify
from crosswire.store.contract import Store, StoreLimits
from crosswire.store.engine import LogMark, full_or_failed
from crosswire.store.keys import MAX_ID, message_key
from crosswire.store.manifest import crc32c, fault_of, invalid_headers
from crosswire.store.memory import MemoryDisk, MemoryStore
from crosswire.store.rocks import MARK, MarkFile, RocksStore
from tests.store.committing import close, commit

LIMITS = StoreLimits(spare_bytes=0)


def killed(path: Path, store: RocksStore) -> Path:
    """The files as a kill would leave them."""
    copy = path.with_name("killed")
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("LOCK"))
    asyncio.run(close(store))
    return copy


def write_groups(store: Store, count: int, size: int = 500) -> list[int]:
    number, ids = store.number("queue/a"), []
    for _ in range(count):
        ids.append(store.reserve(1))
        store.append(number, ids[-1], Random(ids[-1]).randbytes(size))
        store.group.sync = True
        assert commit(store) is None
    return ids


def log_of(path: Path) -> Path:
    return max(path.glob("*.log"), key=lambda each: each.stat().st_size)


def log_reports(store: Store) -> list[str]:
    return [each.reason for each in store.damage if each.part == "log"]


# --------------------------------------------------------------------------------------- the log


def test_an_intact_log_of_a_killed_hub_is_not_reported(tmp_path: Path) -> None:
    store = RocksStore(tmp_path / "data", LIMITS)
    ids = write_groups(store, 50)
    store = RocksStore(killed(tmp_path / "data", store), LIMITS)
    assert store.damage == [] and store.last_id(1) == ids[-1]
    asyncio.run(close(store))


@pytest.mark.parametrize("position", [0.1, 0.5, 0.9, 0.999])
def test_a_hole_in_the_log_is_reported_with_the_ids_that_may_be_lost(
    tmp_path: Path, position: float
) -> None:
    store = RocksStore(tmp_path / "data", LIMITS)
    ids = write_groups(store, 300)
    copy = killed(tmp_path / "data", store)
    log = log_of(copy)
    data = bytearray(log.read_bytes())
    data[int((len(data) - 1) * position)] ^= 0x40
    log.write_bytes(data)
    store = RocksStore(copy, LIMITS)
    (report,) = log_reports(store)
    assert "ids from" in report
    lost = [each for each in ids if store.fetch(1, [each]) == [None]]
    first, last = map(int, report.split("ids from ")[1].split(" may")[0].split(" to "))
    assert lost and all(first <= each <= last for each in lost)
    assert store.reserve(1) > ids[-1]
    asyncio.run(close(store))
    store = RocksStore(copy, LIMITS)
    assert store.damage == [], "it is reported once, and listed until it is acknowledged"
    assert len(store.damages.entries) == 1
    asyncio.run(close(store))


@pytest.mark.parametrize("harm", ["cut", "remove", "empty"])
def test_a_log_that_lost_its_end_differs_from_an_unsynced_tail(tmp_path: Path, harm: str) -> None:
    store = RocksStore(tmp_path / "data", LIMITS)
    write_groups(store, 40)
    copy = killed(tmp_path / "data", store)
    log = log_of(copy)
    if harm == "remove":
        log.unlink()
    else:
        log.write_bytes(log.read_bytes()[: 0 if harm == "empty" else log.stat().st_size // 2])
    store = RocksStore(copy, LIMITS)
    assert len(log_reports(store)) == 1
    assert store.reserve(1) > 40
    asyncio.run(close(store))


def test_without_the_mark_the_end_of_the_log_is_not_verified(tmp_path: Path) -> None:
    store = RocksStore(tmp_path / "data", LIMITS)
    write_groups(store, 3)
    copy = killed(tmp_path / "data", store)
    (copy / MARK).unlink()
    store = RocksStore(copy, LIMITS)
    assert "can't be verified" in log_reports(store)[0]
    asyncio.run(close(store))
    # After a clean stop the second copy of the store's own keys has the last group's number.
    (copy / MARK).unlink()
    store = RocksStore(copy, LIMITS)
    assert store.damage == []
    asyncio.run(close(store))


def test_after_a_power_cut_only_what_was_synced_is_expected() -> None:
    disk = MemoryDisk()
    store = MemoryStore(disk, LIMITS)
    write_groups(store, 3)
    store.save("state", b"k", b"not synced")
    store.group.sync = False
    commit(store)
    disk.cut_power()
    again = MemoryStore(disk, LIMITS)
    assert again.power_lost and again.damage == []


@pytest.mark.parametrize("which", ["first", "last"])
def test_missing_groups_show_in_every_store(which: str) -> None:
    disk = MemoryDisk()
    write_groups(MemoryStore(disk, LIMITS), 5)
    groups = [key for key in disk.keys if key.startswith(b"g")]
    del disk.rows[groups[1] if which == "first" else groups[-1]]
    disk.keys = sorted(disk.rows)
    assert len(log_reports(MemoryStore(disk, LIMITS))) == 1
    assert log_reports(MemoryStore(disk, LIMITS)) == []


def test_every_hole_is_reported() -> None:
    disk = MemoryDisk()
    write_groups(MemoryStore(disk, LIMITS), 9)
    groups = [key for key in disk.keys if key.startswith(b"g")]
    for each in (2, 5, 9):
        del disk.rows[groups[each]]
    disk.keys = sorted(disk.rows)
    reports = log_reports(MemoryStore(disk, LIMITS))
    assert [report.split(" is")[0] for report in reports] == [
        "commit group 2",
        "commit group 5",
        "commit group 9",
    ]


def test_old_rows_of_groups_are_dropped() -> None:
    disk = MemoryDisk()
    write_groups(MemoryStore(disk, LIMITS), 800, size=1)
    assert sum(key.startswith(b"g") for key in disk.keys) < 500


def test_a_mark_is_read_back_whole_or_not_at_all(tmp_path: Path) -> None:
    file = MarkFile(tmp_path / "mark")
    assert file.load() is None
    mark = LogMark(7, 6, 100, 42, 5, 1000)
    file.save(mark)
    assert file.load() == mark
    whole = file.path.read_bytes()
    for at in range(len(whole)):
        file.path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert file.load() is None
        file.path.write_bytes(whole[:at])
        assert file.load() is None
    file.close()


# ----------------------------------------------------------------------------------------- tables


def test_scans_end_whatever_block_is_damaged(tmp_path: Path) -> None:
    store = RocksStore(tmp_path / "data", LIMITS)
    number = store.number("queue/a")
    for identifier in range(1, 601):
        store.append(number, identifier, Random(identifier).randbytes(300))
        store.save(f"space{identifier % 7}", b"%d" % identifier * 20, bytes(40))
    commit(store)
    store._db.flush()
    asyncio.run(close(store))
    (table,) = sorted((tmp_path / "data").glob("*.sst"))[-1:]
    whole = table.read_bytes()
    for index in range(0, len(whole) - 2000, 9000):
        data = bytearray(whole)
        data[index] ^= 0x20
        copy = tmp_path / f"copy-{index}"
        shutil.copytree(tmp_path / "data", copy)
        (copy / table.name).write_bytes(data)
        store = RocksStore(copy, LIMITS)
        seen = [key for key, _ in store._scan(b"\x00", b"\xff")]
        assert seen == sorted(set(seen))
        view = store.view()
        assert list(view.keys(b"\x00", b"\xff")) == seen
        assert store.damage and store.damages.entries
        assert store.last_id(number) >= 600
        del view
        asyncio.run(close(store))
        shutil.rmtree(copy)


def test_a_view_ends_before_damage_that_is_after_its_range(tmp_path: Path) -> None:
    """Whatever block of another destination can't be read, and whichever range is asked for."""
    store = RocksStore(tmp_path / "data", LIMITS)
    numbers = [store.number(f"queue/{name}") for name in "abcd"]
    for number in numbers:
        for identifier in range(1, 101):
            store.append(number, identifier, Random(identifier).randbytes(400))
    commit(store)
    store._db.flush()
    asyncio.run(close(store))
    (table,) = sorted((tmp_path / "data").glob("*.sst"))[-1:]
    whole = table.read_bytes()
    for at in range(0, len(whole) - 4000, 15_000):
        data = bytearray(whole)
        data[at] ^= 0x20
        copy = tmp_path / f"copy-{at}"
        shutil.copytree(tmp_path / "data", copy)
        (copy / table.name).write_bytes(data)
        store = RocksStore(copy, LIMITS)
        view = store.view()
        for number, upto in product(numbers, (100, 101, 1 << 40, MAX_ID)):
            # What follows the last id is the block of the next destination.
            found = list(view.ids(number, after=0, upto=upto))
            assert found == sorted(set(found)) and len(found) <= 100
            assert view.last(message_key(number, 0), message_key(number + 1, 0)) or not found
        assert len(store.damage) < 200
        del view
        asyncio.run(close(store))
        shutil.rmtree(copy)


def test_what_can_not_be_read_is_not_what_is_not_there() -> None:
    disk = MemoryDisk()
    store = MemoryStore(disk, LIMITS)
    store.save("state", b"one", b"1")
    store.save("state", b"two", b"2")
    ids = write_groups(store, 3)
    disk.unreadable.add(b"sstate/two")
    assert store.get_or_raise("state", b"none") is None
    with pytest.raises(RecordUnreadable):
        store.get_or_raise("state", b"two")
    with pytest.raises(RecordUnreadable):
        store.load_all("state")
    assert dict(store.load("state")) == {b"one": b"1"}
    disk.unreadable.add([key for key in disk.keys if key.startswith(b"m")][-1])
    assert store.last_id(1) >= ids[-1], "what is before the damage must not be hidden"


# ----------------------------------------------------------------------------- the list of tables


def test_crc32c_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_every_damage_to_the_list_of_tables_is_noticed(tmp_path: Path) -> None:
    store = RocksStore(tmp_path, LIMITS)
    write_groups(store, 3)
    store._db.flush()
    asyncio.run(close(store))
    data = next(tmp_path.glob("MANIFEST-*")).read_bytes()
    assert fault_of(data, len(data)) == ""
    for at in range(len(data)):
        assert fault_of(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :], len(data))
        assert fault_of(data[:at], len(data))
    # A record that was being written when the machine stopped is no damage.
    assert fault_of(data + data[:20], len(data)) == ""


# --------------------------------------------------------------------------------------- the disk


def test_a_failing_disk_is_not_a_full_one() -> None:
    full = full_or_failed(OSError(28, "No space left on device"))
    failed = full_or_failed(OSError(5, "Input/output error"))
    assert isinstance(full, StoreFull) and isinstance(failed, StoreFailed)
    store = MemoryStore(MemoryDisk(), LIMITS)
    assert store.obstacle(0.0) is None
    store.last_error = failed
    obstacle = store.obstacle(1.0)
    assert isinstance(obstacle, StoreFailed) and str(obstacle) == "the disk can't be written"
    store.last_error = full
    assert isinstance(store.obstacle(2.0), StoreFull)


@pytest.mark.parametrize("kind", [5, 6, 8, 130])
def test_a_header_that_the_engine_can_not_get_past_costs_its_block(
    tmp_path: Path, kind: int
) -> None:
    store = RocksStore(tmp_path / "data", LIMITS)
    write_groups(store, 300)
    copy = killed(tmp_path / "data", store)
    log = log_of(copy)
    data = bytearray(log.read_bytes())
    # Each block of 32 KiB begins with a header; its seventh byte is the type.
    data[(2 << 15) + 6] = kind
    assert invalid_headers(bytes(data)) == [2 << 15]
    log.write_bytes(data)
    store = RocksStore(copy, LIMITS)
    (report,) = log_reports(store)
    assert f"at byte {2 << 15}" in report
    assert store.last_id(1) == 300
    asyncio.run(close(store))


def test_a_store_in_use_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX);"
        "print('locked', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(folder / "LOCK")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None and child.stdout.readline() == b"locked\n"
        with pytest.raises(StoreFailed, match="in use"):
            RocksStore(folder, LIMITS)
        with pytest.raises(StoreFailed, match="in use"):
            verify(tmp_path, tmp_path / "lake", print)
        assert child.stdin is not None
        child.stdin.close()
