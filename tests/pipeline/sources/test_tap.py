"""The lake's `wire/` files without Spark: all rows, each connection's in one part, in order."""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from crosswire.errors import InvalidInput
from crosswire.lake.files import write
from crosswire.pipeline.sources import tap
from crosswire.pipeline.sources.decoded import decode, decode_tap
from crosswire.pipeline.sources.tap import from_tap, read_tap, tap_files
from crosswire.testing.traffic import SampleTraffic

TRAFFIC = SampleTraffic(seed=4, connections=12, messages=8, payload_bytes=200)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In several files, whose connections go on from one to the next."""
    folder = tmp_path_factory.mktemp("lake")
    whole = pa.concat_tables(TRAFFIC.wire()).sort_by("time")
    whole = whole.set_column(1, whole.schema.field("seq"), pa.array(range(len(whole)), pa.int64()))
    third = len(whole) // 3
    for start in (0, third, 2 * third):
        size = third if start < 2 * third else len(whole) - start
        write(folder, "wire", whole.slice(start, size))
    return folder


def paths_of(lake: Path, since_us: int = 0) -> list[str]:
    paths = tap_files([str(lake / "wire")], since_us=since_us)
    assert paths is not None
    return paths


def rows_of(batches: list[pa.RecordBatch]) -> list[tuple[str, int]]:
    return [(row["connection"], row["seq"]) for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_each_connection_is_in_one_part_and_in_order(lake: Path, parts: int) -> None:
    paths = paths_of(lake)
    found = [rows_of(list(read_tap(paths, part=part, parts=parts))) for part in range(parts)]
    whole = [
        (row["connection"], row["seq"]) for row in pa.concat_tables(TRAFFIC.wire()).to_pylist()
    ]
    assert sum(map(len, found)) == len(whole)
    owners: dict[str, set[int]] = defaultdict(set)
    for part, rows in enumerate(found):
        seqs = [seq for _, seq in rows]
        assert seqs == sorted(seqs)
        for connection, _ in rows:
            owners[connection].add(part)
    assert len(owners) == 12 and all(len(each) == 1 for each in owners.values())


def test_parts_are_about_as_large(lake: Path) -> None:
    paths = paths_of(lake)
    sizes = [sum(map(len, read_tap(paths, part=part, parts=2))) for part in (0, 1)]
    assert max(sizes) < 1.5 * min(sizes)


def test_very_many_connections_are_shared_too(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap, "_SHARED_EVENLY", 2)
    paths = paths_of(lake)
    parts = [rows_of(list(read_tap(paths, part=part, parts=2))) for part in (0, 1)]
    assert not {name for name, _ in parts[0]} & {name for name, _ in parts[1]}
    assert sum(map(len, parts)) == sum(map(len, TRAFFIC.wire()))


def test_only_what_is_new_enough(lake: Path) -> None:
    (batch,) = read_tap(paths_of(lake))
    times = sorted(batch.column("time").to_pylist())
    since = times[len(times) // 2]
    newer = [time for time in times if time >= since]
    assert sum(map(len, read_tap(paths_of(lake), since_us=since))) == len(newer)
    assert paths_of(lake, since_us=times[-1] + 86_400_000_000) == []


def test_batches_are_bounded(lake: Path) -> None:
    batches = list(read_tap(paths_of(lake), batch_bytes=20_000))
    assert len(batches) > 1
    assert all(batch.column("data").nbytes < 60_000 for batch in batches)
    assert rows_of(batches) == rows_of([pa.concat_batches(batches)])


def test_the_same_rows_in_two_lakes_are_refused(lake: Path, tmp_path: Path) -> None:
    shutil.copytree(lake / "wire", tmp_path / "wire")
    with pytest.raises(InvalidInput, match="hold the same rows"):
        tap_files([str(lake / "wire"), str(tmp_path / "wire")])


def test_files_that_no_hub_has_named_are_left_to_spark(lake: Path, tmp_path: Path) -> None:
    shutil.copytree(lake / "wire", tmp_path / "wire")
    one = next((tmp_path / "wire").glob("date=*/*.parquet"))
    one.rename(one.with_name("part-0.parquet"))
    assert tap_files([str(tmp_path / "wire")]) is None
    assert tap_files(["hdfs://somewhere/wire"]) is None


def test_a_damaged_file_is_named(lake: Path, tmp_path: Path) -> None:
    shutil.copytree(lake / "wire", tmp_path / "wire")
    one = next((tmp_path / "wire").glob("date=*/*.parquet"))
    data = bytearray(one.read_bytes())
    data[len(data) // 2] ^= 1
    one.write_bytes(data)
    with pytest.raises(InvalidInput, match=one.name):
        list(read_tap(paths_of(tmp_path)))


def test_spark_gives_the_same_either_way(spark: SparkSession, lake: Path) -> None:
    folder = str(lake / "wire")
    straight = decode_tap(spark, [folder]).collect()
    through = decode(from_tap(spark, [folder])).collect()
    assert sorted(map(repr, straight)) == sorted(map(repr, through))
