"""gold.accounting: for each connection and direction, what became of every byte.

    frames + unsynchronized + violations + gaps + encrypted + tail + unread + unknown = seen

`unread` lies behind a violation whose end nobody knows, or is of a direction that can't be read
without the other; `unknown` is of connections whose protocol could not be told. `missing` is the
difference: it is 0, or something is wrong with us.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

__all__ = ["PARTS", "accounting"]

_KEY: Final = ("node", "connection", "direction")
PARTS: Final = (
    "frames",
    "unsynchronized",
    "violations",
    "gaps",
    "encrypted",
    "tail",
    "unread",
    "unknown",
)


def accounting(directions: DataFrame, counts: DataFrame) -> DataFrame:
    """`counts` are `tallies` of them."""
    is_known = F.col("protocol").isNotNull()
    bytes_of = counts.select(
        *_KEY, "frames", "unsynchronized", "encrypted", "gaps_placed", "violations"
    )
    joined = (
        directions.join(bytes_of, list(_KEY), "left")
        .withColumn("unknown", F.when(is_known, F.lit(0)).otherwise(F.col("seen") - F.col("gaps")))
        .withColumn("gaps", F.when(is_known, F.col("gaps_placed")).otherwise(F.col("gaps")))
    )
    parts = [F.coalesce(F.col(part), F.lit(0)).cast("bigint").alias(part) for part in PARTS]
    total: Column = F.lit(0)
    for part in PARTS:
        total = total + F.col(part)
    return joined.select(*_KEY, "protocol", "seen", *parts).withColumn(
        "missing", F.col("seen") - total
    )
