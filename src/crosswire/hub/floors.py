"""Up to which id the store has deleted messages of each destination."""

from __future__ import annotations

from typing import Final

from crosswire.errors import RecordDamaged
from crosswire.hub.damage import DamageReports
from crosswire.store.contract import Page, Store, View

__all__ = ["Floors", "floors"]

_FLOORS: Final = "reclaimed"
_SIZE: Final = 8


class Floors:
    """Readers of the log need them: ids up to a floor may be missing without being lost."""

    def __init__(self, store: Store, damage: DamageReports) -> None:
        self._store = store
        self._damage = damage
        self._by_number: dict[int, int] = {}
        self.raised = 0
        """How many times a floor was saved since the start."""

    def of(self, number: int) -> int:
        """Some messages up to this id may be deleted, none above it; 0 if none is."""
        floor = self._by_number.get(number)
        if floor is None:
            floor = self._by_number[number] = self._load(number)
        return floor

    def save(self, number: int, identifier: int) -> None:
        """Written with the group that deletes them."""
        self._by_number[number] = identifier
        self.raised += 1
        self._store.save(_FLOORS, number.to_bytes(4), identifier.to_bytes(_SIZE))

    def remove(self, number: int) -> None:
        """Its destination is removed."""
        self._by_number.pop(number, None)
        self._store.drop(_FLOORS, number.to_bytes(4))

    def _load(self, number: int) -> int:
        key = number.to_bytes(4)
        stored = self._store.get(_FLOORS, key)
        if stored is None:
            return 0
        floor = int.from_bytes(stored)
        if len(stored) == _SIZE and floor <= self._store.newest_id:
            return floor
        error = RecordDamaged(f"how far {self._store.name(number)} goes back is unknown")
        self._damage.set_aside_state(_FLOORS, key, stored, error)
        floor = self._before_first(number)
        self.save(number, floor)
        return floor

    def _before_first(self, number: int) -> int:
        """Whatever was deleted was before the first message that is stored."""
        pages: list[Page] = []
        self._store.read([number], after=0, count=1, done=pages.append)
        records = [record for page in pages for record in page.records]
        return records[0][1] - 1 if records else self._store.newest_id


def floors(view: View) -> dict[int, int]:
    """The floors of all destinations that have one, by number."""
    return {
        int.from_bytes(key): int.from_bytes(value)
        for key, value in view.load(_FLOORS)
        if len(value) == _SIZE
    }
