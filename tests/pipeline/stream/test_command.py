"""The command `pipeline run --stream`, which is stopped at several moments."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from pathlib import Path

import pytest

from crosswire.pipeline.visible_tables import VisibleTables
from crosswire.testing.traffic import SampleTraffic
from tests.pipeline.test_batch import CROSSWIRE


def stream_command(folder: Path, *options: str) -> list[str | Path]:
    return [
        *(CROSSWIRE, "pipeline", "run", "--stream", "--input", folder / "lake"),
        *("--output", folder / "out", "--tables", "frames", "--master", "local[1]"),
        *("--conf", "spark.sql.shuffle.partitions=1", "--conf", "spark.driver.memory=1g"),
        *("--conf", "spark.sql.codegen.factoryMode=NO_CODEGEN"),
        *("--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"),
        *options,
    ]


def test_the_command_ends_with_a_summary_when_it_is_stopped(tmp_path: Path) -> None:
    size = SampleTraffic(protocols=("epoxy",), connections=1, messages=5).write_tap(
        tmp_path / "lake"
    )
    with subprocess.Popen(
        stream_command(tmp_path, "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        while not VisibleTables(str(tmp_path / "out")).names:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.2)
            assert child.returncode is None, child.communicate()
        child.send_signal(signal.SIGTERM)
        output, errors = child.communicate()
    assert (child.returncode, errors) == (0, "")
    summary = json.loads(output)
    assert summary["tables"].keys() == {"silver.frames"}
    assert [account["frames"] for account in summary["accounting"]] == [size]


def ignore_interrupts() -> None:
    """As a shell does for what it runs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize(
    "moment", ["Starting Spark", pytest.param("batch 0:", marks=pytest.mark.long)]
)
def test_a_signal_stops_the_command_at_any_moment(tmp_path: Path, moment: str) -> None:
    size = SampleTraffic(protocols=("epoxy",), connections=1, messages=5).write_tap(
        tmp_path / "lake"
    )
    with subprocess.Popen(
        stream_command(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=ignore_interrupts,
    ) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if moment in line:
                break
        child.send_signal(signal.SIGTERM)
        try:
            # A stream that is not stopped waits for more input without end.
            _, errors = child.communicate(timeout=120)
        finally:
            child.kill()  # or it would be waited for without end
    assert "Traceback" not in errors, errors
    assert child.returncode == (130 if "Spark" in moment else 0)
    if "batch" in moment:
        # What was cancelled is not in the tables, and the next run has it.
        assert not VisibleTables(str(tmp_path / "out")).names
        assert size > 0
