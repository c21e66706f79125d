"""A durable position in a log: what is settled, and what is not.

    position   a snapshot: everything up to `upto` is settled except what is listed as open
    changes    what was settled or refused since, a record for each commit group, with the head:
               nothing below it is unsettled

When the changes outgrow what a snapshot would hold, the next group writes a snapshot and drops
them. Reading them back therefore costs what is unsettled, never what there was.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, Final, Protocol

import msgspec

from crosswire.errors import RecordDamaged, RecordUnreadable
from crosswire.store.contract import Store
from crosswire.store.records import Count, reader

__all__ = [
    "CHANGES",
    "SNAPSHOTS",
    "Cursor",
    "CursorSource",
    "FailedDelivery",
    "UnsettledMessage",
]

SNAPSHOTS: Final = "cursor"
CHANGES: Final = "change"
LEAST_CHANGES: Final = 4096
_ID_BYTES: Final = 8


class FailedDelivery(msgspec.Struct, array_like=True, frozen=True):
    """One delivery that failed: when, to which connection, why."""

    time: Count
    connection: str
    cause: str


class UnsettledMessage(msgspec.Struct, array_like=True, gc=False):
    """A message that is not settled, with its failed deliveries."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    id: Count
    attempts: Sequence[FailedDelivery] = ()


class _Snapshot(msgspec.Struct, array_like=True, frozen=True):
    """`generation` counts snapshots: changes belong to one of them."""

    upto: Count
    open: list[UnsettledMessage]
    generation: int | None = None


class _Change(msgspec.Struct, array_like=True, frozen=True):
    head: Count
    settled: bytes
    refused: list[UnsettledMessage]
    generation: int | None = None


_encode = msgspec.msgpack.Encoder().encode
_read_snapshot: Callable[[bytes], _Snapshot] = reader(_Snapshot, "a cursor")
_decode_change: Callable[[bytes], _Change] = reader(_Change, "a cursor")


def _read_change(record: bytes) -> _Change:
    """Raises RecordDamaged."""
    change = _decode_change(record)
    if len(change.settled) % _ID_BYTES or min(array("q", change.settled), default=0) < 0:
        raise RecordDamaged("a cursor can't be read: what is settled are no ids")
    return change


class CursorSource(Protocol):
    """What the records of a cursor are read from; see `Store`."""

    def get_or_raise(self, _space: str, _key: bytes, /) -> bytes | None:
        """None where there is none. Raises RecordUnreadable."""

    def load_all(self, _space: str, _prefix: bytes, /) -> list[tuple[bytes, bytes]]:
        """Keys and values. Raises RecordUnreadable."""


