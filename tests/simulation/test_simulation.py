"""The simulator itself: it is deterministic, its network behaves, and it finds what it should."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from crosswire.server.server import Server
from crosswire.testing.simulation.faults import Fault
from crosswire.testing.simulation.scenario import run_seed
from crosswire.testing.simulation.shrinking import shrink
from crosswire.testing.simulation.world import World
from tests.simulation.bugs import BUGS, plant
from tests.simulation.found import FOUND, FoundBug

FEW, MORE, MANY = range(1, 13), range(13, 101), range(101, 500)
"""About a minute of the simulator in all tests but the long ones. Always the same seeds: a change
that breaks one of them is found by whoever makes it. Others are for long runs."""
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


def test_several_processes_share_the_seeds() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "crosswire.testing.simulation", "--seeds", "2", "--jobs", "2"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 seeds")


@pytest.mark.parametrize(
    "seed",
    [
        *FEW,
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in MORE),
        *(pytest.param(seed, marks=pytest.mark.long) for seed in MANY),
    ],
)
def test_seeds_keep_all_invariants(seed: int) -> None:
    outcome = run_seed(seed)
    assert outcome.violations == []
    assert outcome.messages > 0


def test_without_faults_everything_is_acknowledged() -> None:
    outcome = run_seed(2, [])
    assert outcome.violations == []
    assert outcome.errors == {}
    assert outcome.acknowledged == outcome.messages


def test_a_failing_seed_is_shrunk() -> None:
    """Errors of syncs that are ignored: what is acknowledged then is not durable."""
    plan = [
        Fault("slow network", 1.0, 0.5, 0.5),
        Fault("sync error", 2.0, 3.0, 0.9),
        Fault("power cut", 3.0, 1.0, 0.5),
    ]
    with plant(next(bug for bug in BUGS if bug.name == "swallow a sync error")):
        failed = run_seed(1, plan)
        assert failed.violations
        left = shrink(failed).plan
    assert [fault.kind for fault in left] == ["sync error"]


@pytest.mark.parametrize("found", FOUND, ids=lambda found: found.bug.name)
def test_what_was_found_stays_away(found: FoundBug) -> None:
    assert run_seed(found.seed, found.plan).violations == []
    with plant(found.bug):
        assert run_seed(found.seed, found.plan).violations


def test_a_replica_that_is_killed_before_its_first_record_starts_again() -> None:
    assert run_seed(3, [Fault("kill", 0.003, 0.5, 0.1)]).violations == []


def test_a_replica_that_is_asked_to_stop_while_it_starts_stops_afterwards() -> None:
    assert run_seed(3, [Fault("restart", 0.0005, 0.5, 0.5)]).violations == []


def test_a_hub_that_is_asked_twice_to_stop_stops_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `serve` does: the second signal ends the time that peers have."""
    asked: list[str] = []
    stop, hurry = Server.stop, Server.hurry

    async def note_stop(server: Server) -> None:
        asked.append("stop")
        await stop(server)

    def note_hurry(server: Server) -> None:
        asked.append("hurry")
        hurry(server)

    monkeypatch.setattr(Server, "stop", note_stop)
    monkeypatch.setattr(Server, "hurry", note_hurry)
    plan = [Fault("restart", at, 0.5, 0.5) for at in (3.0, 3.0005)]
    assert run_seed(1, plan).violations == []
    assert asked[:2] == ["stop", "hurry"]


def test_the_network_heals_one_link_at_a_time() -> None:
    network = World(1).network
    network.partition("a", "b")
    network.partition("a", "c")
    network.heal("a", "b")
    assert network.can_pass("a", "b") and not network.can_pass("c", "a")
