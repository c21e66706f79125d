"""Conversion of rows between the columns they are computed with and those of the catalog.

Rows are computed with times as numbers: sums, windows, the lake's files and the compiled kernels
all have µs since 1970. The tables have what analysts expect. This module is the only one that
knows both.
"""

from __future__ import annotations

import io
from functools import cache
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from crosswire.pipeline.tables.catalog import HISTOGRAM, PROPERTIES, TIME, TableEntry
from crosswire.pipeline.tables.names import NO_DATE

__all__ = ["DATE", "NO_DATE", "date_of_rows", "empty_file", "published", "restored", "schema_of"]

DATE: Final = "date"
"""The column by which tables are partitioned."""

REVOCABLE: Final = "revocable"

_BUCKETS: Final = StructType().add("bucket", IntegerType()).add("count", LongType())
_TYPES: Final[dict[str, DataType]] = {
    "string": StringType(),
    "bigint": LongType(),
    "int": IntegerType(),
    "double": DoubleType(),
    "boolean": BooleanType(),
    "binary": BinaryType(),
    TIME: TimestampType(),
    PROPERTIES: MapType(StringType(), StringType()),
    HISTOGRAM: ArrayType(_BUCKETS),
}
_ARROW_TYPES: Final[dict[str, pa.DataType]] = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "int": pa.int32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    TIME: pa.timestamp("us", "UTC"),
    PROPERTIES: pa.map_(pa.string(), pa.string()),
    HISTOGRAM: pa.list_(pa.struct([("bucket", pa.int32()), ("count", pa.int64())])),
}


@cache
def schema_of(table: TableEntry) -> StructType:
    """Spark's schema of a table, without its partition column, with the comments of its columns."""
    schema = StructType()
    for column in table.columns:
        schema = schema.add(column.name, _TYPES[column.type], True, {"comment": column.comment})
    return schema


@cache
def empty_file(table: TableEntry) -> bytes:
    """A Parquet file of a table without rows, as Spark would write it, in a hundredth of the time:
    for Spark it is a query like any other."""
    schema = schema_of(table)
    # Where Spark looks for the comments of columns.
    about = {"org.apache.spark.sql.parquet.row.metadata": schema.json()}
    columns = [(column.name, _ARROW_TYPES[column.type]) for column in table.columns]
    file = io.BytesIO()
    pq.write_table(pa.schema(columns, about).empty_table(), file)
    return file.getvalue()


def published(table: TableEntry, rows: DataFrame, revocable: Column, *more: str) -> DataFrame:
    """Rows as the table has them, and `more` of their columns as they are."""
    schema = schema_of(table)
    made = []
    for column, field in zip(table.columns, schema.fields, strict=True):
        value = revocable if column.name == REVOCABLE else F.col(column.computed_as)
        if column.type == TIME:
            value = F.timestamp_micros(value)
        elif column.type == PROPERTIES:
            value = F.from_json(value, PROPERTIES)
        elif column.name != REVOCABLE and _type_of(rows, column.computed_as) != field.dataType:
            value = value.cast(field.dataType)
        made.append(value.alias(column.name, metadata=field.metadata))
    return rows.select(*made, *more)


def _type_of(rows: DataFrame, name: str) -> object:
    return rows.schema[name].dataType


def restored(table: TableEntry, rows: DataFrame, *more: str) -> DataFrame:
    """The columns that the rows were computed with, and `more`. Properties stay a map."""
    made = []
    for column in table.columns:
        if column.name == REVOCABLE:
            continue
        value = F.col(column.name)
        if column.type == TIME:
            value = F.unix_micros(value)
        made.append(value.alias(column.computed_as, metadata={}))
    return rows.select(*made, *more)


def date_of_rows(table: TableEntry) -> Column:
    """The partition of each row, from the column that it was computed with."""
    day = F.to_date(F.timestamp_micros(F.col(table.dated_by)))
    return F.coalesce(day, F.lit(NO_DATE).cast("date"))
