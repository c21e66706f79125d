"""Fuzz every protocol, one process each, for a given time in all: `python -m tests.fuzz`."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from crosswire.wire import PROTOCOL_NAMES, protocol
from tests.wire.vectors import load

_EXECUTED: Final = re.compile(r"stat::number_of_executed_units:\s+(\d+)")
_SHOWN: Final = 3000
"""Characters of a failing process's output that are shown: its end has the traceback."""


class FuzzOutcome(NamedTuple):
    """How many inputs a decoder got; `failure` is empty, or has the end of what was printed and
    the input that is to blame, in hex."""

    executed: int
    failure: str


def targets() -> list[tuple[str, str]]:
    """Who opens a connection and who accepts it, of every protocol."""
    return [
        (name, role)
        for name in PROTOCOL_NAMES
        for role in (protocol(name).roles[0], protocol(name).roles[-1])
    ]


def fuzz_decoder(
    name: str, role: str, corpus: Path, *flags: str, guided: bool = True
) -> FuzzOutcome:
    """Run one process, with libFuzzer's `flags`, from what `corpus` has and recorded bytes.

    If it is guided by coverage, inputs that reached new code are added to the corpus. If not, those
    in it are mutated without looking what they reach.
    """
    corpus.mkdir(parents=True, exist_ok=True)
    _write_recorded(corpus, name)
    mode = "guided" if guided else "unguided"
    command = [sys.executable, "-m", "tests.fuzz.target", name, role, mode, *flags]
    with tempfile.TemporaryDirectory() as found:
        options = ["-print_final_stats=1", "-verbosity=0", f"-artifact_prefix={found}/"]
        if not guided:
            options.append("-keep_seed=1")  # or all but one would be dropped: none reaches new code
        done = subprocess.run([*command, *options, str(corpus)], capture_output=True, text=True)
        inputs = [f"input: {path.read_bytes().hex()}" for path in Path(found).iterdir()]
    executed = _EXECUTED.search(done.stderr)
    failure = "\n".join([done.stderr[-_SHOWN:], *inputs]) if done.returncode else ""
    return FuzzOutcome(int(executed[1]) if executed else 0, failure)


def _write_recorded(folder: Path, name: str) -> None:
    """Recorded bytes to start from, as a capture and as what a peer sends."""
    recorded = load("zmtp" if name == "emqp" else name)
    for number, vector in enumerate(recorded):
        for how in (0, 1, 2, 3):
            recording = folder / f"{number}-{how}"
            recording.write_bytes(bytes([how]) + bytes.fromhex(vector["wire"])[:4096])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="time in all (default 300)")
    options = parser.parse_args()
    chosen = targets()
    if options.seconds < len(chosen):
        chosen = chosen[1::2]  # no second for each: those who accept connections, as a hub does
    each = max(1, round(options.seconds / len(chosen)))
    is_good = True
    for name, role in chosen:
        with tempfile.TemporaryDirectory() as folder:
            outcome = fuzz_decoder(name, role, Path(folder), f"-max_total_time={each}")
        is_good &= not outcome.failure
        print(f"{name} {role}: {'FAILED' if outcome.failure else 'ok'}, {each} s", flush=True)
        if outcome.failure:
            print(outcome.failure, file=sys.stderr)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
