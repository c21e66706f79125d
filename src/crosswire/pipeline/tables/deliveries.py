"""gold.deliveries: a message and a hop: accepted, delivered, settled; how often; what went wrong.

A `hop` is one way out of the hub: a queue, a service, or one receiver of a topic (its connection:
the ledger does not name subscriptions; of a Relink link that went on over another connection, the
one that the message was given to). Each message has a row for each of its hops, or one with
hop null where nothing has happened to it yet. `connection` is who was given it last.

Answers have none of their own: they are how their request's hop ended.

`outcome` is how it ended there: `settled`, `answered`, `delivered` (a topic's receiver that settles
nothing), `dead`, `expired`, `dropped`, `damaged`, `failed` (a call), `replayed` (a dead letter that
was sent again), `returned` and `refused` (by a topic's receiver that another one followed),
`unclaimed` (a topic that nobody listened to). `waiting` (in a queue or for a provider) and `held`
(by a receiver) are open: they may still change.

late     from being accepted to being settled or answered (where nobody settles: to the delivery) it
         took longer than the threshold; or it is open, and was accepted longer ago than that when
         the ledger's newest row of its node was written. What ended in another way is not late,
         nor is a dead letter that waits for somebody to look at it.
lost     nobody will ever have it, and nobody wanted that: it was damaged, dropped because its queue
         was full, or taken by retention before its receiver came; or a receiver that settles
         nothing was given it, and its connection, tapped in full, never carried it. Dead letters
         are kept, and what expired or was purged was meant to go: they are not lost.
doubled  somebody may have done it twice: it was handed out again although who had it before did not
         refuse it (it left, or its lease ran out), or it was settled twice, or the wire shows it
         more often than the ledger.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from crosswire.pipeline.tables.reconciliation import (
    EQUAL,
    IN,
    MISSING_IN_LEDGER,
    MISSING_ON_WIRE,
    OUT,
)
from crosswire.pipeline.tables.steps import (
    ACCEPTED,
    ANSWERED,
    COUNTED,
    DAMAGED,
    DEAD,
    DELIVERED,
    DROPPED,
    EXPIRED,
    FAILED,
    REFUSED,
    REPLAYED,
    RETURNED,
    SETTLED,
    with_messages,
)

__all__ = ["LATE_US", "deliveries", "hops"]

LATE_US: Final = 5_000_000

_HOP: Final = ("node", "id", "hop")
_RECEIVER: Final = ("node", "id", "connection")
_PURGED: Final = "purged"
_RETENTION: Final = "retention"
_ENDS: Final = (SETTLED, ANSWERED, DEAD, EXPIRED, DROPPED, DAMAGED, FAILED, REPLAYED)
_OPEN: Final = ("waiting", "held")
_DEAD_LETTERS: Final = "^queue/.+/dead$"


def deliveries(
    ledger: DataFrame,
    envelopes: DataFrame,
    reconciled: DataFrame | None = None,
    *,
    late_us: int = LATE_US,
) -> DataFrame:
    """From the lake's `ledger` and `messages`, and gold.reconciliation where there is a wire."""
    newest = ledger.groupBy("node").agg(F.max("time").alias("newest"))
    steps = with_messages(ledger, envelopes)
    return hops(steps.join(F.broadcast(newest), "node"), reconciled, late_us=late_us)


def hops(steps: DataFrame, reconciled: DataFrame | None, *, late_us: int) -> DataFrame:
    """From all steps of messages `with_messages`, and `newest`: the time of the newest row of their
    node."""
    steps = steps.where(~F.col("is_answer"))
    resumed = _resumed(steps)
    found = _hops(_placed(steps, resumed)).withColumn("outcome", _outcome())
    found = _with_wire(found, reconciled, resumed)
    return found.withColumn("is_open", F.col("outcome").isin(*_OPEN)).select(
        "node",
        "id",
        "origin",
        "kind",
        "destination",
        F.col("producer.protocol").alias("producer_protocol"),
        F.col("producer.connection").alias("producer"),
        "hop",
        "protocol",
        F.col("holder").alias("connection"),
        "sent",
        F.col("producer.time").alias("accepted"),
        "delivered",
        F.when(F.col("outcome").isin(SETTLED, ANSWERED), F.col("ended")).alias("settled"),
        "ended",
        "attempts",
        "refusals",
        "returns",
        "outcome",
        "detail",
        _taken().alias("latency_us"),
        _is_late(late_us).alias("late"),
        _is_lost().alias("lost"),
        _is_doubled().alias("doubled"),
        "on_wire",
        "same_payload",
        "intact",
        "is_open",
    )


