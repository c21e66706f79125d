"""The examples for Spark's users run, end by themselves, and show what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(name: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_worker_hears_of_the_words_that_are_said_too_often() -> None:
    alerts = re.findall(r"alert: `(\w+)` was said (\d+) times in the 2 s", printed("alerts.py"))
    assert {word for word, _ in alerts} == {"declined", "payment"}
    # Where the incident lasts from one window into the next it is told of both.
    assert all(10 <= int(count) <= 20 for _, count in alerts)


def test_the_slowest_method_comes_first() -> None:
    lines = printed("slowest_methods.py").splitlines()
    assert lines[0].startswith("the slowest methods of ")
    found = [re.search(r"Shop/(\w+) +(\d+) calls, 0 failed", line) for line in lines[1:]]
    assert [(each[1], each[2]) for each in found if each] == [
        ("Pay", "10"),
        ("Stock", "20"),
        ("Price", "40"),
    ]
