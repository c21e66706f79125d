"""Streams end with the tables of a batch over the same input, however it comes, and are killed."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from crosswire.errors import InvalidInput, PipelineError
from crosswire.lake.files import write
from crosswire.pipeline.batch import BatchJob, run_batch
from crosswire.pipeline.manifests import Manifests, RunFolder
from crosswire.pipeline.output import Output
from crosswire.pipeline.sources.inputs import find_inputs
from crosswire.pipeline.sources.new_input import InputPosition
from crosswire.pipeline.stores import LocalStore
from crosswire.pipeline.stream.commits import StreamCommit, StreamOutput, StreamStart
from crosswire.pipeline.stream.run import BatchDone, Stream, run_stream
from crosswire.pipeline.summary import Summary
from crosswire.pipeline.tables.catalog import CATALOG
from crosswire.pipeline.tables.names import NO_DATE
from crosswire.pipeline.tables.views import view_statements
from crosswire.pipeline.visible_tables import VisibleTables
from tests.pipeline.captures import write_captures
from tests.pipeline.conftest import TRAFFIC, rows_of
from tests.pipeline.stretched import DURATION, holed, until
from tests.pipeline.test_batch import ODD, tap_rows

STEPS = 3

Tables = dict[str, list[str]]
"""The rows of each table, in words and sorted."""


def tables(folder: Path) -> Tables:
    found: Tables = {}
    for name in VisibleTables(str(folder)).names:
        rows = rows_of(folder, name)
        found[name.replace(".", "/")] = sorted(str(sorted(row.items())) for row in rows)
    return found


class Delivery:
    """Tap files of all protocols, what a hub recorded, with some of it missing, and captures, cut
    so that each step has a part of all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = (str(folder / "lake"), str(folder / "captures"))
        (folder / "captures").mkdir(parents=True)
        rows = pa.concat_tables(TRAFFIC.wire()).sort_by("time")
        seq = pa.array(range(len(rows)), pa.int64())
        self._tables = [
            ("wire", rows.set_column(1, rows.schema.field("seq"), seq)),
            ("wire", tap_rows(ODD)),
        ]
        write_captures(folder / "made", TRAFFIC)

    def deliver(self, step: int) -> None:
        """The first capture grows, and ends inside of a record before it is whole."""
        for name, rows in self._tables:
            first, end = len(rows) * step // STEPS, len(rows) * (step + 1) // STEPS
            write(self.folder / "lake", name, rows.slice(first, end - first))
        for name, rows in holed().items():
            first, end = (until(rows, DURATION * each // STEPS) for each in (step, step + 1))
            write(self.folder / "lake", name, rows.slice(first, end - first))
        growing, compressed = sorted((self.folder / "made").iterdir())
        if step < 2:
            whole = growing.read_bytes()
            self._capture(growing.name, whole[: (step + 1) * len(whole) // 2])
        else:
            self._capture(compressed.name, compressed.read_bytes())

    def _capture(self, name: str, data: bytes) -> None:
        file = self.folder / "captures" / name
        file.write_bytes(data)
        # A stream waits until nobody writes to a compressed file any more.
        os.utime(file, (file.stat().st_atime, file.stat().st_mtime - 60))

    def all(self) -> Delivery:
        for step in range(STEPS):
            self.deliver(step)
        return self


def batch(
    spark: SparkSession, given: Delivery, output: Path, *, skip_damaged: bool = False
) -> tuple[Tables, Summary]:
    job = BatchJob(find_inputs(given.paths), str(output), skip_damaged=skip_damaged)
    summary = run_batch(spark, job, quiet=True)
    return tables(output), summary


def once(spark: SparkSession, given: Delivery, output: Path) -> Summary:
    return run_stream(spark, Stream(given.paths, str(output), once=True))


@pytest.fixture(scope="module", autouse=True)
def few_tasks(spark: SparkSession) -> Iterator[None]:
    """There is little to do in each of many batches."""
    name = "spark.sql.shuffle.partitions"
    before = spark.conf.get(name)
    spark.conf.set(name, "1")
    yield
    spark.conf.set(name, before)


@pytest.fixture(scope="module")
def expected(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tables, Summary]:
    folder = tmp_path_factory.mktemp("batch")
    return batch(spark, Delivery(folder / "given").all(), folder / "out")


@pytest.mark.long  # `test_in_steps` ends with the same
def test_once_in_one_go(
    spark: SparkSession, tmp_path: Path, expected: tuple[Tables, Summary]
) -> None:
    given = Delivery(tmp_path / "given").all()
    summary = once(spark, given, tmp_path / "out")
    assert tables(tmp_path / "out") == expected[0]
    assert summary.accounting == expected[1].accounting
    assert {name: rows for name, rows in summary.rows.items() if rows} == {
        name: rows for name, rows in expected[1].rows.items() if rows
    }


@pytest.mark.parametrize(
    "is_compared", [False, pytest.param(True, marks=pytest.mark.long)], ids=["last", "each"]
)
def test_in_steps(
    spark: SparkSession, tmp_path: Path, expected: tuple[Tables, Summary], is_compared: bool
) -> None:
    """After the last one, and after each in the long run, the tables are those of a batch over what
    there is."""
    given = Delivery(tmp_path / "given")
    given.deliver(0)
    until_a_batch(spark, given, tmp_path / "out")
    if is_compared:
        # The capture ends in a record: damage to a batch, and to a stream what is still to come.
        so_far, _ = batch(spark, given, tmp_path / "so far", skip_damaged=True)
        accounts = so_far["gold/accounting"]
        so_far["gold/accounting"] = [row for row in accounts if "'truncated files'" not in row]
        assert tables(tmp_path / "out") == so_far
        assert len(accounts) == len(so_far["gold/accounting"]) + 1
    only_provisional_rows_are_revocable(tmp_path / "out")
    given.deliver(1)
    given.deliver(2)
    summary = until_a_batch(spark, given, tmp_path / "out")
    assert tables(tmp_path / "out") == expected[0]
    assert summary.accounting == expected[1].accounting
    assert summary.packets == expected[1].packets


def only_provisional_rows_are_revocable(output: Path) -> None:
    seen = set()
    visible = VisibleTables(str(output))
    for table in visible.names:
        layer, name = table.split(".")
        for file in visible.files(table) if layer != "bronze" else ():
            values = set(pq.ParquetFile(file).read(["revocable"])["revocable"].to_pylist())
            expected = CATALOG[name].adds_up or "/kept=false/" in file
            assert values <= {expected}, file
            seen |= {(layer, expected)} if values else set()
    assert seen >= {("silver", False), ("silver", True), ("gold", False), ("gold", True)}


def until_a_batch(spark: SparkSession, given: Delivery, output: Path) -> Summary:
    """A stream that is stopped after a batch."""
    stop = threading.Event()
    batches: list[BatchDone] = []

    def notify(done: BatchDone) -> None:
        batches.append(done)
        stop.set()

    summary = run_stream(spark, Stream(given.paths, str(output)), stop=stop, notify=notify)
    assert len(batches) == 1 and batches[0].files
    return summary


@pytest.mark.long  # the tests after it are killed at chosen steps of a commit
def test_killed_at_any_moment(
    spark: SparkSession, tmp_path: Path, expected: tuple[Tables, Summary]
) -> None:
    """A batch for each file; killed while it starts, reads, writes or commits."""
    random = Random(int.from_bytes(os.urandom(4)))
    given = Delivery(tmp_path / "given")
    for step in range(STEPS):
        given.deliver(step)
        seconds = random.uniform(0, 5)
        assert killed_after(seconds, spark, "stream", tmp_path / "out", *given.paths)
    once(spark, given, tmp_path / "out")
    assert tables(tmp_path / "out") == expected[0]


def killed_after(
    seconds: float, spark: SparkSession, how: str, output: Path, *paths: str
) -> int | None:
    """Gives its exit code: it may have been quicker."""
    gateway: Any = spark.sparkContext._gateway
    parameters = gateway.gateway_parameters
    environment = {
        **os.environ,
        "PYSPARK_GATEWAY_PORT": str(parameters.port),
        "PYSPARK_GATEWAY_SECRET": parameters.auth_token,
    }
    command = [sys.executable, "-m", "tests.pipeline.driver", how, str(output), *paths]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
        child.send_signal(signal.SIGKILL)
        _, errors = child.communicate()
    assert child.returncode in (0, -signal.SIGKILL), errors
    return child.returncode


def test_what_a_killed_batch_left_is_deleted(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed right before its commit: nothing of it is seen, and the next one has it."""
    write(tmp_path / "lake", "wire", tap_rows(ODD))
    wanted = frozenset({"frames", "sessions"})
    stream = Stream((str(tmp_path / "lake"),), str(tmp_path / "out"), once=True, tables=wanted)

    class Killed(BaseException):
        pass

    def dies(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Manifests, "commit", dies)
        patched.setattr(RunFolder, "end", lambda *_, **__: None)
        with pytest.raises(Killed):
            run_stream(spark, stream)
    gc.collect()
    (left,) = (path for path in (tmp_path / "out" / "runs").iterdir() if path.is_dir())
    assert tables(tmp_path / "out") == {}
    # The lock of the process that was killed is gone with it.
    (tmp_path / "out" / "runs" / f"{left.name}.writer").unlink()
    assert run_stream(spark, stream).rows["silver.frames"] == 23
    rows = tables(tmp_path / "out")
    assert len(rows["silver/frames"]) == 23
    assert (len(rows["gold/sessions"]), len(rows["open/sessions"])) == (7, 2)
    assert not left.exists()


def test_sessions_of_a_killed_hub_end_with_it(spark: SparkSession, tmp_path: Path) -> None:
    """Its connections have no end on the wire: the next start shows that they are over, and later
    batches, which don't see a connection of that start any more, remember it."""
    opened = ODD["waiting"][1]
    ended = ODD["unanswered"][1]
    steps: list[dict[str, tuple[str | None, Any]]] = [
        {"emp-9-1": ("emp", opened), "emp-9-2": ("emp", ended)},
        {"emp-a-1": ("emp", ended)},
        {"other": ("emp", opened)},
    ]
    wanted = frozenset({"sessions"})
    stream = Stream((str(tmp_path / "lake"),), str(tmp_path / "out"), once=True, tables=wanted)
    shown, first = [], 0
    for step in steps:
        rows = tap_rows(step, first)
        first += rows.num_rows
        write(tmp_path / "lake", "wire", rows)
        run_stream(spark, stream)
        found = [
            rows_of(tmp_path / "out", name)
            for name in VisibleTables(str(tmp_path / "out")).names
            if name.endswith("sessions")
        ]
        shown.append({row["session"]: row["ended"] for rows in found for row in rows})
    assert shown == [
        {"emp-9-1": "open", "emp-9-2": "fin"},
        {"emp-9-1": "killed", "emp-9-2": "fin", "emp-a-1": "fin"},
        {"emp-9-1": "killed", "emp-9-2": "fin", "emp-a-1": "fin", "other": "open"},
    ]
    job = BatchJob(find_inputs((str(tmp_path / "lake"),)), str(tmp_path / "whole"), tables=wanted)
    run_batch(spark, job)
    assert without_revocable(tmp_path / "whole") == without_revocable(tmp_path / "out")


def without_revocable(folder: Path) -> Tables:
    """`tables`, without the column that differs: rows of a batch are final."""
    return {
        name: [row.replace("('revocable', True)", "('revocable', False)") for row in rows]
        for name, rows in tables(folder).items()
    }


def test_many_small_files_become_one(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosswire.pipeline.stream.commits.MERGED_FILES", 2)
    wanted = frozenset({"frames"})
    stream = Stream((str(tmp_path / "lake"),), str(tmp_path / "out"), once=True, tables=wanted)
    rows = tap_rows({"gap": ODD["gap"]})
    half = rows.num_rows // 2
    for part in (rows.slice(0, half), rows.slice(half)):
        write(tmp_path / "lake", "wire", part)
        run_stream(spark, stream)
    files = VisibleTables(str(tmp_path / "out")).files("silver.frames")
    final = [path for path in files if "kept=false" not in path and NO_DATE not in path]
    assert len(final) == 1 and "/merged-1/" in final[0]
    assert len(tables(tmp_path / "out")["silver/frames"]) == 5
    # Views of the single files of a stream have the date in both engines, too.
    paths = {"silver.frames": VisibleTables(str(tmp_path / "out")).paths("silver.frames")}
    query = "SELECT count(*) AS rows, count(DISTINCT date) AS days, min(date) AS first"
    for statement in view_statements("spark", paths):
        spark.sql(statement)
    (in_spark,) = spark.sql(f"{query} FROM silver.frames").collect()
    spark.sql("DROP VIEW silver.frames")
    with duckdb.connect() as engine:
        for statement in view_statements("duckdb", paths):
            engine.execute(statement)
        in_duckdb = engine.sql(f"{query} FROM silver.frames").fetchall()
    assert in_duckdb == [tuple(in_spark)] and in_spark.rows == 5


# ------------------------------------------------------------------------------- what is refused


def test_the_first_of_two_writers_wins(spark: SparkSession, tmp_path: Path) -> None:
    write(tmp_path / "lake", "wire", tap_rows({"gap": ODD["gap"]}))
    wanted = frozenset({"frames"})
    stream = Stream((str(tmp_path / "lake"),), str(tmp_path / "out"), once=True, tables=wanted)
    other = Output(spark, str(tmp_path / "out"))
    run_stream(spark, stream)
    before = tables(tmp_path / "out")
    with pytest.raises(PipelineError, match=rf"process {os.getpid()} on .* wrote new tables"):
        other.commit()
    other.close()
    assert tables(tmp_path / "out") == before


def test_a_stream_goes_on_with_what_it_was_begun_with(spark: SparkSession, tmp_path: Path) -> None:
    output = StreamOutput(spark, str(tmp_path / "out"))
    begun = output.begin(StreamStart(["frames"], 5, {1: "emp"}, 7, "1h"))
    output.commit(StreamCommit(0, begun, InputPosition()), output.stage(), replaced_days={})
    output.close()
    output = StreamOutput(spark, str(tmp_path / "out"))
    # An hour ago is another time now.
    assert output.begin(StreamStart(["frames"], 9, {1: "emp"}, 7, "1h")) == begun
    for other, name in (
        (StreamStart([], 5, {1: "emp"}, 7, "1h"), "tables"),
        (StreamStart(["frames"], 5, {}, 7, "1h"), "port"),
        (StreamStart(["frames"], 5, {1: "emp"}, 8, "1h"), "late"),
        (StreamStart(["frames"], 9, {1: "emp"}, 7, "2h"), "since"),
        (StreamStart(["frames"], 0, {1: "emp"}, 7), "since"),
    ):
        with pytest.raises(InvalidInput, match=f"was begun with another --{name}"):
            output.begin(other)
    output.close()


def test_batches_and_streams_have_folders_of_their_own(spark: SparkSession, tmp_path: Path) -> None:
    stream, batch = str(tmp_path / "stream"), str(tmp_path / "batch")
    output = StreamOutput(spark, stream)
    begun = StreamStart([], 0, {}, 7)
    output.commit(StreamCommit(0, begun, InputPosition()), output.stage(), replaced_days={})
    output.close()
    with pytest.raises(InvalidInput, match="holds the tables of a stream"):
        Output(spark, stream)
    Manifests(LocalStore(batch)).commit({})
    with pytest.raises(InvalidInput, match="holds the tables of a batch"):
        StreamOutput(spark, batch)


@pytest.mark.parametrize("name", [".tables", ".stream"])
def test_older_layouts_are_refused(spark: SparkSession, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    for kind in (Output, StreamOutput):
        with pytest.raises(InvalidInput, match="another version"):
            kind(spark, str(tmp_path))
