"""silver.violations: bytes that are not what the protocol allows: where, what, which rule.

`error` is the kind of violation (malformed, unknown, unsupported, limit), `reason` says in words
what is wrong. On layer 1 the bytes are a frame all the same on layer 0.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from crosswire.pipeline.tables.decoded import TABLE, VIOLATIONS

__all__ = ["violations"]


def violations(decoded: DataFrame) -> DataFrame:
    return decoded.where(F.col(TABLE) == VIOLATIONS).select(
        "node",
        "connection",
        "direction",
        "layer",
        "offset",
        "length",
        "time",
        "protocol",
        F.col("status").alias("error"),
        F.get_json_object("fields", "$.reason").alias("reason"),
    )
