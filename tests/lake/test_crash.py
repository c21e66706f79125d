"""Exactly once in the lake, whatever kills the hub: the short version of `tests.lake.crash`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lake.crash import crash


@pytest.mark.parametrize(
    ("lives", "seed"), [(5, 20261115), pytest.param(50, 20261116, marks=pytest.mark.long)]
)
def test_every_message_is_in_the_lake_once_however_the_hub_dies(
    tmp_path: Path, lives: int, seed: int
) -> None:
    outcome = crash(lives, seed, tmp_path)
    assert outcome.kept_promise, outcome
    assert outcome.acknowledged > 100
    assert outcome.messages > outcome.acknowledged / 2
