"""Batches and streams over Spark Connect, with a server of the pyspark package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import crosswire
from crosswire.pipeline.spark import SMALL_INPUT, java_home
from tests.pipeline.conftest import Made
from tests.pipeline.stream.test_run import tables
from tests.pipeline.test_cluster import SPARK_CLASS, free_port, wait_for_port

pytestmark = [pytest.mark.long, pytest.mark.spark]

SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"


@contextmanager
def server(folder: Path, path: str) -> Iterator[str]:
    """The URL of a server whose Python looks for packages in this path."""
    port = free_port()
    settings = SMALL_INPUT | {
        "spark.connect.grpc.binding.port": str(port),
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    command: list[str | Path] = [
        SPARK_CLASS.with_name("spark-submit"),
        "--class",
        SERVER,
        "--master",
        "local[2]",
    ]
    command += ["--driver-memory", "1g"]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    environment = os.environ | {
        "JAVA_HOME": str(java_home()),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": path,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    log = folder / "log"
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=folder)
    try:
        wait_for_port(port, child, log)
        yield f"sc://127.0.0.1:{port}"
    finally:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@pytest.mark.parametrize("ship", ["false", "true"])
def test_the_tables_are_the_same(hub_lake: Made, tmp_path: Path, ship: str) -> None:
    given = hub_lake.folder.parent / "data"
    # Without the package it is sent there, and compiled again, which takes minutes.
    path = str(Path(crosswire.__file__).parents[1]) if ship == "false" else ""
    with server(tmp_path, path) as url:
        done = subprocess.run(
            [sys.executable, "-m", "tests.pipeline.session_driver", url, tmp_path, given, ship],
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    has_the_same(hub_lake, tmp_path)


def has_the_same(expected: Made, folder: Path) -> None:
    """Both runs of the driver have made the tables of the fixture."""
    wanted, found = tables(expected.folder), tables(folder / "batch")
    assert found.keys() == wanted.keys()
    # `late` depends on an option of the fixture; all else is the same.
    for name in found.keys() - {"gold/deliveries", "open/deliveries"}:
        assert found[name] == wanted[name], name
    assert tables(folder / "stream") == found
