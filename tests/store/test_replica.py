"""Stores that repeat a log: a leader's and its standbys' are equal, and none is ever half."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosswire.commitlog.body import RecordedBody
from crosswire.commitlog.records import RecordPosition
from crosswire.errors import StoreDamaged, StoreFailed
from crosswire.store.contract import StoreLimits
from crosswire.store.memory import MemoryDisk, MemoryReplica
from crosswire.store.recovery import FORMAT
from crosswire.store.replica import ReplicaStore
from crosswire.store.rocks import COPIES, MARK, REPLICA, RocksStore
from crosswire.store.rocks_replica import (
    RocksReplica,
    content_digest,
    convert,
    record_content,
)
from tests.store.committing import commit

LOG = b"l" * 16
LIMITS = StoreLimits(spare_bytes=0)

Opener = Callable[[], ReplicaStore]


def position(number: int) -> RecordPosition:
    return RecordPosition(number, number.to_bytes(32))


def own_keys() -> bytes:
    body = RecordedBody()
    body.put(b"!format", FORMAT)
    body.put(b"!node", b"node of the log")
    return body.encode()


@pytest.fixture(params=["memory", "rocks"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Opens the same data again, as a new process would after a kill."""
    disk = MemoryDisk()
    opened: list[ReplicaStore] = []

    def open_it() -> ReplicaStore:
        for store in opened:
            store.close()
        if request.param == "memory":
            store: ReplicaStore = MemoryReplica(disk, LIMITS)
            if not store.log_id:
                store.join(LOG)
        else:
            store = RocksReplica(tmp_path / "data", LIMITS, log_id=LOG, name="a")
        opened[:] = [store]
        return store

    return open_it


def lead(store: ReplicaStore, number: int) -> bytes:
    """Commit the open group as a leader does; returns its body."""
    group = store.seal()
    assert isinstance(group.body, RecordedBody)
    body = group.body.encode()
    store.apply_group(group, body, position(number))
    store.applied(group)
    return body


def test_a_replica_continues_where_it_was(reopen: Opener) -> None:
    store = reopen()
    assert store.node == "" and store.position.number == 0
    store.apply(own_keys(), position(2))
    assert (reopen().position, reopen().node) == (position(2), "node of the log")


def test_a_replica_that_ends_before_its_first_record_starts_again(reopen: Opener) -> None:
    store = reopen()
    store.save_local("instance", b"i")
    store.sync()
    again = reopen()
    assert (again.log_id, again.position.number, again.node) == (LOG, 0, "")
    assert again.get_local("instance") == b"i"


def test_records_without_changes_count_when_the_position_is_written(reopen: Opener) -> None:
    store = reopen()
    store.apply(own_keys(), position(2))
    store.pass_over(position(3))
    assert store.position == position(3)
    assert store.write_position() == position(3)
    assert reopen().position == position(3)


def test_what_a_leader_commits_is_the_same_on_a_standby(reopen: Opener) -> None:
    store = reopen()
    store.apply(own_keys(), position(2))
    leader, standby = reopen(), MemoryReplica(limits=LIMITS)
    standby.join(LOG)
    standby.apply(own_keys(), position(2))
    number = leader.number("queue/a")
    first = leader.reserve(3)
    leader.append_run(number, first, [b"x", b"y", b"z"])
    leader.save("space", b"key", b"value")
    standby.apply(lead(leader, 3), position(3))
    leader.reclaim(number, first, first)
    leader.drop("space", b"key")
    leader.journal(b"rows", 4)
    standby.apply(lead(leader, 4), position(4))
    assert content_digest(standby) == content_digest(leader)
    # What a new leader continues with.
    again = MemoryReplica(standby.disk, LIMITS)
    assert (again.newest_id >= leader.newest_id, again.next_row) == (True, 5)
    assert again.destinations() == {"queue/a": number}


def test_ids_of_a_term_are_above_all_that_an_earlier_one_may_have_shown(reopen: Opener) -> None:
    store = reopen()
    store.apply(own_keys(), position(2))
    store = reopen()
    store.save("space", b"first", b"group")
    lead(store, 3)
    # Given out after the last group that is in the log, for messages that are not durable.
    shown = store.reserve(1000) + 999
    assert reopen().reserve(1) > shown


def test_an_id_block_that_is_used_up_is_in_the_next_group(reopen: Opener) -> None:
    store = reopen()
    store.apply(own_keys(), position(2))
    store = reopen()
    last = store.reserve(1 << 25) + (1 << 25) - 1
    lead(store, 3)
    assert reopen().reserve(1) > last


def test_keys_of_one_replica_are_not_compared(reopen: Opener) -> None:
    store, other = reopen(), MemoryReplica(limits=LIMITS)
    other.join(LOG)
    for each in (store, other):
        each.apply(own_keys(), position(2))
    store.save_local("name", b"a")
    store.pass_over(position(3))
    store.write_position()
    assert store.get_local("name") == b"a"
    assert content_digest(store) == content_digest(other)
    store.clear_local()
    assert store.get_local("name") is None


