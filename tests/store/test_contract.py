"""What every store promises, on each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from crosswire.commitlog.contract import AcceptedMessages
from crosswire.errors import DestinationFull, StoreFailed
from crosswire.hub import commits
from crosswire.store.contract import Page, Store, StoreLimits
from crosswire.store.keys import MAX_ID
from crosswire.store.memory import MemoryDisk, MemoryStore
from crosswire.store.rocks import RocksStore
from crosswire.testing.simulation.disk import SimulatedDisk
from tests.store.busy import BusyStore
from tests.store.committing import CommitRecorder, close, commit, commit_path

Opener = Callable[[], Store]

LIMITS = StoreLimits(spare_bytes=0, destinations=50)


@pytest.fixture(params=["memory", "rocks"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the same data again, each time as a new process would after a kill."""
    disk = MemoryDisk()
    opened: list[Store] = []

    def open_memory() -> Store:
        return MemoryStore(disk, LIMITS)

    def open_rocks() -> Store:
        for store in opened:
            asyncio.run(close(store))
        opened[:] = [RocksStore(tmp_path / "data", LIMITS)]
        return opened[0]

    yield open_memory if request.param == "memory" else open_rocks
    for store in opened:
        asyncio.run(close(store))


@pytest.fixture
def store(reopen: Opener) -> Store:
    return reopen()


def read(store: Store, numbers: Sequence[int], **options: int) -> Page:
    pages: list[Page] = []
    store.read(numbers, done=pages.append, **{"after": 0, "count": 100, **options})  # type: ignore[arg-type]
    assert len(pages) == 1
    return pages[0]


def test_a_new_store_has_a_name_that_stays(reopen: Opener) -> None:
    node = reopen().node
    assert len(node) == 16
    assert reopen().node == node


def test_ids_are_never_handed_out_twice(reopen: Opener) -> None:
    seen: set[int] = set()
    for _ in range(4):
        store = reopen()
        first = store.reserve(1000)
        again = store.reserve(1)
        ids = {*range(first, first + 1000), again}
        assert len(ids) == 1001 and not ids & seen
        seen |= ids


def test_ids_grow_past_a_reserved_block(store: Store) -> None:
    first = store.reserve(3 << 20)
    assert store.reserve(1) == first + (3 << 20)


def test_ids_of_a_group_are_reserved_by_it(reopen: Opener) -> None:
    store = reopen()
    before = store.reserve(1)
    first = store.reserve_in_group(3 << 20)
    assert first == before + 1
    store.save("space", b"key", b"value")
    commit(store)
    assert store.reserve(1) == first + (3 << 20)
    assert reopen().reserve(1) > first + (3 << 20)


def test_ids_of_a_group_that_is_lost_are_not_mixed_with_those_that_were_seen(
    reopen: Opener,
) -> None:
    store = reopen()
    store.reserve_in_group(3 << 20)
    seen = store.reserve(1)
    assert reopen().reserve(1) > seen


def test_a_start_that_failed_after_a_power_cut_leaves_no_report_of_damage() -> None:
    disk = SimulatedDisk(Random(7))
    store = MemoryStore(disk, LIMITS)
    for value in (b"synced, since it reserves ids", b"not synced"):
        store.save("space", b"key", value)
        commit(store)
    MemoryDisk.cut_power(disk)
    disk.failing_syncs = 100
    with pytest.raises(StoreFailed):
        MemoryStore(disk, LIMITS)
    disk.failing_syncs = 0
    again = MemoryStore(disk, LIMITS)
    assert not again.damage and again.power_losses == 1


def test_numbers_of_destinations_stay(reopen: Opener) -> None:
    store = reopen()
    numbers = {name: store.number(name) for name in ("queue/a", "queue/b", "topic/ü")}
    assert len(set(numbers.values())) == 3
    commit(store)
    again = reopen()
    assert again.destinations() == numbers
    assert again.number("queue/b") == numbers["queue/b"]
    assert again.name(numbers["topic/ü"]) == "topic/ü"


def test_there_is_an_end_to_destinations(store: Store) -> None:
    for index in range(LIMITS.destinations):
        store.number(f"queue/{index}")
    with pytest.raises(DestinationFull):
        store.number("queue/more")


def test_nothing_is_read_before_it_is_committed(store: Store) -> None:
    store.append(1, 5, b"five")
    assert read(store, [1]).records == []
    commit(store)
    assert read(store, [1]).records == [(1, 5, b"five")]


