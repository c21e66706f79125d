"""What of the store is damaged, until an administrator acknowledges it."""

from __future__ import annotations

import msgspec

from crosswire.store.damage import DamageEntry
from crosswire.web.contract import OperationRequest

__all__ = ["AcknowledgedDamage", "DamageReport", "acknowledge_damage", "show_damage"]


class DamageReport(msgspec.Struct, frozen=True):
    """`damage` is what nobody acknowledged yet; `stopped` are queues and subscriptions that deliver
    nothing until `crosswire store repair`, acknowledged or not."""

    damage: list[DamageEntry]
    stopped: list[str]


class AcknowledgedDamage(msgspec.Struct, frozen=True):
    """How many entries were taken from the list."""

    acknowledged: int


def show_damage(ask: OperationRequest) -> DamageReport:
    hub = ask.hub
    hub.queues()
    return DamageReport(hub.store.damages.entries, [each.title for each in hub.stopped()])


def acknowledge_damage(ask: OperationRequest) -> AcknowledgedDamage:
    return AcknowledgedDamage(len(ask.hub.store.damages.acknowledge()))
