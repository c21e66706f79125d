"""A hub with 100,000 queues and 10,000 connections: the console's requests don't hold it up."""

from __future__ import annotations

import resource

import pytest
from benchmarks.overview import OVERVIEW, measure

QUEUES, CONNECTIONS, ROUNDS = 100_000, 10_000, 9


@pytest.mark.long
@pytest.mark.alone
def test_requests_of_the_console_hold_nobody_up() -> None:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < CONNECTIONS + 500:
        pytest.skip(f"{CONNECTIONS} connections need as many open files: ulimit -n")
    idle_s, costs = measure(QUEUES, CONNECTIONS, ROUNDS)
    (overview,) = [each for each in costs if each.path == OVERVIEW]
    assert overview.took_s < 0.2
    # What other programs do to the probe is there without a request, too.
    held = {each.path: each.held_s for each in costs if each.held_s > 0.02 + idle_s}
    assert held == {}, f"{idle_s:.3f} s without a request"
