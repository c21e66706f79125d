"""gold.lag: a minute × named subscription: how much older its last message is than the newest.

`position` is the newest message that it was given so far, `newest` the newest one that its topics
accepted; `lag_us` is the time between the two, 0 if the subscription has the newest. Its topics are
those of which it was given messages: the ledger does not record filters. So a topic is known from
the first delivery on, and a filter that lets nothing pass looks like a lag.

A subscription has a row for each minute, from its first delivery on, in which it was given
something or its topics accepted something. One that has stopped has rows, too, with a growing lag.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

__all__ = ["lag"]


def lag(minutes: DataFrame) -> DataFrame:
    """The rows of all minutes that are no opening."""
    named = F.col("subscription") != ""
    own = minutes.where(named)
    reads = own.groupBy("node", "subscription", "destination").agg(F.min("began").alias("began"))
    of_topics = (
        minutes.where(~named)
        .select("is_opening", "minute", "node", "destination", "accepted", "newest")
        .join(reads.where("began IS NOT NULL"), ["node", "destination"])
        .withColumn("is_shown", F.col("minute") >= F.col("began"))
        .withColumn("accepted", F.when(F.col("is_shown"), F.col("accepted")).otherwise(0))
        .drop("destination", "began")
    )
    of_subscriptions = own.select(
        *("is_opening", "minute", "node", "subscription", "delivered", "settled", "refused"),
        "position",
        F.lit(True).alias("is_shown"),
    )
    so_far = (
        Window.partitionBy("node", "subscription")
        .orderBy("minute")
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    counts = ("accepted", "delivered", "settled", "refused")
    rows = (
        of_topics.unionByName(of_subscriptions, allowMissingColumns=True)
        .groupBy("is_opening", "minute", "node", "subscription")
        .agg(
            *(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in counts),
            F.max("newest").alias("newest"),
            F.max("position").alias("position"),
            F.max("is_shown").alias("is_shown"),
        )
        .withColumn("newest", F.max("newest").over(so_far))
        .withColumn("position", F.max("position").over(so_far))
        .where(~F.col("is_opening") & F.col("is_shown") & F.col("position").isNotNull())
    )
    is_late = F.col("newest.id") > F.col("position.id")
    # Not negative, even if the hub's clock was set back.
    late_us = F.greatest(F.col("newest.time") - F.col("position.time"), F.lit(0))
    return rows.select(
        "minute",
        "node",
        "subscription",
        *counts,
        F.col("position.id").alias("position"),
        F.col("newest.id").alias("newest"),
        F.when(is_late, late_us).otherwise(0).cast("bigint").alias("lag_us"),
    )
