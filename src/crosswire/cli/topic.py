"""List topics with their rates and subscribers, show one with its stored messages, delete one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from crosswire.cli.body import shown_body
from crosswire.cli.hub import (
    add_hub_options,
    add_limit,
    api_of,
    moment,
    path_of,
    print_json,
    rate,
)
from crosswire.cli.parsers import add_action, add_actions
from crosswire.cli.table import harmless, print_table
from crosswire.plurals import plural

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    actions = add_actions(parser)
    listing = add_action(
        actions,
        "list",
        "topics with their rates and subscribers",
        "crosswire topic list",
        "crosswire topic list --sort in --limit 10",
    )
    listing.add_argument("--contains", metavar="TEXT", help="only names that contain this")
    listing.add_argument(
        "--sort",
        choices=("name", "published", "in", "out", "subscribers"),
        help="by what: a number begins with the largest (default: name)",
    )
    add_limit(listing)
    showing = add_action(
        actions,
        "show",
        "a topic, its subscriptions and its stored messages",
        "crosswire topic show ticks/acme --messages 3",
    )
    showing.add_argument("name", help="NAME or topic/NAME")
    showing.add_argument(
        "--messages", type=int, default=10, help="number of messages to show (default: 10)"
    )
    showing.add_argument(
        "--after", type=int, default=0, metavar="ID", help="only messages after this id"
    )
    deleting = add_action(
        actions,
        "delete",
        "delete a topic that has no messages and nobody uses",
        "crosswire topic delete ticks/acme",
    )
    deleting.add_argument("name", help="NAME or topic/NAME")
    for each in (listing, showing, deleting):
        add_hub_options(each)


def run(options: argparse.Namespace) -> int:
    """Run the action and print its result. Raises ClientError."""
    actions = {"list": _list, "show": _show, "delete": _delete}
    return actions[options.action](options)


def _list(options: argparse.Namespace) -> int:
    answer = api_of(options).list(
        "/v1/topics", "topics", options.limit, contains=options.contains, sort=options.sort
    )
    if options.json:
        print_json(answer)
        return 0
    rows = [
        (
            harmless(each["name"]),
            each["published"],
            rate(each["rates"]["accepted"]),
            rate(each["rates"]["delivered"]),
            each["subscribers"],
            ", ".join(map(harmless, each["subscriptions"])) or "-",
        )
        for each in answer["topics"]
    ]
    head = ("topic", ">published", ">in/s", ">out/s", ">subscribers", "named subscriptions")
    print_table(head, rows, empty="no topics")
    if answer["next"]:
        print("There are more: use a larger --limit.", file=sys.stderr)
    return 0


def _show(options: argparse.Namespace) -> int:
    path = path_of("v1", "topics", _name(options.name))
    answer = api_of(options).get(path, messages=options.messages, after=options.after)
    if options.json:
        print_json(answer)
        return 0
    kind = "durable" if answer["durable"] else "not durable"
    print(
        f"{harmless(answer['name'])}: {kind}, {answer['published']:,} published, "
        f"{plural(answer['subscribers'], 'subscriber')}, named subscriptions: "
        f"{', '.join(map(harmless, answer['subscriptions'])) or 'none'}"
    )
    print()
    found = [
        (each["id"], moment(each["time"]), each["size_bytes"], shown_body(each))
        for each in answer["messages"]
    ]
    print_table(("id", "accepted", ">bytes", "payload"), found, empty="no messages are stored")
    return 0


def _delete(options: argparse.Namespace) -> int:
    answer = api_of(options).delete(path_of("v1", "topics", _name(options.name)))
    if options.json:
        print_json(answer)
    else:
        print(f"topic {harmless(answer['removed'])} is deleted", file=sys.stderr)
    return 0


def _name(text: str) -> str:
    return text.removeprefix("topic/")
