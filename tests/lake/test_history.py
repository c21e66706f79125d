"""A lake's messages as a log: which ids it answers for, and ranges of them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from crosswire.envelope import Envelope
from crosswire.errors import LakeError
from crosswire.lake import history as module
from crosswire.lake.files import find, write
from crosswire.lake.history import History, LakeExtent
from crosswire.lake.schemas import GAPS
from crosswire.lake.writer import messages_table

DAY = 86_400_000_000


def fill(lake: Path, first_seq: int, *ids: int, node: str = "n1") -> None:
    """A file of messages whose time is ten times their id."""
    envelopes = [
        Envelope(destination="queue/q", kind="send", id=each, time=10 * each) for each in ids
    ]
    write(lake, "messages", messages_table(node, first_seq, envelopes))


def note_gap(lake: Path, first: int, last: int, table: str = "messages") -> None:
    row = {"node": "n1", "seq": first, "time": 5, "table": table, "first": first, "last": last}
    write(lake, "gaps", pa.Table.from_pylist([{**row, "reason": "why not"}], schema=GAPS))


def read(history: History, first: int, last: int) -> list[int]:
    found: list[int] = []
    position = first
    for batch, upto in history.read(first, last, ["id"]):
        assert upto >= position - 1
        if batch is not None:
            ids = batch.column("id").to_pylist()
            found += [each for each in ids if position <= each <= upto]
        position = upto + 1
    assert position == last + 1
    return found


def test_files_in_a_row_answer_for_what_is_between_them(tmp_path: Path) -> None:
    fill(tmp_path, 1, 5, 6, 9)
    fill(tmp_path, 4, 20, 30)
    history = History(tmp_path, "n1")
    assert history.segments(None) == [(1, 30)]
    assert history.segments(LakeExtent(40, 5)) == [(1, 40)]
    assert read(history, 6, 25) == [6, 9, 20]
    assert read(history, 31, 40) == []


def test_a_file_that_is_gone_leaves_a_hole(tmp_path: Path) -> None:
    for first_seq, ids in ((1, (5, 6)), (3, (10, 11)), (5, (20, 21))):
        fill(tmp_path, first_seq, *ids)
    history = History(tmp_path, "n1")
    assert history.segments(LakeExtent(25, 6)) == [(1, 25)]
    paths = [file.path for file in find(tmp_path, ("messages",))]
    paths[1].unlink()
    assert history.segments(LakeExtent(25, 6)) == [(1, 6), (20, 25)]
    paths[0].unlink()
    assert history.segments(LakeExtent(25, 6)) == [(20, 25)]
    paths[2].unlink()
    assert history.segments(LakeExtent(25, 6)) == []


def test_unpublished_files_are_not_covered(tmp_path: Path) -> None:
    fill(tmp_path, 1, 5, 6)
    history = History(tmp_path, "n1")
    assert history.segments(LakeExtent(8, 4)) == [(1, 6)]
    assert history.segments(LakeExtent(5, 1)) == [(1, 5)]
    fill(tmp_path, 3, 7, 8)
    assert history.segments(LakeExtent(8, 4)) == [(1, 8)]


def test_a_lake_without_messages_yet_answers_for_what_it_saw(tmp_path: Path) -> None:
    history = History(tmp_path / "nothing", "n1")
    assert history.segments(None) == []
    assert history.segments(LakeExtent(7, 0)) == [(1, 7)]
    assert history.segments(LakeExtent(7, 3)) == []
    assert read(history, 1, 7) == []


def test_gaps_are_not_answered_for(tmp_path: Path) -> None:
    fill(tmp_path, 1, 5, 30)
    note_gap(tmp_path, 10, 12)
    note_gap(tmp_path, 20, 22, table="ledger")
    history = History(tmp_path, "n1")
    assert history.segments(LakeExtent(40, 2, ((35, 36),))) == [(1, 9), (13, 34), (37, 40)]


def test_other_nodes_are_others(tmp_path: Path) -> None:
    fill(tmp_path, 1, 5, node="n2")
    assert History(tmp_path, "n1").segments(None) == []


def test_any_range_is_read_whole_and_no_row_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH_ROWS", 2)
    ids = [2, 3, 5, 8, 9, 10, 14, 15, 16, 17]
    fill(tmp_path, 1, *ids[:7])
    fill(tmp_path, 8, *ids[7:])
    history = History(tmp_path, "n1")
    history.segments(None)
    for first in range(1, 19):
        for last in range(first, 19):
            assert read(history, first, last) == [each for each in ids if first <= each <= last]


def test_a_time_finds_the_first_that_came_since(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 3, 5)
    fill(tmp_path, 4, 8, 9)
    history = History(tmp_path, "n1")
    history.segments(None)
    times = {0: 2, 20: 2, 21: 3, 51: 8, 90: 9, 91: None}
    assert {each: history.first_since(each, 1, 100) for each in times} == times
    assert history.first_since(0, 4, 100) == 5
    assert history.first_since(0, 6, 7) is None


def test_shares_count_rows_by_range(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 3, 5)
    fill(tmp_path, 4, 8, 9)
    history = History(tmp_path, "n1")
    history.segments(None)
    both = history.shares(1, 100)
    assert [share[:3] for share in both] == [(2, 5, 3), (8, 9, 2)]
    assert both[0].size_bytes > both[1].size_bytes > 0
    assert history.shares(6, 100) == both[1:]


def test_a_file_that_is_no_parquet_is_reported(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    (file,) = find(tmp_path, ("messages",))
    file.path.write_bytes(b"not at all")
    with pytest.raises(LakeError, match="can't be read"):
        History(tmp_path, "n1").segments(None)
