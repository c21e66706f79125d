"""The source `pcap` in Spark: its columns, and files read in several parts."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from crosswire.errors import PipelineError
from crosswire.pipeline.sources import pcap
from crosswire.pipeline.sources.decoded import decode, decode_captures
from crosswire.pipeline.sources.pcap import Captures, PcapDataSource
from crosswire.pipeline.spark import plain_errors
from crosswire.testing.traffic import SampleTraffic, packets, write_pcap
from tests.pipeline.captures import RAW, classic, ipv6, tcp


def test_a_row_per_segment_that_people_can_read(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(classic([(1_000_000, ipv6(tcp(b"hello", number=7)))], RAW))
    spark.dataSource.register(PcapDataSource)
    (row,) = spark.read.format("pcap").load(str(tmp_path / "a")).collect()
    assert row.asDict() == {
        "time_ns": 1_000_000,
        "source": "fd00::1",
        "source_port": 40_000,
        "destination": "fd00::2",
        "destination_port": 5040,
        "number": 7,
        "acknowledgement": 0,
        "flags": 24,
        "length": 5,
        "payload": bytearray(b"hello"),
    }


def test_an_unknown_column_is_reported(spark: SparkSession, tmp_path: Path) -> None:
    spark.dataSource.register(PcapDataSource)
    with pytest.raises(PipelineError, match="pcap has no column 'nope'"), plain_errors():
        spark.read.format("pcap").option("columns", "nope").load(str(tmp_path)).collect()


def test_shuffled_or_not_it_is_the_same(spark: SparkSession, tmp_path: Path) -> None:
    """Connections over several splits, too."""
    file = tmp_path / "a.pcap"
    talks = SampleTraffic(connections=5, messages=10, payload_bytes=64).conversations()
    made = sorted(packet for talk in talks for packet in packets(talk, segment_bytes=50))
    size = write_pcap(file, made)
    found = []
    for shuffle in (False, True):
        captures = Captures(spark, [str(file)], shuffle=shuffle, split_bytes=size // 7)
        assert captures.is_shuffled is shuffle
        found.append(sorted(captures.wire().collect(), key=lambda row: (row.connection, row.seq)))
    plain, shuffled = found
    assert plain == shuffled and len({row.connection for row in plain}) == 5


def test_compressed_files_are_shuffled(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(classic([(1000, ipv6(tcp(b"hello")))], RAW)))
    captures = Captures(spark, [str(tmp_path / "a")])
    assert captures.is_shuffled
    assert [row.data for row in captures.wire().collect()] == [b"hello"]


def test_frames_where_captures_are_read(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "a.pcap"
    talks = SampleTraffic(connections=5, messages=10, payload_bytes=64).conversations()
    write_pcap(file, sorted(packet for talk in talks for packet in packets(talk)))
    captures = Captures(spark, [str(file)])
    direct, through_spark = (
        sorted(map(str, decoded.collect()))
        for decoded in (decode_captures(captures), decode(captures.wire()))
    )
    assert direct == through_spark and len(direct) > 100


def test_captures_that_grow_as_a_stream(spark: SparkSession, tmp_path: Path) -> None:
    """Each segment once, over restarts, in files that came, grew and were compressed."""
    spark.dataSource.register(PcapDataSource)
    folder = tmp_path / "captures"
    folder.mkdir()
    talks = SampleTraffic(connections=2, messages=6, payload_bytes=64).conversations()
    for name, talk in zip(("a.pcap", "b.pcap"), talks, strict=True):
        write_pcap(tmp_path / name, packets(talk))
    first, second = ((tmp_path / name).read_bytes() for name in ("a.pcap", "b.pcap"))

    def run() -> int:
        """How many batches there were."""
        source = spark.readStream.format("pcap").option("maxBytesPerTrigger", "1")
        query = (
            source.load(str(folder))
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "out"))
        )
        assert query.awaitTermination(60)
        return sum(progress.numInputRows > 0 for progress in query.recentProgress)

    (folder / "a").write_bytes(first[: len(first) // 2])
    assert run() == 1
    (folder / "a").write_bytes(first)
    (folder / "b.gz").write_bytes(gzip.compress(second))
    assert (run(), run()) == (2, 0)
    whole = spark.read.format("pcap").option("paths", f"{folder}/a\n{folder}/b.gz").load()
    found = spark.read.parquet(str(tmp_path / "out"))
    assert sorted(map(tuple, found.collect())) == sorted(map(tuple, whole.collect()))


def test_on_a_cluster_sizes_decide_how_many_tasks_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the executors of this moment: others may join later."""
    file = tmp_path / "a.pcap"
    talks = SampleTraffic(connections=8, messages=10, payload_bytes=64).conversations()
    write_pcap(file, sorted(p for talk in talks for p in packets(talk, segment_bytes=50)))
    size = file.stat().st_size
    monkeypatch.setattr(pcap, "_FEW_PACKETS", 1)

    def shares(share_bytes: int, cores: int | None = None) -> int:
        monkeypatch.setattr(pcap, "_SHARE_BYTES", share_bytes)
        return pcap._plan([str(file)], cores, skip_damaged=False)[1]

    # The file's own head is no part of what is shared.
    assert [shares(size), shares((size - 100) // 3)] == [1, 4]
    assert shares(size // 40) == 0  # shuffled, in parts of a fixed size
    assert [shares(size, cores) for cores in (1, 3, 17)] == [1, 3, 0]
