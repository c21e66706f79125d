"""Short forms of the campaigns, and the page that their results are published on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaigns.catalogue import CAMPAIGNS
from tests.campaigns.page import PAGE, render
from tests.campaigns.results import CampaignPart, append, read
from tests.campaigns.runner import Campaign, CampaignSkipped, Findings, run_campaign, run_part

BY_NAME = {campaign.name: campaign for campaign in CAMPAIGNS}
SHORT = {
    "real hubs": 1,
    "kills": 2,
    "disk errors": 2,
    "full disks": 1,
    "clocks": 3,
    "garbage": 100,
    "churn": 25,
    "soak": 2,
}
"""The others have short forms of their own: tests of the simulator, of the store and of fuzzing."""


@pytest.fixture
def quiet() -> Iterator[None]:
    """Programs log that a hub is gone."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", SHORT)
def test_a_short_form_keeps_the_promise(name: str) -> None:
    try:
        part = run_part(BY_NAME[name], SHORT[name], seed=1)
    except CampaignSkipped as reason:
        pytest.skip(str(reason))
    assert part.rounds == SHORT[name]
    assert part.acknowledged > 0
    assert part.kept_promise, str(part)


def test_the_page_is_in_step_with_the_results() -> None:
    assert render(PAGE.read_text(), read()) == PAGE.read_text(), "python -m tests.campaigns.page"


def test_every_part_of_the_results_is_of_a_campaign() -> None:
    assert {each.campaign for each in read()} <= BY_NAME.keys() | {"planted"}


def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    ran: list[tuple[int, int]] = []

    def run(_folder: Path, rounds: int, seed: int) -> Findings:
        ran.append((rounds, seed))
        return Findings(rounds=rounds, acknowledged=rounds)

    campaign = Campaign("kills", "none", 10, 4, run)
    results = tmp_path / "results.jsonl"
    assert run_campaign(campaign, 6, path=results)
    assert run_campaign(campaign, 10, path=results)
    assert run_campaign(campaign, 10, path=results)
    assert ran == [(4, 1), (2, 2), (4, 3)]
    assert [each.rounds for each in read(results)] == [4, 2, 4]


def test_what_is_lost_fails_a_run(tmp_path: Path) -> None:
    campaign = Campaign("kills", "none", 1, 1, lambda *_: Findings(rounds=1, lost=1))
    assert not run_campaign(campaign, 1, path=tmp_path / "results.jsonl")


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    part = CampaignPart(
        campaign="kills", date="2026-01-01", version="1", seed=3, rounds=2, seconds=1.5, lost=1
    )
    append(part, tmp_path / "results.jsonl")
    assert read(tmp_path / "results.jsonl") == [part]
