"""List services with their calls, errors and latencies, or show one with its providers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from crosswire.cli.hub import add_hub_options, add_limit, api_of, duration, print_json, rate
from crosswire.cli.parsers import add_action, add_actions
from crosswire.cli.table import harmless, print_table
from crosswire.errors import CrosswireError
from crosswire.plurals import plural

__all__ = ["configure", "run"]

_ALL = 100_000


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    actions = add_actions(parser)
    listing = add_action(
        actions,
        "list",
        "services with their calls, errors and latencies",
        "crosswire service list",
        "crosswire service list --sort latency",
    )
    listing.add_argument("--contains", metavar="TEXT", help="only names that contain this")
    listing.add_argument(
        "--sort",
        choices=("name", "calls", "errors", "waiting", "latency"),
        help="by what: a number begins with the largest (default: name)",
    )
    add_limit(listing)
    showing = add_action(
        actions, "show", "a service and its providers", "crosswire service show stock"
    )
    showing.add_argument("name", help="NAME or service/NAME")
    for each in (listing, showing):
        add_hub_options(each)


def run(options: argparse.Namespace) -> int:
    """Run the action and print its result. Raises ClientError."""
    return {"list": _list, "show": _show}[options.action](options)


def _list(options: argparse.Namespace) -> int:
    answer = api_of(options).list(
        "/v1/services", "services", options.limit, contains=options.contains, sort=options.sort
    )
    if options.json:
        print_json(answer)
        return 0
    rows = [
        (
            harmless(each["name"]),
            each["provider_count"],
            rate(each["calls_per_s"]),
            rate(each["errors_per_s"]),
            each["waiting"],
            duration(each["p50_s"]) if each["p50_s"] else "-",
            duration(each["p99_s"]) if each["p99_s"] else "-",
        )
        for each in answer["services"]
    ]
    head = ("service", ">providers", ">calls/s", ">errors/s", ">waiting", ">p50", ">p99")
    print_table(head, rows, empty="no services")
    if answer["next"]:
        print("There are more: use a larger --limit.", file=sys.stderr)
    return 0


def _show(options: argparse.Namespace) -> int:
    name = options.name.removeprefix("service/")
    listed = api_of(options).list("/v1/services", "services", _ALL, contains=name)
    found = next((each for each in listed["services"] if each["name"] == name), None)
    if found is None:
        raise CrosswireError(f"nobody provides service {name!r}")
    if options.json:
        print_json(found)
        return 0
    print(
        f"{harmless(name)}: {plural(found['calls'], 'call')} in progress, {found['waiting']:,} "
        f"waiting, {found['answered']:,} answered, {found['failed']:,} failed, "
        f"p50 {duration(found['p50_s'])}, p99 {duration(found['p99_s'])}"
    )
    print()
    rows = [
        (
            harmless(each["connection"]),
            each["protocol"],
            harmless(each["principal"]) or "-",
            each["calls"],
            each["free"],
        )
        for each in found["providers"]
    ]
    head = ("provider", "protocol", "principal", ">calls", ">free")
    print_table(head, rows, empty="no providers that you may see")
    if found["provider_count"] > len(rows):
        print(f"… of {plural(found['provider_count'], 'provider')}")
    return 0
