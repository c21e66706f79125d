"""The output of a batch: a run writes its tables to a folder of its own, and its manifest shows
all of them at once.

A run that fails or is killed shows nothing, and a second run over the same input replaces the
tables, so nothing is doubled. See `manifests`.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.errors import InvalidInput
from crosswire.pipeline.manifests import Manifests, TablePaths
from crosswire.pipeline.stores import Settings, TableStore, open_store
from crosswire.pipeline.tables.catalog import entry
from crosswire.pipeline.tables.published import (
    DATE,
    NO_DATE,
    date_of_rows,
    empty_file,
    published,
    restored,
    schema_of,
)

__all__ = ["Output", "refuse_older_layouts", "setting_of"]

_WORK: Final = "work"


def setting_of(spark: SparkSession) -> Settings:
    """Finds settings of a session by their names; None for those that are not set."""
    return lambda name: spark.conf.get(name, None)


def refuse_older_layouts(store: TableStore) -> None:
    """Raises InvalidInput if the folder has tables that an older version wrote."""
    if {".tables", ".stream"} & set(store.names("")):
        raise InvalidInput(
            f"{store.root} was written by another version of crosswire: start a new folder"
        )


class Output:
    """The tables below `root`, in any store that Spark can write to. `rows` counts what was
    written, by table.

    Raises InvalidInput if it holds the tables of a stream, or those of an older version.
    """

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._spark = spark
        self.rows: dict[str, int] = {}
        self._store = open_store(root, setting_of(spark))
        refuse_older_layouts(self._store)
        self._manifests = Manifests(self._store)
        newest = self._manifests.newest
        if newest is not None and newest.is_stream:
            raise InvalidInput(
                f"{root} holds the tables of a stream: a batch needs a folder of its own"
            )
        self._manifests.remove_abandoned()
        self._run = self._manifests.begin_run()
        self._is_committed = False

    def write(self, name: str, rows: DataFrame) -> DataFrame:
        """Write a table of the catalog (`silver.frames`), by date if it has one.

        Returns it as read back, in the columns that it was computed with: what is made of it does
        not compute it again.
        """
        table, is_open = entry(name), name.startswith("open.")
        counted = Observation(name)
        rows = rows.observe(counted, F.count(F.lit(1)).alias("rows"))
        path = f"{self._run.url}/{name.replace('.', '/')}"
        if table.dated_by and not is_open:
            rows = rows.withColumn(DATE, date_of_rows(table))
            rows = published(table, rows, F.lit(False), DATE)
            rows.write.partitionBy(DATE).parquet(path)
        else:
            published(table, rows, F.lit(is_open)).write.parquet(path)
        self.rows[name] = counted.get["rows"]
        if table.dated_by and not is_open and not self.rows[name]:
            # Without rows Spark writes no partition: no file would have the columns.
            folder = f"{name.replace('.', '/')}/{DATE}={NO_DATE}"
            self._run.create(f"{folder}/empty.parquet", empty_file(table))
        return restored(table, self._spark.read.schema(schema_of(table)).parquet(path))

    def write_work(self, name: str, rows: DataFrame, *, split_by: str) -> DataFrame:
        """Like `write`, for rows that only this run needs: they are not committed."""
        path = f"{self._run.url}/{_WORK}/{name}"
        rows.write.partitionBy(split_by).parquet(path)
        return self._spark.read.schema(rows.schema).parquet(path)

    def commit(self) -> None:
        """Show the new tables instead of the old ones; those that were not written again stay.
        Raises PipelineError if another run was first."""
        newest = self._manifests.newest
        tables = {} if newest is None else dict(newest.tables)
        for name in self.rows:
            tables[name] = TablePaths([f"{self._run.folder}/{name.replace('.', '/')}"])
        self._manifests.commit(tables)
        self._is_committed = True
        self._store.delete(f"{self._run.folder}/{_WORK}")
        self._manifests.remove_old()

    def close(self) -> None:
        """Delete what was not committed."""
        self._run.end(keep=self._is_committed)
