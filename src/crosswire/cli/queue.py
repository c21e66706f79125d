"""List queues, show one with its messages, create, pause, purge, move or delete one."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from crosswire.cli.body import filter_of, shown_body
from crosswire.cli.confirmation import add_confirmation, require_confirmation
from crosswire.cli.hub import (
    add_hub_options,
    add_limit,
    age,
    api_of,
    moment,
    path_of,
    print_json,
    rate,
    size,
)
from crosswire.cli.parsers import add_action, add_actions
from crosswire.cli.table import harmless, print_table
from crosswire.plurals import plural

__all__ = ["configure", "run"]

_LOOK_S = 0.5


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    actions = add_actions(parser)
    listing = add_action(
        actions,
        "list",
        "all queues, with their lengths, sizes and consumers",
        "crosswire queue list",
        "crosswire queue list --contains orders --json",
    )
    listing.add_argument("--contains", metavar="TEXT", help="only names that contain this")
    listing.add_argument(
        "--sort",
        choices=("name", "length", "size", "age", "in", "out", "consumers", "dead"),
        help="by what: a number begins with the largest (default: name)",
    )
    listing.add_argument(
        "--state",
        choices=("backlog", "paused", "stopped", "dead"),
        help="only those with a backlog, that are paused or stopped, or have dead letters",
    )
    add_limit(listing)
    showing = add_action(
        actions,
        "show",
        "a queue, its consumers and its messages",
        "crosswire queue show orders",
        "crosswire queue show orders --messages 100 --after 48211",
    )
    showing.add_argument("name", help="NAME or queue/NAME")
    showing.add_argument(
        "--messages", type=int, default=10, help="number of messages to show (default: 10)"
    )
    showing.add_argument(
        "--after", type=int, default=0, metavar="ID", help="only messages after this id"
    )
    creating = add_action(
        actions,
        "create",
        "create a queue; sending to one does so, too",
        "crosswire queue create orders",
    )
    pausing = add_action(
        actions,
        "pause",
        "deliver nothing from a queue; messages are accepted all the same",
        "crosswire queue pause orders",
    )
    resuming = add_action(
        actions, "resume", "deliver again from a queue", "crosswire queue resume orders"
    )
    for each in (creating, pausing, resuming):
        each.add_argument("name", help="NAME or queue/NAME")
    moving = add_action(
        actions,
        "move",
        "move messages that no consumer holds to another queue or a topic",
        "crosswire queue move orders --to queue/later --all --rate 100",
        "crosswire queue move orders --to queue/cheap --filter 'price < 10' --dry-run",
    )
    moving.add_argument("name", help="NAME or queue/NAME")
    moving.add_argument(
        "--to", required=True, metavar="DESTINATION", help="queue/NAME or topic/NAME"
    )
    _add_selection(moving)
    moving.add_argument(
        "--rate", type=float, default=0.0, help="maximum messages per second (default: no limit)"
    )
    moving.add_argument(
        "--dry-run", action="store_true", help="only list the messages that would be moved"
    )
    purging = add_action(
        actions,
        "purge",
        "delete all messages that no consumer holds",
        "crosswire queue purge orders --dry-run",
        "crosswire queue purge orders --yes",
    )
    purging.add_argument("name", help="NAME or queue/NAME")
    add_confirmation(purging)
    purging.add_argument(
        "--dry-run", action="store_true", help="only print how many messages would be deleted"
    )
    deleting = add_action(
        actions,
        "delete",
        "delete a queue that is empty and unused",
        "crosswire queue delete orders",
    )
    deleting.add_argument("name", help="NAME or queue/NAME")
    for each in (
        *(listing, showing, creating, pausing),
        *(resuming, moving, purging, deleting),
    ):
        add_hub_options(each)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--id", type=int, action="append", default=[], help="this message; may be repeated"
    )
    which.add_argument(
        "--filter", default="", help="messages whose properties pass, as 'price > 10'"
    )
    which.add_argument("--all", action="store_true", help="all messages that are there now")


def run(options: argparse.Namespace) -> int:
    """Run the action and print its result; 1 for a move that failed or skipped messages. Raises
    ClientError."""
    actions = {
        "list": _list,
        "show": _show,
        "create": _create,
        "pause": _pause,
        "resume": _pause,
        "move": _move,
        "purge": _purge,
        "delete": _delete,
    }
    return actions[options.action](options)


def _list(options: argparse.Namespace) -> int:
    answer = api_of(options).list(
        "/v1/queues",
        "queues",
        options.limit,
        contains=options.contains,
        sort=options.sort,
        state=options.state,
    )
    if options.json:
        print_json(answer)
        return 0
    head = (
        *("queue", ">messages", ">size", ">oldest", ">in/s", ">out/s"),
        *(">held", ">consumers", ">dead letters", "state"),
    )
    rows = [
        (
            harmless(each["name"]),
            each["length"],
            size(each["size_bytes"]),
            age(each["oldest"]) if each["oldest"] else "-",
            rate(each["rates"]["accepted"]),
            rate(each["rates"]["delivered"]),
            each["held"],
            each["consumers"],
            each["dead_letters"],
            _state(each),
        )
        for each in answer["queues"]
    ]
    print_table(head, rows, empty="no queues")
    if answer["next"]:
        print("There are more: use a larger --limit.", file=sys.stderr)
    return 0


def _state(queue: dict[str, Any]) -> str:
    if queue.get("stopped"):
        return f"stopped: {harmless(queue['stopped'])}"
    return "paused" if queue["paused"] else "-"


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
        + ("" if _state(answer) == "-" else f", {_state(answer)}")
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
        if answer["consumer_count"] > len(rows):
            print(f"… of {plural(answer['consumer_count'], 'consumer')}")
    if answer["messages"]:
        print()
        found = [
            (
                each["id"],
                moment(each["time"]),
                harmless(each.get("held_by", "")) or "-",
                each["size_bytes"],
                shown_body(each),
            )
            for each in answer["messages"]
        ]
        print_table(("id", "accepted", "held by", "bytes", "payload"), found)
    return 0


def _purge(options: argparse.Namespace) -> int:
    api, name = api_of(options), _name(options.name)
    if not options.dry_run and not options.yes:
        queue = api.get(path_of("v1", "queues", name))
        free = plural(queue["length"] - queue["held"], "message")
        require_confirmation(f"Delete {free} of queue {harmless(name)}?")
    path = path_of("v1", "queues", name, "purge")
    answer = api.post(path, {"all": True, "dry_run": options.dry_run})
    if options.json:
        print_json(answer)
    else:
        would = " would be" if answer["dry_run"] else ""
        count = answer["matched"] if answer["dry_run"] else answer["purged"]
        print(f"{plural(count, 'message')}{would} deleted", file=sys.stderr)
    return 0


def _create(options: argparse.Namespace) -> int:
    answer = api_of(options).post("/v1/queues", {"name": _name(options.name)})
    if options.json:
        print_json(answer)
    else:
        made = "is created" if answer["created"] else "was there already"
        print(f"queue {harmless(answer['name'])} {made}", file=sys.stderr)
    return 0


def _pause(options: argparse.Namespace) -> int:
    is_paused = options.action == "pause"
    path = path_of("v1", "queues", _name(options.name))
    answer = api_of(options).patch(path, {"paused": is_paused})
    if options.json:
        print_json(answer)
    else:
        state = "is paused" if is_paused else "delivers again"
        print(f"queue {harmless(answer['name'])} {state}", file=sys.stderr)
    return 0


def _move(options: argparse.Namespace) -> int:
    api = api_of(options)
    asked = {
        "destination": options.to,
        "ids": options.id,
        "filter": filter_of(options),
        "all": options.all,
        "rate": options.rate,
        "dry_run": options.dry_run,
    }
    move = api.post(path_of("v1", "queues", _name(options.name), "move"), asked)
    while move["state"] == "running":
        print(f"{plural(move['replayed'], 'message')} moved so far", file=sys.stderr)
        time.sleep(_LOOK_S)
        move = api.get(path_of("v1", "dead", "replays", move["id"]))
    if options.json:
        print_json(move)
    elif move["dry_run"]:
        for identifier in move["ids"]:
            print(identifier)
        print(f"{plural(move['matched'], 'message')} would be moved", file=sys.stderr)
    else:
        print(f"{plural(move['replayed'], 'message')} moved", file=sys.stderr)
        if move["skipped"] or move["state"] != "done":
            skipped = plural(move["skipped"], "message")
            print(f"{skipped} not moved: {harmless(move['error'])}", file=sys.stderr)
    return 0 if move["state"] == "done" and not move["skipped"] else 1


def _delete(options: argparse.Namespace) -> int:
    answer = api_of(options).delete(path_of("v1", "queues", _name(options.name)))
    if options.json:
        print_json(answer)
    return 0


def _name(text: str) -> str:
    return text.removeprefix("queue/")
