"""What a store offers, and the group commit that all stores share.

The event loop puts operations into the open group; one group at a time is written, and brought to
the disk by a thread with one fsync, while the loop goes on; whatever arrives meanwhile goes into
the next. (For a few messages and a quick disk the loop waits: see `Syncer`.) The owner, which is
the hub, is asked to add its own last words right before a group is written, and told right after.

    message   destination number ‖ id → record   appended, read in order of ids, reclaimed by range
    state     space ‖ key → small value          saved and dropped, coalesced within a group
    journal   number of the first row → block    one block a group, read in order

What was saved or retained outlives a group that could not be written: it goes into the next one.
What was appended does not: its producer is told, and may try again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from struct import Struct as Layout
from typing import Final, ParamSpec, Protocol

import msgspec

from crosswire.errors import DestinationFull, StoreError, StoreFailed, StoreFull
from crosswire.store.syncing import Syncer
from crosswire.store.view import (
    MAX_ID,
    Damage,
    Page,
    View,
    behind,
    message_key,
    message_keys,
    read_page,
    state_key,
)

__all__ = ["MAX_ID", "Batch", "Page", "Store", "StoreLimits", "View"]

_log = logging.getLogger("crosswire.store")

P = ParamSpec("P")

_ID_BLOCK: Final = 1 << 20
_LAZY_S: Final = 0.005
_FEW: Final = 4
"""So many messages can be waited for; to gather more while the disk is busy saves time."""
_SYNC_S: Final = 1.0
_RETRY_S: Final = 0.25
_FORMAT: Final = b"1"
_HEALING_BYTES: Final = 8 << 20

_BLOCK: Final = Layout(">cQ")


class StoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`spare_bytes` of the disk are left to consumers: below that, producers are refused.

    `buffer_bytes` are gathered in memory, beside the log on disk, before they are sorted into it.
    A disk that syncs within `patience_s` is waited for where there is little to do; with 0, never.
    """

    patience_s: float = 0.001
    spare_bytes: int = 256 * 1024 * 1024
    buffer_bytes: int = 32 * 1024 * 1024
    destinations: int = 100_000


class Batch(Protocol):
    """Operations that reach the disk together or not at all."""

    def put(self, key: bytes, value: bytes) -> None: ...
    def delete(self, key: bytes) -> None: ...
    def delete_range(self, begin: bytes, end: bytes) -> None: ...


