"""Checkpoints of a store that is in use."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from crosswire.errors import StoreDamaged, StoreFull
from crosswire.store.checkpoint import (
    Checkpoint,
    CheckpointFile,
    create_checkpoint,
    is_plain_name,
    read_state,
    rewrite_checkpoint,
    verify_files,
)
from crosswire.store.contract import StoreLimits
from crosswire.store.keys import LOCAL
from crosswire.store.replica import LOG_POSITION
from crosswire.store.rocks import RocksStore
from crosswire.store.rocks_replica import RocksReplica, convert
from tests.store.committing import commit
from tests.store.test_replica import LIMITS, LOG, make_local, position


@pytest.fixture
def store(tmp_path: Path) -> RocksStore:
    store = RocksStore(tmp_path / "store", StoreLimits(spare_bytes=0))
    number = store.number("queue/q")
    for _ in range(20):
        first = store.reserve(10)
        store.append_run(number, first, [b"record" * 20] * 10)
        store.save("space", b"key", first.to_bytes(8))
        commit(store)
    return store


def messages(store: RocksStore) -> list[int]:
    return [int.from_bytes(key[5:]) for key, _ in store._scan(b"m", b"n")]


def test_it_opens_as_an_intact_store_with_all_that_was_committed(
    store: RocksStore, tmp_path: Path
) -> None:
    made = create_checkpoint(store, tmp_path / "copy")
    verify_files(tmp_path / "copy", made)
    assert (made.node, made.newest_id) == (store.node, store.newest_id)
    assert read_state(tmp_path / "copy", "space", b"key") == store.get("space", b"key")
    verify_files(tmp_path / "copy", made)  # reading has left nothing
    expected, destinations = messages(store), dict(store.destinations())
    copy = RocksStore(tmp_path / "copy")
    assert (messages(copy), copy.damage, dict(copy.destinations())) == (expected, [], destinations)
    copy.close()
    store.close()


def test_what_is_written_meanwhile_leaves_it_consistent(store: RocksStore, tmp_path: Path) -> None:
    """Each group has ten messages and a state with the first of their ids: all or nothing."""
    results: list[Checkpoint] = []
    copying = threading.Thread(
        target=lambda: results.append(create_checkpoint(store, tmp_path / "copy"))
    )
    copying.start()
    while copying.is_alive():
        # New destinations, too: these have a second copy in a file of its own.
        first = store.reserve(10)
        store.append_run(store.number(f"queue/{first}"), first, [b"record"] * 10)
        store.save("space", b"key", first.to_bytes(8))
        commit(store)
    copying.join()
    copy = RocksStore(tmp_path / "copy")
    found = messages(copy)
    last = int.from_bytes(copy.get("space", b"key") or b"")
    assert copy.damage == [] and results[0].newest_id == last + 9
    assert sorted(found) == list(range(min(found), last + 10))
    known = set(copy.destinations().values())
    assert {int.from_bytes(key[1:5]) for key, _ in copy._scan(b"m", b"n")} <= known
    copy.close()
    store.close()


def test_its_rows_can_be_changed_before_it_becomes_a_store(
    store: RocksStore, tmp_path: Path
) -> None:
    create_checkpoint(store, tmp_path / "copy")
    before = store.node
    store.close()
    rewrite_checkpoint(tmp_path / "copy", lambda _: {b"!node": b"another", b"!running": b"other"})
    copy = RocksStore(tmp_path / "copy")
    assert (copy.node, copy.damage, copy.power_lost) == ("another", [], True)
    assert copy.node != before
    copy.close()


@pytest.mark.parametrize("kind", ["changed", "shorter", "missing", "foreign"])
def test_a_file_that_is_not_as_listed_is_found(
    store: RocksStore, tmp_path: Path, kind: str
) -> None:
    made = create_checkpoint(store, tmp_path / "copy")
    store.close()
    file = max((tmp_path / "copy").glob("*.sst"), key=lambda each: each.stat().st_size)
    data = file.read_bytes()
    file.unlink()  # it may be a link
    if kind == "changed":
        file.write_bytes(data[:9] + bytes((data[9] ^ 1,)) + data[10:])
    elif kind == "shorter":
        file.write_bytes(data[:-1])
    elif kind == "foreign":
        file.write_bytes(data)
        (tmp_path / "copy" / "000099.sst").write_bytes(data)
    with pytest.raises(StoreDamaged):
        verify_files(tmp_path / "copy", made)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "..", "/etc/passwd", "a\0b", ".hidden"])
def test_names_are_no_paths(store: RocksStore, tmp_path: Path, name: str) -> None:
    assert not is_plain_name(name)
    made = Checkpoint(
        node="n", group=1, newest_id=1, next_row=1, files=(CheckpointFile(name, 0, ""),)
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreDamaged):
        verify_files(tmp_path / "empty", made)
    store.close()


def test_nothing_is_left_of_one_that_failed(store: RocksStore, tmp_path: Path) -> None:
    def full(_folder: Path) -> None:
        (tmp_path / "copy").mkdir()
        raise StoreFull("there is no room on the disk")

    store.copy_engine = full  # type: ignore[method-assign]
    with pytest.raises(StoreFull):
        create_checkpoint(store, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    store.close()


def test_a_checkpoint_of_a_replica_becomes_a_store_of_its_own(tmp_path: Path) -> None:
    node = make_local(tmp_path / "replica")
    convert(tmp_path / "replica", LIMITS, LOG, "a", position(5))
    replica = RocksReplica(tmp_path / "replica", LIMITS)
    replica.save_local("name", b"a")
    made = create_checkpoint(replica, tmp_path / "copy")
    replica.close()
    verify_files(tmp_path / "copy", made)
    rewrite_checkpoint(tmp_path / "copy", lambda _: {LOG_POSITION: None})
    copy = RocksStore(tmp_path / "copy", LIMITS)
    assert (copy.node, copy.damage, dict(copy.destinations())) == (node, [], {"queue/a": 1})
    assert list(copy._scan(*LOCAL)) == []
    assert list(copy.load("subscription")) == [(b"s", b"t")]
    copy.close()
