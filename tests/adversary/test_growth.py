"""What one peer creates, or sends at once, costs others no time: see `growth`."""

from __future__ import annotations

import pytest

from tests.adversary.growth import POLITE, SHORT
from tests.adversary.harness import Target
from tests.adversary.measured import MeasuredTarget


@pytest.mark.parametrize("name", SHORT)
def test_the_neighbour_is_served(open_hub: Target, name: str) -> None:
    MeasuredTarget(open_hub.hub).assert_served(SHORT[name], POLITE)
