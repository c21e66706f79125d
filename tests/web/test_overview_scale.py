"""A hub with 100,000 queues and 10,000 connections: the console's requests don't hold it up."""

from __future__ import annotations

import resource

import pytest

from tests.web.overview_cost import OVERVIEW, SEARCHES, measure

QUEUES, CONNECTIONS, ROUNDS = 100_000, 10_000, 9
LIST_S = 0.5
HELD_S = 0.02


@pytest.mark.long
@pytest.mark.alone
def test_requests_of_the_console_hold_nobody_up() -> None:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < CONNECTIONS + 500:
        pytest.skip(f"{CONNECTIONS} connections need as many open files: ulimit -n")
    idle_s, costs = measure(QUEUES, CONNECTIONS, ROUNDS)
    (overview,) = [each for each in costs if each.path == OVERVIEW]
    assert overview.took_s < 0.2
    slow = {each.path: round(each.took_s, 2) for each in costs if each.took_s > LIST_S}
    assert slow.keys() <= set(SEARCHES), slow
    held = {each.path: round(each.held_s * 1000, 1) for each in costs if each.held_s > HELD_S}
    assert held == {}, f"ms; {idle_s * 1000:.1f} ms without a request"
    assert {each.path: each.turn_s for each in costs if each.turn_s > HELD_S} == {}
