"""The examples for Spark run to their ends and print what they document."""

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


def test_a_worker_is_alerted_of_frequent_words() -> None:
    alerts = re.findall(r"alert: `(\w+)` occurred (\d+) times in the 2 s", printed("alerts.py"))
    assert {word for word, _ in alerts} == {"declined", "payment"}
    # An incident that lasts from one window into the next causes alerts for both.
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
