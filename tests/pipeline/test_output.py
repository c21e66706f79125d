"""Tables become visible by one manifest, wherever the run that wrote them is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyarrow import fs
from pyspark.sql import SparkSession

from crosswire.errors import InvalidInput, PipelineError
from crosswire.lake.files import write
from crosswire.pipeline import output
from crosswire.pipeline.batch import BatchJob, run_batch
from crosswire.pipeline.manifests import Manifests, TablePaths, newest_manifest
from crosswire.pipeline.output import Output
from crosswire.pipeline.sources.inputs import find_inputs
from crosswire.pipeline.stores import ArrowStore, LocalStore, open_store
from crosswire.pipeline.stream import commits
from crosswire.pipeline.stream.run import Stream, run_stream
from crosswire.pipeline.visible_tables import VisibleTables
from tests.pipeline.driver import FEW
from tests.pipeline.stream.test_run import killed_after, tables
from tests.pipeline.test_batch import ODD, tap_rows

DAY_US = 86_400_000_000
WRITTEN = ("silver.frames", "gold.sessions", "gold.traffic")
UNWRITTEN = "open.sessions"

# Calls that change files and folders.
CHANGES = ("open", "write", "fsync", "unlink", "mkdir", "rmdir")
RENAMES = ("rename", "replace", "renames", "link", "symlink")


def commit(root: Path, text: str, *names: str, keep_s: float = 3600.0) -> None:
    manifests = Manifests(LocalStore(str(root)), keep_s=keep_s)
    manifests.remove_abandoned()
    run = manifests.begin_run()
    found = {} if manifests.newest is None else dict(manifests.newest.tables)
    for name in names:
        folder = root / run.folder / name
        folder.mkdir(parents=True)
        (folder / "x").write_text(text)
        found[name] = TablePaths([f"{run.folder}/{name}"])
    manifests.commit(found)
    manifests.remove_old()
    run.end(keep=True)


def seen(root: Path) -> dict[str, str]:
    manifest = newest_manifest(LocalStore(str(root)))
    found = {} if manifest is None else manifest.tables
    return {name: (root / files.paths[0] / "x").read_text() for name, files in found.items()}


def killed_at(call: int, root: Path) -> int:
    """A process that commits new tables, and is killed instead of its n-th change of a file; gives
    how it ended."""
    child = os.fork()
    if not child:
        code = 1
        try:
            made = count(1)

            def counted(change: Callable[..., Any]) -> Callable[..., Any]:
                def instead(*arguments: Any, **more: Any) -> Any:
                    if next(made) == call:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return change(*arguments, **more)

                return instead

            for name in CHANGES:
                setattr(os, name, counted(getattr(os, name)))
            commit(root, "new", *WRITTEN, keep_s=0.0)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("old", [True, False])
def test_a_kill_never_leaves_a_mixture(tmp_path: Path, old: bool) -> None:
    before: dict[str, str] = {}
    if old:
        commit(tmp_path, "old", *WRITTEN, UNWRITTEN)
        before = dict.fromkeys((*WRITTEN, UNWRITTEN), "old")
    after = {**before, **dict.fromkeys(WRITTEN, "new")}
    states = []
    for call in range(1, 200):
        ended = killed_at(call, tmp_path)
        assert ended in (0, -signal.SIGKILL)
        states.append(seen(tmp_path))
        assert states[-1] in (before, after)
        if ended == 0:
            break
    assert (states[0], states[-1]) == (before, after)
    assert len(states) > 5
    # Nothing that killed runs left stays for ever.
    commit(tmp_path, "new", *WRITTEN, keep_s=0.0)
    commit(tmp_path, "new", *WRITTEN, keep_s=0.0)
    named = {path for each in newest_tables(tmp_path).values() for path in each.paths}
    runs = {"/".join(path.split("/")[:2]) for path in named}
    # The run before the last one is empty, and goes with the next one.
    assert len([*(tmp_path / "runs").iterdir()]) <= len(runs) + 1


def newest_tables(root: Path) -> dict[str, TablePaths]:
    manifest = newest_manifest(LocalStore(str(root)))
    assert manifest is not None
    return manifest.tables


def test_what_is_not_written_stays(tmp_path: Path) -> None:
    commit(tmp_path, "old", *WRITTEN)
    commit(tmp_path, "new", *WRITTEN[:1], UNWRITTEN)
    assert seen(tmp_path) == {
        "silver.frames": "new",
        "gold.sessions": "old",
        "gold.traffic": "old",
        "open.sessions": "new",
    }


@pytest.mark.parametrize("length", [0, 1, 40, -1])
def test_a_manifest_that_is_not_complete_is_ignored_and_replaced(
    tmp_path: Path, length: int
) -> None:
    commit(tmp_path, "old", *WRITTEN)
    whole = (tmp_path / "manifests" / "00000001.jsonl").read_bytes()
    torn = tmp_path / "manifests" / "00000002.jsonl"
    torn.write_bytes(whole[:length])
    assert seen(tmp_path) == dict.fromkeys(WRITTEN, "old")
    commit(tmp_path, "new", *WRITTEN)
    assert seen(tmp_path) == dict.fromkeys(WRITTEN, "new")
    assert torn.read_bytes() != whole[:length]


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    commit(tmp_path, "old", *WRITTEN)
    commit(tmp_path, "new", *WRITTEN)
    file = tmp_path / "manifests" / "00000002.jsonl"
    file.write_bytes(file.read_bytes().replace(b"gold", b"good", 1))
    assert seen(tmp_path) == dict.fromkeys(WRITTEN, "old")


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    commit(tmp_path, "old", *WRITTEN)
    from crosswire.pipeline import manifests

    file = tmp_path / "manifests" / "00000001.jsonl"
    parsed = manifests._parsed(file.read_bytes(), "here")
    assert parsed is not None
    import msgspec

    newer = msgspec.structs.replace(parsed, version=2)
    file.write_bytes(manifests._serialized(newer))
    with pytest.raises(InvalidInput, match="another version"):
        newest_manifest(LocalStore(str(tmp_path)))


def test_the_first_of_two_writers_wins_and_the_other_names_it(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    first, second = Manifests(store), Manifests(store)
    second.commit({"gold.traffic": TablePaths(["second"])})
    with pytest.raises(PipelineError, match=rf"process {os.getpid()} on \S+ wrote new tables"):
        first.commit({"gold.traffic": TablePaths(["first"])})
    assert newest_tables(tmp_path)["gold.traffic"].paths == ["second"]
    # Who has seen the winner's tables may go on.
    again = Manifests(store)
    again.commit({"gold.traffic": TablePaths(["third"])})
    assert newest_tables(tmp_path)["gold.traffic"].paths == ["third"]


def test_what_readers_may_follow_is_not_deleted(tmp_path: Path) -> None:
    commit(tmp_path, "old", *WRITTEN)
    files = newest_tables(tmp_path)["gold.traffic"].paths
    commit(tmp_path, "new", *WRITTEN)
    commit(tmp_path, "newer", *WRITTEN)
    assert (tmp_path / files[0] / "x").read_text() == "old"
    # Their time is over: what was replaced goes, and what is shown stays.
    commit(tmp_path, "newest", *WRITTEN, keep_s=0.0)
    assert not (tmp_path / files[0]).exists()
    assert seen(tmp_path) == dict.fromkeys(WRITTEN, "newest")


def test_folders_of_writers_that_live_are_not_deleted(tmp_path: Path) -> None:
    manifests = Manifests(LocalStore(str(tmp_path)))
    run = manifests.begin_run()
    (tmp_path / run.folder).mkdir(parents=True)
    Manifests(LocalStore(str(tmp_path))).remove_abandoned()
    assert (tmp_path / run.folder).is_dir()
    run.end(keep=True)
    Manifests(LocalStore(str(tmp_path))).remove_abandoned()
    assert not (tmp_path / run.folder).exists()


def test_many_files_are_named_in_lists(tmp_path: Path) -> None:
    manifests = Manifests(LocalStore(str(tmp_path)))
    paths = [f"runs/1/date=2026-11-{day:02}/{n}.parquet" for day in (1, 2) for n in range(400)]
    files = manifests.spill(
        TablePaths(paths), manifests.begin_run(), "gold.steps", "/date=2026-11-02/"
    )
    assert (len(files.paths), len(files.lists)) == (400, 1)
    manifests.commit({"gold.steps": files})
    found = VisibleTables(str(tmp_path)).paths("gold.steps")
    assert sorted(found) == sorted(f"{tmp_path}/{path}" for path in paths)


def test_nothing_is_renamed_or_linked(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kinds of runs where nothing of ours may be renamed, moved or linked."""

    def refuse(*arguments: object, **_: object) -> None:
        raise OSError(f"no renames here: {arguments}")

    write(tmp_path / "lake", "wire", tap_rows(ODD))
    inputs = find_inputs([str(tmp_path / "lake")])
    with monkeypatch.context() as patched:
        for name in RENAMES:
            patched.setattr(os, name, refuse)
        for name in ("rename", "replace", "symlink_to", "hardlink_to"):
            patched.setattr(Path, name, refuse)
        for _ in range(2):
            run_batch(spark, BatchJob(inputs, str(tmp_path / "batch"), FEW), quiet=True)
            stream = Stream((str(tmp_path / "lake"),), str(tmp_path / "stream"), True, FEW)
            run_stream(spark, stream)
    for name in ("batch", "stream"):
        found = [path for path in (tmp_path / name).rglob("*") if path.is_symlink()]
        assert not found
        assert all(path.stat().st_nlink == 1 for path in (tmp_path / name).rglob("*.parquet"))
    assert tables(tmp_path / "batch") == tables(tmp_path / "stream") != {}


