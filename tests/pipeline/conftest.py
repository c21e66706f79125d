"""One Spark session for all tests of the pipeline, and one run over a known input."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

from crosswire.pipeline.batch import BatchJob, run_batch
from crosswire.pipeline.sources.inputs import find_inputs
from crosswire.pipeline.spark import SMALL_INPUT, start
from crosswire.pipeline.summary import Summary
from crosswire.pipeline.visible_tables import VisibleTables
from crosswire.testing.traffic import SampleTraffic
from tests.pipeline.captures import write_captures

TRAFFIC = SampleTraffic(seed=5, connections=10, messages=12, payload_bytes=64)

FORGETFUL = {
    "spark.sql.ui.retainedExecutions": "1",
    "spark.ui.retainedJobs": "1",
    "spark.ui.retainedStages": "1",
    "spark.ui.retainedTasks": "1",
    "spark.ui.retainedDeadExecutors": "1",
}
"""Spark remembers the last thousand queries for its web page, with their plans: hundreds of
megabytes, which it would search for garbage again and again."""


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a table, `gold/traffic`; times as numbers, µs since 1970, which can be compared
    with what the traffic was made of. `revocable` is left out: a stream and a batch differ in
    it."""
    rows = VisibleTables(str(folder)).read(name.replace("/", "."))
    for index, field in enumerate(rows.schema):
        if pa.types.is_timestamp(field.type):
            rows = rows.set_column(index, field.name, pc.cast(rows.column(index), pa.int64()))
    return rows.drop_columns(["revocable"]).to_pylist()  # type: ignore[no-any-return]


class Made:
    """The tables of a run, read without Spark."""

    def __init__(self, folder: Path, summary: Summary) -> None:
        self.folder = folder
        self.summary = summary

    def rows(self, name: str) -> list[dict[str, Any]]:
        return rows_of(self.folder, name)

    def path(self, name: str) -> str:
        """The folder of a table that a batch wrote."""
        (found,) = VisibleTables(str(self.folder)).paths(name.replace("/", "."))
        return found


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            **SMALL_INPUT,
            # With one task, rows that a shuffle should bring together are together anyway.
            "spark.sql.shuffle.partitions": "2",
            "spark.driver.memory": "1g",
            **FORGETFUL,
            "spark.sql.warehouse.dir": f"{folder}/warehouse",
        }
        # Of a task that fails Spark makes one more attempt, not three: many tests have such tasks.
        session = start("local[2,2]", settings, name="tests")
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
    """Tables of the same traffic, captured in two files with some mishaps."""
    folder = tmp_path_factory.mktemp("pcap")
    write_captures(folder / "captures", TRAFFIC)
    tables = frozenset({"wire", "frames", "sessions", "accounting"})
    return make(spark, folder, folder / "captures", tables=tables)


@pytest.fixture(scope="session")
def hub_lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """All tables of what a real hub recorded, its tap on; one payload in its lake is spoiled."""
    from tests.pipeline.test_hub_lake import live, spoil

    folder = tmp_path_factory.mktemp("hub")
    asyncio.run(live(folder / "data"))
    spoil(folder / "data" / "lake")
    # Another test may have taken the session for a small input.
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    return make(spark, folder, folder / "data", late_us=600_000_000)


def make(spark: SparkSession, folder: Path, given: Path, **more: Any) -> Made:
    batch = BatchJob(inputs=find_inputs([str(given)]), output=str(folder / "out"), **more)
    return Made(folder / "out", run_batch(spark, batch, quiet=True))
