"""What was acknowledged is there after a crash, and what was settled is not."""

from __future__ import annotations

from pathlib import Path

from tests.store.crash import crash


def test_a_killed_hub_keeps_its_promise(tmp_path: Path) -> None:
    tally = crash(10, seed=20, power=False, directory=tmp_path)
    print(tally)
    assert tally.rounds == 10 and tally.acknowledged > 0 and tally.settled > 0
    assert tally.kept_promise, str(tally)


def test_a_power_cut_keeps_its_promise(tmp_path: Path) -> None:
    tally = crash(5, seed=21, power=True, directory=tmp_path)
    print(tally)
    assert tally.rounds == 5 and tally.acknowledged > 0 and tally.settled > 0
    assert tally.kept_promise, str(tally)
