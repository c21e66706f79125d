"""List named subscriptions, delete one, or give one to another user."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from urllib.parse import urlencode

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
    assigning = commands.add_parser("assign", help="give one that nobody uses to another user")
    assigning.add_argument("name")
    assigning.add_argument("user", help="the new owner; '' for nobody")
    for each in (deleting, assigning):
        each.add_argument(
            "--owner", metavar="USER", help="whose it is now (default: yours); '' for nobody's"
        )
    for each in (listing, deleting, assigning):
        add_hub_options(each)


def run(options: argparse.Namespace) -> int:
    """Run the action and print its result. Raises ClientError."""
    actions = {"list": _list, "delete": _delete, "assign": _assign}
    return actions[options.action](options)


def _list(options: argparse.Namespace) -> int:
    answer = api_of(options).get("/v1/subscriptions")
    if options.json:
        print_json(answer)
        return 0
    rows = [
        (
            harmless(each["name"]),
            harmless(each["owner"]) or "-",
            harmless(each["pattern"]),
            harmless(each["filter"]) or "-",
            each["held"],
            len(each["consumers"]),
            each["dead_letters"],
        )
        for each in answer["subscriptions"]
    ]
    print_table(("name", "owner", "topics", "filter", "held", "consumers", "dead letters"), rows)
    return 0


def _delete(options: argparse.Namespace) -> int:
    answer = api_of(options).delete(_path(options))
    if options.json:
        print_json(answer)
    else:
        print(f"{harmless(options.name)} is deleted", file=sys.stderr)
    return 0


def _assign(options: argparse.Namespace) -> int:
    answer = api_of(options).patch(_path(options), {"owner": options.user})
    if options.json:
        print_json(answer)
    else:
        owner = harmless(options.user) or "nobody"
        print(f"{harmless(options.name)} belongs to {owner} now", file=sys.stderr)
    return 0


def _path(options: argparse.Namespace) -> str:
    path = path_of("v1", "subscriptions", options.name)
    return path if options.owner is None else f"{path}?{urlencode({'owner': options.owner})}"