def test_damage_keeps_a_replica_from_leading(reopen: Opener) -> None:
    store = reopen()
    store.apply(own_keys(), position(2))
    store.check_intact()
    store.report_damage("record", "message 7 of queue/a is damaged")
    with pytest.raises(StoreDamaged, match="message 7"):
        store.check_intact()
    assert "message 7" in reopen().fault


def test_a_full_log_refuses_producers(reopen: Opener) -> None:
    store = reopen()
    assert store.has_room(1.0)
    store.is_log_full = True
    assert not store.has_room(2.0) and store.obstacle(2.0) is not None


@given(seed=st.integers(0, 1 << 32))
def test_a_standby_is_a_prefix_after_any_power_cut(seed: int) -> None:
    """Whatever of the writes is on the disk when the power fails, rest and order come again."""
    random = Random(seed)
    disk = MemoryDisk()
    store = MemoryReplica(disk, LIMITS)
    store.join(LOG)
    bodies = [own_keys()]
    for _ in range(8):
        body = RecordedBody()
        for _ in range(random.randint(1, 3)):
            key = b"sspace/%d" % random.randint(0, 4)
            if random.random() < 0.3:
                body.delete(key)
            else:
                body.put(key, random.randbytes(3))
        bodies.append(body.encode())
    whole = MemoryReplica(limits=LIMITS)
    whole.join(LOG)
    for number, each in enumerate(bodies):
        whole.apply(each, position(number + 1))
    while store.position.number < len(bodies):
        number = store.position.number
        store.apply(bodies[number], position(number + 1))
        if random.random() < 0.3:
            store.sync()
        if random.random() < 0.2:
            disk.cut_power()
            store = MemoryReplica(disk, LIMITS)
            if not store.log_id:
                store.join(LOG)
            assert store.position.number <= number + 1
    assert content_digest(store) == content_digest(whole)


def make_local(path: Path) -> str:
    store = RocksStore(path, LIMITS)
    number = store.number("queue/a")
    store.append(number, store.reserve(1), b"message")
    store.save("subscription", b"s", b"t")
    assert commit(store) is None
    node = store.node
    store.close()
    return node


def test_a_data_directory_remembers_its_log(tmp_path: Path) -> None:
    node = make_local(tmp_path)
    with pytest.raises(StoreFailed, match="replication init"):
        RocksReplica(tmp_path, LIMITS, log_id=LOG, name="a")
    convert(tmp_path, LIMITS, LOG, "a", position(5))
    assert not (tmp_path / COPIES).exists() and not (tmp_path / MARK).exists()
    with pytest.raises(StoreFailed, match="replication leave"):
        RocksStore(tmp_path, LIMITS)
    store = RocksReplica(tmp_path, LIMITS)
    assert (store.node, store.position, store.fault) == (node, position(5), "")
    assert store.destinations() == {"queue/a": 1}
    store.close()


def test_a_new_replica_finds_its_log_by_itself(tmp_path: Path) -> None:
    store = RocksReplica(tmp_path / "data", LIMITS, log_id=LOG, name="a")
    store.save_local("instance", b"i")
    store.close()
    again = RocksReplica(tmp_path / "data", LIMITS)
    assert again.log_id == LOG
    again.close()


def test_a_replica_that_leaves_is_a_store_of_its_own(tmp_path: Path) -> None:
    node = make_local(tmp_path)
    convert(tmp_path, LIMITS, LOG, "a", position(5))
    replica = RocksReplica(tmp_path, LIMITS)
    replica.save_local("name", b"a")
    replica.leave()
    assert not (tmp_path / REPLICA).exists()
    store = RocksStore(tmp_path, LIMITS)
    assert (store.node, store.damage, store.was_stopped) == (node, [], True)
    assert list(store.load("subscription")) == [(b"s", b"t")]
    store.close()


def test_the_content_of_a_store_goes_into_a_log(tmp_path: Path) -> None:
    make_local(tmp_path)
    store = RocksStore(tmp_path, LIMITS)
    copy = MemoryReplica(limits=LIMITS)
    copy.join(LOG)
    for number, body in enumerate(record_content(store, 100, 1 << 20)):
        copy.apply(body, position(number + 2))
    assert content_digest(copy) == content_digest(store)
    assert record_content(store, 10, 20) == []
    store.close()


def test_a_hole_in_the_write_ahead_log_ends_it(tmp_path: Path) -> None:
    """Never skipped: a replica with a group missing in the middle would differ for ever."""
    store = RocksReplica(tmp_path / "a", LIMITS, log_id=LOG, name="a")
    for number in range(1, 60):
        body = RecordedBody()
        body.put(b"sspace/%d" % number, b"v" * 2000)
        store.apply(own_keys() if number == 1 else body.encode(), position(number))
    store.sync()
    # As it would be found after a power cut: closing would sort it into tables.
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    store.close()
    (wal,) = (tmp_path / "b").glob("*.log")
    data = bytearray(wal.read_bytes())
    at = len(data) // 2
    data[at : at + 40] = bytes(40)
    wal.write_bytes(data)
    store = RocksReplica(tmp_path / "b", LIMITS)
    number = store.position.number
    assert 1 < number < 59
    found = [int(key) for key, _ in store.load("space")]
    assert sorted(found) == list(range(2, number + 1))
    store.close()
