"""List connections with what they consume and serve, or close one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from crosswire.cli.hub import add_hub_options, add_limit, age, api_of, path_of, print_json
from crosswire.cli.parsers import add_examples
from crosswire.cli.table import harmless, print_table
from crosswire.plurals import plural

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    parser.add_argument("--protocol", default="", help="only connections of this protocol")
    add_limit(parser)
    parser.add_argument(
        "--close", metavar="ID", help="close this connection, with its protocol's goodbye"
    )
    add_hub_options(parser)
    add_examples(
        parser,
        "crosswire connections --protocol emp",
        "crosswire connections --close emp-1f3c",
    )


def run(options: argparse.Namespace) -> int:
    """Print a row per connection, or close the one of `--close`. Raises ClientError."""
    api = api_of(options)
    if options.close is not None:
        answer = api.delete(path_of("v1", "connections", options.close))
        if options.json:
            print_json(answer)
        return 0
    answer = api.list("/v1/connections", "connections", options.limit, protocol=options.protocol)
    if options.json:
        print_json(answer)
        return 0
    rows = [
        (
            each["id"],
            each["protocol"],
            each["address"],
            harmless(each["principal"]) or "-",
            age(each["since"]),
            harmless(_doing(each)) or "-",
        )
        for each in answer["connections"]
    ]
    head = ("connection", "protocol", "address", "principal", "age", "activity")
    print_table(head, rows, empty="no connections")
    return 0


def _doing(connection: dict[str, Any]) -> str:
    parts = [
        f"consumes {each['destination']}" + (f" ({each['held']} held)" if each["held"] else "")
        for each in connection["consumes"]
    ]
    if more := connection["consumer_count"] - len(connection["consumes"]):
        parts.append(f"consumes {more:,} more")
    parts += [f"serves {name}" for name in connection["serves"]]
    if more := connection["service_count"] - len(connection["serves"]):
        parts.append(f"serves {more:,} more")
    if connection["calls"]:
        parts.append(f"waits for {plural(connection['calls'], 'response')}")
    if connection["congested"]:
        parts.append("congested")
    return ", ".join(parts)
