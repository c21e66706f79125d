"""Five rounds of faults under load; `python -m tests.replication.chaos` has many."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.postgres.cluster import ClusterPool
from tests.replication import chaos

pytestmark = pytest.mark.slow


async def test_nothing_is_lost_returned_or_doubled(clusters: ClusterPool, tmp_path: Path) -> None:
    result = await chaos.run(clusters, tmp_path, 5, 1, print, with_lake=False)
    print(result)
    assert (result.lost, result.returned, result.doubled) == (0, 0, 0)
    assert result.takeovers >= 5 and result.acknowledged > 0
    assert len(set(result.digests.values())) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("planted", "found"),
    [("lost", ["lost"]), ("returned", ["returned"]), ("doubled", ["doubled", "lost"])],
)
async def test_planted_faults_are_found(
    clusters: ClusterPool, tmp_path: Path, planted: str, found: list[str]
) -> None:
    """A run that finds nothing proves something only if it finds what is there."""
    result = await chaos.run(clusters, tmp_path, 2, 1, print, with_lake=False, planted=planted)
    print(result)
    assert all(getattr(result, each) > 0 for each in found)
