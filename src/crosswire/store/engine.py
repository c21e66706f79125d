"""The engine under a store: keys and values as they are on disk, and the report of damage to them.

`RocksStore` and `MemoryStore` fill in the abstract methods. Everything that is read goes through
`_get`, `_scan` and `_last`, so that what can't be read is reported in every case.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from crosswire.commitlog.body import GroupBody
from crosswire.errors import RecordUnreadable, StoreError, StoreFailed, StoreFull
from crosswire.store.copies import Copies
from crosswire.store.damage import Damage, DamageList
from crosswire.store.keys import MAX_ID

__all__ = ["LEAST_BUFFER_BYTES", "Engine", "LogMark", "StoreLimits", "full_or_failed", "refusal"]

_DAMAGES: Final = 1000
_REOPEN_BYTES: Final = 8 << 20

LEAST_BUFFER_BYTES: Final = 64 << 10
"""RocksDB does not work with less."""


class LogMark(msgspec.Struct, frozen=True, gc=False):
    """How far the log goes, kept outside of the engine: it shows when the end of a log is missing.

    It may lag what is on disk, but is never ahead of it: after a power cut `durable` is compared,
    otherwise `written`.

    `written` and `durable` are numbers of commit groups; `newest_id` and `next_row` are what was
    given out when the last of them was sealed.

    `manifest` and `manifest_bytes` are the number of the engine's list of tables, and its length
    then: a shorter one has lost tables.
    """

    written: int
    durable: int
    newest_id: int = 0
    next_row: int = 1
    manifest: int = 0
    manifest_bytes: int = 0


class StoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`spare_bytes` of the disk are left to consumers: below that, producers are refused.

    `buffer_bytes` are gathered in memory, beside the log on disk, before they are sorted into it.
    The event loop waits for a disk that syncs within `patience_s` where few messages are in a
    group; with 0, never. Queues and topics that are unused for `expire_s` are removed; with 0,
    never.
    """

    patience_s: float = 0.001
    spare_bytes: int = 256 * 1024 * 1024
    buffer_bytes: int = 32 * 1024 * 1024
    destinations: int = 100_000
    expire_s: float = 86_400.0


