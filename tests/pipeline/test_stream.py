"""Streams end with the tables of a batch over the same input, however it comes, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks.traffic import Traffic
from pyspark.sql import SparkSession

from crosswire.errors import InvalidInput
from crosswire.lake.files import write
from crosswire.pipeline.inputs import find_inputs
from crosswire.pipeline.run import Batch, Summary, run_batch
from crosswire.pipeline.stream import BatchDone, Stream, run_stream
from tests.pipeline.captures import write_captures
from tests.pipeline.conftest import TRAFFIC
from tests.pipeline.test_run import CROSSWIRE, ODD, tap_rows

STEPS = 3

Tables = dict[str, list[str]]
"""The rows of each table, in words and sorted."""


def tables(folder: Path) -> Tables:
    found: Tables = {}
    for layer in ("bronze", "silver", "gold", "open"):
        for table in sorted((folder / layer).glob("*")):
            files = any(table.rglob("*.parquet"))
            rows = pq.read_table(table).to_pylist() if files else []
            found[f"{layer}/{table.name}"] = sorted(str(sorted(row.items())) for row in rows)
    return found


class Delivery:
    """Tap files of all protocols and captures, cut so that each step has a part of all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = (str(folder / "lake"), str(folder / "captures"))
        (folder / "captures").mkdir(parents=True)
        rows = pa.concat_tables(TRAFFIC.wire()).sort_by("time")
        seq = pa.array(range(len(rows)), pa.int64())
        self._rows = rows.set_column(1, rows.schema.field("seq"), seq)
        self._odd = tap_rows(ODD)
        write_captures(folder / "made", TRAFFIC)

    def deliver(self, step: int) -> None:
        """The first capture file grows; what is written to it ends inside of a record."""
        for rows in (self._rows, self._odd):
            first, behind = len(rows) * step // STEPS, len(rows) * (step + 1) // STEPS
            write(self.folder / "lake", "wire", rows.slice(first, behind - first))
        first_file, *others = sorted((self.folder / "made").iterdir())
        growing = first_file.read_bytes()
        if step < 2:
            kept = growing[: (step + 1) * len(growing) // 2]
            (self.folder / "captures" / first_file.name).write_bytes(kept)
        else:
            for file in others:
                (self.folder / "captures" / file.name).write_bytes(file.read_bytes())

    def all(self) -> Delivery:
        for step in range(STEPS):
            self.deliver(step)
        return self


def batch(spark: SparkSession, given: Delivery, output: Path) -> tuple[Tables, Summary]:
    summary = run_batch(spark, Batch(find_inputs(given.paths), str(output)), quiet=True)
    return tables(output), summary


def once(spark: SparkSession, given: Delivery, output: Path) -> Summary:
    return run_stream(spark, Stream(given.paths, str(output), once=True))


@pytest.fixture(scope="module")
def expected(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tables, Summary]:
    folder = tmp_path_factory.mktemp("batch")
    return batch(spark, Delivery(folder / "given").all(), folder / "out")


def test_once_in_one_go(
    spark: SparkSession, tmp_path: Path, expected: tuple[Tables, Summary]
) -> None:
    given = Delivery(tmp_path / "given").all()
    summary = once(spark, given, tmp_path / "out")
    assert tables(tmp_path / "out") == expected[0]
    assert summary.accounting == expected[1].accounting
    assert {name: rows for name, rows in summary.rows.items() if rows} == {
        name: rows for name, rows in expected[1].rows.items() if rows
    }


def test_once_in_many_steps(
    spark: SparkSession, tmp_path: Path, expected: tuple[Tables, Summary]
) -> None:
    given = Delivery(tmp_path / "given")
    for step in range(STEPS):
        given.deliver(step)
        summary = once(spark, given, tmp_path / "out")
        if step == 1:
            so_far, _ = batch(spark, given, tmp_path / "so far")
            assert tables(tmp_path / "out") == so_far
    assert tables(tmp_path / "out") == expected[0]
    assert summary.accounting == expected[1].accounting
    before = summary.rows
    assert once(spark, given, tmp_path / "out").rows == before
    assert tables(tmp_path / "out") == expected[0]


def test_killed_at_any_moment(
    spark: SparkSession, tmp_path: Path, expected: tuple[Tables, Summary]
) -> None:
    """A batch for each file. Killed three times: while it starts, reads, writes or commits."""
    random = Random(int.from_bytes(os.urandom(4)))
    given = Delivery(tmp_path / "given")
    for step in range(STEPS):
        given.deliver(step)
        killed_after(random.uniform(2, 12), spark, given, tmp_path / "out")
    run_stream(spark, Stream(given.paths, str(tmp_path / "out"), once=True))
    assert tables(tmp_path / "out") == expected[0]


def killed_after(seconds: float, spark: SparkSession, given: Delivery, output: Path) -> None:
    gateway: Any = spark.sparkContext._gateway
    parameters = gateway.gateway_parameters
    environment = {
        **os.environ,
        "PYSPARK_GATEWAY_PORT": str(parameters.port),
        "PYSPARK_GATEWAY_SECRET": parameters.auth_token,
    }
    command = [sys.executable, "-m", "tests.pipeline.driver", str(output), *given.paths]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
        _, said = child.communicate()
    assert child.returncode == -signal.SIGKILL, said
