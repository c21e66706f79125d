"""What a stream takes for new: rows by their numbers, captures by their bytes."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from crosswire.errors import InvalidInput
from crosswire.pipeline.sources.lake_listing import LakeListing
from crosswire.pipeline.sources.new_input import (
    InputPosition,
    LakeRows,
    NewInput,
    NewInputFinder,
    check_files,
    files_of,
)
from crosswire.testing.traffic import SampleTraffic, packets, write_pcap

GOOD = 100_000


class Lake:
    """Files of which only the names matter; `hidden` are not seen by the next listing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "lake" / "wire"
        self.hidden: set[str] = set()

    def add(self, first: int, last: int, *, node: str = "n", date: str = "2026-11-15") -> Path:
        file = self.folder / f"date={date}" / f"{node}-{first:020}-{last:020}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(10))
        return file

    def listing(self, folder: str) -> Iterator[tuple[str, int]]:
        hidden, self.hidden = self.hidden, set()
        for file in sorted(Path(folder).glob("*/*")):
            if file.name not in hidden:
                yield str(file), file.stat().st_size

    def look(self, position: InputPosition, batch_bytes: int = GOOD) -> list[NewInput]:
        return list(look(self.folder.parent, self, position, batch_bytes=batch_bytes))


def look(
    path: Path,
    lake: Lake | None = None,
    position: InputPosition | None = None,
    *,
    batch_bytes: int = GOOD,
    patient: bool = False,
    records: bool = False,
) -> Iterator[NewInput]:
    listing = lake.listing if lake is not None else lambda _: ()
    arrivals = NewInputFinder(
        [str(path)],
        listing,
        batch_bytes=batch_bytes,
        split_bytes=1 << 20,
        patient=patient,
        records=records,
    )
    return arrivals.look(position or InputPosition())


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake(tmp_path)
    made.add(1, 9)
    made.add(10, 19)
    made.add(5, 7, node="m")
    return made


def rows(arrived: NewInput) -> set[tuple[str, int, int]]:
    return {(each.node, each.first, each.last) for each in arrived.taps}


def test_each_row_comes_once(lake: Lake) -> None:
    (first,) = lake.look(InputPosition())
    assert rows(first) == {("n", 1, 19), ("m", 5, 7)}
    assert (first.files, first.size_bytes) == (3, 30)
    assert lake.look(first.position) == []
    lake.add(20, 25, date="2026-11-16")
    (second,) = lake.look(first.position)
    assert rows(second) == {("n", 20, 25)}


def test_batches_are_bounded(lake: Lake) -> None:
    found = lake.look(InputPosition(), batch_bytes=20)
    assert [rows(each) for each in found] == [{("m", 5, 7), ("n", 1, 9)}, {("n", 10, 19)}]
    assert [each.lagging for each in found] == [{"taps"}, frozenset()]
    assert lake.look(found[0].position) == [found[1]]
    assert len(lake.look(InputPosition(), batch_bytes=1)) == 3


def test_compacted_files_bring_nothing_twice(lake: Lake) -> None:
    (first,) = lake.look(InputPosition())
    for file in (lake.add(1, 9), lake.add(10, 19)):
        file.unlink()
    compacted = lake.add(1, 30)
    (second,) = lake.look(first.position)
    assert rows(second) == {("n", 20, 30)}
    assert files_of(second.taps, lake.listing) == [str(compacted)]


def test_a_file_that_was_not_listed_is_waited_for(lake: Lake) -> None:
    (first,) = lake.look(InputPosition())
    hidden = lake.add(20, 29)
    lake.add(30, 39)
    lake.hidden = {hidden.name}
    (second,) = lake.look(first.position)
    assert rows(second) == {("n", 20, 39)}


def test_rows_that_are_gone_for_good_hold_up_nothing(lake: Lake) -> None:
    (first,) = lake.look(InputPosition())
    lake.add(30, 39)
    (second,) = lake.look(first.position)
    assert rows(second) == {("n", 30, 39)}


def test_a_position_survives_being_written_down(lake: Lake, tmp_path: Path) -> None:
    import msgspec

    capture(tmp_path / "captures" / "a")
    (first,) = lake.look(InputPosition())
    (second,) = look(tmp_path / "captures", position=first.position)
    text = msgspec.json.encode(second.position)
    assert msgspec.json.decode(text, type=InputPosition) == second.position


def test_the_messages_of_a_hub_stand_in_for_a_wire_that_nobody_records(lake: Lake) -> None:
    wire = lake.folder
    lake.folder = wire.parent / "messages"
    lake.add(1, 4)
    (arrived,) = lake.look(InputPosition())
    assert (arrived.messages, len(arrived.taps)) == ((), 2)
    shutil.rmtree(wire)
    (alone,) = lake.look(InputPosition())
    assert alone.messages == (LakeRows(str(lake.folder), "n", 1, 4),)
    spool = wire.parent / ".spool"
    spool.mkdir()
    (spool / "n.running").touch()
    assert lake.look(InputPosition()) == []
    lake.folder = wire
    lake.add(1, 9)
    with pytest.raises(InvalidInput, match="now there is a wire"):
        lake.look(alone.position)


