"""Plants bugs in the hub, one at a time, and runs seeds of the simulator until one shows it.

    python -m tests.simulation.planted --seeds 200
    python -m tests.simulation.planted --only Relink

Each bug is a part of the campaign `planted`: its line in the results names the violation that
showed it and after how many seeds. Bugs that have a line are not tried again, unless with more
seeds. Exit code 1 if one was not caught: an invariant or a fault is missing.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import count, islice

from crosswire import __version__
from crosswire.testing.simulation.scenario import has_lake, is_replicated, run_seed
from tests.campaigns.results import CampaignPart, append, read, source_commit
from tests.simulation.bugs import BUGS, PlantedBug, plant


def caught_by(bug: PlantedBug, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first of these seeds that shows it, and the violation; None if none does."""
    with plant(bug):
        for seed in seeds:
            violations = run_seed(seed).violations
            if violations:
                return seed, violations[0]
    return None


def try_bug(name: str, seeds: int) -> CampaignPart:
    """What came of one bug. `wrong` is 1 if it was not caught."""
    logging.disable(logging.CRITICAL)  # what the faults do to programs and hubs
    bug = next(each for each in BUGS if each.name == name)
    began = time.perf_counter()
    found = caught_by(bug, list(islice(_seeds_for(name), seeds)))
    seed, violation = found or (0, "not caught")
    return CampaignPart(
        campaign="planted",
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        version=__version__,
        commit=source_commit(),
        seed=seed,
        rounds=seeds,
        seconds=round(time.perf_counter() - began, 1),
        wrong=int(found is None),
        details={"bug": name, "violation": _shortened(violation)},
    )


def _seeds_for(name: str) -> Iterator[int]:
    """Those in which there is what the bug is in."""
    has_it = is_replicated if name.startswith("replicas:") else has_lake
    is_anywhere = not name.startswith(("replicas:", "lake:"))
    return (seed for seed in count(1) if is_anywhere or has_it(seed))


def main(arguments: list[str] | None = None) -> int:
    """Print the table; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.planted")
    parser.add_argument("--seeds", type=int, default=200, help="at most, for each bug")
    parser.add_argument("--only", default="", help="bugs whose names have this text")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="begin no bug after this time")
    options = parser.parse_args(arguments)
    known = {part.details["bug"]: part for part in read() if part.campaign == "planted"}
    names = [
        each.name
        for each in BUGS
        if options.only in each.name
        and not each.unseen
        and not (
            each.name in known
            and (not known[each.name].wrong or known[each.name].rounds >= options.seeds)
        )
    ]
    missed = 0
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=8) as pool:
        for part in pool.imap_unordered(partial(try_bug, seeds=options.seeds), names):
            append(part)
            missed += part.wrong
            print(
                f"{part.details['bug']}: seed {part.seed}, {part.details['violation']}", flush=True
            )
            if options.seconds is not None and time.monotonic() - began > options.seconds:
                break
    print(f"{missed} not caught")
    return 1 if missed else 0


def _shortened(violation: str) -> str:
    text = " ".join(violation.split()).replace("|", "/")
    return text if len(text) <= 70 else f"{text[:69]}…"


if __name__ == "__main__":
    sys.exit(main())
