"""gold.conversations: a request with its response: latency, outcome.

The n-th request with a correlation belongs to the n-th response with it in the other direction of
the same connection. `outcome` is the response's status, or `unanswered` where the connection ended
without a response. `is_open`: there is no response yet, and the connection has not ended.

A call through the hub is two rows, one for each `leg` (see `legs`): count or average one of them.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from crosswire.lake.schemas import BACKWARD, FORWARD
from crosswire.pipeline.decode.meanings.contract import REQUEST, RESPONSE
from crosswire.pipeline.tables.legs import clients, leg_of_request
from crosswire.pipeline.tables.names import UNANSWERED
from crosswire.pipeline.tables.principals import minute_of, with_principal
from crosswire.pipeline.tables.sessions import ended_connections

__all__ = ["CALL", "CALL_COLUMNS", "calls", "conversations", "with_partner"]

CALL_COLUMNS: Final = (
    "node",
    "connection",
    "direction",
    "offset",
    "time",
    "protocol",
    "kind",
    "destination",
    "correlation",
    "status",
    "payload_length",
)
"""The columns of silver.messages that conversations are made of."""

CALL: Final = ("node", "connection", "asker", "correlation")
"""The key of calls that share a correlation."""


def calls(messages: DataFrame) -> DataFrame:
    """Requests and responses with a correlation, numbered: the ones that belong together have the
    same `asker` (direction of the request) and the same `turn` within their correlation.

    A correlation alone does not identify a call: peers may use it again on the same connection.
    Responses to the same correlation come in the order of its requests, so their turns are equal.
    """
    is_request = F.col("kind") == REQUEST
    other = F.when(F.col("direction") == FORWARD, BACKWARD).otherwise(FORWARD)
    turn = F.row_number().over(Window.partitionBy(*CALL, "kind").orderBy("offset"))
    return (
        messages.where(F.col("kind").isin(REQUEST, RESPONSE) & F.col("correlation").isNotNull())
        .withColumn("asker", F.when(is_request, F.col("direction")).otherwise(other))
        # One shuffle by the whole key serves the window here and the aggregation or window of the
        # caller; left to itself, Spark would shuffle by (key, kind) first and by key again.
        .repartition(*CALL)
        .withColumn("turn", turn)
    )


def with_partner(numbered: DataFrame) -> DataFrame:
    """Rows of `calls` with `matched`: both the request and the response are among the rows.

    Turns have no holes, so both sides have a turn n if n is not above the number of either.
    """
    every = Window.partitionBy(*CALL)
    requests = F.count_if(F.col("kind") == REQUEST).over(every)
    responses = F.count_if(F.col("kind") == RESPONSE).over(every)
    return numbered.withColumn("matched", F.col("turn") <= F.least(requests, responses))


def conversations(
    messages: DataFrame, directions: DataFrame, known: DataFrame | None = None
) -> DataFrame:
    """One row for each request, from silver.messages (at least CALL_COLUMNS), the directions of
    their connections and the `principals` that are known. Responses whose request was not captured
    are left out."""

    def of(kind: str, column: str, name: str) -> Column:
        return F.max(F.when(F.col("kind") == kind, F.col(column))).alias(name)

    pairs = (
        calls(messages)
        .groupBy(*CALL, "turn")
        .agg(
            of(REQUEST, "protocol", "protocol"),
            of(REQUEST, "destination", "destination"),
            of(REQUEST, "offset", "request_offset"),
            of(REQUEST, "time", "asked"),
            of(REQUEST, "payload_length", "request_bytes"),
            of(RESPONSE, "offset", "response_offset"),
            of(RESPONSE, "time", "answered"),
            of(RESPONSE, "payload_length", "response_bytes"),
            of(RESPONSE, "status", "status"),
        )
        .where(F.col("asked").isNotNull())
    )
    ended = ended_connections(directions).withColumn("over", F.lit(True))
    is_open = F.col("answered").isNull() & F.col("over").isNull()
    answered = F.col("answered").isNotNull()
    # A clock that was set back between the two must not give a negative latency.
    latency_us = F.greatest(F.col("answered") - F.col("asked"), F.lit(0))
    key = ["node", "connection"]
    return (
        with_principal(pairs, known, minute_of(F.col("asked")))
        .join(ended, key, "left")
        .join(clients(directions), key, "left")
        .select(
            "node",
            "connection",
            "client",
            "principal",
            "protocol",
            "destination",
            leg_of_request(F.col("asker")).alias("leg"),
            F.col("asker").alias("direction"),
            "correlation",
            "request_offset",
            "response_offset",
            "asked",
            "answered",
            F.when(answered, latency_us).alias("latency_us"),
            "request_bytes",
            "response_bytes",
            F.when(answered, F.coalesce("status", F.lit("success")))
            .when(~is_open, UNANSWERED)
            .alias("outcome"),
            is_open.alias("is_open"),
        )
    )
