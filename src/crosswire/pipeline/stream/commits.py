"""The output of a stream: a batch becomes visible all at once, or not at all.

    OUTPUT/silver/frames/date=…/00000012-….parquet    final rows of batch 12
    OUTPUT/open/sessions/open-00000012-….parquet      provisional rows: batch 13 replaces them
    OUTPUT/.stream/begun.json                         options that the stream was started with
    OUTPUT/.stream/commits/00000012.json              the commit of batch 12
    OUTPUT/.stream/state/flows-00000012/              state for batch 13
    OUTPUT/.stream/days/traffic/date=…/               state of tables that are replaced by day
    OUTPUT/.stream/new-…/                             files of a batch that is not committed yet

A batch writes everything into its staging folder. Its commit is one rename, of the JSON file that
holds the position in the input that the batch reached, the files to move to their tables and the
files to remove. Then these are moved and removed. If the process dies in between, the next one
finds the commit and does the rest: each move and removal can be repeated.

A batch that was killed before its commit leaves only its staging folder, which the next process
deletes. The batch need not be repeated with the same input: position, state and tables are still
those of the last commit, so the next one may take in more.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from crosswire.capture.packet_counts import PacketCounts
from crosswire.errors import InvalidInput
from crosswire.pipeline.files import Files, lock
from crosswire.pipeline.output import STREAM
from crosswire.pipeline.sources.new_input import InputPosition
from crosswire.pipeline.stream.watermarks import CompleteUpTo, HubTimes
from crosswire.pipeline.tables.catalog import CATALOG, entry
from crosswire.pipeline.tables.finality import KEPT, TARGET_TABLE
from crosswire.pipeline.tables.missing_rows import MissingLakeRows
from crosswire.pipeline.tables.names import LAYERS
from crosswire.pipeline.tables.published import (
    DATE,
    NO_DATE,
    date_of_rows,
    published,
    restored,
    schema_of,
)

__all__ = ["DAYS", "StreamCommit", "StreamOutput", "StreamStaging", "StreamStart"]

DAYS: Final = "days"
"""The layer of state that is kept by day, beside those of the tables."""

_OPEN: Final = "open."
_PROVISIONAL: Final = "open-"
"""The names of files with provisional rows begin with this: readers of a folder see them, and the
next batch finds them."""
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
"""How Spark names the folder of rows whose date is null: rows of the layer `open` have none."""
_VERSION: Final = 4
"""Version of all that is stored in `.stream`: a stream of another version is refused."""


_OPTIONS: Final = {
    "tables": "--tables",
    "ports": "--port",
    "since": "--since",
    "since_us": "--since",
    "late_us": "--late",
}
"""The fields of StreamStart, and the options of the command line that set them."""


class StreamStart(msgspec.Struct, frozen=True):
    """The options of a stream that can't change while it exists: its rows depend on them."""

    tables: list[str]
    since_us: int
    ports: dict[int, str]
    late_us: int
    since: str = ""
    version: int = _VERSION

    def wants(self, *names: str) -> bool:
        """Whether any of these tables is to be written; no `tables` means all."""
        return not self.tables or any(name in self.tables for name in names)


