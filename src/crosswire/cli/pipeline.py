"""Decode captured traffic into tables, on Spark."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from crosswire.cli.parsers import add_action, add_actions
from crosswire.cli.table import print_table
from crosswire.cli.times import AGO, time_of
from crosswire.errors import InvalidInput, PipelineError
from crosswire.pipeline.progress import Progress, process_start
from crosswire.pipeline.tables.names import NAMES
from crosswire.pipeline.tables.views import DIALECTS, view_statements
from crosswire.plurals import plural
from crosswire.wire import PROTOCOL_NAMES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from crosswire.pipeline.sources.inputs import Inputs
    from crosswire.pipeline.stream.run import BatchBegun, BatchDone, Stream
    from crosswire.pipeline.summary import Summary

__all__ = ["configure", "is_small_input", "run"]

_SMALL_BYTES: Final = 8 << 20
_MEDIUM_BYTES: Final = 512 << 20

PORT_PROTOCOLS = (*PROTOCOL_NAMES, "tls")


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    actions = add_actions(parser)
    one = add_action(
        actions,
        "run",
        "read the input, write the tables",
        "crosswire pipeline run --input capture.pcap --output tables",
        "crosswire pipeline run --input crosswire-data/lake --output tables --stream",
        "crosswire pipeline run --input captures --output tables --since 12h --port 9000=emp",
    )
    one.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="capture files, folders of them, or the lake of a hub",
    )
    one.add_argument("--output", required=True, metavar="DIR", help="folder for the tables")
    one.add_argument(
        "--tables",
        nargs="+",
        default=[],
        choices=NAMES,
        metavar="NAME",
        help=f"only these: {', '.join(NAMES)} (default: all)",
    )
    one.add_argument(
        "--since",
        type=_since,
        default=("", 0),
        metavar="TIME",
        help=f"leave out older traffic: {AGO}",
    )
    one.add_argument(
        "--port",
        action="append",
        type=_port,
        default=[],
        metavar="PORT=PROTOCOL",
        help="the protocol of a port (default: by port number, else detected from the bytes)",
    )
    one.add_argument(
        "--late",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="a message is late if it takes longer to be settled (default: 5)",
    )
    one.add_argument(
        "--skip-damaged",
        action="store_true",
        help="leave out files that are damaged, doubled or unknown, and report them, "
        "instead of ending with an error",
    )
    how = one.add_mutually_exclusive_group()
    how.add_argument(
        "--once",
        action="store_true",
        help="process the input that is new since the last run, add it to the tables, and end",
    )
    how.add_argument(
        "--stream",
        action="store_true",
        help="like --once, then wait for more input, until SIGINT or SIGTERM",
    )
    one.add_argument(
        "--master",
        metavar="URL",
        help="the Spark master (default: that of spark-submit, else local[*])",
    )
    one.add_argument(
        "--conf",
        action="append",
        type=_setting,
        default=[],
        metavar="KEY=VALUE",
        help="a setting for Spark",
    )
    one.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    views = add_action(
        actions,
        "views",
        "print SQL that makes the tables known to an engine",
        "crosswire pipeline views tables > views.sql",
    )
    views.add_argument("output", metavar="DIR", help="folder of the tables")
    views.add_argument(
        "--dialect", choices=DIALECTS, default=DIALECTS[0], help="the engine (default: duckdb)"
    )


def _since(text: str) -> tuple[str, int]:
    """The text, and what it stands for now: microseconds since 1970. Raises ArgumentTypeError."""
    return text, round(time_of(text).timestamp() * 1e6)


def _port(text: str) -> tuple[int, str]:
    port, _, name = text.partition("=")
    if not port.isdigit() or not 0 < int(port) < 65536 or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not PORT=PROTOCOL")
    if name not in PORT_PROTOCOLS:
        names = ", ".join(PORT_PROTOCOLS)
        raise argparse.ArgumentTypeError(f"there is no protocol {name!r}; there are {names}")
    return int(port), name


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key.startswith("spark.") or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not a Spark setting KEY=VALUE")
    return key, value


def run(options: argparse.Namespace) -> int:
    """Write the tables and print the summary, or print the views. Raises PipelineError."""
    progress = Progress(quiet=options.json, start=process_start())
    if options.action == "views":
        _print_views(options.output, options.dialect)
        return 0
    try:
        from crosswire.pipeline.batch import BatchJob, run_batch
        from crosswire.pipeline.sources.inputs import find_inputs, search
        from crosswire.pipeline.spark import MEDIUM_INPUT, SMALL_INPUT, default_master, start
        from crosswire.pipeline.stream.run import Stream
    except ModuleNotFoundError as error:
        raise PipelineError(
            f"the pipeline needs {error.name}: pip install 'crosswire[spark]'"
        ) from error
    is_stream = options.once or options.stream
    # Until the stream handles them itself, at the end of Spark's start: both end it at once.
    signal.signal(signal.SIGTERM, _interrupt)
    if is_stream and options.skip_damaged:
        raise InvalidInput(
            "a stream skips nothing: without --once and --stream, --skip-damaged leaves out what "
            "is damaged"
        )
    if not is_stream:
        progress.end("loading the program")
    batch = BatchJob(
        inputs=search(options.input) if is_stream else find_inputs(options.input),
        output=options.output,
        tables=frozenset(options.tables),
        since_us=options.since[1],
        ports=dict(options.port),
        late_us=round(options.late * 1e6),
        skip_damaged=options.skip_damaged,
    )
    master = options.master or default_master()
    if not options.json:
        print(f"Starting Spark ({master}) …", file=sys.stderr)
    # A stream may go on for long: what it will read is not known.
    settings: dict[str, str] = {}
    if not is_stream and master.startswith("local"):
        if is_small_input(batch.inputs):
            settings = SMALL_INPUT
        elif is_small_input(batch.inputs, most_bytes=_MEDIUM_BYTES):
            settings = MEDIUM_INPUT
    spark = start(master, settings | dict(options.conf))
    if not is_stream:
        progress.end("starting Spark")
    try:
        if is_stream:
            stream = Stream(
                paths=tuple(options.input),
                output=batch.output,
                once=options.once,
                tables=batch.tables,
                since_us=batch.since_us,
                since=options.since[0],
                ports=batch.ports,
                late_us=batch.late_us,
            )
            summary = _follow(spark, stream, quiet=options.json)
        else:
            summary = run_batch(spark, batch, progress=progress)
    finally:
        spark.stop()
    if not is_stream:
        progress.end("stopping Spark")
        summary = replace(
            summary, seconds=sum(progress.seconds.values()), steps=dict(progress.seconds)
        )
    _print(summary, as_json=options.json)
    return 0


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """SIGTERM ends it as SIGINT does, also where that is ignored: a shell starts programs so that
    it runs in the background. Spark's own handler cancels its jobs first."""
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(signal.SIGINT, frame)
    raise KeyboardInterrupt


