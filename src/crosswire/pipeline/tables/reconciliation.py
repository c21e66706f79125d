"""gold.reconciliation: what the wire shows against what the hub recorded, message by message.

A row is one passage of a message over a tapped connection: `in` (to the hub: a message, a request,
a provider's answer), `out` (a delivery, a request to a provider) or `answer` (to who asked). On the
hub's side these are the ledger's steps `accepted`, `delivered`, and `answered` or `failed`.

    equal                  both have it; `same_payload` says whether the bytes are those that the
                           hub keeps (an edge that can't carry them writes them in another way)
    missing on the wire    recorded, but the connection never carried it
    missing in the ledger  carried, and not recorded, although the hub did not say no
    not accepted           carried and not recorded; the hub refused it, or never acknowledged it
    withdrawn              recorded as delivered and as returned: the receiver left before it went
    uncertain              unmatched, where the connection was not recorded in full, where a Relink
                           link was resumed (what was sent may have been sent again), or newer than
                           the newest row of the other side

How they are matched, on one connection (or Relink link) and way: by the hub's id where the protocol
tells it (EMP's `$deliver`, Epoxy's `Deliver`); then the n-th with a payload of this checksum; then
the n-th to this destination, which also finds what was converted on the way, or is not kept. So of
equal messages any may be shown as the missing one, but how many are missing is exact. A message
that was acknowledged is matched before one that was not. Left out: connections that are not
tapped, replies of eMQP's workers to jobs (to the hub they are settlements), deliveries of topics
that are not durable (the ledger counts them), dead letters and replays (they never were on a wire).
`intact` is false where the payload in the lake no longer has the checksum taken at the edge.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from crosswire.lake.schemas import BACKWARD, FORWARD
from crosswire.pipeline.protocols.contract import ACKNOWLEDGEMENT, ERROR, HANDSHAKE, RESPONSE
from crosswire.pipeline.tables.steps import (
    ACCEPTED,
    ANSWERED,
    COUNTED,
    DELIVERED,
    FAILED,
    RETURNED,
    with_messages,
)

__all__ = [
    "ANSWER",
    "EQUAL",
    "IN",
    "MISSING_IN_LEDGER",
    "MISSING_ON_WIRE",
    "NOT_ACCEPTED",
    "OUT",
    "UNCERTAIN",
    "VERDICTS",
    "WITHDRAWN",
    "reconciliation",
]

IN: Final = "in"
OUT: Final = "out"
ANSWER: Final = "answer"

EQUAL: Final = "equal"
MISSING_ON_WIRE: Final = "missing on the wire"
MISSING_IN_LEDGER: Final = "missing in the ledger"
NOT_ACCEPTED: Final = "not accepted"
WITHDRAWN: Final = "withdrawn"
UNCERTAIN: Final = "uncertain"
VERDICTS: Final = (
    EQUAL,
    MISSING_ON_WIRE,
    MISSING_IN_LEDGER,
    NOT_ACCEPTED,
    WITHDRAWN,
    UNCERTAIN,
)

_WIRE: Final = "wire"
_LEDGER: Final = "ledger"
_LINE: Final = ("node", "line", "way")
_CONNECTION: Final = ("node", "connection")


def reconciliation(
    messages: DataFrame,
    frames: DataFrame,
    directions: DataFrame,
    ledger: DataFrame,
    envelopes: DataFrame,
) -> DataFrame:
    """`messages`, `frames`, `directions` of the wire; `ledger` and `envelopes` of the lake."""
    lines = _lines(frames, directions)
    horizon = _horizon(directions, ledger)
    shown = _shown(messages, frames, ledger).join(lines, list(_CONNECTION))
    noted = _noted(ledger, envelopes).join(lines, list(_CONNECTION))
    rows = shown.unionByName(noted, allowMissingColumns=True)
    # One shuffle for all that follows: its keys begin with these.
    rows = rows.repartition("node", "line").withColumn("stage", F.lit(None).cast("int"))
    rows = rows.withColumn("turn", F.lit(None).cast("bigint"))
    for stage, by in enumerate(("id", "crc", "name")):
        rows = _match(rows, stage, by)
    alone = F.when(F.col("stage").isNull(), F.struct("side", "connection", "place"))
    key = (
        F.when(F.col("stage") == 0, F.col("id").cast("string"))
        .when(F.col("stage") == 1, F.col("crc").cast("string"))
        .when(F.col("stage") == 2, F.col("name"))
    )
    grouped = (
        rows.withColumn("alone", alone)
        .withColumn("key", key)
        .groupBy(*_LINE, "stage", "key", "turn", "alone")
        .agg(
            _one(_WIRE, _WIRE_COLUMNS),
            _one(_LEDGER, _LEDGER_COLUMNS),
            F.min("whole").alias("whole"),
        )
    )
    counted = _counted_topics(ledger)
    judged = (
        grouped.join(F.broadcast(horizon), "node", "left")
        .join(
            F.broadcast(counted),
            (grouped["node"] == counted["counted_node"])
            & (F.col("wire.destination") == counted["counted_destination"]),
            "left",
        )
        .withColumn("verdict", _verdict())
        .where(~_is_left_out())
    )
    return judged.select(*_output())


# ------------------------------------------------------------------------------------------ sides

_WIRE_COLUMNS: Final = (
    "connection",
    "protocol",
    "destination",
    "kind",
    "time",
    "place",
    "crc",
    "id",
    "acknowledged",
    "sequence",
)
_LEDGER_COLUMNS: Final = (
    "connection",
    "protocol",
    "destination",
    "kind",
    "time",
    "place",
    "crc",
    "id",
    "attempt",
    "step",
    "returned",
    "intact",
)


def _one(side: str, columns: tuple[str, ...]) -> Column:
    return F.max(F.when(F.col("side") == side, F.struct(*columns))).alias(side)


def _shown(messages: DataFrame, frames: DataFrame, ledger: DataFrame) -> DataFrame:
    """What the wire carried, as far as it has to be in the ledger."""
    is_response = F.col("kind") == RESPONSE
    backward = F.col("direction") == BACKWARD
    own = (F.col("protocol") == "emp") & F.col("destination").startswith("service/$")
    failed = is_response & ~backward & (F.coalesce("status", F.lit("success")) != "success")
    nodes = F.broadcast(ledger.select("node").distinct())
    said = (
        messages.where(~F.coalesce(own, F.lit(False)) & ~failed)
        .join(nodes, "node", "left_semi")
        .select(
            "node",
            "connection",
            "protocol",
            "destination",
            "kind",
            "time",
            F.col("offset").alias("place"),
            "crc",
            "id",
            "correlation",
            "sequence",
            F.when(~backward, IN).when(is_response, ANSWER).otherwise(OUT).alias("way"),
        )
    )
    return (
        _acknowledged(said, frames)
        .withColumn("side", F.lit(_WIRE))
        .withColumn("name", _name())
        .drop("correlation")
    )


def _acknowledged(said: DataFrame, frames: DataFrame) -> DataFrame:
    """`acknowledged` of what came in: true, false (or never), null where the protocol is silent."""
    answers = frames.where(
        (F.col("direction") == BACKWARD) & F.col("kind").isin(ACKNOWLEDGEMENT, RESPONSE)
    )
    one_by_one = (
        answers.where(F.col("protocol").isin("emp", "emqp", "epoxy"))
        .groupBy(*_CONNECTION, F.col("identifier").alias("correlation"))
        .agg(F.max(F.col("status") == "success").alias("said_yes"))
    )
    # Relink acknowledges all of a channel up to a sequence number.
    up_to = (
        answers.where(
            (F.col("protocol") == "relink") & F.col("status").isin("consumed", "committed")
        )
        .groupBy(*_CONNECTION, F.col("identifier").alias("channel"))
        .agg(F.max("sequence").alias("upto"))
    )
    broken_off = (
        frames.where((F.col("direction") == BACKWARD) & (F.col("kind") == ERROR))
        .groupBy(*_CONNECTION)
        .agg(F.max("time").alias("broken_off"))
    )
    channel = F.when(F.col("protocol") == "relink", F.split("correlation", ":")[0])
    told = F.col("protocol").isin("emp", "epoxy") | (F.col("protocol") == "emqp")
    silent = F.col("kind").isin("publish") & F.col("protocol").isin("emqp", "epoxy")
    answer = (
        F.when(F.col("way") != IN, None)
        .when(F.col("said_yes").isNotNull(), F.col("said_yes"))
        .when((F.col("kind") == RESPONSE) | silent, None)
        .when(told, False)
        .when(F.col("sequence").isNotNull() & (F.col("protocol") == "relink"), _covered())
        .when(F.col("broken_off") >= F.col("time"), False)
    )
    return (
        said.withColumn("channel", channel)
        .join(one_by_one, [*_CONNECTION, "correlation"], "left")
        .join(up_to, [*_CONNECTION, "channel"], "left")
        .join(broken_off, list(_CONNECTION), "left")
        .withColumn("acknowledged", answer)
        .drop("channel", "said_yes", "upto", "broken_off")
    )


def _covered() -> Column:
    return F.coalesce(F.col("sequence") <= F.col("upto"), F.lit(False))


def _noted(ledger: DataFrame, envelopes: DataFrame) -> DataFrame:
    """What the ledger says was carried."""
    steps = with_messages(ledger, envelopes)
    step = F.col("step")
    returned = F.max(F.when(step == RETURNED, True)).over(
        Window.partitionBy("node", "id", "connection", "attempt")
    )
    ended = step.isin(ANSWERED, FAILED)
    noted = (
        steps.withColumn("returned", F.coalesce(returned, F.lit(False)))
        .where(step.isin(ACCEPTED, DELIVERED) | ended)
        .where(~((step == ACCEPTED) & F.col("is_moved")))
    )
    origin = F.col("accepted_by")
    return noted.select(
        "node",
        F.when(ended, origin["connection"]).otherwise(F.col("connection")).alias("connection"),
        F.when(ended, origin["protocol"]).otherwise(F.col("protocol")).alias("protocol"),
        F.coalesce(origin["destination"], F.col("destination")).alias("destination"),
        F.when(ended, RESPONSE).otherwise(F.col("kind")).alias("kind"),
        "time",
        F.col("seq").alias("place"),
        F.when(~ended, F.col("crc")).alias("crc"),
        "id",
        F.when(step == DELIVERED, F.greatest("attempt", F.lit(1))).alias("attempt"),
        "step",
        "returned",
        "intact",
        F.when(step == ACCEPTED, IN).when(step == DELIVERED, OUT).otherwise(ANSWER).alias("way"),
        F.lit(_LEDGER).alias("side"),
    ).withColumn("name", _name())


def _name() -> Column:
    """What a destination is called in every protocol. A Relink link has one, in its endpoint."""
    bare = F.regexp_replace("destination", "^(queue|topic|service|reply)/", "")
    return F.when(F.col("protocol") == "relink", "").otherwise(F.coalesce(bare, F.lit("")))


# ------------------------------------------------------------------------------ around both sides


def _lines(frames: DataFrame, directions: DataFrame) -> DataFrame:
    """The tapped connections: the link that each belongs to, and whether all of it was recorded."""
    links = (
        frames.where(
            (F.col("protocol") == "relink")
            & (F.col("kind") == HANDSHAKE)
            & (F.col("direction") == BACKWARD)
            & F.col("identifier").isNotNull()
        )
        .groupBy(*_CONNECTION)
        .agg(F.max("identifier").alias("link"))
    )
    recorded = directions.groupBy(*_CONNECTION).agg(
        (
            ~F.max("late")
            & (F.sum("gaps") == 0)
            & (F.sum("unread") == 0)
            & (F.max(F.when(F.col("direction") == FORWARD, 1)) == 1)
        ).alias("whole")
    )
    return recorded.join(links, list(_CONNECTION), "left").select(
        *_CONNECTION,
        F.coalesce("link", "connection").alias("line"),
        F.coalesce("whole", F.lit(False)).alias("whole"),
    )


def _horizon(directions: DataFrame, ledger: DataFrame) -> DataFrame:
    """Up to when there are rows of both sides, node by node."""
    recorded = directions.groupBy("node").agg(F.max("last_time").alias("recorded"))
    noted = ledger.groupBy("node").agg(F.max("time").alias("noted"))
    return noted.join(recorded, "node").select(
        "node", F.least("recorded", "noted").alias("horizon")
    )


def _counted_topics(ledger: DataFrame) -> DataFrame:
    return (
        ledger.where((F.col("step") == ACCEPTED) & (F.col("detail") == COUNTED))
        .select(
            F.col("node").alias("counted_node"), F.col("destination").alias("counted_destination")
        )
        .distinct()
    )


# --------------------------------------------------------------------------------------- matching


def _match(rows: DataFrame, stage: int, key: str) -> DataFrame:
    """Pair the n-th of one side with the n-th of the other, among those with the same key that no
    earlier stage has paired."""
    is_free = F.col("stage").isNull() & F.col(key).isNotNull()
    rows = rows.withColumn("wanted", F.when(is_free, F.col(key).cast("string")))
    in_order = (F.coalesce("acknowledged", F.lit(True)).desc(), "time", "place")
    turn = F.row_number().over(Window.partitionBy(*_LINE, "wanted", "side").orderBy(*in_order))
    rows = rows.withColumn("next", turn)
    pair = Window.partitionBy(*_LINE, "wanted", "next")
    is_paired = is_free & (F.min("side").over(pair) != F.max("side").over(pair))
    return (
        rows.withColumn("paired", is_paired)
        .withColumn("stage", F.when(F.col("paired"), F.lit(stage)).otherwise(F.col("stage")))
        .withColumn("turn", F.when(F.col("paired"), F.col("next")).otherwise(F.col("turn")))
        .drop("wanted", "next", "paired")
    )


def _verdict() -> Column:
    wire, ledger = F.col("wire"), F.col("ledger")
    time = F.coalesce(wire["time"], ledger["time"])
    resumed = (wire["protocol"] == "relink") & wire["sequence"].isNull()
    newer = F.coalesce(time > F.col("horizon"), F.lit(False))
    return (
        F.when(wire.isNotNull() & ledger.isNotNull(), EQUAL)
        .when(F.coalesce(wire["acknowledged"] == F.lit(False), F.lit(False)), NOT_ACCEPTED)
        .when(F.coalesce(ledger["returned"], F.lit(False)), WITHDRAWN)
        .when(~F.col("whole") | F.coalesce(resumed, F.lit(False)) | newer, UNCERTAIN)
        .when(wire.isNull(), MISSING_ON_WIRE)
        .otherwise(MISSING_IN_LEDGER)
    )


def _is_left_out() -> Column:
    wire, ledger, way = F.col("wire"), F.col("ledger"), F.col("way")
    replies = (wire["protocol"] == "emqp") & (wire["kind"] == RESPONSE)
    counted = (way == OUT) & F.col("counted_node").isNotNull()
    # A call that failed because the caller left is answered by nobody.
    untold = (way == ANSWER) & (ledger["step"] == FAILED)
    alone = F.when(ledger.isNull(), replies | counted).when(wire.isNull(), untold)
    return F.coalesce(alone, F.lit(False))


def _output() -> list[Column]:
    wire, ledger = F.col("wire"), F.col("ledger")
    both = [
        F.coalesce(wire[name], ledger[name]).alias(name)
        for name in ("connection", "protocol", "destination", "kind")
    ]
    return [
        F.col("node"),
        *both,
        F.col("way"),
        F.coalesce(ledger["id"], wire["id"]).alias("id"),
        ledger["attempt"].alias("attempt"),
        F.col("verdict"),
        F.coalesce(wire["time"], ledger["time"]).alias("time"),
        wire["time"].alias("wire_time"),
        ledger["time"].alias("ledger_time"),
        wire["place"].alias("offset"),
        ledger["place"].alias("ledger_seq"),
        wire["acknowledged"].alias("acknowledged"),
        (wire["crc"] == ledger["crc"]).alias("same_payload"),
        ledger["intact"].alias("intact"),
    ]
