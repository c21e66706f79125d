"""gold.reconciliation: what the wire shows against what the hub recorded, message by message.

A row is one passage of a message over a tapped connection. `way` is `in` (to the hub: a message, a
request, a provider's answer), `out` (a delivery, a request to a provider) or `answer` (to the
caller). In the ledger these are the steps `accepted`, `delivered`, and `answered` or `failed`.

    equal                  both have it; `same_payload` is true if the bytes are those that the hub
                           keeps (an edge that can't carry them converts them)
    missing on the wire    recorded, but the connection never carried it
    missing in the ledger  carried and not recorded, although the hub did not refuse it
    not accepted           carried and not recorded; the hub refused it, or never acknowledged it;
                           of an answer, it is the hub's own refusal of the request, or came
                           from a provider when the hub did not wait for it any more
    withdrawn              recorded as delivered and as returned: the receiver left before it was
                           sent
    uncertain              without partner, and `reason` has one of: rows of the other side are
                           missing in the input; the connection was not recorded in full; a Relink
                           link was resumed (what was sent may have been sent again); it is newer
                           than the newest row of the other side; it is of the last second of a
                           connection that has no end on the wire (a hub that is killed loses what
                           its tap had not written yet), or of a Relink link of which another
                           connection has no end

How rows are matched, on one connection (or Relink link) and way: by the hub's id where the protocol
has it (EMP's `$deliver`, Epoxy's `Deliver`); then the n-th with a payload of this checksum; then
the n-th to this destination, which also finds messages that were converted or are not kept. So of
equal messages any may be shown as the missing one, but how many are missing is exact. A message
that was acknowledged is matched before one that was not.

Left out are: connections that are not tapped, replies of eMQP's workers to jobs (to the hub they
are settlements), what MicroMsg2's clients send to a `reply/` that no call has (the hub acknowledges
it, by which a client learns that all before it was read), deliveries of topics that are not durable
(the ledger only counts them), dead letters, replays and scheduled messages (they never were on a
wire).
`intact` is false where the payload in the lake no longer has the checksum taken at the edge.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from crosswire.lake.schemas import BACKWARD, FORWARD
from crosswire.pipeline.decode.meanings.contract import (
    ACKNOWLEDGEMENT,
    ERROR,
    HANDSHAKE,
    PUBLISH,
    RESPONSE,
    SEND,
)
from crosswire.pipeline.tables.missing_rows import MissingLakeRows, reason_at, reason_of_id
from crosswire.pipeline.tables.names import (
    EQUAL,
    MISSING_IN_LEDGER,
    MISSING_ON_WIRE,
    NOT_ACCEPTED,
    UNCERTAIN,
    WITHDRAWN,
)
from crosswire.pipeline.tables.steps import (
    ACCEPTED,
    ANSWERED,
    COUNTED,
    DELIVERED,
    FAILED,
    RETURNED,
)

__all__ = [
    "ANSWER",
    "IN",
    "OUT",
    "both_sides",
    "compare",
    "counted_topics",
    "is_damaged_answer",
    "is_passage",
    "judge",
    "ledger_passages",
    "reconciliation",
    "reconciliation_rows",
    "replies",
    "same_payload",
    "tapped_connections",
    "wire_passages",
    "with_replies",
]

IN: Final = "in"
OUT: Final = "out"
ANSWER: Final = "answer"

_WIRE: Final = "wire"
_LEDGER: Final = "ledger"
_LINE: Final = ("node", "line", "way")
_CONNECTION: Final = ("node", "connection")
_REFUSALS: Final = ("refused", "forbidden", "conflict", "invalid_request", "internal")
"""Failure codes of the hub's own: `gateways.failures`."""
_UNWRITTEN_US: Final = 1_000_000
"""The time before a crash of which a tap may have written nothing: it writes every 0.2 s, if the
disk is quick enough."""


