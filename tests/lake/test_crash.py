"""Exactly once in the lake, whatever kills the hub: the short version of `tests.lake.crash`."""

from __future__ import annotations

import sys
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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the encoder is found in /proc")
@pytest.mark.parametrize(
    ("lives", "attacks"), [(2, 6), pytest.param(20, 50, marks=pytest.mark.long)]
)
def test_every_message_is_in_the_lake_once_however_its_encoder_dies(
    tmp_path: Path, lives: int, attacks: int
) -> None:
    """It is suspended, resumed and killed under load; then the hub is killed too, and started
    again."""
    outcome = crash(lives, 20261117, tmp_path, attacks=attacks)
    assert outcome.kept_promise, outcome
    assert outcome.suspended + outcome.killed > lives * attacks / 2
    assert outcome.killed > 1 and outcome.suspended > 1
    assert outcome.messages > outcome.acknowledged / 2 > 100
