"""gold.depth: a minute × queue: what came, what went, and how many messages were there at its end.

`depth` counts messages that are waiting and those that a consumer holds. Only messages whose
acceptance is in the ledger are counted: one that begins later than the queue shows too few. A
minute in which nothing happened to a queue has no row: its depth is that of the row before.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

__all__ = ["depth"]


def depth(minutes: DataFrame) -> DataFrame:
    """The rows of all minutes that are no opening."""
    so_far = (
        Window.partitionBy("node", "destination")
        .orderBy("minute")
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    counts = ("accepted", "delivered", "settled", "refused", "gone")
    # Opening rows have minute 0, and so come first.
    return (
        minutes.where(F.col("destination").startswith("queue/"))
        .groupBy("is_opening", "minute", "node", "destination")
        .agg(*(F.sum(name).alias(name) for name in counts))
        .withColumn("depth", F.sum(F.col("accepted") - F.col("gone")).over(so_far))
        .where(~F.col("is_opening"))
        .select("minute", "node", "destination", *counts, "depth")
    )