class StreamCommit(msgspec.Struct, frozen=True):
    """All that is known after a batch.

    batch            its number, from 0
    position         the input that was read
    reached          the watermark of captures and taps
    state            folders of the state for the next batch, by name
    schemas          Spark's schemas of states, as JSON
    rows             by table: final rows of all batches, provisional rows of this one
    accounts         sums of gold.accounting by protocol, of final rows; open_accounts: provisional
    packets          what became of the packets of captures, in all batches
    refused          refused connections of final rows; open_refused: provisional
    clocks           by node: the newest time of each of the hub's tables
    missing          rows of lakes that should have been in the input and were nowhere
    findings         counts of gold.reconciliation and gold.deliveries; open_findings: provisional
    files            by table: files with provisional rows
    days             by table and date: files of the tables that are replaced by day
    unsettled_days   days of gold.traffic that have provisional rows
    staging          the folder to delete when `move` (from, to) and `remove` are done
    """

    batch: int
    position: InputPosition
    reached: CompleteUpTo = CompleteUpTo()
    state: dict[str, str] = {}
    schemas: dict[str, str] = {}
    rows: dict[str, tuple[int, int]] = {}
    accounts: dict[str, dict[str, int]] = {}
    open_accounts: dict[str, dict[str, int]] = {}
    packets: PacketCounts = msgspec.field(default_factory=PacketCounts)
    refused: int = 0
    open_refused: int = 0
    clocks: dict[str, HubTimes] = {}
    missing: list[MissingLakeRows] = []
    findings: dict[str, int] = {}
    open_findings: dict[str, int] = {}
    files: dict[str, list[str]] = {}
    days: dict[str, dict[str, list[str]]] = {}
    unsettled_days: list[str] = []
    staging: str = ""
    move: dict[str, str] = {}
    remove: list[str] = []


_COMMIT: Final = msgspec.json.Decoder(StreamCommit)
# JSON has only texts as keys: not strict, so that the numbers of ports are read from them.
_BEGUN: Final = msgspec.json.Decoder(StreamStart, strict=False)


