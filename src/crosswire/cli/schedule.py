"""List, add, remove, pause, fire and preview schedules: messages at intervals or by cron."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from crosswire.cli.body import (
    add_payload_options,
    as_body,
    payload_of,
    properties_of,
    shown_body,
)
from crosswire.cli.hub import Api, add_hub_options, add_limit, api_of, moment, path_of, print_json
from crosswire.cli.parsers import add_action, add_actions
from crosswire.cli.table import harmless, print_table
from crosswire.errors import CrosswireError

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    actions = add_actions(parser)
    listing = add_action(
        actions, "list", "all schedules and when they fire next", "crosswire schedule list"
    )
    add_limit(listing)
    adding = add_action(
        actions,
        "add",
        "add a schedule, or replace the one with its id",
        "crosswire schedule add queue/jobs cleanup --cron '0 3 * * *' --id nightly",
        """crosswire schedule add queue/jobs '{"job": "poll"}' --every 30 --run-count 10""",
    )
    adding.add_argument("destination", help="queue/NAME or topic/NAME")
    add_payload_options(adding)
    adding.add_argument("--id", default="", help="its id (default: the hub generates one)")
    _add_times(adding, required=True)
    adding.add_argument(
        "--run-count", type=int, default=0, help="fire this many times, then end (default: no end)"
    )
    adding.add_argument(
        "--missed",
        choices=("skip", "once", "all"),
        default="once",
        help="what to do about fire times that passed while the hub was down (default: once)",
    )
    removing = add_action(
        actions, "remove", "remove a schedule", "crosswire schedule remove nightly"
    )
    removing.add_argument("id", help="the schedule's id")
    pausing = add_action(
        actions,
        "pause",
        "have a schedule fire no more, until it is resumed",
        "crosswire schedule pause nightly",
    )
    resuming = add_action(
        actions, "resume", "have a paused schedule fire again", "crosswire schedule resume nightly"
    )
    firing = add_action(
        actions,
        "fire",
        "send the message of a schedule now, beside its due times",
        "crosswire schedule fire nightly",
    )
    for each in (pausing, resuming, firing):
        each.add_argument("id", help="the schedule's id")
    preview = add_action(
        actions,
        "preview",
        "the next fire times of a schedule, or of --every or --cron",
        "crosswire schedule preview nightly --count 3",
        "crosswire schedule preview --cron '*/15 8-17 * * mon-fri'",
    )
    preview.add_argument("id", nargs="?", help="an existing schedule; else --every or --cron")
    _add_times(preview, required=False)
    preview.add_argument("--count", type=int, default=10, help="number of fire times (default: 10)")
    for each in (listing, adding, removing, pausing, resuming, firing, preview):
        add_hub_options(each)


def _add_times(parser: argparse.ArgumentParser, *, required: bool) -> None:
    times = parser.add_mutually_exclusive_group(required=required)
    times.add_argument("--every", type=float, metavar="SECONDS", help="an interval")
    times.add_argument("--cron", help="a cron expression, in UTC")
    parser.add_argument(
        "--nohaste", action="store_true", help="the first fire is after one interval, not at once"
    )


def run(options: argparse.Namespace) -> int:
    """Run the action and print its result. Raises ClientError."""
    api = api_of(options)
    actions = {
        "list": _list,
        "add": _add,
        "remove": _remove,
        "pause": _pause,
        "resume": _pause,
        "fire": _fire,
        "preview": _preview,
    }
    return actions[options.action](api, options)


def _list(api: Api, options: argparse.Namespace) -> int:
    answer = api.list("/v1/schedules", "schedules", options.limit)
    if options.json:
        print_json(answer)
        return 0
    rows = [
        (
            harmless(each["id"]),
            harmless(each["destination"]),
            _times(each),
            moment(each["next_due"]) if each["next_due"] else "paused",
            each["fired"],
            shown_body(each["message"]),
        )
        for each in answer["schedules"]
    ]
    head = ("id", "destination", "when", "next", "fired", "payload")
    print_table(head, rows, empty="no schedules")
    return 0


def _times(schedule: dict[str, Any]) -> str:
    return harmless(schedule["cron"]) or f"every {schedule['interval_s']:g} s"


def _add(api: Api, options: argparse.Namespace) -> int:
    payload = payload_of(options)
    body = {
        "id": options.id,
        "destination": options.destination,
        "interval_s": options.every or 0.0,
        "cron": options.cron or "",
        "nohaste": options.nohaste,
        "run_count": options.run_count,
        "missed": options.missed,
        "properties": properties_of(options),
        **as_body(sys.stdin.buffer.read() if payload is None else payload),
    }
    answer = api.post("/v1/schedules", body)
    if options.json:
        print_json(answer)
    else:
        print(answer["id"])
        print(f"next: {moment(answer['next_due'])} UTC", file=sys.stderr)
    return 0


def _remove(api: Api, options: argparse.Namespace) -> int:
    answer = api.delete(path_of("v1", "schedules", options.id))
    if options.json:
        print_json(answer)
    return 0


def _pause(api: Api, options: argparse.Namespace) -> int:
    is_paused = options.action == "pause"
    answer = api.patch(path_of("v1", "schedules", options.id), {"paused": is_paused})
    if options.json:
        print_json(answer)
    else:
        state = "is paused" if is_paused else f"fires next at {moment(answer['next_due'])} UTC"
        print(f"{harmless(options.id)} {state}", file=sys.stderr)
    return 0


def _fire(api: Api, options: argparse.Namespace) -> int:
    answer = api.post(path_of("v1", "schedules", options.id, "fire"))
    if options.json:
        print_json(answer)
    else:
        print(answer["id"])
        print(f"1 message to {harmless(answer['destination'])}", file=sys.stderr)
    return 0


def _preview(api: Api, options: argparse.Namespace) -> int:
    if options.id is not None:
        answer = api.get(path_of("v1", "schedules", options.id), count=options.count)
        times = answer["preview"]
    elif options.every is None and options.cron is None:
        raise CrosswireError("give the id of a schedule, --every or --cron")
    else:
        asked = {
            "interval_s": options.every or 0.0,
            "cron": options.cron or "",
            "nohaste": options.nohaste,
            "count": options.count,
        }
        times = api.post("/v1/schedules/preview", asked)["times"]
    if options.json:
        print_json({"times": times})
    else:
        for each in times:
            print(moment(each))
    return 0
