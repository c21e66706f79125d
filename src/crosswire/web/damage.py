"""Damage of the store over HTTP, until an administrator acknowledges it."""

from __future__ import annotations

import msgspec

from crosswire.store.damage import DamageEntry
from crosswire.web.contract import OperationRequest

__all__ = ["AcknowledgedDamage", "DamageReport", "acknowledge_damage", "show_damage"]


class DamageReport(msgspec.Struct, frozen=True):
    """`damage` is what is not acknowledged yet; `stopped` are queues and subscriptions that deliver
    nothing until `crosswire store repair`, acknowledged or not."""

    damage: list[DamageEntry]
    stopped: list[str]


class AcknowledgedDamage(msgspec.Struct, frozen=True):
    """The number of entries removed from the list."""

    acknowledged: int


async def show_damage(ask: OperationRequest) -> DamageReport:
    """Damage that is not acknowledged, and what it stopped."""
    hub = ask.hub
    async with ask.work.turn() as turn:
        for destination in list(hub.store.destinations()):
            if destination.startswith("queue/"):
                # A queue reads its cursor when it is first used: this finds all that are stopped.
                hub.queue(destination)
                await turn.pause()
    return DamageReport(hub.store.damages.entries, [each.title for each in hub.stopped()])


def acknowledge_damage(ask: OperationRequest) -> AcknowledgedDamage:
    """Clear the list, durably; `/readyz` is "ready" again."""
    return AcknowledgedDamage(len(ask.hub.store.damages.acknowledge()))