def reconciliation(
    messages: DataFrame,
    frames: DataFrame,
    directions: DataFrame,
    steps: DataFrame,
    missing: Iterable[MissingLakeRows] = (),
) -> DataFrame:
    """The whole table, from `messages`, `frames` and `directions` of the wire, and from the steps
    of a hub's ledger `with_messages` of its lake, of which rows may be `missing`."""
    newest = steps.groupBy("node").agg(F.max("time").alias("newest"))
    on_wire = wire_passages(messages.join(F.broadcast(newest), "node", "left_semi"))
    rows = both_sides(
        with_replies(on_wire, replies(frames)),
        ledger_passages(steps),
        tapped_connections(directions, _links(frames)),
    )
    horizon = F.broadcast(_horizon(directions, newest))
    compared = compare(rows).join(horizon, "node", "left")
    judged = judge(compared, counted_topics(steps), missing)
    return reconciliation_rows(judged.where(~F.col("left_out")))


def both_sides(on_wire: DataFrame, in_ledger: DataFrame, connections: DataFrame) -> DataFrame:
    """The passages of both sides on the connections that were tapped, in one DataFrame."""
    of_line = Window.partitionBy("node", "line")
    is_cut = F.max(F.col("written_until").isNotNull()).over(of_line)
    is_link = F.count(F.lit(1)).over(of_line) > 1
    connections = connections.withColumn("is_cut", is_cut & is_link)
    rows = on_wire.join(connections, list(_CONNECTION)).withColumn("broken", _is_broken())
    recorded = in_ledger.join(connections, list(_CONNECTION))
    return rows.unionByName(recorded, allowMissingColumns=True)


def compare(rows: DataFrame, *more: Column, wire_columns: tuple[str, ...] = ()) -> DataFrame:
    """Each row with its partner, or alone, as the structs `wire` and `ledger`; `more` are
    aggregates of the two, and `wire_columns` are in `wire` too."""
    # What the comparison does not look at is packed: each sort and window copies one column then,
    # instead of twenty.
    packed = {
        side: F.when(F.col("side") == side, F.struct(*columns))
        for side, columns in ((_WIRE, (*_WIRE_COLUMNS, *wire_columns)), (_LEDGER, _LEDGER_COLUMNS))
    }
    others = {*rows.columns} - {*_WIRE_COLUMNS, *wire_columns, *_LEDGER_COLUMNS}
    kept = [name for name in rows.columns if name in others or name in _COMPARED]
    rows = rows.select(
        *kept,
        *(column.alias(side) for side, column in packed.items()),
        F.xxhash64(*_LINE).alias("line_hash"),
        F.lit(None).cast("int").alias("stage"),
        F.lit(None).cast("bigint").alias("turn"),
    )
    # One shuffle serves all windows and the aggregation below: all have these two in their keys.
    rows = rows.repartition("node", "line")
    for stage, by in enumerate(("id", "crc", "name")):
        rows = _match(rows, stage, by)
    # A row without partner is its own group: nothing else has its side, connection and position.
    alone = F.when(F.col("stage").isNull(), F.struct("side", "connection", "position"))
    key = (
        F.when(F.col("stage") == 0, F.col("id").cast("string"))
        .when(F.col("stage") == 1, F.col("crc").cast("string"))
        .when(F.col("stage") == 2, F.col("name"))
    )
    return (
        rows.withColumns({"alone": alone, "key": key})
        .withColumn("pair_hash", F.xxhash64("line_hash", "stage", "key", "turn", "alone"))
        .groupBy("pair_hash", *_LINE, "stage", "key", "turn", "alone")
        .agg(
            F.max(_WIRE).alias(_WIRE),
            F.max(_LEDGER).alias(_LEDGER),
            # Both rows may be of different connections of a Relink link: the worse one counts.
            F.min("whole").alias("whole"),
            F.min("written_until").alias("written_until"),
            F.max("is_cut").alias("is_cut"),
            *more,
        )
    )


