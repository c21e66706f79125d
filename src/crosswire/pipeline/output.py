"""The output of a batch: a run writes its tables to a folder of its own, and its manifest shows
all of them at once.

A run that fails or is killed shows nothing, and a second run over the same input replaces the
tables, so nothing is doubled. See `manifests`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.errors import InvalidInput
from crosswire.pipeline.manifests import Manifests, TablePaths
from crosswire.pipeline.spark import in_one_task
from crosswire.pipeline.stores import Settings, TableStore, is_local, open_store
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

__all__ = ["MERGED_BYTES", "MERGED_FILES", "Output", "refuse_older_layouts", "setting_of"]

MERGED_FILES: Final = 24
"""The number of small files of a table and a date that are written again as one."""
MERGED_BYTES: Final = 32 * 1024 * 1024
"""A larger file is never merged."""

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
    written, by table, and `counts` has what was to be counted in the same pass.

    Raises InvalidInput if it holds the tables of a stream, or those of an older version.
    """

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._spark = spark
        self.rows: dict[str, int] = {}
        self.counts: dict[str, dict[str, int]] = {}
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

    def write(
        self, name: str, rows: DataFrame, counts: Mapping[str, Column] | None = None
    ) -> DataFrame:
        """Write a table of the catalog (`silver.frames`), by date if it has one; `counts` are
        conditions whose rows are counted.

        Returns it as read back, in the columns that it was computed with: what is made of it does
        not compute it again.
        """
        table, is_open = entry(name), name.startswith("open.")
        counted = Observation(name)
        metrics = [F.count_if(each).alias(key) for key, each in (counts or {}).items()]
        rows = rows.observe(counted, F.count(F.lit(1)).alias("rows"), *metrics)
        path = f"{self._run.url}/{name.replace('.', '/')}"
        if table.dated_by and not is_open:
            rows = rows.withColumn(DATE, date_of_rows(table))
            rows = published(table, rows, F.lit(False), DATE)
            rows.write.partitionBy(DATE).parquet(path)
        else:
            published(table, rows, F.lit(is_open)).write.parquet(path)
        found = counted.get
        self.rows[name] = found["rows"]
        self.counts[name] = {key: found[key] for key in counts or {}}
        if table.dated_by and not is_open and not self.rows[name]:
            # Without rows Spark writes no partition: no file would have the columns.
            self._create_empty(name, f"{DATE}={NO_DATE}/")
        read = in_one_task(self._spark.read.schema(schema_of(table)).parquet(path))
        return restored(table, read)

    def write_no_rows(self, name: str) -> None:
        """Write a table without rows, for which Spark would take as long as for a few."""
        self.rows[name], self.counts[name] = 0, {}
        self._create_empty(name, f"{DATE}={NO_DATE}/" if self._is_dated(name) else "")

    def _is_dated(self, name: str) -> bool:
        return bool(entry(name).dated_by) and not name.startswith("open.")

    def _create_empty(self, name: str, folder: str) -> None:
        path = f"{name.replace('.', '/')}/{folder}empty.parquet"
        self._run.create(path, empty_file(entry(name)))

    def write_work(self, name: str, rows: DataFrame, *split_by: str) -> DataFrame:
        """Like `write`, for rows that only this run needs: they are not committed."""
        path = f"{self._run.url}/{_WORK}/{name}"
        rows.write.partitionBy(*split_by).parquet(path)
        return in_one_task(self._spark.read.schema(rows.schema).parquet(path))

    def commit(self) -> None:
        """Show the new tables instead of the old ones; those that were not written again stay.
        Raises PipelineError if another run was first."""
        newest = self._manifests.newest
        tables = {} if newest is None else dict(newest.tables)
        for name in self.rows:
            folder = f"{self._run.folder}/{name.replace('.', '/')}"
            self._merge_small_files(name, folder)
            tables[name] = TablePaths([folder])
        self._manifests.commit(tables)
        self._is_committed = True
        self._store.delete(f"{self._run.folder}/{_WORK}")
        self._manifests.remove_old()

    def _merge_small_files(self, name: str, folder: str) -> None:
        """Write many small files of a date as few: a cluster writes one for each task and date.
        Nobody sees the folder yet, so they are deleted at once."""
        small: dict[str, list[tuple[str, int]]] = {}
        for path, size_bytes in self._store.row_files(folder):
            if size_bytes < MERGED_BYTES:
                small.setdefault(path.rpartition("/")[0], []).append((path, size_bytes))
        for parent, files in small.items():
            if len(files) < MERGED_FILES:
                continue
            urls = [self._store.url(path) for path, _ in files]
            rows = self._spark.read.schema(schema_of(entry(name))).parquet(*urls)
            count = 1 + sum(size_bytes for _, size_bytes in files) // (4 * MERGED_BYTES)
            rows.coalesce(count).write.mode("append").parquet(self._store.url(parent))
            for path, _ in files:
                self._store.delete(path)
                if is_local(self._store.root):
                    # Hadoop's checksum of a local file, which is hidden beside it.
                    self._store.delete(f"{parent}/.{path.rpartition('/')[2]}.crc")

    def close(self) -> None:
        """Delete what was not committed."""
        self._run.end(keep=self._is_committed)
