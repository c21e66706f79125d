"""Reading what is committed: keys, pages of messages, and views for other threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from operator import add
from struct import Struct as Layout
from typing import Final, TypeAlias

import msgspec

__all__ = [
    "MAX_ID",
    "Page",
    "View",
    "message_key",
    "message_keys",
    "prefix_end",
    "read_page",
    "state_key",
]

MAX_ID: Final = (1 << 63) - 1
_LAST_BYTES: Final = [bytes((each,)) for each in range(0x100)]

# Keys: a letter for the kind, then fixed-width big-endian numbers, so that they sort as numbers do.
message_key: Final[Callable[[int, int], bytes]] = partial(Layout(">cIQ").pack, b"m")
"""Of a destination's number and an id."""


def message_keys(number: int, first: int, count: int) -> Iterator[Iterator[bytes]]:
    """`message_key` for many with ids in a row, those together that differ in their last byte."""
    after = first + count
    while first < after:
        start = first & 0xFF
        end = min(start + after - first, 0x100)
        yield map(add, repeat(message_key(number, first)[:-1]), _LAST_BYTES[start:end])
        first += end - start


def state_key(space: str, key: bytes) -> bytes:
    return b"s" + space.encode() + b"/" + key


def prefix_end(prefix: bytes) -> bytes:
    """The first key that does not start with `prefix`."""
    return (int.from_bytes(prefix) + 1).to_bytes(len(prefix))


class Page(msgspec.Struct, gc=False):
    """Some of a log: (destination number, id, record) in order of ids, and how far it was read.

    `last` is the id up to which nothing was left out: the next page starts behind it.
    """

    records: list[tuple[int, int, bytes]]
    last: int


class View(ABC):
    """What was committed at one moment, whatever is reclaimed since: for one thread at a time."""

    def page(
        self,
        numbers: Sequence[int],
        *,
        after: int,
        upto: int = MAX_ID,
        count: int,
        size_bytes: int = 1 << 20,
    ) -> Page:
        """The next records behind `after`, as `Store.read` tells them."""
        return read_page(self.scan, numbers, after, upto, count, size_bytes)

    def bounds(self, number: int, after: int, upto: int) -> tuple[int, int] | None:
        """The first and the last id in (after, upto] of a destination; None without any."""
        begin, end = message_key(number, after + 1), message_key(number, upto + 1)
        first, last = self.first(begin, end), self.last(begin, end)
        if first is None or last is None:
            return None
        return int.from_bytes(first[5:]), int.from_bytes(last[5:])

    def ids(self, number: int, *, after: int, upto: int) -> Iterator[int]:
        """The ids in (after, upto] of a destination, without their records."""
        if after < upto:
            begin, end = message_key(number, after + 1), message_key(number, upto + 1)
            for key in self.keys(begin, end):
                yield int.from_bytes(key[5:])

    def load(self, space: str) -> Iterator[tuple[bytes, bytes]]:
        """What was committed in a space, in order of keys."""
        begin = state_key(space, b"")
        for key, value in self.scan(begin, prefix_end(begin)):
            yield key[len(begin) :], value

    # What an engine fills in.

    @abstractmethod
    def scan(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """What is in [begin, end), in order; what can't be read goes to the store's `damage`.

        One scan at a time: the next one ends it.
        """

    @abstractmethod
    def keys(self, begin: bytes, end: bytes) -> Iterator[bytes]: ...

    @abstractmethod
    def first(self, begin: bytes, end: bytes) -> bytes | None:
        """The least key in [begin, end)."""

    @abstractmethod
    def last(self, begin: bytes, end: bytes) -> bytes | None:
        """The greatest key in [begin, end)."""


_Scan: TypeAlias = Callable[[bytes, bytes], Iterator[tuple[bytes, bytes]]]


def read_page(
    scan: _Scan, numbers: Sequence[int], after: int, upto: int, count: int, size_bytes: int
) -> Page:
    """A page over several destinations goes as far as all of them together fit into it."""
    if len(numbers) == 1:
        return _page(scan, numbers[0], after, upto, count, size_bytes)
    last, total = upto, 0
    records: list[tuple[int, int, bytes]] = []
    for number in numbers:
        page = _page(scan, number, after, last, count, size_bytes)
        last = page.last
        records += page.records
        total += sum([len(record[2]) for record in page.records])
        if len(records) > count or total > size_bytes:
            records.sort(key=_by_id)
            records, total = _beginning(records, last, count, size_bytes)
            last = min(last, records[-1][1])
    records.sort(key=_by_id)
    if records and records[-1][1] > last:
        records, _ = _beginning(records, last, count, size_bytes)
    return Page(records, last)


def _beginning(
    records: list[tuple[int, int, bytes]], last: int, count: int, size_bytes: int
) -> tuple[list[tuple[int, int, bytes]], int]:
    """The first of these, as many as a page has; and their size."""
    total = 0
    for index, record in enumerate(records):
        if index and (index == count or total >= size_bytes or record[1] > last):
            return records[:index], total
        total += len(record[2])
    return records, total


def _page(scan: _Scan, number: int, after: int, upto: int, count: int, size_bytes: int) -> Page:
    records: list[tuple[int, int, bytes]] = []
    if after < upto:
        begin = message_key(number, after + 1)
        end = message_key(number, upto + 1)
        for key, value in scan(begin, end):
            records.append((number, int.from_bytes(key[5:]), value))
            size_bytes -= len(value)
            if len(records) == count or size_bytes <= 0:
                return Page(records, records[-1][1])
    return Page(records, upto)


def _by_id(record: tuple[int, int, bytes]) -> int:
    return record[1]
