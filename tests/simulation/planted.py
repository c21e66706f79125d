"""Plants bugs in the hub, one at a time, and runs seeds of the simulator until one shows it.

    python -m tests.simulation.planted --seeds 200
    python -m tests.simulation.planted --only Relink

Prints which violation showed each bug, after how many seeds and seconds. Exit code 1 if one was not
caught: an invariant or a fault is missing.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from functools import partial

from crosswire.testing.simulation.scenario import run_seed
from tests.simulation.bugs import BUGS, PlantedBug, plant


def caught_by(bug: PlantedBug, seeds: range) -> tuple[int, str] | None:
    """The first of these seeds that shows it, and the violation; None if none does."""
    with plant(bug):
        for seed in seeds:
            violations = run_seed(seed).violations
            if violations:
                return seed, violations[0]
    return None


def _try_bug(bug: PlantedBug, seeds: int) -> tuple[str, bool]:
    """A row of the table, and whether the bug was caught."""
    logging.disable(logging.CRITICAL)  # what the faults do to programs and hubs
    began = time.perf_counter()
    found = caught_by(bug, range(1, seeds + 1))
    seconds = time.perf_counter() - began
    seed, violation = found or (seeds, "not caught")
    row = f"| {bug.name} | {_shortened(violation)} | {seed} | {seconds:.1f} |"
    return row, found is not None


def _try_named(name: str, seeds: int) -> tuple[str, bool]:
    """Modules and functions can't be sent to another process: the name of a bug can."""
    return _try_bug(next(bug for bug in BUGS if bug.name == name), seeds)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.planted")
    parser.add_argument("--seeds", type=int, default=200, help="at most, for each bug")
    parser.add_argument("--only", default="", help="bugs whose names have this text")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    options = parser.parse_args(arguments)
    bugs = [each.name for each in BUGS if options.only in each.name]
    caught = 0
    print("| bug | caught by | seeds | seconds |\n|---|---|---:|---:|")
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=8) as pool:
        for row, is_caught in pool.imap_unordered(partial(_try_named, seeds=options.seeds), bugs):
            caught += is_caught
            print(row, flush=True)
    print(f"\n{caught} of {len(bugs)} caught")
    return 0 if caught == len(bugs) else 1


def _shortened(violation: str) -> str:
    text = " ".join(violation.split()).replace("|", "/")
    return text if len(text) <= 70 else f"{text[:69]}…"


if __name__ == "__main__":
    sys.exit(main())
