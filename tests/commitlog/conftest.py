"""The implementations that the contract suite runs over."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.commitlog.harness import Harness
from tests.commitlog.model_harness import ModelHarness
from tests.commitlog.postgres_harness import PostgresHarness
from tests.postgres.cluster import ClusterPool


@pytest.fixture(scope="session")
def clusters() -> Iterator[ClusterPool]:
    """Servers that the tests of a process share."""
    pool = ClusterPool()
    yield pool
    pool.close()


@pytest.fixture
async def postgres(clusters: ClusterPool, tmp_path: Path) -> AsyncIterator[PostgresHarness]:
    """A schema for a log in PostgreSQL, with nothing in it."""
    made = PostgresHarness(clusters.take(), tmp_path)
    await made.start()
    yield made
    await made.close()


@pytest.fixture(params=["model", "postgres"])
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    """A log on each implementation."""
    made: Harness = ModelHarness()
    if request.param == "postgres":
        clusters: ClusterPool = request.getfixturevalue("clusters")
        made = PostgresHarness(clusters.take(), tmp_path)
        await made.start()
    yield made
    await made.close()
