"""What is stored of queues that nobody has opened: read in bulk, on a thread.

Queues are opened when they are first used. To list a hundred thousand of them by length or age
after a restart, opening all would take half a minute of the event loop and gigabytes of memory,
for windows that nobody consumes. What is stored of a queue does not change until it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import msgspec

from crosswire.envelope import decode_at
from crosswire.errors import RecordDamaged
from crosswire.hub.cursor import CHANGES, SNAPSHOTS, Cursor
from crosswire.hub.queues import DEPTHS, Depth, read_depth
from crosswire.store.contract import Store, View

__all__ = ["StoredQueue", "read_stored_queues"]

_AT_ONCE: Final = 100
"""Rows that are read before the event loop may have the interpreter."""
_PAGE: Final = 16
_MOST_PAGES: Final = 64


class StoredQueue(msgspec.Struct, frozen=True, gc=False):
    """A queue with messages; `oldest_us` is when the oldest was accepted, 0 if that is unknown."""

    length: int
    size_bytes: int
    oldest_us: int


class _LoadedCursors:
    """The records of all cursors of queues, as `Cursor` asks for them."""

    def __init__(self, view: View, wanted: set[bytes], pause: Callable[[float], None]) -> None:
        self._snapshots: dict[bytes, bytes] = {}
        self._changes: dict[bytes, list[tuple[bytes, bytes]]] = {}
        for number, (key, value) in enumerate(view.load(SNAPSHOTS)):
            if key in wanted:
                self._snapshots[key] = value
            if not number % _AT_ONCE:
                pause(0.0)
        for number, (key, value) in enumerate(view.load(CHANGES)):
            if key[2:-8] in wanted:
                self._changes.setdefault(key[:-8], []).append((key, value))
            if not number % _AT_ONCE:
                pause(0.0)

    def get_or_raise(self, _space: str, key: bytes) -> bytes | None:
        return self._snapshots.get(key)

    def load_all(self, _space: str, prefix: bytes) -> list[tuple[bytes, bytes]]:
        return self._changes.get(prefix, [])


def read_stored_queues(
    store: Store,
    view: View,
    numbers: Mapping[str, int],
    upto: int,
    pause: Callable[[float], None],
) -> dict[str, StoredQueue]:
    """On a thread: queues with messages, by destination. `pause` is called often.

    `store` is not read, `numbers` are those of its destinations, `upto` is the last id that is
    committed. A queue whose records can't be read is left out: who opens it reports that.
    """
    depths: dict[int, Depth] = {}
    for count, (key, value) in enumerate(view.load(DEPTHS)):
        try:
            depth = read_depth(value)
        except RecordDamaged:
            continue
        if depth.length:
            depths[int.from_bytes(key)] = depth
        if not count % _AT_ONCE:
            pause(0.0)
    found: dict[str, StoredQueue] = {}
    cursors = _LoadedCursors(view, {b"q" + each.to_bytes(4) for each in depths}, pause)
    for count, (name, number) in enumerate(numbers.items()):
        if number in depths and name.startswith("queue/"):
            cursor = Cursor(store, b"q" + number.to_bytes(4), source=cursors)
            if not cursor.damage:
                depth = depths[number].with_later(partial(_read, view, number, upto))
                oldest_us = _oldest_us(view, cursor, name, number, upto)
                found[name] = StoredQueue(depth.length, depth.size_bytes, oldest_us)
        if not count % _AT_ONCE:
            pause(0.0)
    return found


def _read(view: View, number: int, upto: int, after: int) -> list[tuple[int, int, bytes]]:
    return view.page([number], after=after, upto=upto, count=_PAGE).records


def _oldest_us(view: View, cursor: Cursor, name: str, number: int, upto: int) -> int:
    after = cursor.upto
    opened = {each.id for each in cursor.open}
    if opened:
        after = min(min(opened) - 1, after)
    for _ in range(_MOST_PAGES):
        records = view.page([number], after=after, upto=upto, count=_PAGE).records
        for _, identifier, record in records:
            after = identifier
            is_settled = identifier <= cursor.upto and identifier not in opened
            if is_settled or identifier in cursor.later:
                continue
            try:
                return decode_at(record, name, identifier).time
            except RecordDamaged:
                return 0
        if not records:
            break
    return 0