class _Group:
    """What is written together."""

    __slots__ = (
        "appended",
        "batch",
        "block",
        "count",
        "ranges",
        "reserve",
        "saves",
        "sync",
        "urgent",
    )

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.appended: list[tuple[bytes, bytes]] = []
        self.count = 0
        self.saves: dict[bytes, bytes | None] = {}
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
        self.damage: list[Damage] = []
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
        self._flight: _Group | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._next_id = 1
        self._reserved = 1
        self._next_row = 1
        self._room_until = 0.0
        self._room = True
        self._closed = False
        self._group = _Group(self._batch())

    # Opening and closing.

    def _recover(self) -> None:
        """Read what every store keeps of itself; an empty one is born here."""
        fresh = self._get(b"!format") is None
        if fresh:
            batch = self._batch()
            batch.put(b"!format", _FORMAT)
            batch.put(b"!node", secrets.token_hex(8).encode())
            self._store_now(batch)
        elif self._get(b"!format") != _FORMAT:
            raise StoreFailed("the data directory was written by another version")
        self.node = (self._get(b"!node") or b"").decode()
        self._next_id = self._reserved = int.from_bytes(self._get(b"!ids") or b"\x01")
        for key, value in self._scan(b"d", b"e"):
            number = int.from_bytes(value)
            self._names[number] = key[1:].decode()
            self._numbers[key[1:].decode()] = number
        last = self._last(b"l", b"m")
        if last is not None:
            key, value = last
            self._next_row = int.from_bytes(key[1:]) + int.from_bytes(value[:4])

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
        batch = self._batch()
        batch.put(b"!ids", reserved.to_bytes(8))
        self._store_now(batch)
        self._reserved = reserved

    def number(self, destination: str) -> int:
        """The number that stands for a destination in keys; a new one gets the next."""
        number = self._numbers.get(destination)
        if number is None:
            if len(self._numbers) >= self.limits.destinations:
                raise DestinationFull(f"more than {self.limits.destinations} destinations")
            number = len(self._numbers) + 1
            self._numbers[destination] = number
            self._names[number] = destination
            self._group.saves[b"d" + destination.encode()] = number.to_bytes(4)
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
        last = self._last(message_key(number, 0), message_key(number, upto + 1))
        return 0 if last is None else int.from_bytes(last[0][5:])

    @property
    def newest_id(self) -> int:
        """The last id that was handed out."""
        return self._next_id - 1

    def fetch(self, number: int, identifiers: Sequence[int]) -> list[bytes | None]:
        """The records of these ids, None where there is none or it can't be read."""
        return [self._get(message_key(number, each)) for each in identifiers]

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

    def drop(self, space: str, key: bytes) -> None:
        self._group.saves[state_key(space, key)] = None

    def drop_range(self, space: str, first: bytes, behind: bytes) -> None:
        """Drop the keys in [first, behind) that earlier groups saved."""
        begin, end = state_key(space, first), state_key(space, behind)
        for key in [key for key in self._group.saves if begin <= key < end]:
            del self._group.saves[key]
        self._group.ranges.append((begin, end))

    def load(self, space: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """What is committed in a space, in order of keys."""
        begin = state_key(space, prefix)
        cut = len(begin) - len(prefix)
        for key, value in self._scan(begin, behind(begin)):
            yield key[cut:], value

    def get(self, space: str, key: bytes) -> bytes | None:
        return self._get(state_key(space, key))

    # Journal.

    @property
    def next_row(self) -> int:
        """The number that the next row of the journal gets."""
        return self._next_row

    def journal(self, block: bytes, rows: int) -> None:
        """Add this group's block; to be called by `before_commit`, at most once."""
        self._group.block = (block, rows)

    def blocks(self, after: int, count: int) -> list[tuple[int, int, bytes]]:
        """Committed blocks with rows behind `after`: (first row, number of rows, block)."""
        start = self._last(b"l", _BLOCK.pack(b"l", after + 2))
        begin = start[0] if start is not None else b"l"
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
        last = self._last(b"l", _BLOCK.pack(b"l", upto + 2))
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
        if self.last_error is not None and self._free_bytes() >= _HEALING_BYTES:
            try:
                self._heal()
            except StoreError as error:
                self.last_error = error
                return False
        return True

    def _seal(self) -> _Group | None:
        _run(self.before_commit)
        group = self._group
        if group.block is None and not self._is_dirty():
            return None
        self._group = _Group(self._batch())
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
            batch.put(b"!ids", group.reserve.to_bytes(8))
            group.sync = True
        return group

    def _hand_over(self, group: _Group) -> StoreError | None:
        try:
            self._write(group.batch)
        except StoreError as error:
            return error
        return None

    def _try_sync(self) -> StoreError | None:
        try:
            self._sync()
        except StoreError as error:
            return error
        return None

    def _store_now(self, batch: Batch) -> None:
        """Outside of any group: it is on disk when this returns."""
        self._write(batch)
        self._sync()

    def _finish(self, error: StoreError | None) -> None:
        group, self._flight = self._flight, None
        assert group is not None
        self.last_error = error
        if error is None:
            self.groups += 1
            self._reserved = max(self._reserved, group.reserve)
            self._awaits_sync = not group.sync
            if self._awaits_sync and self._sync_timer is None and self._loop is not None:
                self._sync_timer = self._loop.call_later(_SYNC_S, self._sync_soon)
            if group.block is not None:
                self._next_row += group.block[1]
        else:
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
    def _batch(self) -> Batch: ...

    @abstractmethod
    def _write(self, batch: Batch) -> None:
        """Give it to the operating system. Raises StoreFull or StoreFailed."""

    @abstractmethod
    def _sync(self) -> None:
        """All that was written so far is on disk. Raises StoreFull or StoreFailed.

        Called on a thread while the event loop goes on, or on that of the loop.
        """

    @abstractmethod
    def _get(self, key: bytes) -> bytes | None: ...

    @abstractmethod
    def _scan(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """What is committed in [begin, end), in order; what can't be read goes to `damage`."""

    @abstractmethod
    def _last(self, begin: bytes, end: bytes) -> tuple[bytes, bytes] | None:
        """The last of what is committed in [begin, end)."""

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


def full_or_failed(error: Exception) -> StoreError:
    """What an engine's own complaint about a write means to us."""
    text = str(error)
    if "No space left" in text or "NoSpace" in text or "too large" in text:
        return StoreFull(text)
    return StoreFailed(text)
