"""The log of a hub: warnings that peers cause are limited, all others are not."""

from __future__ import annotations

import logging

from crosswire.logs import JsonLines, PeerWarnings


def record(name: str, at: float, level: int = logging.WARNING) -> logging.LogRecord:
    made = logging.LogRecord(name, level, __file__, 1, "failed", None, None)
    made.created = at
    return made


def test_warnings_about_peers_are_limited_and_counted() -> None:
    limited = PeerWarnings()
    passed = [limited.filter(record("crosswire.gateways", 100.0)) for _ in range(300)]
    assert passed == [True] * 200 + [False] * 100
    later = record("crosswire.web", 101.0)
    assert limited.filter(later)
    assert '"left_out":100' in JsonLines().format(later)
    following = record("crosswire.web", 101.0)
    assert limited.filter(following)
    assert "left_out" not in JsonLines().format(following)


def test_other_lines_are_not_limited() -> None:
    limited = PeerWarnings()
    for _ in range(1000):
        assert limited.filter(record("crosswire.server", 100.0))
        assert limited.filter(record("crosswire.gateways", 100.0, logging.ERROR))
        assert limited.filter(record("crosswire.gateways", 100.0, logging.INFO))
