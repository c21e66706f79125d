"""Principals: as whom each connection of a hub signed in.

The wire has tokens, which no table shows; the ledger has names. The row of the ledger that comes
first on a connection names its principal for all of the connection from the minute before on. What
is older has none: a later row must not change rows that a stream has written.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

__all__ = [
    "MINUTE_US",
    "combined",
    "is_decided",
    "minute_of",
    "principals",
    "with_principal",
]

MINUTE_US: Final = 60_000_000
_CONNECTION: Final = ("node", "connection")


def minute_of(time: Column) -> Column:
    """The beginning of the minute of a time, µs."""
    return time - F.pmod(time, F.lit(MINUTE_US))


def principals(ledger: DataFrame) -> DataFrame:
    """By connection: `principal` (empty if it did not sign in), and number and time of the row of
    the ledger that names it."""
    named = ledger.where(F.col("connection") != "")
    return combined(named.select(*_CONNECTION, "principal", "seq", F.col("time").alias("named_at")))


def combined(parts: DataFrame) -> DataFrame:
    """Principals that were found separately: the first row of a connection counts."""
    first = F.min(F.struct("seq", "named_at", "principal")).alias("first")
    return parts.groupBy(*_CONNECTION).agg(first).select(*_CONNECTION, "first.*")


def with_principal(rows: DataFrame, known: DataFrame | None, minute: Column) -> DataFrame:
    """Rows of connections with their `principal`; null if nobody knows it by the next minute."""
    if known is None:
        return rows.withColumn("principal", F.lit(None).cast("string"))
    names = known.select(*_CONNECTION, "named_at", F.col("principal").alias("signed_in_as"))
    is_known = F.col("named_at") < minute + 2 * MINUTE_US
    return (
        rows.join(names, list(_CONNECTION), "left")
        .withColumn("principal", F.when(is_known, F.nullif("signed_in_as", F.lit(""))))
        .drop("named_at", "signed_in_as")
    )


def is_decided(rows: DataFrame, known: DataFrame, minute: Column, settled: Column) -> DataFrame:
    """Rows with `decided`: no row of the ledger that is still to be read can name their principal.

    All rows of the ledger that are not a minute younger than `settled` were read.
    """
    names = known.select(*_CONNECTION, F.lit(True).alias("is_named"))
    decided = F.coalesce("is_named", minute + MINUTE_US < settled)
    return (
        rows.join(names, list(_CONNECTION), "left").withColumn("decided", decided).drop("is_named")
    )
