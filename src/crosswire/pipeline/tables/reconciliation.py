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
                           the newest row of the other side; or of the last second of a connection
                           that has no end on the wire: a hub that is killed takes with it what its
                           tap had not written yet

How they are matched, on one connection (or Relink link) and way: by the hub's id where the protocol
tells it (EMP's `$deliver`, Epoxy's `Deliver`); then the n-th with a payload of this checksum; then
the n-th to this destination, which also finds what was converted on the way, or is not kept. So of
equal messages any may be shown as the missing one, but how many are missing is exact. A message
that was acknowledged is matched before one that was not. Left out: connections that are not
tapped, replies of eMQP's workers to jobs (to the hub they are settlements), deliveries of topics
that are not durable (the ledger counts them), dead letters, replays and what schedules sent (they
never were on a wire).
`intact` is false where the payload in the lake no longer has the checksum taken at the edge.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from crosswire.lake.schemas import BACKWARD, FORWARD
from crosswire.pipeline.decode.readings.contract import ACKNOWLEDGEMENT, ERROR, HANDSHAKE, RESPONSE
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
    "acknowledged",
    "answers",
    "compare",
    "counted_topics",
    "is_passage",
    "judge",
    "lines",
    "noted",
    "reconciliation",
    "reconciliation_rows",
    "shown",
    "sides",
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
_UNWRITTEN_US: Final = 1_000_000
"""How much of what it saw a tap may not have written: it writes every 0.2 s, if it can."""


def reconciliation(
    messages: DataFrame,
    frames: DataFrame,
    directions: DataFrame,
    ledger: DataFrame,
    envelopes: DataFrame,
) -> DataFrame:
    """`messages`, `frames`, `directions` of the wire; `ledger` and `envelopes` of the lake."""
    nodes = F.broadcast(ledger.select("node").distinct())
    message_rows = shown(messages.join(nodes, "node", "left_semi"))
    rows = sides(
        acknowledged(message_rows, answers(frames)),
        noted(with_messages(ledger, envelopes)),
        lines(directions, _about(frames)),
    )
    horizon = F.broadcast(_horizon(directions, ledger))
    compared = compare(rows).join(horizon, "node", "left")
    return reconciliation_rows(judge(compared, counted_topics(ledger)).where(~F.col("left_out")))


def sides(message_rows: DataFrame, noted: DataFrame, lines: DataFrame) -> DataFrame:
    """The rows of both sides on the connections that were tapped."""
    rows = message_rows.join(lines, list(_CONNECTION)).withColumn("broken", _is_broken())
    return rows.unionByName(noted.join(lines, list(_CONNECTION)), allowMissingColumns=True)


def compare(rows: DataFrame, *more: Column, wire_columns: tuple[str, ...] = ()) -> DataFrame:
    """Each row of one side with its partner, or alone, as `wire` and `ledger`; `more` are
    aggregates of the two, and `wire_columns` stand in `wire` too."""
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
    return (
        rows.withColumn("alone", alone)
        .withColumn("key", key)
        .groupBy(*_LINE, "stage", "key", "turn", "alone")
        .agg(
            _one(_WIRE, (*_WIRE_COLUMNS, *wire_columns)),
            _one(_LEDGER, _LEDGER_COLUMNS),
            F.min("whole").alias("whole"),
            F.min("written_until").alias("written_until"),
            *more,
        )
    )


def judge(compared: DataFrame, counted: DataFrame) -> DataFrame:
    """`verdict` on what was compared, up to the `horizon` of its node; `left_out`: it is of no
    interest. `counted` are the topics whose deliveries the ledger only counts."""
    return (
        compared.join(
            F.broadcast(counted),
            (compared["node"] == counted["counted_node"])
            & (F.col("wire.destination") == counted["counted_destination"]),
            "left",
        )
        .withColumn("verdict", _verdict())
        .withColumn("left_out", _is_left_out())
        .drop("counted_node", "counted_destination")
    )


def reconciliation_rows(judged: DataFrame, *more: str) -> DataFrame:
    """The table, of what was judged; with `more` of its columns."""
    return judged.select(*_output(), *more)


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
    "broken",
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


