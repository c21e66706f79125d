"""gold.topology: who talks to whom: an edge between two hosts, protocol by protocol.

`source` sent the messages and `target` received them. The side that accepted the connection is
shown with its port, the other without: its port is a different one for each connection.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from crosswire.lake.schemas import FORWARD

__all__ = ["by_edge", "combined", "edges", "topology"]

_CONNECTION: Final = ("node", "connection")
_EDGE: Final = ("source", "target", "protocol", "kind", "destination")


def topology(messages: DataFrame, directions: DataFrame) -> DataFrame:
    """The whole table, from silver.messages and the directions of their connections."""
    return by_edge(edges(messages, directions).withColumn("connections", F.lit(1)))


def edges(messages: DataFrame, directions: DataFrame) -> DataFrame:
    """One row for each connection and each edge that it is part of."""
    # Both directions of a connection have the same addresses: `first` is any of them.
    ends = directions.groupBy(*_CONNECTION).agg(
        F.first("connector_address").alias("connector"),
        F.concat_ws(
            ":", F.first("acceptor_address"), F.first("acceptor_port").cast("string")
        ).alias("acceptor"),
    )
    forward = F.col("direction") == FORWARD

    def side(first: str, second: str) -> Column:
        return F.when(forward, F.col(first)).otherwise(F.col(second))

    joined = (
        messages.select(
            *_CONNECTION,
            "direction",
            "protocol",
            "kind",
            "destination",
            "payload_length",
            F.col("time").alias("first"),
            F.col("time").alias("last"),
        )
        .withColumn("messages", F.lit(1))
        .withColumnRenamed("payload_length", "bytes")
        .join(ends, list(_CONNECTION))
        .withColumn("source", side("connector", "acceptor"))
        .withColumn("target", side("acceptor", "connector"))
    )
    return combined(joined)


def combined(parts: DataFrame) -> DataFrame:
    """Rows of `edges` that were computed separately, added up by connection and edge."""
    return parts.groupBy(*_CONNECTION, *_EDGE).agg(*_sums())


def by_edge(parts: DataFrame) -> DataFrame:
    """The table: rows of `edges`, or of the table itself, added up by edge."""
    return (
        parts.groupBy(*_EDGE)
        .agg(*_sums(), F.sum("connections").alias("connections"))
        .select(*_EDGE, "messages", "bytes", "connections", "first", "last")
    )


def _sums() -> tuple[Column, ...]:
    return (
        F.sum("messages").alias("messages"),
        F.sum("bytes").alias("bytes"),
        F.min("first").alias("first"),
        F.max("last").alias("last"),
    )