def judge(
    compared: DataFrame, counted: DataFrame, missing: Iterable[MissingLakeRows] = ()
) -> DataFrame:
    """Compared rows with `verdict`, `reason` (of an uncertain one) and `left_out`.

    A row after the `horizon` of its node is uncertain: the other side has not got that far.
    `counted` are the topics whose deliveries the ledger only counts.
    """
    holes = list(missing)
    return (
        compared.join(
            F.broadcast(counted),
            (compared["node"] == counted["counted_node"])
            & (F.col("wire.destination") == counted["counted_destination"]),
            "left",
        )
        .withColumn("hole", _hole(holes))
        .withColumn("is_complete", _is_complete(holes))
        .withColumn("doubt", _doubt())
        .withColumn("verdict", _verdict())
        .withColumn("reason", F.when(F.col("verdict") == UNCERTAIN, F.col("doubt")))
        .withColumn("left_out", _is_left_out())
        .drop("counted_node", "counted_destination", "hole", "doubt")
    )


def reconciliation_rows(judged: DataFrame, *more: str) -> DataFrame:
    """The columns of the table from judged rows, and `more` of their columns."""
    return judged.select(*_output(), *more)


# ------------------------------------------------------------------------------------------ sides

_BOTH: Final = ("connection", "protocol", "destination", "kind", "time", "position", "crc", "id")
"""Columns of both sides; `position` is the offset on the wire, the row's number in the ledger."""
_WIRE_COLUMNS: Final = (*_BOTH, "acknowledged", "is_refused", "broken", "sequence", "refuses")
_LEDGER_COLUMNS: Final = (*_BOTH, "attempt", "step", "returned", "intact", "subscription")
_COMPARED: Final = ("connection", "position", "id", "crc", "name", "time", "acknowledged")
"""Columns of a side that matching looks at."""


def wire_passages(messages: DataFrame) -> DataFrame:
    """Messages on the wire that have to be in the ledger.

    Requests to EMP's own services (`service/$…`) are for the hub itself and not recorded, like
    MicroMsg2's `reply/0`, by which clients learn that the hub has read all that they sent: calls
    are numbered from 1. Nor are providers' answers with an error: the call then ends with the step
    `failed`.
    """
    is_response = F.col("kind") == RESPONSE
    backward = F.col("direction") == BACKWARD
    own = (F.col("protocol") == "emp") & F.col("destination").startswith("service/$")
    own |= (F.col("protocol") == "micromsg2") & (F.col("destination") == "reply/0")
    failed = is_response & ~backward & (F.coalesce("status", F.lit("success")) != "success")
    return messages.where(~F.coalesce(own, F.lit(False)) & ~failed).select(
        "node",
        "connection",
        "protocol",
        "destination",
        "kind",
        "time",
        F.col("offset").alias("position"),
        "crc",
        "id",
        "correlation",
        "sequence",
        F.when(~backward, IN).when(is_response, ANSWER).otherwise(OUT).alias("way"),
        F.lit(_WIRE).alias("side"),
        _name().alias("name"),
        F.coalesce(backward & is_response & _is_refusal(), F.lit(False)).alias("refuses"),
    )


def _is_refusal() -> Column:
    """Whether the status of a response is one that the hub gives to what it has not accepted."""
    return F.col("protocol").isin("emp", "micromsg2") & F.col("status").isin(*_REFUSALS)


def replies(frames: DataFrame) -> DataFrame:
    """The hub's acknowledgements of messages that it received, and its responses to requests."""
    is_reply = F.col("kind").isin(ACKNOWLEDGEMENT, RESPONSE)
    return frames.where((F.col("direction") == BACKWARD) & is_reply).select(
        *_CONNECTION,
        "protocol",
        F.col("identifier").alias("correlation"),
        "status",
        "sequence",
        "time",
    )