class StreamOutput:
    """The folder of a stream's tables, commits and state, for one writer at a time until `close`.

    `root` may be in any file system that Spark can write to and in which a rename is atomic.
    Finishes the last commit if the process that wrote it could not. Raises InvalidInput if another
    process writes there, or if the folder has the tables of a batch.
    """

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._spark = spark
        self.root = root.rstrip("/")
        self._home = f"{self.root}/{STREAM}"
        self._files = Files(spark, self.root)
        try:
            is_new = not self._files.exists(self._home)
            if is_new and any(self._files.exists(f"{self.root}/{layer}") for layer in LAYERS):
                raise InvalidInput(
                    f"{root} holds the tables of a batch: a stream needs a folder of its own"
                )
            self._files.make_folder(f"{self._home}/commits")
            self._lock = lock(self._home)
        except BaseException:
            self._files.close()
            raise
        self.last = self._read_last()
        # First finish the last commit, then clear: its files may still be in its staging folder.
        if self.last is not None:
            self._apply(self.last)
        for left in self._files.children(self._home):
            if left.rpartition("/")[2].startswith("new-"):
                self._files.delete(left)

    def close(self) -> None:
        """Release the lock of the folder."""
        self._files.close()
        if self._lock is not None:
            os.close(self._lock)

    # Reading.

    def begin(self, wanted: StreamStart) -> StreamStart:
        """The options that hold: those of the first start. Raises InvalidInput if `wanted` has
        others. `since` is the option's text: `7d` stands for the time that it was at the first
        start."""
        path = f"{self._home}/begun.json"
        if not self._files.exists(path):
            self._files.write_text(path, msgspec.json.encode(wanted))
            return wanted
        begun = _BEGUN.decode(self._files.read_text(path))
        if begun.version != wanted.version:
            raise InvalidInput(
                f"{self.root} was written by another version of crosswire: start a new folder"
            )
        if wanted.since and wanted.since == begun.since:
            wanted = msgspec.structs.replace(wanted, since_us=begun.since_us)
        for name, option in _OPTIONS.items():
            if getattr(begun, name) != getattr(wanted, name):
                raise InvalidInput(
                    f"the stream in {self.root} was begun with another {option}: go on with that, "
                    "or start a new folder"
                )
        return begun

    def _read_last(self) -> StreamCommit | None:
        commits = [
            path for path in self._files.children(f"{self._home}/commits") if _is_commit(path)
        ]
        if not commits:
            return None
        # Numbers have leading zeros: the last name is that of the newest commit.
        return _COMMIT.decode(self._files.read_text(max(commits)))

    def listing(self, folder: str) -> Iterator[tuple[str, int]]:
        """Paths and sizes of the Parquet files of a lake's folder, or of the one file given."""
        if "://" not in folder:
            found = [Path(folder)] if folder.endswith(".parquet") else None
            for path in found or Path(folder).glob("date=*/*.parquet"):
                try:
                    yield str(path), path.stat().st_size
                except FileNotFoundError:
                    continue  # compacted, or removed by retention, since it was listed
            return
        yield from self._files.matching(f"{folder}/date=*/*.parquet")

    def state(self, name: str) -> DataFrame | None:
        """The state that the last batch saved under this name; None if there is none."""
        path = None if self.last is None else self.last.state.get(name)
        if self.last is None or path is None or not self._files.exists(path):
            return None
        return self._spark.read.schema(_shape(self.last.schemas[name])).parquet(path)

    def kept(self, table: str, dates: Iterable[str | None] | None = None) -> list[str]:
        """The files of a table with final rows, of these dates or all."""
        home = f"{self.root}/{table.replace('.', '/')}"
        wanted = None if dates is None else set(dates)
        found = []
        for path in self._files.of_rows(home):
            *folder, name = path.removeprefix(f"{home}/").split("/")
            date = folder[0].removeprefix("date=") if folder else None
            if not name.startswith(_PROVISIONAL) and (wanted is None or date in wanted):
                found.append(path)
        return found

    def rows_of(self, table: str, files: list[str]) -> DataFrame | None:
        """The rows in these files of a table, in the columns that they were computed with; None if
        there are no files."""
        if not files:
            return None
        return self._read_table(table, files)

    def days(self, table: str, dates: list[str]) -> DataFrame | None:
        """The rows of these days, of a table that is replaced by day; None if there are none."""
        if self.last is None:
            return None
        kept = self.last.days.get(table, {})
        files = [file for date in dates for file in kept.get(date, ())]
        return self.rows_of(table, files)

    def _read_table(self, table: str, files: list[str]) -> DataFrame:
        # With the schema given, Spark need not open a file to find it.
        found = self._spark.read.schema(schema_of(entry(table))).parquet(*files)
        return restored(entry(table), found)

    # Writing.

    def stage(self) -> StreamStaging:
        """A new staging folder for the batch after the last commit."""
        batch = 0 if self.last is None else self.last.batch + 1
        known = frozenset() if self.last is None else frozenset(self.last.rows)
        folder = f"{self._home}/new-{uuid.uuid4().hex[:12]}"
        return StreamStaging(self._spark, folder, batch, known)

    def commit(
        self,
        commit: StreamCommit,
        staging: StreamStaging,
        *,
        replaced_days: Mapping[str, set[str]],
        replaced_files: Iterable[str] = (),
        retained: frozenset[str] = frozenset(),
    ) -> None:
        """Commit a batch: from here on a restart continues after it.

        Files with provisional rows of the batch before are removed, but for the tables in
        `retained`: this batch had no input for them, so they stay valid. Files of `replaced_days`
        and `replaced_files` are removed too, because the batch has written their rows again.
        """
        moves, files, days = self._plan(commit.batch, staging)
        remove = list(replaced_files)
        for table_name, old in self.last.files.items() if self.last is not None else ():
            if table_name in retained:
                # Still provisional: the next batch that has input for the table removes them.
                files[table_name] = old
            else:
                remove += old
        kept_days = dict(self.last.days) if self.last is not None else {}
        for table, dates in replaced_days.items():
            kept = dict(kept_days.get(table, {}))
            for date in dates:
                remove += kept.pop(date, [])
            # A replaced day without new files has no rows any more: all of them were provisional.
            kept_days[table] = kept | days.get(table, {})
        state = {} if self.last is None else dict(self.last.state)
        for name, path in staging.saved.items():
            remove += [state[name]] if name in state else []
            # The number in the name keeps the new state apart from the old one, which is removed
            # only after the commit.
            state[name] = moves[path] = f"{self._home}/state/{name}-{commit.batch:08}"
        done = msgspec.structs.replace(
            commit,
            files=files,
            days=kept_days,
            state=state,
            staging=staging.folder,
            move=moves,
            remove=remove,
        )
        # The rename in `write_text` is the commit. Before it nothing that readers or the next
        # batch rely on was touched; after it everything follows from the file.
        name = f"{self._home}/commits/{commit.batch:08}.json"
        self._files.write_text(name, msgspec.json.encode(done))
        self.last = done
        self._apply(done)

    def _plan(
        self, batch: int, staging: StreamStaging
    ) -> tuple[dict[str, str], dict[str, list[str]], dict[str, dict[str, list[str]]]]:
        """Where each staged file goes; the files with provisional rows; the files by day."""
        moves: dict[str, str] = {}
        files: dict[str, list[str]] = {}
        days: dict[str, dict[str, list[str]]] = {}
        for path in self._files.of_rows(f"{staging.folder}/tables"):
            *folders, name = path.removeprefix(f"{staging.folder}/tables/").split("/")
            # Spark writes partition columns as folders: target_table=…/kept=…/date=….
            keys = dict(part.split("=", 1) for part in folders if "=" in part)
            table_name, date = keys[TARGET_TABLE], keys.get("date")
            by_day = table_name in staging.by_day
            kept = keys[KEPT] == "true"
            # Spark's file names are unique within a write; with the batch they are in the table.
            prefix = f"{batch:08}" if kept or by_day else f"{_PROVISIONAL}{batch:08}"
            inner = f"date={date}/" if date not in (None, _NULL) else ""
            layer, _, table = table_name.partition(".")
            home = f"{self._home}/days" if layer == DAYS else f"{self.root}/{layer}"
            target = f"{home}/{table}/{inner}{prefix}-{name}"
            moves[path] = target
            if by_day:
                days.setdefault(table_name, {}).setdefault(str(date), []).append(target)
            elif not kept:
                files.setdefault(table_name, []).append(target)
        return moves, files, days

    def _apply(self, commit: StreamCommit) -> None:
        """Do the moves and removals of a commit that are not done yet.

        New files appear before old ones go: a reader may for a moment see replaced rows twice,
        but never misses a row.
        """
        for table_name in commit.rows:
            layer, _, table = table_name.partition(".")
            if layer in LAYERS:
                self._files.make_folder(f"{self.root}/{layer}/{table}")
        for source, target in commit.move.items():
            if self._files.exists(source):
                self._files.move(source, target)
        for path in commit.remove:
            self._files.delete(path)
        if commit.staging:
            self._files.delete(commit.staging)
        for path in self._files.children(f"{self._home}/commits"):
            if _is_commit(path) and path.rpartition("/")[2] < f"{commit.batch - 1:08}.json":
                self._files.delete(path)

    def discard(self, staging: StreamStaging) -> None:
        """Delete what a failed batch has written."""
        self._files.delete(staging.folder)


