"""Histograms of times in buckets that grow with the value, whose counts merge exactly.

The bucket of a value from 16 on is given by the position of its highest bit and the next four bits,
so a bucket is at most 1/16 as wide as its values. Below 16 each value has its own bucket. Adding
two histograms bucket by bucket loses no precision beyond that of the buckets.
"""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

__all__ = ["bucket_of", "highest_of", "percentile"]


def bucket_of(value: Column) -> Column:
    """The bucket of each value; values must not be negative."""
    # `bin` writes a value's bits without leading zeros: exact, where a logarithm is not.
    extra = F.greatest(F.length(F.bin(value)) - 5, F.lit(0)).cast("int")
    return (extra * 16 + F.call_function("shiftright", value.cast("bigint"), extra)).cast("int")


def highest_of(bucket: Column) -> Column:
    """The highest value that falls into a bucket."""
    extra = F.greatest(F.floor(bucket / 16) - 1, F.lit(0)).cast("int")
    first = bucket - extra * 16
    above = F.call_function("shiftleft", (first + 1).cast("bigint"), extra)
    return above - 1


def percentile(histogram: Column, share: float) -> Column:
    """Upper bound of the smallest bucket with at least this share of all counts at or below it.

    `histogram` is an array of (bucket, count), sorted by bucket.
    """
    total = F.aggregate(histogram, F.lit(0).cast("bigint"), lambda sum_, e: sum_ + e["count"])
    wanted = F.ceil(total * share)
    start = F.struct(
        F.lit(0).cast("bigint").alias("below"), F.lit(None).cast("int").alias("bucket")
    )

    def step(state: Column, entry: Column) -> Column:
        below = state["below"] + entry["count"]
        found = F.when(state["bucket"].isNull() & (below >= wanted), entry["bucket"]).otherwise(
            state["bucket"]
        )
        return F.struct(below.alias("below"), found.alias("bucket"))

    return F.aggregate(histogram, start, step, lambda state: highest_of(state["bucket"]))
