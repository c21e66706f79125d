"""What a cursor has when it is read again."""

from __future__ import annotations

from crosswire.hub.cursor import Cursor, FailedDelivery
from crosswire.store.memory import MemoryDisk, MemoryStore

ATTEMPTS = [FailedDelivery(1, "emp-1", "refused")]


def stored(*changes: tuple[list[int], list[int]]) -> Cursor:
    """Changes of what was refused and what was settled, in groups of their own."""
    disk = MemoryDisk()
    store = MemoryStore(disk)
    cursor = Cursor(store, b"k")
    for refused, settled in changes:
        for identifier in refused:
            cursor.refuse(1, identifier, ATTEMPTS)
        cursor.settle(*settled)
        cursor.write_changes(1)
    group = store.seal()
    store.write_group(group)
    return Cursor(MemoryStore(disk), b"k")


def test_attempts_of_what_is_not_settled_are_kept() -> None:
    assert stored(([5, 6], [6])).refused_later == {5: ATTEMPTS}


def test_attempts_of_what_was_settled_later_are_forgotten() -> None:
    cursor = stored(([5], []), ([], [5]))
    assert (cursor.later, cursor.refused_later) == ({5}, {})
