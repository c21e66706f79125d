"""Faults of a lake: damaged files, gaps, overlaps."""

from __future__ import annotations

import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from crosswire.lake.files import write
from crosswire.lake.schemas import GAPS, MESSAGES
from crosswire.lake.verification import SealedRows, verify
from tests.lake.ledger_files import fill, ledger

DAY = 86_400_000_000


def faults(lake: Path) -> list[tuple[str, int, int]]:
    return [(each.kind, each.first, each.last) for each in verify(lake)]


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


def test_a_file_with_fewer_rows_than_its_name_promises_is_found(tmp_path: Path) -> None:
    (file,) = fill(tmp_path, (1, 10))
    file.rename(file.with_name(file.name.replace("0010.", "0012.")))
    (wrong,) = verify(tmp_path)
    assert "ends with seq 10, its name promises 12" in wrong.detail


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


def test_a_file_that_no_hub_put_there_is_found(tmp_path: Path) -> None:
    (file,) = fill(tmp_path, (1, 3))
    copy = file.with_name("copy.parquet")
    copy.write_bytes(file.read_bytes())
    (tmp_path / "ledger" / "_SUCCESS").touch()
    (fault,) = verify(tmp_path)
    assert (fault.kind, fault.file) == ("foreign", str(copy))


def test_a_payload_that_was_changed_is_found(tmp_path: Path) -> None:
    row = dict.fromkeys(MESSAGES.names, "") | {
        "node": "n1",
        "durable": True,
        "expires": 0,
        "time": 5,
        "native": {},
        "payload": b"x",
    }
    good = row | {"seq": 1, "id": 10, "crc": zlib.crc32(b"x")}
    bad = row | {"seq": 2, "id": 11, "crc": zlib.crc32(b"y")}
    write(tmp_path, "messages", pa.Table.from_pylist([good, bad], schema=MESSAGES))
    (fault,) = verify(tmp_path)
    assert fault.kind == "damaged" and "message 11" in fault.detail


def test_what_the_store_has_sealed_must_be_there(tmp_path: Path) -> None:
    fill(tmp_path, (1, 3))
    sealed = SealedRows(node="n1", last={"ledger": 5, "messages": 2})
    found = [(each.table, each.kind, each.first, each.last) for each in verify(tmp_path, sealed)]
    assert found == [("ledger", "gap", 4, 5), ("messages", "gap", 1, 2)]
    assert list(verify(tmp_path, SealedRows(node="n1", last={"ledger": 3}))) == []
