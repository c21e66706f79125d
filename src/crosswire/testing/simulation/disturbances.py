"""When something was done to hubs, programs and the network: what explains the errors of a client.

Everything that a fault touches is noted under a name, when it begins and when it ends:

    hub        its process or its disk is not as it should be, or another replica leads
    still      its process did not run for a while
    crash      it was killed, or lost power
    network    packets are lost or late, a machine is off: TCP takes a while to notice
    cut        connections were reset
    NAME       a program's connection ended, or its process did
    held NAME  a program ended whose link the hub keeps for a while (Relink)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

__all__ = ["Disturbances", "held"]

_SETTLE_S: Final = 2.0
_HUB_S: Final = 16.0
_UNNOTICED_S: Final = 90.0
_LINK_S: Final = 65.0


def held(name: str) -> str:
    """The name under which the end of a program is noted whose link is kept."""
    return f"held {name}"


class Disturbances:
    """Times by name, in order. On a real machine everything may take `patience` times as long."""

    def __init__(self, patience: float = 1.0) -> None:
        self.settle_s = _SETTLE_S * patience
        """A settlement is durable after this time at the latest, if nothing fails meanwhile."""
        self.hub_s = _HUB_S * patience
        """How long a fault of the hub may show: a request times out after ten seconds, and a client
        that has lost its connection tries again after one at most."""
        self.unnoticed_s = _UNNOTICED_S * patience
        """How long the end of a connection may be unnoticed when the network loses packets."""
        self.link_s = _LINK_S * patience
        """How long the hub keeps a link without a connection: it waits 60 s for the peer."""
        self.held_s = (_UNNOTICED_S + _LINK_S) * patience
        """How long it keeps a link whose program is gone, perhaps unnoticed."""
        self._times: dict[str, list[float]] = defaultdict(list)

    def note(self, who: str, now: float) -> None:
        """Something happened to it."""
        self._times[who].append(now)

    def last(self, who: str) -> float:
        """When it was disturbed last; minus infinity if it never was."""
        times = self._times[who]
        return times[-1] if times else -math.inf

    def happened(self, who: Iterable[str], first: float, last: float) -> bool:
        """Whether one of them was disturbed in this time."""
        for each in who:
            times = self._times[each]
            index = bisect_left(times, first)
            if index < len(times) and times[index] <= last:
                return True
        return False

    def explain(self, since: float, now: float, *others: str) -> bool:
        """Whether faults of the hub, the network, or these may show between two times."""
        return (
            self.happened(("hub", "cut", *others), since - self.hub_s, now)
            or self.happened(("network",), since - self.unnoticed_s, now)
            or self.happened(map(held, others), since - self.held_s, now)
        )
