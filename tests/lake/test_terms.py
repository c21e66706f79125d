"""Files of several leaders: a late one doubles nothing, for any reader."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from crosswire.envelope import Envelope, stamp
from crosswire.lake.catalog import expire, summarize
from crosswire.lake.compaction import compact
from crosswire.lake.files import (
    PARTS,
    FinishedFile,
    clear,
    find,
    is_covered,
    parse_name,
    prepare,
    publish,
)
from crosswire.lake.history import CoveredIds, History
from crosswire.lake.schemas import GAPS
from crosswire.lake.terms import LakeFile, counted
from crosswire.lake.verification import verify
from crosswire.lake.writer import messages_table
from crosswire.pipeline.sources.inputs import find_inputs
from crosswire.pipeline.sources.lake_input import inspect_lake
from crosswire.pipeline.sources.new_input import LakeRows, files_of
from tests.lake.ledger_files import ledger

OLD, NEW = 3, 7


def rows(first: int, last: int) -> pa.Table:
    """Messages with the ids 10 × seq."""
    made = [
        stamp(Envelope(kind="send", destination="queue/q"), "n1", 10 * each, 5)
        for each in range(first, last + 1)
    ]
    return messages_table("n1", first, made)


def prepared(lake: Path, term: int, first: int, last: int) -> list[FinishedFile]:
    parts = prepare(lake, "messages", rows(first, last), term=term, writer=f"w{term}")
    return parts + prepare(lake, "ledger", ledger(first, last), term=term, writer=f"w{term}")


def gap(lake: Path, term: int, table: str, first: int, last: int, seq: int = 1) -> None:
    values = [["n1"], [seq], [5], [table], [first], [last], ["given up"]]
    publish(prepare(lake, "gaps", pa.table(values, schema=GAPS), term=term))


def listed(folder: str) -> list[tuple[str, int]]:
    return [(str(path), 1) for path in sorted(Path(folder).glob("date=*/*.parquet"))]


def spans(lake: Path, table: str) -> list[tuple[int, int, int]]:
    return [(each.first, each.last, each.term) for each in find(lake, (table,))]


def named(first: int, last: int, term: int, node: str = "n1") -> LakeFile:
    return LakeFile("ledger", "", node, first, last, Path(f"{node}{first}-{last}-{term}"), term)


def test_names_have_the_term_of_a_leader() -> None:
    path = Path(f"a-b-{1:020}-{2:020}-t17.parquet")
    assert parse_name("ledger", "", path) == LakeFile("ledger", "", "a-b", 1, 2, path, 17)
    path = Path(f"a-b-{1:020}-{2:020}.parquet")
    assert parse_name("ledger", "", path) == LakeFile("ledger", "", "a-b", 1, 2, path)
    for wrong in ("-t", "-t0", "-t01", "-x1"):
        assert parse_name("ledger", "", Path(f"a-{1:020}-{2:020}{wrong}.parquet")) is None


def test_the_highest_term_counts() -> None:
    files = [named(1, 5, 1), named(4, 9, 2), named(6, 9, 1), named(10, 12, 1)]
    assert counted(files) == [files[1], files[3]]
    # What only overlaps a file that is not there itself is there.
    files = [named(1, 5, 1), named(5, 9, 2), named(9, 12, 3)]
    assert counted(files) == [files[0], files[2]]
    # One term: that is for others to judge. And nodes are apart from each other.
    files = [named(1, 5, 2), named(4, 9, 2), named(1, 9, 1, "n2")]
    assert counted(files) == files


def test_a_late_file_doubles_nothing_for_any_reader(tmp_path: Path) -> None:
    """An old leader stands still before it renames; what follows is compacted; it goes on."""
    publish(prepared(tmp_path, OLD, 1, 4))
    late = prepared(tmp_path, OLD, 5, 9)
    publish(prepared(tmp_path, NEW, 5, 9))
    publish(prepared(tmp_path, NEW, 10, 12))
    for before in (True, False):
        for table in ("messages", "ledger"):
            assert [each[:2] for each in spans(tmp_path, table)] == (
                [(1, 4), (5, 9), (10, 12)] if before else [(1, 12)]
            )
        assert list(verify(tmp_path)) == []
        assert [each.rows for each in summarize(tmp_path)] == [12, 12]
        history = History(tmp_path, "n1")
        assert history.segments(None) == [CoveredIds(1, 120)]
        found = [
            each
            for batch, _ in history.read(1, 200, ["id"])
            if batch is not None
            for each in batch["id"].to_pylist()
        ]
        assert found == [10 * each for each in range(1, 13)]
        inspected = inspect_lake(find_inputs([str(tmp_path)]))
        assert not inspected.missing and not inspected.skipped
        read = [Path(each) for each in inspected.inputs.ledgers]
        assert sum(_rows_in(each) for each in read) == 12
        folder = str(tmp_path / "ledger")
        assert (
            sum(map(_rows_in, map(Path, files_of([LakeRows(folder, "n1", 0, 99)], listed)))) == 12
        )
        assert is_covered(tmp_path, "ledger", "n1", 1, 12)
        if before:
            list(compact(tmp_path, before="1970-01-02"))
            assert spans(tmp_path, "ledger") == [(1, 12, NEW)]
            publish(late)
    # The next compaction removes it.
    assert len(list((tmp_path / "ledger").rglob("*.parquet"))) == 2
    list(compact(tmp_path, before="1970-01-02"))
    assert len(list((tmp_path / "ledger").rglob("*.parquet"))) == 1
    assert spans(tmp_path, "ledger") == [(1, 12, NEW)]


def _rows_in(path: Path) -> int:
    """Of a file, or of all in a folder: what a reader gets that is given it."""
    paths = [path] if path.is_file() else list(path.glob("date=*/*.parquet"))
    found = [parse_name("", "", each) for each in paths]
    return sum(each.last - each.first + 1 for each in found if each is not None)


def test_a_late_file_does_not_count_beside_a_gap(tmp_path: Path) -> None:
    publish(prepared(tmp_path, OLD, 1, 4))
    late = prepared(tmp_path, OLD, 5, 9)
    gap(tmp_path, NEW, "ledger", 5, 9)
    gap(tmp_path, NEW, "messages", 41, 95, seq=2)
    publish(late)
    assert spans(tmp_path, "ledger") == spans(tmp_path, "messages") == [(1, 4, OLD)]
    assert [each.kind for each in verify(tmp_path)] == ["recorded", "recorded"]
    assert History(tmp_path, "n1").segments(None) == [CoveredIds(1, 40)]
    inspected = inspect_lake(find_inputs([str(tmp_path)]))
    assert sum(_rows_in(Path(each)) for each in inspected.inputs.messages) == 4
    # The next leader's messages have the same numbers.
    publish(prepare(tmp_path, "messages", rows(5, 6), term=NEW))
    assert spans(tmp_path, "messages") == [(1, 4, OLD), (5, 6, NEW)]


def test_a_gap_of_an_earlier_term_hides_nothing(tmp_path: Path) -> None:
    gap(tmp_path, OLD, "ledger", 1, 9)
    publish(prepared(tmp_path, NEW, 1, 4))
    assert spans(tmp_path, "ledger") == [(1, 4, NEW)]


def test_retention_removes_what_does_not_count_too(tmp_path: Path) -> None:
    publish(prepared(tmp_path, OLD, 1, 4))
    publish(prepared(tmp_path, NEW, 1, 4))
    assert expire(tmp_path, "n1", 10 * 86_400_000_000, 0) == 4
    assert not list(tmp_path.rglob("*.parquet"))


def test_only_a_writer_clears_its_files(tmp_path: Path) -> None:
    prepared(tmp_path, OLD, 1, 4)
    mine = prepared(tmp_path, NEW, 1, 4)
    for table in ("messages", "ledger"):
        clear(tmp_path, table, "n1", f"w{OLD}")
        clear(tmp_path, table, "n1")
    assert set((tmp_path / PARTS).iterdir()) == {each.unfinished for each in mine}
