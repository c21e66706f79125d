"""After an unclean stop: whether messages that the recent ledger lists as accepted are stored."""

from __future__ import annotations

from typing import Final

from crosswire.hub.cursor import Cursor
from crosswire.hub.floors import Floors
from crosswire.hub.ledger import Ledger, Step
from crosswire.store.contract import Store

__all__ = ["count_messages"]

_ENDED: Final = frozenset({Step.SETTLED, Step.EXPIRED, Step.DEAD, Step.DROPPED, Step.REPLAYED})
_SHOWN: Final = 5


def count_messages(store: Store, ledger: Ledger, floors: Floors) -> None:
    """Report accepted messages that are neither stored nor settled.

    The time it takes depends on how much of the ledger is in memory, not on how much is stored.
    """
    accepted: dict[str, set[int]] = {}
    ended: dict[str, set[int]] = {}
    for run in ledger.runs():
        if run.step is Step.ACCEPTED and run.counts is None:
            accepted.setdefault(run.destination, set()).update(run.ids)
        elif run.step in _ENDED or run.step is Step.DAMAGED:
            ended.setdefault(run.destination, set()).update(run.ids)
    numbers, view = store.destinations(), store.view()
    for name, ids in sorted(accepted.items()):
        number = numbers.get(name)
        ids -= ended.get(name, set())
        if number is None or not ids or name.startswith("service/"):
            continue
        begun = store.begun_after(number)
        ids = {each for each in ids if each > begun}
        if not ids:
            continue
        ids -= set(view.ids(number, after=min(ids) - 1, upto=max(ids)))
        missing = sorted(_unsettled(store, floors, name, number, ids)) if ids else []
        if missing:
            shown = ", ".join(map(str, missing[:_SHOWN])) + (", …" if missing[_SHOWN:] else "")
            store.report_damage(
                "messages",
                f"accepted messages of {name} are missing, {len(missing)} in all: ids {shown}",
            )


def _unsettled(store: Store, floors: Floors, name: str, number: int, ids: set[int]) -> set[int]:
    """Those that are not settled: a purge is not in the ledger, and neither is retention."""
    if name.startswith("topic/"):
        floor = floors.of(number)
        return {each for each in ids if each > floor}
    cursor = Cursor(store, b"q" + number.to_bytes(4))
    if cursor.damage:
        return set()
    opened = {each.id for each in cursor.open}
    return {
        each for each in ids if each in opened or (each > cursor.upto and each not in cursor.later)
    }
