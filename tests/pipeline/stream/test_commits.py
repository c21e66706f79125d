"""What a commit of a stream shows, keeps and drops: with files that Spark could have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crosswire.pipeline.manifests import Manifests
from crosswire.pipeline.sources.new_input import InputPosition
from crosswire.pipeline.stream.commits import StreamCommit, StreamOutput, StreamStart
from crosswire.pipeline.visible_tables import VisibleTables

BEGUN = StreamStart(["frames"], 0, {}, 5)
NO_SPARK: Any = None
"""Nothing here reads or writes rows."""


def batch(
    root: Path,
    final: dict[str, list[str]],
    provisional: dict[str, list[str]] | None = None,
    *,
    by_day: tuple[str, ...] = (),
    days: dict[str, set[str]] | None = None,
    replaced: tuple[str, ...] = (),
    retained: frozenset[str] = frozenset(),
) -> list[str]:
    """Commit a batch with a file for each date of each table; gives what was kept before."""
    output = StreamOutput(NO_SPARK, str(root))
    staging = output.stage()
    for kept, tables in (("true", final), ("false", provisional or {})):
        for table, dates in tables.items():
            for date in dates:
                folder = root / staging.folder / "tables" / f"target_table={table}" / f"kept={kept}"
                folder /= f"date={date}"
                folder.mkdir(parents=True)
                (folder / f"{staging.batch}-{kept}.parquet").touch()
    for name in ("decoded/table=states", "decoded/table=frames", "only"):
        (root / staging.folder / "work" / name).mkdir(parents=True)
        (root / staging.folder / "work" / name / "x.parquet").touch()
    staging.by_day |= set(by_day)
    staging.saved["states"] = f"{staging.folder}/work/decoded/table=states"
    commit = StreamCommit(staging.batch, BEGUN, InputPosition())
    output.commit(
        commit,
        staging,
        replaced_days=days or {},
        replaced_files=[path for path in output.kept("silver.frames") if path.endswith(replaced)]
        if replaced
        else [],
        retained=retained,
    )
    kept_files = output.kept("silver.frames")
    output.close()
    return kept_files


def shown(root: Path, table: str = "silver.frames") -> list[str]:
    """Date and name of the files that readers see."""
    return sorted(
        "/".join(path.split("/")[-2:]).removeprefix("date=")
        for path in VisibleTables(str(root)).files(table)
    )


def test_provisional_files_are_replaced_and_final_ones_stay(tmp_path: Path) -> None:
    batch(tmp_path, {"silver.frames": ["2026-11-01"]}, {"silver.frames": ["2026-11-01"]})
    assert shown(tmp_path) == ["2026-11-01/0-false.parquet", "2026-11-01/0-true.parquet"]
    batch(tmp_path, {"silver.frames": ["2026-11-02"]}, {"silver.frames": ["2026-11-02"]})
    assert shown(tmp_path) == [
        "2026-11-01/0-true.parquet",
        "2026-11-02/1-false.parquet",
        "2026-11-02/1-true.parquet",
    ]


def test_what_a_batch_without_input_retains_stays(tmp_path: Path) -> None:
    batch(tmp_path, {}, {"silver.frames": ["2026-11-01"]})
    batch(tmp_path, {}, retained=frozenset({"silver.frames"}))
    assert shown(tmp_path) == ["2026-11-01/0-false.parquet"]
    batch(tmp_path, {})
    assert shown(tmp_path) == []


def test_replaced_files_are_dropped(tmp_path: Path) -> None:
    batch(tmp_path, {"silver.frames": ["2026-11-01", "2026-11-02"]})
    batch(tmp_path, {"silver.frames": ["2026-11-01"]}, replaced=("date=2026-11-01/0-true.parquet",))
    assert shown(tmp_path) == ["2026-11-01/1-true.parquet", "2026-11-02/0-true.parquet"]


def test_days_are_replaced_as_a_whole(tmp_path: Path) -> None:
    table, state = "gold.traffic", "days.traffic"
    by_day = (table, state)
    first = {table: ["2026-11-01", "2026-11-02"], state: ["2026-11-01"]}
    batch(tmp_path, first, by_day=by_day, days={table: {"2026-11-01", "2026-11-02"}, state: set()})
    again = {table: {"2026-11-02", "2026-11-01"}, state: {"2026-11-01"}}
    batch(tmp_path, {table: ["2026-11-02"]}, by_day=by_day, days=again)
    # The other day has no rows any more.
    assert shown(tmp_path, table) == ["2026-11-02/1-true.parquet"]
    assert VisibleTables(str(tmp_path)).names == (table,)


def test_only_the_state_of_the_last_batch_is_kept_of_its_work(tmp_path: Path) -> None:
    batch(tmp_path, {"silver.frames": ["2026-11-01"]})
    found = [str(path.relative_to(tmp_path)).split("/", 2)[2] for path in tmp_path.rglob("x.par*")]
    assert found == ["work/decoded/table=states/x.parquet"]


def test_what_is_dropped_goes_when_no_reader_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch(tmp_path, {"silver.frames": ["2026-11-01"]}, {"silver.frames": ["2026-11-01"]})
    (old,) = tmp_path.rglob("0-false.parquet")
    batch(tmp_path, {})
    assert old.exists()
    defaults = Manifests.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "keep_s", -1.0)
    batch(tmp_path, {})
    assert not old.exists()
    assert shown(tmp_path) == ["2026-11-01/0-true.parquet"]
