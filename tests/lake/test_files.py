"""Files of the lake: names, dates, order, checksums."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from crosswire.errors import CrosswireError
from crosswire.lake.files import date_of, write
from crosswire.lake.schemas import LEDGER, MESSAGES, SCHEMAS, WIRE
from crosswire.testing.traffic import SampleTraffic


def wire(*times: int, node: str = "n1", first: int = 0) -> pa.Table:
    rows = [
        {
            "node": node,
            "seq": first + index,
            "connection": "c",
            "direction": "forward",
            "kind": "data",
            "offset": index,
            "length": 1,
            "time": time,
            "data": b"x",
            "late": False,
            "protocol": "emp",
            "listener": "emp",
            "connector_address": "a",
            "connector_port": 1,
            "acceptor_address": "b",
            "acceptor_port": 2,
        }
        for index, time in enumerate(times)
    ]
    return pa.Table.from_pylist(rows, schema=WIRE)


DAY = 86_400_000_000


def test_a_file_has_its_rows_and_their_numbers_in_its_name(tmp_path: Path) -> None:
    (file,) = write(tmp_path, "wire", wire(5, 6, 7, first=40))
    assert file.relative_to(tmp_path).parts[:2] == ("wire", "date=1970-01-01")
    assert file.name == "n1-00000000000000000040-00000000000000000042.parquet"
    assert pq.read_table(file, partitioning=None) == wire(5, 6, 7, first=40)


def test_each_date_has_its_own_file(tmp_path: Path) -> None:
    files = write(tmp_path, "wire", wire(DAY - 1, DAY, DAY + 1))
    assert [file.parent.name for file in files] == ["date=1970-01-01", "date=1970-01-02"]
    assert [pq.read_metadata(file).num_rows for file in files] == [1, 2]


def test_pages_have_checksums_and_are_compressed(tmp_path: Path) -> None:
    (file,) = write(tmp_path, "wire", wire(*range(1000)))
    column = pq.read_metadata(file).row_group(0).column(8)
    assert column.compression == "ZSTD"
    damaged = bytearray(file.read_bytes())
    damaged[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(file, page_checksum_verification=True, partitioning=None)


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    write(tmp_path, "wire", wire(1))
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".parquet"]


@pytest.mark.parametrize(
    "rows",
    [
        pa.concat_tables([wire(1), wire(2, node="n2", first=1)]),
        pa.concat_tables([wire(1), wire(2)]),
        pa.table({"node": ["a"]}),
    ],
    ids=["two nodes", "out of order", "other columns"],
)
def test_what_is_no_file_is_refused(tmp_path: Path, rows: pa.Table) -> None:
    with pytest.raises(CrosswireError):
        write(tmp_path, "wire", rows)
    assert not list(tmp_path.rglob("*.parquet"))


def test_no_rows_no_file(tmp_path: Path) -> None:
    assert write(tmp_path, "ledger", LEDGER.empty_table()) == []


def test_the_date_is_that_of_utc() -> None:
    assert date_of(1_790_000_000_000_000) == "2026-09-21"


def test_generated_traffic_is_the_same_for_the_same_seed() -> None:
    first, again, other = (list(SampleTraffic(seed=seed).wire()) for seed in (1, 1, 2))
    assert first == again != other


def test_every_schema_has_a_node_and_a_seq() -> None:
    for schema in SCHEMAS.values():
        assert schema.names[:2] == ["node", "seq"]
    assert MESSAGES.field("properties").type == pa.string()