def through_arrow(root: str, _settings: object = None) -> ArrowStore:
    """A folder as an object store is: Spark writes the rows, Arrow the manifest and its lock. Both
    find it without Hadoop's module for S3, which PyPI's Spark lacks."""
    path = root.removeprefix("file://")
    return ArrowStore(f"file://{path}", fs.LocalFileSystem(), path, settle_s=0.05)


@pytest.mark.long  # `test_many_small_files_are_written_as_few` has a table of it
def test_spark_writes_tables_that_arrow_commits(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "lake", "wire", tap_rows(ODD))
    inputs = find_inputs([str(tmp_path / "lake")])
    for module in (output, commits):
        monkeypatch.setattr(module, "open_store", through_arrow)
    for _ in range(2):
        run_batch(spark, BatchJob(inputs, f"file://{tmp_path}/batch", FEW), quiet=True)
        run_stream(spark, Stream((str(tmp_path / "lake"),), f"file://{tmp_path}/stream", True, FEW))
    assert tables(tmp_path / "batch") == tables(tmp_path / "stream") != {}
    assert not [*tmp_path.rglob("manifests/lock")]


def test_a_run_that_is_killed_leaves_what_was_there(spark: SparkSession, tmp_path: Path) -> None:
    for name, connections in (("old", {"gap": ODD["gap"]}), ("new", ODD)):
        write(tmp_path / name, "wire", tap_rows(connections))
        batch = BatchJob(find_inputs([str(tmp_path / name)]), str(tmp_path / f"{name} out"), FEW)
        run_batch(spark, batch, quiet=True)
    before, after = (tables(tmp_path / name) for name in ("old out", "new out"))
    assert before.keys() == after.keys() and before != after
    for most_s in (2, 8):
        given, seconds = str(tmp_path / "new"), Random().uniform(0, most_s)
        ended = killed_after(seconds, spark, "batch", tmp_path / "old out", given)
        assert tables(tmp_path / "old out") in ([after] if ended == 0 else [before, after])


@pytest.mark.parametrize("opened", [open_store, through_arrow], ids=["local", "arrow"])
def test_many_small_files_are_written_as_few(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Any
) -> None:
    """A cluster writes a file for each task and date."""
    monkeypatch.setattr(output, "MERGED_FILES", 3)
    monkeypatch.setattr(output, "open_store", opened)
    counts = ("accepted", "delivered", "settled", "refused", "gone", "depth")
    rows = spark.range(40).selectExpr(
        f"id % 2 * {DAY_US} AS minute",
        "'n' AS node",
        "concat('queue/', id) AS destination",
        *(f"id AS {name}" for name in counts),
    )
    made = Output(spark, str(tmp_path))
    try:
        made.write("gold.depth", rows.repartition(5))
        made.commit()
    finally:
        made.close()
    found = VisibleTables(str(tmp_path))
    assert len(found.files("gold.depth")) == 2
    assert sorted(found.read("gold.depth")["accepted"].to_pylist()) == list(range(40))
