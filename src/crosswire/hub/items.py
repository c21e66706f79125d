"""Messages in memory, and how often they are tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from crosswire.envelope import Envelope
from crosswire.hub.cursor import FailedDelivery

if TYPE_CHECKING:
    from crosswire.hub.attachment import Consumer

__all__ = ["AcceptedMessages", "Item", "Retry"]


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """How often and when a message is tried again; `max_attempts` 0 means for ever."""

    max_attempts: int = 5
    first_delay_s: float = 0.1
    longest_delay_s: float = 60.0
    jitter: float = 0.2
    lease_s: float | None = None

    def delay_s(self, attempt: int, chance: float) -> float:
        """Doubles with every attempt; `chance` in [0, 1) takes up to `jitter` of it away."""
        longest = min(self.longest_delay_s, self.first_delay_s * 2.0 ** min(attempt - 1, 40))
        return longest * (1.0 - self.jitter * chance)


class AcceptedMessages(msgspec.Struct, frozen=True):
    """Messages that were accepted together at one destination, in order of ids.

    `number` is the destination's, `sizes` are those of their records.
    """

    number: int
    envelopes: Sequence[Envelope]
    sizes: Sequence[int]

    def part(self, start: int, end: int) -> AcceptedMessages:
        return AcceptedMessages(self.number, self.envelopes[start:end], self.sizes[start:end])


class Item(msgspec.Struct, eq=False):
    """A message in memory that is not settled; `number` is its destination's."""

    id: int
    number: int
    envelope: Envelope
    size: int
    delivered: int = 0
    attempts: list[FailedDelivery] = []
    consumer: Consumer | None = None
    due: float = 0.0
