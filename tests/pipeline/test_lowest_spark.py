"""The lowest version of Spark that the package allows makes the same tables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import crosswire
from tests.pipeline.conftest import Made
from tests.pipeline.test_connect import has_the_same

pytestmark = [pytest.mark.long, pytest.mark.spark]

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def lowest() -> str:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    (found,) = (re.fullmatch(r"pyspark>=([\d.]+),.*", each) for each in extras["spark"][:1])
    assert found is not None
    return f"{found[1]}.0"


def test_the_tables_are_the_same(hub_lake: Made, tmp_path: Path) -> None:
    version = lowest()
    packages = tmp_path / "packages"
    install: list[str | Path] = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        packages,
    ]
    subprocess.run([sys.executable, *install, f"pyspark=={version}"], check=True)
    source = Path(crosswire.__file__).parents[1]
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (packages, source, root))),
        "SPARK_HOME": str(packages / "pyspark"),
    }
    given = hub_lake.folder.parent / "data"
    command = [sys.executable, "-m", "tests.pipeline.session_driver", "local[2]"]
    done = subprocess.run(
        [*command, tmp_path, given, "false"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert (done.returncode, done.stdout.strip()) == (0, version), done.stderr[-3000:]
    has_the_same(hub_lake, tmp_path)
