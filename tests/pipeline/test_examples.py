"""The examples for Spark run to their ends and print what they document."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[2] / "examples"
CHANGED = "spark.sql.streaming.stateStore.encodingFormat"


def printed(
    name: str,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """What an example prints, as a program with the Spark of all tests: starting one of its own
    would take longer than everything that it does."""
    encoding = spark.conf.get(CHANGED)
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        spark.conf.set(CHANGED, encoding)
    return capsys.readouterr().out


def test_a_worker_is_alerted_of_frequent_words(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = printed("alerts.py", spark, monkeypatch, capsys)
    alerts = re.findall(r"alert: `(\w+)` occurred (\d+) times in the 2 s", output)
    assert {word for word, _ in alerts} == {"declined", "payment"}
    # An incident that lasts from one window into the next causes alerts for both.
    assert all(10 <= int(count) <= 20 for _, count in alerts)


def test_the_slowest_method_comes_first(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed("slowest_methods.py", spark, monkeypatch, capsys).splitlines()
    assert lines[0].startswith("the slowest methods of ")
    found = [re.search(r"Shop/(\w+) +(\d+) calls, 0 failed", line) for line in lines[1:]]
    assert [(each[1], each[2]) for each in found if each] == [
        ("Pay", "10"),
        ("Stock", "20"),
        ("Price", "40"),
    ]
