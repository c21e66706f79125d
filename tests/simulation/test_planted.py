"""A few planted bugs, with seeds that are known to show them; `planted` runs all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from crosswire.testing.simulation.scenario import run_seed
from tests.simulation.bugs import BUGS, PlantedBug, plant

BY_NAME = {bug.name: bug for bug in BUGS}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Programs and hubs log what the faults do to them."""
    with caplog.at_level("CRITICAL"):
        yield


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_each_bug_can_be_planted(bug: PlantedBug) -> None:
    """Its text is in the code, and what replaces it compiles."""
    right = getattr(bug.owner, bug.function)
    with plant(bug):
        assert getattr(bug.owner, bug.function) is not right
    assert getattr(bug.owner, bug.function) is right


@pytest.mark.failing_callbacks
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("acknowledge before the commit", 1),
        ("allow one attempt too few", 14),
        ("leave settlements out of the ledger", 1),
        ("MicroMsg2: acknowledge before the commit", 1),
        ("replicas: answer before the append", 3),
        ("replicas: never take over", 3),
    ],
)
def test_the_simulator_shows_a_planted_bug(name: str, seed: int) -> None:
    with plant(BY_NAME[name]):
        assert run_seed(seed).violations
