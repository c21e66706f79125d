"""gold.deliveries: a message and a hop: accepted, delivered, settled; attempts; faults.

A `hop` is one exit of the hub: a queue, a service, or one receiver of a topic: a named subscription
(`@NAME`), or a connection; of a Relink link that was resumed over another connection, the one to
which the message was delivered. A message has a row for each of its hops, or one with hop null
while it has none. `connection` is the last one it was delivered to.

Answers have no rows: they are the outcome of their request.

`outcome` is how it ended there: `settled`, `answered`, `delivered` (a topic's receiver that settles
nothing), `dead`, `expired`, `dropped`, `damaged`, `failed` (a call), `replayed` (a dead letter that
was sent again), `returned` and `refused` (by a topic's receiver that another one followed),
`unclaimed` (a topic without subscribers). `waiting` (in a queue or for a provider) and `held`
(by a receiver) are open: they may still change. `unknown`: the ledger has nothing of it.

`reason` is why a row is uncertain: rows of the ledger are missing that could belong to it. Such a
row shows what is known, and is never lost or doubled. A message of which only the envelope is
there, and each range of the ledger that is missing (with id null), has a row with the outcome
`unknown`.

late     the time from accepted to settled or answered (to delivered, where nothing is settled) was
         above the threshold; or it is open, and was accepted longer ago than that when the newest
         row of its node's ledger was written. Messages that ended in another way are not late, nor
         are dead letters, which wait for a person.
lost     it was never received, and nobody intended that: it was damaged, dropped because its queue
         was full, or removed by retention before its receiver came; or it was delivered to a
         receiver that settles nothing, and the connection, tapped in full, never carried it. Dead
         letters are kept, and expired or purged messages are removed on purpose: they are not lost.
doubled  it may have been processed twice: it was delivered again although the receiver before did
         not refuse it (it disconnected, or its lease ran out) nor give it back by unsubscribing, or
         it was settled twice, or the wire shows it more often than the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from crosswire.pipeline.decode.meanings.contract import RESPONSE
from crosswire.pipeline.tables.missing_rows import ALWAYS_US, MissingLakeRows, reason_between
from crosswire.pipeline.tables.names import EQUAL, MISSING_IN_LEDGER, MISSING_ON_WIRE
from crosswire.pipeline.tables.reconciliation import IN, OUT
from crosswire.pipeline.tables.steps import (
    ACCEPTED,
    ANSWERED,
    COUNTED,
    DAMAGED,
    DELIVERED,
    DROPPED,
    ENDS,
    EXPIRED,
    GIVEN_BACK,
    REFUSED,
    RETURNED,
    SETTLED,
    message_facts,
)

__all__ = ["LATE_US", "UNKNOWN", "deliveries", "hops", "missing_ranges", "unrecorded"]

LATE_US: Final = 5_000_000

UNKNOWN: Final = "unknown"
"""Outcome of what the ledger has nothing of."""

# Ids first: these are the keys by which Spark sorts, and the other columns are texts that most rows
# have in common.
_MESSAGE: Final = ("id", "node")
_HOP: Final = (*_MESSAGE, "hop")
_RECEIVER: Final = (*_MESSAGE, "connection")
_PURGED: Final = "purged"
_RETENTION: Final = "retention"
_OPEN: Final = ("waiting", "held")
_NO_ACCEPTANCE: Final = "the ledger does not have its acceptance: it begins later"
_ENDS_BEFORE: Final = "the ledger ends before it"
_NO_STEP: Final = "the ledger has no step of it"
_DEAD_LETTERS: Final = "^queue/.+/dead$"


def deliveries(
    steps: DataFrame,
    envelopes: DataFrame,
    reconciled: DataFrame | None = None,
    *,
    late_us: int = LATE_US,
    missing: Iterable[MissingLakeRows] = (),
) -> DataFrame:
    """The whole table, from the steps of a ledger `with_messages`, and the `messages` (envelopes)
    of a lake, of which rows may be `missing`; and from gold.reconciliation if the hub's connections
    were tapped. `late_us` is the threshold of `late`."""
    holes = list(missing)
    # What is late while it is open is measured by the ledger's own time, not by this machine's
    # clock: the result does not depend on when the pipeline runs.
    newest = steps.groupBy("node").agg(F.max("time").alias("newest"))
    with_newest = steps.join(F.broadcast(newest), "node")
    rows = hops(with_newest, reconciled, late_us=late_us, missing=holes)
    # Nodes without a ledger are none of this table.
    alone = message_facts(envelopes).join(F.broadcast(newest), "node")
    recorded = steps.select("node", "id").distinct()
    without = unrecorded(alone, recorded, F.col("newest"), holes)
    rows = rows.unionByName(without, allowMissingColumns=True)
    if not holes:
        return rows
    ranges = missing_ranges(steps.sparkSession, holes)
    return rows.unionByName(ranges, allowMissingColumns=True)


def unrecorded(
    facts: DataFrame, recorded: DataFrame, newest: Column, missing: Iterable[MissingLakeRows]
) -> DataFrame:
    """Rows for messages of which the ledger has no step at all, from `message_facts`.

    `recorded` are the messages (node, id) with steps, `newest` is the time of the newest row of
    their node's ledger. Answers are left out: they have no rows here.
    """
    hole = reason_between(missing, "ledger", F.col("time"), F.col("time"))
    # At the newest time as well: a commit group's rows have one time, and the last file may have
    # only some of them.
    later = F.when(F.col("time") >= newest, _ENDS_BEFORE)
    return _unknown(
        facts.where(F.col("kind") != RESPONSE)
        .join(recorded, list(_MESSAGE), "left_anti")
        .withColumn("reason", F.coalesce(hole, later, F.lit(_NO_STEP)))
        .select(
            "node",
            "id",
            "kind",
            "destination",
            F.col("protocol").alias("producer_protocol"),
            F.col("connection").alias("producer"),
            F.col("time").alias("accepted"),
            "reason",
            "intact",
        )
    )


def missing_ranges(spark: SparkSession, missing: Iterable[MissingLakeRows]) -> DataFrame:
    """A row for each range of the ledger that is missing; `accepted` is the time before it."""
    found = [
        (each.node, each.after_us or None, each.reason)
        for each in missing
        if each.table == "ledger" and not each.by_id
    ]
    return _unknown(spark.createDataFrame(found, "node string, accepted bigint, reason string"))


def _unknown(rows: DataFrame) -> DataFrame:
    """Rows of which nothing is known but what they have."""
    counts = dict.fromkeys(("attempts", "refusals", "returns"), F.lit(0).cast("bigint"))
    flags = dict.fromkeys(("late", "lost", "doubled", "is_open"), F.lit(False))
    return rows.withColumns({**counts, **flags, "outcome": F.lit(UNKNOWN)})


def hops(
    steps: DataFrame,
    reconciled: DataFrame | None,
    *,
    late_us: int,
    missing: Iterable[MissingLakeRows] = (),
) -> DataFrame:
    """The rows of messages of which all steps are given, as `with_messages` returns them, with
    `newest`: the time of the newest row of their node's ledger."""
    steps = steps.where(~F.col("is_answer"))
    resumed = _resumed(steps)
    with_hop = _with_hop(steps, resumed)
    receivers = (
        with_hop.where(F.col("step") == DELIVERED)
        .groupBy(*_RECEIVER)
        .agg(F.max("hop").alias("receiver_hop"))
    )
    found = _by_hop(with_hop).withColumn("outcome", _outcome())
    found = _with_wire(found, reconciled, resumed, receivers).withColumn(
        "reason", _reason(list(missing))
    )
    is_certain = F.col("reason").isNull()
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
        _latency().alias("latency_us"),
        _is_late(late_us).alias("late"),
        (is_certain & _is_lost()).alias("lost"),
        (is_certain & _is_doubled()).alias("doubled"),
        "reason",
        "on_wire",
        "same_payload",
        "intact",
        "is_open",
    )


