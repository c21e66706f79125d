"""The folder of tables: written beside the old ones, then put in their place.

    OUTPUT/bronze/wire/  silver/frames/ …  gold/sessions/ …  open/sessions/ …

A run writes into `OUTPUT/.new`. Only when all its tables are there do they replace the old ones,
one rename each: a run that fails leaves what was there, one over the same input doubles nothing.
"""

from __future__ import annotations

from typing import Any, Final

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.errors import InvalidInput, PipelineError

__all__ = ["LAYERS", "STREAM", "Output"]

LAYERS: Final = ("bronze", "silver", "gold", "open")
STREAM: Final = ".stream"
"""Where a stream keeps its books."""

_NEW: Final = ".new"


class Output:
    """`root` may be a path of any file system that Spark can write to; `rows` counts what was
    written, table by table."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._spark = spark
        self._root = root.rstrip("/")
        self.rows: dict[str, int] = {}
        jvm: Any = spark._jvm
        self._path = jvm.org.apache.hadoop.fs.Path
        where = self._path(self._root)
        self._files = where.getFileSystem(spark._jsc.hadoopConfiguration())
        if self._files.exists(self._path(f"{self._root}/{STREAM}")):
            raise InvalidInput(
                f"{root} holds the tables of a stream: a batch needs a folder of its own"
            )
        self.discard()
        if not self._files.mkdirs(self._path(f"{self._root}/{_NEW}")):
            raise PipelineError(f"can't write to {root}")

    def write(self, name: str, rows: DataFrame, *, dated_by: str | None = None) -> DataFrame:
        """Write a table (`silver/frames`) and give it back as it stands on disk."""
        counted = Observation(name)
        rows = rows.observe(counted, F.count(F.lit(1)).alias("rows"))
        schema = rows.schema
        path = f"{self._root}/{_NEW}/{name}"
        if dated_by is not None:
            date = F.to_date(F.timestamp_micros(F.col(dated_by)))
            rows.withColumn("date", date).write.partitionBy("date").parquet(path)
        else:
            rows.write.parquet(path)
        self.rows[name] = counted.get["rows"]
        return self._spark.read.schema(schema).parquet(path)

    def write_work(self, name: str, rows: DataFrame, *, split_by: str) -> DataFrame:
        """Like `write`, for what is not to stay."""
        path = f"{self._root}/{_NEW}/.work/{name}"
        rows.write.partitionBy(split_by).parquet(path)
        return self._spark.read.schema(rows.schema).parquet(path)

    def commit(self) -> None:
        """Put the new tables in the place of the old ones."""
        for name in self.rows:
            target = self._path(f"{self._root}/{name}")
            self._files.delete(target, True)
            self._files.mkdirs(target.getParent())
            self._files.rename(self._path(f"{self._root}/{_NEW}/{name}"), target)
        self.discard()

    def discard(self) -> None:
        """Forget what was not committed."""
        self._files.delete(self._path(f"{self._root}/{_NEW}"), True)