def with_replies(on_wire: DataFrame, replies: DataFrame) -> DataFrame:
    """Wire passages with the hub's replies to them.

    reply_ok       the reply that was found: positive or not, null if there is none. A value that
                   is there already, from an earlier batch of a stream, is kept.
    acknowledged   of what came in: true, false (also without a reply), null where the protocol
                   has no reply
    is_refused     the hub's reply to a message was negative
    undecided      a reply is still possible
    """
    if "reply_ok" not in on_wire.columns:
        on_wire = on_wire.withColumn("reply_ok", F.lit(None).cast("boolean"))
    rows = _with_found_replies(on_wire, replies)
    by_sequence = F.col("sequence").isNotNull() & (F.col("protocol") == "relink")
    is_acknowledged = (
        F.when(F.col("way") != IN, None)
        .when(F.col("reply_ok").isNotNull(), F.col("reply_ok"))
        .when((F.col("kind") == RESPONSE) | _has_no_reply(), None)
        .when(_has_own_reply() | by_sequence, False)
    )
    # A call that failed was accepted all the same: its response is no refusal.
    is_refused = F.coalesce(~F.col("reply_ok"), F.lit(False)) & (F.col("way") == IN)
    is_refused &= F.col("kind").isin(SEND, PUBLISH)
    undecided = F.col("acknowledged").isNotNull() & F.col("reply_ok").isNull()
    rows = rows.withColumns({"acknowledged": is_acknowledged, "is_refused": is_refused})
    return rows.withColumn("undecided", undecided)


def _with_found_replies(on_wire: DataFrame, replies: DataFrame) -> DataFrame:
    """Passages with `reply_ok` of the reply to each.

    Where each message has its own reply, the first one after it decides: identifiers may be used
    again. Relink acknowledges all messages of a channel up to a sequence number.
    """
    relink = F.col("protocol") == "relink"
    is_covering = relink & F.col("status").isin("consumed", "committed")
    found = replies.where(_has_own_reply() | is_covering).select(
        *_CONNECTION,
        F.col("correlation").alias("replied_to"),
        "time",
        F.when(_has_own_reply(), F.col("status") == "success").alias("ok"),
        F.when(is_covering, F.col("sequence")).alias("up_to"),
    )
    channel = F.when(relink, F.split("correlation", ":")[0])
    replied_to = F.when(_has_own_reply(), F.col("correlation")).otherwise(channel)
    rows = on_wire.withColumns({"replied_to": replied_to, "is_passage": F.lit(True)})
    rows = rows.unionByName(found, allowMissingColumns=True)
    # The hash goes first for the same reason as in `_match`.
    key = (*_CONNECTION, "replied_to")
    rows = rows.withColumn("reply_hash", F.xxhash64(*key))
    # A window over both kinds of rows in the order of time, instead of a join by time, which
    # would compare every message with every reply of its correlation. A message comes before a
    # reply of the same microsecond. The latest row comes first: Spark would go through all
    # following rows again for each one, but adds up preceding ones as it goes.
    latest_first = Window.partitionBy("reply_hash", *key).orderBy(
        F.col("time").desc(), F.col("is_passage").asc_nulls_first()
    )
    later = latest_first.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    whole = latest_first.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    rows = rows.withColumns(
        {
            "first_ok": F.last("ok", ignorenulls=True).over(later),
            "acknowledged_up_to": F.max("up_to").over(whole),
        }
    )
    came_in = F.col("way") == IN
    is_covered = came_in & (F.col("kind") != RESPONSE) & F.col("replied_to").isNotNull()
    is_covered &= F.col("sequence") <= F.col("acknowledged_up_to")
    reply_ok = F.coalesce(
        "reply_ok", F.when(came_in, F.col("first_ok")), F.when(is_covered, F.lit(True))
    )
    made = ("replied_to", "is_passage", "ok", "up_to", "reply_hash", "first_ok")
    return (
        rows.where("is_passage").withColumn("reply_ok", reply_ok).drop(*made, "acknowledged_up_to")
    )


