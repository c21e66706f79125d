"""SQL that makes the tables of an output known to an engine: DuckDB or Spark.

A view for each table (`gold.traffic`) with the comments of the catalog, and the function
`latency_percentile`, which merges histograms. Views show the tables of one manifest: what a later
run or batch writes is seen after the statements were made and run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from crosswire.pipeline.tables.catalog import HISTOGRAM, TableEntry, entry
from crosswire.pipeline.tables.names import NO_DATE

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


def view_statements(dialect: str, tables: Mapping[str, Sequence[str]]) -> list[str]:
    """The statements for these tables (`gold.traffic`), one after the other; each table has the
    paths of its folders, or of its Parquet files."""
    made = [f"CREATE SCHEMA IF NOT EXISTS {layer}" for layer in _layers(tables)]
    for name, paths in tables.items():
        make = _in_duckdb if dialect == DUCKDB else _in_spark
        made += make(name, paths)
    return [*made, _PERCENTILE[dialect]]


def _layers(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


def _in_duckdb(name: str, paths: Sequence[str]) -> list[str]:
    table = entry(name)
    dated = table.dated_by and not name.startswith("open.")
    options = "hive_partitioning = true, hive_types = {'date': DATE}" if dated else ""
    inner = f"/{'*/' if dated else ''}*.parquet"
    patterns = ", ".join(
        _text(path if path.endswith(".parquet") else f"{path}{inner}") for path in paths
    )
    rows = f"read_parquet([{patterns}]{', ' if options else ''}{options})"
    # By name: the paths of a stream's files have more than the date.
    columns = ", ".join([*(column.name for column in table.columns), *(["date"] if dated else [])])
    made = [
        f"CREATE OR REPLACE VIEW {name} AS SELECT {columns} FROM {rows}",
        f"COMMENT ON VIEW {name} IS {_text(_about(name, table))}",
    ]
    for column in table.columns:
        made.append(f"COMMENT ON COLUMN {name}.{column.name} IS {_text(column.comment)}")
    return made


def _in_spark(name: str, paths: Sequence[str]) -> list[str]:
    table = entry(name)
    columns = [(column.name, column.comment) for column in table.columns]
    selected = [column for column, _ in columns]
    is_folder = len(paths) == 1 and not paths[0].endswith(".parquet")
    if table.dated_by and not name.startswith("open."):
        columns.append(("date", "Date of the row's time, by which the table is partitioned"))
        # Spark finds dates in the folders below one folder only, not in those of single files.
        selected.append("date" if is_folder else f"{_date_in_spark(table)} AS date")
    described = ", ".join(f"{column} COMMENT {_escaped(comment)}" for column, comment in columns)
    return [
        f"CREATE OR REPLACE VIEW {name} ({described}) COMMENT {_escaped(_about(name, table))} "
        f"AS SELECT {', '.join(selected)} FROM parquet.`{_pattern(paths)}`"
    ]


def _pattern(paths: Sequence[str]) -> str:
    """Any of the paths: Spark takes a pattern, but no list. It must not begin with a brace, since
    Hadoop would take that for a relative path."""
    if len(paths) == 1:
        return paths[0]
    parts = [path.split("/") for path in paths]
    shared = 0
    while all(len(each) > shared + 1 and each[shared] == parts[0][shared] for each in parts):
        shared += 1
    rest = ",".join("/".join(each[shared:]) for each in parts)
    return "/".join([*parts[0][:shared], f"{{{rest}}}"])


def _date_in_spark(table: TableEntry) -> str:
    time = next(each.name for each in table.columns if each.computed_as == table.dated_by)
    return f"coalesce(CAST({time} AS DATE), DATE'{NO_DATE}')"


def _about(name: str, table: TableEntry) -> str:
    return table.row + (", may still change" if name.startswith("open.") else "")


def _text(text: str) -> str:
    """A text in standard SQL."""
    return "'" + text.replace("'", "''") + "'"


def _escaped(text: str) -> str:
    """A text in Spark's SQL, where a doubled quote ends one text and begins the next."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
