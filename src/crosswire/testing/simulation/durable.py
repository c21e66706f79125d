"""Which messages are durable, seen from below: what a disk has synced, or a log has copied.

Messages of the simulation name themselves in their payload, and so can be found in whatever is
written, without a line of the code that is tested. An acknowledgement of a message that is not
there is a lie, even if no crash ever shows it.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

__all__ = ["DurableMessages", "MessageKey", "find_messages"]

_NAMED: Final = re.compile(rb'\["((?:queue|topic)/[a-z0-9]+)","([a-z0-9-]+)",(\d+),"')


class MessageKey(NamedTuple):
    """Which message: its destination, its producer, and the producer's count."""

    destination: str
    producer: str
    number: int

    def __str__(self) -> str:
        return f"{self.destination} {self.producer}#{self.number}"


def find_messages(data: bytes) -> list[MessageKey]:
    """The messages whose payloads are in these bytes."""
    return [
        MessageKey(destination.decode(), producer.decode(), int(number))
        for destination, producer, number in _NAMED.findall(data)
    ]


class DurableMessages:
    """The messages that were durable at some time."""

    def __init__(self) -> None:
        self._keys: set[MessageKey] = set()

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def note(self, data: bytes) -> list[MessageKey]:
        """These bytes are durable; gives the messages that are in them."""
        found = find_messages(data)
        self._keys.update(found)
        return found
