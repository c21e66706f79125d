"""Show the busiest queues, topics and services of a hub, live, on one screen.

On a terminal it goes on until Ctrl-C; else it prints one screen.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from io import StringIO
from typing import Any, Final

from crosswire.cli.hub import (
    Api,
    add_hub_options,
    age,
    api_of,
    duration,
    print_json,
    rate,
    size,
)
from crosswire.cli.parsers import add_examples
from crosswire.cli.status import troubles_of
from crosswire.cli.table import harmless, lines_of
from crosswire.errors import ConnectFailed, RequestFailed
from crosswire.plurals import plural

__all__ = ["configure", "run"]

_HOME: Final = "\x1b[H\x1b[J"
"""Moves to the first line, and clears the screen."""
_LINES: Final = 24
_AROUND: Final = 9
"""Lines that are no rows: three of state, a head and an empty line for each of three tables."""


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    parser.add_argument(
        "--interval", type=_seconds, default=2.0, metavar="SECONDS", help="how often (default: 2)"
    )
    parser.add_argument(
        "--count", type=int, help="end after this many screens (default: never, on a terminal)"
    )
    parser.add_argument(
        "--sort",
        choices=("in", "out", "length", "age", "dead"),
        default="in",
        help="which queues are busiest (default: in, those that get most messages)",
    )
    add_hub_options(parser)
    add_examples(
        parser, "crosswire top", "crosswire top --sort length", "crosswire top --count 1 --json"
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600")
    return seconds


def run(options: argparse.Namespace) -> int:
    """Print screens until the last, or Ctrl-C. Raises ClientError if the first can't be made."""
    # SIGTERM, too, ends it between two screens.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    api = api_of(options)
    is_live = sys.stdout.isatty() and not options.json
    most = options.count or (None if is_live else 1)
    shown = 0
    try:
        while True:
            try:
                facts = _facts(api, options.sort)
                text = None
            except (ConnectFailed, RequestFailed) as error:
                if not shown:
                    raise
                # A hub that restarts: it may be back at the next look.
                text = harmless(str(error))
            if options.json:
                print_json(facts if text is None else {"error": text})
            else:
                screen = text or _screen(facts, options.hub)
                print((_HOME if is_live else "") + screen, flush=True)
            shown += 1
            if shown == most:
                return 0
            sys.stdout.flush()
            time.sleep(options.interval)
    except KeyboardInterrupt:
        return 0


def _facts(api: Api, sort: str) -> dict[str, Any]:
    rows = max(shutil.get_terminal_size((80, _LINES)).lines, _AROUND + 3)
    return {
        "ready": api.readiness(),
        "state": api.get("/v1/state"),
        "queues": api.get("/v1/queues", sort=sort, limit=min(rows, 1000))["queues"],
        "topics": api.get("/v1/topics", sort="in", limit=min(rows, 1000))["topics"],
        "services": api.get("/v1/services", sort="calls", limit=min(rows, 1000))["services"],
    }


def _screen(facts: dict[str, Any], url: str) -> str:
    """All of it as text that fits the terminal."""
    state, out = facts["state"], StringIO()
    room = shutil.get_terminal_size((80, _LINES))
    status = facts["ready"]["status"]
    now = time.strftime("%H:%M:%S")
    lines = [
        f"crosswire {state['version']}  {harmless(url)}  {status}  up "
        f"{duration(state['uptime_s'])}  {now}",
        f"{_rate(state['accepted_per_s'])}/s in, {_rate(state['delivered_per_s'])}/s out, "
        f"{_rate(state['settled_per_s'])}/s settled; {plural(state['messages'], 'message')}, "
        f"{plural(state['dead_letters'], 'dead letter')}; "
        f"{plural(sum(state['connections'].values()), 'connection')}",
    ]
    troubles = troubles_of(facts["ready"], state)
    if troubles:
        more = f" (and {len(troubles) - 1} more: crosswire status)" if len(troubles) > 1 else ""
        lines.append(f"! {harmless(troubles[0])}{more}")
    tables = [_queues(facts["queues"]), _topics(facts["topics"]), _services(facts["services"])]
    tables = [each for each in tables if each[1]]
    # What one table does not need is for the others: queues come first.
    left = room.lines - 1 - len(lines) - 2 * len(tables)
    for index, (head, rows) in enumerate(tables):
        share = max(left // (len(tables) - index), 1)
        taken = rows[:share]
        left -= len(taken)
        lines += ["", *lines_of(head, taken)]
    for line in lines:
        cut = line if len(line) <= room.columns else line[: max(room.columns - 1, 0)] + "…"
        out.write(f"{cut}\n")
    return out.getvalue().rstrip("\n")


def _rate(value: float) -> str:
    return rate(value) if value else "0"


_Table = tuple[Sequence[str], list[tuple[object, ...]]]


def _queues(queues: list[dict[str, Any]]) -> _Table:
    head = (
        *("queue", ">in/s", ">out/s", ">failed/s", ">messages", ">size", ">oldest"),
        *(">held", ">consumers", ">dead"),
    )
    return head, [
        (
            harmless(each["name"]),
            rate(each["rates"]["accepted"]),
            rate(each["rates"]["delivered"]),
            rate(each["rates"]["failed"]),
            each["length"],
            size(each["size_bytes"]),
            age(each["oldest"]) if each["oldest"] else "-",
            each["held"],
            each["consumers"],
            each["dead_letters"],
        )
        for each in queues
    ]


def _topics(topics: list[dict[str, Any]]) -> _Table:
    head = ("topic", ">in/s", ">out/s", ">published", ">subscribers", ">named")
    return head, [
        (
            harmless(each["name"]),
            rate(each["rates"]["accepted"]),
            rate(each["rates"]["delivered"]),
            each["published"],
            each["subscribers"],
            each["subscription_count"],
        )
        for each in topics
    ]


def _services(services: list[dict[str, Any]]) -> _Table:
    head = ("service", ">calls/s", ">errors/s", ">waiting", ">p50", ">p99", ">providers")
    return head, [
        (
            harmless(each["name"]),
            rate(each["calls_per_s"]),
            rate(each["errors_per_s"]),
            each["waiting"],
            duration(each["p50_s"]) if each["p50_s"] else "-",
            duration(each["p99_s"]) if each["p99_s"] else "-",
            each["provider_count"],
        )
        for each in services
    ]
