"""How far the store has let go of each destination's messages: kept where they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from crosswire.errors import RecordDamaged

if TYPE_CHECKING:
    from crosswire.hub.hub import Hub
    from crosswire.store.contract import Page, Store, View

__all__ = ["floor_of", "floors", "save_floor"]

_FLOORS: Final = "reclaimed"
_SIZE: Final = 8


def floor_of(hub: Hub, number: int) -> int:
    """Some messages up to this id may be gone, none above it; 0 if all are there."""
    key = number.to_bytes(4)
    stored = hub.store.get(_FLOORS, key)
    if stored is None:
        return 0
    floor = int.from_bytes(stored)
    if len(stored) == _SIZE and floor <= hub.store.newest_id:
        return floor
    name = hub.store.name(number)
    hub.set_aside_state(_FLOORS, key, stored, RecordDamaged(f"how far {name} goes back is unknown"))
    floor = _before_first(hub, number)
    save_floor(hub.store, number, floor)
    return floor


def _before_first(hub: Hub, number: int) -> int:
    """Whatever is gone was before the first message that is there."""
    pages: list[Page] = []
    hub.store.read([number], after=0, count=1, done=pages.append)
    records = [record for page in pages for record in page.records]
    return records[0][1] - 1 if records else hub.store.newest_id


def save_floor(store: Store, number: int, identifier: int) -> None:
    """To be written with the group that lets go of them."""
    store.save(_FLOORS, number.to_bytes(4), identifier.to_bytes(_SIZE))


def floors(view: View) -> dict[int, int]:
    """Those of all destinations, by number, that have one."""
    return {
        int.from_bytes(key): int.from_bytes(value)
        for key, value in view.load(_FLOORS)
        if len(value) == _SIZE
    }
