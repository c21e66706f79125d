"""Watermarks: up to which time the input is complete, so that rows before it can be final.

Time is always that of the recorded traffic, never this machine's clock: a stream that reads a year
of captures in an hour, or stops for a week, ends with the tables of a batch over the same input.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from crosswire.envelope import MICROSECONDS

__all__ = ["LINGER_US", "PATIENCE_US", "CompleteUpTo", "HubTimes", "settled_before"]

LINGER_US: Final = 60 * MICROSECONDS
"""How much later than a row of one table the matching row of another may be written: messages,
ledger and tap are sealed every few seconds, each on its own."""

PATIENCE_US: Final = 600 * MICROSECONDS
"""How long a stream waits for a table of a hub that lags although all of it was read: either it is
sealed late, or nothing happens there."""


class CompleteUpTo(NamedTuple):
    """The newest time, µs, in the captures and in the taps that earlier batches have read.

    A connection that ended well before it is over: nothing that is read later can belong to it.
    Reassembly and decoding use the watermark of the batches before theirs: their own is known only
    when all of their rows were read.
    """

    captures_us: int = 0
    taps_us: int = 0


class HubTimes(NamedTuple):
    """The time of the newest row, µs, that was read of each table of a hub; 0 if there is none."""

    taps: int = 0
    ledgers: int = 0
    messages: int = 0


def settled_before(times: Mapping[str, HubTimes], lagging: Collection[str]) -> dict[str, int]:
    """By node: all rows of its tables that are older than this were read.

    A table in `lagging` has more input that this batch did not take in, so its newest row is the
    limit. Of a table that was read to its end the limit moves on without it after PATIENCE_US:
    otherwise a hub without traffic on its tapped connections would keep everything open.
    """
    found: dict[str, int] = {}
    for node, newest in times.items():
        read_to = [
            time_us if table in lagging else max(time_us, max(newest) - PATIENCE_US)
            for table, time_us in newest._asdict().items()
            if time_us
        ]
        found[node] = min(read_to) - LINGER_US
    return found
