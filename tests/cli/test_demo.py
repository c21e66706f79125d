"""The command `crosswire demo`, run as a program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_demo_shows_the_whole_conversation() -> None:
    program = Path(sys.executable).parent / "crosswire"
    done = subprocess.run([program, "demo", "--json"], capture_output=True, check=True)
    rows = [json.loads(row) for row in done.stdout.splitlines()]
    said = {
        sender: [row["frame"] for row in rows if row["sender"] == sender]
        for sender in ("client", "server")
    }
    assert said == {
        "client": ["hello", "request", "request", "response", "bye"],
        "server": ["hello", "response", "response", "request"],
    }
