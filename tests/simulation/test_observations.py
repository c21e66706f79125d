"""What clients report, and what follows from it."""

from __future__ import annotations

import pytest

from crosswire.testing.simulation.durable import MessageKey
from crosswire.testing.simulation.observations import Observations

KEY = MessageKey("queue/q", "producer", 1)


class Timeline:
    """A time that a test sets, and the violations."""

    def __init__(self) -> None:
        self.now = 0.0
        self.violations: list[str] = []

    def violate(self, text: str, cause: BaseException | None = None) -> None:
        self.violations.append(text)


@pytest.mark.parametrize(
    "disturbed, may_return",
    [
        ({}, False),
        ({11.0: "hub"}, True),
        ({13.0: "hub"}, False),
        ({10.5: "network"}, False),
        ({3.0: "network", 13.0: "hub"}, True),
        ({10.5: "network", 13.0: "hub"}, True),
        ({12.5: "network", 13.0: "hub"}, False),
    ],
    ids=str,
)
def test_what_was_settled_returns_if_the_hub_may_not_know(
    disturbed: dict[float, str], may_return: bool
) -> None:
    timeline = Timeline()
    observations = Observations(timeline, {KEY}, max_attempts=5)
    observations.attempted(KEY)
    observations.delivered("queue/q", KEY, "consumer")
    for at in sorted({10.0, *disturbed}):
        timeline.now = at
        if at == 10.0:
            observations.settled("queue/q", KEY, "consumer")
        else:
            observations.disturbed(disturbed[at])
    timeline.now = 30.0
    observations.delivered("queue/q", KEY, "consumer")
    assert (not timeline.violations) == may_return, timeline.violations
