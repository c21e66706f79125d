"""Short forms of the campaigns, and the page that their results are published on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.campaigns.catalogue import CAMPAIGNS
from tests.campaigns.page import PAGE, render
from tests.campaigns.real_hubs import judge_soak
from tests.campaigns.results import CampaignPart, append, read
from tests.campaigns.runner import (
    Campaign,
    CampaignSkipped,
    Findings,
    run_again,
    run_campaign,
    run_part,
)

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


def count_rounds(_folder: Path, rounds: int, _seed: int) -> Findings:
    """A campaign that a process of its own can be given."""
    return Findings(rounds=rounds)


def test_parts_in_processes_have_seeds_of_their_own(tmp_path: Path) -> None:
    campaign = Campaign("kills", "none", 10, 4, count_rounds)
    results = tmp_path / "results.jsonl"
    assert run_campaign(campaign, 8, jobs=2, path=results)
    assert run_campaign(campaign, 10, jobs=2, path=results)
    assert sorted((each.seed, each.rounds) for each in read(results)) == [(1, 4), (2, 4), (3, 2)]


def test_a_part_that_raises_is_wrong_and_ends_the_run(tmp_path: Path) -> None:
    def run(_folder: Path, _rounds: int, _seed: int) -> Findings:
        raise AssertionError("the hub did not start")

    results = tmp_path / "results.jsonl"
    assert not run_campaign(Campaign("kills", "none", 10, 4, run), 10, path=results)
    [part] = read(results)
    assert (part.rounds, part.wrong) == (0, 1)
    assert part.details == {"raised": "AssertionError: the hub did not start"}


def test_a_part_that_was_wrong_stays_on_the_page_after_a_fix(tmp_path: Path) -> None:
    is_fixed = False

    def run(_folder: Path, rounds: int, _seed: int) -> Findings:
        return Findings(rounds=rounds, wrong=int(not is_fixed), details={"seed 9": "order"})

    results = tmp_path / "results.jsonl"
    campaign = Campaign("kills", "none", 4, 4, run)
    assert not run_campaign(campaign, 4, path=results)
    mark = "<!-- table: campaigns -->\n<!-- end of table -->"
    assert "wrong 1 (seed 9: order) | open |" in render(mark, read(results))

    is_fixed = True
    assert run_again(campaign, 1, path=results)
    first, again = read(results)
    first.fixed = "queues keep order"
    page = render(mark, [first, again])
    assert "| 4 | 1,000 | 0 | 0 | 0 | 0 | 1 |" in page
    assert "| fixed: queues keep order; run again on " in page
    assert "nothing wrong |" in page


def test_a_seed_that_was_never_run_can_not_be_run_again(tmp_path: Path) -> None:
    campaign = Campaign("kills", "none", 10, 4, count_rounds)
    with pytest.raises(LookupError):
        run_again(campaign, 1, path=tmp_path / "results.jsonl")


def test_what_is_lost_fails_a_run(tmp_path: Path) -> None:
    campaign = Campaign("kills", "none", 1, 1, lambda *_: Findings(rounds=1, lost=1))
    assert not run_campaign(campaign, 1, path=tmp_path / "results.jsonl")


MIB = 1 << 20


@pytest.mark.parametrize(
    ("more_a_second", "until_s", "is_wrong"),
    [(20_000, 1700, False), (6_000, 3600, True), (100, 3600, False)],
    ids=["caches that fill up", "15 bytes a message", "next to nothing"],
)
def test_memory_that_grows_after_caches_are_full_is_wrong(
    more_a_second: int, until_s: int, is_wrong: bool
) -> None:
    random, findings = Random(1), Findings()
    sizes = [120 * MIB + more_a_second * min(second, until_s) for second in range(3600)]
    judge_soak([size + random.randint(0, 3 * MIB) for size in sizes], findings)
    assert findings.wrong == is_wrong, findings.details


def test_caches_may_fill_up_in_a_short_soak() -> None:
    findings = Findings()
    judge_soak([120 * MIB + 20_000 * second for second in range(1000)], findings)
    assert (findings.wrong, findings.details["MiB more in the second half"]) == (0, 8.6)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    part = CampaignPart(
        campaign="kills", date="2026-01-01", version="1", seed=3, rounds=2, seconds=1.5, lost=1
    )
    append(part, tmp_path / "results.jsonl")
    assert read(tmp_path / "results.jsonl") == [part]
