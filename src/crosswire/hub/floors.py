"""How far the store has let go of each destination's messages: kept where they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from crosswire.store.contract import Store, View

__all__ = ["floor_of", "floors", "save_floor"]

_FLOORS: Final = "reclaimed"


def floor_of(store: Store, number: int) -> int:
    """Some messages up to this id may be gone, none above it; 0 if all are there."""
    return int.from_bytes(store.get(_FLOORS, number.to_bytes(4)) or b"")


def save_floor(store: Store, number: int, identifier: int) -> None:
    """To be written with the group that lets go of them."""
    store.save(_FLOORS, number.to_bytes(4), identifier.to_bytes(8))


def floors(view: View) -> dict[int, int]:
    """Those of all destinations, by number, that have one."""
    return {int.from_bytes(key): int.from_bytes(value) for key, value in view.load(_FLOORS)}
