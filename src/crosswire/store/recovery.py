"""What a store reads when it is opened, before anything else: its own keys, names of destinations,
numbers of rows and groups, from whichever copy can be read.

A start never guesses. What must not be guessed has two copies, one in the engine and one in a file
beside it (`Copies`), and the start is refused where neither can be read. Every commit group leaves
a row of its own (`g` number) with the ids and rows that were handed out up to then: a number that
is missing is a group that is lost. How far the numbers went is also in a file of its own
(`LogMark`), which shows groups that are missing at the end.
"""

from __future__ import annotations

import secrets
from struct import Struct as Layout
from typing import Final

import msgspec

from crosswire.errors import RecordUnreadable, StoreDamaged, StoreFailed
from crosswire.store.copies import Copies
from crosswire.store.damage import Damage
from crosswire.store.engine import Engine, StoreLimits
from crosswire.store.keys import GROUPS, ROWS, group_key, message_key, prefix_end, state_key

__all__ = [
    "COPIED_SPACES",
    "FORMAT",
    "GROUP_ROW",
    "POWER_LOSSES",
    "REMOVALS",
    "RecoveredEngine",
    "Removals",
    "check_format",
]

FORMAT: Final = b"4"
"""The only one that is read: see `check_format`."""
_OWN_KEYS: Final = (b"!format", b"!node", b"!ids")
COPIED_SPACES: Final = frozenset({"subscription"})
"""Spaces of state that change rarely, and whose loss nothing else would show."""
GROUP_ROW: Final = Layout(">QQ")
"""Of a group's row: the next row of the journal, and the newest id, after the group."""
REMOVALS: Final = b"!removed"
"""One of the store's own keys, from the first removal of a destination on."""
POWER_LOSSES: Final = b"!power"
"""One of the store's own keys, from the first one on."""
_REMOVALS_LAYOUT: Final = Layout(">QQQ")


class Removals(msgspec.Struct, frozen=True):
    """What is left of removed destinations: how many there were, the highest number that was given
    out by then, and the newest id: no message of theirs is above it."""

    count: int = 0
    highest: int = 0
    newest_id: int = 0

    def pack(self) -> bytes:
        """As it is stored. Later ones are greater."""
        return _REMOVALS_LAYOUT.pack(self.count, self.highest, self.newest_id)

    @classmethod
    def unpack(cls, value: bytes | None) -> Removals:
        """None, and what can't be read, stand for no removals."""
        if value is None or len(value) != _REMOVALS_LAYOUT.size:
            return cls()
        return cls(*_REMOVALS_LAYOUT.unpack(value))


def check_format(stored: bytes) -> None:
    """Raises StoreFailed if a store of this format can't be read."""
    if stored != FORMAT:
        raise StoreFailed(
            f"the store has format {stored.decode(errors='replace')!r}, written by another version "
            f"of Crosswire: this one reads format {FORMAT.decode()!r}. Nothing was changed. Use the"
            " version that wrote it, or another data directory"
        )


