"""List, add, remove and preview schedules: messages sent at intervals or by a cron expression."""

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
from crosswire.cli.hub import Api, add_hub_options, api_of, moment, path_of, print_json
from crosswire.cli.table import harmless, print_table
from crosswire.errors import CrosswireError

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = commands.add_parser("list", help="all schedules and when they fire next")
    adding = commands.add_parser("add", help="add a schedule, or replace the one with its id")
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
    removing = commands.add_parser("remove", help="remove a schedule")
    removing.add_argument("id")
    preview = commands.add_parser(
        "preview", help="the next fire times of a schedule, or of --every or --cron"
    )
    preview.add_argument("id", nargs="?", help="an existing schedule; else --every or --cron")
    _add_times(preview, required=False)
    preview.add_argument("--count", type=int, default=10, help="number of fire times (default: 10)")
    for each in (listing, adding, removing, preview):
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
    actions = {"list": _list, "add": _add, "remove": _remove, "preview": _preview}
    return actions[options.action](api, options)


def _list(api: Api, options: argparse.Namespace) -> int:
    answer = api.get("/v1/schedules")
    if options.json:
        print_json(answer)
        return 0
    rows = [
        (
            harmless(each["id"]),
            harmless(each["destination"]),
            _times(each),
            moment(each["next_due"]),
            each["fired"],
            shown_body(each["message"]),
        )
        for each in answer["schedules"]
    ]
    print_table(("id", "destination", "when", "next", "fired", "payload"), rows)
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
        for time_s in times:
            print(moment(time_s))
    return 0
