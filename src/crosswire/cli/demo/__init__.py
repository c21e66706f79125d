"""Run a hub with traffic in five protocols, kill it, count what was lost, and make a report."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

from crosswire.cli.demo.folder import DemoFolder, prepare
from crosswire.cli.demo.progress import DemoProgress
from crosswire.cli.demo.scene import Scene
from crosswire.cli.demo.traffic import DemoTraffic
from crosswire.cli.parsers import add_examples
from crosswire.cli.table import print_table
from crosswire.errors import PipelineError
from crosswire.plurals import plural

if TYPE_CHECKING:
    from crosswire.pipeline.report import Facts
    from crosswire.pipeline.summary import Summary

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    parser.add_argument(
        "--data",
        default="demo-data",
        metavar="DIR",
        help="folder for all files; one of an earlier demo is replaced (default: demo-data)",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=15.0,
        help="duration of the traffic (default: 15)",
    )
    parser.add_argument(
        "--no-pipeline", action="store_true", help="end after the count: no Spark, no report"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    add_examples(
        parser, "crosswire demo", "crosswire demo --no-pipeline --seconds 5 --data /tmp/demo"
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 1 to 3600")
    return seconds


def run(options: argparse.Namespace) -> int:
    """Run the demo; 1 if something acknowledged was lost. Raises CrosswireError."""
    start = time.monotonic()
    # SIGTERM ends Python at once; as KeyboardInterrupt it runs the blocks that end hub and Spark.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    progress = DemoProgress(quiet=options.json)
    if not options.no_pipeline:
        _check_spark()
    folder = prepare(Path(options.data))
    progress.line(
        "Crosswire: one hub, five protocols, real connections, a kill -9 in the middle.\n"
    )
    scenes = _run_traffic(folder, options.seconds, progress)
    if not options.json:
        _show(scenes, progress)
    lost = sum(len(scene.lost) for scene in scenes)
    summary, facts = None, None
    if not options.no_pipeline:
        summary, facts = _tables(folder, progress, quiet=options.json)
    seconds = time.monotonic() - start
    if options.json:
        print(msgspec.json.encode(_outcome(scenes, folder, summary, facts, seconds)).decode())
    else:
        _print_next_steps(folder, scenes, progress, with_report=facts is not None)
        progress.line(f"\nDone in {seconds:.0f} s.")
    return 1 if lost else 0


def _run_traffic(folder: DemoFolder, seconds: float, progress: DemoProgress) -> list[Scene]:
    traffic = DemoTraffic(folder, seconds, progress)
    try:
        uvloop.run(traffic.run())
    finally:
        traffic.abandon()
    return traffic.scenes


# The count.


def _show(scenes: list[Scene], progress: DemoProgress) -> None:
    progress.line("3  What was acknowledged, and what arrived\n")
    names = ("tried", "acknowledged", "arrived", "dead", "again", "lost")
    head = ("flow", *(f">{name}" for name in names), "and")
    rows = []
    for scene in scenes:
        outcome = scene.outcome()
        counts = [f"{outcome[name]:,}" for name in names]
        rows.append((scene.title, *counts, scene.remarks()))
    print_table(head, rows, indent=3)
    print(f"\n{_result(scenes)}", flush=True)


def _result(scenes: list[Scene]) -> str:
    acknowledged = sum(len(scene.acknowledged) for scene in scenes)
    lost = sum(len(scene.lost) for scene in scenes)
    dead = sum(len(scene.dead.keys() & scene.acknowledged) for scene in scenes)
    if lost:
        messages = plural(acknowledged, "acknowledged message")
        return f"LOST: {lost:,} of {messages} did not arrive."
    arrived = f"{acknowledged - dead:,} arrived, {plural(dead, 'dead letter')}"
    return f"Nothing acknowledged was lost: of {plural(acknowledged, 'message')} {arrived}."


# The tables.


def _check_spark() -> None:
    """Raises PipelineError if Spark or Java is missing: before the traffic, not after it."""
    try:
        from crosswire.pipeline.spark import java_home
    except ModuleNotFoundError as error:
        raise PipelineError(
            f"the demo's tables need {error.name}: pip install 'crosswire[spark]', or leave them "
            "out with --no-pipeline"
        ) from error
    try:
        java_home()
    except PipelineError as error:
        raise PipelineError(f"{error}; --no-pipeline leaves Spark out") from error


def _tables(folder: DemoFolder, progress: DemoProgress, *, quiet: bool) -> tuple[Summary, Facts]:
    from crosswire.cli.demo.figures import print_figures
    from crosswire.pipeline.batch import BatchJob, run_batch
    from crosswire.pipeline.progress import Progress
    from crosswire.pipeline.report import write_report
    from crosswire.pipeline.sources.inputs import find_inputs
    from crosswire.pipeline.spark import SMALL_INPUT, start

    progress.line("\n4  Spark decodes the tapped bytes into tables")
    times = Progress(quiet=quiet)
    batch = BatchJob(inputs=find_inputs([str(folder.folder)]), output=str(folder.tables))
    with times.step("starting Spark"):
        spark = start(conf=SMALL_INPUT)
    try:
        summary = run_batch(spark, batch, progress=times)
    finally:
        with times.step("stopping Spark"):
            spark.stop()
    progress.line(f"   {plural(summary.seen, 'byte')} decoded, all accounted for")
    facts = write_report(str(folder.tables), folder.report, made_us=time.time_ns() // 1000)
    if not quiet:
        print_figures(facts)
    return summary, facts


def _outcome(
    scenes: list[Scene],
    folder: DemoFolder,
    summary: Summary | None,
    facts: Facts | None,
    seconds: float,
) -> dict[str, Any]:
    outcome: dict[str, Any] = {
        "flows": {scene.title: scene.outcome() for scene in scenes},
        "acknowledged": sum(len(scene.acknowledged) for scene in scenes),
        "lost": sum(len(scene.lost) for scene in scenes),
        "data": str(folder.folder),
        "seconds": round(seconds, 3),
    }
    if summary is not None and facts is not None:
        outcome["tables"] = summary.rows
        outcome["findings"] = summary.findings
        outcome["report"] = str(folder.report)
    return outcome


# Commands to continue with.


def _print_next_steps(
    demo_folder: DemoFolder, scenes: list[Scene], progress: DemoProgress, *, with_report: bool
) -> None:
    if with_report:
        progress.line("\n5  The report, one HTML page with all figures and plots:")
        print(f"   {demo_folder.report}", flush=True)
    me, folder = _program(), shlex.quote(str(demo_folder.folder))
    dead_letters = [number for scene in scenes for number in scene.dead.values()]
    commands = [
        (f"{me} serve --config {folder}/crosswire.toml &", "start this hub again"),
        (f"{me} dead list orders", "orders that could not be shipped"),
        *((f"{me} trace {number}", "every step of one of them") for number in dead_letters[:1]),
        (f"{me} lake list --data {folder}", "the Parquet files, for Spark or DuckDB"),
    ]
    wide = max(len(command) for command, _ in commands)
    progress.line("\nTo continue:")
    for command, what in commands:
        progress.line(f"   {command:<{wide}}  # {what}")


def _program() -> str:
    """The command that starts this program from the current folder."""
    own = Path(sys.argv[0]).absolute()
    found = shutil.which("crosswire")
    if found is not None and Path(found).resolve() == own.resolve():
        return "crosswire"
    if own.name != "crosswire":
        return f"{shlex.quote(sys.executable)} -m crosswire.cli.main"
    near = os.path.relpath(own)
    return shlex.quote(near if len(near) < len(str(own)) else str(own))
