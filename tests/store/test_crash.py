"""What was acknowledged is there after a crash, and what was settled is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.crash import crash


@pytest.mark.parametrize(
    ("rounds", "seed"), [(5, 20), pytest.param(50, 22, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("power", [False, True], ids=["kill", "power cut"])
def test_a_hub_that_crashes_keeps_its_promise(
    tmp_path: Path, power: bool, rounds: int, seed: int
) -> None:
    tally = crash(rounds, seed=seed, power=power, directory=tmp_path)
    print(tally)
    assert tally.rounds == rounds and tally.acknowledged > 0 and tally.settled > 0
    assert tally.kept_promise, str(tally)
