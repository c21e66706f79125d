"""Summaries of a lake's tables, and files that retention removes."""

from __future__ import annotations

from pathlib import Path

import pytest

from crosswire.errors import LakeError
from crosswire.lake.catalog import expire, summarize
from crosswire.lake.files import find
from crosswire.lake.verification import verify
from tests.lake.ledger_files import fill

DAY = 86_400_000_000


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


def test_dates_that_are_too_old_go(tmp_path: Path) -> None:
    for day in range(4):
        fill(tmp_path, (1 + day, 1 + day), time=day * DAY)
    fill(tmp_path, (1, 1), node="n2")
    assert expire(tmp_path, "n1", 2 * DAY + 5, 0) == 2
    assert [file.first for file in find(tmp_path) if file.node == "n1"] == [3, 4]
    assert list(verify(tmp_path)) == []


def test_the_oldest_go_when_there_is_too_much(tmp_path: Path) -> None:
    files = fill(tmp_path, *((first, first + 9) for first in range(1, 51, 10)))
    most = sum(file.stat().st_size for file in files[2:])
    assert expire(tmp_path, "n1", 0, most) == 2
    assert [file.first for file in find(tmp_path)] == [21, 31, 41]
    assert expire(tmp_path, "n1", 0, 0) == 0
