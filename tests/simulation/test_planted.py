"""A few planted bugs, with the seeds that are published; `planted` runs all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from crosswire.testing.simulation.scenario import run_seed
from tests.campaigns.results import read
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
    "name",
    [
        "acknowledge before the commit",
        "allow one attempt too few",
        "leave settlements out of the ledger",
        "MicroMsg2: acknowledge before the commit",
        "replicas: answer before the append",
        "replicas: never take over",
    ],
)
def test_a_planted_bug_is_shown(name: str) -> None:
    """By its published seed; if the code has changed what happens in that one, by another."""
    published = [each.seed for each in read() if each.details.get("bug") == name][-1]
    with plant(BY_NAME[name]):
        assert any(run_seed(seed).violations for seed in (published, *range(1, 25)))
