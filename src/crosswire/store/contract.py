"""What a store offers, and the group commit that all stores share.

The event loop puts operations into the open group; one group at a time is written, and brought to
the disk by a thread with one fsync, while the loop goes on; whatever arrives meanwhile goes into
the next. (For a few messages and a quick disk the loop waits: see `Syncer`.) The owner, which is
the hub, is asked to add its own last words right before a group is written, and told right after.

    message   destination number ‖ id → record   appended, read in order of ids, reclaimed by range
    state     space ‖ key → small value          saved and dropped, coalesced within a group
    journal   number of the first row → block    one block a group, read in order

A group has a number, and leaves a row of its own (`g` number) with what was handed out so far:
after a restart a number that is missing is a group that is lost. How far the numbers went is also
kept outside of the engine (`LogMark`), and what must not be guessed (the store's own keys, names of
destinations, definitions of subscriptions) in a second copy of its own (`Copies`).

What was saved or retained outlives a group that could not be written: it goes into the next one.
What was appended does not: its producer is told, and may try again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from struct import Struct as Layout
from typing import Final, ParamSpec, Protocol

import msgspec

from crosswire.errors import (
    DestinationFull,
    RecordUnreadable,
    StoreDamaged,
    StoreError,
    StoreFailed,
    StoreFull,
)
from crosswire.store.copies import Copies
from crosswire.store.damage import Damage, DamageEntry, DamageList
from crosswire.store.marks import LogMark
from crosswire.store.syncing import Syncer
from crosswire.store.view import (
    MAX_ID,
    Page,
    View,
    message_key,
    message_keys,
    prefix_end,
    read_page,
    state_key,
)

__all__ = [
    "MAX_ID",
    "Damage",
    "DamageEntry",
    "Page",
    "Store",
    "StoreLimits",
    "View",
    "WriteBatch",
    "refusal",
]

_log = logging.getLogger("crosswire.store")

P = ParamSpec("P")

_DAMAGES: Final = 1000
_ID_BLOCK: Final = 1 << 20
_LAZY_S: Final = 0.005
_FEW: Final = 4
"""So many messages can be waited for; to gather more while the disk is busy saves time."""
_SYNC_S: Final = 1.0
_RETRY_S: Final = 0.25
_FORMAT: Final = b"2"
_OLD_FORMAT: Final = b"1"
"""Without second copies, numbers of groups and a mark."""
_OWN_KEYS: Final = (b"!format", b"!node", b"!ids")
_COPIED_SPACES: Final = frozenset({"subscription"})
"""Spaces of state that change rarely, and whose loss nothing else would show."""
_TRIM_EVERY: Final = 64
_HEALING_BYTES: Final = 8 << 20

_BLOCK: Final = Layout(">cQ")
_GROUP: Final = Layout(">QQ")
"""Of a group's row: the next row of the journal, and the newest id, after the group."""


LEAST_BUFFER_BYTES: Final = 64 << 10
"""No engine works with less."""


class StoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`spare_bytes` of the disk are left to consumers: below that, producers are refused.

    `buffer_bytes` are gathered in memory, beside the log on disk, before they are sorted into it.
    A disk that syncs within `patience_s` is waited for where there is little to do; with 0, never.
    """

    patience_s: float = 0.001
    spare_bytes: int = 256 * 1024 * 1024
    buffer_bytes: int = 32 * 1024 * 1024
    destinations: int = 100_000


class WriteBatch(Protocol):
    """Operations that reach the disk together or not at all."""

    def put(self, key: bytes, value: bytes) -> None: ...
    def delete(self, key: bytes) -> None: ...
    def delete_range(self, begin: bytes, end: bytes) -> None: ...


class _WriteGroup:
    """What is written together."""

    __slots__ = (
        "appended",
        "batch",
        "block",
        "copies",
        "count",
        "number",
        "ranges",
        "reserve",
        "saves",
        "sync",
        "urgent",
    )

    def __init__(self, batch: WriteBatch) -> None:
        self.batch = batch
        self.appended: list[tuple[bytes, bytes]] = []
        self.count = 0
        self.saves: dict[bytes, bytes | None] = {}
        self.copies: dict[bytes, bytes | None] = {}
        self.number = 0
        self.ranges: list[tuple[bytes, bytes]] = []
        self.block: tuple[bytes, int] | None = None
        self.sync = False
        self.urgent = False
        self.reserve = 0


class Store(ABC):
    """A store as the hub sees it. Call everything on one thread, the event loop's.

    Without `start` no loop is needed and nothing is written until `commit_now` is called.
    """

    def __init__(self, limits: StoreLimits | None = None) -> None:
        self.limits = limits or StoreLimits()
        self.node = ""
        self.power_lost = False
        self.was_stopped = False
        """Did the last one that had these data close them?"""
        self.damage: list[Damage] = []
        self._passed_over = 0
        """What was found since the start; `damages` has what nobody acknowledged."""
        self.damages = DamageList()
        self.on_damage: Callable[[str, str], None] = _nothing_about
        """Called with the part and the description of what is new on that list, on any thread."""
        self.before_commit: Callable[[], None] = _nothing
        self.after_write: Callable[[], None] = _nothing
        """Called when a group is with the operating system, and is on its way to the disk."""
        self.after_commit: Callable[[StoreError | None], None] = _nothing_after
        self.groups = 0
        self.last_error: StoreError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._syncer = Syncer(self._try_sync, self.limits.patience_s)
        self._timer: asyncio.TimerHandle | None = None
        self._sync_timer: asyncio.TimerHandle | None = None
        self._awaits_sync = False
        self._soon = False
        self._flight: _WriteGroup | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._numbers: dict[str, int] = {}
        self._next_number = 1
        self._names: dict[int, str] = {}
        self._next_id = 1
        self._reserved = 1
        self._next_row = 1
        self._log_complaint = ""
        self._last_group = 0
        self._durable_group = 0
        self._log_bytes = 0
        self._log_sizes: deque[tuple[int, int]] = deque()
        self._room_until = 0.0
        self._room = True
        self._closed = False
        self._group = _WriteGroup(self._batch())

    # Opening and closing.

    def _recover(self, *, is_new: bool) -> None:
        """Read what every store keeps of itself; an empty one is born here.

        Raises StoreDamaged where neither copy of something can be read.
        """
        mended: dict[bytes, bytes] = {}
        copies = self._load_copies()
        self.power_lost = self._has_lost_power(copies)
        self.was_stopped = is_new or b"!stopped" in copies.values
        if is_new:
            mended = {b"!format": _FORMAT, b"!node": secrets.token_hex(8).encode()}
            own = mended
        else:
            own = self._recover_own(copies, mended)
        if own[b"!format"] not in (_FORMAT, _OLD_FORMAT):
            raise StoreFailed("the data directory was written by another version")
        is_old = own[b"!format"] == _OLD_FORMAT
        mended[b"!format"] = _FORMAT
        self.node = own[b"!node"].decode()
        self._next_id = int.from_bytes(own.get(b"!ids", b"\x01"))
        self._recover_names(copies, mended)
        self._recover_rows()
        self._recover_groups(copies, knows_end=is_new or is_old)
        self._reserved = self._next_id
        mended[b"!ids"] = self._next_id.to_bytes(8)
        self._begin_run(copies, mended, reported=not is_new and not is_old)

    def _recover_own(self, copies: Copies, mended: dict[bytes, bytes]) -> dict[bytes, bytes]:
        """Each of the store's own keys from the copy that can be read."""
        own: dict[bytes, bytes] = {}
        for key in _OWN_KEYS:
            second = copies.values.get(key)
            try:
                first, reason = self._get(key), ""
            except RecordUnreadable as error:
                first, reason = None, str(error)
            if first is not None and second is not None and first != second:
                if key == b"!node":
                    raise StoreDamaged(self._explain("its files are of two different stores"))
                first = max(first, second)
            if first is None and second is None and (reason or key != b"!ids"):
                raise StoreDamaged(
                    self._explain(f"both copies of {key[1:].decode()!r} can't be read: {reason}")
                )
            if first is None and second is not None:
                what = reason or "it is missing from the tables"
                detail = f"{key[1:].decode()!r} was taken from its second copy: {what}"
                self._report(Damage(b"", b"", detail, "copies"))
                mended[key] = second
            value = first if first is not None else second
            if value is not None:
                own[key] = value
        return own

    def _recover_names(self, copies: Copies, mended: dict[bytes, bytes]) -> None:
        """Numbers of destinations, from both copies. A name that is lost is never guessed, and a
        number that may have been used is never given out again."""
        found = len(self.damage)
        numbers = {key[1:]: int.from_bytes(value) for key, value in self._scan(b"d", b"e")}
        is_whole = len(self.damage) == found or copies.is_whole
        for key, value in copies.values.items():
            if key[:1] == b"d":
                number = int.from_bytes(value)
                if numbers.setdefault(key[1:], number) != number:
                    raise StoreDamaged(self._explain("a destination has two numbers"))
                mended[key] = value
        highest = max(numbers.values(), default=0)
        if len(set(numbers.values())) != len(numbers):
            raise StoreDamaged(self._explain("two destinations have the same number"))
        if not is_whole and len(numbers) != highest:
            raise StoreDamaged(self._explain("both copies of the destinations' names are damaged"))
        try:
            last = self._last(b"m", b"n")
        except RecordUnreadable:
            last = None
        if last is not None and int.from_bytes(last[0][1:5]) > highest:
            highest = int.from_bytes(last[0][1:5])
            detail = f"there are messages of destination {highest}, whose name is missing"
            self._report(Damage(b"", b"", detail, "copies"))
        self._next_number = highest + 1
        for name, number in numbers.items():
            self._names[number] = name.decode()
            self._numbers[name.decode()] = number

    def _recover_rows(self) -> None:
        try:
            last = self._last(b"l", b"m")
        except RecordUnreadable:
            last = None
            for row in self._scan(b"l", b"m"):
                last = row
        if last is not None:
            key, value = last
            self._next_row = int.from_bytes(key[1:]) + int.from_bytes(value[:4])

    def _recover_groups(self, copies: Copies, *, knows_end: bool) -> None:
        """Look for groups that are missing, and take up everything behind all that was seen."""
        mark, found = self._load_mark(), len(self.damage)
        last, rows, newest = -1, 1, 0
        for key, value in self._scan(b"g", b"h"):
            number = int.from_bytes(key[1:])
            next_row, id_then = _GROUP.unpack(value)
            if last >= 0 and number != last + 1 and len(self.damage) == found:
                detail = _describe_groups(last + 1, number - 1, newest, id_then, rows, next_row)
                self._report_log(detail)
                # Only rows of groups that can't be read explain what follows; a hole does not.
                found += 1
            last, rows, newest = number, max(rows, next_row), max(newest, id_then)
        last = max(last, 0)
        expected = last
        stopped = copies.values.get(b"!stopped")
        if mark is not None:
            expected = mark.durable if self.power_lost else mark.written
        elif stopped is not None:
            expected = int.from_bytes(stopped)
        elif not knows_end:
            found += 1
            detail = (
                "the end of the log can't be verified, its mark is missing or damaged: if groups "
                "are missing there, so are their messages, and what they settled is delivered again"
            )
            self._report(Damage(b"", b"", detail, "log"))
        if expected > last and len(self.damage) == found:
            ends = (newest, rows) if mark is None else (mark.newest_id, mark.next_row)
            detail = _describe_groups(last + 1, expected, newest, ends[0], rows, ends[1])
            self._report_log(detail)
        if mark is not None:
            rows, newest = max(rows, mark.next_row), max(newest, mark.newest_id)
        self._last_group = self._durable_group = max(last, expected)
        self._next_row = max(self._next_row, rows)
        if newest >= self._next_id or self.damage:
            self._next_id = max(self._next_id, newest + 1, self._highest_id() + 1)

    def _report_log(self, detail: str) -> None:
        complaint = f" ({self._log_complaint})" if self._log_complaint else ""
        self._report(Damage(b"", b"", detail + complaint, "log"))

    def _highest_id(self) -> int:
        """The highest id of any message that can be read: looked for where something is damaged."""
        highest = 0
        for number in self._names:
            try:
                last = self._last(message_key(number, 0), message_key(number + 1, 0))
            except RecordUnreadable:
                continue
            if last is not None:
                highest = max(highest, int.from_bytes(last[0][5:13]))
        return highest

    def _begin_run(self, copies: Copies, mended: dict[bytes, bytes], *, reported: bool) -> None:
        """Both copies are made equal, and the rows of groups that are sorted in are dropped."""
        values = {
            b"d" + name.encode(): number.to_bytes(4) for name, number in self._numbers.items()
        }
        for space in _COPIED_SPACES:
            values.update(self._recover_copied(space, copies, mended))
        values.update({b"!format": _FORMAT, b"!node": self.node.encode()})
        values[b"!ids"] = mended[b"!ids"]
        missing = values.keys() - copies.values.keys() - {b"!ids"}
        if reported and (not copies.is_whole or missing):
            what = "is damaged" if copies.is_there else "is missing"
            if copies.is_whole:
                what = f"is shorter than it was: {len(missing)} entries are missing"
            detail = f"the second copy of the store's own keys {what}; it was written anew"
            self._report(Damage(b"", b"", detail, "copies"))
        values[b"!running"] = mended[b"!running"] = self._running()
        group = _BLOCK.pack(b"g", self._last_group)
        mended[group] = _GROUP.pack(self._next_row, self._next_id - 1)
        self._replace_copies(values)
        self._store_now(mended, (b"g", group) if self._last_group else None)
        self._note_mark()

    def _recover_copied(
        self, space: str, copies: Copies, mended: dict[bytes, bytes]
    ) -> dict[bytes, bytes]:
        """The first copy holds, except for what can't be read of it.

        What only the second copy has belongs to a group that was not acknowledged, or is lost.
        """
        found, begin = len(self.damage), state_key(space, b"")
        values = dict(self._scan(begin, prefix_end(begin)))
        if len(self.damage) > found or any(each.part == "log" for each in self.damage):
            for key, value in copies.values.items():
                if key.startswith(begin) and key not in values:
                    values[key] = mended[key] = value
        return values

    def _explain(self, what: str) -> str:
        return what

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on groups are written as soon as there is something to write."""
        self._loop = loop
        self._syncer.start(loop, self._on_synced)
        if self._is_dirty():
            self.request()

    async def close(self) -> None:
        """Write what is open, then let go of the files."""
        if self._closed:
            return
        try:
            await self.flush()
        finally:
            for timer in (self._timer, self._sync_timer):
                if timer is not None:
                    timer.cancel()
            self._syncer.stop()
            self._closed = True
            self._release()

    # Ids and numbers.

    def reserve(self, count: int) -> int:
        """The first of `count` ids in a row that nobody ever had or will have."""
        first = self._next_id
        if first + count > self._reserved:
            self._reserve(first + count)
        self._next_id = first + count
        return first

    def _reserve(self, at_least: int) -> None:
        """Rare: a block is renewed with a group's commit when half of it is gone."""
        reserved = at_least + _ID_BLOCK
        own = {b"!ids": reserved.to_bytes(8)}
        self._save_copies(own)
        self._store_now(own)
        self._reserved = reserved

    def number(self, destination: str) -> int:
        """The number that stands for a destination in keys; a new one gets the next."""
        number = self._numbers.get(destination)
        if number is None:
            if len(self._numbers) >= self.limits.destinations:
                raise DestinationFull(f"more than {self.limits.destinations} destinations")
            number = self._next_number
            self._next_number += 1
            self._numbers[destination] = number
            self._names[number] = destination
            key = b"d" + destination.encode()
            self._group.saves[key] = self._group.copies[key] = number.to_bytes(4)
        return number

    def name(self, number: int) -> str:
        return self._names[number]

    def destinations(self) -> dict[str, int]:
        """Every destination that ever had a number."""
        return self._numbers

    # Messages.

    def append(self, number: int, identifier: int, record: bytes) -> None:
        group, key = self._group, message_key(number, identifier)
        group.batch.put(key, record)
        group.appended.append((key, key + b"\x00"))
        group.count += 1

    def append_run(self, number: int, first: int, records: Sequence[bytes]) -> None:
        """`append` for many records of one destination, with ids in a row."""
        group, each = self._group, iter(records)
        for keys in message_keys(number, first, len(records)):
            # A loop in C: the engine's `put` takes less time than a turn of one in Python.
            deque(map(group.batch.put, keys, each), maxlen=0)
        end = message_key(number, first + len(records))
        group.appended.append((message_key(number, first), end))
        group.count += len(records)

    def retain(self, number: int, identifier: int, record: bytes) -> None:
        """Append or replace what must not get lost, even if this group can't be written."""
        self._group.saves[message_key(number, identifier)] = record

    def reclaim(self, number: int, first: int, last: int) -> None:
        """The records of the ids first … last are no longer needed."""
        if first <= last:
            self._group.ranges.append((message_key(number, first), message_key(number, last + 1)))

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
        """Tell `done` the next committed records behind `after`, at most up to `upto`.

        Ends a page at `count` records or `size_bytes`, whichever comes first. This store answers
        before it returns; one that asks over a network would not.
        """
        done(read_page(self._scan, numbers, after, upto, count, size_bytes))

    def last_id(self, number: int, upto: int = MAX_ID) -> int:
        """The highest id up to this one that is committed at a destination, 0 for none."""
        try:
            last = self._last(message_key(number, 0), message_key(number, upto + 1))
        except RecordUnreadable:
            # What is before the damage must not be hidden by it: nothing is above this.
            return min(upto, self.newest_id)
        return 0 if last is None else int.from_bytes(last[0][5:])

    @property
    def newest_id(self) -> int:
        """The last id that was handed out."""
        return self._next_id - 1

    def fetch(self, number: int, identifiers: Sequence[int]) -> list[bytes | None]:
        """The records of these ids, None where there is none or it can't be read: that is in
        `damage` then."""
        return [self._get_or_report(message_key(number, each)) for each in identifiers]

    def _get_or_report(self, key: bytes) -> bytes | None:
        try:
            return self._get(key)
        except RecordUnreadable:
            return None

    @abstractmethod
    def view(self) -> View:
        """What is written right now, to be read on another thread.

        The group on its way may be in there: the hub's `committed_id` is before it. The engine
        can't be closed or mended meanwhile: let go of it soon.
        """

    # State.

    def save(self, space: str, key: bytes, value: bytes) -> None:
        """Keep a small value; the last one saved in a group is the one that is written."""
        self._group.saves[state_key(space, key)] = value
        if space in _COPIED_SPACES:
            self._group.copies[state_key(space, key)] = value

    def drop(self, space: str, key: bytes) -> None:
        self._group.saves[state_key(space, key)] = None
        if space in _COPIED_SPACES:
            self._group.copies[state_key(space, key)] = None

    def drop_range(self, space: str, first: bytes, stop: bytes) -> None:
        """Drop the keys in [first, behind) that earlier groups saved."""
        begin, end = state_key(space, first), state_key(space, stop)
        for key in [key for key in self._group.saves if begin <= key < end]:
            del self._group.saves[key]
        self._group.ranges.append((begin, end))

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

        For values that can be made up for; where that would be a guess, use `get_or_raise`.
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

    def skip_rows(self, upto: int) -> None:
        """Rows up to this one were there once: their numbers are not given out again."""
        self._next_row = max(self._next_row, upto + 1)

    def journal(self, block: bytes, rows: int) -> None:
        """Add this group's block; to be called by `before_commit`, at most once."""
        self._group.block = (block, rows)

    def blocks(self, after: int, count: int) -> list[tuple[int, int, bytes]]:
        """Committed blocks with rows behind `after`: (first row, number of rows, block)."""
        try:
            start = self._last(b"l", _BLOCK.pack(b"l", after + 2))
            begin = start[0] if start is not None else b"l"
        except RecordUnreadable:
            begin = _BLOCK.pack(b"l", after + 1)
        found: list[tuple[int, int, bytes]] = []
        for key, value in self._scan(begin, b"m"):
            first, rows = int.from_bytes(key[1:]), int.from_bytes(value[:4])
            if first + rows > after + 1:
                found.append((first, rows, value[4:]))
                if len(found) == count:
                    break
        return found

    def forget_rows(self, upto: int) -> None:
        """Blocks that end at or before row `upto` are no longer needed."""
        try:
            last = self._last(b"l", _BLOCK.pack(b"l", upto + 2))
        except RecordUnreadable:
            # Nobody knows where the last block to be kept begins: all of them stay.
            return
        if last is not None:
            self._group.ranges.append((b"l", last[0]))

    # Committing.

    def request(self, *, sync: bool = True, urgent: bool = True) -> None:
        """There is something to write: at the end of this turn or, if nobody waits, a little later.

        `sync` asks for the disk, not only for the operating system, which brings it there within a
        second or so.
        """
        if sync:
            self._group.sync = True
        if urgent:
            self._group.urgent = True
        if self._loop is None or self._flight is not None or self._soon:
            return
        if urgent:
            self._soon = True
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._loop.call_soon(self._begin)
        elif self._timer is None:
            self._timer = self._loop.call_later(_LAZY_S, self._begin)

    def commit_now(self) -> StoreError | None:
        """Write the open group here and now; the error, if it could not be written."""
        if self._flight is not None:
            raise StoreFailed("a group is on its way already")
        if not self._is_well():
            return self.last_error
        group = self._seal()
        if group is None:
            _run(self.after_commit, None)
            return None
        self._flight = group
        error = self._hand_over(group)
        if error is None and group.sync:
            error = self._try_sync()
        self._finish(error)
        return error

    async def flush(self) -> None:
        """Returns when all that was asked for so far is on disk. Raises StoreError if it is not."""
        if self._loop is None:
            error = self.commit_now()
            if error is not None:
                raise error
            return
        for _ in range(2):
            # The group on its way may have been sealed before the last word: the next one has it.
            if self._flight is None and not self._is_dirty() and not self._awaits_sync:
                return
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append(waiter)
            self.request()
            await waiter

    def has_room(self, now: float) -> bool:
        """May producers go on? Looked up at most every tenth of a second."""
        if now >= self._room_until or now < self._room_until - 1:
            self._room_until = now + 0.1
            self._room = self._free_bytes() >= self.limits.spare_bytes
        return self._room and self.last_error is None

    def obstacle(self, now: float) -> StoreError | None:
        """Why producers can't go on: the disk is full, or it fails. None if they can."""
        if self.has_room(now):
            return None
        return refusal(self.last_error or StoreFull())

    # Damage.

    def report_damage(self, part: str, detail: str, *, first: bytes = b"") -> None:
        """Something that the store's owner found: listed until an administrator acknowledges it."""
        self._report(Damage(first, b"", detail, part))

    @property
    def ranges_passed_over(self) -> int:
        """How many ranges of keys could not be read so far; nobody knows what was in them."""
        return self._passed_over

    def _report(self, damage: Damage) -> None:
        self.damage.append(damage)
        # Whoever reads a damaged range again finds it again.
        del self.damage[:-_DAMAGES]
        self._passed_over += damage.part != "record"
        detail = self._describe(damage)
        if self.damages.add(damage, detail):
            self.on_damage(damage.part, detail)

    def _describe(self, damage: Damage) -> str:
        found = damage.messages()
        if damage.part == "tables" and damage.first[:1] == b"l":
            first = int.from_bytes(damage.first[1:9]) if len(damage.first) >= 9 else 1
            return (
                f"rows of the ledger from {first} on can't be read, and what was settled there may "
                f"be delivered again after a repair: {damage.reason}"
            )
        if found is None:
            kind = f"keys from {damage.first!r}" if damage.first[:1] in b"!dgls" else ""
            return f"{damage.reason} ({kind})" if damage.first and kind else damage.reason
        number, first, last = found
        name = self._names.get(number, f"destination {number}")
        upto = "any" if last >= MAX_ID else last
        return f"messages of {name} from id {first} to {upto} can't be read: {damage.reason}"

    def _is_dirty(self) -> bool:
        group = self._group
        return bool(group.appended or group.saves or group.ranges or group.sync)

    def _begin(self) -> None:
        self._soon = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._flight is not None or self._closed or self._loop is None:
            return
        if not self._is_well():
            self._timer = self._loop.call_later(_RETRY_S, self._begin)
            self._wake(self.last_error)
            return
        group = self._seal()
        if group is None:
            _run(self.after_commit, None)
            self._wake(None)
            return
        self._flight = group
        error = self._hand_over(group)
        if error is None and group.sync:
            if not (group.urgent and group.count <= _FEW and self._syncer.is_quick):
                self._syncer.order()
                _run(self.after_write)
                return
            _run(self.after_write)
            error = self._syncer.now()
        self._finish(error)
        self._go_on(error)

    def _on_synced(self, error: StoreError | None) -> None:
        self._finish(error)
        if error is None and self._group.urgent and self._flight is None:
            self._begin()
        else:
            self._go_on(error)

    def _go_on(self, error: StoreError | None) -> None:
        """What gathered meanwhile is the next group."""
        if self._loop is None or self._flight is not None or self._closed:
            return
        if error is not None:
            self._timer = self._timer or self._loop.call_later(_RETRY_S, self._begin)
        elif self._group.urgent or self._is_dirty():
            self.request(sync=False, urgent=self._group.urgent)

    def _is_well(self) -> bool:
        """May a write be tried? After a failed one, the engine may have to be mended first."""
        if self.last_error is not None and self._has_room_to_heal():
            try:
                self._heal()
            except StoreError as error:
                self.last_error = error
                return False
        return True

    def _has_room_to_heal(self) -> bool:
        """Without it the engine stays as it is: it can still read."""
        return self._free_bytes() >= _HEALING_BYTES

    def _seal(self) -> _WriteGroup | None:
        _run(self.before_commit)
        group = self._group
        if group.block is None and not self._is_dirty():
            return None
        self._group = _WriteGroup(self._batch())
        batch = group.batch
        for begin, end in group.ranges:
            batch.delete_range(begin, end)
        for key, value in group.saves.items():
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)
        if group.block is not None:
            block, rows = group.block
            batch.put(_BLOCK.pack(b"l", self._next_row), rows.to_bytes(4) + block)
        if self._reserved - self._next_id < _ID_BLOCK // 2:
            group.reserve = self._next_id + _ID_BLOCK
            group.copies[b"!ids"] = group.reserve.to_bytes(8)
            batch.put(b"!ids", group.reserve.to_bytes(8))
        if group.copies:
            group.sync = True
        self._number_group(group)
        return group

    def _number_group(self, group: _WriteGroup) -> None:
        """A group that could not be written leaves its number to the next: there are no holes."""
        group.number = number = self._last_group + 1
        rows = 0 if group.block is None else group.block[1]
        group.batch.put(
            _BLOCK.pack(b"g", number), _GROUP.pack(self._next_row + rows, self._next_id - 1)
        )
        self._log_bytes += self._size_of(group.batch)
        if number % _TRIM_EVERY == 0:
            # What the log no longer holds is in tables: its holes would show as unreadable blocks.
            sizes, kept_bytes = self._log_sizes, 8 * self.limits.buffer_bytes
            sizes.append((number, self._log_bytes))
            upto = 0
            while sizes[0][1] < self._log_bytes - kept_bytes:
                upto = sizes.popleft()[0]
            if upto:
                group.batch.delete_range(b"g", _BLOCK.pack(b"g", upto))

    def _hand_over(self, group: _WriteGroup) -> StoreError | None:
        try:
            self._write(group.batch)
        except StoreError as error:
            return error
        return None

    def _try_sync(self) -> StoreError | None:
        group = self._flight
        try:
            if group is not None and group.copies:
                self._save_copies(group.copies)
            self._sync()
        except StoreError as error:
            return error
        return None

    def _store_now(
        self, rows: Mapping[bytes, bytes], dropped: tuple[bytes, bytes] | None = None
    ) -> None:
        """Outside of any group: it is on disk when this returns.

        An engine that met damage while it sorted its tables takes no write until it is mended.
        """
        for is_last in (False, False, True):
            batch = self._batch()
            if dropped is not None:
                batch.delete_range(*dropped)
            for key, value in rows.items():
                batch.put(key, value)
            try:
                self._write(batch)
                self._sync()
                return
            except (StoreFailed, StoreFull) as error:
                if is_last:
                    raise
                self.last_error = error
                self._heal()
                self.last_error = None

    def _finish(self, error: StoreError | None) -> None:
        group, self._flight = self._flight, None
        assert group is not None
        if error is not None and type(error) is not type(self.last_error):
            _log.error("what was accepted can't be written, it is tried again: %s", error)
        self.last_error = error
        if error is None:
            self.groups += 1
            self._last_group = group.number
            if group.sync:
                self._durable_group = group.number
            self._reserved = max(self._reserved, group.reserve)
            self._awaits_sync = not group.sync
            if self._awaits_sync and self._sync_timer is None and self._loop is not None:
                self._sync_timer = self._loop.call_later(_SYNC_S, self._sync_soon)
            if group.block is not None:
                self._next_row += group.block[1]
            # Before anybody is told: what was acknowledged is never above the mark.
            self._note_mark()
        else:
            self._group.copies = {**group.copies, **self._group.copies}
            kept = group.saves
            for begin, end in self._group.ranges:
                kept = {key: kept[key] for key in kept if not begin <= key < end}
            self._group.saves = {**kept, **self._group.saves}
            # What could not be synced was written, and is to be gone all the same.
            self._group.ranges[:0] = [*group.ranges, *group.appended]
            self._group.sync = True
        _run(self.after_commit, error)
        self._wake(error)

    def _sync_soon(self) -> None:
        """Nothing that was written stays with the operating system for long."""
        self._sync_timer = None
        if self._awaits_sync:
            self.request(urgent=False)

    def _wake(self, error: StoreError | None) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None) if error is None else waiter.set_exception(error)

    # What an engine fills in.

    @abstractmethod
    def _batch(self) -> WriteBatch: ...

    @abstractmethod
    def _write(self, batch: WriteBatch) -> None:
        """Give it to the operating system. Raises StoreFull or StoreFailed."""

    @abstractmethod
    def _sync(self) -> None:
        """All that was written so far is on disk. Raises StoreFull or StoreFailed.

        Called on a thread while the event loop goes on, or on that of the loop.
        """

    @abstractmethod
    def _size_of(self, batch: WriteBatch) -> int:
        """How many bytes it takes in the log."""

    @abstractmethod
    def _load_copies(self) -> Copies: ...

    @abstractmethod
    def _save_copies(self, changes: Mapping[bytes, bytes | None]) -> None:
        """The second copy of these is on disk. Raises StoreFull or StoreFailed.

        Called on the thread that syncs.
        """

    @abstractmethod
    def _replace_copies(self, values: Mapping[bytes, bytes]) -> None:
        """These and no others are the second copy."""

    @abstractmethod
    def _load_mark(self) -> LogMark | None: ...

    @abstractmethod
    def _save_mark(self, mark: LogMark) -> None:
        """Give it to the operating system; whether it arrives there is nobody's concern."""

    def _note_mark(self) -> None:
        self._save_mark(
            LogMark(self._last_group, self._durable_group, self._next_id - 1, self._next_row)
        )

    @abstractmethod
    def _running(self) -> bytes:
        """What tells this boot of the machine from others."""

    def _has_lost_power(self, copies: Copies) -> bool:
        """Was the machine stopped under us? Then what was not synced may be gone."""
        try:
            running = self._get(b"!running")
        except RecordUnreadable:
            running = copies.values.get(b"!running", b"unknown")
        return running is not None and running != self._running()

    @abstractmethod
    def _get(self, key: bytes) -> bytes | None:
        """None where nothing is committed. Raises RecordUnreadable, and puts it into `damage`."""

    @abstractmethod
    def _scan(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """What is committed in [begin, end), in order; what can't be read goes to `damage`."""

    @abstractmethod
    def _last(self, begin: bytes, end: bytes) -> tuple[bytes, bytes] | None:
        """The last of what is committed in [begin, end).

        Raises RecordUnreadable, and puts it into `damage`, where that can't be read.
        """

    @abstractmethod
    def _heal(self) -> None:
        """The last write failed, and now there is room: do what it takes to write again.

        Called on the event loop, with no write under way. May fail like a write.
        """

    @abstractmethod
    def _free_bytes(self) -> int: ...

    @abstractmethod
    def _release(self) -> None: ...


def _run(hook: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call one of the owner's hooks: one that raises must not keep others' groups from the disk."""
    try:
        hook(*args, **kwargs)
    except Exception:
        _log.exception("a hook of the store failed")


def _nothing() -> None:
    pass


def _nothing_after(_error: StoreError | None) -> None:
    pass


def _nothing_about(_part: str, _detail: str) -> None:
    pass


def _describe_groups(
    first: int, last: int, newest: int, newest_then: int, rows: int, rows_then: int
) -> str:
    """What may be missing with commit groups that are."""
    text = f"commit group {first} is" if first == last else f"commit groups {first} to {last} are"
    text += " missing from the log"
    if newest_then > newest:
        text += f"; messages with ids from {newest + 1} to {newest_then} may be lost"
    if rows_then > rows:
        text += f"; rows {rows} to {rows_then - 1} of the ledger are missing"
    return f"{text}; what was settled in them may be delivered again"


def refusal(error: StoreError) -> StoreError:
    """A failed write as peers are told of it: the engine's own words, which name files of the
    server, are for the log."""
    if isinstance(error, StoreFull):
        return StoreFull("there is no room on the disk")
    return StoreFailed("the disk can't be written")


def full_or_failed(error: Exception) -> StoreError:
    """What an engine's own complaint about a write means to us."""
    text = " ".join(str(error).split())
    if "No space left" in text or "NoSpace" in text:
        return StoreFull("there is no room on the disk")
    if "too large" in text:
        return StoreFull("a file of the store is as large as the system allows")
    return StoreFailed(text)
