"""What campaigns share: findings, parts, and how a run goes on where the last one ended."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from crosswire import __version__
from tests.campaigns.results import RESULTS, CampaignPart, append, read

__all__ = ["Campaign", "CampaignSkipped", "Findings", "run_campaign", "run_part"]


class CampaignSkipped(Exception):
    """This machine lacks what the campaign needs; the text says what."""


class Findings(msgspec.Struct):
    """What a part counts; see CampaignPart."""

    rounds: int = 0
    attempted: int = 0
    acknowledged: int = 0
    lost: int = 0
    returned: int = 0
    wrong: int = 0
    unavailable_s: float = 0.0
    details: dict[str, int | float | str] = msgspec.field(default_factory=dict)

    def add(self, name: str, count: int) -> None:
        """Count something of this campaign's own."""
        before = self.details.get(name, 0)
        assert isinstance(before, int)
        self.details[name] = before + count


class Campaign(NamedTuple):
    """`run` gets an empty folder, a number of rounds and a seed. `total` rounds are the goal, in
    parts of `part`; `about` is a line of the docs."""

    name: str
    about: str
    total: int
    part: int
    run: Callable[[Path, int, int], Findings]


def run_part(campaign: Campaign, rounds: int, seed: int) -> CampaignPart:
    """Run some rounds and keep the files if something is wrong. Raises CampaignSkipped."""
    folder = Path(tempfile.mkdtemp(prefix=f"crosswire-{campaign.name.replace(' ', '-')}-"))
    began = time.perf_counter()
    try:
        found = campaign.run(folder, rounds, seed)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    part = CampaignPart(
        campaign=campaign.name,
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        version=__version__,
        seed=seed,
        seconds=round(time.perf_counter() - began, 1),
        **msgspec.structs.asdict(found),
    )
    if part.kept_promise:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"the files are in {folder}")
    return part


def run_campaign(
    campaign: Campaign, total: int, *, seconds: float | None = None, path: Path = RESULTS
) -> bool:
    """Go on with the next seed until there are `total` rounds in the results, or time is up; gives
    whether all parts of this run kept the promise."""
    began, is_good = time.monotonic(), True
    while True:
        parts = [each for each in read(path) if each.campaign == campaign.name]
        done = sum(each.rounds for each in parts)
        if done >= total or (seconds is not None and time.monotonic() - began > seconds):
            return is_good
        seed = max((each.seed for each in parts), default=0) + 1
        part = run_part(campaign, min(campaign.part, total - done), seed)
        append(part, path)
        print(part, flush=True)
        is_good = is_good and part.kept_promise
