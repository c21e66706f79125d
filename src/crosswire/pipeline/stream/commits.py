"""How a batch of a stream becomes visible: all at once, or not at all.

    OUTPUT/silver/frames/date=…/00000012-….parquet    rows of batch 12, there for good
    OUTPUT/open/sessions/open-00000012-….parquet      rows that the next batch will replace
    OUTPUT/.stream/begun.json                         what the stream was started with
    OUTPUT/.stream/commits/00000012.json              batch 12 is done: the one place that says so
    OUTPUT/.stream/state/flows-00000012/              what batch 13 has to know
    OUTPUT/.stream/days/traffic/date=…/               … and has to know of earlier days
    OUTPUT/.stream/new-…/                             what a batch writes before it is done

The commit is one rename. It holds the position in the input that the batch reached, and which files
are to be moved to their places and which are to be removed; who finds it does that, again if need
be. A batch that was killed before its commit has left nothing but a folder that is thrown away,
and the next one may take in more: nothing has to be repeated as it was.
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

from crosswire.errors import InvalidInput
from crosswire.pipeline.files import Files, lock
from crosswire.pipeline.output import LAYERS, STREAM
from crosswire.pipeline.sources.new_input import InputPosition
from crosswire.pipeline.stream.decoder_state import KEPT, CompleteUpTo, HubTimes

__all__ = ["DAYS", "Journal", "StreamCommit", "StreamStaging", "StreamStart"]

DAYS: Final = "days"
"""The layer of what is remembered day by day."""

_PLACE: Final = "place"
_OPEN: Final = "open."
_PASSING: Final = "open-"
"""What the names of files begin with that the next batch replaces."""
_NO_DATE: Final = "__HIVE_DEFAULT_PARTITION__"
_VERSION: Final = 1


class StreamStart(msgspec.Struct, frozen=True):
    """What a stream was started with, and goes on with."""

    tables: list[str]
    since_us: int
    ports: dict[int, str]
    version: int = _VERSION


class StreamCommit(msgspec.Struct, frozen=True):
    """The end of a batch. `rows` has for each table how many are there for good, and how many the
    next batch will replace; `files` those of the latter kind, `days` those of the tables of which
    whole days are replaced, by table and date; `state` where what the next batch has to know is."""

    batch: int
    position: InputPosition
    reached: CompleteUpTo = CompleteUpTo()
    state: dict[str, str] = {}
    schemas: dict[str, str] = {}
    rows: dict[str, tuple[int, int]] = {}
    accounts: dict[str, dict[str, int]] = {}
    open_accounts: dict[str, dict[str, int]] = {}
    clocks: dict[str, HubTimes] = {}
    findings: dict[str, int] = {}
    open_findings: dict[str, int] = {}
    files: dict[str, list[str]] = {}
    days: dict[str, dict[str, list[str]]] = {}
    unsettled_days: list[str] = []
    staging: str = ""
    move: dict[str, str] = {}
    remove: list[str] = []


_COMMIT: Final = msgspec.json.Decoder(StreamCommit)
_BEGUN: Final = msgspec.json.Decoder(StreamStart, strict=False)


class Journal:
    """The output of a stream. There is one writer at a time; `close` lets the next one in.

    `root` may be a path of any file system that Spark can write to, and in which a rename is one
    step. Raises InvalidInput if somebody else writes there, or if the tables there are of a batch.
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
        if self.last is not None:
            self._apply(self.last)
        for left in self._files.children(self._home):
            if left.rpartition("/")[2].startswith("new-"):
                self._files.delete(left)

    def close(self) -> None:
        self._files.close()
        if self._lock is not None:
            os.close(self._lock)

    # What is there.

    def begin(self, wanted: StreamStart) -> StreamStart:
        """What the stream goes on with. Raises InvalidInput if it is not what is wanted."""
        path = f"{self._home}/begun.json"
        if not self._files.exists(path):
            self._files.write_text(path, msgspec.json.encode(wanted))
            return wanted
        begun = _BEGUN.decode(self._files.read_text(path))
        if begun.version != wanted.version:
            raise InvalidInput(
                f"{self.root} was written by another version of crosswire: start a new folder"
            )
        for name in ("tables", "ports"):
            if getattr(begun, name) != getattr(wanted, name):
                raise InvalidInput(
                    f"the stream in {self.root} was begun with other --{name}: go on with those, "
                    "or start a new folder"
                )
        return begun

    def _read_last(self) -> StreamCommit | None:
        commits = [
            path for path in self._files.children(f"{self._home}/commits") if _is_commit(path)
        ]
        if not commits:
            return None
        return _COMMIT.decode(self._files.read_text(max(commits)))

    def listing(self, folder: str) -> Iterator[tuple[str, int]]:
        """The files of a folder of a lake, or one of them, and their sizes."""
        if "://" not in folder:
            found = [Path(folder)] if folder.endswith(".parquet") else None
            for path in found or Path(folder).glob("date=*/*.parquet"):
                try:
                    yield str(path), path.stat().st_size
                except FileNotFoundError:
                    continue  # compacted, or too old, a moment ago
            return
        yield from self._files.matching(f"{folder}/date=*/*.parquet")

    def state(self, name: str) -> DataFrame | None:
        """What the last batch left, by name; None if it left nothing."""
        path = None if self.last is None else self.last.state.get(name)
        if self.last is None or path is None or not self._files.exists(path):
            return None
        return self.read(path, self.last.schemas[name])

    def kept(self, table: str, dates: Iterable[str | None] | None = None) -> list[str]:
        """The files of a table that are there for good, of these dates or all."""
        home = f"{self.root}/{table.replace('.', '/')}"
        wanted = None if dates is None else set(dates)
        found = []
        for path in self._files.of_rows(home):
            *folder, name = path.removeprefix(f"{home}/").split("/")
            date = folder[0].removeprefix("date=") if folder else None
            if not name.startswith(_PASSING) and (wanted is None or date in wanted):
                found.append(path)
        return found

    def rows_of(self, table: str, files: list[str]) -> DataFrame | None:
        """What stands in these files of a table; None if there are none."""
        if self.last is None or not files:
            return None
        return self.read_files(files, self.last.schemas[table])

    def days(self, table: str, dates: list[str]) -> DataFrame | None:
        """What is there for these days of a table of which whole days are replaced."""
        if self.last is None:
            return None
        kept = self.last.days.get(table, {})
        files = [file for date in dates for file in kept.get(date, ())]
        return self.read_files(files, self.last.schemas[table]) if files else None

    def read(self, path: str, schema: str) -> DataFrame:
        return self.read_files([path], schema)

    def read_files(self, paths: list[str], schema: str) -> DataFrame:
        return self._spark.read.schema(_shape(schema)).parquet(*paths)

    # A batch.

    def stage(self) -> StreamStaging:
        batch = 0 if self.last is None else self.last.batch + 1
        return StreamStaging(self._spark, f"{self._home}/new-{uuid.uuid4().hex[:12]}", batch)

    def commit(
        self,
        commit: StreamCommit,
        staging: StreamStaging,
        *,
        replaced_days: Mapping[str, set[str]],
        replaced_files: Iterable[str] = (),
        retained: frozenset[str] = frozenset(),
    ) -> None:
        """Make a batch visible. `replaced_days` are those of which nothing older is to stay;
        `replaced_files` are to go too; `retained` are the tables of which all that is there stays,
        for now."""
        moves, files, days = self._plan(commit.batch, staging)
        remove = list(replaced_files)
        for table_name, old in self.last.files.items() if self.last is not None else ():
            if table_name in retained:
                files[table_name] = old
            else:
                remove += old
        kept_days = dict(self.last.days) if self.last is not None else {}
        for table, dates in replaced_days.items():
            kept = dict(kept_days.get(table, {}))
            for date in dates:
                remove += kept.pop(date, [])
            kept_days[table] = kept | days.get(table, {})
        state = {} if self.last is None else dict(self.last.state)
        for name, path in staging.left.items():
            remove += [state[name]] if name in state else []
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
        name = f"{self._home}/commits/{commit.batch:08}.json"
        self._files.write_text(name, msgspec.json.encode(done))
        self.last = done
        self._apply(done)

    def _plan(
        self, batch: int, staging: StreamStaging
    ) -> tuple[dict[str, str], dict[str, list[str]], dict[str, dict[str, list[str]]]]:
        moves: dict[str, str] = {}
        files: dict[str, list[str]] = {}
        days: dict[str, dict[str, list[str]]] = {}
        for path in self._files.of_rows(f"{staging.folder}/tables"):
            *folders, name = path.removeprefix(f"{staging.folder}/tables/").split("/")
            keys = dict(part.split("=", 1) for part in folders if "=" in part)
            table_name, date = keys[_PLACE], keys.get("date")
            by_day = table_name in staging.by_day
            kept = keys[KEPT] == "true"
            prefix = f"{batch:08}" if kept or by_day else f"{_PASSING}{batch:08}"
            inner = f"date={date}/" if date not in (None, _NO_DATE) else ""
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
        """Move and remove what the commit says, as far as that is not done yet."""
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
        self._files.delete(staging.folder)


