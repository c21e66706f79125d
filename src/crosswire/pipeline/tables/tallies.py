"""Tallies: counts of each direction of a connection, for gold.sessions and gold.accounting.

Every column is a sum, a minimum or a maximum, so the tallies of two sets of frames can be combined
exactly. That is all that a stream has to carry of the frames of an open connection.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from crosswire.lake.schemas import BACKWARD
from crosswire.pipeline.decode.meanings.contract import ERROR, GOODBYE, HANDSHAKE, MESSAGE_KINDS

__all__ = ["combined", "tallies"]

_KEY: Final = ("node", "connection", "direction")
_NO_FRAMES: Final = ("gap", "unsynchronized", "encrypted")
_SUMS: Final = (
    "frames_count",
    "messages_count",
    "frames",
    "unsynchronized",
    "encrypted",
    "gaps_placed",
    "violations_count",
    "violations",
)
_MAXIMA: Final = ("shaken_last", "link", "goodbye", "last_error")


def tallies(frames: DataFrame, violations: DataFrame) -> DataFrame:
    """One row for each direction, from silver.frames and silver.violations.

    `frames`, `unsynchronized`, `encrypted`, `gaps_placed` and `violations` are bytes on layer 0.
    """
    parts = (_frame_counts(frames), *_sparse_columns(frames), _violation_counts(violations))
    return combined(reduce(partial(DataFrame.unionByName, allowMissingColumns=True), parts))


def combined(parts: DataFrame) -> DataFrame:
    """Tallies that were computed separately, added up to one row for each direction."""
    return parts.groupBy(*_KEY).agg(
        *(F.sum(name).alias(name) for name in _SUMS),
        F.min("shaken_first").alias("shaken_first"),
        *(F.max(name).alias(name) for name in _MAXIMA),
    )


def _frame_counts(frames: DataFrame) -> DataFrame:
    kind, name, bottom = F.col("kind"), F.col("frame"), F.col("layer") == 0
    # Layer 1 has the same bytes again, as frames inside those of layer 0.
    is_frame = ~name.isin(*_NO_FRAMES) & bottom

    def bytes_of(condition: Column, alias: str) -> Column:
        return F.sum(F.when(condition & bottom, F.col("length")).otherwise(0)).alias(alias)

    shaken = F.when(kind == HANDSHAKE, F.col("time"))
    return frames.groupBy(*_KEY).agg(
        F.count_if(is_frame).alias("frames_count"),
        F.count_if(kind.isin(*MESSAGE_KINDS)).alias("messages_count"),
        bytes_of(is_frame, "frames"),
        bytes_of(name == "unsynchronized", "unsynchronized"),
        bytes_of(name == "encrypted", "encrypted"),
        bytes_of(name == "gap", "gaps_placed"),
        F.min(shaken).alias("shaken_first"),
        F.max(shaken).alias("shaken_last"),
        F.max(F.when(kind == GOODBYE, 1)).alias("goodbye"),
    )


def _sparse_columns(frames: DataFrame) -> list[DataFrame]:
    """Maxima of texts and structs, of the few frames that have them.

    Spark aggregates texts by sorting, numbers by hashing. One such column beside the counts would
    make it sort all frames.
    """
    kind = F.col("kind")
    hellos = frames.where((kind == HANDSHAKE) & (F.col("direction") == BACKWARD))
    errors = frames.where(kind == ERROR)
    return [
        hellos.groupBy(*_KEY).agg(F.max("identifier").alias("link")),
        errors.groupBy(*_KEY).agg(F.max(F.struct("time", "status")).alias("last_error")),
    ]


def _violation_counts(violations: DataFrame) -> DataFrame:
    bottom = F.col("layer") == 0
    return violations.groupBy(*_KEY).agg(
        F.count("*").alias("violations_count"),
        F.sum(F.when(bottom, F.col("length")).otherwise(0)).alias("violations"),
    )