def test_the_tables_of_a_hub_are_read_side_by_side(lake: Lake) -> None:
    """Of each the same part of the day, however many rows it has."""
    wire = lake.folder
    lake.folder = wire.parent / "ledger"
    for first in range(1, 400, 100):
        lake.add(first, first + 99)
    lake.folder = wire
    found = list(look(wire.parent, lake, batch_bytes=40, records=True))
    assert [[(each.node, each.first, each.last) for each in one.ledgers] for one in found] == [
        [("n", 1, 200)],
        [("n", 201, 400)],
    ]
    assert [rows(each) for each in found] == [{("m", 5, 7), ("n", 1, 9)}, {("n", 10, 19)}]
    assert [each.lagging for each in found] == [{"taps", "ledgers"}, frozenset()]
    assert found[1].position.rows("ledgers") == [LakeRows(str(wire.parent / "ledger"), "n", 0, 400)]


def test_rows_stay_in_order_when_a_clock_is_set_back(lake: Lake) -> None:
    lake.add(20, 29, date="2026-11-14")
    found = lake.look(InputPosition(), batch_bytes=1)
    assert [each.first for one in found for each in one.taps if each.node == "n"] == [1, 10, 20]


def test_files_of_other_rows_are_not_read(lake: Lake) -> None:
    wanted = LakeRows(str(lake.folder), "n", 10, 12)
    (file,) = files_of([wanted], lake.listing)
    assert file.endswith("n-00000000000000000010-00000000000000000019.parquet")


# -------------------------------------------------------------------------------------- captures


def capture(file: Path, *, seed: int = 1) -> bytes:
    file.parent.mkdir(exist_ok=True)
    talk = SampleTraffic(seed=seed, protocols=("emp",), messages=4).conversation(seed, "emp")
    write_pcap(file, packets(talk))
    return file.read_bytes()


def parts(arrived: NewInput) -> list[tuple[str, int, int | None]]:
    return [(Path(each.path).name, each.start, each.end) for each in arrived.captures]


def test_a_capture_that_grows_is_read_on(tmp_path: Path) -> None:
    file = tmp_path / "captures" / "a"
    whole = capture(file)
    file.write_bytes(whole[:200])
    (first,) = look(file.parent)
    ((_, start, end),) = parts(first)
    assert start == 24 and end is not None and 24 < end <= 200
    file.write_bytes(whole)
    (second,) = look(file.parent, position=first.position)
    assert parts(second) == [("a", end, len(whole))]
    assert list(look(file.parent, position=second.position)) == []


def test_a_name_that_is_used_again_is_another_capture(tmp_path: Path) -> None:
    file = tmp_path / "captures" / "a"
    capture(file)
    (first,) = look(file.parent)
    size = len(capture(file, seed=2))
    os.utime(file, ns=(0, 0))
    (second,) = look(file.parent, position=first.position)
    assert parts(second) == [("a", 24, size)]


def test_compressed_captures_are_read_when_they_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "captures" / "a.gz"
    packed = gzip.compress(capture(file))
    file.write_bytes(packed)
    assert list(look(file.parent, patient=True)) == []
    os.utime(file, ns=(0, 0))
    (first,) = look(file.parent, patient=True)
    assert parts(first) == [("a.gz", 0, None)]
    file.write_bytes(packed + packed)
    with pytest.raises(InvalidInput, match="has changed after it was read"):
        list(look(file.parent, position=first.position))


def test_a_capture_that_has_hardly_begun_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "captures" / "a"
    whole = capture(file)
    file.write_bytes(whole[:24])
    assert list(look(file.parent, patient=True)) == []


def test_a_file_with_a_foreign_name_is_refused(lake: Lake) -> None:
    (first,) = lake.look(InputPosition())
    stray = lake.add(20, 29)
    stray = stray.rename(stray.with_name("copy.parquet"))
    with pytest.raises(InvalidInput, match=r"copy\.parquet has no name of a file of wire/"):
        lake.look(first.position)
    stray.unlink()
    assert lake.look(first.position) == []


def test_a_file_without_what_its_name_promises_is_refused(tmp_path: Path) -> None:
    SampleTraffic(connections=1, messages=2).write_tap(tmp_path / "lake")
    (file,) = (tmp_path / "lake" / "wire").glob("*/*.parquet")
    listing = LakeListing()

    def found() -> NewInput:
        finder = NewInputFinder(
            [str(tmp_path / "lake")],
            listing,
            batch_bytes=GOOD,
            split_bytes=GOOD,
            patient=False,
            records=False,
        )
        (one,) = finder.look(InputPosition())
        return one

    check_files(found(), listing)
    rows = pq.ParquetFile(file).read()
    pq.write_table(rows.slice(1), file)
    with pytest.raises(InvalidInput, match=rf"holds {len(rows) - 1} rows .* promises {len(rows)}"):
        check_files(found(), listing)
