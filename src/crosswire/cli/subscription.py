"""List named subscriptions with their lag, show one, delete one, or give one to another user."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from crosswire.cli.confirmation import add_confirmation, require_confirmation
from crosswire.cli.hub import (
    Api,
    add_hub_options,
    add_limit,
    api_of,
    duration,
    moment,
    path_of,
    print_json,
)
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
        "named subscriptions with their lag and consumers",
        "crosswire subscription list",
        "crosswire subscription list --sort lag --topic ticks/acme",
    )
    listing.add_argument("--contains", metavar="TEXT", help="only names that contain this")
    listing.add_argument(
        "--sort", choices=("name", "lag"), help="lag begins with the largest (default: name)"
    )
    listing.add_argument("--topic", help="only subscriptions to this topic, without topic/")
    add_limit(listing)
    showing = add_action(
        actions, "show", "one with its lag and its consumers", "crosswire subscription show audit"
    )
    showing.add_argument("name", help="the subscription's name")
    deleting = add_action(
        actions,
        "delete",
        "delete one without consumers, and its undelivered messages",
        "crosswire subscription delete audit",
    )
    deleting.add_argument("name", help="the subscription's name")
    assigning = add_action(
        actions,
        "assign",
        "give one that nobody uses to another user",
        "crosswire subscription assign audit anna --owner bert",
    )
    assigning.add_argument("name", help="the subscription's name")
    assigning.add_argument("user", help="the new owner; '' for nobody")
    add_confirmation(deleting)
    for each in (showing, deleting, assigning):
        each.add_argument(
            "--owner", metavar="USER", help="whose it is now (default: yours); '' for nobody's"
        )
    for each in (listing, showing, deleting, assigning):
        add_hub_options(each)


def run(options: argparse.Namespace) -> int:
    """Run the action and print its result. Raises ClientError."""
    actions = {"list": _list, "show": _show, "delete": _delete, "assign": _assign}
    return actions[options.action](options)


def _list(options: argparse.Namespace) -> int:
    answer = api_of(options).list(
        "/v1/subscriptions",
        "subscriptions",
        options.limit,
        contains=options.contains,
        sort=options.sort,
        topic=options.topic,
    )
    if options.json:
        print_json(answer)
        return 0
    rows = [
        (
            harmless(each["name"]),
            harmless(each["owner"]) or "-",
            harmless(each["pattern"]),
            harmless(each["filter"]) or "-",
            _lag(each),
            duration(each["lag_s"]),
            each["held"],
            each["consumer_count"],
            each["dead_letters"],
        )
        for each in answer["subscriptions"]
    ]
    head = (
        *("name", "owner", "topics", "filter", ">lag", ">oldest"),
        *(">held", ">consumers", ">dead letters"),
    )
    print_table(head, rows, empty="no named subscriptions")
    if answer["next"]:
        print("There are more: use a larger --limit.", file=sys.stderr)
    return 0


def _lag(subscription: dict[str, Any]) -> str:
    """Messages that are not settled; counting them is limited."""
    more = "" if subscription["lag_is_exact"] else "+"
    return f"{subscription['lag_messages']:,}{more}"


def _show(options: argparse.Namespace) -> int:
    found = _found(api_of(options), options)
    if options.json:
        print_json(found)
        return 0
    owner = f" of {harmless(found['owner'])}" if found["owner"] else ""
    filter_ = f", filter {harmless(found['filter'])}" if found["filter"] else ""
    print(f"{harmless(found['name'])}{owner}: topic/{harmless(found['pattern'])}{filter_}")
    print(
        f"{_lag(found)} messages not settled ({duration(found['lag_s'])}), {found['held']:,} held, "
        f"{plural(found['dead_letters'], 'dead letter')}, created {moment(found['created'])}"
    )
    if found.get("stopped"):
        print(f"stopped: {harmless(found['stopped'])}")
    rows = [
        (
            harmless(each["connection"]),
            each["protocol"],
            harmless(each["principal"]) or "-",
            each["held"],
            each["free"],
        )
        for each in found["consumers"]
    ]
    print()
    head = ("consumer", "protocol", "principal", ">held", ">free")
    print_table(head, rows, empty="no consumers")
    if found["consumer_count"] > len(rows):
        print(f"… of {plural(found['consumer_count'], 'consumer')}")
    return 0


def _found(api: Api, options: argparse.Namespace) -> dict[str, Any]:
    """The subscription of this name. Raises CrosswireError if there is none, or several owners have
    one."""
    listed = api.list("/v1/subscriptions", "subscriptions", _ALL, contains=options.name)
    found = [
        each
        for each in listed["subscriptions"]
        if each["name"] == options.name and options.owner in (None, each["owner"])
    ]
    if not found:
        raise CrosswireError(f"there is no subscription {options.name!r}")
    if len(found) > 1:
        owners = ", ".join(each["owner"] or "''" for each in found)
        raise CrosswireError(f"several users have one of this name: use --owner with {owners}")
    subscription: dict[str, Any] = found[0]
    return subscription


def _delete(options: argparse.Namespace) -> int:
    api = api_of(options)
    if not options.yes:
        found = _found(api, options)
        if found["lag_messages"]:
            # Without a backlog nothing is lost that could not be made again.
            name = harmless(options.name)
            require_confirmation(f"Delete {name}, with {_lag(found)} messages not settled?")
    answer = api.delete(_path(options))
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
