"""The output folder of a batch: tables are written beside the old ones and replace them at once.

    OUTPUT/bronze/wire/  silver/frames/ …  gold/sessions/ …  open/sessions/ …

A run that fails or is killed leaves the old tables, and a second run over the same input replaces
them, so nothing is doubled. In the local file system the four folders are symbolic links:

    OUTPUT/.tables/4f1c…/gold/sessions/     what a run wrote
    OUTPUT/.tables/current -> 4f1c…         the run whose tables are shown: one rename switches
    OUTPUT/gold -> .tables/current/gold

Other file systems have no links. There a run commits the list of its tables, in one rename, and
then moves them; if it is killed in between, the next run moves the rest.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Final, Protocol

import msgspec
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.errors import InvalidInput, PipelineError
from crosswire.pipeline.files import Files, lock
from crosswire.pipeline.tables.catalog import entry
from crosswire.pipeline.tables.names import LAYERS
from crosswire.pipeline.tables.published import (
    DATE,
    NO_DATE,
    date_of_rows,
    published,
    restored,
    schema_of,
)

__all__ = ["STREAM", "Output"]

STREAM: Final = ".stream"
"""The folder of a stream's commits and state."""

_TABLES: Final = ".tables"
_CURRENT: Final = "current"
_WORK: Final = ".work"


class Output:
    """The tables below `root`, in any file system that Spark can write to, for one writer at a time
    until `close`. `rows` counts what was written, by table.

    Raises InvalidInput if another process writes there, or if the folder is that of a stream.
    """

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._spark = spark
        self.rows: dict[str, int] = {}
        root = root.rstrip("/")
        self._files = Files(spark, root)
        try:
            if self._files.exists(f"{root}/{STREAM}"):
                raise InvalidInput(
                    f"{root} holds the tables of a stream: a batch needs a folder of its own"
                )
            self._files.make_folder(f"{root}/{_TABLES}")
            self._lock = lock(f"{root}/{_TABLES}")
        except BaseException:
            self._files.close()
            raise
        try:
            self._target = self._target_in(root)
        except BaseException:
            self._release()
            raise

    def _target_in(self, root: str) -> _OutputTarget:
        return _MovedTarget(self._files, root) if "://" in root else _LinkedTarget(Path(root))

    def write(self, name: str, rows: DataFrame) -> DataFrame:
        """Write a table of the catalog (`silver.frames`), by date if it has one.

        Returns it as read back, in the columns that it was computed with: what is made of it does
        not compute it again.
        """
        table, is_open = entry(name), name.startswith("open.")
        counted = Observation(name)
        rows = rows.observe(counted, F.count(F.lit(1)).alias("rows"))
        path = f"{self._target.new}/{name.replace('.', '/')}"
        if table.dated_by and not is_open:
            rows = rows.withColumn(DATE, date_of_rows(table))
            rows = published(table, rows, F.lit(False), DATE)
            rows.write.partitionBy(DATE).parquet(path)
        else:
            published(table, rows, F.lit(is_open)).write.parquet(path)
        self.rows[name] = counted.get["rows"]
        if table.dated_by and not is_open and not self.rows[name]:
            # Without rows Spark writes no partition: no file would have the columns.
            empty = self._spark.createDataFrame([], schema_of(table)).coalesce(1)
            empty.write.parquet(f"{path}/{DATE}={NO_DATE}")
        return restored(table, self._spark.read.schema(schema_of(table)).parquet(path))

    def write_work(self, name: str, rows: DataFrame, *, split_by: str) -> DataFrame:
        """Like `write`, for rows that only this run needs: they are not committed."""
        path = f"{self._target.new}/{_WORK}/{name}"
        rows.write.partitionBy(split_by).parquet(path)
        return self._spark.read.schema(rows.schema).parquet(path)

    def commit(self) -> None:
        """Show the new tables instead of the old ones; those that were not written again stay."""
        self._files.delete(f"{self._target.new}/{_WORK}")
        self._target.commit({name.replace(".", "/") for name in self.rows})

    def close(self) -> None:
        """Delete what was not committed, and release the lock."""
        try:
            self._target.clear()
        finally:
            self._release()

    def _release(self) -> None:
        self._files.close()
        if self._lock is not None:
            os.close(self._lock)


class _OutputTarget(Protocol):
    """Where a run writes, `new`, and how its tables become visible."""

    new: str

    def commit(self, tables: Collection[str]) -> None:
        """Make these tables of `new` visible."""

    def clear(self) -> None:
        """Delete what is not visible."""


class _LinkedTarget:
    """In the local file system: one symbolic link is switched."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._home = root / _TABLES
        # Replacing a real folder by a link would delete what somebody else has put there.
        for layer in LAYERS:
            if (root / layer).exists() and not (root / layer).is_symlink():
                raise InvalidInput(f"{root / layer} is in the way: it was not written by a batch")
        self.clear()
        self._name = uuid.uuid4().hex[:12]
        self.new = str(self._home / self._name)

    @property
    def _current(self) -> str | None:
        try:
            return str((self._home / _CURRENT).readlink())
        except FileNotFoundError:
            return None

    def commit(self, tables: Collection[str]) -> None:
        try:
            self._take_over(tables)
            new = self._home / self._name
            for layer in LAYERS:
                if (new / layer).exists() and not (self._root / layer).is_symlink():
                    (self._root / layer).symlink_to(f"{_TABLES}/{_CURRENT}/{layer}")
            link = self._home / f"{_CURRENT}.new"
            link.unlink(missing_ok=True)
            link.symlink_to(self._name)
            # The commit: a link can't be changed, but it can be replaced by a rename.
            link.replace(self._home / _CURRENT)
        except OSError as error:
            raise PipelineError(f"can't write to {self._root}: {error.strerror}") from error

    def _take_over(self, tables: Collection[str]) -> None:
        """Hard-link the tables that were not written again into the new folder: no bytes are
        copied, and the old folder can be deleted."""
        if self._current is None:
            return
        for layer in LAYERS:
            for table in (self._home / self._current / layer).glob("*"):
                name = f"{layer}/{table.name}"
                if name not in tables:
                    target = self._home / self._name / name
                    shutil.copytree(table, target, copy_function=os.link)

    def clear(self) -> None:
        for path in self._home.iterdir():
            if path.is_dir() and not path.is_symlink() and path.name != self._current:
                # The JVM of a run that was killed may still write there: the next run deletes it.
                shutil.rmtree(path, ignore_errors=True)


class _MovedTarget:
    """In other file systems: tables are moved, and a list of them makes that repeatable."""

    def __init__(self, files: Files, root: str) -> None:
        self._files = files
        self._root = root
        self.new = f"{root}/{_TABLES}/new"
        self._done = f"{root}/{_TABLES}/done.json"
        self._finish_moves()
        self.clear()

    def commit(self, tables: Collection[str]) -> None:
        self._files.write_text(self._done, msgspec.json.encode(sorted(tables)))
        self._finish_moves()

    def _finish_moves(self) -> None:
        if not self._files.exists(self._done):
            return
        for table in msgspec.json.decode(self._files.read_text(self._done), type=list[str]):
            # What is no longer in `new` was moved before the process was killed.
            if self._files.exists(f"{self.new}/{table}"):
                self._files.delete(f"{self._root}/{table}")
                self._files.move(f"{self.new}/{table}", f"{self._root}/{table}")
        self._files.delete(self._done)

    def clear(self) -> None:
        self._files.delete(self.new)
