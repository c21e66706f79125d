"""A little fuzzing over all protocols is part of the suite; `make fuzz` goes on longer."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.long)])
def test_fuzzing_finds_nothing(seconds: int) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
