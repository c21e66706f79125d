"""What ends a run and what does not: a full disk, a Python worker that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from crosswire.errors import PipelineError
from crosswire.pipeline.batch import BatchJob, run_batch
from crosswire.pipeline.sources.inputs import find_inputs
from crosswire.testing.traffic import SampleTraffic
from tests.store.test_reserve import mount_disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount_disk(folder, 64 * 1024)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def test_a_full_disk_is_named(spark: SparkSession, tmp_path: Path, small_disk: Path) -> None:
    SampleTraffic(protocols=("emp",), connections=4, messages=40).write_tap(tmp_path / "lake")
    inputs, tables = find_inputs([str(tmp_path / "lake")]), frozenset({"frames"})
    batch = BatchJob(inputs, str(small_disk / "out"), tables)
    with pytest.raises(PipelineError, match="the disk is full"):
        run_batch(spark, batch, quiet=True)


def test_a_worker_that_is_killed_does_not_end_the_run(spark: SparkSession, tmp_path: Path) -> None:
    """As by a system that has no memory left: the task is run again."""
    marker = tmp_path / "killed"

    def once_fatal(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    rows = spark.range(0, 10, 1, 2).mapInArrow(once_fatal, "id bigint").collect()
    assert marker.exists()
    assert sorted(row.id for row in rows) == list(range(10))