class Cursor:
    """`upto` and `open` are what was recovered; `later` are ids after `upto` that are settled.

    What can't be read of it, or is missing, is in `damage`: then nobody knows what is settled, and
    it must not be used.
    """

    def __init__(self, store: Store, key: bytes, source: CursorSource | None = None) -> None:
        """It is written to the store, and read from there unless there is another `source`."""
        self.key = key
        self.upto = 0
        self.is_begun = False
        """Whether there was a snapshot, usable or not."""
        self.is_dirty = False
        """Whether something was settled or refused since the last `write`."""
        self.saved_upto = -1
        """`upto` of the last snapshot; -1 if there is none."""
        self.open: list[UnsettledMessage] = []
        self.later: set[int] = set()
        self.refused_later: dict[int, Sequence[FailedDelivery]] = {}
        self.damage: list[RecordDamaged] = []
        self._store = store
        self._settled = array("q")
        self._refused: list[UnsettledMessage] = []
        self._changes = 0
        self._next_change = 0
        self._generation: int | None = 0
        self._recover(source or store)

    def _recover(self, source: CursorSource) -> None:
        try:
            stored = source.get_or_raise(SNAPSHOTS, self.key)
            rows = source.load_all(CHANGES, self._prefix())
        except RecordUnreadable as error:
            self.damage.append(error)
            return
        opened: dict[int, UnsettledMessage] = {}
        if stored is not None:
            self.is_begun = True
            try:
                snapshot = _read_snapshot(stored)
            except RecordDamaged as error:
                self.damage.append(error)
                snapshot = _Snapshot(0, [])
            self.upto = self.saved_upto = snapshot.upto
            self._generation = snapshot.generation
            opened = {each.id: each for each in snapshot.open}
        changes: list[_Change] = []
        for key, value in rows:
            if int.from_bytes(key[-8:]) != self._next_change:
                self.damage.append(RecordDamaged("some of a cursor's changes are missing"))
            self._next_change = int.from_bytes(key[-8:]) + 1
            try:
                changes.append(_read_change(value))
            except RecordDamaged as error:
                self.damage.append(error)
        generations = {each.generation for each in changes} - {self._generation, None}
        if generations and self._generation is not None:
            self.damage.append(RecordDamaged("the snapshot before a cursor's changes is lost"))
        if changes and changes[-1].head > self.upto:
            self.upto = changes[-1].head - 1
        for change in changes:
            self._apply(change, opened)
        self.open = sorted(opened.values(), key=lambda each: each.id)

    def _apply(self, change: _Change, opened: dict[int, UnsettledMessage]) -> None:
        settled = array("q", change.settled)
        self._changes += len(settled) + len(change.refused)
        for refused in change.refused:
            if refused.id in opened:
                opened[refused.id].attempts = refused.attempts
            elif refused.id > self.upto:
                self.refused_later[refused.id] = refused.attempts
        if opened or (settled and max(settled) > self.upto):
            for identifier in settled:
                if opened.pop(identifier, None) is None and identifier > self.upto:
                    self.later.add(identifier)
                    self.refused_later.pop(identifier, None)

    def settle(self, *identifiers: int) -> None:
        """These are settled; saved with the next `write`."""
        self._settled.extend(identifiers)
        self.is_dirty = True

    def refuse(self, number: int, identifier: int, attempts: Sequence[FailedDelivery]) -> None:
        """A delivery of this message failed; saved with the next `write`."""
        self._refused.append(UnsettledMessage(number, identifier, attempts))
        self.is_dirty = True

    @property
    def refused_count(self) -> int:
        """How many refused deliveries the next `write` has."""
        return len(self._refused)

    def write(
        self, upto: int, head: int, open_count: int, opened: Callable[[], list[UnsettledMessage]]
    ) -> None:
        """Save changes, or a snapshot if that is smaller.

        Everything up to `upto` is settled except the `open_count` messages that `opened` lists;
        `head` is the least of them, or the next id.
        """
        if self.due_for_snapshot(open_count):
            self.write_snapshot(upto, opened())
        else:
            self.write_changes(head)

    def due_for_snapshot(self, open_count: int) -> bool:
        """Whether a snapshot would be smaller than the changes that have accumulated."""
        if not self.later and 4 * open_count <= len(self._settled):
            return True
        return self._changes > max(LEAST_CHANGES, 4 * open_count)

    def write_changes(self, head: int) -> None:
        """`head` is the least id that is open, or the next to come."""
        self.is_dirty = False
        if not self._settled and not self._refused:
            return
        change = _Change(head, self._settled.tobytes(), self._refused, self._generation)
        key = self._prefix() + self._next_change.to_bytes(8)
        self._store.save(CHANGES, key, _encode(change))
        self._changes += len(self._settled) + len(self._refused)
        self._next_change += 1
        self._settled = array("q")
        self._refused = []

    def write_snapshot(self, upto: int, opened: list[UnsettledMessage]) -> None:
        """Everything up to `upto` is settled except `opened`; earlier changes are in there."""
        self._generation = (self._generation or 0) + 1
        self.saved_upto = upto
        snapshot = _Snapshot(upto, opened, self._generation)
        self._store.save(SNAPSHOTS, self.key, _encode(snapshot))
        if self._next_change:
            self._drop_changes()
        self._changes = 0
        self._settled = array("q")
        self._refused = []
        self.is_dirty = False
        # Only after a restart: a queue whose consumers keep up has a snapshot in every group.
        if self.later or self.refused_later:
            self._settled.extend(sorted(each for each in self.later if each > upto))
            self._refused = [
                UnsettledMessage(0, each, attempts)
                for each, attempts in self.refused_later.items()
                if each > upto
            ]
            self.write_changes(0)

    def forget(self) -> None:
        """Delete all records of it."""
        self._store.drop(SNAPSHOTS, self.key)
        self._drop_changes()

    def _drop_changes(self) -> None:
        """They are numbered from 0 again: reading them never skips many deleted keys, which RocksDB
        has to step over one by one."""
        prefix = self._prefix()
        for number in range(self._next_change):
            self._store.drop(CHANGES, prefix + number.to_bytes(8))
        self._next_change = 0

    def _prefix(self) -> bytes:
        # The length keeps one key's changes apart from those of a longer one.
        return len(self.key).to_bytes(2) + self.key
