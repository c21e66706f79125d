"""What one peer creates, or sends at once, costs others no time: see `growth`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.adversary.growth import LARGEST_MIB, SHORT, polite
from tests.adversary.http_growth import HTTP_ATTACKS
from tests.adversary.measured import MeasuredTarget, measured_hub
from tests.adversary.peer_growth import PEER_ATTACKS


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeasuredTarget]:
    """One hub with users for all attacks."""
    with measured_hub(tmp_path_factory.mktemp("growth")) as target:
        yield target


pytestmark = pytest.mark.alone


@pytest.mark.parametrize("name", SHORT)
def test_the_neighbour_is_served(target: MeasuredTarget, name: str) -> None:
    target.assert_served(SHORT[name], polite, LARGEST_MIB.get(name, 0))


@pytest.mark.parametrize("name", HTTP_ATTACKS)
def test_the_neighbour_is_served_beside_http(target: MeasuredTarget, name: str) -> None:
    target.assert_served(HTTP_ATTACKS[name], polite)


@pytest.mark.parametrize("name", PEER_ATTACKS)
def test_the_neighbour_is_served_beside_what_peers_repeat(
    target: MeasuredTarget, name: str
) -> None:
    target.assert_served(PEER_ATTACKS[name], polite)
