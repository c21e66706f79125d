"""Failed sign-ins by address: the more of them, the later the answer to the next one.

Only failures are delayed. A peer with valid credentials gets in at once, whatever others at the
same address try; and nobody tries many without waiting. One exception: comparing a token with a
hash takes milliseconds of the event loop's thread, so those of an address with many failures are
limited. Tokens that were valid before need none.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from crosswire.listeners import network_of

__all__ = ["SignIns"]

_FREE: Final = 3
"""A few failures are mistakes: their answers are not delayed."""
_FIRST_S: Final = 0.1
_LONGEST_S: Final = 5.0
_FORGOTTEN_S: Final = 600.0
_ADDRESSES: Final = 10_000
_COMPARISONS: Final = 32
"""Failures of an address until its comparisons with hashes are limited."""
_COMPARED_S: Final = 0.02
"""The least time between two of them then: a quarter of the thread's time, at 5 ms each."""


class _FailedSignIns(NamedTuple):
    failures: int
    last: float
    compared: float
    """When a token of it was last compared with hashes, once that is limited."""


_NONE: Final = _FailedSignIns(0, 0.0, 0.0)


class SignIns:
    """How many sign-ins of each address failed lately; bounded, the oldest are forgotten first."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, _FailedSignIns] = OrderedDict()

    def __len__(self) -> int:
        return len(self._failures)

    def fail(self, address: str, now: float) -> float:
        """Count a failure; gives how many seconds its answer has to wait."""
        network = network_of(address)
        count, last, compared = self._failures.pop(network, _NONE)
        if now - last > _FORGOTTEN_S:
            count = 0
        self._failures[network] = _FailedSignIns(count + 1, now, compared)
        if len(self._failures) > _ADDRESSES:
            self._failures.popitem(last=False)
        if count < _FREE:
            return 0.0
        # An exponent that grew for ever would overflow one day.
        return min(_FIRST_S * 2.0 ** min(count - _FREE, 16), _LONGEST_S)

    def may_compare(self, address: str, now: float) -> bool:
        """Whether a token from this address may be compared with hashes now, which is noted."""
        network = network_of(address)
        failed = self._failures.get(network, _NONE)
        if failed.failures < _COMPARISONS or now - failed.last > _FORGOTTEN_S:
            return True
        if now - failed.compared < _COMPARED_S:
            return False
        self._failures[network] = failed._replace(compared=now)
        return True

    def failures(self, address: str) -> int:
        """How many failures of an address are remembered."""
        return self._failures.get(network_of(address), _NONE).failures
