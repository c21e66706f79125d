"""Runs seeds of the simulator.

    python -m crosswire.testing.simulation --seeds 1000
    python -m crosswire.testing.simulation --seconds 60 --jobs 2
    python -m crosswire.testing.simulation --seed 4711 --history

Exit code 0: no violation; 1: a seed violated an invariant, its shortest plan of faults is printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator

from crosswire.plurals import plural
from crosswire.testing.simulation.scenario import SeedOutcome, run_quietly
from crosswire.testing.simulation.shrinking import shrink

__all__ = ["main"]

_REPORT_S = 10.0


def main(arguments: list[str] | None = None) -> int:
    """Run seeds and print what they showed; gives the exit code."""
    options = _parse(arguments)
    if options.seed is not None:
        return _show(run_quietly(options.seed), history=True)
    total, failed = _Totals(), []
    began = reported = time.perf_counter()
    for outcome in _outcomes(options):
        total.add(outcome)
        if outcome.violations:
            failed.append(outcome)
            print(f"seed {outcome.seed}: {outcome.violations[0]}", flush=True)
            if len(failed) >= options.failures:
                break
        if time.perf_counter() - reported > _REPORT_S:
            reported = time.perf_counter()
            print(total.line(reported - began), file=sys.stderr, flush=True)
    print(total.table(time.perf_counter() - began))
    if not failed:
        return 0
    print(f"\nThe shortest plan of faults for seed {failed[0].seed}:")
    return _show(shrink(failed[0]), history=options.history)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m crosswire.testing.simulation",
        description="Run hubs, clients and faults in virtual time, deterministically by seed.",
    )
    parser.add_argument("--seeds", type=int, default=100, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=1, help="the first (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="stop after this time, whatever --seeds")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--failures", type=int, default=1, help="stop after this many failed seeds")
    parser.add_argument("--seed", type=int, help="run one seed and print its history")
    parser.add_argument("--history", action="store_true", help="print the history of a failed seed")
    return parser.parse_args(arguments)


def _outcomes(options: argparse.Namespace) -> Iterator[SeedOutcome]:
    seeds = range(options.first, options.first + options.seeds)
    ends_at = None if options.seconds is None else time.perf_counter() + options.seconds
    if options.jobs == 1:
        for seed in seeds:
            if ends_at is not None and time.perf_counter() > ends_at:
                return
            yield run_quietly(seed)
        return
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        # Not a function of this module: the processes don't import what was started with `-m`.
        for outcome in pool.imap_unordered(run_quietly, seeds, chunksize=4):
            yield outcome
            if ends_at is not None and time.perf_counter() > ends_at:
                return


class _Totals:
    def __init__(self) -> None:
        self.seeds = self.messages = self.acknowledged = self.violations = 0
        self.simulated_s = 0.0
        self.faults: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    def add(self, outcome: SeedOutcome) -> None:
        self.seeds += 1
        self.messages += outcome.messages
        self.acknowledged += outcome.acknowledged
        self.violations += bool(outcome.violations)
        self.simulated_s += outcome.simulated_s
        self.faults.update(outcome.faults)
        self.errors.update(outcome.errors)

    def line(self, seconds: float) -> str:
        """Progress."""
        hours = self.simulated_s / 3600
        return (
            f"{plural(self.seeds, 'seed')}, {hours:.1f} simulated hours in {seconds:.0f} s,"
            f" {plural(self.messages, 'message')}, {plural(self.violations, 'violation')}"
        )

    def table(self, seconds: float) -> str:
        """The whole result."""
        faults = "\n".join(
            f"  {kind:<16} {count:>8,}" for kind, count in sorted(self.faults.items())
        )
        errors = "\n".join(
            f"  {kind:<16} {count:>8,}" for kind, count in sorted(self.errors.items())
        )
        return (
            f"{self.line(seconds)}, {self.acknowledged:,} acknowledged\n"
            f"faults:\n{faults}\nerrors that programs got:\n{errors}"
        )


def _show(outcome: SeedOutcome, *, history: bool) -> int:
    for fault in outcome.plan:
        print(f"  {fault}")
    if history:
        print("\n".join(outcome.history))
    for violation in outcome.violations:
        print(f"violation: {violation}")
    print(f"replay: python -m crosswire.testing.simulation --seed {outcome.seed}")
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
