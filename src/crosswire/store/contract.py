"""What a store offers: reading what is committed, and collecting changes for the next commit group.

    message   destination number ‖ id → record   appended, read in order of ids, reclaimed by range
    state     space ‖ key → small value          saved and dropped, coalesced within a group
    journal   number of the first row → block    one block a group, read in order

A store is what durable commit groups are applied to. Changes go into the open group (`group`),
which nobody reads. When the group is sealed its body is complete; when the log has made it durable,
`applied` is called; when it can't be written, `take_back`. Who does that, and when, is not the
store's concern: see `crosswire.hub.commits`. Between write and `applied` a group's messages and
state can be read already: who reads messages keeps to the commit path's `committed_id`.

What was saved or retained outlives a group that could not be written: it goes into the next one.
What was appended does not: its producer gets the error, and may try again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from operator import add
from typing import Final, TypeAlias

import msgspec

from crosswire.commitlog.contract import CommitGroup, JournalBlock
from crosswire.errors import DestinationFull, RecordUnreadable, StoreError, StoreFull
from crosswire.store.engine import StoreLimits, refusal
from crosswire.store.keys import (
    GROUPS,
    MAX_ID,
    ROWS,
    group_key,
    message_key,
    prefix_end,
    row_key,
    state_key,
)
from crosswire.store.recovery import (
    COPIED_SPACES,
    GROUP_ROW,
    REMOVALS,
    RecoveredEngine,
    Removals,
)

__all__ = ["MergedPage", "Page", "Store", "StoreLimits", "View"]

_TRIM_EVERY: Final = 64
_ROOM_S: Final = 0.1
_BEGINNINGS: Final = "begun"
"""A space: of destinations that are newer than a removal, the id after which they began."""
_LAST_BYTES: Final = [bytes((each,)) for each in range(0x100)]


class Page(msgspec.Struct, gc=False):
    """Some records of a log: (destination number, id, record) in order of ids.

    `last` is the id up to which nothing was left out: the next page starts after it.
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
        """The next records after `after`, with the limits of `Store.read`."""
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
    def keys(self, begin: bytes, end: bytes) -> Iterator[bytes]:
        """Like `scan`, without the values."""

    @abstractmethod
    def first(self, begin: bytes, end: bytes) -> bytes | None:
        """The least key in [begin, end)."""

    @abstractmethod
    def last(self, begin: bytes, end: bytes) -> bytes | None:
        """The greatest key in [begin, end)."""


