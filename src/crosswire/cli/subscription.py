"""List named subscriptions, or delete one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from crosswire.cli.hub import add_hub_options, api_of, path_of, print_json
from crosswire.cli.table import harmless, print_table

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = commands.add_parser(
        "list", help="all named subscriptions and the number of their consumers"
    )
    deleting = commands.add_parser(
        "delete", help="delete one without consumers, and its undelivered messages"
    )
    deleting.add_argument("name")
    for each in (listing, deleting):
        add_hub_options(each)


def run(options: argparse.Namespace) -> int:
    """Run the action and print its result. Raises ClientError."""
    return {"list": _list, "delete": _delete}[options.action](options)


def _list(options: argparse.Namespace) -> int:
    answer = api_of(options).get("/v1/subscriptions")
    if options.json:
        print_json(answer)
        return 0
    rows = [
        (
            harmless(each["name"]),
            harmless(each["pattern"]),
            harmless(each["filter"]) or "-",
            each["held"],
            len(each["consumers"]),
            each["dead_letters"],
        )
        for each in answer["subscriptions"]
    ]
    print_table(("name", "topics", "filter", "held", "consumers", "dead letters"), rows)
    return 0


def _delete(options: argparse.Namespace) -> int:
    answer = api_of(options).delete(path_of("v1", "subscriptions", options.name))
    if options.json:
        print_json(answer)
    else:
        print(f"{harmless(options.name)} is deleted", file=sys.stderr)
    return 0