def test_a_read_starts_after_one_id_and_ends_at_another(store: Store) -> None:
    for identifier in range(1, 21):
        store.append(1, identifier, bytes([identifier]))
    store.append(2, 7, b"other")
    commit(store)
    page = read(store, [1], after=3, upto=9)
    assert [record[1] for record in page.records] == [4, 5, 6, 7, 8, 9]
    assert page.last == 9
    page = read(store, [1], after=3, count=4)
    assert [record[1] for record in page.records] == [4, 5, 6, 7]
    assert page.last == 7
    assert read(store, [1], after=20).last == MAX_ID


def test_a_page_ends_with_its_bytes(store: Store) -> None:
    for identifier in range(1, 6):
        store.append(1, identifier, bytes(100))
    commit(store)
    page = read(store, [1], size_bytes=250)
    assert len(page.records) == 3 and page.last == 3


def test_several_logs_are_read_as_one_in_order_of_ids(store: Store) -> None:
    for identifier in range(1, 31):
        store.append(1 + identifier % 3, identifier, b"")
    commit(store)
    seen: list[int] = []
    after = 0
    while after < 30:
        page = read(store, [1, 2, 3], after=after, upto=30, count=4)
        seen += [record[1] for record in page.records]
        after = page.last
    assert seen == list(range(1, 31))


def test_fetch_gives_none_for_what_is_not_there(store: Store) -> None:
    store.append(1, 5, b"five")
    commit(store)
    assert store.fetch(1, [5, 6]) == [b"five", None]


def test_reclaimed_ranges_are_gone(store: Store) -> None:
    for identifier in range(1, 11):
        store.append(1, identifier, b"x")
    commit(store)
    store.reclaim(1, 3, 8)
    store.reclaim(1, 5, 4)
    commit(store)
    assert [record[1] for record in read(store, [1]).records] == [1, 2, 9, 10]
    assert store.last_id(1) == 10
    assert store.last_id(2) == 0


def test_state_is_saved_dropped_and_loaded_in_order(reopen: Opener) -> None:
    store = reopen()
    for key in (b"b", b"a", b"c"):
        store.save("space", key, b"1")
    store.save("space", b"a", b"2")
    store.save("spaces", b"z", b"other")
    commit(store)
    store.drop("space", b"b")
    commit(store)
    again = reopen()
    assert list(again.load("space")) == [(b"a", b"2"), (b"c", b"1")]
    assert again.get("space", b"a") == b"2"
    assert again.get("space", b"b") is None


def test_a_dropped_range_spares_what_comes_after_it(store: Store) -> None:
    store.save("space", b"1", b"old")
    store.save("space", b"2", b"old")
    commit(store)
    store.save("space", b"1", b"newer")
    store.drop_range("space", b"1", b"3")
    store.save("space", b"2", b"new")
    commit(store)
    assert list(store.load("space")) == [(b"2", b"new")]


def test_the_journal_numbers_its_rows(reopen: Opener) -> None:
    store = reopen()
    for rows in (3, 1, 5):
        store.journal(b"block of %d" % rows, rows)
        store.save("any", b"", b"")
        commit(store)
    again = reopen()
    assert again.next_row == 10
    assert again.blocks(0, 10) == [
        (1, 3, b"block of 3"),
        (4, 1, b"block of 1"),
        (5, 5, b"block of 5"),
    ]
    assert again.blocks(3, 1) == [(4, 1, b"block of 1")]
    assert again.blocks(6, 10) == [(5, 5, b"block of 5")]
    again.forget_rows(4)
    commit(again)
    assert [block[0] for block in again.blocks(0, 10)] == [5]


def test_the_block_of_a_group_on_its_way_is_not_read(store: Store) -> None:
    for block in (b"committed", b"on its way"):
        store.journal(block, 2)
        group = store.seal()
        store.write_group(group)
        if block == b"committed":
            store.applied(group)
    assert store.blocks(0, 10) == [(1, 2, b"committed")]
    assert store.blocks(2, 10) == []
    store.applied(group)
    assert store.blocks(2, 10) == [(3, 2, b"on its way")]


def test_what_is_saved_when_a_group_is_sealed_is_in_it(store: Store) -> None:
    recorder = CommitRecorder()
    path = commit_path(store, recorder)
    path.changed(LastWriter(store), request=False)
    store.append(1, 1, b"x")
    path.commit_now()
    assert recorder.outcomes == [None]
    assert store.get("last", b"key") == b"value"


class LastWriter:
    """A backlog that saves something when the group is sealed."""

    visible = 0

    def __init__(self, store: Store) -> None:
        self.store = store

    def write(self) -> None:
        self.store.save("last", b"key", b"value")

    def release(self, runs: Iterable[AcceptedMessages], now: float) -> None:
        raise AssertionError

    def withdraw(self, runs: Iterable[AcceptedMessages]) -> None:
        raise AssertionError

    def dispatch(self, now: float) -> None:
        raise AssertionError


