"""The watchdog: turns that come late, and a loop that does not turn at all."""

from __future__ import annotations

import logging
import threading

import pytest

from crosswire.server.watchdog import LATE_S, Watchdog


class Watched:
    """A watchdog with a clock in our hand, and no thread."""

    def __init__(self) -> None:
        self.now = 100.0
        self.dog = Watchdog(lambda: self.now)
        self.dog._beat_at = self.now
        self.dog._loop_thread = threading.get_ident()


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_turns_are_measured() -> None:
    watched = Watched()
    for _ in range(600):
        watched.now += 0.1
        watched.dog.beat(0.002)
    watched.dog.beat(0.7)
    assert watched.dog.worst_lag_s() == 0.7
    assert sum(watched.dog.lag.counts) == 601
    assert len(watched.dog._worst) < 70
    watched.now += 61
    assert watched.dog.worst_lag_s() == 0.0


def test_a_blocked_loop_is_told_while_it_is_blocked(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.now += LATE_S
    watched.dog.check()
    assert events(caplog) == []
    watched.now += 0.5
    watched.dog.check()
    watched.dog.check()
    assert events(caplog) == ["the event loop is blocked"]
    fields = caplog.records[0].crosswire_fields  # type: ignore[attr-defined]
    assert fields["seconds"] == 5.5 and "test_watchdog.py" in fields["where"]
    watched.now += 60
    watched.dog.check()
    assert events(caplog) == ["the event loop is blocked"] * 2
    watched.dog.beat(65.5)
    assert events(caplog)[-1] == "the event loop was blocked"
    assert watched.dog.blocked == 1
    assert watched.dog.silent_s() == 0.0
    watched.dog.check()
    assert len(events(caplog)) == 3


def test_its_thread_looks_by_itself(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosswire.server.watchdog._CHECK_S", 0.001)
    looked = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            looked.set()

    handler = Handler()
    logger = logging.getLogger("crosswire.watchdog")
    logger.addHandler(handler)
    watched = Watched()
    try:
        watched.dog.start()
        watched.now += 100
        assert looked.wait(10)
    finally:
        watched.dog.stop()
        logger.removeHandler(handler)
    assert watched.dog.silent_s() == 0.0
    assert "the event loop is blocked" in events(caplog)
