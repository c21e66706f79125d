"""Which messages a report of damage covers: too generous a judge would let losses pass."""

from __future__ import annotations

import pytest

from tests.store.damage.reports import Reports


@pytest.mark.parametrize(
    ("report", "identifier", "coverage"),
    [
        ("", 7, ""),
        ("message 7 of queue/a is missing", 7, "named"),
        ("message 8 of queue/a is missing", 7, "vague"),
        ("message 7 of queue/ab is missing", 7, "vague"),
        ("messages of queue/a from id 5 to 9 can't be read", 7, "named"),
        ("messages of queue/a from id 5 to any can't be read", 7, "named"),
        ("messages of queue/a from id 8 to 9 can't be read", 7, "vague"),
        ("messages of queue/a can't be read", 7, "named"),
        ("queue/a is stopped until `crosswire store repair`", 7, "stopped"),
        (
            "group 3 is missing from the log; messages with ids from 5 to 9 may be lost",
            7,
            "general",
        ),
        ("group 3 is missing from the log; messages with ids from 8 to 9 may be lost", 7, "vague"),
        ("the end of the log can't be verified", 7, "general"),
        ("damaged_ranges: 3", 7, "vague"),
    ],
)
def test_a_report_covers_the_messages_that_it_names(
    report: str, identifier: int, coverage: str
) -> None:
    reports = Reports()
    reports.add(report)
    assert reports.coverage({"queue/a"}, identifier) == coverage


def test_only_what_is_damaged_counts_in_an_answer() -> None:
    reports = Reports()
    reports.add_answer({"status": "ready", "damage": [], "store": {"damaged_ranges": 0}})
    assert not reports
    reports.add_answer({"damage": ["message 7 of queue/a is missing"], "reports": ["draining"]})
    assert list(reports.entries) == ["damage: message 7 of queue/a is missing"]
