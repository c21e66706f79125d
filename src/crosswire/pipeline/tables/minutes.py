"""Minutes: what the ledger records of each destination and subscription, minute by minute, for
gold.depth and gold.lag.

Every column is a sum, a minimum or a maximum, so minutes that were counted separately can be
combined exactly, and minutes that no table shows any more can be collapsed into one *opening* row:
what had happened before. That is all that a stream has to carry of the ledger for these tables.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from crosswire.pipeline.tables.steps import (
    ACCEPTED,
    DELIVERED,
    ENDS,
    REFUSED,
    SETTLED,
)

__all__ = ["MINUTE_COLUMNS", "combined", "minutes", "opening", "with_leaving"]

_MINUTE_US: Final = 60_000_000
_KEY: Final = ("is_opening", "minute", "node", "destination", "subscription")
_SUMS: Final = ("accepted", "delivered", "settled", "refused", "gone")
_MESSAGE: Final = "struct<id:bigint,time:bigint>"

MINUTE_COLUMNS: Final = {
    "is_opening": "boolean",
    "minute": "bigint",
    "node": "string",
    "destination": "string",
    "subscription": "string",
    **dict.fromkeys(_SUMS, "bigint"),
    "newest": _MESSAGE,
    "position": _MESSAGE,
    "began": "bigint",
}
"""The columns of minutes, and their types."""


def with_leaving(steps: DataFrame) -> DataFrame:
    """Steps with `leaves`: the message is gone from its queue with this step.

    All steps of each message must be there, as `steps.with_facts` gives them. A message leaves
    once, with its first end, whatever is recorded after it; and one that was accepted before the
    ledger begins was never counted as waiting.
    """
    is_end = F.col("step").isin(*ENDS)
    first = F.min(F.when(is_end, F.col("seq"))).over(Window.partitionBy("id", "node"))
    leaves = is_end & (F.col("seq") == first) & F.col("accepted_by").isNotNull()
    return steps.withColumn("leaves", F.coalesce(leaves, F.lit(False)))


def minutes(steps: DataFrame) -> DataFrame:
    """The minutes of some steps `with_leaving`.

    newest     the newest message that was accepted
    position   the newest message that was delivered
    began      the first minute in which the subscription was given something
    """
    step, named = F.col("step"), F.col("subscription") != ""

    def count(name: str) -> Column:
        return F.sum(F.when(step == name, F.col("count")).otherwise(0)).alias(name)

    is_delivered = (step == DELIVERED) & named
    given = F.struct("id", F.coalesce(F.col("accepted_by.time"), F.col("time")).alias("time"))
    # Answers are accepted too, but by no queue and no topic.
    return (
        steps.where(~F.col("is_answer"))
        .withColumn("minute", F.col("time") - F.pmod("time", F.lit(_MINUTE_US)))
        .withColumn("is_opening", F.lit(False))
        .groupBy(*_KEY)
        .agg(
            F.count_if(step == ACCEPTED).alias(ACCEPTED),
            *(count(name) for name in (DELIVERED, SETTLED, REFUSED)),
            F.count_if("leaves").alias("gone"),
            F.max(F.when(step == ACCEPTED, F.struct("id", "time"))).alias("newest"),
            F.max(F.when(is_delivered, given)).alias("position"),
            F.min(F.when(is_delivered, F.col("minute"))).alias("began"),
        )
    )


def combined(parts: DataFrame) -> DataFrame:
    """Minutes that were counted separately, added up."""
    return parts.groupBy(*_KEY).agg(
        *(F.sum(name).alias(name) for name in _SUMS),
        F.max("newest").alias("newest"),
        F.max("position").alias("position"),
        F.min("began").alias("began"),
    )


def opening(rows: DataFrame, is_past: Column) -> DataFrame:
    """Minutes of which those that are past are one opening row for each key."""
    minute = F.when(is_past, F.lit(0)).otherwise(F.col("minute")).cast("bigint")
    marked = rows.withColumn("is_opening", F.col("is_opening") | is_past)
    return combined(marked.withColumn("minute", minute))
