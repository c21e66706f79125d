"""List queues, show one with its messages, purge or delete one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from crosswire.cli.body import shown_body
from crosswire.cli.hub import add_hub_options, api_of, moment, path_of, print_json, size
from crosswire.cli.table import harmless, print_table
from crosswire.plurals import plural

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = commands.add_parser(
        "list", help="all queues, with their lengths, sizes and consumers"
    )
    listing.add_argument("--contains", metavar="TEXT", help="only names that contain this")
    listing.add_argument("--limit", type=int, default=1000, help="maximum number (default: 1000)")
    showing = commands.add_parser("show", help="a queue, its consumers and its messages")
    showing.add_argument("name", help="NAME or queue/NAME")
    showing.add_argument(
        "--messages", type=int, default=10, help="number of messages to show (default: 10)"
    )
    showing.add_argument(
        "--after", type=int, default=0, metavar="ID", help="only messages after this id"
    )
    purging = commands.add_parser("purge", help="delete all messages that no consumer holds")
    purging.add_argument("name", help="NAME or queue/NAME")
    deleting = commands.add_parser("delete", help="delete a queue that is empty and unused")
    deleting.add_argument("name", help="NAME or queue/NAME")
    for each in (listing, showing, purging, deleting):
        add_hub_options(each)


def run(options: argparse.Namespace) -> int:
    """Run the action and print its result. Raises ClientError."""
    actions = {"list": _list, "show": _show, "purge": _purge, "delete": _delete}
    return actions[options.action](options)


def _list(options: argparse.Namespace) -> int:
    answer = api_of(options).get("/v1/queues", contains=options.contains, limit=options.limit)
    if options.json:
        print_json(answer)
        return 0
    head = ("queue", "messages", "size", "held", "consumers", "dead letters")
    rows = [
        (
            harmless(each["name"]),
            each["length"],
            size(each["size_bytes"]),
            each["held"],
            each["consumers"],
            each["dead_letters"],
        )
        for each in answer["queues"]
    ]
    print_table(head, rows)
    return 0


def _show(options: argparse.Namespace) -> int:
    path = path_of("v1", "queues", _name(options.name))
    answer = api_of(options).get(path, messages=options.messages, after=options.after)
    if options.json:
        print_json(answer)
        return 0
    print(
        f"{harmless(answer['name'])}: {plural(answer['length'], 'message')}, "
        f"{size(answer['size_bytes'])}, {answer['held']:,} held, "
        f"{plural(answer['dead_letters'], 'dead letter')}"
    )
    if answer["consumers"]:
        print()
        head = ("consumer", "protocol", "principal", "held", "free", "weight")
        rows = [
            (
                harmless(each["connection"]),
                each["protocol"],
                harmless(each["principal"]) or "-",
                each["held"],
                each["free"],
                each["weight"],
            )
            for each in answer["consumers"]
        ]
        print_table(head, rows)
    if answer["messages"]:
        print()
        found = [
            (
                each["id"],
                moment(each["time"] / 1e6),
                harmless(each.get("held_by", "")) or "-",
                each["size_bytes"],
                shown_body(each),
            )
            for each in answer["messages"]
        ]
        print_table(("id", "accepted", "held by", "bytes", "payload"), found)
    return 0


def _purge(options: argparse.Namespace) -> int:
    answer = api_of(options).post(path_of("v1", "queues", _name(options.name), "purge"))
    if options.json:
        print_json(answer)
    else:
        print(f"{plural(answer['purged'], 'message')} deleted", file=sys.stderr)
    return 0


def _delete(options: argparse.Namespace) -> int:
    answer = api_of(options).delete(path_of("v1", "queues", _name(options.name)))
    if options.json:
        print_json(answer)
    return 0


def _name(text: str) -> str:
    return text.removeprefix("queue/")