def _resumed(steps: DataFrame) -> DataFrame:
    """Connections on which a Relink link settled a message that was delivered on another one,
    `first_connection`.

    A connection with a delivery and no further step is paired with one with further steps and no
    delivery, the n-th with the n-th. If several links of a topic were resumed, the pairs may be
    swapped: the ledger does not name links, but the outcomes of the message are the same.
    """
    is_delivery = F.col("step") == DELIVERED
    receivers = (
        steps.where((F.col("protocol") == "relink") & F.col("destination").startswith("topic/"))
        .where((F.col("step") != ACCEPTED) & (F.col("connection") != ""))
        .groupBy(*_RECEIVER)
        .agg(
            F.max(is_delivery).alias("is_delivered"),
            F.max(~is_delivery).alias("is_ended"),
            F.min("seq").alias("first"),
        )
        .where(F.col("is_delivered") != F.col("is_ended"))
    )
    nth = F.row_number().over(Window.partitionBy(*_MESSAGE, "is_delivered").orderBy("first"))
    receivers = receivers.withColumn("nth", nth)
    earlier = receivers.where("is_delivered").select(
        "node", "id", "nth", F.col("connection").alias("first_connection")
    )
    later = receivers.where("NOT is_delivered").select(*_RECEIVER, "nth")
    return later.join(earlier, [*_MESSAGE, "nth"]).drop("nth")


