"""A hub with 100,000 queues and 10,000 connections: the console's requests don't hold it up."""

from __future__ import annotations

import resource

import pytest

from tests.web.overview_cost import OVERVIEW, SEARCHES, measure

QUEUES, CONNECTIONS, ROUNDS = 100_000, 10_000, 9
_LIST_CPU_S = 0.5
"""Of the hub, for a list: CPU time, since other programs delay the response."""


@pytest.mark.long
@pytest.mark.alone
def test_requests_of_the_console_hold_nobody_up() -> None:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < CONNECTIONS + 500:
        pytest.skip(f"{CONNECTIONS} connections need as many open files: ulimit -n")
    idle_s, costs = measure(QUEUES, CONNECTIONS, ROUNDS)
    (overview,) = [each for each in costs if each.path == OVERVIEW]
    assert overview.took_s < 0.2
    slow = {each.path: round(each.cpu_s, 2) for each in costs if each.cpu_s > _LIST_CPU_S}
    assert slow.keys() <= set(SEARCHES), slow
    # The probe waits for other programs, too: as long as it does without a request.
    most_s = 0.02 + idle_s
    held = {each.path: round(each.held_s * 1000, 1) for each in costs if each.held_s > most_s}
    assert held == {}, f"ms; {idle_s * 1000:.1f} ms without a request"
    assert {each.path: each.turn_s for each in costs if each.turn_s > 0.02} == {}
