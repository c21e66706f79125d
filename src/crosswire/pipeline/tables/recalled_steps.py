"""Steps made of rows of gold.deliveries, for messages whose ledger rows are no longer in the lake.

A stream calls a settled message back when a new step of it arrives, and makes its rows again. Where
retention has removed the earlier steps, the row itself is all that is known of them. Steps are made
of it that give the same row again, so that the new step adds to it and nothing is lost.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from crosswire.pipeline.tables.steps import (
    ACCEPTED,
    DELIVERED,
    ENDS,
    GIVEN_BACK,
    REFUSED,
    RETURNED,
    SETTLED,
)

__all__ = ["recalled_facts", "recalled_steps"]

_MOST_RETURNS: Final = 1_000
"""Of a row: each becomes a step."""


def recalled_facts(rows: DataFrame) -> DataFrame:
    """`message_facts` of the messages of these rows, as far as the rows have them."""
    return rows.groupBy("node", "id").agg(
        F.min("accepted").alias("time"),
        F.max("kind").alias("kind"),
        F.max("destination").alias("destination"),
        F.max("producer_protocol").alias("protocol"),
        F.max("producer").alias("connection"),
        F.lit(None).cast("bigint").alias("crc"),
        F.min("intact").alias("intact"),
        F.lit(False).alias("is_scheduled"),
    )


def recalled_steps(rows: DataFrame) -> DataFrame:
    """Steps, with the columns of the ledger and of `with_origins`, from which `hops` makes these
    rows again. Their `seq` is below 0: before all steps of the ledger."""
    accepted = rows.groupBy("node", "id").agg(
        F.lit(-9).cast("bigint").alias("seq"),
        F.min("accepted").alias("time"),
        F.lit(ACCEPTED).alias("step"),
        F.max("destination").alias("destination"),
        F.max("producer_protocol").alias("protocol"),
        F.max("producer").alias("connection"),
        F.lit(0).alias("attempt"),
        F.lit("").alias("detail"),
        F.lit(1).cast("bigint").alias("count"),
        F.lit("").alias("subscription"),
        F.max("origin").alias("origin"),
    )
    others = rows.where(F.col("hop").isNotNull()).select("*", F.explode(_of_hop()).alias("made"))
    is_named = F.col("hop").startswith("@")
    is_receiver = F.col("destination").startswith("topic/") & ~is_named
    steps = others.select(
        "node",
        "id",
        "made.seq",
        "made.time",
        "made.step",
        "destination",
        "protocol",
        # A topic's receiver without a name is its connection.
        F.when(is_receiver, F.col("hop")).otherwise(F.col("connection")).alias("connection"),
        F.col("attempts").cast("int").alias("attempt"),
        "made.detail",
        "made.count",
        F.when(is_named, F.substring("hop", 2, 1 << 20)).otherwise("").alias("subscription"),
        "origin",
    )
    return (
        accepted.where(F.col("time").isNotNull())
        .unionByName(steps)
        .withColumn("principal", F.lit(""))
        .withColumn("is_moved", (F.col("step") == ACCEPTED) & F.col("origin").isNotNull())
        .withColumn("is_answer", F.lit(False))
    )


def _of_hop() -> Column:
    """The steps after `accepted` that a row stands for."""
    outcome, detail = F.col("outcome"), F.coalesce("detail", F.lit(""))
    time = F.coalesce("delivered", "ended", "accepted")
    # A row without an end has the outcome of its last step.
    delivered = _step(
        DELIVERED, F.when(outcome == DELIVERED, -2).otherwise(-6), time, detail, "attempts"
    )
    refused = _step(REFUSED, F.when(outcome == REFUSED, -2).otherwise(-5), time, detail, "refusals")
    # What a receiver gave back is no double; the row has no count of these.
    given_back = F.when(F.col("doubled"), detail).otherwise(GIVEN_BACK)
    returned = _step(RETURNED, _last_if(RETURNED, -4), time, given_back, F.lit(1))
    returns = F.array_repeat(returned, F.least("returns", F.lit(_MOST_RETURNS)).cast("int"))
    # Settled twice, if that is why it is doubled.
    again = F.col("doubled") & (F.col("attempts") - F.col("refusals") <= 1)
    count = F.when(again & (outcome == SETTLED), 2).otherwise(1)
    end = _step(outcome, F.lit(-1), F.coalesce("ended", time), detail, count)
    return F.concat(
        _if(F.col("attempts") > 0, delivered),
        _if(F.col("refusals") > 0, refused),
        returns,
        _if(outcome.isin(*ENDS), end),
    )


def _last_if(outcome: str, seq: int) -> Column:
    return F.when(F.col("outcome") == outcome, -2).otherwise(seq)


def _step(
    name: str | Column, seq: Column, time: Column, detail: Column, count: str | Column
) -> Column:
    return F.struct(
        seq.cast("bigint").alias("seq"),
        time.alias("time"),
        (F.lit(name) if isinstance(name, str) else name).alias("step"),
        F.coalesce(detail, F.lit("")).alias("detail"),
        (F.col(count) if isinstance(count, str) else count).cast("bigint").alias("count"),
    )


def _if(condition: Column, step: Column) -> Column:
    """The step in an array of its own, or none."""
    return F.filter(F.array(F.when(condition, step)), lambda each: each.isNotNull())
