"""The implementations that the contract suite runs over."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.commitlog.harness import Harness
from tests.commitlog.model_harness import ModelHarness


@pytest.fixture(params=["model"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    made = ModelHarness()
    yield made
    await made.close()
