"""A real standalone cluster on loopback: a master, workers, and the command as a program."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

import crosswire.pipeline
from crosswire.lake.files import write
from crosswire.pipeline.spark import java_home
from crosswire.testing.traffic import SampleTraffic
from tests.pipeline.records import Records

CROSSWIRE = Path(sys.executable).parent / "crosswire"
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
PROGRAM = Path(crosswire.pipeline.__file__).with_name("__main__.py")
PROJECT = Path(__file__).parents[2]
DEPLOY = "org.apache.spark.deploy"
SMALL_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
WAIT_S = 120.0
MASTER = r"Starting Spark master at (spark://\S+)"
EXECUTOR = b"CoarseGrainedExecutorBackend"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, child: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a program listens."""
    deadline = time.monotonic() + WAIT_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert child.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.1)


class Node:
    """A master or worker, started as Spark's own scripts would; its log is a file."""

    def __init__(self, folder: Path, name: str, what: str, *arguments: str | Path) -> None:
        self.log = folder / f"{name}.log"
        environment = os.environ | {
            "JAVA_HOME": str(java_home()),
            "SPARK_HOME": str(SPARK_CLASS.parents[1]),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": SMALL_JAVA,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYTHONPATH": "",
        }
        index = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [SPARK_CLASS, f"{DEPLOY}.{what}", *index, *arguments],
                stdout=log,
                stderr=log,
                env=environment,
            )

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Waits until its log does."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            text = self.log.read_text(errors="replace")
            if found := re.search(pattern, text):
                return found
            if self.process.poll() is not None:
                raise AssertionError(f"it ended: {text[-2000:]}")
            time.sleep(0.05)
        raise AssertionError(f"{pattern} is not in its log: {self.log.read_text()[-2000:]}")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The master's URL, and the folder in which the workers of these names work."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    nodes = [Node(folder, "master", "master.Master")]
    try:
        url = nodes[0].wait_for(MASTER)[1]
        nodes += [worker_of(url, folder, name) for name in request.param]
        for worker in nodes[1:]:
            worker.wait_for("Successfully registered with master")
        yield url, folder
    finally:
        for node in reversed(nodes):
            node.stop()


def worker_of(url: str, folder: Path, name: str) -> Node:
    limits = ("--cores", "1", "--memory", "700m", "--work-dir", folder / name)
    return Node(folder, name, "worker.Worker", *limits, url)


