"""All campaigns."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final

from crosswire.testing.simulation.scenario import run_seed
from tests.campaigns import real_hubs
from tests.campaigns.real_simulation import run_real_seeds
from tests.campaigns.runner import Campaign, Findings
from tests.fuzz.__main__ import fuzz_decoder, targets
from tests.store.crash import crash

__all__ = ["CAMPAIGNS"]

_CORPORA: Final = Path(__file__).parents[2] / "build" / "fuzz"


def _on_loop(
    run: Callable[[Path, int, int], Coroutine[Any, Any, Findings]],
) -> Callable[[Path, int, int], Findings]:
    return partial(_run_on_loop, run)


def _run_on_loop(
    run: Callable[[Path, int, int], Coroutine[Any, Any, Findings]],
    folder: Path,
    rounds: int,
    seed: int,
) -> Findings:
    return asyncio.run(run(folder, rounds, seed))


def simulate(_folder: Path, rounds: int, seed: int) -> Findings:
    """Seeds of the simulator: parts have a thousand seeds' room each."""
    logging.disable(logging.CRITICAL)
    findings = Findings()
    hours = 0.0
    for number in range(seed * 1000, seed * 1000 + rounds):
        outcome = run_seed(number)
        findings.rounds += 1
        findings.attempted += outcome.messages
        findings.acknowledged += outcome.acknowledged
        findings.add("faults", sum(outcome.faults.values()))
        hours += outcome.simulated_s / 3600
        if outcome.violations:
            findings.wrong += 1
            findings.details[f"seed {number}"] = outcome.violations[0][:200]
    findings.details["simulated hours"] = round(hours, 1)
    return findings


def cut_power(folder: Path, rounds: int, seed: int) -> Findings:
    """A hub on a real store loses what its log files had after their last sync."""
    tally = crash(rounds, seed, power=True, directory=folder)
    return Findings(
        rounds=tally.rounds,
        attempted=tally.attempted,
        acknowledged=tally.acknowledged,
        lost=tally.lost,
        returned=tally.returned,
        wrong=tally.duplicated + tally.reused_ids,
    )


def damage_files(_folder: Path, rounds: int, seed: int) -> Findings:
    """Bits are flipped, pieces and whole files lost, in every kind of file of stopped hubs."""
    command = [sys.executable, "-m", "tests.store.damage", f"--cases={rounds}", f"--seed={seed}"]
    done = subprocess.run([*command, "--jobs=1", "--json"], capture_output=True, text=True)
    if not done.stdout:
        raise RuntimeError(f"nothing was judged: {done.stderr[-1000:]}")
    result = json.loads(done.stdout)
    findings = Findings(rounds=result["cases"], wrong=len(result["failing"]))
    for line in result["failing"]:
        case, _, what = line.partition(" ")
        findings.details[f"case {case}"] = what[:200]
    for outcome, count in sorted(result["outcomes"].items()):
        findings.add(outcome, count)
    findings.add("missing and reported", result["missing"])
    findings.add("undetectable", len(result["undetectable"]))
    return findings


def fuzz(_folder: Path, rounds: int, seed: int) -> Findings:
    """Inputs for each decoder; a round is an input.

    One in 40 is guided by coverage, which costs ten times as much. The others are mutated from what
    those have found, in this part and in earlier ones.
    """
    findings = Findings()
    names = targets()
    each = rounds // len(names)
    for name, role in names:
        corpus = _CORPORA / f"{name}-{role}"
        for guided, runs in ((True, each // 40), (False, each - each // 40)):
            flags = (f"-runs={runs}", f"-seed={seed}")
            outcome = fuzz_decoder(name, role, corpus, *flags, guided=guided)
            findings.rounds += outcome.executed
            findings.add(f"{name} {role}", outcome.executed)
            if outcome.failure:
                findings.wrong += 1
                print(outcome.failure, flush=True)
    return findings


CAMPAIGNS: Final = (
    Campaign("simulation", "seeds of the simulator", 10_000, 50, simulate),
    Campaign("real hubs", "plans of faults for real hubs", 500, 20, _on_loop(run_real_seeds)),
    Campaign("kills", "SIGKILL under load, and a start", 1000, 50, _on_loop(real_hubs.kill_hubs)),
    Campaign("power", "loss of what was not synced", 200, 25, cut_power),
    Campaign("disk errors", "failing writes and syncs", 200, 25, _on_loop(real_hubs.fail_disks)),
    Campaign("full disks", "a file system without room", 100, 20, _on_loop(real_hubs.fill_disks)),
    Campaign("damage", "damaged and lost files", 1000, 100, damage_files),
    Campaign("clocks", "jumps of the wall clock", 200, 50, _on_loop(real_hubs.cut_clocks)),
    Campaign(
        "garbage", "connections that send garbage", 10_000, 2500, _on_loop(real_hubs.send_garbage)
    ),
    Campaign("churn", "clients that come and go", 5000, 1000, _on_loop(real_hubs.open_and_close)),
    Campaign("soak", "seconds of steady load", 3600, 3600, _on_loop(real_hubs.soak)),
    Campaign("fuzz", "inputs for the ten decoders", 100_000_000, 4_000_000, fuzz),
)
