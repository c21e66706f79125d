"""gold.steps: a step of a message's life; and the steps that other tables are made of.

Steps are rows of a hub's ledger, joined with the facts about their messages: gold.deliveries,
gold.reconciliation, gold.depth and gold.lag are made of them, too.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
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
    "ENDS",
    "EXPIRED",
    "FAILED",
    "GIVEN_BACK",
    "REFUSED",
    "REPLAYED",
    "RETURNED",
    "SETTLED",
    "gold_steps",
    "message_facts",
    "seen_connections",
    "sent_again_as",
    "with_facts",
    "with_messages",
    "with_origins",
]

# The steps in a message's life, as the hub writes them into the ledger.
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

ENDS: Final = (SETTLED, ANSWERED, DEAD, EXPIRED, DROPPED, DAMAGED, FAILED, REPLAYED)
"""The steps with which a message is gone from where it was."""

GIVEN_BACK: Final = "the consumer unsubscribed"
"""Detail of a `returned`: its consumer gave it back by an operation of its protocol."""

COUNTED: Final = "not durable"
"""Detail of an `accepted` of a topic that is not durable: the row stands for the deliveries as
well, and its `count` is their number."""


_SENT_AS: Final = "sent again as "
"""Detail of a `replayed`, before the id of the new message."""


def with_messages(ledger: DataFrame, envelopes: DataFrame) -> DataFrame:
    """The ledger's rows with the columns of `with_origins` and `with_facts`."""
    return with_facts(with_origins(ledger), message_facts(envelopes))


def message_facts(envelopes: DataFrame) -> DataFrame:
    """What the tables need of each envelope, without its payload.

    `intact`: the payload has the checksum taken at the edge; `is_scheduled`: a schedule of the hub
    sent it, no client. The others are the envelope's own.
    """
    return envelopes.select(
        "node",
        "id",
        "time",
        "kind",
        "destination",
        "protocol",
        "connection",
        "crc",
        (F.crc32("payload") == F.col("crc")).alias("intact"),
        F.map_contains_key("native", SCHEDULED).alias("is_scheduled"),
    )


def with_origins(ledger: DataFrame) -> DataFrame:
    """The ledger's rows, with what an `accepted` was made of.

    is_moved    it is a dead letter or a replay: a copy of the message `origin`
    is_answer   it is a provider's answer to a request

    Values that are there already, from an earlier batch of a stream, are kept: the neighbour that
    they came from may not be among the rows any more.
    """
    # The ledger has no column for it, but an order: the hub writes a dead letter right after the
    # step that moved the message, and an answer right before the step that ends its call; both
    # have the same time. The step of a replay names the id that the message was sent again with.
    is_dead = F.col("step") == DEAD
    neighbours = ledger.where(is_dead | (F.col("step") == ANSWERED)).select(
        "node",
        (F.col("seq") + F.when(is_dead, 1).otherwise(-1)).alias("seq"),
        F.col("id").alias("neighbour"),
        F.col("time").alias("neighbour_time"),
        F.col("step").alias("neighbour_step"),
    )
    replays = ledger.where(F.col("step") == REPLAYED).select(
        "node", sent_again_as().alias("id"), F.col("id").alias("replay_of")
    )
    is_accepted = F.col("step") == ACCEPTED
    is_made = F.coalesce(is_accepted & (F.col("neighbour_time") == F.col("time")), F.lit(False))
    is_answer = F.coalesce(is_made & (F.col("neighbour_step") == ANSWERED), F.lit(False))
    is_replay = is_accepted & F.col("replay_of").isNotNull()
    found = {
        "origin": F.when(is_replay, F.col("replay_of")).when(
            is_made & ~is_answer, F.col("neighbour")
        ),
        "is_moved": is_replay | (is_made & ~is_answer),
        "is_answer": is_answer,
    }
    if "origin" in ledger.columns:
        found["origin"] = F.coalesce("origin", found["origin"])
        found["is_moved"] |= F.coalesce("is_moved", F.lit(False))
        found["is_answer"] |= F.coalesce("is_answer", F.lit(False))
    own = [name for name in ledger.columns if name not in found]
    # Numbers first: Spark sorts by these, and most rows have the node in common.
    rows = ledger.join(neighbours, ["seq", "node"], "left")
    return rows.join(replays.where(F.col("id").isNotNull()), ["id", "node"], "left").select(
        *own, *(column.alias(name) for name, column in found.items())
    )


def sent_again_as() -> Column:
    """The new id of a message, from the detail of its step `replayed`; null for other details."""
    digits = F.regexp_extract("detail", f"^{_SENT_AS}([0-9]{{1,18}})$", 1)
    return F.nullif(digits, F.lit("")).cast("bigint")


def with_facts(steps: DataFrame, facts: DataFrame) -> DataFrame:
    """Steps with `message_facts` (null if the lake has no envelope) and `accepted_by`: time,
    destination, protocol and connection of the step that accepted the message."""
    accepted = F.when(
        F.col("step") == ACCEPTED, F.struct("time", "destination", "protocol", "connection")
    )
    of_envelope = facts.select("node", "id", "kind", "crc", "intact", "is_scheduled")
    return steps.join(of_envelope, ["id", "node"], "left").select(
        *steps.columns,
        "kind",
        "crc",
        "intact",
        F.coalesce("is_scheduled", F.lit(False)).alias("is_scheduled"),
        F.max(accepted).over(Window.partitionBy("id", "node")).alias("accepted_by"),
    )


_SEEN_US: Final = 60_000_000
"""How long after the last byte of a connection a step still belongs to it: its address is known
then, also to a stream that has not read on."""


def seen_connections(directions: DataFrame) -> DataFrame:
    """By tapped connection: `client`, the address of who opened it, and the time of its last
    byte."""
    return directions.groupBy("node", "connection").agg(
        F.max("connector_address").alias("client"), F.max("last_time").alias("last_time")
    )


def gold_steps(steps: DataFrame, connections: DataFrame | None) -> DataFrame:
    """The table, from steps with `accepted_by`; `connections` are those that were tapped, with
    `client` and `last_time`."""
    rows = steps.withColumn("client", F.lit(None).cast("string"))
    if connections is not None:
        known = connections.select(
            "node", "connection", F.col("client").alias("address"), "last_time"
        )
        is_seen = F.col("time") < F.col("last_time") + _SEEN_US
        rows = (
            rows.join(known, ["node", "connection"], "left")
            .withColumn("client", F.when(is_seen, F.col("address")))
            .drop("address", "last_time")
        )
    accepted = F.col("accepted_by.time")
    since_us = F.greatest(F.col("time") - accepted, F.lit(0))
    return rows.withColumn("since_accepted_us", F.when(accepted.isNotNull(), since_us))
