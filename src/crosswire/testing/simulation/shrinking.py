"""Leaves out faults of a failing seed, for as long as it still fails."""

from __future__ import annotations

from crosswire.testing.simulation.scenario import SeedOutcome, run_seed

__all__ = ["shrink"]


def shrink(outcome: SeedOutcome) -> SeedOutcome:
    """A run of the same seed with as few of its faults as show a violation.

    Halves of the plan are tried first, then quarters and so on, down to single faults.
    """
    best = outcome
    size = max(len(best.plan) // 2, 1)
    while best.plan:
        start, found = 0, False
        while start < len(best.plan):
            plan = best.plan[:start] + best.plan[start + size :]
            tried = run_seed(best.seed, plan)
            if tried.violations:
                best, found = tried, True
            else:
                start += size
        if size == 1 and not found:
            break
        size = max(size // 2, 1)
    return best
