"""Search messages by destination, time, property, correlation, outcome or text, newest first.

All that the hub still knows is searched: memory, store and lake. What you may not read is found by
its destination and time only, and shown without its content.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Final

from crosswire.cli.body import filter_of, shown_body
from crosswire.cli.hub import Api, add_hub_options, add_limit, api_of, moment, print_json
from crosswire.cli.parsers import add_examples
from crosswire.cli.progress import progress_lines
from crosswire.cli.table import harmless, print_table
from crosswire.cli.times import AGO, time_of
from crosswire.plurals import plural

__all__ = ["configure", "run"]

_OUTCOMES: Final = (
    *("waiting", "held", "settled", "dead", "expired", "dropped", "replayed", "published"),
    *("answered", "failed", "unknown"),
)
_PAGE: Final = 1000


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    parser.add_argument(
        "text", nargs="?", help="a text in the payload, the key or a property, in any case"
    )
    parser.add_argument(
        "--destination", metavar="D", help="queue/NAME, service/NAME, or topic/NAME with wildcards"
    )
    parser.add_argument(
        "--since", type=time_of, metavar="TIME", help=f"accepted from then on: {AGO}"
    )
    parser.add_argument("--until", type=time_of, metavar="TIME", help="accepted before")
    parser.add_argument(
        "--filter", default="", help="messages whose properties pass, as 'price > 10'"
    )
    parser.add_argument("--correlation", help="the correlation of a request and its response")
    parser.add_argument(
        "--outcome",
        choices=_OUTCOMES,
        metavar="OUTCOME",
        help=f"what became of them: {', '.join(_OUTCOMES)}",
    )
    add_limit(parser, 100)
    add_hub_options(parser)
    add_examples(
        parser,
        "crosswire find --destination queue/orders --since 2h --outcome dead",
        "crosswire find tea --filter 'price > 10' --json",
        "crosswire find --destination 'topic/ticks/#' --since 2026-11-15T08:00 --until 2h",
    )


def run(options: argparse.Namespace) -> int:
    """Print the messages. Raises ClientError."""
    answer = _search(api_of(options), options)
    found = answer["messages"]
    if options.json:
        print_json(answer)
        return 0
    rows = [
        (
            each["message"]["id"],
            moment(each["message"]["time"]),
            harmless(each["message"]["destination"]),
            each["outcome"],
            shown_body(each["message"]),
        )
        for each in found
    ]
    print_table(("id", "accepted", "destination", "outcome", "payload"), rows, empty="no messages")
    if answer["next"]:
        print("There may be more: use a larger --limit.", file=sys.stderr)
    if rows:
        print("See what happened to one: crosswire trace ID", file=sys.stderr)
    return 0


def _search(api: Api, options: argparse.Namespace) -> dict[str, Any]:
    """All pages until the limit: each takes the hub some seconds at most, and may be empty."""
    show = progress_lines()
    found: list[dict[str, Any]] = []
    cursor = ""
    while True:
        page = api.get(
            "/v1/messages",
            text=options.text,
            destination=options.destination,
            since=options.since and options.since.isoformat(),
            until=options.until and options.until.isoformat(),
            property=filter_of(options),
            correlation=options.correlation,
            outcome=options.outcome,
            limit=min(options.limit - len(found), _PAGE),
            cursor=cursor,
        )
        found += page["messages"]
        cursor = page["next"]
        if not cursor or len(found) >= options.limit:
            return {"messages": found, "next": cursor}
        show(f"searching: {plural(len(found), 'message')} so far")
