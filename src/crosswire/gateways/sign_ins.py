"""Failed sign-ins by address: the more of them, the later the answer to the next one.

Only failures are delayed. A peer with valid credentials gets in at once, whatever others at the
same address try; and nobody tries many without waiting.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

__all__ = ["SignIns"]

_FREE: Final = 3
"""A few failures are mistakes: their answers are not delayed."""
_FIRST_S: Final = 0.1
_LONGEST_S: Final = 5.0
_FORGOTTEN_S: Final = 600.0
_ADDRESSES: Final = 10_000


class SignIns:
    """How many sign-ins of each address failed lately; bounded, the oldest are forgotten first."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._failures)

    def fail(self, address: str, now: float) -> float:
        """Count a failure; gives how many seconds its answer has to wait."""
        count, last = self._failures.pop(address, (0, now))
        if now - last > _FORGOTTEN_S:
            count = 0
        self._failures[address] = (count + 1, now)
        if len(self._failures) > _ADDRESSES:
            self._failures.popitem(last=False)
        if count < _FREE:
            return 0.0
        # An exponent that grew for ever would overflow one day.
        return min(_FIRST_S * 2.0 ** min(count - _FREE, 16), _LONGEST_S)

    def failures(self, address: str) -> int:
        """How many failures of an address are remembered."""
        return self._failures.get(address, (0, 0.0))[0]