def shown(messages: DataFrame) -> DataFrame:
    """What the wire carried, as far as it has to be in the ledger."""
    is_response = F.col("kind") == RESPONSE
    backward = F.col("direction") == BACKWARD
    own = (F.col("protocol") == "emp") & F.col("destination").startswith("service/$")
    failed = is_response & ~backward & (F.coalesce("status", F.lit("success")) != "success")
    return messages.where(~F.coalesce(own, F.lit(False)) & ~failed).select(
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
        F.lit(_WIRE).alias("side"),
        _name().alias("name"),
    )


def answers(frames: DataFrame) -> DataFrame:
    """What the hub said to what came in."""
    is_answer = F.col("kind").isin(ACKNOWLEDGEMENT, RESPONSE)
    return frames.where((F.col("direction") == BACKWARD) & is_answer).select(
        *_CONNECTION,
        "protocol",
        F.col("identifier").alias("correlation"),
        "status",
        "sequence",
        "time",
    )


def acknowledged(message_rows: DataFrame, answers: DataFrame) -> DataFrame:
    """`acknowledged` of what came in: true, false (or never), null where the protocol is silent;
    `undecided`: an answer may still come. In `said_yes` stands what is known already, if it is
    there, and what was found out."""
    if "said_yes" not in message_rows.columns:
        message_rows = message_rows.withColumn("said_yes", F.lit(None).cast("boolean"))
    one_by_one = _with_answers(
        message_rows.where(_answers_each_message()), answers.where(_answers_each_message())
    )
    # Relink acknowledges all of a channel up to a sequence number.
    up_to = (
        answers.where(
            (F.col("protocol") == "relink") & F.col("status").isin("consumed", "committed")
        )
        .groupBy(*_CONNECTION, F.col("correlation").alias("channel"))
        .agg(F.max("sequence").alias("upto"))
    )
    covered = (F.col("way") == IN) & (F.col("kind") != RESPONSE)
    covered &= F.col("sequence") <= F.col("upto")
    others = (
        message_rows.where(~_answers_each_message())
        .withColumn("channel", F.split("correlation", ":")[0])
        .join(up_to, [*_CONNECTION, "channel"], "left")
        .withColumn("said_yes", F.coalesce("said_yes", F.when(covered, True)))
        .drop("channel", "upto")
    )
    by_sequence = F.col("sequence").isNotNull() & (F.col("protocol") == "relink")
    answer = (
        F.when(F.col("way") != IN, None)
        .when(F.col("said_yes").isNotNull(), F.col("said_yes"))
        .when((F.col("kind") == RESPONSE) | _is_silent(), None)
        .when(_answers_each_message() | by_sequence, False)
    )
    rows = one_by_one.unionByName(others).withColumn("acknowledged", answer)
    undecided = F.col("acknowledged").isNotNull() & F.col("said_yes").isNull()
    return rows.withColumn("undecided", undecided)


def _with_answers(message_rows: DataFrame, answers: DataFrame) -> DataFrame:
    """The first answer that came after a message decides: identifiers may be used again."""
    yes = answers.select(
        *_CONNECTION, "correlation", "time", (F.col("status") == "success").alias("yes")
    )
    rows = message_rows.withColumn("is_said", F.lit(True)).unionByName(
        yes, allowMissingColumns=True
    )
    later = (
        Window.partitionBy(*_CONNECTION, "correlation")
        .orderBy("time", F.col("is_said").desc_nulls_last())
        .rowsBetween(Window.currentRow, Window.unboundedFollowing)
    )
    found = F.first("yes", ignorenulls=True).over(later)
    return (
        rows.withColumn("said_yes", F.coalesce("said_yes", F.when(F.col("way") == IN, found)))
        .where("is_said")
        .drop("is_said", "yes")
    )


def _answers_each_message() -> Column:
    """The protocol answers messages one by one."""
    return F.coalesce(F.col("protocol").isin("emp", "emqp", "epoxy"), F.lit(False))


