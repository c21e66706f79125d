"""Exactly once in the lake, whatever kills the hub: the short version of `tests.lake.crash`."""

from __future__ import annotations

from pathlib import Path

from tests.lake.crash import crash


def test_every_message_is_in_the_lake_once_however_the_hub_dies(tmp_path: Path) -> None:
    outcome = crash(10, 20261115, tmp_path)
    assert outcome.kept_promise, outcome
    assert outcome.acknowledged > 100
    assert outcome.messages > outcome.acknowledged / 2
