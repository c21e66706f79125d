"""silver.violations: bytes that are not what the protocol allows: where, what, which rule.

`error` is the kind of violation (malformed, unknown, unsupported, limit), `reason` explains it. The
bytes of a violation on layer 1 are also counted as a frame on layer 0.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from crosswire.pipeline.decode.row_schema import TABLE, VIOLATIONS

__all__ = ["violations"]


def violations(decoded: DataFrame) -> DataFrame:
    """One row for each violation, from decoded rows (`decode.row_schema`)."""
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
