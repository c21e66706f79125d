"""One hub with users, for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.adversary.harness import TOKEN, USERS, Target, running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Users are configured: a peer without credentials has no rights."""
    with running(tmp_path_factory.mktemp("guarded"), USERS, TOKEN) as target:
        yield target
