"""The catalog: what it says of the tables is what the files, the engines and the docs have."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

from crosswire.pipeline.tables.catalog import CATALOG, TableEntry, entry, markdown
from crosswire.pipeline.tables.names import NAMES
from crosswire.pipeline.visible_tables import VisibleTables
from tests.pipeline.conftest import Made

PAGE = Path(__file__).parents[3] / "docs" / "tables.md"
TIMES = pa.timestamp("us", "UTC")


def tables(made: Made) -> list[tuple[Path, TableEntry]]:
    names = VisibleTables(str(made.folder)).names
    return [(Path(made.path(name)), entry(name)) for name in names]


def test_the_page_of_tables_is_up_to_date() -> None:
    assert PAGE.read_text() == markdown(), "run: python -m crosswire.pipeline.tables.catalog"


def test_names_are_those_of_the_catalog() -> None:
    assert tuple(CATALOG) == NAMES


def test_every_column_has_a_comment_and_names_its_unit() -> None:
    for table in CATALOG.values():
        names = [column.name for column in table.columns]
        assert len(set(names)) == len(names)
        for column in table.columns:
            assert column.comment and "|" not in column.comment
            assert not column.name.endswith("_us") or column.type == "bigint"


def test_no_column_is_a_reserved_word(spark: SparkSession) -> None:
    """`time` is one for Spark, if a setting is on that is off unless somebody asks for it."""
    query = "SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category = 'reserved'"
    reserved = {name for (name,) in duckdb.sql(query).fetchall()}
    words = spark.sql("SELECT keyword FROM sql_keywords() WHERE reserved").collect()
    reserved |= {row.keyword.lower() for row in words} - {"time"}
    names = {column.name for table in CATALOG.values() for column in table.columns}
    assert not names & reserved


def test_files_have_the_columns_of_the_catalog(hub_lake: Made) -> None:
    found = tables(hub_lake)
    assert {table.name for _, table in found} == set(NAMES) - {"wire"}
    for folder, table in found:
        rows = ds.dataset(folder, format="parquet", partitioning="hive")
        names = [column.name for column in table.columns]
        dated = ["date"] if table.dated_by and folder.parent.name != "open" else []
        assert rows.schema.names == names + dated, folder
        for column in table.columns:
            is_time = column.type == "timestamp"
            assert (rows.schema.field(column.name).type == TIMES) == is_time, column.name


def test_a_table_without_rows_has_its_columns_in_every_engine(
    spark: SparkSession, hub_lake: Made
) -> None:
    folder = hub_lake.path("silver.violations")
    expected = [*(column.name for column in CATALOG["violations"].columns), "date"]
    in_duckdb = duckdb.sql(f"SELECT * FROM read_parquet('{folder}/*/*.parquet')")
    in_spark = spark.read.parquet(folder)
    assert in_duckdb.columns == in_spark.columns == expected
    assert in_duckdb.fetchall() == in_spark.collect() == []


def test_files_have_comments_that_spark_shows(spark: SparkSession, hub_lake: Made) -> None:
    found = spark.read.parquet(hub_lake.path("gold.steps")).schema
    for column in CATALOG["steps"].columns:
        assert found[column.name].metadata["comment"] == column.comment


@pytest.mark.parametrize("name", ["sessions", "conversations", "deliveries"])
def test_only_open_rows_of_a_batch_are_revocable(hub_lake: Made, name: str) -> None:
    for layer, expected in (("gold", {False}), ("open", {True})):
        found = ds.dataset(hub_lake.path(f"{layer}.{name}"), format="parquet").to_table()
        assert set(found["revocable"].to_pylist()) <= expected
