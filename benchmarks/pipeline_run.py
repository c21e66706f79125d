"""How long `crosswire pipeline run` takes, from the start of the program to its end, step by step.

    python benchmarks/pipeline_run.py [--only demo pcap large] [--rounds 3]
    python benchmarks/pipeline_run.py --only demo --lake FOLDER --conf KEY=VALUE

    demo    all tables of the lake that `crosswire demo` makes: a few megabytes, in which the fixed
            costs of Spark are nearly all
    pcap    silver.frames of a capture of 89 MB
    large   all tables of a tap of 465 MB

Each round is a process of its own. A figure is the range over the rounds; the steps are those of
the fastest round, and add up to its duration.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosswire.testing.traffic import SampleTraffic, packets, write_pcap

CROSSWIRE = str(Path(sys.executable).with_name("crosswire"))
PCAP_BYTES, LARGE_BYTES = 89_000_000, 465_000_000
PCAP_MESSAGE_BYTES, WIRE_MESSAGE_BYTES = 1061, 866
"""What a message of the sample takes, with what answers it: in a capture, and on the wire."""
GOALS_S = {"demo": 25, "pcap": 12, "large": 35}


@dataclass(frozen=True)
class Round:
    seconds: float
    steps: dict[str, float]
    frames: int
    size_bytes: int


def traffic(messages: float) -> SampleTraffic:
    return SampleTraffic(connections=100, messages=round(messages / 100))


def make_demo(folder: Path) -> Path:
    """The lake of a demo; it ends with an exit code if a message was lost."""
    command = [CROSSWIRE, "demo", "--no-pipeline", "--json", "--data", str(folder / "demo")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "demo"


def make_pcap(folder: Path) -> Path:
    made = traffic(PCAP_BYTES / PCAP_MESSAGE_BYTES)
    records = [each for talk in made.conversations() for each in packets(talk)]
    records.sort(key=lambda record: record[0])
    write_pcap(folder / "sample.pcap", records)
    return folder / "sample.pcap"


def make_large(folder: Path) -> Path:
    traffic(LARGE_BYTES / WIRE_MESSAGE_BYTES).write_tap(folder / "lake")
    return folder / "lake"


def run(source: Path, folder: Path, more: list[str]) -> Round:
    output = folder / "tables"
    command = [CROSSWIRE, "pipeline", "run", "--json", "--input", str(source)]
    start = time.monotonic()
    done = subprocess.run(
        [*command, "--output", str(output), *more], check=True, stdout=subprocess.PIPE
    )
    seconds = time.monotonic() - start
    shutil.rmtree(output)
    summary: dict[str, Any] = json.loads(done.stdout)
    size_bytes = sum(each["seen"] for each in summary["accounting"])
    return Round(seconds, summary["steps"], summary["tables"]["silver.frames"], size_bytes)


def show(name: str, rounds: list[Round], *, with_steps: bool) -> None:
    taken = [each.seconds for each in rounds]
    best = min(rounds, key=lambda each: each.seconds)
    between = f"{min(taken):.1f} … {max(taken):.1f} s"
    print(f"\n{name}: {best.size_bytes / 1e6:.1f} MB of traffic, {best.frames:,} frames")
    print(f"  in all                   {between}   goal {GOALS_S[name]} s", flush=True)
    if with_steps:
        for step, seconds in best.steps.items():
            print(f"    {step:<22} {seconds:6.1f} s", flush=True)
        rest = best.seconds - sum(best.steps.values())
        print(f"    {'in no step':<22} {rest:6.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", choices=GOALS_S, default=tuple(GOALS_S))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lake", type=Path, help="read this lake as that of the demo")
    parser.add_argument("--conf", action="append", default=[], help="a setting for Spark")
    parser.add_argument("--no-steps", action="store_true", help="leave the steps out")
    options = parser.parse_args()
    settings = [each for setting in options.conf for each in ("--conf", setting)]
    print(f"{os.cpu_count()} cores", flush=True)
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="crosswire-bench-") as made:
            folder = Path(made)
            if name == "demo":
                source = options.lake or make_demo(folder)
            else:
                source = make_pcap(folder) if name == "pcap" else make_large(folder)
            more = ["--tables", "frames"] if name == "pcap" else []
            rounds = [run(source, folder, [*more, *settings]) for _ in range(options.rounds)]
            show(name, rounds, with_steps=not options.no_steps)


if __name__ == "__main__":
    main()
