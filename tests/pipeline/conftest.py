"""One Spark session for all tests of the pipeline, and one run over a known input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from benchmarks.traffic import Traffic
from pyspark.sql import SparkSession

from crosswire.pipeline.batch import BatchJob, run_batch
from crosswire.pipeline.sources.inputs import find_inputs
from crosswire.pipeline.spark import SMALL_INPUT, start
from crosswire.pipeline.summary import Summary
from tests.pipeline.captures import write_captures

TRAFFIC = Traffic(seed=5, connections=10, messages=12, payload_bytes=64)


class Made:
    """The tables of a run, read without Spark."""

    def __init__(self, folder: Path, summary: Summary) -> None:
        self.folder = folder
        self.summary = summary

    def rows(self, name: str) -> list[dict[str, Any]]:
        return pq.read_table(self.folder / name).to_pylist()  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    settings = {**SMALL_INPUT, "spark.driver.memory": "1g"}
    session = start("local[2]", settings, name="tests")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def from_tap(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """All tables of generated traffic, taken from tap files."""
    folder = tmp_path_factory.mktemp("tap")
    TRAFFIC.write_tap(folder / "lake")
    return make(spark, folder, folder / "lake")


@pytest.fixture(scope="session")
def from_pcap(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """All tables of the same traffic, captured in two files with some mishaps."""
    folder = tmp_path_factory.mktemp("pcap")
    write_captures(folder / "captures", TRAFFIC)
    return make(spark, folder, folder / "captures")


def make(spark: SparkSession, folder: Path, given: Path, **more: Any) -> Made:
    batch = BatchJob(inputs=find_inputs([str(given)]), output=str(folder / "out"), **more)
    return Made(folder / "out", run_batch(spark, batch, quiet=True))
