"""The command `crosswire demo`, run as a program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_demo_loses_nothing(tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "crosswire"
    command = [program, "demo", "--json", "--seconds", "4", "--data", tmp_path / "data"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["lost"] == 0
    assert set(outcome["flows"]) == {"orders", "jobs", "chat", "sums", "ticks"}
    assert all(flow["acknowledged"] for flow in outcome["flows"].values())