def _is_silent() -> Column:
    return F.col("kind").isin("publish") & F.col("protocol").isin("emqp", "epoxy")


def _is_broken() -> Column:
    """Nobody says yes to it, and the hub ended its connection with an error."""
    quiet = (F.col("way") == IN) & F.col("acknowledged").isNull() & (F.col("kind") != RESPONSE)
    return F.coalesce(quiet & ~_is_silent() & (F.col("broken_off") >= F.col("time")), F.lit(False))


def is_passage() -> Column:
    """Of a step: it was on a wire, or should have been."""
    step = F.col("step")
    from_nowhere = (step == ACCEPTED) & (F.col("is_moved") | F.col("is_scheduled"))
    return step.isin(ACCEPTED, DELIVERED, ANSWERED, FAILED) & ~from_nowhere


def noted(steps: DataFrame) -> DataFrame:
    """What the ledger says was carried, from its steps `with_messages`."""
    step = F.col("step")
    returned = F.max(F.when(step == RETURNED, True)).over(
        Window.partitionBy("node", "id", "connection", "attempt")
    )
    ended = step.isin(ANSWERED, FAILED)
    carried = steps.withColumn("returned", F.coalesce(returned, F.lit(False))).where(is_passage())
    origin = F.col("accepted_by")
    return carried.select(
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


def lines(directions: DataFrame, about: DataFrame, *more: Column) -> DataFrame:
    """The tapped connections: the link that each belongs to, whether all of it was recorded, up to
    when that is certain, if it has no end; and when the hub last reported an error. `about` says
    `link` and `broken_off`; `more` are aggregates of its directions."""
    recorded = directions.groupBy(*_CONNECTION).agg(
        F.coalesce(
            ~F.max("late")
            & (F.sum("gaps") == 0)
            & (F.sum("unread") == 0)
            & (F.max(F.when(F.col("direction") == FORWARD, 1)) == 1),
            F.lit(False),
        ).alias("whole"),
        F.when(F.count("ended") == 0, F.max("last_time") - _UNWRITTEN_US).alias("written_until"),
        *more,
    )
    return (
        recorded.join(about, list(_CONNECTION), "left")
        .withColumn("line", F.coalesce("link", "connection"))
        .drop("link")
    )


def _about(frames: DataFrame) -> DataFrame:
    says_link = (F.col("protocol") == "relink") & (F.col("kind") == HANDSHAKE)
    return (
        frames.where(F.col("direction") == BACKWARD)
        .groupBy(*_CONNECTION)
        .agg(
            F.max(F.when(says_link, F.col("identifier"))).alias("link"),
            F.max(F.when(F.col("kind") == ERROR, F.col("time"))).alias("broken_off"),
        )
    )


def _horizon(directions: DataFrame, ledger: DataFrame) -> DataFrame:
    """Up to when there are rows of both sides, node by node."""
    recorded = directions.groupBy("node").agg(F.max("last_time").alias("recorded"))
    noted = ledger.groupBy("node").agg(F.max("time").alias("noted"))
    return noted.join(recorded, "node").select(
        "node", F.least("recorded", "noted").alias("horizon")
    )


def counted_topics(ledger: DataFrame) -> DataFrame:
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
    # The ledger's own order holds, whatever its clock did.
    time = F.when(F.col("side") == _WIRE, F.col("time"))
    in_order = (F.coalesce("acknowledged", F.lit(True)).desc(), time, "place")
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
    until = F.least("horizon", "written_until")
    newer = F.coalesce(time > until, F.lit(False))
    return (
        F.when(wire.isNotNull() & ledger.isNotNull(), EQUAL)
        .when(
            wire["broken"] | (F.coalesce(wire["acknowledged"], F.lit(True)) == F.lit(False)),
            NOT_ACCEPTED,
        )
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
        F.when(ledger.isNull() & wire["broken"], False)
        .otherwise(wire["acknowledged"])
        .alias("acknowledged"),
        (wire["crc"] == ledger["crc"]).alias("same_payload"),
        ledger["intact"].alias("intact"),
    ]
