"""Very large inputs: many connections, a long one, doubled ones; time, rate and memory.

    python benchmarks/large.py [--only many one twice] [--tables] [--folder DIR] [--keep]
    python benchmarks/large.py --connections 10_000_000 --gigabytes 10 --doubled 4

    many    connections of 1 KB, of all protocols, against the same bytes in ten
    one     a single connection
    twice   three inputs, each twice as large as the one before, up to `--doubled` gigabytes

Each is read from the files of a tap to silver.frames, which are counted and dropped. `--tables`
adds a whole `crosswire pipeline run`, with all its tables on disk. Wrong numbers of frames, of
directions or of bytes, and any violation, end the benchmark with an error. CPU seconds of
Java and Python together are in brackets. Memory is the peak of any one Python worker, of Java, and
of the driver, which for frames is the benchmark itself, including the block that its input is made
of.

The input is made first, in `--folder`, and removed again; ten million connections take 11 GB, and
their tables some 40 GB beside it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from from_tests import Counted, Repeated, long_connections, many_connections
from measure import Cost, Memory, costs
from pyspark.sql import Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.pipeline.decode.row_schema import DIRECTIONS, FRAMES, TABLE, VIOLATIONS
from crosswire.pipeline.sources.decoded import decode_tap
from crosswire.pipeline.spark import start
from crosswire.pipeline.tables.frames import frames
from crosswire.testing.traffic import SampleTraffic
from crosswire.wire import PROTOCOL_NAMES

PARTS = ("many", "one", "twice")
BLOCK_CONNECTIONS = 20_000
BLOCK_BYTES = 16_000_000
MESSAGE_BYTES = 560
INPUT_RATIO = 1.2
"""Disk space for the input, per byte of it."""
TABLES_RATIO = 5.0
"""Disk space for its tables and for Spark's temporary files."""


@dataclass(frozen=True)
class Setting:
    spark: SparkSession
    folder: Path
    rounds: int
    tables: bool
    keep: bool


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def long_traffic(names: tuple[str, ...], connections: int) -> Repeated:
    messages = round(BLOCK_BYTES / connections / MESSAGE_BYTES)
    return long_connections(
        SampleTraffic(protocols=names, connections=connections, messages=messages)
    )


@contextmanager
def lake_of(setting: Setting, name: str, made: Repeated, times: int) -> Iterator[Path]:
    """A lake with this input, for the duration of the block."""
    size = made.size_bytes(times)
    needed = size * (INPUT_RATIO + TABLES_RATIO * setting.tables)
    free = shutil.disk_usage(setting.folder).free
    if free < needed:
        raise SystemExit(
            f"{name} needs {needed / 1e9:.1f} GB in {setting.folder}, which has {free / 1e9:.1f}"
        )
    lake = setting.folder / f"{name}-{size}"
    complete = lake / "complete"
    if not complete.exists():
        shutil.rmtree(lake, ignore_errors=True)
        for written in made.write(lake, times):
            report(f"  {name}: {written / 1e9:.2f} of {size / 1e9:.2f} GB of input made")
        complete.touch()
    try:
        yield lake
    finally:
        if not setting.keep:
            shutil.rmtree(lake)


def check(found: Counted, expected: Counted) -> None:
    if found != expected or found.violations:
        raise SystemExit(f"{found}, expected {expected}")


def read(spark: SparkSession, lake: Path, expected: Counted) -> None:
    """Read a lake to silver.frames, and check the counts."""
    counted = Observation()
    table = F.col(TABLE)
    size = F.when(table == DIRECTIONS, F.col("length")).otherwise(0)
    decoded = decode_tap(spark, [str(lake / "wire")], payloads=False).observe(
        counted,
        *(F.count_if(table == name).alias(name) for name in (FRAMES, VIOLATIONS, DIRECTIONS)),
        F.sum(size).alias("bytes"),
    )
    frames(decoded).write.format("noop").mode("overwrite").save()
    check(Counted(**counted.get), expected)


def measure(setting: Setting, name: str, made: Repeated, times: int) -> Cost:
    """Print the cost of reading the input and, with `--tables`, of making all tables."""
    size = made.size_bytes(times)
    report(f"  {name}: computing the expected counts …")
    expected = made.expected(times)
    with lake_of(setting, name, made, times) as lake:
        report(f"  {name}: reading {size / 1e9:.2f} GB to frames …")
        with Memory() as memory:
            work = partial(read, setting.spark, lake, expected)
            (cost,) = costs(work, rounds=setting.rounds, warm_up=False)
        write_line(name, cost.clock, f"({cost.processor:.1f} s)", size, memory)
        if setting.tables:
            report(f"  {name}: all tables of {size / 1e9:.2f} GB …")
            write_tables(setting, name, lake, expected, made.connections(times))
    return cost


