"""gold.accounting: what became of every byte and of every packet.

For each connection and direction, the category of every byte:

    frames + unsynchronized + violations + gaps + encrypted + tail + unread + unknown = seen

`unread` bytes follow a violation of unknown length, or belong to a direction that can't be decoded
without the other one; `unknown` bytes are of connections whose protocol was not recognized.
`missing` is the difference between the two sides of the equation: anything but 0 is a fault of
the pipeline.

`category` is `refused connection` in a direction that answered the opening of a connection by a
reset. Other rows with a category are about the packets of all captures: how many `packets`, with
how many captured `bytes`, were read or left out for which reason (`capture.packet_counts`). They
have no connection and none of the bytes above.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Final

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.capture.packet_counts import PacketCounts
from crosswire.errors import BytesMissing
from crosswire.lake.schemas import BACKWARD, RESET
from crosswire.pipeline.tables.names import ACCOUNT_PARTS

__all__ = ["REFUSED_CONNECTION", "SUMS", "accounting", "check_sums", "packet_rows", "summed"]

REFUSED_CONNECTION: Final = "refused connection"

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
    # Nothing of the acceptor was captured but the reset, so that it is late.
    is_refused = (F.col("direction") == BACKWARD) & F.col("opened") & F.col("late")
    is_refused &= (F.col("seen") == 0) & (F.col("ended") == RESET)
    chosen = joined.select(
        *_KEY, "protocol", "seen", *parts, F.when(is_refused, REFUSED_CONNECTION).alias("category")
    )
    nothing = F.lit(None).cast("bigint")
    return chosen.withColumns(
        {"missing": F.col("seen") - total, "packets": nothing, "bytes": nothing}
    )


def packet_rows(spark: SparkSession, node: str, counts: PacketCounts) -> DataFrame:
    """The rows about the packets of captures, whose connections have this node."""
    nothing = dict.fromkeys(SUMS, F.lit(0).cast("bigint"))
    rows = spark.createDataFrame(counts.rows(), "category string, packets bigint, bytes bigint")
    names = ("connection", "direction", "protocol")
    return rows.withColumns(
        {"node": F.lit(node), **dict.fromkeys(names, F.lit(None).cast("string")), **nothing}
    )


def summed(accounts: DataFrame, *keys: str) -> DataFrame:
    """SUMS of directions by protocol and `keys`, in `worst` the direction with the most missing
    bytes, and in `refused` the number of refused connections."""
    worst = F.max_by(F.struct("connection", "direction", "seen", "missing"), F.abs("missing"))
    return (
        accounts.where(F.col("connection").isNotNull())
        .groupBy("protocol", *keys)
        .agg(
            *(F.sum(name).alias(name) for name in SUMS),
            worst.alias("worst"),
            F.count_if(F.col("category") == REFUSED_CONNECTION).alias("refused"),
        )
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
