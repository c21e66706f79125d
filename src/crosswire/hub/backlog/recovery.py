"""Continuing after a restart: messages that were in memory, and not settled, are read again."""

from __future__ import annotations

from crosswire.hub.attachment import Item
from crosswire.hub.backlog.memory import BacklogMemory
from crosswire.hub.core import Core
from crosswire.hub.cursor import Cursor, UnsettledMessage

__all__ = ["recover_unsettled"]


def recover_unsettled(core: Core, cursor: Cursor, memory: BacklogMemory) -> None:
    """Read what the cursor lists as unsettled, beyond the limits of the window if need be.

    Before anything else is read: these have the least ids. One that is not in the store is
    reported and settled.
    """
    by_number: dict[int, list[UnsettledMessage]] = {}
    for unsettled in cursor.open:
        by_number.setdefault(unsettled.number, []).append(unsettled)
    found: list[Item] = []
    for number, messages in by_number.items():
        records = core.store.fetch(number, [each.id for each in messages])
        for message, record in zip(messages, records, strict=True):
            if record is None:
                core.damage.report_missing(number, message.id, core.floors.of(number))
                cursor.settle(message.id)
                continue
            envelope = memory.decode(number, message.id, record)
            if envelope is not None:
                item = Item(message.id, number, envelope, len(record))
                item.attempts = message.attempts
                # Deliveries that did not fail are forgotten: the restart was nobody's fault.
                item.delivered = len(message.attempts)
                found.append(item)
    for item in sorted(found, key=lambda each: each.id):
        memory.add(item)
    cursor.open = []
