"""The histograms of gold.traffic without Spark; `tables/histogram.py` defines the buckets."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from crosswire.pipeline.tables.names import PERCENTILES

__all__ = ["buckets_of", "highest_of", "lowest_of", "percentiles"]


def buckets_of(values: pa.Array) -> pa.Array:
    """The bucket of each value; values must not be negative."""
    positive = pc.max_element_wise(values, 1)
    bits = pc.cast(pc.floor(pc.log2(pc.cast(positive, pa.float64(), safe=False))), pa.int64())
    # A logarithm is rounded: just below a power of two it may already be that of the power.
    above = pc.greater(pc.shift_left(pa.scalar(1, pa.int64()), bits), positive)
    exact = pc.subtract(bits, pc.cast(above, pa.int64()))
    extra = pc.max_element_wise(pc.subtract(exact, 4), 0)
    return pc.add(pc.multiply(extra, 16), pc.shift_right(values, extra))


def lowest_of(bucket: int) -> int:
    """The lowest value that falls into a bucket."""
    extra = max(bucket // 16 - 1, 0)
    return (bucket - extra * 16) << extra


def highest_of(bucket: int) -> int:
    """The highest value that falls into a bucket."""
    return lowest_of(bucket + 1) - 1


def percentiles(counts: Counter[int] | dict[int, int], longest: int | None) -> list[int]:
    """An upper bound for each of PERCENTILES, at most 1/16 too high and never above the longest."""
    total = sum(counts.values())
    found: list[int] = []
    below = 0
    for bucket in sorted(counts):
        below += counts[bucket]
        while len(found) < len(PERCENTILES) and below >= _wanted(total, PERCENTILES[len(found)]):
            bound = highest_of(bucket)
            found.append(bound if longest is None else min(bound, longest))
    return found


def _wanted(total: int, part: float) -> Any:
    # Integers, because 0.99 * 100 is a little more than 99 in floating point.
    return -(-total * round(part * 100) // 100)
