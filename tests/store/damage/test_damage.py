"""What a hub makes of damaged files: never wrong messages, never a loss that nobody hears of."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "seed"), [(8, 1), pytest.param(300, 2, marks=pytest.mark.long)])
def test_damaged_files_are_never_served_wrongly_nor_lost_in_silence(cases: int, seed: int) -> None:
    """A process of its own: it forks hubs, which a process with threads can't."""
    command = [sys.executable, "-m", "tests.store.damage", f"--cases={cases}", f"--seed={seed}"]
    # In its usual directory, so that a failing case can be replayed with the same files.
    done = subprocess.run([*command, "--json"], capture_output=True, timeout=1800)
    assert done.stdout, done.stderr.decode()
    result = json.loads(done.stdout)
    assert result["cases"] == cases, done.stderr.decode()
    assert result["outcomes"].get("unnoticed", 0) < cases, "nothing was damaged"
    assert not result["failing"], "\n".join(
        [*result["failing"], f"replay one: {' '.join(command[:3])} --case SEED"]
    )
