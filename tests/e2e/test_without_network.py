"""Nothing is loaded from another machine at run time, and nobody is asked."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.without_network import FOREIGN


def run_alone(folder: Path, *options: str) -> None:
    """Skips where a network of its own needs rights that the tests don't have."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare command")
    command = ["unshare", "--net", sys.executable, "-m", "tests.e2e.without_network"]
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"no network of its own can be made: {tried.stderr.decode().strip()}")
    done = subprocess.run(
        [*command, str(folder), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    foreign = folder / FOREIGN
    assert not foreign.exists(), foreign.read_text()


@pytest.mark.slow
def test_a_hub_and_its_commands(tmp_path: Path) -> None:
    run_alone(tmp_path)


@pytest.mark.long
@pytest.mark.spark
def test_the_pipeline_and_its_report(tmp_path: Path) -> None:
    run_alone(tmp_path, "--pipeline")
