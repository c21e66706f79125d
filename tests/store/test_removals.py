"""Removed destinations: their numbers are never given out again, whatever happens in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosswire.errors import StoreFailed
from crosswire.store.contract import Store, StoreLimits
from crosswire.store.memory import MemoryDisk, MemoryStore
from crosswire.store.rocks import COPIES, RocksStore
from tests.store.committing import close, commit

LIMITS = StoreLimits(spare_bytes=0)
NAMES = ["queue/a", "queue/b", "topic/c"]


@pytest.fixture(params=["memory", "rocks"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    disk, opened = MemoryDisk(), list[Store]()

    def open_again() -> Store:
        if request.param == "memory":
            return MemoryStore(disk, LIMITS)
        for store in opened:
            asyncio.run(close(store))
        opened[:] = [RocksStore(tmp_path / "data", LIMITS)]
        return opened[0]

    yield open_again
    for store in opened:
        asyncio.run(close(store))


def test_a_number_is_not_given_out_again_after_a_restart(reopen: Callable[[], Store]) -> None:
    store = reopen()
    numbers = [store.number(name) for name in NAMES]
    commit(store)
    # The highest number, which nothing else would show after a restart.
    store.remove(NAMES[-1])
    commit(store)
    store = reopen()
    assert store.destinations() == dict(zip(NAMES[:2], numbers, strict=False))
    assert store.number(NAMES[-1]) > max(numbers)
    assert not store.damage


def test_what_a_new_destination_can_have_begins_after_the_removed_one(
    reopen: Callable[[], Store],
) -> None:
    store = reopen()
    last = store.reserve(5) + 4
    assert store.begun_after(store.number("queue/a")) == 0
    store.remove("queue/a")
    number = store.number("queue/a")
    commit(store)
    store = reopen()
    assert store.begun_after(number) == last


def fail(_: object) -> None:
    raise StoreFailed("the disk is broken")


def test_a_removal_outlives_a_group_that_could_not_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = MemoryDisk()
    store = MemoryStore(disk, LIMITS)
    number = store.number("queue/a")
    commit(store)
    store.remove("queue/a")
    with monkeypatch.context() as broken:
        broken.setattr(store, "_write", fail)
        assert commit(store) is not None
    assert commit(store) is None
    store = MemoryStore(disk, LIMITS)
    assert "queue/a" not in store.destinations()
    assert store.number("queue/a") > number


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["use", "remove", "commit", "kill", "power"]), st.sampled_from(NAMES)
        ),
        max_size=30,
    )
)
def test_no_two_destinations_ever_have_the_same_number(steps: list[tuple[str, str]]) -> None:
    """A number stands for one destination for ever, once a group that has it is durable."""
    disk = MemoryDisk()
    store = MemoryStore(disk, LIMITS)
    durable: dict[int, tuple[str, int]] = {}
    lives = dict.fromkeys(NAMES, 0)
    for step, name in steps:
        if step == "use":
            store.number(name)
        elif step == "remove" and name in store.destinations():
            store.remove(name)
            lives[name] += 1
        elif step == "commit":
            commit(store)
            for each, number in store.destinations().items():
                assert durable.setdefault(number, (each, lives[each])) == (each, lives[each])
        elif step in ("kill", "power"):
            # The second copies of a group come first: the power may go after them.
            group = store.seal()
            if group.has_changes:
                store.write_group(group)
                store._save_copies(group.copies)
            if step == "power":
                disk.cut_power()
            store = MemoryStore(disk, LIMITS)
            assert not store.damage
            for each, number in store.destinations().items():
                assert durable.get(number, (each,))[0] == each
                # What was not committed may be there or not: it begins another life.
                lives[each] = durable[number][1] if number in durable else lives[each] + 1


def test_names_that_are_damaged_twice_are_not_guessed(tmp_path: Path) -> None:
    """Numbers have holes after removals: those must not hide that a name is lost."""
    store = RocksStore(tmp_path, LIMITS)
    for name in NAMES:
        store.number(name)
    commit(store)
    store.remove(NAMES[1])
    commit(store)
    asyncio.run(close(store))
    (tmp_path / COPIES).unlink()
    store = RocksStore(tmp_path, LIMITS)
    assert set(store.destinations()) == {NAMES[0], NAMES[2]}
    assert store.number("queue/new") == 4
    asyncio.run(close(store))
