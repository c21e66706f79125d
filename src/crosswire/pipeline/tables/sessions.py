"""gold.sessions: a connection, or a link over several: handshake, ends, counts, how it ended.

`session` is the connection's name, or what the protocol calls a link that outlives its connections
(Relink). `ended` says how its last connection did: `error` and `goodbye` (said in the protocol),
`reset` and `fin` (said by TCP only), `open` if not at all; `error` is what the error frame said.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from crosswire.lake.schemas import BACKWARD, FIN, FORWARD, OPEN, RESET
from crosswire.pipeline.protocols.contract import ERROR, GOODBYE, HANDSHAKE, MESSAGE_KINDS

__all__ = ["ended_connections", "sessions"]

_CONNECTION = ("node", "connection")


def ended_connections(directions: DataFrame) -> DataFrame:
    """Those that both sides ended, or one broke off."""
    ended = F.max((F.col("ended") == RESET).cast("int")) == 1
    both = F.sum((F.col("ended") == FIN).cast("int")) == 2
    over = F.coalesce(ended, F.lit(False)) | F.coalesce(both, F.lit(False))
    return (directions.groupBy(*_CONNECTION).agg(over.alias("is_over")).where("is_over")).select(
        *_CONNECTION
    )


def sessions(directions: DataFrame, frames: DataFrame, violations: DataFrame) -> DataFrame:
    connections = (
        _ends(directions)
        .join(_counts(frames), list(_CONNECTION), "left")
        .join(_broken(violations), list(_CONNECTION), "left")
        .withColumn("session", F.coalesce("link", "connection"))
        .withColumn(
            "how",
            F.when(F.col("last_error").isNotNull(), "error")
            .when(F.col("goodbye") == 1, "goodbye")
            .when(F.col("resets") == 1, "reset")
            .when(F.col("fins") == 2, "fin")
            .otherwise(OPEN),
        )
    )
    latest = F.struct("opened", "connection", "how", "error")
    last = F.max(latest)
    return connections.groupBy("node", "session").agg(
        F.first("protocol", ignorenulls=True).alias("protocol"),
        F.first("listener", ignorenulls=True).alias("listener"),
        F.count("*").alias("connections"),
        F.max_by("connection", "opened").alias("last_connection"),
        F.first("connector_address").alias("connector_address"),
        F.max_by("connector_port", "opened").alias("connector_port"),
        F.first("acceptor_address").alias("acceptor_address"),
        F.first("acceptor_port").alias("acceptor_port"),
        F.min("opened").alias("opened"),
        F.max("last").alias("last"),
        F.max("late").alias("late"),
        F.min("handshake_us").alias("handshake_us"),
        *(
            F.sum(name).alias(name)
            for name in (
                "frames_forward",
                "frames_backward",
                "messages_forward",
                "messages_backward",
                "bytes_forward",
                "bytes_backward",
                "gap_bytes",
                "violations",
            )
        ),
        last["how"].alias("ended"),
        last["error"].alias("error"),
    )


def _ends(directions: DataFrame) -> DataFrame:
    forward = F.col("direction") == FORWARD
    return directions.groupBy(*_CONNECTION).agg(
        F.first("protocol").alias("protocol"),
        F.first("listener").alias("listener"),
        F.first("connector_address").alias("connector_address"),
        F.first("connector_port").alias("connector_port"),
        F.first("acceptor_address").alias("acceptor_address"),
        F.first("acceptor_port").alias("acceptor_port"),
        F.min("first_time").alias("opened"),
        F.max("last_time").alias("last"),
        F.max("late").alias("late"),
        F.sum("gaps").alias("gap_bytes"),
        F.sum(F.when(forward, F.col("seen")).otherwise(0)).alias("bytes_forward"),
        F.sum(F.when(~forward, F.col("seen")).otherwise(0)).alias("bytes_backward"),
        F.max((F.col("ended") == RESET).cast("int")).alias("resets"),
        F.sum((F.col("ended") == FIN).cast("int")).alias("fins"),
    )


def _counts(frames: DataFrame) -> DataFrame:
    kind = F.col("kind")

    def count(direction: str, condition: Column) -> Column:
        return F.count_if((F.col("direction") == direction) & condition)

    no_frames = F.col("frame").isin("gap", "unsynchronized", "encrypted")
    is_frame = ~no_frames & (F.col("layer") == 0)
    is_message = kind.isin(*MESSAGE_KINDS)
    shaken = F.max(F.when(kind == HANDSHAKE, F.col("time")))
    counted = frames.groupBy(*_CONNECTION).agg(
        count(FORWARD, is_frame).alias("frames_forward"),
        count(BACKWARD, is_frame).alias("frames_backward"),
        count(FORWARD, is_message).alias("messages_forward"),
        count(BACKWARD, is_message).alias("messages_backward"),
        (shaken - F.min(F.when(kind == HANDSHAKE, F.col("time")))).alias("handshake_us"),
        F.max(
            F.when((kind == HANDSHAKE) & (F.col("direction") == BACKWARD), F.col("identifier"))
        ).alias("link"),
        F.max(F.when(kind == GOODBYE, 1)).alias("goodbye"),
        F.max(F.when(kind == ERROR, F.struct("time", "status"))).alias("last_error"),
    )
    return counted.withColumn("error", F.col("last_error.status"))


def _broken(violations: DataFrame) -> DataFrame:
    return violations.groupBy(*_CONNECTION).agg(F.count("*").alias("violations"))