class RaisingWriter(LastWriter):
    def write(self) -> None:
        raise RuntimeError("no")


@pytest.mark.failing_callbacks
async def test_a_callback_that_raises_keeps_nothing_from_the_disk(reopen: Opener) -> None:
    """Neither the group, nor those who wait for it, nor the next one."""

    def raising() -> None:
        raise RuntimeError("no")

    store = await asyncio.to_thread(reopen)
    recorder = CommitRecorder(raising)
    path = commit_path(store, recorder)
    store.append(1, 1, b"x")
    path.changed(RaisingWriter(store), request=False)
    assert path.commit_now() is None
    path.start(asyncio.get_running_loop())
    for identifier in (2, 3):
        store.append(1, identifier, b"x")
        path.changed(RaisingWriter(store), request=False)
        path.written().add_done_callback(lambda _receipt: raising())
        path.request()
        async with asyncio.timeout(10):
            await path.flush()
    assert recorder.outcomes == [None] * 3
    assert len(read(store, [1]).records) == 3
    await path.close()


async def test_what_arrives_during_a_write_is_one_group(reopen: Opener) -> None:
    store = await asyncio.to_thread(reopen)
    path = commit_path(store)
    path.start(asyncio.get_running_loop())
    groups = store.groups
    for identifier in range(1, 101):
        store.append(1, identifier, b"x")
        path.request()
    await path.flush()
    assert store.groups == groups + 1
    assert len(read(store, [1]).records) == 100


async def test_closing_writes_what_is_open(reopen: Opener) -> None:
    store = await asyncio.to_thread(reopen)
    path = commit_path(store)
    path.start(asyncio.get_running_loop())
    store.append(1, 1, b"x")
    await path.close()
    again = await asyncio.to_thread(reopen)
    assert len(read(again, [1]).records) == 1


async def test_what_nobody_waits_for_is_written_a_little_later(reopen: Opener) -> None:
    store = await asyncio.to_thread(reopen)
    written = asyncio.Event()
    path = commit_path(store, CommitRecorder(written.set))
    path.start(asyncio.get_running_loop())
    store.append(1, 1, b"x")
    path.request(sync=False, urgent=False)
    await asyncio.wait_for(written.wait(), 10)
    assert len(read(store, [1]).records) == 1


async def test_nothing_stays_unsynced_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "_SYNC_S", 0.01)
    disk = MemoryDisk()
    store = MemoryStore(disk)
    path = commit_path(store)
    path.start(asyncio.get_running_loop())
    path.request()
    await path.flush()
    groups = store.groups
    store.append(1, 1, b"x")
    path.request(sync=False)
    async with asyncio.timeout(10):
        while store.groups < groups + 2:
            await asyncio.sleep(0)
    assert not disk.unsynced
    await path.close()


def test_a_group_that_fails_loses_its_appends_and_nothing_else() -> None:
    disk = MemoryDisk()
    store = MemoryStore(disk)
    recorder = CommitRecorder()
    path = commit_path(store, recorder)
    disk.room_bytes = 10
    store.append(1, 1, b"x" * 100)
    store.retain(1, 2, b"kept")
    store.save("space", b"key", b"value")
    error = path.commit_now()
    assert error is not None and recorder.outcomes == [error]
    assert read(store, [1]).records == []
    assert not store.has_room(0.0)
    disk.room_bytes = 1 << 20
    assert path.commit_now() is None
    assert read(store, [1]).records == [(1, 2, b"kept")]
    assert store.get("space", b"key") == b"value"
    assert store.has_room(10.0)


class Faltering(MemoryStore):
    """Its disk takes what is written, and fails to sync it `failures` times."""

    failures = 0

    def _sync(self) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreFailed("the disk is out of order")
        super()._sync()


def test_what_was_written_but_not_synced_is_taken_back() -> None:
    disk = MemoryDisk()
    store = Faltering(disk)
    recorder = CommitRecorder()
    path = commit_path(store, recorder)
    store.failures = 1
    store.append(1, 1, b"x")
    store.append_run(1, 2, [b"y", b"z"])
    store.retain(1, 4, b"kept")
    store.save("space", b"key", b"value")
    path.request()
    error = path.commit_now()
    assert isinstance(error, StoreFailed) and recorder.outcomes == [error]
    store.append(1, 5, b"more")
    assert path.commit_now() is None
    for each in (store, MemoryStore(disk)):
        assert read(each, [1]).records == [(1, 4, b"kept"), (1, 5, b"more")]
        assert each.get("space", b"key") == b"value"
        disk.cut_power()


