"""Row groups as files of their own: the same rows, and nothing of the rest of their file."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from crosswire.envelope import Envelope
from crosswire.errors import LakeError
from crosswire.lake import compaction, row_groups
from crosswire.lake import files as lake_files
from crosswire.lake.files import write
from crosswire.lake.row_groups import RowGroupFile, RowGroupFiles
from crosswire.lake.schemas import MESSAGES
from crosswire.lake.writer import messages_table

FLAT = [name for name in MESSAGES.names if name != "native"]
ROWS = 100


@pytest.fixture
def rows() -> pa.Table:
    """The first half goes to one destination, the second to another."""
    return messages_table("n", 1, [envelope(number) for number in range(1, 2 * ROWS + 1)])


def envelope(number: int) -> Envelope:
    name = "one" if number <= ROWS else "another"
    return Envelope(
        id=number,
        time=1_700_000_000_000_000 + number,
        destination=f"queue/{name}",
        kind="send",
        payload=f"{name} {number}".encode() * (number % 7),
        protocol="emp",
        key="ü" if number % 3 else "",
        properties={"n": number},
        durable=number % 2 == 0,
    )


@pytest.fixture
def path(tmp_path: Path, rows: pa.Table, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lake_files, "_ROW_GROUP", ROWS)
    (path,) = write(tmp_path, "messages", rows)
    return path


def opened(path: Path, index: int, *names: str) -> RowGroupFile:
    found = RowGroupFiles().open(path, index, names)
    assert found is not None
    return found


def content(file: RowGroupFile, most: int = 1 << 20) -> bytes:
    with file:
        data = b"".join(file.pieces(most))
    assert len(data) == file.size_bytes
    return data


def table(data: bytes) -> pa.Table:
    with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
        return file.read()


@pytest.mark.parametrize(
    "names", [FLAT, list(reversed(FLAT)), ["id"], ["payload", "id", "durable"]]
)
@pytest.mark.parametrize("index", [0, 1])
def test_the_rows_are_the_same(path: Path, rows: pa.Table, names: list[str], index: int) -> None:
    found = table(content(opened(path, index, *names), most=97))
    assert found.equals(rows.select(names).slice(index * ROWS, ROWS))


def test_nothing_of_other_rows_and_columns_is_in_it(path: Path) -> None:
    data = content(opened(path, 0, "id", "destination", "key"))
    assert b"queue/one" in data
    for other in (b"queue/another", b"another 1", b"one 1", b"emp"):
        assert other not in data
    assert b"queue/another" in path.read_bytes()


@pytest.mark.parametrize("is_compacted", [False, True])
def test_dictionaries_have_only_values_of_its_rows(
    tmp_path: Path, path: Path, rows: pa.Table, monkeypatch: pytest.MonkeyPatch, is_compacted: bool
) -> None:
    """What a page of a dictionary has beside them, a reader could get at."""
    if is_compacted:
        more = messages_table("n", 2 * ROWS + 1, [envelope(2 * ROWS + 1)])
        write(tmp_path, "messages", more)
        monkeypatch.setattr(compaction, "_GROUP_ROWS", ROWS)
        assert len(list(compaction.compact(tmp_path, before="9999"))) == 1
        (path,) = (file.path for file in lake_files.find(tmp_path, ("messages",)))
    texts = [name for name in FLAT if pa.types.is_string(MESSAGES.field(name).type)]
    for index in (0, 1):
        data = content(opened(path, index, *texts))
        with pq.ParquetFile(pa.BufferReader(data), read_dictionary=texts) as file:
            found = file.read()
        for name in texts:
            own = set(rows[name].slice(index * ROWS, ROWS).to_pylist())
            chunks = found[name].chunks
            assert {each for chunk in chunks for each in chunk.dictionary.to_pylist()} == own


def test_the_destinations_are_those_of_its_rows(path: Path) -> None:
    files = RowGroupFiles()
    for _ in range(2):  # the second time from memory
        for index, name in enumerate(("queue/one", "queue/another")):
            file = files.open(path, index, ["id"])
            assert file is not None
            with file:
                assert file.destinations == {name}


def test_a_file_that_was_exchanged_is_looked_at_again(path: Path, rows: pa.Table) -> None:
    files = RowGroupFiles()
    first = files.open(path, 0, ["id"])
    assert first is not None
    pq.write_table(rows.slice(ROWS), path.with_suffix(".new"), compression="zstd")
    path.with_suffix(".new").replace(path)
    second = files.open(path, 0, ["id"])
    assert second is not None
    with first, second:
        assert first.destinations == {"queue/one"}
        assert second.destinations == {"queue/another"}
        assert table(b"".join(first.pieces(1000)))["id"].to_pylist()[0] == 1


def test_what_is_nested_or_of_very_many_destinations_is_not_given_away(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert RowGroupFiles().open(path, 0, ["id", "native"]) is None
    monkeypatch.setattr(row_groups, "_MOST_DESTINATIONS", 0)
    assert RowGroupFiles().open(path, 0, ["id"]) is None


def test_files_are_forgotten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_groups, "_MOST_KNOWN", 0)
    files = RowGroupFiles()
    for _ in range(3):
        file = files.open(path, 0, ["id"])
        assert file is not None
        file.close()
    assert not files._known


def test_many_destinations_are_forgotten(
    path: Path, rows: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_groups, "_MOST_NAMES", 1)
    other = path.with_suffix(".other")
    pq.write_table(rows, other, compression="zstd", row_group_size=ROWS)
    files = RowGroupFiles()
    for each in (path, other, path):
        file = files.open(each, 0, ["id"])
        assert file is not None
        file.close()
        assert [known.names for known in files._known.values()] == [1]


def flipped(path: Path, column: str) -> bytes:
    """The file with one bit changed in the middle of a column."""
    whole = path.read_bytes()
    group = pq.read_metadata(path).row_group(0)
    chunk = group.column(MESSAGES.names.index(column))
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    middle = start + chunk.total_compressed_size // 2
    return whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]


def test_damaged_destinations_are_an_error_and_damaged_rows_are_one_for_the_reader(
    path: Path,
) -> None:
    destinations, ids = flipped(path, "destination"), flipped(path, "id")
    path.write_bytes(destinations)
    with pytest.raises((OSError, pa.ArrowException)):
        RowGroupFiles().open(path, 0, ["id"])
    path.write_bytes(ids)
    data = content(opened(path, 0, "id"))
    with pytest.raises((OSError, pa.ArrowException)):
        table(data)


def test_a_file_that_was_cut_is_an_error(path: Path) -> None:
    file = opened(path, 1, *FLAT)
    os.truncate(path, 500)
    with file, pytest.raises(LakeError, match="can't be read"):
        list(file.pieces(100))
