"""What campaigns share: findings, parts, and how a run goes on where the last one ended."""

from __future__ import annotations

import logging
import multiprocessing
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from crosswire import __version__
from tests.campaigns.results import RESULTS, CampaignPart, append, read, source_commit

__all__ = ["Campaign", "CampaignSkipped", "Findings", "run_again", "run_campaign", "run_part"]


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
    """Run some rounds and keep the files if something is wrong. A part that raises, as a hub does
    not start again, is wrong and has no rounds. Raises CampaignSkipped."""
    folder = Path(tempfile.mkdtemp(prefix=f"crosswire-{campaign.name.replace(' ', '-')}-"))
    began = time.perf_counter()
    try:
        found = campaign.run(folder, rounds, seed)
    except CampaignSkipped:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except Exception as error:
        traceback.print_exc()
        found = Findings(wrong=1, details={"raised": f"{type(error).__name__}: {error}"[:200]})
    part = CampaignPart(
        campaign=campaign.name,
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        version=__version__,
        commit=source_commit(),
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
    campaign: Campaign,
    total: int,
    *,
    jobs: int = 1,
    seconds: float | None = None,
    path: Path = RESULTS,
) -> bool:
    """Go on with the next seeds until there are `total` rounds in the results, or time is up; gives
    whether all parts of this run kept the promise. Up to `jobs` parts run at a time, each in a
    process of its own; only this one appends to the results."""
    began, is_good = time.monotonic(), True
    parts = [each for each in read(path) if each.campaign == campaign.name]
    done = sum(each.rounds for each in parts if not each.again)
    seed = max((each.seed for each in parts), default=0)
    running: dict[Future[CampaignPart], int] = {}
    with _executor(jobs) as pool:
        while True:
            while len(running) < jobs and (left := total - done - sum(running.values())) > 0:
                if seconds is not None and time.monotonic() - began > seconds:
                    break
                seed += 1
                rounds = min(campaign.part, left)
                running[pool.submit(run_part, campaign, rounds, seed)] = rounds
            if not running:
                return is_good
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                part = future.result()
                done += part.rounds
                is_good &= _record(part, path)
                if not part.rounds:
                    total = 0  # it may be the same with every seed


def run_again(campaign: Campaign, seed: int, *, path: Path = RESULTS) -> bool:
    """Run a part of the results again, after a fix; gives whether it kept the promise now. It is
    recorded, and its rounds are not counted a second time. Raises LookupError."""
    for each in read(path):
        if (each.campaign, each.seed) == (campaign.name, seed):
            part = run_part(campaign, each.rounds, seed)
            part.again = True
            return _record(part, path)
    raise LookupError(f"{campaign.name} has no part with seed {seed}")


def _record(part: CampaignPart, path: Path) -> bool:
    append(part, path)
    print(part, flush=True)
    return part.kept_promise


class _ThisProcess(Executor):
    """Runs what is submitted at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _executor(jobs: int) -> Executor:
    if jobs == 1:
        return _ThisProcess()
    # A process a part: what one part leaves behind can't change the next one.
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(
        jobs,
        mp_context=spawn,
        initializer=logging.disable,
        initargs=(logging.CRITICAL,),
        max_tasks_per_child=1,
    )
