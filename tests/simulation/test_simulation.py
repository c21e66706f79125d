"""The simulator itself: it is deterministic, its network behaves, and it finds what it should."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from crosswire.commitlog.contract import CommitGroup
from crosswire.commitlog.local import LocalLog
from crosswire.testing.simulation.faults import Fault
from crosswire.testing.simulation.scenario import run_seed
from crosswire.testing.simulation.shrinking import shrink

DIGEST = """
import hashlib, logging
logging.disable(logging.CRITICAL)
from crosswire.testing.simulation.scenario import run_seed
outcome = run_seed(8)
print(outcome.turns, outcome.messages, outcome.simulated_s, outcome.violations)
print("\\n".join(outcome.history))
"""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Programs and hubs log what the faults do to them."""
    with caplog.at_level("CRITICAL"):
        yield


def test_a_seed_does_the_same_in_every_process() -> None:
    outputs = set()
    for hash_seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    assert len(outputs) == 1


@pytest.mark.parametrize("seed", range(1, 13))
def test_seeds_keep_all_invariants(seed: int) -> None:
    outcome = run_seed(seed)
    assert outcome.violations == []
    assert outcome.acknowledged > 0


def test_without_faults_everything_is_acknowledged() -> None:
    outcome = run_seed(2, [])
    assert outcome.violations == []
    assert outcome.errors == {}
    assert outcome.acknowledged == outcome.messages


def test_a_failing_seed_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that are acknowledged without a sync: only a power cut shows it."""
    append = LocalLog.append

    def unsynced(self: LocalLog, group: CommitGroup, *, blocking: bool = False) -> object:
        group.sync = False
        return append(self, group, blocking=blocking)

    monkeypatch.setattr(LocalLog, "append", unsynced)
    plan = [
        Fault("slow network", 2.0, 0.5, 0.5),
        Fault("power cut", 4.0, 0.5, 0.5),
        Fault("cut connections", 6.0, 0.5, 0.5),
        Fault("pause", 8.0, 0.5, 0.5),
    ]
    failed = next(outcome for seed in range(1, 40) if (outcome := run_seed(seed, plan)).violations)
    left = shrink(failed).plan
    assert len(left) < len(plan)
    # Another fault may be left: it can move the one moment in which the cut does harm.
    assert "power cut" in [fault.kind for fault in left]