def _is_commit(path: str) -> bool:
    return path.endswith(".json")


class StreamStaging:
    """Where a batch writes before its commit; several threads may write different tables.

    `rows`, `schemas` (of states), `by_day` and `saved` describe what was written, for the commit.
    """

    def __init__(
        self, spark: SparkSession, folder: str, batch: int, known: frozenset[str] = frozenset()
    ) -> None:
        """`known` are the tables that earlier batches have made."""
        self._spark = spark
        self._known = known
        self.folder = folder
        self.batch = batch
        self.by_day: set[str] = set()
        self.rows: dict[str, tuple[int, int]] = {}
        self.schemas: dict[str, str] = {}
        self.saved: dict[str, str] = {}

    def write(
        self,
        name: str,
        rows: DataFrame,
        *,
        more: tuple[str, ...] = (),
        by_day: bool = False,
        folder: str = "",
    ) -> None:
        """Write rows with `kept` to a table of the catalog, each to its TARGET_TABLE if there are
        several: that of the open rows, and `more`.

        Tables are partitioned by date, except those of the layer `open`: these are small and
        replaced as a whole. `by_day`: the batch replaces whole days of the table. `folder` keeps
        apart what is written to one table at several times.
        """
        table = CATALOG[name]
        tables = (*table.paths, *more)
        if TARGET_TABLE not in rows.columns:
            rows = rows.withColumn(TARGET_TABLE, F.lit(tables[0]))
        # Counted while they are written: a count afterwards would read the files again.
        counted = Observation()
        kept, target = F.col(KEPT), F.col(TARGET_TABLE)
        metrics = [
            F.count_if((kept if flag else ~kept) & (target == each)).alias(f"{number}{flag}")
            for number, each in enumerate(tables)
            for flag in (True, False)
        ]
        rows = rows.observe(counted, *metrics)
        folders = [TARGET_TABLE, KEPT]
        if table.dated_by:
            day = F.when(~target.startswith(_OPEN), date_of_rows(table))
            rows = rows.withColumn(DATE, day)
            folders.append(DATE)
        revocable = F.lit(True) if table.adds_up else ~kept
        made = published(table, rows, revocable, *folders)
        made.write.partitionBy(*folders).parquet(f"{self.folder}/tables/{folder or name}")
        found = counted.get
        for number, each in enumerate(tables):
            kept_rows, provisional_rows = self.rows.get(each, (0, 0))
            self.rows[each] = (
                kept_rows + found[f"{number}True"],
                provisional_rows + found[f"{number}False"],
            )
            if by_day:
                self.by_day.add(each)
            if each not in self._known and each not in more and not folder:
                self._write_empty(each, is_dated=bool(table.dated_by) and number == 0)

    def _write_empty(self, table: str, *, is_dated: bool) -> None:
        """Write a file without rows: readers expect the folder and the schema of a table that has
        no rows, or none left."""
        empty = self._spark.createDataFrame([], schema_of(entry(table))).coalesce(1)
        day = f"/{DATE}={NO_DATE}" if is_dated else ""
        empty.write.parquet(f"{self.folder}/tables/{table}/{TARGET_TABLE}={table}/{KEPT}=true{day}")

    def subtract(self, table: str, rows: int) -> None:
        """Subtract final rows of earlier batches that this batch replaces."""
        kept, provisional = self.rows.get(table, (0, 0))
        self.rows[table] = (kept - rows, provisional)

    def work(self, name: str, rows: DataFrame, *, split_by: tuple[str, ...] = ()) -> DataFrame:
        """Write rows that only this batch needs; returns them as read back.

        Spark computes a DataFrame again for every use; what is used twice is written once.
        """
        path = f"{self.folder}/work/{name}"
        rows.write.partitionBy(*split_by).parquet(path)
        return self._spark.read.schema(rows.schema).parquet(path)

    def save(self, name: str, work: str, rows: DataFrame, *, part: str = "") -> None:
        """Make rows that were written as `work`, or a partition of them, a state of the stream."""
        self.saved[name] = f"{self.folder}/work/{work}/{part}".rstrip("/")
        # Read alone, a partition's files lack the column that is the name of their folder.
        column = part.partition("=")[0]
        shape = StructType([field for field in rows.schema.fields if field.name != column])
        self.schemas[name] = shape.json()

    def save_state(self, name: str, rows: DataFrame) -> DataFrame:
        """Write rows as a state of the stream; returns them as read back."""
        # A union has the tasks of all its parts, and each task writes a file: few tasks, few files.
        tasks = int(self._spark.conf.get("spark.sql.shuffle.partitions") or 1)
        made = self.work(name, rows.coalesce(tasks))
        self.save(name, name, made)
        return made

    def read(self, name: str) -> DataFrame:
        """The rows that were written to a table, open ones included, with `kept`."""
        table = CATALOG[name]
        shape = StructType([*schema_of(table).fields])
        shape = shape.add(KEPT, "boolean").add(TARGET_TABLE, "string")
        rows = self._spark.read.schema(shape).parquet(f"{self.folder}/tables/{name}")
        rows = rows.where(F.col(TARGET_TABLE).isin(*table.paths))
        return restored(table, rows, KEPT)


def _shape(schema: str) -> StructType:
    return StructType.fromJson(msgspec.json.decode(schema))