def executors_of(worker: Node) -> list[int]:
    """The processes of the executors that a worker has started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            command = (process / "cmdline").read_bytes()
            if int(parent) == worker.process.pid and EXECUTOR in command:
                found.append(int(process.name))
    return found


def wait_for_executor(worker: Node, run: subprocess.Popen[str]) -> int:
    deadline = time.monotonic() + WAIT_S
    while not (found := executors_of(worker)):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline, worker.log.read_text()[-2000:]
        time.sleep(0.05)
    return found[0]


@pytest.mark.long  # `test_spark_submit_starts_it` runs on a worker, too
@pytest.mark.parametrize("cluster", [("first", "second")], indirect=True, ids=["two workers"])
def test_the_command_on_a_cluster(cluster: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = cluster
    traffic = SampleTraffic(protocols=("emp", "epoxy"), connections=4, messages=5)
    size = traffic.write_tap(tmp_path / "lake")
    done = subprocess.run(command(url, tmp_path), capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    accounts = json.loads(done.stdout)["accounting"]
    assert sum(each["seen"] for each in accounts) == size
    assert {each["protocol"] for each in accounts} == {"emp", "epoxy"}
    assert_both_worked(folder)


@pytest.mark.long
@pytest.mark.parametrize("cluster", [()], indirect=True, ids=["no worker"])
def test_workers_may_join_late(cluster: tuple[str, Path], tmp_path: Path) -> None:
    """The first when the work is planned already, the second when there is an executor."""
    url, folder = cluster
    traffic = SampleTraffic(protocols=("emp", "epoxy"), connections=4, messages=5)
    size = traffic.write_tap(tmp_path / "lake")
    workers: list[Node] = []
    with subprocess.Popen(
        command(url, tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as run:
        try:
            wait_in_log(folder / "master.log", "Registered app", run)
            workers.append(worker_of(url, folder, "first"))
            early = wait_for_executor(workers[0], run)
            # It does nothing until there is another one, which else might find no work.
            os.kill(early, signal.SIGSTOP)
            try:
                workers.append(worker_of(url, folder, "second"))
                late = wait_for_executor(workers[1], run)
                wait_for_output(folder / "second", "Connected to driver|Successfully registered")
                assert late != early
            finally:
                os.kill(early, signal.SIGCONT)
            out, errors = run.communicate(timeout=300)
        finally:
            run.kill()
            for worker in workers:
                worker.stop()
    assert (run.returncode, errors) == (0, "")
    assert sum(each["seen"] for each in json.loads(out)["accounting"]) == size
    assert_both_worked(folder)


def wait_in_log(log: Path, text: str, run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while text not in log.read_text(errors="replace"):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_output(folder: Path, pattern: str) -> None:
    """Until the executor of a worker has written such a line."""
    deadline = time.monotonic() + WAIT_S
    while not any(
        re.search(pattern, each.read_text(errors="replace"))
        for each in folder.glob("app-*/*/stderr")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def command(url: str, folder: Path) -> list[str | Path]:
    return [
        *(CROSSWIRE, "pipeline", "run", "--json", "--master", url),
        *("--input", folder / "lake", "--output", folder / "out"),
        *("--tables", "frames", "accounting"),
        *("--conf", "spark.driver.host=127.0.0.1"),
        *("--conf", "spark.driver.memory=512m"),
        *("--conf", "spark.executor.memory=600m"),
        *("--conf", "spark.sql.shuffle.partitions=2"),
        *("--conf", "spark.sql.adaptive.enabled=false"),
        *("--conf", "spark.sql.codegen.factoryMode=NO_CODEGEN"),
        *("--conf", f"spark.driver.extraJavaOptions={SMALL_JAVA}"),
        *("--conf", f"spark.executor.extraJavaOptions={SMALL_JAVA}"),
    ]


def assert_both_worked(folder: Path) -> None:
    """Both workers ran what they were sent: Python compiled it where it was unpacked."""
    for worker in ("first", "second"):
        compiled = (folder / worker).glob(
            "app-*/*/crosswire/pipeline/sources/__pycache__/decoded.*.pyc"
        )
        assert list(compiled), f"the {worker} worker did nothing"


@pytest.mark.parametrize("cluster", [("only",)], indirect=True, ids=["one worker"])
def test_spark_submit_starts_it(cluster: tuple[str, Path], tmp_path: Path) -> None:
    """In client mode, with the wheel; master and settings are those of spark-submit.

    The input is what a hub recorded: nothing has to be decoded, and compiled before.
    """
    url, folder = cluster
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        check=True,
        capture_output=True,
        cwd=PROJECT,
    )
    (wheel,) = tmp_path.glob("crosswire-*.whl")
    program = tmp_path / "main.py"
    program.write_bytes(PROGRAM.read_bytes())
    records = Records()
    with records.on("c", "emp"):
        for number in range(3):
            records.recorded("accepted", payload=b"%d" % number)
    write(tmp_path / "lake", "messages", records.rows()[1])
    done = subprocess.run(
        [
            *(SPARK_CLASS.with_name("spark-submit"), "--master", url),
            *("--driver-memory", "512m", "--executor-memory", "600m"),
            *("--conf", "spark.driver.host=127.0.0.1"),
            *("--conf", "spark.sql.adaptive.enabled=false"),
            *("--conf", "spark.sql.codegen.factoryMode=NO_CODEGEN"),
            *("--conf", f"spark.driver.extraJavaOptions={SMALL_JAVA}"),
            *("--conf", f"spark.executor.extraJavaOptions={SMALL_JAVA}"),
            *("--py-files", wheel, program, "run", "--json", "--tables", "messages"),
            *("--input", tmp_path / "lake", "--output", tmp_path / "out"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"JAVA_HOME": str(java_home()), "PYSPARK_PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert json.loads(done.stdout)["tables"] == {"silver.messages": 3}
    assert "Connecting to master spark://" in done.stderr
    # The worker has fetched it.
    assert list(folder.glob(f"only/app-*/*/{wheel.name}"))
