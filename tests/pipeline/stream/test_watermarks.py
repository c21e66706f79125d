"""Watermarks: how far the tables of a hub were read, all of them together."""

from __future__ import annotations

from crosswire.pipeline.stream.watermarks import LINGER_US, PATIENCE_US, HubTimes, settled_before

HOUR = 3_600_000_000


def test_the_oldest_of_the_newest_rows_decides() -> None:
    times = {"n": HubTimes(HOUR, HOUR - 2, HOUR - 1), "m": HubTimes(HOUR, HOUR, HOUR)}
    assert settled_before(times, ()) == {"n": HOUR - 2 - LINGER_US, "m": HOUR - LINGER_US}


def test_a_table_that_does_not_exist_is_not_waited_for() -> None:
    assert settled_before({"n": HubTimes(ledgers=HOUR)}, ()) == {"n": HOUR - LINGER_US}


def test_a_table_without_new_rows_is_waited_for_a_while() -> None:
    times = {"n": HubTimes(taps=1, ledgers=HOUR, messages=HOUR)}
    assert settled_before(times, ()) == {"n": HOUR - PATIENCE_US - LINGER_US}


def test_a_table_that_has_more_input_is_waited_for_without_limit() -> None:
    times = {"n": HubTimes(taps=1, ledgers=HOUR, messages=HOUR)}
    assert settled_before(times, {"taps"}) == {"n": 1 - LINGER_US}