def _has_own_reply() -> Column:
    """Whether the protocol replies to each message by its identifier."""
    return F.coalesce(F.col("protocol").isin("emp", "emqp", "epoxy"), F.lit(False))


def _has_no_reply() -> Column:
    """Publishes of eMQP and Epoxy are sent without waiting for a reply."""
    return F.col("kind").isin("publish") & F.col("protocol").isin("emqp", "epoxy")


def _is_broken() -> Column:
    """Its protocol does not reply to each message, and later the hub ended the connection with an
    error: that counts as a refusal."""
    quiet = (F.col("way") == IN) & F.col("acknowledged").isNull() & (F.col("kind") != RESPONSE)
    return F.coalesce(
        quiet & ~_has_no_reply() & (F.col("broken_off") >= F.col("time")), F.lit(False)
    )


def is_passage() -> Column:
    """Whether a step of the ledger stands for a message on a wire."""
    step = F.col("step")
    from_nowhere = (step == ACCEPTED) & (F.col("is_moved") | F.col("is_scheduled"))
    return step.isin(ACCEPTED, DELIVERED, ANSWERED, FAILED) & ~from_nowhere


def ledger_passages(steps: DataFrame) -> DataFrame:
    """The passages that the ledger has recorded, from its steps `with_messages`."""
    step = F.col("step")
    returned = F.max(F.when(step == RETURNED, True)).over(
        Window.partitionBy("id", "node", "connection", "attempt")
    )
    # The ledger notes the end of a call with the provider; the answer goes to the caller.
    ended = step.isin(ANSWERED, FAILED)
    passages = steps.withColumn("returned", F.coalesce(returned, F.lit(False))).where(is_passage())
    origin = F.col("accepted_by")
    return passages.select(
        "node",
        F.when(ended, origin["connection"]).otherwise(F.col("connection")).alias("connection"),
        F.when(ended, origin["protocol"]).otherwise(F.col("protocol")).alias("protocol"),
        F.coalesce(origin["destination"], F.col("destination")).alias("destination"),
        F.when(ended, RESPONSE).otherwise(F.col("kind")).alias("kind"),
        "time",
        F.col("seq").alias("position"),
        F.when(~ended, F.col("crc")).alias("crc"),
        "id",
        F.when(step == DELIVERED, F.greatest("attempt", F.lit(1))).alias("attempt"),
        "step",
        "returned",
        "intact",
        "subscription",
        F.when(step == ACCEPTED, IN).when(step == DELIVERED, OUT).otherwise(ANSWER).alias("way"),
        F.lit(_LEDGER).alias("side"),
    ).withColumn("name", _name())


def _name() -> Column:
    """The destination's name without its kind, which not every protocol has on the wire. Empty for
    Relink: a link has one destination, in its endpoint."""
    bare = F.regexp_replace("destination", "^(queue|topic|service|reply)/", "")
    return F.when(F.col("protocol") == "relink", "").otherwise(F.coalesce(bare, F.lit("")))


# -------------------------------------------------------------------------------- connections


def tapped_connections(directions: DataFrame, links: DataFrame, *more: Column) -> DataFrame:
    """The connections that were tapped.

    line            the Relink link that it belongs to, else its own name
    whole           all of it was recorded
    written_until   up to when that is certain, if it has no end
    broken_off      when the hub last sent an error

    `links` has `link` and `broken_off` by connection; `more` are aggregates of its directions.
    """
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
        recorded.join(links, list(_CONNECTION), "left")
        .withColumn("line", F.coalesce("link", "connection"))
        .drop("link")
    )


def _links(frames: DataFrame) -> DataFrame:
    """Link and time of the last error of each connection."""
    is_hello = (F.col("protocol") == "relink") & (F.col("kind") == HANDSHAKE)
    return (
        frames.where(F.col("direction") == BACKWARD)
        .groupBy(*_CONNECTION)
        .agg(
            F.max(F.when(is_hello, F.col("identifier"))).alias("link"),
            F.max(F.when(F.col("kind") == ERROR, F.col("time"))).alias("broken_off"),
        )
    )