def _with_hop(steps: DataFrame, resumed: DataFrame) -> DataFrame:
    """Each step with its hop: null for `accepted`, which belongs to all hops."""
    steps = steps.join(resumed, list(_RECEIVER), "left")
    topic = F.col("destination").startswith("topic/")
    # Steps like `dead` and `damaged`, and those of retention, have no connection: they belong to
    # the last receiver before them.
    receiver = F.coalesce("first_connection", F.nullif("connection", F.lit("")))
    before = F.last(receiver, ignorenulls=True).over(
        Window.partitionBy(*_MESSAGE)
        .orderBy("seq")
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    named = F.concat(F.lit("@"), F.nullif("subscription", F.lit("")))
    hop = F.when(topic, F.coalesce(named, before)).otherwise(F.col("destination"))
    is_accepted = F.col("step") == ACCEPTED
    return steps.withColumn("hop", F.when(~is_accepted, hop))


def _by_hop(steps: DataFrame) -> DataFrame:
    """One row for each message and hop, also for messages without a hop."""
    step = F.col("step")

    def count(name: str) -> Column:
        return F.sum(F.when(step == name, F.col("count")).otherwise(0))

    # The last end counts. `seq` orders steps, since several may have the same time.
    is_end = step.isin(*ENDS)
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
            F.count_if((step == RETURNED) & (F.col("detail") == GIVEN_BACK)).alias("given_back"),
            last_end.alias("end"),
            last_step.alias("last"),
            F.first("destination").alias("step_destination"),
            F.min("time").alias("first_time"),
        )
    )
    messages = steps.groupBy(*_MESSAGE).agg(
        F.first("accepted_by").alias("producer"),
        F.first("kind").alias("kind"),
        F.max("intact").alias("intact"),
        F.max("origin").alias("origin"),
        F.max("newest").alias("newest"),
        F.sum(F.when((step == ACCEPTED) & (F.col("detail") == COUNTED), F.col("count"))).alias(
            "counted"
        ),
    )
    joined = messages.join(moved, list(_MESSAGE), "left")
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
    # Without an end: a topic's receiver that settles nothing is done with the delivery; in a queue
    # or at a service a delivery must still be settled, and after a return it waits again.
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


