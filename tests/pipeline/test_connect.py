"""Batches and streams over Spark Connect, with a server of the pyspark package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from crosswire.pipeline.spark import SMALL_INPUT, java_home
from tests.pipeline.conftest import Made
from tests.pipeline.stream.test_run import tables
from tests.pipeline.test_cluster import SPARK_CLASS, free_port, wait_for_port

pytestmark = [pytest.mark.slow, pytest.mark.spark]

SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server, which knows nothing of this package."""
    folder = tmp_path_factory.mktemp("connect")
    port = free_port()
    settings = SMALL_INPUT | {
        "spark.connect.grpc.binding.port": str(port),
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    command = [SPARK_CLASS.with_name("spark-submit"), "--class", SERVER, "--master", "local[2]"]
    command += ["--driver-memory", "1g"]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    environment = os.environ | {
        "JAVA_HOME": str(java_home()),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": "",
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


def test_the_tables_are_the_same(server: str, hub_lake: Made, tmp_path: Path) -> None:
    given = hub_lake.folder.parent / "data"
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.connect_driver", server, tmp_path, given],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = tables(hub_lake.folder)
    found = tables(tmp_path / "batch")
    assert found.keys() == expected.keys()
    # `late` depends on an option of the fixture; all else is the same.
    for name in found.keys() - {"gold/deliveries", "open/deliveries"}:
        assert found[name] == expected[name], name
    assert tables(tmp_path / "stream") == found