def write_tables(
    setting: Setting, name: str, lake: Path, expected: Counted, connections: int
) -> None:
    """With the command `crosswire pipeline run`."""
    output = setting.folder / f"{name}-tables"
    command = [str(Path(sys.executable).with_name("crosswire")), "pipeline", "run", "--json"]
    command += ["--input", str(lake), "--output", str(output)]
    command += ["--conf", f"spark.local.dir={setting.folder}"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        with Memory(program.pid) as memory:
            output_text, _ = program.communicate()
        if program.returncode:
            raise SystemExit(f"crosswire pipeline run ended with {program.returncode}")
        summary = json.loads(output_text)
        size = check_tables(summary, expected, connections)
        write_line(f"{name}, tables", summary["seconds"], "", size, memory)
    finally:
        if program.poll() is None:
            program.terminate()
            program.wait()
        if not setting.keep:
            shutil.rmtree(output, ignore_errors=True)


def check_tables(summary: dict[str, Any], expected: Counted, connections: int) -> int:
    """Check the summary; returns the number of bytes decoded."""
    rows = summary["tables"]
    size: int = sum(each["seen"] for each in summary["accounting"])
    frame_rows, violations, directions = (
        rows[f"silver.{name}"] for name in (FRAMES, VIOLATIONS, DIRECTIONS)
    )
    check(Counted(frame_rows, violations, directions, size), expected)
    if rows["gold.sessions"] != connections:
        raise SystemExit(f"{rows['gold.sessions']} sessions of {connections} connections")
    return size


def write_line(name: str, clock: float, cpu: str, size: int, memory: Memory) -> None:
    rate = f"{size / clock / 1e6:8.1f} MB/s"
    print(f"  {name:<16}{clock:9.1f} s {cpu:>11} {rate}   {memory}", flush=True)


# ----------------------------------------------------------------------------------------- parts


def measure_many(setting: Setting, connections: int) -> None:
    block = many_connections(
        SampleTraffic(connections=min(BLOCK_CONNECTIONS, connections), messages=1)
    )
    times = max(round(connections / block.connections(1)), 1)
    size = block.size_bytes(times)
    print(f"\n{block.connections(times):,} connections and ten, {size / 1e9:.2f} GB each")
    many = measure(setting, "many", block, times)
    ten = long_traffic(PROTOCOL_NAMES, 10)
    ten_times = ten.times_for(size)
    few = measure(setting, "ten", ten, ten_times)
    share = ten.size_bytes(ten_times) / size
    print(f"  many is {many(Cost(few.clock / share, few.processor / share))} ten")


def measure_one(setting: Setting, gigabytes: float, name: str) -> None:
    block = long_traffic((name,), 1)
    times = block.times_for(gigabytes * 1e9)
    print(f"\none connection of {name}, {block.size_bytes(times) / 1e9:.2f} GB")
    measure(setting, "one", block, times)


def measure_twice(setting: Setting, gigabytes: float) -> None:
    block = long_traffic(PROTOCOL_NAMES, 20)
    print("\ntwice the input, all protocols in 20 connections")
    before: Cost | None = None
    once = block.times_for(gigabytes * 1e9 / 4)
    for factor in (1, 2, 4):
        size = block.size_bytes(once * factor)
        cost = measure(setting, f"{size / 1e9:.2f} GB", block, once * factor)
        if before is not None:
            print(f"  {cost(before)} half of it", flush=True)
        before = cost


def warm_up(setting: Setting) -> None:
    """Compile the scanners, which happens once."""
    block = long_traffic(PROTOCOL_NAMES, 10)
    expected = block.expected(2)
    with lake_of(setting, "warm-up", block, 2) as lake:
        for _ in range(2):
            read(setting.spark, lake, expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--connections", type=int, default=200_000, help="connections of `many`")
    parser.add_argument("--gigabytes", type=float, default=0.5, help="of one")
    parser.add_argument("--doubled", type=float, default=0.8, help="gigabytes that twice ends with")
    parser.add_argument("--protocol", choices=PROTOCOL_NAMES, default="emp", help="of one")
    parser.add_argument("--rounds", type=int, default=1, help="number of rounds; the best counts")
    parser.add_argument("--tables", action="store_true", help="make all tables, too")
    parser.add_argument("--folder", type=Path, help="folder for the input")
    parser.add_argument("--keep", action="store_true", help="keep the input for the next run")
    options = parser.parse_args()
    if options.keep and options.folder is None:
        parser.error("--keep needs a --folder")
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    # SIGTERM runs the blocks that end processes and remove folders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    measures: dict[str, Callable[[Setting], None]] = {
        "many": partial(measure_many, connections=options.connections),
        "one": partial(measure_one, gigabytes=options.gigabytes, name=options.protocol),
        "twice": partial(measure_twice, gigabytes=options.doubled),
    }
    with tempfile.TemporaryDirectory(prefix="crosswire-bench-", dir=options.folder) as folder:
        kept = options.folder if options.keep else Path(folder)
        spark = start("local[*]", {"spark.local.dir": folder}, name="benchmark")
        setting = Setting(spark, kept, options.rounds, options.tables, options.keep)
        try:
            report("  warming up …")
            warm_up(setting)
            for name in options.only:
                measures[name](setting)
        finally:
            spark.stop()


if __name__ == "__main__":
    main()
