"""The ledger's steps with what is known of their messages, for the tables that are made of them."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

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
    `intact`, `accepted_by` (time, destination, protocol, connection), and for an `accepted`
    whether it `is_moved`: made of another message (`origin`), as dead letters and replays are; or
    `is_answer`, what a provider said to a request."""
    kept = envelopes.select(
        "node",
        "id",
        "kind",
        "crc",
        (F.crc32("payload") == F.col("crc")).alias("intact"),
    )
    # The hub writes what it moves right behind the step that moved it, and an answer right before
    # the step that ends its call.
    is_move = F.col("step").isin(DEAD, REPLAYED)
    beside = ledger.where(is_move | (F.col("step") == ANSWERED)).select(
        "node",
        (F.col("seq") + F.when(is_move, 1).otherwise(-1)).alias("seq"),
        F.col("id").alias("origin"),
        F.col("time").alias("origin_time"),
        F.col("step").alias("origin_step"),
    )
    is_accepted = F.col("step") == ACCEPTED
    born = F.when(is_accepted, F.struct("time", "destination", "protocol", "connection"))
    is_made = is_accepted & F.coalesce(F.col("origin_time") == F.col("time"), F.lit(False))
    is_answer = is_made & (F.col("origin_step") == ANSWERED)
    return (
        ledger.join(beside, ["node", "seq"], "left")
        .join(kept, ["node", "id"], "left")
        .select(
            *ledger.columns,
            "kind",
            "crc",
            "intact",
            F.max(born).over(Window.partitionBy("node", "id")).alias("accepted_by"),
            F.when(is_made & ~is_answer, F.col("origin")).alias("origin"),
            (is_made & ~is_answer).alias("is_moved"),
            F.coalesce(is_answer, F.lit(False)).alias("is_answer"),
        )
    )