def _horizon(directions: DataFrame, newest: DataFrame) -> DataFrame:
    """By node: the time up to which both sides have rows; `newest` is that of the ledger."""
    recorded = directions.groupBy("node").agg(F.max("last_time").alias("recorded"))
    return newest.join(recorded, "node").select(
        "node", F.least("recorded", "newest").alias("horizon")
    )


def counted_topics(ledger: DataFrame) -> DataFrame:
    """Topics that are not durable: the ledger only counts their deliveries."""
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
    earlier stage has paired.

    Stages go from the most to the least specific key: an id leaves no doubt, equal checksums are
    nearly always equal payloads, a destination is better than nothing.
    """
    is_free = F.col("stage").isNull() & F.col(key).isNotNull()
    wanted = F.when(is_free, F.col(key))
    # Sorting by texts that most rows have in common would take most of the time: a hash of them
    # goes first, which differs. Rows that are not free get hashes of their own.
    group_hash = F.xxhash64("line_hash", wanted, F.when(~is_free, F.col("position")))
    rows = rows.withColumns({"wanted": wanted, "group_hash": group_hash})
    # The ledger is in order by its sequence numbers, also where its clock was set back.
    time = F.when(F.col("side") == _WIRE, F.col("time"))
    in_order = (F.coalesce("acknowledged", F.lit(True)).desc(), time, "position")
    group = Window.partitionBy("group_hash", *_LINE, "wanted").orderBy("side", *in_order)
    whole = group.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    in_ledger = F.col("side") == _LEDGER
    rows = rows.withColumns(
        {
            "next": F.row_number().over(group),
            "of_ledger": F.count_if(in_ledger).over(whole),
            "of_wire": F.count_if(~in_ledger).over(whole),
        }
    )
    # The ledger's rows are the first of their group. Turns have no holes, so both sides have an
    # n-th row if n is not above the number of either.
    turn = F.when(in_ledger, F.col("next")).otherwise(F.col("next") - F.col("of_ledger"))
    is_paired = is_free & (turn <= F.least("of_ledger", "of_wire"))
    return rows.withColumns(
        {
            "stage": F.when(is_paired, F.lit(stage)).otherwise(F.col("stage")),
            "turn": F.when(is_paired, turn).otherwise(F.col("turn")),
        }
    ).drop("wanted", "group_hash", "next", "of_ledger", "of_wire")


def _verdict() -> Column:
    wire, ledger = F.col("wire"), F.col("ledger")
    unanswered = F.coalesce(wire["acknowledged"], F.lit(True)) == F.lit(False)
    return (
        # In this order: what the rows themselves prove goes before what makes them uncertain, and
        # only what nothing explains counts as missing. That a message has no reply proves nothing
        # where the reply, or the ledger's row, may be among what is missing.
        F.when(wire.isNotNull() & ledger.isNotNull(), EQUAL)
        .when(wire["is_refused"] | wire["refuses"], NOT_ACCEPTED)
        .when(F.coalesce(ledger["returned"], F.lit(False)), WITHDRAWN)
        .when(F.col("doubt").isNotNull(), UNCERTAIN)
        .when(wire["broken"] | unanswered | _is_unawaited(), NOT_ACCEPTED)
        .when(wire.isNull(), MISSING_ON_WIRE)
        .otherwise(MISSING_IN_LEDGER)
    )


def _is_unawaited() -> Column:
    """Whether it is a provider's answer. The hub records all that it waits for: one that is not
    recorded came after the deadline of the call, or after its caller had left."""
    return (F.col("way") == IN) & (F.col("wire.kind") == RESPONSE)


def _hole(missing: list[MissingLakeRows]) -> Column:
    """The rows that are missing in the input and may include the partner; null if there are none.

    Without its envelope nobody knows whether an accepted message came over a wire at all: a
    schedule may have sent it.
    """
    wire, ledger = F.col("wire"), F.col("ledger")
    no_envelope = ledger["intact"].isNull() & (F.col("way") == IN)
    return F.coalesce(
        F.when(ledger.isNull(), reason_at(missing, "ledger", wire["time"])),
        F.when(wire.isNull(), reason_at(missing, "wire", ledger["time"])),
        F.when(no_envelope, reason_at(missing, "messages", ledger["time"])),
        F.when(no_envelope, reason_of_id(missing, "messages", ledger["id"])),
    )


def _is_complete(missing: list[MissingLakeRows]) -> Column:
    """Whether no rows of about this time are missing on either side, nor any of a Relink link whose
    recording was cut off: rows are matched over all of its connections."""
    time = F.coalesce(F.col("wire.time"), F.col("ledger.time"))
    holes = [reason_at(missing, table, time) for table in ("ledger", "wire", "messages")]
    return F.coalesce(*holes).isNull() & ~F.coalesce("is_cut", F.lit(False))


def _doubt() -> Column:
    """Why a missing partner proves nothing; null if it does."""
    wire, ledger = F.col("wire"), F.col("ledger")
    time = F.coalesce(wire["time"], ledger["time"])
    resumed = (wire["protocol"] == "relink") & wire["sequence"].isNull()
    return (
        F.when(F.col("hole").isNotNull(), F.col("hole"))
        .when(~F.col("whole"), "the connection was not recorded in full")
        .when(F.coalesce(resumed, F.lit(False)), "sent again over a link that was resumed")
        .when(time > F.col("horizon"), "newer than the newest row of the other side")
        .when(time > F.col("written_until"), "of the last second before the recording ends")
        # Rows are matched over all connections of a link, so the one that is shown as missing may
        # stand for an equal one of the last second of an earlier connection.
        .when(wire.isNull() & F.col("is_cut"), "the recording of its link was cut off before")
    )


def _is_left_out() -> Column:
    wire, ledger, way = F.col("wire"), F.col("ledger"), F.col("way")
    replies = (wire["protocol"] == "emqp") & (wire["kind"] == RESPONSE)
    counted = (way == OUT) & F.col("counted_node").isNotNull()
    # An answer to a call that the hub has made is a response, whatever became of the call.
    to_nobody = (wire["protocol"] == "micromsg2") & wire["destination"].startswith("reply/")
    to_nobody &= (way == IN) & (wire["kind"] != RESPONSE)
    # A call that failed because the caller left has no answer on the wire.
    unanswered = (way == ANSWER) & (ledger["step"] == FAILED)
    alone = F.when(ledger.isNull(), replies | counted | to_nobody).when(wire.isNull(), unanswered)
    return F.coalesce(alone, F.lit(False))


def same_payload() -> Column:
    """Whether both sides of a passage have the same payload; null where nobody knows."""
    is_same = F.col("wire.crc") == F.col("ledger.crc")
    # Rows that were paired by their destination alone may be the wrong ones where others are
    # missing: that their payloads differ then proves nothing.
    return F.when(is_same | F.col("is_complete"), is_same)


def is_damaged_answer(kind: Column, intact: Column) -> Column:
    """Whether a passage is that of an answer to the hub whose payload in the lake has changed."""
    return (F.col("way") == IN) & (kind == RESPONSE) & ~intact


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
        ledger["subscription"].alias("subscription"),
        F.col("verdict"),
        F.col("reason"),
        F.coalesce(wire["time"], ledger["time"]).alias("time"),
        wire["time"].alias("wire_time"),
        ledger["time"].alias("ledger_time"),
        wire["position"].alias("offset"),
        ledger["position"].alias("ledger_seq"),
        F.when(ledger.isNull() & wire["broken"], False)
        .otherwise(wire["acknowledged"])
        .alias("acknowledged"),
        same_payload().alias("same_payload"),
        ledger["intact"].alias("intact"),
    ]
