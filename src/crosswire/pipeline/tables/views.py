"""SQL that makes the tables of an output known to an engine: DuckDB or Spark.

A view for each table (`gold.traffic`) with the comments of the catalog, and the function
`latency_percentile`, which merges histograms.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from crosswire.pipeline.tables.catalog import HISTOGRAM, TableEntry, entry

__all__ = ["DIALECTS", "view_statements"]

DUCKDB: Final = "duckdb"
SPARK: Final = "spark"
DIALECTS: Final = (DUCKDB, SPARK)

# The highest value of a bucket: see `histogram.py`, which has the same in words.
_PERCENTILE: Final = {
    DUCKDB: """\
CREATE OR REPLACE MACRO latency_percentile(histograms, share) AS (
  SELECT CASE WHEN bucket < 32 THEN bucket
         ELSE ((bucket % 16 + 17)::BIGINT << (bucket // 16 - 1)::BIGINT) - 1 END
  FROM (SELECT bucket, sum(n) OVER (ORDER BY bucket) AS below, sum(n) OVER () AS total
        FROM (SELECT entry.bucket AS bucket, sum(entry.count) AS n
              FROM (SELECT unnest(flatten(histograms)) AS entry) GROUP BY entry.bucket))
  WHERE below >= ceil(total * share) ORDER BY bucket LIMIT 1
)""",
    SPARK: f"""\
CREATE OR REPLACE TEMPORARY FUNCTION latency_percentile(
  histograms ARRAY<{HISTOGRAM.upper()}>, share DOUBLE
) RETURNS BIGINT RETURN aggregate(
  array_sort(flatten(histograms)),
  named_struct('below', 0L, 'bucket', CAST(NULL AS INT)),
  (state, entry) -> named_struct(
    'below', state.below + entry.count,
    'bucket', CASE WHEN state.bucket IS NULL AND state.below + entry.count >= ceil(share *
      aggregate(flatten(histograms), 0L, (sum, each) -> sum + each.count))
      THEN entry.bucket ELSE state.bucket END
  ),
  state -> CASE WHEN state.bucket < 32 THEN CAST(state.bucket AS BIGINT)
    ELSE shiftleft(CAST(state.bucket % 16 + 17 AS BIGINT), state.bucket DIV 16 - 1) - 1 END
)""",
}


def view_statements(dialect: str, root: str, tables: Iterable[str]) -> list[str]:
    """The statements for these tables (`gold.traffic`) below `root`, one after the other."""
    root = root.rstrip("/")
    names = list(tables)
    made = [f"CREATE SCHEMA IF NOT EXISTS {layer}" for layer in _layers(names)]
    for name in names:
        make = _in_duckdb if dialect == DUCKDB else _in_spark
        made += make(name, f"{root}/{name.replace('.', '/')}")
    return [*made, _PERCENTILE[dialect]]


def _layers(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


def _in_duckdb(name: str, folder: str) -> list[str]:
    table = entry(name)
    dated = table.dated_by and not name.startswith("open.")
    options = "hive_partitioning = true, hive_types = {'date': DATE}" if dated else ""
    pattern = _text(f"{folder}/{'*/' if dated else ''}*.parquet")
    rows = f"read_parquet({pattern}{', ' if options else ''}{options})"
    made = [
        f"CREATE OR REPLACE VIEW {name} AS SELECT * FROM {rows}",
        f"COMMENT ON VIEW {name} IS {_text(_about(name, table))}",
    ]
    for column in table.columns:
        made.append(f"COMMENT ON COLUMN {name}.{column.name} IS {_text(column.comment)}")
    return made


def _in_spark(name: str, folder: str) -> list[str]:
    table = entry(name)
    columns = [(column.name, column.comment) for column in table.columns]
    if table.dated_by and not name.startswith("open."):
        columns.append(("date", "Date of the row's time, by which the table is partitioned"))
    described = ", ".join(f"{column} COMMENT {_escaped(comment)}" for column, comment in columns)
    selected = ", ".join(column for column, _ in columns)
    return [
        f"CREATE OR REPLACE VIEW {name} ({described}) COMMENT {_escaped(_about(name, table))} "
        f"AS SELECT {selected} FROM parquet.`{folder}`"
    ]


def _about(name: str, table: TableEntry) -> str:
    return table.row + (", may still change" if name.startswith("open.") else "")


def _text(text: str) -> str:
    """A text in standard SQL."""
    return "'" + text.replace("'", "''") + "'"


def _escaped(text: str) -> str:
    """A text in Spark's SQL, where a doubled quote ends one text and begins the next."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