class RecoveredEngine(Engine):
    """An engine with what was recovered from it."""

    def __init__(self, limits: StoreLimits | None = None) -> None:
        super().__init__(limits)
        self.node = ""
        self.power_lost = False
        self.power_losses = 0
        """How often the machine was stopped while the store was open, with the last time. Who has
        to do something about it keeps the number: a start may end before it is done."""
        self.was_stopped = False
        """Was the store closed by the hub that had it last?"""
        self._numbers: dict[str, int] = {}
        self._next_number = 1
        self._removals = Removals()
        self._next_id = 1
        self._reserved_id = 1
        self._next_row = 1
        self._last_group = 0
        self._durable_group = 0
        self._log_error = ""
        self._copies_ahead = False
        """Whether the second copy has removals that the first one has not."""

    def _recover(self, *, is_new: bool) -> None:
        """Read what the store keeps about itself; an empty one is initialized.

        Raises StoreDamaged where neither copy of something can be read.
        """
        mended: dict[bytes, bytes] = {}
        copies = self._load_copies()
        self.power_lost = self._has_lost_power(copies)
        self.power_losses = self._power_losses_before(copies) + self.power_lost
        self.was_stopped = is_new or b"!stopped" in copies.values
        if is_new:
            mended = {b"!format": FORMAT, b"!node": secrets.token_hex(8).encode()}
            own = mended
        else:
            own = self._recover_own(copies, mended)
        check_format(own[b"!format"])
        self.node = own[b"!node"].decode()
        self._next_id = int.from_bytes(own.get(b"!ids", b"\x01"))
        # Names first: whatever is damaged is described with them.
        self._recover_names(copies, mended)
        self._recover_rows()
        self._recover_groups(copies, knows_end=is_new)
        self._reserved_id = self._next_id
        mended[b"!ids"] = self._next_id.to_bytes(8)
        self._begin_run(copies, mended, reported=not is_new)

    def _power_losses_before(self, copies: Copies) -> int:
        """Of the two copies the second may be ahead: it is written first."""
        try:
            first = self._get(POWER_LOSSES)
        except RecordUnreadable:
            first = None
        return max(int.from_bytes(each or b"") for each in (first, copies.values.get(POWER_LOSSES)))

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
                if key == b"!ids":
                    # Its copies are not written at the same moment; it only ever grows.
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
        removals = self._recover_removals(copies)
        highest = self._removals.highest
        for key, value in copies.values.items():
            if key[:1] == b"d":
                number = int.from_bytes(value)
                highest = max(highest, number)
                if numbers.setdefault(key[1:], number) != number and not self._removals.count:
                    raise StoreDamaged(self._explain("a destination has two numbers"))
                # If a group removes a destination and has a new one of that name, and only its
                # second copies were on disk before a power failure, they are ahead: the first
                # copy counts.
                mended[key] = numbers[key[1:]].to_bytes(4)
        highest = max(highest, *numbers.values(), 0)
        if len(set(numbers.values())) != len(numbers):
            raise StoreDamaged(self._explain("two destinations have the same number"))
        if not is_whole and len(numbers) + removals != highest:
            raise StoreDamaged(self._explain("both copies of the destinations' names are damaged"))
        if self._removals.count:
            self._removals = Removals(highest - len(numbers), highest, self._removals.newest_id)
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

    def _recover_removals(self, copies: Copies) -> int:
        """How many destinations were removed, as far as both copies agree: the second one may have
        those of a group that was not written."""
        second = Removals.unpack(copies.values.get(REMOVALS))
        try:
            first = Removals.unpack(self._get(REMOVALS))
        except RecordUnreadable:
            first = second
        self._removals = max(first, second, key=Removals.pack)
        self._copies_ahead = second.count > first.count
        return min(first.count, second.count)

    def _recover_rows(self) -> None:
        try:
            last = self._last(*ROWS)
        except RecordUnreadable:
            last = None
            for row in self._scan(*ROWS):
                last = row
        if last is not None:
            key, value = last
            self._next_row = int.from_bytes(key[1:]) + int.from_bytes(value[:4])

    def _recover_groups(self, copies: Copies, *, knows_end: bool) -> None:
        """Look for missing groups, and continue after everything that was ever handed out."""
        mark, found = self._load_mark(), len(self.damage)
        last, rows, newest = -1, 1, 0
        for key, value in self._scan(*GROUPS):
            number = int.from_bytes(key[1:])
            next_row, id_then = GROUP_ROW.unpack(value)
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
            # After a power cut, groups that were written but not synced may be missing: nobody was
            # promised that they are on disk.
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
        # Usually the block of ids that `!ids` reserves is above all of this.
        if newest >= self._next_id or self.damage:
            self._next_id = max(self._next_id, newest + 1, self._highest_id() + 1)

    def _report_log(self, detail: str) -> None:
        cause = f" ({self._log_error})" if self._log_error else ""
        self._report(Damage(b"", b"", detail + cause, "log"))

    def _highest_id(self) -> int:
        """The highest id of any message that can be read; needed only where there is damage."""
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
        """Make both copies equal, and drop the rows of groups that were just verified."""
        values = {
            b"d" + name.encode(): number.to_bytes(4) for name, number in self._numbers.items()
        }
        for space in COPIED_SPACES:
            values.update(self._recover_copied(space, copies, mended))
        values.update({b"!format": FORMAT, b"!node": self.node.encode()})
        values[b"!ids"] = mended[b"!ids"]
        if self._removals.count:
            values[REMOVALS] = mended[REMOVALS] = self._removals.pack()
        if self.power_losses:
            values[POWER_LOSSES] = mended[POWER_LOSSES] = self.power_losses.to_bytes(8)
        missing = values.keys() - copies.values.keys() - {b"!ids", POWER_LOSSES}
        if self._copies_ahead:
            missing = {key for key in missing if key[:1] != b"d"}
        if reported and (not copies.is_whole or missing):
            what = "is damaged" if copies.is_there else "is missing"
            if copies.is_whole:
                lacks = "1 entry is" if len(missing) == 1 else f"{len(missing)} entries are"
                what = f"is shorter than it was: {lacks} missing"
            detail = f"the second copy of the store's own keys {what}; it was written anew"
            self._report(Damage(b"", b"", detail, "copies"))
        values[b"!running"] = mended[b"!running"] = self._running()
        group = group_key(self._last_group)
        mended[group] = GROUP_ROW.pack(self._next_row, self._next_id - 1)
        if self.power_lost:
            # What was lost with it is not expected any more: if this start fails, the next one
            # takes the copies for those of a run without a power cut.
            self._save_mark()
        self._replace_copies(values)
        self._store_now(mended, (GROUPS[0], group) if self._last_group else None)
        self._save_mark()

    def _recover_copied(
        self, space: str, copies: Copies, mended: dict[bytes, bytes]
    ) -> dict[bytes, bytes]:
        """The values of a space: the first copy counts, except for what can't be read of it.

        What only the second copy has belongs to a group that was not acknowledged, or is lost.
        """
        found, begin = len(self.damage), state_key(space, b"")
        values = dict(self._scan(begin, prefix_end(begin)))
        if len(self.damage) > found or any(each.part == "log" for each in self.damage):
            for key, value in copies.values.items():
                if key.startswith(begin) and key not in values:
                    values[key] = mended[key] = value
        return values


def _describe_groups(
    first: int, last: int, newest: int, newest_then: int, rows: int, rows_then: int
) -> str:
    """What may be missing together with these commit groups."""
    text = f"commit group {first} is" if first == last else f"commit groups {first} to {last} are"
    text += " missing from the log"
    if newest_then > newest:
        text += f"; messages with ids from {newest + 1} to {newest_then} may be lost"
    if rows_then > rows:
        text += f"; rows {rows} to {rows_then - 1} of the ledger are missing"
    return f"{text}; what was settled in them may be delivered again"