def _is_commit(path: str) -> bool:
    return path.endswith(".json")


class StreamStaging:
    """Where a batch writes what is not visible yet. May be used by several threads."""

    def __init__(self, spark: SparkSession, folder: str, batch: int) -> None:
        self._spark = spark
        self.folder = folder
        self.batch = batch
        self.by_day: set[str] = set()
        self.rows: dict[str, tuple[int, int]] = {}
        self.schemas: dict[str, str] = {}
        self.left: dict[str, str] = {}

    def write(
        self,
        name: str,
        rows: DataFrame,
        *,
        tables: tuple[str, ...],
        dated_by: str | None = None,
        by_day: bool = False,
    ) -> None:
        """Write rows that have `kept` and, where there are several, `table`: one of `tables`.

        What is open is not kept by date.
        """
        if _PLACE not in rows.columns:
            rows = rows.withColumn(_PLACE, F.lit(tables[0]))
        counted = Observation()
        kept, table = F.col(KEPT), F.col(_PLACE)
        metrics = [
            F.count_if((kept if flag else ~kept) & (table == each)).alias(f"{number}{flag}")
            for number, each in enumerate(tables)
            for flag in (True, False)
        ]
        rows = rows.observe(counted, *metrics)
        folders = [_PLACE, KEPT]
        schema = [field for field in rows.schema.fields if field.name not in folders]
        if dated_by is not None:
            day = F.to_date(F.timestamp_micros(F.col(dated_by)))
            rows = rows.withColumn("date", F.when(~table.startswith(_OPEN), day))
            folders.append("date")
        rows.write.partitionBy(*folders).parquet(f"{self.folder}/tables/{name}")
        found = counted.get
        for number, each in enumerate(tables):
            kept_rows, passing_rows = self.rows.get(each, (0, 0))
            self.rows[each] = (
                kept_rows + found[f"{number}True"],
                passing_rows + found[f"{number}False"],
            )
            self.schemas[each] = StructType(schema).json()
            if by_day:
                self.by_day.add(each)
            elif not self.batch and (dated_by is None or each.startswith(_OPEN)):
                # A table without rows is a table all the same.
                empty = self._spark.createDataFrame([], StructType(schema)).coalesce(1)
                empty.write.parquet(f"{self.folder}/tables/{each}/{_PLACE}={each}/{KEPT}=true")

    def forget(self, table: str, rows: int) -> None:
        """So many rows that were there for good are replaced."""
        kept, passing = self.rows.get(table, (0, 0))
        self.rows[table] = (kept - rows, passing)

    def work(self, name: str, rows: DataFrame, *, split_by: tuple[str, ...] = ()) -> DataFrame:
        """Write what is only needed within the batch, and give it back as it stands on disk."""
        path = f"{self.folder}/work/{name}"
        rows.write.partitionBy(*split_by).parquet(path)
        return self._spark.read.schema(rows.schema).parquet(path)

    def leave(self, name: str, work: str, rows: DataFrame, *, part: str = "") -> None:
        """What the next batch has to know: rows that were written as `work`, or a part of them."""
        self.left[name] = f"{self.folder}/work/{work}/{part}".rstrip("/")
        column = part.partition("=")[0]
        shape = StructType([field for field in rows.schema.fields if field.name != column])
        self.schemas[name] = shape.json()

    def read(self, name: str, *tables: str) -> DataFrame:
        """The rows that were written for these places, with `kept`."""
        shape = _shape(self.schemas[tables[0]]).add(KEPT, "boolean").add(_PLACE, "string")
        rows = self._spark.read.schema(shape).parquet(f"{self.folder}/tables/{name}")
        return rows.where(F.col(_PLACE).isin(*tables)).drop(_PLACE)


def _shape(schema: str) -> StructType:
    return StructType.fromJson(msgspec.json.decode(schema))
