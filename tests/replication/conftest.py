"""Servers of PostgreSQL that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres.cluster import ClusterPool


@pytest.fixture(scope="session")
def clusters() -> Iterator[ClusterPool]:
    """Servers that the tests of a process share."""
    pool = ClusterPool()
    yield pool
    pool.close()
