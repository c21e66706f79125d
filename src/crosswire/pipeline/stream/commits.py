"""The output of a stream: a batch becomes visible all at once, or not at all.

    OUTPUT/manifests/00000012.jsonl                             the tables after batch 11
    OUTPUT/runs/00000012-4f1c…/tables/…/date=…/….parquet        rows of batch 11
    OUTPUT/runs/00000012-4f1c…/work/…                           state for batch 12

A batch writes everything into a folder of its own. Its commit is one manifest (`manifests`), which
names the files of all tables and has, for the next batch, the position in the input that was
reached and the folders of the state. Nothing is moved afterwards, so there is nothing to finish
when a process dies: a batch that was killed before its commit leaves only its folder, which a later
process deletes. It need not be repeated with the same input: position, state and tables are still
those of the last commit, so the next one may take in more.

Provisional rows are in files of their own, which the manifest of the next batch no longer names.
Small files with final rows, all from batches or all merged before, are merged: `MERGED_FILES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from crosswire.capture.packet_counts import PacketCounts
from crosswire.errors import InvalidInput
from crosswire.pipeline.manifests import (
    Manifests,
    RunFolder,
    TablePaths,
    all_paths,
    listed_paths,
)
from crosswire.pipeline.output import (
    MERGED_BYTES,
    MERGED_FILES,
    refuse_older_layouts,
    setting_of,
)
from crosswire.pipeline.sources.new_input import InputPosition
from crosswire.pipeline.stores import open_store
from crosswire.pipeline.stream.watermarks import CompleteUpTo, HubTimes
from crosswire.pipeline.tables.catalog import CATALOG, entry
from crosswire.pipeline.tables.finality import KEPT, TARGET_TABLE
from crosswire.pipeline.tables.missing_rows import MissingLakeRows
from crosswire.pipeline.tables.published import (
    DATE,
    NO_DATE,
    date_of_rows,
    empty_file,
    published,
    restored,
    schema_of,
)

__all__ = ["DAYS", "StreamCommit", "StreamOutput", "StreamStaging", "StreamStart"]

DAYS: Final = "days"
"""The layer of state that is kept by day, beside those of the tables."""

_OPEN: Final = "open."
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
"""How Spark names the folder of rows whose date is null: rows of the layer `open` have none."""
_VERSION: Final = 5
"""Version of state and commits: a stream of another version is refused."""
_MERGED: Final = "merged-"
_SWEEP_BATCHES: Final = 100
"""How often a stream looks for folders of runs that are no longer named."""


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
    begun            the options that the stream was begun with
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
    """

    batch: int
    begun: StreamStart
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


class _Begun(msgspec.Struct):
    begun: StreamStart


# JSON has only texts as keys: not strict, so that the numbers of ports are read from them.
_COMMIT: Final = msgspec.json.Decoder(StreamCommit, strict=False)
_BEGUN: Final = msgspec.json.Decoder(_Begun, strict=False)


