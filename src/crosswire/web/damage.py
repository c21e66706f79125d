"""Damage of the store over HTTP, until an administrator acknowledges it."""

from __future__ import annotations

from typing import Final

import msgspec

from crosswire.store.damage import DamageEntry
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.paging import ListQuery, page_of
from crosswire.web.state import stopped_titles
from crosswire.web.times import Moment, at_s

__all__ = ["DAMAGE_OPERATIONS"]


class DamageRow(msgspec.Struct, frozen=True, kw_only=True, rename={"end": "behind"}):
    """Something that can't be read or is missing."""

    time: Moment
    """When it was found."""
    part: str
    """Where: `tables`, `log`, `copies`, `cursor`, `record`, `engine`, `messages`."""
    detail: str
    first: str
    """The first key that is damaged, in hex."""
    end: str
    """The key after the last one that is damaged, in hex."""


class DamageReport(msgspec.Struct, frozen=True):
    """A page of what of the store is damaged, and what that stopped."""

    damage: list[DamageRow]
    """What is not acknowledged yet, the oldest first."""
    next: str
    """The cursor of the next page; empty after the last."""
    stopped: list[str]
    """Up to 100 queues and subscriptions that deliver nothing until `crosswire store repair`,
    acknowledged or not."""


class AcknowledgedDamage(msgspec.Struct, frozen=True):
    """What was acknowledged."""

    acknowledged: int
    """The number of entries removed from the list."""


async def show_damage(ask: OperationRequest) -> DamageReport:
    """Damage that is not acknowledged, and what it stopped."""
    query: ListQuery = ask.query
    hub = ask.hub
    async with ask.work.turn() as turn:
        for destination in list(hub.store.destinations()):
            if destination.startswith("queue/"):
                # A queue reads its cursor when it is first used: this finds all that are stopped.
                hub.queue(destination)
                await turn.pause()
        # They have no names, but are acknowledged all together: until then each keeps its index.
        entries = list(enumerate(hub.store.damages.entries))
        page, following = await page_of(entries, lambda entry: (entry[0], ""), query, turn)
    damage = [_row(entry, ask) for _, entry in page]
    return DamageReport(damage, following, stopped_titles(hub))


def _row(entry: DamageEntry, ask: OperationRequest) -> DamageRow:
    return DamageRow(
        time=at_s(entry.time),
        part=entry.part,
        detail=ask.shown_text(entry.detail),
        first=entry.first,
        end=entry.end,
    )


def acknowledge_damage(ask: OperationRequest) -> AcknowledgedDamage:
    """Clear the list, durably; `/readyz` is "ready" again."""
    return AcknowledgedDamage(len(ask.hub.store.damages.acknowledge()))


DAMAGE_OPERATIONS: Final = (
    Operation(
        name="show_damage",
        tag="storage",
        method="GET",
        path="/v1/damage",
        summary="Damage of the store that is not acknowledged, and what it stopped",
        handler=show_damage,
        query=ListQuery,
        answer=DamageReport,
        needs="observe",
        on_standby=True,
    ),
    Operation(
        name="acknowledge_damage",
        tag="storage",
        method="POST",
        path="/v1/damage/acknowledge",
        summary="Acknowledge the damage; the hub is no longer reported as damaged",
        handler=acknowledge_damage,
        answer=AcknowledgedDamage,
    ),
)
