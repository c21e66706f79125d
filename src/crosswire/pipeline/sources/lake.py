"""The hub's own records: `messages/` and `ledger/` of lakes as DataFrames."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema

from crosswire.lake.files import date_of
from crosswire.pipeline.sources.tap import grouped

__all__ = ["from_records"]


def from_records(
    spark: SparkSession, folders: Iterable[str], schema: pa.Schema, *, since_us: int = 0
) -> DataFrame:
    """The rows of these folders of one lake or several, from `since_us` on; no rows without
    folders."""
    columns = from_arrow_schema(schema)
    found = list(folders)
    if not found:
        return spark.createDataFrame([], columns)
    dated = type(columns)([*columns.fields]).add("date", "date")
    rows: DataFrame | None = None
    for paths in grouped(found):
        part = spark.read.schema(dated).parquet(*paths)
        rows = part if rows is None else rows.unionByName(part)
    assert rows is not None
    if since_us:
        # A file that is given on its own, outside a folder `date=…`, has no date. The date is
        # compared too, so that Spark skips whole folders.
        day = F.coalesce("date", F.lit(date_of(since_us)).cast("date"))
        rows = rows.where(day >= F.lit(date_of(since_us)).cast("date"))
        rows = rows.where(F.col("time") >= since_us)
    return rows.select(*columns.names)
