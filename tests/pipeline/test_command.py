"""The command `pipeline run`."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from crosswire.cli.pipeline import is_small_input
from crosswire.pipeline.sources.inputs import find_inputs
from crosswire.testing.traffic import SampleTraffic
from tests.pipeline.test_batch import CROSSWIRE


def crosswire(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([CROSSWIRE, "pipeline", *arguments], capture_output=True, text=True)


@pytest.mark.long  # docs/tutorial.md has the same command, `stream/test_command.py` its summary
def test_the_command(tmp_path: Path) -> None:
    size = SampleTraffic(protocols=("epoxy",), connections=1, messages=5).write_tap(
        tmp_path / "lake"
    )
    done = crosswire(
        *("run", "--input", tmp_path / "lake", "--output", tmp_path / "out", "--json"),
        *("--tables", "frames", "accounting", "--master", "local[1]"),
        *("--conf", "spark.sql.shuffle.partitions=1", "--conf", "spark.driver.memory=1g"),
        *("--conf", "spark.sql.codegen.factoryMode=NO_CODEGEN"),
        *("--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert summary["tables"].keys() == {"silver.frames", "gold.accounting"}
    (account,) = summary["accounting"]
    assert (account["protocol"], account["missing"]) == ("epoxy", 0)
    assert account["seen"] == account["frames"] == size


@pytest.mark.alone
def test_every_second_belongs_to_a_step(tmp_path: Path) -> None:
    SampleTraffic(connections=1, messages=5).write_tap(tmp_path / "lake")
    start = time.monotonic()
    paths = ("--input", tmp_path / "lake", "--output", tmp_path / "out")
    process = subprocess.Popen(
        [CROSSWIRE, "pipeline", "run", "--json", *paths],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    with process:
        assert process.stdout is not None
        summary = json.loads(process.stdout.readline())
        # Not its end: what Python does after the summary takes as long as the machine is busy.
        seconds = time.monotonic() - start
    assert process.returncode == 0
    steps = summary["steps"]
    assert {"loading the program", "starting Spark", "decoding", "stopping Spark"} <= steps.keys()
    assert summary["tables"].keys() <= steps.keys()
    assert sum(steps.values()) == pytest.approx(summary["seconds"], abs=0.05)
    assert sum(steps.values()) == pytest.approx(seconds, abs=0.5)


def test_a_small_input_is_small_in_all_and_on_this_machine(tmp_path: Path) -> None:
    SampleTraffic(protocols=("epoxy",), connections=1, messages=5).write_tap(tmp_path / "lake")
    inputs = find_inputs([str(tmp_path / "lake")])
    assert is_small_input(inputs)
    assert not is_small_input(replace(inputs, captures=("s3://bucket/some.pcap",)))
    captures = tuple(str(tmp_path / name) for name in ("a.pcap", "b.pcap"))
    for path in captures:
        with Path(path).open("wb") as file:
            file.truncate(5 << 20)
    assert is_small_input(replace(inputs, captures=captures[:1]))
    assert not is_small_input(replace(inputs, captures=captures))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "ACTION"),
        (("run",), 2, "--input"),
        (("run", "--input", "/nope", "--output", "o"), 1, "/nope does not exist"),
        (("run", "--input", "x", "--output", "o", "--tables", "nope"), 2, "invalid choice"),
        (("run", "--input", "x", "--output", "o", "--since", "never"), 2, "'never' is no time"),
        (("run", "--input", "x", "--output", "o", "--conf", "x=1"), 2, "not a Spark setting"),
        (
            ("run", "--input", "x", "--output", "o", "--once", "--skip-damaged"),
            1,
            "a stream skips nothing",
        ),
        (
            ("run", "--input", "x", "--output", "o", "--port", "1=nope"),
            2,
            "there is no protocol 'nope'",
        ),
    ],
)
def test_wrong_usage_is_explained(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = crosswire(*arguments)
    assert done.returncode == code
    assert message in done.stderr and "Traceback" not in done.stderr and "java" not in done.stderr