def _with_wire(
    hops: DataFrame, reconciled: DataFrame | None, resumed: DataFrame, receivers: DataFrame
) -> DataFrame:
    """Hops with what the wire shows of them; all columns are null if no connection was tapped.

    sent           when its last byte was received from the producer
    on_wire        deliveries on the wire
    unseen         deliveries that the ledger has and the wire has not
    unrecorded     deliveries that the wire has and the ledger has not
    same_payload   all deliveries carried the payload that the hub keeps
    """
    if reconciled is None:
        nothing = {
            "sent": "bigint",
            "on_wire": "bigint",
            "unseen": "bigint",
            "unrecorded": "bigint",
            "same_payload": "boolean",
        }
        for name, kind in nothing.items():
            hops = hops.withColumn(name, F.lit(None).cast(kind))
        return hops
    received = (
        reconciled.where((F.col("way") == IN) & (F.col("verdict") == EQUAL))
        .groupBy(*_MESSAGE)
        .agg(F.min("wire_time").alias("sent"))
    )
    verdict = F.col("verdict")
    receiver = F.coalesce("first_connection", "connection")
    topic = F.col("destination").startswith("topic/")
    # What only the wire has belongs to the hop that its connection was given the message for.
    hop_of_topic = (
        F.when(F.col("subscription") == "", receiver)
        .when(F.col("subscription").isNotNull(), F.concat(F.lit("@"), F.col("subscription")))
        .otherwise(F.coalesce("receiver_hop", receiver))
    )
    sent_out = (
        reconciled.where((F.col("way") == OUT) & F.col("id").isNotNull())
        .join(resumed, list(_RECEIVER), "left")
        .join(receivers, list(_RECEIVER), "left")
        .withColumn("hop", F.when(topic, hop_of_topic).otherwise(F.col("destination")))
        .groupBy(*_HOP)
        .agg(
            F.count_if(verdict.isin(EQUAL, MISSING_IN_LEDGER)).alias("on_wire"),
            F.count_if(verdict == MISSING_ON_WIRE).alias("unseen"),
            F.count_if(verdict == MISSING_IN_LEDGER).alias("unrecorded"),
            F.min("same_payload").alias("same_payload"),
        )
    )
    return hops.join(received, list(_MESSAGE), "left").join(sent_out, list(_HOP), "left")


# --------------------------------------------------------------------------------------- verdicts


def _reason(missing: list[MissingLakeRows]) -> Column:
    """Why it is uncertain; null if it is not: rows of the ledger are missing from the time between
    its acceptance and its end."""
    accepted = F.col("producer.time")
    until = F.when(F.col("ended").isNull(), F.lit(ALWAYS_US)).otherwise(F.col("ended"))
    hole = reason_between(missing, "ledger", F.coalesce(accepted, F.lit(0)), until)
    no_acceptance = F.when(accepted.isNull(), F.lit(_NO_ACCEPTANCE))
    return F.coalesce(hole, no_acceptance)


def _arrival() -> Column:
    """When the receiver had it: settled or answered, or else delivered."""
    outcome = F.col("outcome")
    return F.when(outcome.isin(SETTLED, ANSWERED), F.col("ended")).when(
        outcome == DELIVERED, F.col("delivered")
    )


def _latency() -> Column:
    # Not negative, even if the hub's clock was set back.
    taken = _arrival() - F.col("producer.time")
    return F.when(taken < 0, 0).otherwise(taken)


def _is_late(late_us: int) -> Column:
    is_awaited = F.col("is_open") & ~F.col("destination").rlike(_DEAD_LETTERS)
    waits = is_awaited & (F.col("newest") - F.col("producer.time") > late_us)
    waits &= F.col("reason").isNull()
    return F.coalesce(_latency() > late_us, F.lit(False)) | F.coalesce(waits, F.lit(False))


def _is_lost() -> Column:
    # The module's docstring defines `lost`; `unseen` counts only for receivers that settle nothing,
    # because a settlement proves that the message was received.
    outcome, detail = F.col("outcome"), F.coalesce("detail", F.lit(""))
    return (
        (outcome == DAMAGED)
        | ((outcome == DROPPED) & (detail != _PURGED))
        | ((outcome == EXPIRED) & (detail == _RETENTION))
        | ((outcome == DELIVERED) & F.coalesce(F.col("unseen") > 0, F.lit(False)))
    )


def _is_doubled() -> Column:
    # Who refuses a message or unsubscribes has not processed it: a delivery after that is no
    # double. Of topics that are not durable the attempts are the number of receivers.
    declined = F.col("refusals") + F.coalesce("given_back", F.lit(0))
    again = F.col("counted").isNull() & (F.col("attempts") - declined > 1)
    return (
        again
        | F.coalesce(F.col("settlements") > 1, F.lit(False))
        | F.coalesce(F.col("unrecorded") > 0, F.lit(False))
    )