def _resumed(steps: DataFrame) -> DataFrame:
    """Connections on which a Relink link settled what it had been given on another one, `giver`.

    Who was given a message and says no more of it goes with who was not given it and does: the n-th
    with the n-th. Which of several links it was can't be told, but how they fared is the same.
    """
    given = F.col("step") == DELIVERED
    receivers = (
        steps.where((F.col("protocol") == "relink") & F.col("destination").startswith("topic/"))
        .where((F.col("step") != ACCEPTED) & (F.col("connection") != ""))
        .groupBy(*_RECEIVER)
        .agg(
            F.max(given).alias("is_given"),
            F.max(~given).alias("is_told_of"),
            F.min("seq").alias("first"),
        )
        .where(F.col("is_given") != F.col("is_told_of"))
    )
    nth = F.row_number().over(Window.partitionBy("node", "id", "is_given").orderBy("first"))
    receivers = receivers.withColumn("nth", nth)
    givers = receivers.where("is_given").select(
        "node", "id", "nth", F.col("connection").alias("giver")
    )
    heirs = receivers.where("NOT is_given").select(*_RECEIVER, "nth")
    return heirs.join(givers, ["node", "id", "nth"]).drop("nth")


def _placed(steps: DataFrame, resumed: DataFrame) -> DataFrame:
    """Each step with the hop it belongs to: null for `accepted`, which belongs to all."""
    steps = steps.join(resumed, list(_RECEIVER), "left")
    topic = F.col("destination").startswith("topic/")
    # Dead letters, retention and damage name nobody: it was the last who had the message.
    receiver = F.coalesce("giver", F.nullif("connection", F.lit("")))
    before = F.last(receiver, ignorenulls=True).over(
        Window.partitionBy("node", "id")
        .orderBy("seq")
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    hop = F.when(topic, before).otherwise(F.col("destination"))
    is_accepted = F.col("step") == ACCEPTED
    return steps.withColumn("hop", F.when(~is_accepted, hop))


def _hops(steps: DataFrame) -> DataFrame:
    """A row for every message and hop; messages without one get one."""
    step = F.col("step")

    def count(name: str) -> Column:
        return F.sum(F.when(step == name, F.col("count")).otherwise(0))

    is_end = step.isin(*_ENDS)
    last_end = F.max(F.when(is_end, F.struct("seq", "step", "time", "detail")))
    last_step = F.max(F.struct("seq", "step", "time", "detail"))
    moved = (
        steps.where(step != ACCEPTED)
        .groupBy(*_HOP)
        .agg(
            F.max_by("protocol", F.when(step == DELIVERED, F.col("seq"))).alias("protocol"),
            F.max_by("connection", F.when(step == DELIVERED, F.col("seq"))).alias("holder"),
            F.min(F.when(step == DELIVERED, F.col("time"))).alias("delivered"),
            count(DELIVERED).alias("attempts"),
            count(REFUSED).alias("refusals"),
            count(RETURNED).alias("returns"),
            count(SETTLED).alias("settlements"),
            last_end.alias("end"),
            last_step.alias("last"),
            F.first("destination").alias("step_destination"),
        )
    )
    messages = steps.groupBy("node", "id").agg(
        F.first("accepted_by").alias("producer"),
        F.first("kind").alias("kind"),
        F.max("intact").alias("intact"),
        F.max("origin").alias("origin"),
        F.max("newest").alias("newest"),
        F.sum(F.when((step == ACCEPTED) & (F.col("detail") == COUNTED), F.col("count"))).alias(
            "counted"
        ),
    )
    joined = messages.join(moved, ["node", "id"], "left")
    return (
        joined.withColumn(
            "destination", F.coalesce(F.col("producer.destination"), F.col("step_destination"))
        )
        .withColumn("attempts", F.coalesce("attempts", "counted", F.lit(0)).cast("bigint"))
        .withColumn("refusals", F.coalesce("refusals", F.lit(0)).cast("bigint"))
        .withColumn("returns", F.coalesce("returns", F.lit(0)).cast("bigint"))
        .withColumn("ended", F.col("end.time"))
        .withColumn("detail", F.nullif(F.coalesce("end.detail", "last.detail"), F.lit("")))
    )


def _outcome() -> Column:
    topic = F.col("destination").startswith("topic/")
    last = F.col("last.step")
    return (
        F.when(F.col("end").isNotNull(), F.col("end.step"))
        .when(F.col("counted") > 0, DELIVERED)
        .when(last.isNull() & topic, "unclaimed")
        .when(last.isNull(), "waiting")
        .when(topic, last)
        .when(last == DELIVERED, "held")
        .otherwise("waiting")
    )


def _with_wire(hops: DataFrame, reconciled: DataFrame | None, resumed: DataFrame) -> DataFrame:
    """`sent`: when its bytes came in; `on_wire`: how many deliveries the wire shows, null if it was
    not looked at; `unseen`: how many it should have shown."""
    if reconciled is None:
        nothing = {
            "sent": "bigint",
            "on_wire": "bigint",
            "unseen": "bigint",
            "unnoted": "bigint",
            "same_payload": "boolean",
        }
        for name, kind in nothing.items():
            hops = hops.withColumn(name, F.lit(None).cast(kind))
        return hops
    came = (
        reconciled.where((F.col("way") == IN) & (F.col("verdict") == EQUAL))
        .groupBy("node", "id")
        .agg(F.min("wire_time").alias("sent"))
    )
    verdict = F.col("verdict")
    receiver = F.coalesce("giver", "connection")
    topic = F.col("destination").startswith("topic/")
    went = (
        reconciled.where((F.col("way") == OUT) & F.col("id").isNotNull())
        .join(resumed, list(_RECEIVER), "left")
        .withColumn("hop", F.when(topic, receiver).otherwise(F.col("destination")))
        .groupBy(*_HOP)
        .agg(
            F.count_if(verdict.isin(EQUAL, MISSING_IN_LEDGER)).alias("on_wire"),
            F.count_if(verdict == MISSING_ON_WIRE).alias("unseen"),
            F.count_if(verdict == MISSING_IN_LEDGER).alias("unnoted"),
            F.min("same_payload").alias("same_payload"),
        )
    )
    return hops.join(came, ["node", "id"], "left").join(went, list(_HOP), "left")


# --------------------------------------------------------------------------------------- verdicts


def _arrival() -> Column:
    """When the receiver had it, as far as the hub can know."""
    outcome = F.col("outcome")
    return F.when(outcome.isin(SETTLED, ANSWERED), F.col("ended")).when(
        outcome == DELIVERED, F.col("delivered")
    )


def _taken() -> Column:
    taken = _arrival() - F.col("producer.time")
    return F.when(taken < 0, 0).otherwise(taken)


def _is_late(late_us: int) -> Column:
    is_awaited = F.col("is_open") & ~F.col("destination").rlike(_DEAD_LETTERS)
    waits = is_awaited & (F.col("newest") - F.col("producer.time") > late_us)
    return F.coalesce(_taken() > late_us, F.lit(False)) | F.coalesce(waits, F.lit(False))


def _is_lost() -> Column:
    outcome, detail = F.col("outcome"), F.coalesce("detail", F.lit(""))
    return (
        (outcome == DAMAGED)
        | ((outcome == DROPPED) & (detail != _PURGED))
        | ((outcome == EXPIRED) & (detail == _RETENTION))
        | ((outcome == DELIVERED) & F.coalesce(F.col("unseen") > 0, F.lit(False)))
    )


def _is_doubled() -> Column:
    again = F.col("counted").isNull() & (F.col("attempts") - F.col("refusals") > 1)
    return (
        again
        | F.coalesce(F.col("settlements") > 1, F.lit(False))
        | F.coalesce(F.col("unnoted") > 0, F.lit(False))
    )
