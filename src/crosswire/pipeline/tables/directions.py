"""silver.directions: one direction of a connection: addresses, times, bytes, how it ended.

`seen` counts its bytes, those of gaps included; `tail` those of a frame that was incomplete when
the capture ended; `unread` those that could not be decoded
after a violation. `ended` is `fin`, `reset`, or
null while it is open. `late`: its beginning was not captured.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from crosswire.pipeline.decode.row_schema import DIRECTIONS, TABLE

__all__ = ["directions"]

_SUMMARY: Final = (
    "listener string, connector_address string, connector_port int, acceptor_address string, "
    "acceptor_port int, opened boolean, late boolean, first_time bigint, gaps bigint, "
    "tail bigint, unread bigint"
)


def directions(decoded: DataFrame) -> DataFrame:
    """One row for each direction, from decoded rows (`decode.row_schema`)."""
    summary = F.from_json("fields", _SUMMARY).alias("summary")
    return (
        decoded.where(F.col(TABLE) == DIRECTIONS)
        .select("*", summary)
        .select(
            "node",
            "connection",
            "direction",
            "protocol",
            "summary.listener",
            "summary.connector_address",
            "summary.connector_port",
            "summary.acceptor_address",
            "summary.acceptor_port",
            "summary.opened",
            "summary.late",
            "summary.first_time",
            F.col("time").alias("last_time"),
            F.col("offset").alias("first_offset"),
            F.col("length").alias("seen"),
            "summary.gaps",
            "summary.tail",
            "summary.unread",
            F.col("status").alias("ended"),
        )
    )