def is_small_input(inputs: Inputs, *, most_bytes: int = _SMALL_BYTES) -> bool:
    """Whether all of it is on this machine and has at most `most_bytes`; by default so few that
    Spark would spend most of the time on its preparations."""
    size_bytes = 0
    for path in (*inputs.captures, *inputs.taps, *inputs.messages, *inputs.ledgers):
        if "://" in path:
            return False
        for file in [Path(path)] if Path(path).is_file() else Path(path).rglob("*"):
            with suppress(FileNotFoundError):  # compacted since it was listed
                size_bytes += file.stat().st_size
            if size_bytes > most_bytes:
                return False
    return True


def _print_views(folder: str, dialect: str) -> None:
    # Imported here: it loads Arrow, which other uses of the command line do without.
    from crosswire.pipeline.report.table_reader import ReportTables
    from crosswire.pipeline.visible_tables import VisibleTables

    names, tables = ReportTables(folder).names, VisibleTables(folder)
    for statement in view_statements(dialect, {name: tables.paths(name) for name in names}):
        print(f"{statement};")


def _follow(spark: SparkSession, stream: Stream, *, quiet: bool) -> Summary:
    """Run the stream. The first signal cancels the current batch, the second ends it at once."""
    from crosswire.pipeline.stream.run import run_stream

    stop = threading.Event()

    def end(_number: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        if not quiet:
            print("Stopping; a second signal ends it at once.", file=sys.stderr)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    if not quiet and stream.once is False:
        print("Waiting for input; stop with Ctrl-C.", file=sys.stderr)
    return run_stream(
        spark,
        stream,
        stop=stop,
        begin=None if quiet else _print_begin,
        notify=None if quiet else _print_progress,
    )


def _print_begin(begun: BatchBegun) -> None:
    input_ = f"{plural(begun.files, 'file')}, {plural(begun.size_bytes, 'byte')}"
    print(f"  batch {begun.batch}: {input_} …", file=sys.stderr, flush=True)


def _print_progress(done: BatchDone) -> None:
    rows = done.rows
    frames, messages = rows.get("silver.frames", 0), rows.get("silver.messages", 0)
    open_ = rows.get("open.sessions", 0)
    print(
        f"  batch {done.batch}: {plural(frames, 'frame')}, {plural(messages, 'message')}, "
        f"{plural(open_, 'session')} open, {done.seconds:.1f} s",
        file=sys.stderr,
        flush=True,
    )


def _print(summary: Summary, *, as_json: bool) -> None:
    if as_json:
        summary_fields = {
            "tables": summary.rows,
            "accounting": summary.accounting,
            "packets": [
                {"category": name, "packets": packets, "bytes": size_bytes}
                for name, packets, size_bytes in summary.packets
            ],
            "refused_connections": summary.refused,
            "findings": summary.findings,
            "notes": summary.notes,
            "seconds": round(summary.seconds, 3),
            "steps": {name: round(seconds, 3) for name, seconds in summary.steps.items()},
        }
        print(msgspec.json.encode(summary_fields).decode())
        return
    print_table(("table", "rows"), [(name, f"{rows:,}") for name, rows in summary.rows.items()])
    if summary.accounting:
        print()
        names = list(summary.accounting[0])[1:]
        rows: list[Sequence[Any]] = [
            (each["protocol"] or "unknown", *(f"{each[name]:,}" for name in names))
            for each in summary.accounting
        ]
        print_table(("bytes of", *names), rows)
    if summary.packets:
        print()
        print_table(
            ("packets", "number", "bytes"),
            [(name, f"{packets:,}", f"{size:,}") for name, packets, size in summary.packets],
        )
    if summary.findings:
        print()
        found = [(name, f"{count:,}") for name, count in summary.findings.items()]
        print_table(("finding", "messages"), found)
    if summary.refused:
        print(f"{plural(summary.refused, 'connection')} refused.", file=sys.stderr)
    for note in summary.notes:
        print(f"Note: {note}.", file=sys.stderr)
    print(
        f"{plural(summary.seen, 'byte')}, all accounted for, in {summary.seconds:.1f} s.",
        file=sys.stderr,
    )