class Engine(ABC):
    """Raw access to what is stored; the base of every store."""

    def __init__(self, limits: StoreLimits | None = None) -> None:
        self.limits = limits or StoreLimits()
        self.last_error: StoreError | None = None
        """Why the last group could not be written; None when it was."""
        self.damage: list[Damage] = []
        """The latest findings since the start; `damages` has those that nobody acknowledged."""
        self.damages = DamageList()
        self.on_damage: Callable[[str, str], None] = _ignore_damage
        """Called with part and description of what is new in `damages`, on any thread."""
        self._unreadable_ranges = 0
        self._names: dict[int, str] = {}

    # Damage.

    def report_damage(self, part: str, detail: str, *, first: bytes = b"") -> None:
        """List something that the store's owner found, until an administrator acknowledges it."""
        self._report(Damage(first, b"", detail, part))

    @property
    def unreadable_ranges(self) -> int:
        """How many ranges of keys could not be read so far; their content is unknown."""
        return self._unreadable_ranges

    def _report(self, damage: Damage) -> None:
        self.damage.append(damage)
        # A damaged range is reported again each time that it is read: the list must not grow.
        del self.damage[:-_DAMAGES]
        self._unreadable_ranges += damage.part != "record"
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

    def _explain(self, what: str) -> str:
        """The text of a StoreDamaged; an engine with files adds what the user can do."""
        return what

    # After a failed write.

    def mend(self) -> bool:
        """After a failed write: may the next one be tried? False where the engine has to be opened
        anew before that, and can't be."""
        if self._has_room_to_reopen():
            try:
                self._reopen()
            except StoreError as error:
                self.last_error = error
                return False
        return True

    def _has_room_to_reopen(self) -> bool:
        """Without room the engine stays as it is: it can still read."""
        return self._free_bytes() >= _REOPEN_BYTES

    def _store_now(
        self, rows: Mapping[bytes, bytes], dropped: tuple[bytes, bytes] | None = None
    ) -> None:
        """Write outside of any group: it is on disk when this returns.

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
                self._reopen()
                self.last_error = None

    # What an engine fills in: writing.

    @abstractmethod
    def _batch(self) -> GroupBody:
        """An empty batch."""

    @abstractmethod
    def _write(self, batch: GroupBody) -> None:
        """Give it to the operating system. Raises StoreFull or StoreFailed."""

    @abstractmethod
    def _sync(self) -> None:
        """Bring all that was written so far to the disk. Raises StoreFull or StoreFailed.

        Called on a thread while the event loop goes on, or on that of the loop.
        """

    @abstractmethod
    def _size_of(self, batch: GroupBody) -> int:
        """How many bytes it takes in the log."""

    @abstractmethod
    def _reopen(self) -> None:
        """The last write failed, and now there is room: do what it takes to write again.

        Called on the event loop, with no write under way. May fail like a write.
        """

    @abstractmethod
    def _free_bytes(self) -> int:
        """How much of the disk is free."""

    @abstractmethod
    def _release(self) -> None:
        """Sync, note that the stop was clean, and close the files."""

    # What an engine fills in: reading.

    @abstractmethod
    def _get(self, key: bytes) -> bytes | None:
        """None where nothing is committed. Raises RecordUnreadable, and puts it into `damage`."""

    def _get_or_report(self, key: bytes) -> bytes | None:
        """None where nothing is committed, or it can't be read: that is in `damage` then."""
        try:
            return self._get(key)
        except RecordUnreadable:
            return None

    @abstractmethod
    def _scan(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """What is committed in [begin, end), in order; what can't be read goes to `damage`."""

    @abstractmethod
    def _last(self, begin: bytes, end: bytes) -> tuple[bytes, bytes] | None:
        """The last of what is committed in [begin, end).

        Raises RecordUnreadable, and puts it into `damage`, where that can't be read.
        """

    # What an engine fills in: the files beside it.

    @abstractmethod
    def _load_copies(self) -> Copies:
        """The second copy, as far as it can be read."""

    @abstractmethod
    def _save_copies(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Bring the second copy of these to the disk. Raises StoreFull or StoreFailed.

        Called on the thread that syncs.
        """

    @abstractmethod
    def _replace_copies(self, values: Mapping[bytes, bytes]) -> None:
        """Make these and no others the second copy."""

    @abstractmethod
    def _load_mark(self) -> LogMark | None:
        """How far the log went; None where the mark is missing or damaged."""

    @abstractmethod
    def _save_mark(self) -> None:
        """Give the operating system a mark of how far the log goes now. One that can't be written
        is no error: the next start can't verify the end of the log then, and reports that."""

    @abstractmethod
    def _running(self) -> bytes:
        """A value that differs from one boot of the machine to the next."""

    def _has_lost_power(self, copies: Copies) -> bool:
        """Was the machine stopped while the store was open? What was not synced may be missing."""
        try:
            running = self._get(b"!running")
        except RecordUnreadable:
            running = copies.values.get(b"!running", b"unknown")
        return running is not None and running != self._running()


def _ignore_damage(_part: str, _detail: str) -> None:
    """Nobody registered for it."""


def refusal(error: StoreError) -> StoreError:
    """A failed write as peers get it: the engine's own text, which names files of the server, is
    for the log."""
    if isinstance(error, StoreFull):
        return StoreFull("there is no room on the disk")
    return StoreFailed("the disk can't be written")


def full_or_failed(error: Exception) -> StoreError:
    """The error for what an engine raised when it was writing."""
    text = " ".join(str(error).split())
    if "No space left" in text or "NoSpace" in text:
        return StoreFull("there is no room on the disk")
    if "too large" in text:
        return StoreFull("a file of the store is as large as the system allows")
    return StoreFailed(text)
