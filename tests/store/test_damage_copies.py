"""What a store must never guess is there twice: names, numbers, ids, its own keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import rocksdict

from crosswire.errors import StoreDamaged, StoreFailed
from crosswire.store.contract import Store, StoreLimits
from crosswire.store.copies import CopyFile
from crosswire.store.memory import MemoryDisk, MemoryStore
from crosswire.store.recovery import FORMAT
from crosswire.store.rocks import COPIES, RocksStore, table_options
from tests.store.committing import close as close_store
from tests.store.committing import commit

LIMITS = StoreLimits(spare_bytes=0)
NAMES = [f"queue/{letter}" for letter in "abcdefgh"]


def fill(store: Store) -> dict[str, int]:
    """A message for each destination; the ids by their names."""
    ids = {}
    for name in NAMES:
        ids[name] = store.reserve(1)
        store.append(store.number(name), ids[name], name.encode())
    store.save("subscription", b"s", b"definition")
    commit(store)
    return ids


def close(store: RocksStore, *, flush: bool = True) -> None:
    if flush:
        store._db.flush()
    asyncio.run(close_store(store))


def flip(path: Path, at: float, count: int = 1) -> None:
    data = bytearray(path.read_bytes())
    start = int((len(data) - count) * at)
    for index in range(start, start + count):
        data[index] ^= 0x55
    path.write_bytes(data)


def damage_first_block(path: Path) -> None:
    """Own keys and names sort before everything else: they are in the first block of tables."""
    for table in path.glob("*.sst"):
        data = bytearray(table.read_bytes())
        data[20] ^= 0xFF
        table.write_bytes(data)


@pytest.fixture
def opened() -> Iterator[list[RocksStore]]:
    stores: list[RocksStore] = []
    yield stores
    for store in stores:
        asyncio.run(close_store(store))


def test_unreadable_names_and_own_keys_come_from_the_second_copy(
    tmp_path: Path, opened: list[RocksStore]
) -> None:
    store = RocksStore(tmp_path, LIMITS)
    ids, numbers, node = fill(store), dict(store.destinations()), store.node
    close(store)
    damage_first_block(tmp_path)
    opened.append(store := RocksStore(tmp_path, LIMITS))
    assert store.node == node
    assert store.destinations() == numbers
    assert store.reserve(1) > max(ids.values())
    assert store.number("queue/new") not in numbers.values()
    assert store.get("subscription", b"s") == b"definition"
    assert store.damages.entries


def test_a_damaged_second_copy_is_reported_and_written_anew(
    tmp_path: Path, opened: list[RocksStore]
) -> None:
    store = RocksStore(tmp_path, LIMITS)
    fill(store)
    numbers = dict(store.destinations())
    close(store)
    flip(tmp_path / COPIES, 0.5)
    opened.append(store := RocksStore(tmp_path, LIMITS))
    assert store.destinations() == numbers
    assert [each.part for each in store.damage] == ["copies"]
    close(opened.pop())
    opened.append(store := RocksStore(tmp_path, LIMITS))
    assert store.damage == []
    assert store.damages.entries, "until somebody acknowledges it"
    assert store.damages.acknowledge() and not store.damages.entries


@pytest.mark.parametrize("harm", ["remove", "cut"])
def test_a_lost_second_copy_is_reported(
    tmp_path: Path, opened: list[RocksStore], harm: str
) -> None:
    store = RocksStore(tmp_path, LIMITS)
    fill(store)
    numbers = dict(store.destinations())
    close(store)
    path = tmp_path / COPIES
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    opened.append(store := RocksStore(tmp_path, LIMITS))
    assert store.destinations() == numbers
    assert "copies" in [each.part for each in store.damage]


def test_with_both_copies_damaged_the_start_stops(tmp_path: Path) -> None:
    store = RocksStore(tmp_path / "store", LIMITS)
    fill(store)
    close(store)
    damage_first_block(tmp_path / "store")
    flip(tmp_path / "store" / COPIES, 0.0, 400)
    before = {path.name: path.read_bytes() for path in (tmp_path / "store").glob("*.sst")}
    with pytest.raises(StoreDamaged, match="crosswire store repair"):
        RocksStore(tmp_path / "store", LIMITS)
    for name, data in before.items():
        assert (tmp_path / "store" / name).read_bytes() == data


@pytest.mark.parametrize("pattern", ["CURRENT", "MANIFEST-*", "*.sst"])
def test_a_directory_without_some_of_its_files_is_not_a_new_store(
    tmp_path: Path, pattern: str
) -> None:
    store = RocksStore(tmp_path, LIMITS)
    fill(store)
    close(store)
    for path in tmp_path.glob(pattern):
        path.unlink()
    for _ in range(2):
        with pytest.raises(StoreDamaged, match="crosswire store repair"):
            RocksStore(tmp_path, LIMITS)


def test_a_shorter_list_of_tables_stops_the_start(tmp_path: Path) -> None:
    store = RocksStore(tmp_path, LIMITS)
    fill(store)
    close(store)
    manifest = next(tmp_path.glob("MANIFEST-*"))
    manifest.write_bytes(manifest.read_bytes()[: manifest.stat().st_size * 7 // 10])
    tables = sorted(tmp_path.glob("*.sst"))
    with pytest.raises(StoreDamaged, match="MANIFEST"):
        RocksStore(tmp_path, LIMITS)
    assert sorted(tmp_path.glob("*.sst")) == tables, "the engine would have deleted them"


@pytest.mark.parametrize("number", [b"1", b"3", b"5"])
def test_a_store_of_another_format_is_refused_and_left_as_it_is(
    tmp_path: Path, opened: list[RocksStore], number: bytes
) -> None:
    store = RocksStore(tmp_path, LIMITS)
    fill(store)
    numbers, node = dict(store.destinations()), store.node
    store._db[b"!format"] = number
    close(store)
    copies = (tmp_path / COPIES).read_bytes()
    for _ in range(2):
        with pytest.raises(StoreFailed, match=rf"format '{number.decode()}'.*Nothing was changed"):
            RocksStore(tmp_path, LIMITS)
    assert (tmp_path / COPIES).read_bytes() == copies
    database = rocksdict.Rdict(str(tmp_path), table_options(1 << 20))
    assert database[b"!format"] == number
    database[b"!format"] = FORMAT
    database.close()
    opened.append(store := RocksStore(tmp_path, LIMITS))
    assert (store.destinations(), store.node, store.damage) == (numbers, node, [])


# ------------------------------------------------------------------------------------ both stores


@pytest.mark.parametrize("key", [b"!format", b"!node", b"!ids", b"dqueue/c"])
def test_each_own_key_has_a_second_copy(key: bytes) -> None:
    disk = MemoryDisk()
    store = MemoryStore(disk, LIMITS)
    ids, numbers, node = fill(store), dict(store.destinations()), store.node
    disk.unreadable.add(key)
    store = MemoryStore(disk, LIMITS)
    assert (store.node, store.destinations()) == (node, numbers)
    assert store.reserve(1) > max(ids.values())
    assert store.damages.entries


@pytest.mark.parametrize("key", [b"!format", b"!node", b"!ids"])
def test_where_both_copies_are_gone_the_start_stops(key: bytes) -> None:
    disk = MemoryDisk()
    fill(MemoryStore(disk, LIMITS))
    disk.unreadable.add(key)
    disk.copies = None
    with pytest.raises(StoreDamaged):
        MemoryStore(disk, LIMITS)


def test_a_number_is_never_given_out_again_after_a_failed_group() -> None:
    disk = MemoryDisk()
    store = MemoryStore(disk, LIMITS)
    fill(store)
    disk.room_bytes = 0
    number = store.number("queue/later")
    assert commit(store) is not None
    disk.room_bytes = 1 << 40
    assert commit(store) is None
    again = MemoryStore(disk, LIMITS)
    assert again.destinations()["queue/later"] == number
    assert again.number("queue/last") > number


# ---------------------------------------------------------------------------------------- the file


def test_any_single_damage_to_the_copies_costs_what_it_hits(tmp_path: Path) -> None:
    values = {b"k%d" % each: Random(each).randbytes(each) for each in range(40)}
    file = CopyFile(tmp_path / "copies")
    file.load()
    file.rewrite(values)
    whole = file.path.read_bytes()
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 0x10
        file.path.write_bytes(data)
        found = CopyFile(file.path).load()
        assert not found.is_whole
        assert len(found.values) >= len(values) - 1
        assert all(values[key] == value for key, value in found.values.items())


def test_appends_are_read_back_and_dropped_keys_are_gone(tmp_path: Path) -> None:
    file = CopyFile(tmp_path / "copies")
    file.load()
    for each in range(3000):
        file.save({b"counter": each.to_bytes(4), b"k%d" % (each % 7): b"v"})
    file.save({b"k3": None})
    found = CopyFile(file.path).load()
    assert found.is_whole and found.values[b"counter"] == (2999).to_bytes(4)
    assert b"k3" not in found.values and len(found.values) == 7
    assert file.path.stat().st_size < 100_000, "it is rewritten now and then"
