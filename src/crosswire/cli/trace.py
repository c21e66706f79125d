"""Show what happened to a message, step by step, as the hub's ledger has it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from crosswire.cli.body import shown_body
from crosswire.cli.hub import add_hub_options, api_of, moment, path_of, print_json
from crosswire.cli.table import harmless, print_table

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    parser.add_argument("id", type=int, help="the message's id")
    add_hub_options(parser)


def run(options: argparse.Namespace) -> int:
    answer = api_of(options).get(path_of("v1", "messages", options.id))
    if options.json:
        print_json(answer)
        return 0
    steps = answer["steps"]
    if answer["message"] is not None:
        print(f"payload  {shown_body(answer['message'])}\n")
    start = steps[0]["time"] if steps else 0
    rows = [
        (
            _clock(step["time"]),
            f"+{(step['time'] - start) / 1000:.3f} ms",
            step["step"],
            harmless(step["destination"]),
            harmless(_who(step)),
            harmless(_more(step)),
        )
        for step in steps
    ]
    print_table(("time", "after", "step", "where", "who", "more"), rows)
    return 0


def _clock(time_us: int) -> str:
    return f"{moment(time_us // 1_000_000)}.{time_us % 1_000_000:06}"


def _who(step: dict[str, Any]) -> str:
    return " ".join(part for part in (step["protocol"], step["connection"]) if part) or "the hub"


def _more(step: dict[str, Any]) -> str:
    parts = []
    if step["attempt"] > 1:
        parts.append(f"attempt {step['attempt']}")
    if step["count"] != 1:
        parts.append(f"{step['count']} deliveries")
    if step["detail"]:
        parts.append(step["detail"])
    return ", ".join(parts)
