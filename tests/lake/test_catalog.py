"""What is in a lake, what is wrong with it, and fewer files of the same rows."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from crosswire.errors import LakeError
from crosswire.lake.catalog import compact, expire, summarize, verify
from crosswire.lake.files import find, write
from crosswire.lake.schemas import GAPS, LEDGER
from tests.lake.crash import read_lake

DAY = 86_400_000_000
COLUMNS = ["node", "seq", "id", "time", "step"]


def ledger(first: int, last: int, *, time: int = 5, node: str = "n1") -> pa.Table:
    rows = [
        {
            "node": node,
            "seq": seq,
            "id": seq * 10,
            "time": time,
            "step": "accepted",
            "destination": "queue/q",
            "protocol": "emp",
            "connection": "c",
            "principal": "",
            "attempt": 0,
            "detail": "",
            "count": 1,
        }
        for seq in range(first, last + 1)
    ]
    return pa.Table.from_pylist(rows, schema=LEDGER)


def fill(lake: Path, *ranges: tuple[int, int], time: int = 5, node: str = "n1") -> list[Path]:
    files = []
    for first, last in ranges:
        files += write(lake, "ledger", ledger(first, last, time=time, node=node))
    return files


def faults(lake: Path) -> list[tuple[str, int, int]]:
    return [(each.kind, each.first, each.last) for each in verify(lake)]


def test_a_summary_counts_files_rows_and_bytes_of_each_node(tmp_path: Path) -> None:
    files = fill(tmp_path, (1, 10), (11, 15), time=DAY + 7)
    fill(tmp_path, (3, 3), node="n2")
    one, two = summarize(tmp_path)
    assert (one.table, one.node, one.files, one.rows) == ("ledger", "n1", 2, 15)
    assert one.bytes == sum(file.stat().st_size for file in files)
    assert (one.first_seq, one.last_seq, one.first_time, one.last_time) == (1, 15, DAY + 7, DAY + 7)
    assert (two.node, two.rows, two.first_seq) == ("n2", 1, 3)


def test_a_lake_that_is_not_there(tmp_path: Path) -> None:
    for work in (summarize, lambda lake: list(verify(lake))):
        with pytest.raises(LakeError, match="no lake"):
            work(tmp_path / "nowhere")


def test_a_whole_lake_has_no_faults(tmp_path: Path) -> None:
    fill(tmp_path, (7, 10), (11, 12))
    fill(tmp_path, (13, 20), time=DAY)
    fill(tmp_path, (1, 2), node="n2")
    assert faults(tmp_path) == []


def test_gaps_and_overlaps_between_files(tmp_path: Path) -> None:
    fill(tmp_path, (1, 4), (6, 9), (8, 12), (3, 3))
    assert faults(tmp_path) == [("overlap", 3, 3), ("gap", 5, 5), ("overlap", 8, 9)]


def test_a_gap_that_was_recorded_is_no_surprise(tmp_path: Path) -> None:
    fill(tmp_path, (1, 4), (10, 12), (14, 15))
    gap = {"node": "n1", "seq": 1, "time": 5, "table": "ledger", "first": 5, "last": 9}
    write(tmp_path, "gaps", pa.Table.from_pylist([gap | {"reason": "full"}], schema=GAPS))
    assert faults(tmp_path) == [("recorded", 5, 9), ("gap", 13, 13)]


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    (file,) = fill(tmp_path, (1, 1000))
    column = pq.read_metadata(file).row_group(0).column(2)
    damaged = bytearray(file.read_bytes())
    damaged[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    file.write_bytes(damaged)
    (fault,) = verify(tmp_path)
    assert (fault.kind, fault.file) == ("damaged", str(file))
    assert "CRC" in fault.detail


def test_a_cut_file_is_found(tmp_path: Path) -> None:
    (file,) = fill(tmp_path, (1, 1000))
    file.write_bytes(file.read_bytes()[:-10])
    assert faults(tmp_path) == [("damaged", 1, 1000)]


def test_a_file_that_is_not_what_its_name_says_is_found(tmp_path: Path) -> None:
    (file,) = fill(tmp_path, (1, 10))
    file.rename(file.with_name(file.name.replace("0010.", "0012.")))
    (wrong,) = verify(tmp_path)
    assert "where its name says" in wrong.detail


def test_rows_of_another_date_or_node_are_found(tmp_path: Path) -> None:
    (file,) = fill(tmp_path, (1, 3))
    elsewhere = file.parent.parent / "date=1999-01-01" / file.name
    elsewhere.parent.mkdir()
    file.rename(elsewhere)
    (other,) = fill(tmp_path, (4, 5))
    other.rename(other.with_name(other.name.replace("n1", "n2")))
    details = [each.detail for each in verify(tmp_path)]
    assert details == ["holds rows of another date", "holds rows of another node"]


def test_a_hole_inside_a_file_is_found(tmp_path: Path) -> None:
    rows = pa.concat_tables([ledger(1, 3), ledger(6, 7)])
    write(tmp_path, "ledger", rows)
    assert faults(tmp_path) == [("gap", 4, 5)]


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
    from crosswire.lake import catalog

    swap = catalog._exchange

    def late(one: Path, other: Path) -> None:
        fill(tmp_path, (9, 10))
        swap(one, other)

    monkeypatch.setattr(catalog, "_exchange", late)
    list(compact(tmp_path, before="1970-01-02"))
    assert [(file.first, file.last) for file in find(tmp_path)] == [(1, 8), (9, 10)]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_compaction_that_was_killed_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    fill(tmp_path, (1, 5), (6, 8))
    from crosswire.lake import catalog

    swap = catalog._exchange

    class Killed(BaseException):
        pass

    def die(one: Path, other: Path) -> None:
        if moment == "after":
            fill(tmp_path, (9, 10))
            swap(one, other)
        raise Killed

    with monkeypatch.context() as broken:
        broken.setattr(catalog, "_exchange", die)
        broken.setattr("shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            list(compact(tmp_path, before="1970-01-02"))
    fill(tmp_path, (11, 12)), fill(tmp_path, (13, 14))
    list(compact(tmp_path, before="1970-01-02"))
    list(compact(tmp_path, before="1970-01-02"))
    seqs = [row["seq"] for row in read_lake(tmp_path, "ledger", COLUMNS)]
    expected = list(range(1, 15)) if moment == "after" else [*range(1, 9), *range(11, 15)]
    assert seqs == expected


def test_dates_that_are_too_old_go(tmp_path: Path) -> None:
    for day in range(4):
        fill(tmp_path, (1 + day, 1 + day), time=day * DAY)
    fill(tmp_path, (1, 1), node="n2")
    assert expire(tmp_path, "n1", 2 * DAY + 5, 0) == 2
    assert [file.first for file in find(tmp_path) if file.node == "n1"] == [3, 4]
    assert faults(tmp_path) == []


def test_the_oldest_go_when_there_is_too_much(tmp_path: Path) -> None:
    files = fill(tmp_path, *((first, first + 9) for first in range(1, 51, 10)))
    most = sum(file.stat().st_size for file in files[2:])
    assert expire(tmp_path, "n1", 0, most) == 2
    assert [file.first for file in find(tmp_path)] == [21, 31, 41]
    assert expire(tmp_path, "n1", 0, 0) == 0
