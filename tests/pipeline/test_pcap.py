"""The source `pcap` in Spark: its columns, and files read in several parts."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.traffic import Traffic, packets, write_pcap
from pyspark.sql import SparkSession

from crosswire.errors import PipelineError
from crosswire.pipeline.session import plain_errors
from crosswire.pipeline.sources.pcap import PcapDataSource, from_captures
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


def test_a_column_that_is_not_there_is_said(spark: SparkSession, tmp_path: Path) -> None:
    spark.dataSource.register(PcapDataSource)
    with pytest.raises(PipelineError, match="pcap has no column 'nope'"), plain_errors():
        spark.read.format("pcap").option("columns", "nope").load(str(tmp_path)).collect()


def test_connections_over_several_splits(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "a.pcap"
    talks = Traffic(connections=5, messages=10, payload_bytes=64).conversations()
    made = sorted(packet for talk in talks for packet in packets(talk, segment_bytes=50))
    size = write_pcap(file, made)
    whole, split = (
        sorted(
            tuple(row)
            for row in from_captures(spark, [str(file)], split_bytes=split_bytes)
            .select("connection", "seq", "direction", "kind", "offset", "length", "time", "data")
            .collect()
        )
        for split_bytes in (size, size // 7)
    )
    assert split == whole and len({row[0] for row in whole}) == 5
