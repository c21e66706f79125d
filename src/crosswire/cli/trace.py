"""Show what happened to a message, step by step, from the hub's ledger."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from crosswire.cli.body import shown_body
from crosswire.cli.hub import add_hub_options, api_of, path_of, print_json
from crosswire.cli.parsers import add_examples
from crosswire.cli.table import harmless, print_table
from crosswire.plurals import plural

__all__ = ["configure", "repeated_deliveries", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    parser.add_argument("id", type=int, help="the message's id")
    add_hub_options(parser)
    add_examples(parser, "crosswire trace 48211", "crosswire trace 48211 --json")


def run(options: argparse.Namespace) -> int:
    """Print the steps in order. Raises RequestFailed for an id that the ledger does not have."""
    answer = api_of(options).get(path_of("v1", "messages", options.id))
    if options.json:
        print_json(answer)
        return 0
    steps = answer["steps"]
    if answer["message"] is not None:
        print(f"payload  {shown_body(answer['message'])}\n")
    times = [datetime.fromisoformat(step["time"]) for step in steps]
    repeated = repeated_deliveries(steps)
    rows = [
        (
            times[index].strftime("%Y-%m-%d %H:%M:%S.%f"),
            f"+{(times[index] - times[0]).total_seconds() * 1000:.3f} ms",
            step["step"],
            harmless(step["destination"]),
            harmless(_who(step)),
            harmless(_more(step, is_repeated=index in repeated)),
        )
        for index, step in enumerate(steps)
    ]
    print_table(("time", "after", "step", "where", "who", "more"), rows)
    return 0


def _who(step: dict[str, Any]) -> str:
    return " ".join(part for part in (step["protocol"], step["connection"]) if part) or "the hub"


def repeated_deliveries(steps: list[dict[str, Any]]) -> set[int]:
    """Indexes of deliveries from a queue whose attempt number an earlier delivery has.

    An attempt is counted when it ends. The earlier one had not ended when the hub was killed, so
    that its number was used again.
    """
    seen: set[tuple[str, int]] = set()
    repeated = set()
    for index, step in enumerate(steps):
        if step["step"] == "delivered" and step["destination"].startswith("queue/"):
            key = (step["destination"], step["attempt"])
            if key in seen:
                repeated.add(index)
            seen.add(key)
    return repeated


def _more(step: dict[str, Any], *, is_repeated: bool) -> str:
    parts = []
    if is_repeated:
        parts.append(f"attempt {step['attempt']} again: the hub was killed during the first")
    elif step["attempt"] > 1:
        parts.append(f"attempt {step['attempt']}")
    if step["count"] != 1:
        parts.append(plural(step["count"], "delivery", "deliveries"))
    if step["subscription"]:
        parts.append(f"subscription {step['subscription']}")
    if step["detail"]:
        parts.append(step["detail"])
    return ", ".join(parts)
