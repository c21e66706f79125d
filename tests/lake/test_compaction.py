"""Compaction: fewer files of the same rows, whenever it is killed."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from crosswire.errors import LakeError
from crosswire.lake import compaction
from crosswire.lake.compaction import compact
from crosswire.lake.files import find
from crosswire.lake.verification import verify
from tests.lake.crash import read_lake
from tests.lake.ledger_files import fill

DAY = 86_400_000_000
COLUMNS = ["node", "seq", "id", "time", "step"]


def faults(lake: Path) -> list[tuple[str, int, int]]:
    return [(each.kind, each.first, each.last) for each in verify(lake)]


def test_compacting_makes_few_files_of_the_same_rows(tmp_path: Path) -> None:
    fill(tmp_path, *((first, first + 9) for first in range(1, 200, 10)))
    fill(tmp_path, (1, 4), (5, 9), node="n2")
    fill(tmp_path, (201, 205), (206, 210), time=3 * DAY)
    before = read_lake(tmp_path, "ledger", COLUMNS)
    (done,) = compact(tmp_path, before="1970-01-02")
    assert (done.files_before, done.files_after, done.rows) == (22, 2, 209)
    assert read_lake(tmp_path, "ledger", COLUMNS) == before
    assert faults(tmp_path) == []
    names = [file.path.parent.name for file in find(tmp_path)]
    assert names == ["date=1970-01-01"] * 2 + ["date=1970-01-04"] * 2
    assert not list(compact(tmp_path, before="1970-01-02"))


def test_compacted_files_stay_below_the_target(tmp_path: Path) -> None:
    files = fill(tmp_path, *((first, first + 9) for first in range(1, 100, 10)))
    target = files[0].stat().st_size * 3
    (done,) = compact(tmp_path, before="1970-01-02", target_bytes=target)
    assert 3 <= done.files_after <= 5
    assert faults(tmp_path) == []


def test_files_do_not_grow_together_over_a_gap(tmp_path: Path) -> None:
    fill(tmp_path, (1, 5), (6, 8), (10, 12), (13, 14))
    (done,) = compact(tmp_path, before="1970-01-02")
    assert done.files_after == 2
    assert faults(tmp_path) == [("gap", 9, 9)]


def test_a_damaged_file_stops_compaction_and_nothing_changes(tmp_path: Path) -> None:
    files = fill(tmp_path, (1, 1000), (1001, 1002))
    column = pq.read_metadata(files[0]).row_group(0).column(2)
    damaged = bytearray(files[0].read_bytes())
    damaged[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    files[0].write_bytes(damaged)
    with pytest.raises(LakeError, match="can't be compacted"):
        list(compact(tmp_path, before="1970-01-02"))
    assert [file.path for file in find(tmp_path)] == files
    assert not list((tmp_path / ".parts").iterdir())


def test_a_file_that_came_while_compacting_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, (1, 5), (6, 8))
    swap = compaction._exchange

    def late(one: Path, other: Path) -> None:
        fill(tmp_path, (9, 10))
        swap(one, other)

    monkeypatch.setattr(compaction, "_exchange", late)
    list(compact(tmp_path, before="1970-01-02"))
    assert [(file.first, file.last) for file in find(tmp_path)] == [(1, 8), (9, 10)]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_compaction_that_was_killed_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    fill(tmp_path, (1, 5), (6, 8))
    swap = compaction._exchange

    class Killed(BaseException):
        pass

    def die(one: Path, other: Path) -> None:
        if moment == "after":
            fill(tmp_path, (9, 10))
            swap(one, other)
        raise Killed

    with monkeypatch.context() as broken:
        broken.setattr(compaction, "_exchange", die)
        broken.setattr("shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            list(compact(tmp_path, before="1970-01-02"))
    fill(tmp_path, (11, 12)), fill(tmp_path, (13, 14))
    list(compact(tmp_path, before="1970-01-02"))
    list(compact(tmp_path, before="1970-01-02"))
    seqs = [row["seq"] for row in read_lake(tmp_path, "ledger", COLUMNS)]
    expected = list(range(1, 15)) if moment == "after" else [*range(1, 9), *range(11, 15)]
    assert seqs == expected
