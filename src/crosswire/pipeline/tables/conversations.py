"""gold.conversations: a request with its response: latency, outcome.

The n-th request with a correlation goes with the n-th response to it that came the other way on the
same connection. `outcome` is the response's status; `unanswered` where the connection ended without
one. `is_open`: there is none yet, and the connection has not ended.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from crosswire.lake.schemas import BACKWARD, FORWARD
from crosswire.pipeline.decode.readings.contract import REQUEST, RESPONSE
from crosswire.pipeline.tables.sessions import ended_connections

__all__ = ["UNANSWERED", "conversations"]

UNANSWERED: Final = "unanswered"


def conversations(messages: DataFrame, directions: DataFrame) -> DataFrame:
    is_request = F.col("kind") == REQUEST
    other = F.when(F.col("direction") == FORWARD, BACKWARD).otherwise(FORWARD)
    calls = messages.where(
        F.col("kind").isin(REQUEST, RESPONSE) & F.col("correlation").isNotNull()
    ).withColumn("asker", F.when(is_request, F.col("direction")).otherwise(other))
    key = ("node", "connection", "asker", "correlation")
    turn = F.row_number().over(Window.partitionBy(*key, "kind").orderBy("offset"))

    def of(condition: str, column: str, name: str) -> Column:
        return F.max(F.when(F.col("kind") == condition, F.col(column))).alias(name)

    pairs = (
        calls.repartition(*key)
        .withColumn("turn", turn)
        .groupBy(*key, "turn")
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
    return pairs.join(ended, ["node", "connection"], "left").select(
        "node",
        "connection",
        "protocol",
        "destination",
        F.col("asker").alias("direction"),
        "correlation",
        "request_offset",
        "response_offset",
        "asked",
        "answered",
        F.when(answered, F.greatest(F.col("answered") - F.col("asked"), F.lit(0))).alias(
            "latency_us"
        ),
        "request_bytes",
        "response_bytes",
        F.when(answered, F.coalesce("status", F.lit("success")))
        .when(~is_open, UNANSWERED)
        .alias("outcome"),
        is_open.alias("is_open"),
    )
