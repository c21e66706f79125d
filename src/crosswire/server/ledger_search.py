"""The steps of messages, wherever they are: in memory, in the store's journal, or in the lake.

Rows are in order of time, and so are the ids of accepted messages: the block of the journal in
which a message was accepted is found by bisection, and its later steps follow from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from crosswire.errors import CrosswireError, RecordDamaged
from crosswire.hub.dead import sent_as_detail
from crosswire.hub.ledger import LedgerRow, LedgerRun, Step, parse_block
from crosswire.lake.ledger_history import LedgerHistory
from crosswire.store.contract import View
from crosswire.store.keys import ROWS, row_key

__all__ = ["FoundSteps", "LedgerSearch", "LedgerSources"]


class _TimeIsUp(CrosswireError):
    """The search has taken as long as it may."""


class LedgerSources(NamedTuple):
    """What a thread gets from the event loop: the runs in memory, oldest first, and a view of the
    store with the journal's rows up to `next_row`."""

    runs: Sequence[LedgerRun]
    view: View
    next_row: int


class FoundSteps(msgspec.Struct, frozen=True):
    """Rows of messages by id, in order; `is_complete` is False if not everything was searched.

    `sent_again` has for a message that was sent again the row of the one before it."""

    rows: dict[int, list[LedgerRow]]
    sent_again: dict[int, LedgerRow]
    is_complete: bool


class LedgerSearch:
    """Finds the steps of some messages. For one thread."""

    def __init__(
        self,
        sources: LedgerSources,
        lake: LedgerHistory,
        *,
        pause: Callable[[float], None],
        report: Callable[[RecordDamaged], None],
        within_s: float,
    ) -> None:
        self._sources = sources
        self._lake = lake
        self._pause = pause
        self._report = report
        self._ends_at = time.monotonic() + within_s

    def find(self, ids: set[int]) -> FoundSteps:
        """All steps of these messages, as far as time allows. Raises LakeError."""
        found: dict[int, dict[tuple[object, ...], LedgerRow]] = {each: {} for each in ids}
        before: dict[int, LedgerRow] = {}
        details = {sent_as_detail(each): each for each in ids}

        def take(row: LedgerRow) -> None:
            if row.id in found:
                # A row that is not on disk yet has no number; one in two sources has the same.
                key = (row.seq,) if row.seq else (row.time, row.step, row.attempt, row.detail)
                found[row.id][key] = row
            if row.step == "replayed" and row.detail in details:
                before[details[row.detail]] = row

        is_complete = True
        try:
            for run in self._sources.runs:
                self._take_run(run, ids, details, take)
            missing = {each for each in ids if not _has_begun(found[each].values())}
            if missing:
                self._search_journal(missing, ids, details, take)
            missing = {each for each in ids if not _has_begun(found[each].values())}
            if missing:
                for row in self._lake.rows(missing, set(details), self._go_on):
                    take(_of_lake(row))
        except _TimeIsUp:
            is_complete = False
        rows = {
            each: sorted(steps.values(), key=lambda row: (row.seq or 1 << 62, row.time))
            for each, steps in found.items()
        }
        return FoundSteps(rows, before, is_complete)

    def _go_on(self) -> None:
        self._pause(0.0)
        if time.monotonic() >= self._ends_at:
            raise _TimeIsUp

    @staticmethod
    def _take_run(
        run: LedgerRun,
        ids: set[int],
        details: dict[str, int],
        take: Callable[[LedgerRow], None],
    ) -> None:
        if not ids.isdisjoint(run.ids) or (run.step is Step.REPLAYED and run.detail in details):
            for row in run.rows():
                if row.id in ids or row.detail in details:
                    take(row)

    # The journal.

    def _search_journal(
        self,
        missing: set[int],
        ids: set[int],
        details: dict[str, int],
        take: Callable[[LedgerRow], None],
    ) -> None:
        """From the block in which the first of them was accepted up to what is in memory."""
        end = next((run.first_row for run in self._sources.runs if run.first_row), 0)
        end = end or self._sources.next_row
        first = self._sources.view.first(*ROWS)
        if first is None:
            return
        low, high = int.from_bytes(first[1:]), end
        wanted = min(missing)
        while high - low > 1:
            self._go_on()
            middle = (low + high) // 2
            accepted = self._first_accepted(middle, high)
            if accepted is None or accepted > wanted:
                high = middle
            else:
                low = middle
        for first_row, block in self._blocks(self._block_with(low), end):
            self._go_on()
            for run in self._parse(first_row, block):
                self._take_run(run, ids, details, take)

    def _block_with(self, row: int) -> int:
        """The number of the first row of the block that this one is in."""
        key = self._sources.view.last(ROWS[0], row_key(row + 1))
        return row if key is None else int.from_bytes(key[1:])

    def _first_accepted(self, row: int, end: int) -> int | None:
        """The id of the first message that was accepted by blocks from this row on."""
        for first_row, block in self._blocks(row, end):
            for run in self._parse(first_row, block):
                if run.step is Step.ACCEPTED and run.ids:
                    return run.ids[0]
        return None

    def _blocks(self, row: int, end: int) -> Iterator[tuple[int, bytes]]:
        for key, value in self._sources.view.scan(row_key(row), row_key(end)):
            yield int.from_bytes(key[1:]), value[4:]

    def _parse(self, first_row: int, block: bytes) -> list[LedgerRun]:
        try:
            return parse_block(first_row, block)
        except RecordDamaged as error:
            self._report(error)
            return []


def _has_begun(rows: Iterable[LedgerRow]) -> bool:
    """Whether a message's acceptance is among these: then all that followed is, too, as sources are
    searched up to the newest row."""
    return any(row.step == "accepted" for row in rows)


def _of_lake(row: dict[str, object]) -> LedgerRow:
    fields = {name: row[name] for name in LedgerRow.__struct_fields__}
    return msgspec.convert(fields, LedgerRow)
