"""Which ranges of the journal the lake has sealed, and what the store must keep until it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from crosswire.commitlog.contract import Receipt
from crosswire.errors import RecordDamaged, RecordUnreadable
from crosswire.hub.commits import CommitPath
from crosswire.hub.damage import DamageReports
from crosswire.hub.floors import Floors
from crosswire.hub.ledger import LedgerRun, Step, parse_block
from crosswire.store.contract import Page, Store
from crosswire.store.keys import MAX_ID
from crosswire.store.records import Count, reader

__all__ = [
    "SEAL_KEY",
    "SEAL_SPACE",
    "LakeGap",
    "LakeSeals",
    "Seal",
    "parse_seal",
    "stored_seal",
]

_VERSION: Final = 1
_PAGE: Final = 64
_PAGE_BYTES: Final = 1 << 18
SEAL_SPACE: Final = "seal"
SEAL_KEY: Final = b"last"
"""Where a store has the last seal."""


class LakeGap(msgspec.Struct, frozen=True, array_like=True):
    """What the lake will never have: rows of the ledger by number, messages by id."""

    table: str
    first: int
    last: int
    time: int
    reason: str


class Seal(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A range of the journal that goes to the lake as one, with the messages that belong to it.

    An empty one (`last_row` before `first_row`) marks where the lake begins. `first_seq` and
    `last_seq` number the messages, whose ids are above `after` and at most `newest`; `gaps` are
    published along with it. `skipped` rows are in no file; `tables` are those that the lake had
    then, none while it was off. `term` is that of the leader that publishes it, 0 without replicas.
    """

    first_row: Count
    last_row: Count
    first_seq: Count
    last_seq: Count
    newest: Count
    after: Count = 0
    tables: tuple[str, ...] = ()
    skipped: bool = False
    first_gap: Count = 1
    gaps: tuple[LakeGap, ...] = ()
    version: int = _VERSION
    term: Count = 0


def stored_seal(store: Store) -> Seal | None:
    """The seal that a store has committed last; None if there is none. Raises RecordDamaged."""
    stored = store.get_or_raise(SEAL_SPACE, SEAL_KEY)
    if stored is None:
        return None
    return parse_seal(stored)


class LakeSeals:
    """The last seal, and the limits that it sets.

    Only messages with ids up to `reclaim_limit` may be deleted, and rows of the ledger up to
    `released_row`. With a lake (`withheld`) that is what a published seal has released.
    """

    def __init__(
        self,
        store: Store,
        commits: CommitPath,
        damage: DamageReports,
        floors: Floors,
        *,
        withheld: bool,
    ) -> None:
        self._store = store
        self._commits = commits
        self._damage = damage
        self._floors = floors
        self._withheld = withheld
        # After a restart it is not known yet whether the last seal's files were published.
        self.reclaim_limit = 0 if withheld else MAX_ID
        self.released_row = 0

    # Seals.

    def save(self, seal: Seal) -> Receipt:
        """Commit a seal whose files are about to be published: a restart publishes them again."""
        self._store.save(SEAL_SPACE, SEAL_KEY, _encode(seal))
        return self._commits.committed()

    def last(self) -> Seal | None:
        """The seal that was committed last; after a restart its files may not be published.

        One that can't be used is set aside: the lake continues after a gap then.
        """
        try:
            stored = self._store.get_or_raise(SEAL_SPACE, SEAL_KEY)
        except RecordUnreadable as error:
            self._damage.report(error)
            return None
        if stored is None:
            return None
        try:
            seal = parse_seal(stored)
            if seal.last_row >= self._store.next_row or seal.newest > self._store.newest_id:
                raise RecordDamaged("the last seal of the lake is ahead of the store")
        except RecordDamaged as error:
            self._damage.set_aside_state(SEAL_SPACE, SEAL_KEY, stored, error)
            return None
        return seal

    def release(self, seal: Seal) -> None:
        """Its files are published: the store may delete what they have."""
        if self._withheld:
            self.reclaim_limit = seal.newest
            self.released_row = seal.last_row

    # What was stored.

    def records_of(self, block: bytes) -> Iterator[tuple[int, bytes]]:
        """The messages that were stored together with a block of the journal, run by run: ids and
        records, which were decoded as a check. They are read in small pages: the caller may do
        something else in between, for as long as the store deletes none of them, which is until a
        seal with them is released.

        Raises RecordDamaged if the block can't be read; messages that can't are reported.
        """
        for run in parse_block(0, block):
            if run.step is Step.ACCEPTED and run.counts is None and run.ids:
                yield from self._stored_run(run)

    def _stored_run(self, run: LedgerRun) -> Iterator[tuple[int, bytes]]:
        store = self._store
        service = run.destination.startswith("service/")
        names = {run.destination}
        if service:
            # Calls are stored under the name that their provider gave, with or without the method.
            names.add("/".join(run.destination.split("/")[:2]))
        known = store.destinations()
        numbers = {known[name] for name in names if name in known}
        if not numbers:
            # A destination is removed only when the lake has all of its messages.
            return
        wanted = dict.fromkeys(run.ids)
        after, last = min(run.ids) - 1, max(run.ids)
        while after < last:
            pages: list[Page] = []
            store.read(
                sorted(numbers),
                after=after,
                upto=last,
                count=_PAGE,
                size_bytes=_PAGE_BYTES,
                done=pages.append,
            )
            [page] = pages
            after = page.last
            for number, identifier, record in page.records:
                if identifier not in wanted:
                    continue
                del wanted[identifier]
                try:
                    self._damage.decode(number, identifier, record)
                except RecordDamaged as error:
                    self._damage.set_aside(number, identifier, record, error)
                else:
                    yield identifier, record
        for identifier in wanted:
            # A call without a provider is in the ledger, but was never stored.
            if not service:
                number = min(numbers)
                self._damage.report_missing(number, identifier, self._floors.of(number))


def parse_seal(stored: bytes) -> Seal:
    """A seal as it is stored. Raises RecordDamaged."""
    seal = _read(stored)
    if seal.version != _VERSION:
        raise RecordDamaged(f"the last seal of the lake has version {seal.version}")
    return seal


_encode = msgspec.msgpack.Encoder().encode
_read: Callable[[bytes], Seal] = reader(Seal, "the last seal of the lake")
