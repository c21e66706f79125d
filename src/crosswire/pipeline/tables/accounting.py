"""gold.accounting: for each connection and direction, the category of every byte.

    frames + unsynchronized + violations + gaps + encrypted + tail + unread + unknown = seen

`unread` bytes follow a violation of unknown length, or belong to a direction that can't be decoded
without the other one; `unknown` bytes are of connections whose protocol was not recognized.
`missing` is the difference between the two sides of the equation: anything but 0 is a fault of
the pipeline.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Final

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812

from crosswire.errors import BytesMissing
from crosswire.pipeline.tables.names import ACCOUNT_PARTS

__all__ = ["SUMS", "accounting", "check_sums", "summed"]

SUMS: Final = ("seen", *ACCOUNT_PARTS, "missing")
"""The columns that `summed` adds up."""

_KEY: Final = ("node", "connection", "direction")


def accounting(directions: DataFrame, tallies: DataFrame) -> DataFrame:
    """One row for each direction, from silver.directions and the tallies of the same directions."""
    is_known = F.col("protocol").isNotNull()
    bytes_of = tallies.select(
        *_KEY, "frames", "unsynchronized", "encrypted", "gaps_placed", "violations"
    )
    # Gaps are counted where a decoder has placed them among the frames. Nothing is decoded where
    # the protocol is unknown: there the direction's own count of missing bytes is taken, and all
    # other bytes are unknown.
    joined = (
        directions.join(bytes_of, list(_KEY), "left")
        .withColumn("unknown", F.when(is_known, F.lit(0)).otherwise(F.col("seen") - F.col("gaps")))
        .withColumn("gaps", F.when(is_known, F.col("gaps_placed")).otherwise(F.col("gaps")))
    )
    parts = [F.coalesce(F.col(part), F.lit(0)).cast("bigint").alias(part) for part in ACCOUNT_PARTS]
    total = reduce(add, (F.col(part) for part in ACCOUNT_PARTS))
    return joined.select(*_KEY, "protocol", "seen", *parts).withColumn(
        "missing", F.col("seen") - total
    )


def summed(accounts: DataFrame, *keys: str) -> DataFrame:
    """SUMS by protocol and `keys`, and in `worst` the direction with the most missing bytes."""
    worst = F.max_by(F.struct("connection", "direction", "seen", "missing"), F.abs("missing"))
    return accounts.groupBy("protocol", *keys).agg(
        *(F.sum(name).alias(name) for name in SUMS), worst.alias("worst")
    )


def check_sums(row: Row) -> dict[str, int]:
    """The SUMS of a row of `summed`. Raises BytesMissing if a direction does not add up.

    Directions are looked at one by one: a surplus in one could hide a deficit in another.
    """
    worst = row.worst
    if worst.missing:
        raise BytesMissing(
            f"{worst.missing} of {worst.seen} bytes are not accounted for in connection "
            f"{worst.connection}, {worst.direction}"
        )
    return {name: row[name] for name in SUMS}
