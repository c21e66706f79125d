"""Tables are replaced all at once, wherever the run that wrote them is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession

from crosswire.errors import InvalidInput
from crosswire.lake.files import write
from crosswire.pipeline.batch import BatchJob, run_batch
from crosswire.pipeline.files import Files
from crosswire.pipeline.output import Output, _LinkedTarget, _MovedTarget
from crosswire.pipeline.sources.inputs import find_inputs
from crosswire.pipeline.tables.names import LAYERS
from tests.pipeline.driver import FEW
from tests.pipeline.stream.test_run import killed_after, tables
from tests.pipeline.test_batch import ODD, tap_rows

WRITTEN = ("silver/frames", "gold/sessions", "gold/traffic")
UNWRITTEN = "open/sessions"

# Calls that change names in the file system.
CHANGES = ("link", "symlink", "replace", "unlink", "mkdir", "rename")


def commit(root: Path, text: str, *tables: str) -> None:
    index = _LinkedTarget(root)
    for table in tables:
        (Path(index.new) / table).mkdir(parents=True)
        (Path(index.new) / table / "x").write_text(text)
    index.commit(tables)
    index.clear()


def seen(root: Path) -> dict[str, str]:
    found = (file for layer in LAYERS for file in (root / layer).glob("*/x"))
    return {str(file.parent.relative_to(root)): file.read_text() for file in found}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "out" / ".tables").mkdir(parents=True)
    return tmp_path / "out"


def killed_at(call: int, root: Path) -> int:
    """A process that commits new tables, and is killed instead of changing a name for the n-th
    time; gives how it ended."""
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
            commit(root, "new", *WRITTEN)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("old", [True, False])
def test_a_kill_never_leaves_a_mixture(root: Path, old: bool) -> None:
    before: dict[str, str] = {}
    if old:
        commit(root, "old", *WRITTEN, UNWRITTEN)
        before = dict.fromkeys((*WRITTEN, UNWRITTEN), "old")
    after = {**before, **dict.fromkeys(WRITTEN, "new")}
    states = []
    for call in range(1, 50):
        ended = killed_at(call, root)
        assert ended in (0, -signal.SIGKILL)
        states.append(seen(root))
        assert states[-1] in (before, after)
        if ended == 0:
            break
    assert (states[0], states[-1]) == (before, after)
    assert len(states) > 5
    kept = {path.name for path in (root / ".tables").iterdir()}
    assert len(kept) == 2 and "current" in kept


def test_what_is_not_written_stays(root: Path) -> None:
    commit(root, "old", *WRITTEN)
    commit(root, "new", *WRITTEN[:1], UNWRITTEN)
    assert seen(root) == {
        "silver/frames": "new",
        "gold/sessions": "old",
        "gold/traffic": "old",
        "open/sessions": "new",
    }


def test_what_others_put_there_is_not_touched(root: Path) -> None:
    (root / "gold").mkdir()
    with pytest.raises(InvalidInput, match="gold is in the way"):
        _LinkedTarget(root)
    assert (root / "gold").is_dir()


def test_one_run_at_a_time(spark: SparkSession, tmp_path: Path) -> None:
    first = Output(spark, str(tmp_path / "out"))
    with pytest.raises(InvalidInput, match=f"another run is writing to {tmp_path / 'out'}"):
        Output(spark, str(tmp_path / "out"))
    first.close()
    Output(spark, str(tmp_path / "out")).close()


def test_where_there_are_no_links_the_next_run_finishes(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = f"file://{tmp_path}/out"
    files = Files(spark, root)

    def put(text: str) -> _MovedTarget:
        position = _MovedTarget(files, root)
        for table in WRITTEN:
            folder = tmp_path / "out" / ".tables" / "new" / table
            folder.mkdir(parents=True)
            (folder / "x").write_text(text)
        return position

    put("old").commit(WRITTEN)
    index = put("new")
    move, moved = Files.move, list[str]()

    def dies(files: Files, source: str, target: str) -> None:
        if target.endswith(WRITTEN[0]):
            raise KeyboardInterrupt
        move(files, source, target)
        moved.append(target)

    with monkeypatch.context() as patched:
        patched.setattr(Files, "move", dies)
        with pytest.raises(KeyboardInterrupt):
            index.commit(WRITTEN)
    assert len(moved) > 1
    _MovedTarget(files, root)
    assert seen(tmp_path / "out") == dict.fromkeys(WRITTEN, "new")
    files.close()


def test_a_run_that_is_killed_leaves_what_was_there(spark: SparkSession, tmp_path: Path) -> None:
    for name, connections in (("old", {"gap": ODD["gap"]}), ("new", ODD)):
        write(tmp_path / name, "wire", tap_rows(connections))
        batch = BatchJob(find_inputs([str(tmp_path / name)]), str(tmp_path / f"{name} out"), FEW)
        run_batch(spark, batch, quiet=True)
    before, after = (tables(tmp_path / name) for name in ("old out", "new out"))
    assert before.keys() == after.keys() and before != after
    for most_s in (1, 3, 9):
        given, seconds = str(tmp_path / "new"), Random().uniform(0, most_s)
        ended = killed_after(seconds, spark, "batch", tmp_path / "old out", given)
        assert tables(tmp_path / "old out") in ([after] if ended == 0 else [before, after])
    found = spark.read.parquet(str(tmp_path / "new out" / "silver" / "frames"))
    assert found.count() == len(after["silver/frames"])
