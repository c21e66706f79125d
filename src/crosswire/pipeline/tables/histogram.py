"""Histograms of times in buckets that grow with the value, whose counts merge exactly.

Bucket b of a value v ≥ 16: the place of its highest bit and the four bits behind it, so that a
bucket is at most 1/16 as wide as its values. Below 16 each value has its own. Two histograms are
added bucket by bucket, and nothing is lost that was not lost when the values were put in.
"""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

__all__ = ["PERCENTILES", "bucket_of", "highest_of", "percentile"]

PERCENTILES = (0.5, 0.9, 0.95, 0.99)


def bucket_of(value: Column) -> Column:
    """The bucket of a value that is not negative."""
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