class Store(RecoveredEngine):
    """A store as the hub sees it. Call everything on one thread, the event loop's."""

    _id_block: int = 1 << 20
    """How many ids are reserved at once."""

    def __init__(self, limits: StoreLimits | None = None) -> None:
        super().__init__(limits)
        self.groups = 0
        """How many groups were applied since the start."""
        self.group = CommitGroup(self._batch())
        """The open group: all changes go into it until it is sealed."""
        self._log_bytes = 0
        self._log_sizes: deque[tuple[int, int]] = deque()
        self._prefixes: dict[str, bytes] = {}
        self._room_until = 0.0
        self._has_room = True
        self._closed = False
        self._ahead_groups = 0
        self._ahead_rows = 0

    def close(self) -> None:
        """Sync what is written, and close the files. What is in the open group is dropped."""
        if not self._closed:
            self._closed = True
            self._release()

    # Ids and numbers.

    def reserve(self, count: int) -> int:
        """The first of `count` consecutive ids that were never given out before."""
        first = self._next_id
        if first + count > self._reserved_id:
            self._reserve(first + count)
        self._next_id = first + count
        return first

    def reserve_in_group(self, count: int) -> int:
        """Like `reserve`, for ids that nobody sees before the open group is durable.

        That group reserves them when it is sealed. So this can't fail, whatever the disk does.
        """
        first = self._next_id
        self._next_id = first + count
        return first

    def _reserve(self, at_least: int) -> None:
        """Rare: a block is renewed with a group's commit when half of it is used."""
        reserved = at_least + self._id_block
        own = {b"!ids": reserved.to_bytes(8)}
        self._save_copies(own)
        self._store_now(own)
        self._reserved_id = reserved

    @property
    def newest_id(self) -> int:
        """The last id that was given out."""
        return self._next_id - 1

    def number(self, destination: str, *, own: bool = False) -> int:
        """The number that stands for a destination in keys; a new one gets the next.

        Raises DestinationFull, except for the hub's `own`: a dead letter must be kept.
        """
        number = self._numbers.get(destination)
        if number is None:
            if len(self._numbers) >= self.limits.destinations and not own:
                raise DestinationFull(f"more than {self.limits.destinations} destinations")
            number = self._next_number
            self._next_number += 1
            self._numbers[destination] = number
            self._names[number] = destination
            key = b"d" + destination.encode()
            self.group.saves[key] = self.group.copies[key] = number.to_bytes(4)
            if self._removals.count:
                begun = self._removals.newest_id.to_bytes(8)
                self.save(_BEGINNINGS, number.to_bytes(4), begun)
        return number

    def remove(self, destination: str) -> None:
        """Remove a destination, whose messages and state the caller has deleted. Its number is
        never given out again: one of the same name gets another. Raises KeyError."""
        number = self._numbers.pop(destination)
        del self._names[number]
        self._removals = Removals(
            self._removals.count + 1, self._next_number - 1, self._next_id - 1
        )
        self.drop(_BEGINNINGS, number.to_bytes(4))
        key, removals = b"d" + destination.encode(), self._removals.pack()
        self.group.saves[key] = self.group.copies[key] = None
        self.group.saves[REMOVALS] = self.group.copies[REMOVALS] = removals

    def begun_after(self, number: int) -> int:
        """No message of this destination has this id or one below it. What the ledger has of them
        belongs to one of the same name that was removed."""
        return int.from_bytes(self.get(_BEGINNINGS, number.to_bytes(4)) or b"")

    def name(self, number: int) -> str:
        """The destination with this number. Raises KeyError."""
        return self._names[number]

    def destinations(self) -> dict[str, int]:
        """The numbers of all destinations, by name."""
        return self._numbers

    # Messages.

    def append(self, number: int, identifier: int, record: bytes) -> None:
        """Add a message. It is lost if the group can't be written."""
        group, key = self.group, message_key(number, identifier)
        group.body.put(key, record)
        group.appended.append((key, key + b"\x00"))
        group.appended_count += 1

    def append_run(self, number: int, first: int, records: Sequence[bytes]) -> None:
        """`append` for many records of one destination, with consecutive ids."""
        if len(records) == 1:
            self.append(number, first, records[0])
            return
        group, each = self.group, iter(records)
        end, at = first + len(records), first
        while at < end:
            # Keys that differ in their last byte only are made together, and put in a loop in C:
            # the engine's `put` takes less time than an iteration of one in Python.
            low = at & 0xFF
            high = min(low + end - at, 0x100)
            keys = map(add, repeat(message_key(number, at)[:-1]), _LAST_BYTES[low:high])
            deque(map(group.body.put, keys, each), maxlen=0)
            at += high - low
        group.appended.append((message_key(number, first), message_key(number, end)))
        group.appended_count += len(records)

    def append_each(self, numbers: Sequence[int], first: int, records: Sequence[bytes]) -> None:
        """`append` for many records with consecutive ids, each of the destination in `numbers`."""
        group = self.group
        keys = list(map(message_key, numbers, range(first, first + len(records))))
        deque(map(group.body.put, keys, records), maxlen=0)
        group.appended += zip(keys, map(add, keys, repeat(b"\x00")), strict=True)
        group.appended_count += len(records)

    def retain(self, number: int, identifier: int, record: bytes) -> None:
        """Add or replace a message that must not get lost, even if this group can't be written."""
        self.group.saves[message_key(number, identifier)] = record

    def reclaim(self, number: int, first: int, last: int) -> None:
        """Delete the records of the ids first … last."""
        if first <= last:
            self.group.ranges.append((message_key(number, first), message_key(number, last + 1)))

    def read(
        self,
        numbers: Sequence[int],
        *,
        after: int,
        upto: int = MAX_ID,
        count: int,
        size_bytes: int = 1 << 20,
        done: Callable[[Page], None],
    ) -> None:
        """Call `done` with the next committed records after `after`, at most up to `upto`.

        Ends a page at `count` records or `size_bytes`, whichever comes first. This store calls it
        before it returns; one that asks over a network would not.
        """
        done(read_page(self._scan, numbers, after, upto, count, size_bytes))

    def merged_page(self, *, after: int, upto: int, count: int, size_bytes: int) -> MergedPage:
        """Like `read`, for many destinations: the caller adds them some at a time."""
        return MergedPage(self._scan, after, upto, count, size_bytes)

    def last_id(self, number: int, upto: int = MAX_ID) -> int:
        """The highest id up to this one that is committed at a destination, 0 for none."""
        try:
            last = self._last(message_key(number, 0), message_key(number, upto + 1))
        except RecordUnreadable:
            # What is before the damage must not be hidden by it: nothing is above this.
            return min(upto, self.newest_id)
        return 0 if last is None else int.from_bytes(last[0][5:])

    def fetch(self, number: int, identifiers: Sequence[int]) -> list[bytes | None]:
        """The records of these ids, None where there is none or it can't be read: that is in
        `damage` then."""
        return [self._get_or_report(message_key(number, each)) for each in identifiers]

    @abstractmethod
    def view(self) -> View:
        """What is written right now, to be read on another thread.

        A group that is not durable yet may be in there: the hub's `committed_id` is before it. The
        engine can't be closed or mended meanwhile: drop the view soon.
        """

    # State.

    def save(self, space: str, key: bytes, value: bytes) -> None:
        """Keep a small value; the last one saved in a group is the one that is written."""
        self._set(space, key, value)

    def save_as(self, key: bytes, value: bytes) -> None:
        """`save` with a whole key, from `keys.state_key`, in a space without second copies: for
        what is saved with nearly every group."""
        self.group.saves[key] = value

    def drop(self, space: str, key: bytes) -> None:
        """Delete a value."""
        self._set(space, key, None)

    def _set(self, space: str, key: bytes, value: bytes | None) -> None:
        # Called for every settlement, with few spaces: their prefixes are made once.
        prefix = self._prefixes.get(space)
        if prefix is None:
            prefix = self._prefixes[space] = state_key(space, b"")
        self.group.saves[prefix + key] = value
        if space in COPIED_SPACES:
            self.group.copies[prefix + key] = value

    def drop_range(self, space: str, first: bytes, stop: bytes) -> None:
        """Delete the values with keys in [first, stop), those of the open group included."""
        begin, end = state_key(space, first), state_key(space, stop)
        # In a body ranges come before saves, which they would not delete.
        for key in [key for key in self.group.saves if begin <= key < end]:
            del self.group.saves[key]
        self.group.ranges.append((begin, end))

    def load(self, space: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """What is committed in a space, in order of keys; what can't be read goes to `damage`."""
        begin = state_key(space, prefix)
        cut = len(begin) - len(prefix)
        for key, value in self._scan(begin, prefix_end(begin)):
            yield key[cut:], value

    def load_all(self, space: str, prefix: bytes = b"") -> list[tuple[bytes, bytes]]:
        """Like `load`. Raises RecordUnreadable if there may be more than can be read."""
        found = len(self.damage)
        rows = list(self.load(space, prefix))
        if len(self.damage) > found:
            raise RecordUnreadable(self.damage[-1].reason)
        return rows

    def get(self, space: str, key: bytes) -> bytes | None:
        """None where nothing is committed, or it can't be read: that is in `damage` then.

        For values that have a sensible default; where that would be a guess, use `get_or_raise`.
        """
        return self._get_or_report(state_key(space, key))

    def get_or_raise(self, space: str, key: bytes) -> bytes | None:
        """None where nothing is committed. Raises RecordUnreadable."""
        return self._get(state_key(space, key))

    # Journal.

    @property
    def next_row(self) -> int:
        """The number that the next row of the journal gets."""
        return self._next_row

    @property
    def sealed_row(self) -> int:
        """The number that the first row of the next sealed group gets: rows of groups that are on
        their way have theirs."""
        return self._next_row + self._ahead_rows

    @property
    def open_bytes(self) -> int:
        """The size of the open group, roughly; 0 where nobody needs it."""
        return 0

    def skip_rows(self, upto: int) -> None:
        """Rows up to this one existed once: their numbers are not given out again."""
        self._next_row = max(self._next_row, upto + 1)

    def journal(self, block: bytes, rows: int) -> None:
        """Set the open group's block. Its rows count when the group is applied: call this right
        before the group is sealed."""
        self.group.block = JournalBlock(self.sealed_row, rows, block)

    def blocks(self, after: int, count: int) -> list[tuple[int, int, bytes]]:
        """Committed blocks with rows after `after`: (first row, number of rows, block)."""
        try:
            start = self._last(ROWS[0], row_key(after + 2))
            begin = start[0] if start is not None else ROWS[0]
        except RecordUnreadable:
            begin = row_key(after + 1)
        found: list[tuple[int, int, bytes]] = []
        # Not the block of a group on its way: it can be read already, and may still be taken back.
        for key, value in self._scan(begin, row_key(self._next_row)):
            first, rows = int.from_bytes(key[1:]), int.from_bytes(value[:4])
            if first + rows > after + 1:
                found.append((first, rows, value[4:]))
                if len(found) == count:
                    break
        return found

    def forget_rows(self, upto: int) -> None:
        """Delete blocks that end at or before row `upto`."""
        try:
            last = self._last(ROWS[0], row_key(upto + 2))
        except RecordUnreadable:
            # It is unknown where the last block to be kept begins: all of them stay.
            return
        if last is not None:
            self.group.ranges.append((ROWS[0], last[0]))

    # Groups.

    def seal(self) -> CommitGroup:
        """Complete the open group's body, and open the next group.

        The order within a body is fixed: messages (already there), deleted ranges, saved values
        and retained messages, block, ids, the group's own row. So what a group saves or retains
        outlives a range that it deletes.
        """
        group = self.group
        self.group = CommitGroup(self._batch())
        group.newest_id = self._next_id - 1
        if not group.has_changes:
            return group
        body = group.body
        for begin, end in group.ranges:
            body.delete_range(begin, end)
        for key, value in group.saves.items():
            if value is None:
                body.delete(key)
            else:
                body.put(key, value)
        if group.block is not None:
            block = group.block
            body.put(row_key(block.first_row), block.rows.to_bytes(4) + block.data)
        if self._reserved_id - self._next_id < self._id_block // 2:
            group.reserved_id = self._next_id + self._id_block
            ids = group.reserved_id.to_bytes(8)
            group.copies[b"!ids"] = ids
            body.put(b"!ids", ids)
        if group.copies:
            # Both copies must be on disk before anything relies on them.
            group.sync = True
        self._number(group)
        return group

    def _number(self, group: CommitGroup) -> None:
        """A group that can't be written leaves its number to the next one: there are no holes."""
        self._ahead_groups += 1
        group.number = number = self._last_group + self._ahead_groups
        self._ahead_rows += 0 if group.block is None else group.block.rows
        row = GROUP_ROW.pack(self.sealed_row, group.newest_id)
        group.body.put(group_key(number), row)
        self._log_bytes += self._size_of(group.body)
        if number % _TRIM_EVERY == 0:
            # What is no longer in the log is in tables, where what is missing shows as unreadable
            # blocks: the rows of those groups are not needed any more.
            sizes, kept_bytes = self._log_sizes, 8 * self.limits.buffer_bytes
            sizes.append((number, self._log_bytes))
            upto = 0
            while sizes[0][1] < self._log_bytes - kept_bytes:
                upto = sizes.popleft()[0]
            if upto:
                group.body.delete_range(GROUPS[0], group_key(upto))

    def write_group(self, group: CommitGroup) -> None:
        """Give it to the operating system. Raises StoreError."""
        self._write(group.body)

    def sync_group(self, group: CommitGroup) -> None:
        """Bring it to the disk, on any thread. Raises StoreError.

        The second copies come first: one that is ahead of the first copy is recognized at the next
        start, a destination's number in messages without any copy would not be.
        """
        if group.copies:
            self._save_copies(group.copies)
        self._sync()

    def applied(self, group: CommitGroup) -> None:
        """The group is durable and can be read: what it gave out is in use from now on."""
        self.last_error = None
        self.groups += 1
        self._pass(group)
        self._last_group = group.number
        if group.sync:
            self._durable_group = group.number
        self._reserved_id = max(self._reserved_id, group.reserved_id)
        if group.block is not None:
            self._next_row += group.block.rows
        # Before anybody is notified: what was acknowledged is never above the mark.
        self._save_mark()

    def _pass(self, group: CommitGroup) -> None:
        """The group is no longer on its way."""
        self._ahead_groups -= 1
        self._ahead_rows -= 0 if group.block is None else group.block.rows

    def take_back(self, group: CommitGroup, error: StoreError) -> None:
        """The group could not be made durable: all but what was appended goes into the next one."""
        self.last_error = error
        self._pass(group)
        following = self.group
        following.copies = {**group.copies, **following.copies}
        # In a body saved values come after deleted ranges. What was saved before a range of the
        # next group was deleted must not come back with it.
        kept = group.saves
        for begin, end in following.ranges:
            kept = {key: kept[key] for key in kept if not begin <= key < end}
        # What was saved since then is newer.
        following.saves = {**kept, **following.saves}
        # If only the sync failed, the messages were written, and could come back with a later
        # sync or survive the process: nobody accepted them, so they are deleted.
        following.ranges[:0] = [*group.ranges, *group.appended]
        if group.block is not None:
            # The same for its block. The next one replaces it, if there is one: all rows may have
            # been about messages that are lost.
            key = row_key(group.block.first_row)
            following.ranges.append((key, key + b"\x00"))
        following.sync = True

    # Room.

    def has_room(self, now: float) -> bool:
        """May producers go on? Looked up at most every tenth of a second."""
        # The second comparison: a clock that was set back must not keep an old answer.
        if now >= self._room_until or now < self._room_until - 1:
            self._room_until = now + _ROOM_S
            self._has_room = self._free_bytes() >= self.limits.spare_bytes
        return self._has_room and self.last_error is None

    def obstacle(self, now: float) -> StoreError | None:
        """Why producers can't go on: the disk is full, or it fails. None if they can."""
        if self.has_room(now):
            return None
        return refusal(self.last_error or StoreFull())


_Scan: TypeAlias = Callable[[bytes, bytes], Iterator[tuple[bytes, bytes]]]


def read_page(
    scan: _Scan, numbers: Sequence[int], after: int, upto: int, count: int, size_bytes: int
) -> Page:
    """A page over several destinations ends where all of them together fill it."""
    if len(numbers) == 1:
        return _page(scan, numbers[0], after, upto, count, size_bytes)
    merged = MergedPage(scan, after, upto, count, size_bytes)
    for number in numbers:
        merged.add(number)
    return merged.page()


class MergedPage:
    """A page over several destinations, which are added one by one."""

    def __init__(self, scan: _Scan, after: int, upto: int, count: int, size_bytes: int) -> None:
        self._scan = scan
        self._after = after
        self._last = upto
        self._count = count
        self._size_bytes = size_bytes
        self._records: list[tuple[int, int, bytes]] = []
        self._total = 0

    def add(self, number: int, after: int = 0) -> None:
        """Read one destination, as far as the page can go with those before it. The caller knows
        that nothing of it is needed up to `after`."""
        count, size_bytes = self._count, self._size_bytes
        after = max(after, self._after)
        page = _page(self._scan, number, after, self._last, count, size_bytes)
        self._last = page.last
        self._records += page.records
        self._total += sum([len(record[2]) for record in page.records])
        if len(self._records) > count or self._total > size_bytes:
            self._records.sort(key=_by_id)
            self._records, self._total = _beginning(self._records, self._last, count, size_bytes)
            self._last = min(self._last, self._records[-1][1])

    def page(self) -> Page:
        """What was found, in order of ids."""
        records, last = self._records, self._last
        records.sort(key=_by_id)
        if records and records[-1][1] > last:
            records, _ = _beginning(records, last, self._count, self._size_bytes)
        return Page(records, last)


def _beginning(
    records: list[tuple[int, int, bytes]], last: int, count: int, size_bytes: int
) -> tuple[list[tuple[int, int, bytes]], int]:
    """As many of these as a page has, from the first one; and their size."""
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
