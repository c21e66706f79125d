"""The hub's own tap: the lake's `wire/` files as bronze.wire."""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.lake.files import date_of
from crosswire.pipeline.tables.wire import COLUMNS

__all__ = ["from_tap"]


def from_tap(spark: SparkSession, folders: Iterable[str], *, since_us: int = 0) -> DataFrame:
    """bronze.wire of `wire/` folders of one lake or several."""
    wire: DataFrame | None = None
    for folder in folders:
        schema = type(COLUMNS)([*COLUMNS.fields]).add("date", "date")
        rows = spark.read.schema(schema).parquet(folder)
        if since_us:
            rows = rows.where(F.col("date") >= F.lit(date_of(since_us)).cast("date"))
            rows = rows.where(F.col("time") >= since_us)
        rows = rows.select(*COLUMNS.names)
        wire = rows if wire is None else wire.unionByName(rows)
    assert wire is not None
    return wire
