"""List, edit, replay or delete dead letters: messages that could not be delivered."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from crosswire.cli.body import (
    add_payload_options,
    as_body,
    filter_of,
    payload_of,
    properties_of,
    shown_body,
)
from crosswire.cli.confirmation import add_confirmation, require_confirmation
from crosswire.cli.hub import Api, add_hub_options, add_limit, api_of, moment, path_of, print_json
from crosswire.cli.parsers import add_action, add_actions
from crosswire.cli.table import harmless, in_short, print_table
from crosswire.errors import CrosswireError
from crosswire.plurals import plural

__all__ = ["configure", "run"]

_LOOK_S = 0.5


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    actions = add_actions(parser)
    queue = "the queue, or named subscription, that the letters come from"
    listing = add_action(
        actions,
        "list",
        "queues with dead letters; with QUEUE, its dead letters",
        "crosswire dead list",
        "crosswire dead list orders --filter 'price > 10' --json",
    )
    listing.add_argument("queue", nargs="?", help=queue)
    listing.add_argument(
        "--filter", default="", help="only letters whose properties pass, as 'price > 10'"
    )
    listing.add_argument(
        "--after", type=int, default=0, metavar="ID", help="only letters after this id"
    )
    add_limit(listing, 100)
    showing = add_action(
        actions,
        "show",
        "a letter and every attempt to deliver it",
        "crosswire dead show orders 48211",
    )
    editing = add_action(
        actions,
        "edit",
        "change a letter before it is sent again",
        """crosswire dead edit orders 48211 '{"item": "tea"}' --property price=12""",
    )
    for each in (showing, editing):
        each.add_argument("queue", help=queue)
        each.add_argument("id", type=int, help="the letter's id")
    add_payload_options(editing, optional=True)
    editing.add_argument("--content-type", metavar="TYPE", help="the payload's new type")
    replaying = add_action(
        actions,
        "replay",
        "send letters again to their original destination",
        "crosswire dead replay orders --all --rate 10",
        "crosswire dead replay orders --id 48211 --to queue/checked",
    )
    purging = add_action(
        actions,
        "purge",
        "delete letters",
        "crosswire dead purge orders --all --dry-run",
        "crosswire dead purge orders --filter 'price < 1' --yes",
    )
    add_confirmation(purging)
    for each in (replaying, purging):
        each.add_argument("queue", help=queue)
        which = each.add_mutually_exclusive_group(required=True)
        which.add_argument(
            "--id", type=int, action="append", default=[], help="this letter; may be repeated"
        )
        which.add_argument("--filter", default="", help="letters whose properties pass")
        which.add_argument("--all", action="store_true", help="all letters that exist now")
        each.add_argument(
            "--dry-run", action="store_true", help="only list the letters that would be affected"
        )
    replaying.add_argument(
        "--rate", type=float, default=0.0, help="maximum messages per second (default: no limit)"
    )
    replaying.add_argument(
        "--to", default="", metavar="DESTINATION", help="send them to this destination instead"
    )
    for each in (listing, showing, editing, replaying, purging):
        add_hub_options(each)


def run(options: argparse.Namespace) -> int:
    """Run the action; 1 for a replay that failed or skipped letters. Raises ClientError."""
    api = api_of(options)
    actions = {
        "list": _list,
        "show": _show,
        "edit": _edit,
        "replay": _replay,
        "purge": _purge,
    }
    return actions[options.action](api, options)


def _list(api: Api, options: argparse.Namespace) -> int:
    if options.queue is None:
        answer = api.list("/v1/dead", "queues", options.limit)
        if options.json:
            print_json(answer)
        else:
            queues = [(harmless(each["queue"]), each["length"]) for each in answer["queues"]]
            print_table(("queue", "dead letters"), queues, empty="no dead letters")
        return 0
    answer = api.list(
        "/v1/dead/letters",
        "letters",
        options.limit,
        queue=options.queue,
        filter=filter_of(options),
        after=options.after,
    )
    if options.json:
        print_json(answer)
        return 0
    rows = [
        (
            each["id"],
            moment(each["message"]["time"]),
            len(each["attempts"]),
            harmless(each["cause"]) or "-",
            shown_body(_unmarked(each["message"])),
        )
        for each in answer["letters"]
    ]
    head = ("id", "died", "attempts", "cause", "payload")
    print_table(head, rows, empty=f"no dead letters of {harmless(options.queue)}")
    if answer["next"]:
        last = answer["letters"][-1]["id"]
        print(f"there may be more: use --after {last}", file=sys.stderr)
    return 0


def _show(api: Api, options: argparse.Namespace) -> int:
    answer = api.get(path_of("v1", "dead", "letters", options.id), queue=options.queue)
    if options.json:
        print_json(answer)
    else:
        _print_dead_letter(answer)
    return 0


def _print_dead_letter(dead_letter: dict[str, Any]) -> None:
    message = _unmarked(dead_letter["message"])
    origin = (
        f"{dead_letter['origin']} {dead_letter['origin_id']}"
        if dead_letter["origin"]
        else "unknown"
    )
    print(f"letter {dead_letter['id']} (was {harmless(origin)}): {harmless(dead_letter['cause'])}")
    for attempt in dead_letter["attempts"]:
        when = moment(attempt["time"])
        print(f"  {when}  {harmless(attempt['connection'])}  {harmless(attempt['cause'])}")
    if message.get("properties"):
        print(f"properties  {in_short(message['properties'])}")
    print(f"payload     {shown_body({**message, 'properties': {}})}")


def _unmarked(message: dict[str, Any]) -> dict[str, Any]:
    """Without the properties that repeat what other columns show."""
    properties = {
        key: value
        for key, value in message.get("properties", {}).items()
        if not key.startswith("dead-")
    }
    return {**message, "properties": properties}


def _edit(api: Api, options: argparse.Namespace) -> int:
    payload = payload_of(options)
    body: dict[str, Any] = {"queue": options.queue}
    if payload is not None:
        body |= as_body(payload, options.content_type)
    if options.content_type is not None:
        body["content_type"] = options.content_type
    if options.property:
        body["properties"] = properties_of(options)
    if len(body) == 1:
        raise CrosswireError("nothing to change: give a payload, properties or a content type")
    answer = api.patch(path_of("v1", "dead", "letters", options.id), body)
    if options.json:
        print_json(answer)
    else:
        _print_dead_letter(answer)
    return 0


def _choice(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "queue": options.queue,
        "ids": options.id,
        "filter": filter_of(options),
        "all": options.all,
        "dry_run": options.dry_run,
    }


def _replay(api: Api, options: argparse.Namespace) -> int:
    asked = {**_choice(options), "rate": options.rate, "destination": options.to}
    replay = api.post("/v1/dead/replays", asked)
    while replay["state"] == "running":
        print(f"{plural(replay['replayed'], 'letter')} sent again so far", file=sys.stderr)
        time.sleep(_LOOK_S)
        replay = api.get(path_of("v1", "dead", "replays", replay["id"]))
    if options.json:
        print_json(replay)
    else:
        _print_outcome("sent again", replay["replayed"], replay)
        if replay["skipped"]:
            skipped = plural(replay["skipped"], "letter")
            print(f"{skipped} skipped: {harmless(replay['error'])}", file=sys.stderr)
    return 0 if replay["state"] == "done" and not replay["skipped"] else 1


def _purge(api: Api, options: argparse.Namespace) -> int:
    choice = _choice(options)
    if not options.dry_run and not options.yes and not options.id:
        # Who names letters by their ids has looked at them.
        matched = api.post("/v1/dead/purge", {**choice, "dry_run": True})["matched"]
        letters = plural(matched, "letter")
        require_confirmation(f"Delete {letters} of {harmless(options.queue)}?")
    answer = api.post("/v1/dead/purge", choice)
    if options.json:
        print_json(answer)
    else:
        _print_outcome("deleted", answer["done"], answer)
    return 0


def _print_outcome(what: str, done: int, answer: dict[str, Any]) -> None:
    if not answer["dry_run"]:
        print(f"{plural(done, 'letter')} {what}", file=sys.stderr)
        return
    for identifier in answer["ids"]:
        print(identifier)
    print(f"{plural(answer['matched'], 'letter')} would be {what}", file=sys.stderr)