class StreamOutput:
    """The tables, commits and state of a stream, in any store that Spark can write to. Paths are
    relative to `root`.

    Raises InvalidInput if the folder has the tables of a batch, or those of an older version.
    """

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._spark = spark
        self.root = root.rstrip("/")
        self._store = open_store(self.root, setting_of(spark))
        refuse_older_layouts(self._store)
        self._manifests = Manifests(self._store)
        self._run: RunFolder | None = None
        self.last = self._read_last()
        self._manifests.remove_abandoned()

    def _read_last(self) -> StreamCommit | None:
        newest = self._manifests.newest
        if newest is None:
            return None
        if not newest.is_stream:
            raise InvalidInput(
                f"{self.root} holds the tables of a batch: a stream needs a folder of its own"
            )
        if _BEGUN.decode(newest.stream).begun.version != _VERSION:
            raise InvalidInput(
                f"{self.root} was written by another version of crosswire: start a new folder"
            )
        return _COMMIT.decode(newest.stream)

    def close(self) -> None:
        """Delete what was not committed."""
        self._end_run(keep=False)

    # Reading.

    def begin(self, wanted: StreamStart) -> StreamStart:
        """The options that hold: those of the first start. Raises InvalidInput if `wanted` has
        others. `since` is the option's text: `7d` stands for the time that it was at the first
        start."""
        if self.last is None:
            return wanted
        begun = self.last.begun
        if wanted.since and wanted.since == begun.since:
            wanted = msgspec.structs.replace(wanted, since_us=begun.since_us)
        for name, option in _OPTIONS.items():
            if getattr(begun, name) != getattr(wanted, name):
                raise InvalidInput(
                    f"the stream in {self.root} was begun with another {option}: go on with that, "
                    "or start a new folder"
                )
        return begun

    def state(self, name: str) -> DataFrame | None:
        """The state that the last batch saved under this name; None if there is none."""
        path = None if self.last is None else self.last.state.get(name)
        # Spark writes no folder for a partition without rows.
        if self.last is None or path is None or not self._store.names(path):
            return None
        schema = _shape(self.last.schemas[name])
        return self._spark.read.schema(schema).parquet(self._store.url(path))

    def kept(self, table: str, dates: Iterable[str | None] | None = None) -> list[str]:
        """The files of a table with final rows, of these dates or all."""
        newest = self._manifests.newest
        files = None if newest is None else newest.tables.get(table)
        if files is None:
            return []
        found = all_paths(self._store, msgspec.structs.replace(files, provisional=[]))
        wanted = None if dates is None else set(dates)
        return [path for path in found if wanted is None or _date_of(path) in wanted]

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
        urls = [self._store.url(path) for path in files]
        found = self._spark.read.schema(schema_of(entry(table))).parquet(*urls)
        return restored(entry(table), found)

    # Writing.

    def stage(self) -> StreamStaging:
        """A new folder for the batch after the last commit."""
        self._end_run(keep=False)
        batch = 0 if self.last is None else self.last.batch + 1
        known = frozenset() if self.last is None else frozenset(self.last.rows)
        self._run = self._manifests.begin_run()
        return StreamStaging(self._spark, self._run, batch, known)

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

        Files with provisional rows of the batch before are dropped, but for the tables in
        `retained`: this batch had no input for them, so they stay valid. Files of `replaced_days`
        and `replaced_files` are dropped too, because the batch has written their rows again.
        Raises PipelineError if another process was first.
        """
        final, provisional, days = self._written(staging)
        last = self.last
        for table, old in last.files.items() if last is not None else ():
            if table in retained:
                provisional[table] = old
        kept_days = dict(last.days) if last is not None else {}
        for table, dates in replaced_days.items():
            kept = dict(kept_days.get(table, {}))
            for date in dates:
                kept.pop(date, None)
            # A replaced day without new files has no rows any more: all of them were provisional.
            kept_days[table] = kept | days.get(table, {})
        state = {**(last.state if last is not None else {}), **staging.saved}
        done = msgspec.structs.replace(commit, files=provisional, days=kept_days, state=state)
        tables = self._tables(done, final, set(replaced_files), staging)
        others = [*state.values()]
        for table, by_date in kept_days.items():
            paths = [path for files in by_date.values() for path in files]
            if table.startswith(f"{DAYS}."):
                others += paths
            else:
                tables[table] = TablePaths(paths)
        self._manifests.commit(tables, others=others, stream=msgspec.json.encode(done))
        self.last = done
        self._end_run(keep=True)
        self._clear_work(staging)
        self._manifests.remove_old()
        if done.batch % _SWEEP_BATCHES == _SWEEP_BATCHES - 1:
            self._manifests.remove_abandoned()

    def _written(
        self, staging: StreamStaging
    ) -> tuple[dict[str, list[str]], dict[str, list[str]], dict[str, dict[str, list[str]]]]:
        """The files of a batch, by table: with final rows, with provisional rows, and by day."""
        final: dict[str, list[str]] = {}
        provisional: dict[str, list[str]] = {}
        days: dict[str, dict[str, list[str]]] = {}
        for path, _ in self._store.row_files(f"{staging.folder}/tables"):
            # Spark writes partition columns as folders: target_table=…/kept=…/date=….
            keys = dict(part.split("=", 1) for part in path.split("/") if "=" in part)
            table = keys[TARGET_TABLE]
            if table in staging.by_day:
                days.setdefault(table, {}).setdefault(str(keys.get(DATE)), []).append(path)
            elif keys[KEPT] == "true":
                final.setdefault(table, []).append(path)
            else:
                provisional.setdefault(table, []).append(path)
        return final, provisional, days

    def _tables(
        self,
        commit: StreamCommit,
        final: Mapping[str, list[str]],
        replaced: set[str],
        staging: StreamStaging,
    ) -> dict[str, TablePaths]:
        """The tables after a batch: what was there, without what it replaces, and its own."""
        newest = self._manifests.newest
        before = {} if newest is None else newest.tables
        tables = {}
        assert self._run is not None
        for name in before.keys() | final.keys() | commit.files.keys():
            files = before.get(name, TablePaths())
            paths, lists = [*files.paths], []
            for each in files.lists:
                listed = listed_paths(self._store, each)
                if replaced.isdisjoint(listed):
                    lists.append(each)
                else:
                    paths += listed
            paths = [path for path in paths if path not in replaced]
            new = final.get(name, [])
            paths = self._merged(name, [*paths, *new], {_date_of(path) for path in new}, staging)
            files = TablePaths(paths, lists, commit.files.get(name, []))
            newest_date = max((_date_of(path) or "" for path in paths), default="")
            tables[name] = self._manifests.spill(files, self._run, name, f"/{DATE}={newest_date}/")
        return tables

    def _merged(
        self, table: str, paths: list[str], dates: set[str | None], staging: StreamStaging
    ) -> list[str]:
        """The files of a table, of which many small ones of these dates are written as one."""
        for date in dates:
            for level in range(3):
                group = [path for path in paths if (_date_of(path), _level(path)) == (date, level)]
                if not group or len(group) % MERGED_FILES:
                    continue
                small = [path for path in group if self._store.size(path) < MERGED_BYTES]
                if len(small) < MERGED_FILES // 2:
                    continue
                # With the same keys as other files: DuckDB refuses paths that differ in them.
                merged = f"{staging.folder}/{_MERGED}{level + 1}/{TARGET_TABLE}={table}/{KEPT}=true"
                merged += "" if date is None else f"/{DATE}={date}"
                urls = [self._store.url(path) for path in small]
                rows = self._spark.read.schema(schema_of(entry(table))).parquet(*urls)
                rows.coalesce(1).write.parquet(self._store.url(merged))
                made = [path for path, _ in self._store.row_files(merged)]
                paths = [path for path in paths if path not in set(small)] + made
        return paths

    def _clear_work(self, staging: StreamStaging) -> None:
        """Delete what only the batch needed: all but the state, which may be a partition."""
        saved = set(staging.saved.values())
        for name in self._store.names(f"{staging.folder}/work"):
            path = f"{staging.folder}/work/{name}"
            if path in saved:
                continue
            if any(each.startswith(f"{path}/") for each in saved):
                for part in self._store.names(path):
                    if f"{path}/{part}" not in saved:
                        self._store.delete(f"{path}/{part}")
            else:
                self._store.delete(path)

    def discard(self, staging: StreamStaging) -> None:
        """Delete what a failed batch has written."""
        if self._run is not None and self._run.folder == staging.folder:
            self._end_run(keep=False)

    def _end_run(self, *, keep: bool) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.end(keep=keep)


def _date_of(path: str) -> str | None:
    """The date in the path of a file; None if it has none."""
    for part in path.split("/"):
        if part.startswith(f"{DATE}="):
            date = part.removeprefix(f"{DATE}=")
            return None if date == _NULL else date
    return None


def _level(path: str) -> int:
    """How often the rows of a file were merged."""
    for part in path.split("/"):
        if part.startswith(_MERGED):
            return int(part.removeprefix(_MERGED))
    return 0


class StreamStaging:
    """The folder that a batch writes to; several threads may write different tables.

    `rows`, `schemas` (of states), `by_day` and `saved` describe what was written, for the commit.
    """

    def __init__(
        self, spark: SparkSession, run: RunFolder, batch: int, known: frozenset[str] = frozenset()
    ) -> None:
        """`known` are the tables that earlier batches have made."""
        self._spark = spark
        self._known = known
        self._run = run
        self.folder = run.folder
        self._url = run.url
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
        made.write.partitionBy(*folders).parquet(f"{self._url}/tables/{folder or name}")
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
        day = f"/{DATE}={NO_DATE}" if is_dated else ""
        folder = f"tables/{table}/{TARGET_TABLE}={table}/{KEPT}=true{day}"
        self._run.create(f"{folder}/empty.parquet", empty_file(entry(table)))

    def subtract(self, table: str, rows: int) -> None:
        """Subtract final rows of earlier batches that this batch replaces."""
        kept, provisional = self.rows.get(table, (0, 0))
        self.rows[table] = (kept - rows, provisional)

    def work(self, name: str, rows: DataFrame, *, split_by: tuple[str, ...] = ()) -> DataFrame:
        """Write rows that only this batch needs; returns them as read back.

        Spark computes a DataFrame again for every use; what is used twice is written once.
        """
        path = f"{self._url}/work/{name}"
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
        rows = self._spark.read.schema(shape).parquet(f"{self._url}/tables/{name}")
        rows = rows.where(F.col(TARGET_TABLE).isin(*table.paths))
        return restored(table, rows, KEPT)


def _shape(schema: str) -> StructType:
    return StructType.fromJson(msgspec.json.decode(schema))
