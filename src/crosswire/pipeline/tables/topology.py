"""gold.topology: who talks to whom: an edge between two hosts, protocol by protocol.

`source` sent the messages and `target` got them. The side that accepted the connection is shown
with its port, the other without: that one is different each time.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from crosswire.lake.schemas import FORWARD

__all__ = ["topology"]


def topology(messages: DataFrame, directions: DataFrame) -> DataFrame:
    ends = directions.groupBy("node", "connection").agg(
        F.first("connector_address").alias("connector"),
        F.concat_ws(
            ":", F.first("acceptor_address"), F.first("acceptor_port").cast("string")
        ).alias("acceptor"),
    )
    forward = F.col("direction") == FORWARD

    def side(first: str, second: str) -> Column:
        return F.when(forward, F.col(first)).otherwise(F.col(second))

    return (
        messages.select(
            "node",
            "connection",
            "direction",
            "protocol",
            "kind",
            "destination",
            "time",
            "payload_length",
        )
        .join(ends, ["node", "connection"])
        .withColumn("source", side("connector", "acceptor"))
        .withColumn("target", side("acceptor", "connector"))
        .groupBy("source", "target", "protocol", "kind", "destination")
        .agg(
            F.count("*").alias("messages"),
            F.sum("payload_length").alias("bytes"),
            F.count_distinct("node", "connection").alias("connections"),
            F.min("time").alias("first"),
            F.max("time").alias("last"),
        )
    )
