"""The ledger's steps with what is known of their messages, for the tables that are made of them."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from crosswire.envelope import SCHEDULED

__all__ = [
    "ACCEPTED",
    "ANSWERED",
    "COUNTED",
    "DAMAGED",
    "DEAD",
    "DELIVERED",
    "DROPPED",
    "EXPIRED",
    "FAILED",
    "REFUSED",
    "REPLAYED",
    "RETURNED",
    "SETTLED",
    "joined",
    "kept_of",
    "related",
    "with_messages",
]

# What can happen to a message, as the hub writes it.
ACCEPTED: Final = "accepted"
DELIVERED: Final = "delivered"
SETTLED: Final = "settled"
REFUSED: Final = "refused"
RETURNED: Final = "returned"
EXPIRED: Final = "expired"
DEAD: Final = "dead"
ANSWERED: Final = "answered"
FAILED: Final = "failed"
DROPPED: Final = "dropped"
DAMAGED: Final = "damaged"
REPLAYED: Final = "replayed"

COUNTED: Final = "not durable"
"""Detail of an `accepted` that stands for all deliveries too, and says how many."""


def with_messages(ledger: DataFrame, envelopes: DataFrame) -> DataFrame:
    """The ledger's rows, and of their message: `kind`, `crc` (null if the lake does not have it),
    `intact`, `is_scheduled` (nobody sent it: its time had come), `accepted_by` (time, destination,
    protocol, connection), and what `related` says."""
    return joined(related(ledger), kept_of(envelopes))


def kept_of(envelopes: DataFrame) -> DataFrame:
    """What is told of a message without its payload."""
    return envelopes.select(
        "node",
        "id",
        "time",
        "kind",
        "crc",
        (F.crc32("payload") == F.col("crc")).alias("intact"),
        F.map_contains_key("native", SCHEDULED).alias("is_scheduled"),
    )


def related(ledger: DataFrame) -> DataFrame:
    """For an `accepted` whether it `is_moved`: made of another message (`origin`), as dead letters
    and replays are; or `is_answer`, what a provider said to a request.

    What was found out of a row before, and stands in these columns, holds.
    """
    # The hub writes what it moves right behind the step that moved it, and an answer right before
    # the step that ends its call.
    is_move = F.col("step").isin(DEAD, REPLAYED)
    beside = ledger.where(is_move | (F.col("step") == ANSWERED)).select(
        "node",
        (F.col("seq") + F.when(is_move, 1).otherwise(-1)).alias("seq"),
        F.col("id").alias("beside"),
        F.col("time").alias("beside_time"),
        F.col("step").alias("beside_step"),
    )
    is_made = (F.col("step") == ACCEPTED) & (F.col("beside_time") == F.col("time"))
    is_made = F.coalesce(is_made, F.lit(False))
    is_answer = is_made & (F.col("beside_step") == ANSWERED)
    found = {
        "origin": F.when(is_made & ~is_answer, F.col("beside")),
        "is_moved": is_made & ~is_answer,
        "is_answer": F.coalesce(is_answer, F.lit(False)),
    }
    if "origin" in ledger.columns:
        found["origin"] = F.coalesce("origin", found["origin"])
        found["is_moved"] |= F.coalesce("is_moved", F.lit(False))
        found["is_answer"] |= F.coalesce("is_answer", F.lit(False))
    own = [name for name in ledger.columns if name not in found]
    return ledger.join(beside, ["node", "seq"], "left").select(
        *own, *(column.alias(name) for name, column in found.items())
    )


def joined(steps: DataFrame, kept: DataFrame) -> DataFrame:
    """Steps that are `related`, with what is `kept_of` their messages."""
    born = F.when(
        F.col("step") == ACCEPTED, F.struct("time", "destination", "protocol", "connection")
    )
    return steps.join(kept.drop("time"), ["node", "id"], "left").select(
        *steps.columns,
        "kind",
        "crc",
        "intact",
        F.coalesce("is_scheduled", F.lit(False)).alias("is_scheduled"),
        F.max(born).over(Window.partitionBy("node", "id")).alias("accepted_by"),
    )
