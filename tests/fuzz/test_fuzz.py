"""Half a minute of fuzzing over all protocols is part of the suite; `make fuzz` goes on longer."""

from __future__ import annotations

import subprocess
import sys

SECONDS = 30


def test_half_a_minute_of_fuzzing_finds_nothing() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--seconds", str(SECONDS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
