"""The questions of the documentation, asked of a real hub's tables in DuckDB and in Spark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from crosswire.pipeline.tables.views import view_statements
from crosswire.pipeline.visible_tables import VisibleTables
from tests.pipeline.conftest import Made

PAGE = Path(__file__).parents[2] / "docs" / "questions.md"
QUESTIONS = dict(
    re.findall(r"^### (.+?)\n.*?```sql\n(.+?)```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
)
WITHOUT_ANSWER = {
    "What can't be judged, and why?",
    "Which connections ended badly?",
    "Which connections are open, and since when?",
    "Who breaks the protocol, and how?",
}
"""Nothing of that kind happens in the run that is asked about."""


@pytest.fixture(scope="module")
def duck(hub_lake: Made) -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as engine:
        engine.execute("SET TimeZone = 'UTC'")
        for statement in views(hub_lake, "duckdb"):
            engine.execute(statement)
        yield engine


@pytest.fixture(scope="module")
def sparkling(spark: SparkSession, hub_lake: Made) -> SparkSession:
    for statement in views(hub_lake, "spark"):
        spark.sql(statement)
    return spark


def views(made: Made, dialect: str) -> list[str]:
    tables = VisibleTables(str(made.folder))
    return view_statements(dialect, {name: tables.paths(name) for name in tables.names})


def plain(rows: pa.Table) -> list[list[Any]]:
    """In words that do not depend on how an engine types its sums."""
    return [[_plain(value) for value in row.values()] for row in rows.to_pylist()]


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | bytes | bool | None) else _number_or_text(value)


def _number_or_text(value: Any) -> Any:
    try:
        return round(float(value), 3)
    except TypeError:
        return str(value)


def test_there_are_enough() -> None:
    assert len(QUESTIONS) >= 20 and QUESTIONS.keys() > WITHOUT_ANSWER


@pytest.mark.parametrize("question", QUESTIONS)
def test_both_engines_give_the_same_answer(
    duck: duckdb.DuckDBPyConnection, sparkling: SparkSession, question: str
) -> None:
    sql = QUESTIONS[question]
    in_duckdb = duck.sql(sql).to_arrow_table()
    in_spark = sparkling.sql(sql).toArrow()
    assert in_duckdb.column_names == in_spark.column_names
    assert sorted(map(str, plain(in_duckdb))) == sorted(map(str, plain(in_spark)))
    assert bool(in_duckdb.num_rows) == (question not in WITHOUT_ANSWER)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99, 1.0])
def test_percentiles_of_merged_rows_are_those_of_all_calls(
    duck: duckdb.DuckDBPyConnection, sparkling: SparkSession, hub_lake: Made, share: float
) -> None:
    """Up to the width of a bucket, in either engine."""
    rows = hub_lake.rows("gold/conversations")
    latencies = sorted(row["latency_us"] for row in rows if row["latency_us"] is not None)
    expected = latencies[ceil(len(latencies) * share) - 1]
    sql = f"SELECT latency_percentile(array_agg(histogram), {share}) AS p FROM gold.traffic"
    sql += " WHERE histogram IS NOT NULL"
    ((in_duckdb,),) = duck.execute(sql).fetchall()
    ((in_spark,),) = sparkling.sql(sql).collect()
    assert expected <= in_duckdb == in_spark <= expected * 17 / 16 + 1


def test_views_have_the_comments_of_the_catalog(
    duck: duckdb.DuckDBPyConnection, sparkling: SparkSession
) -> None:
    comment = "The user who sent it; only from the hub's own record"
    found = duck.execute(
        "SELECT comment FROM duckdb_columns() WHERE schema_name = 'silver' "
        "AND table_name = 'messages' AND column_name = 'principal'"
    ).fetchall()
    described = {
        row.col_name: row.comment for row in sparkling.sql("DESCRIBE silver.messages").collect()
    }
    assert (found, described["principal"]) == ([(comment,)], comment)
