"""gold.sessions: a connection, or a link over several: handshake, ends, counts, how it ended.

`session` is the connection's name, or the name of a Relink link, which outlives its connections.
`ended` is how its last connection ended: `error` or `goodbye` (a frame of the protocol), `reset` or
`fin` (of TCP, without such a frame), `killed` (it has no end, and its hub was started again since),
or `open`; `error` is the status of the error frame.

The name of a hub's connection has the number of the hub's start: a connection of a later start, on
the wire or in the ledger, shows that all connections of earlier ones are over.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from crosswire.lake.schemas import BACKWARD, FIN, FORWARD, OPEN, RESET, START_OF_CONNECTION
from crosswire.pipeline.tables.finality import union_of

__all__ = [
    "KILLED",
    "by_session",
    "connections",
    "ended_connections",
    "latest_starts",
    "with_killed",
]

KILLED: Final = "killed"

_CONNECTION: Final = ("node", "connection")
_SUMS: Final = (
    "frames_forward",
    "frames_backward",
    "messages_forward",
    "messages_backward",
    "bytes_forward",
    "bytes_backward",
    "gap_bytes",
    "violations",
)
_SESSION: Final = (
    "node",
    "session",
    "protocol",
    "listener",
    "connections",
    "last_connection",
    "connector_address",
    "connector_port",
    "acceptor_address",
    "acceptor_port",
    "opened",
    "last",
    "late",
    "handshake_us",
    *_SUMS,
    "ended",
    "error",
)


def ended_connections(directions: DataFrame) -> DataFrame:
    """Connections (node, connection) that both sides have closed, or one has reset."""
    ended = F.max((F.col("ended") == RESET).cast("int")) == 1
    both = F.sum((F.col("ended") == FIN).cast("int")) == 2
    over = F.coalesce(ended, F.lit(False)) | F.coalesce(both, F.lit(False))
    return (directions.groupBy(*_CONNECTION).agg(over.alias("is_over")).where("is_over")).select(
        *_CONNECTION
    )


def latest_starts(*connections: DataFrame | None) -> DataFrame:
    """By node, the `latest_start` of its hub that any of these connections was accepted after."""
    names = union_of(*[None if each is None else each.select(*_CONNECTION) for each in connections])
    return names.groupBy("node").agg(F.max(_start(F.col("connection"))).alias("latest_start"))


def with_killed(connections: DataFrame, starts: DataFrame) -> DataFrame:
    """Rows of `connections`, with those without an end whose hub was started again as killed."""
    is_killed = (F.col("how") == OPEN) & (_start(F.col("connection")) < F.col("latest_start"))
    return (
        connections.join(F.broadcast(starts), "node", "left")
        .withColumn("how", F.when(is_killed, KILLED).otherwise(F.col("how")))
        .drop("latest_start")
    )


def _start(connection: Column) -> Column:
    """The number of the hub's start in a connection's name; null for names of captured ones."""
    # Java's expressions have another syntax for groups with names.
    digits = F.regexp_extract(connection, START_OF_CONNECTION.replace("?P<start>", ""), 1)
    return F.conv(F.nullif(digits, F.lit("")), 16, 10).cast("bigint")


def connections(directions: DataFrame, tallies: DataFrame, *more: Column) -> DataFrame:
    """A row for each connection; `more` are aggregates of its directions."""
    return (
        _ends(directions, *more)
        .join(_counts(tallies), list(_CONNECTION), "left")
        .withColumn("session", F.coalesce("link", "connection"))
        .withColumn(
            "how",
            # The most specific cause first: after an error or a goodbye TCP ends as well.
            F.when(F.col("last_error").isNotNull(), "error")
            .when(F.col("goodbye") == 1, "goodbye")
            .when(F.col("resets") == 1, "reset")
            .when(F.col("fins") == 2, "fin")
            .otherwise(OPEN),
        )
    )


def by_session(connections: DataFrame, *more: Column) -> DataFrame:
    """Rows of `connections` grouped by session; `more` are aggregates of a session's connections.

    Names, addresses and the end of a link are those of its latest connection.
    """
    order = F.struct("opened", "connection")
    latest = {
        "protocol": "protocol",
        "listener": "listener",
        "connection": "last_connection",
        "connector_address": "connector_address",
        "connector_port": "connector_port",
        "acceptor_address": "acceptor_address",
        "acceptor_port": "acceptor_port",
        "how": "ended",
        "error": "error",
    }
    # One struct for all columns: one aggregate instead of nine.
    last = F.max_by(F.struct(*latest), order)
    grouped = connections.groupBy("node", "session").agg(
        last.alias("last_one"),
        F.count("*").alias("connections"),
        F.min("opened").alias("opened"),
        F.max("last").alias("last"),
        F.max("late").alias("late"),
        F.min("handshake_us").alias("handshake_us"),
        *(F.sum(name).alias(name) for name in _SUMS),
        *more,
    )
    added = [name for name in grouped.columns if name not in _SESSION]
    flat = grouped.select(
        "*", *(F.col(f"last_one.{old}").alias(new) for old, new in latest.items())
    )
    return flat.select(*_SESSION, *(name for name in added if name != "last_one"))


def _ends(directions: DataFrame, *more: Column) -> DataFrame:
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
        *more,
    )


def _counts(tallies: DataFrame) -> DataFrame:
    def of(direction: str, column: str) -> Column:
        return F.sum(F.when(F.col("direction") == direction, F.col(column)))

    counted = tallies.groupBy(*_CONNECTION).agg(
        of(FORWARD, "frames_count").alias("frames_forward"),
        of(BACKWARD, "frames_count").alias("frames_backward"),
        of(FORWARD, "messages_count").alias("messages_forward"),
        of(BACKWARD, "messages_count").alias("messages_backward"),
        (F.max("shaken_last") - F.min("shaken_first")).alias("handshake_us"),
        F.max("link").alias("link"),
        F.max("goodbye").alias("goodbye"),
        F.max("last_error").alias("last_error"),
        F.sum("violations_count").alias("violations"),
    )
    return counted.withColumn("error", F.col("last_error.status"))
