"""List who is connected, and what they take and serve; or end a connection."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from crosswire.cli.hub import add_hub_options, age, api_of, path_of, print_json
from crosswire.cli.table import harmless, print_table

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    parser.add_argument("--protocol", default="", help="only those that speak this one")
    parser.add_argument("--limit", type=int, default=1000, help="how many at most (1000)")
    parser.add_argument(
        "--close", metavar="ID", help="close this connection, with its protocol's goodbye"
    )
    add_hub_options(parser)


def run(options: argparse.Namespace) -> int:
    api = api_of(options)
    if options.close is not None:
        answer = api.delete(path_of("v1", "connections", options.close))
        if options.json:
            print_json(answer)
        return 0
    answer = api.get("/v1/connections", protocol=options.protocol, limit=options.limit)
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
    print_table(("connection", "protocol", "address", "principal", "for", "does"), rows)
    return 0


def _doing(connection: dict[str, Any]) -> str:
    parts = [
        f"takes {each['destination']}" + (f" (holds {each['held']})" if each["held"] else "")
        for each in connection["consumes"]
    ]
    parts += [f"serves {name}" for name in connection["serves"]]
    if connection["calls"]:
        parts.append(f"waits for {connection['calls']} answers")
    if connection["congested"]:
        parts.append("does not keep up")
    return ", ".join(parts)