async def test_the_loop_goes_on_while_the_disk_is_busy() -> None:
    store, recorder = BusyStore(), CommitRecorder()
    path = commit_path(store, recorder)
    path.start(asyncio.get_running_loop())
    store.is_busy = True
    store.append(1, 1, b"x")
    path.request()
    while path._flight is None:
        await asyncio.sleep(0)
    store.append(1, 2, b"y")
    path.request()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not recorder.outcomes
    store.may_end.set()
    await path.flush()
    assert recorder.outcomes == [None, None]
    await path.close()


async def test_what_is_requested_while_a_group_ends_is_committed(reopen: Opener) -> None:
    store, done = await asyncio.to_thread(reopen), asyncio.Event()
    recorder = CommitRecorder()
    path = commit_path(store, recorder)
    path.start(asyncio.get_running_loop())
    path.request()
    await path.flush()

    def again() -> None:
        recorder.then = done.set
        path.request(sync=False)

    recorder.then = again
    store.append(1, 1, b"x")
    path.request(sync=False)
    await asyncio.wait_for(done.wait(), 10)
    await path.close()


async def test_flushing_waits_for_the_disk() -> None:
    disk = MemoryDisk()
    store, recorder = MemoryStore(disk), CommitRecorder()
    written = asyncio.Event()
    path = commit_path(store, recorder)
    path.start(asyncio.get_running_loop())
    path.request()
    await path.flush()
    recorder.then = written.set
    store.append(1, 1, b"x")
    path.request(sync=False)
    await written.wait()
    assert disk.unsynced
    await path.flush()
    assert not disk.unsynced
    await path.close()


def test_a_run_is_read_as_it_was_appended(store: Store) -> None:
    ids = range(250, 1100)
    store.append_run(7, ids[0], [b"%d" % each for each in ids])
    commit(store)
    page = read(store, [7], count=10_000)
    assert page.records == [(7, each, b"%d" % each) for each in ids]


def test_a_power_cut_takes_what_was_not_synced() -> None:
    disk = MemoryDisk()
    store = MemoryStore(disk)
    path = commit_path(store)
    store.append(1, 1, b"synced")
    path.request(sync=True)
    path.commit_now()
    store.append(1, 2, b"not synced")
    path.request(sync=False)
    path.commit_now()
    disk.cut_power()
    again = MemoryStore(disk)
    assert [record[1] for record in read(again, [1]).records] == [1]
    assert again.power_lost and not MemoryStore(disk).power_lost


def test_power_cuts_are_counted() -> None:
    disk = MemoryDisk()
    assert MemoryStore(disk).power_losses == 0
    for count in (1, 2, 3):
        disk.cut_power()
        assert MemoryStore(disk).power_losses == count
        assert MemoryStore(disk).power_losses == count
    disk.copies = None
    assert MemoryStore(disk).power_losses == 3


def test_a_view_shows_what_was_committed_when_it_was_taken(store: Store) -> None:
    number, other = store.number("queue/a"), store.number("queue/b")
    for identifier in range(1, 9):
        store.append(number if identifier % 2 else other, identifier, b"%d" % identifier)
    store.save("space", b"key", b"value")
    commit(store)
    view = store.view()
    store.reclaim(number, 1, 100)
    store.append(other, 9, b"9")
    store.drop("space", b"key")
    commit(store)
    page = view.page([number, other], after=2, upto=100, count=3)
    assert ([record[1] for record in page.records], page.last) == ([3, 4, 5], 5)
    assert list(view.ids(number, after=1, upto=6)) == [3, 5]
    assert list(view.ids(number, after=9, upto=1)) == []
    assert view.bounds(number, 1, 100) == (3, 7)
    assert view.bounds(other, 0, 7) == (2, 6)
    assert view.bounds(number, 7, 100) is None
    assert list(view.load("space")) == [(b"key", b"value")]
    assert store.view().bounds(number, 0, 100) is None


def test_the_last_id_can_be_asked_for_up_to_another(store: Store) -> None:
    number = store.number("queue/a")
    for identifier in (3, 5, 9):
        store.append(number, identifier, b"x")
    commit(store)
    assert [store.last_id(number, upto) for upto in (2, 3, 8, 9, 100)] == [0, 3, 5, 9, 9]


def test_a_page_of_many_destinations_is_bounded_in_size(store: Store) -> None:
    numbers = [store.number(f"queue/{each}") for each in range(5)]
    for identifier in range(1, 51):
        store.append(numbers[identifier % 5], identifier, b"x" * 10)
    commit(store)
    seen, after = [], 0
    while after < 50:
        page = read(store, numbers, after=after, upto=50, size_bytes=100)
        assert len(page.records) <= 10
        seen += [record[1] for record in page.records]
        after = page.last
    assert seen == list(range(1, 51))
