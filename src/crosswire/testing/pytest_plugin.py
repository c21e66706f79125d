"""pytest's fixture of a hub; pytest loads this module by the entry point `crosswire`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from crosswire.testing.hub_process import RunningHub

__all__ = ["crosswire_hub"]


@pytest.fixture(scope="session")
def crosswire_hub() -> Iterator[RunningHub]:
    """A hub for all tests of a run; each test uses names of its own."""
    # Not at the top: pytest loads this module in every project of the environment.
    from crosswire.testing.hub_process import running_hub

    with running_hub() as hub:
        yield hub
