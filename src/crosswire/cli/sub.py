"""Print the messages of a queue or a topic, through any protocol, and settle them."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from crosswire.cli.body import as_body, content_type_of, shown_body
from crosswire.cli.hub import print_json
from crosswire.cli.via.contract import IncomingMessage, Via, ViaSubscription, via
from crosswire.cli.via.options import add_via_options, target_of, with_kind
from crosswire.plurals import plural

__all__ = ["configure", "print_message", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    parser.add_argument(
        "destination", help="queue/NAME, or topic/NAME with wildcards; a bare name is a queue"
    )
    parser.add_argument(
        "--count", type=int, default=0, help="end after this many messages (default: never)"
    )
    parser.add_argument(
        "--wait", type=float, metavar="SECONDS", help="end when no message arrives for this long"
    )
    parser.add_argument(
        "--filter", default="", help="only messages whose properties pass, as price>N10;name&Tacme"
    )
    parser.add_argument("--name", default="", help="name of a durable subscription to a topic")
    parser.add_argument(
        "--from",
        dest="start",
        default="",
        help="where a new subscription starts: earliest, latest, an id or a time",
    )
    parser.add_argument(
        "--raw", action="store_true", help="print payloads only, unchanged, one per line"
    )
    add_via_options(parser)


def run(options: argparse.Namespace) -> int:
    """Print messages until `--count` or `--wait` is reached; 1 if fewer than `--count` arrived.

    Raises ClientError.
    """
    wanted = ViaSubscription(
        destination=with_kind(options.destination, "queue"),
        filter=options.filter,
        name=options.name,
        start=options.start,
        window=min(options.count, 16) or 16,
    )
    seen = asyncio.run(_print_all(via(options.via, target_of(options)), wanted, options))
    print(f"{plural(seen, 'message')} from {wanted.destination}", file=sys.stderr)
    return 0 if not options.count or seen == options.count else 1


async def _print_all(adapter: Via, wanted: ViaSubscription, options: argparse.Namespace) -> int:
    seen = 0
    async with aclosing(adapter.subscribe(wanted)) as arriving:
        while not options.count or seen < options.count:
            try:
                async with asyncio.timeout(options.wait):
                    got = await anext(arriving)
            except (TimeoutError, StopAsyncIteration):
                break
            print_message(got, options)
            seen += 1
            # After printing: a message that could not be printed is delivered again.
            if got.settle is not None:
                await got.settle()
    return seen


def print_message(got: IncomingMessage, options: argparse.Namespace) -> None:
    """Write a message to standard output in the format that `--raw` and `--json` choose."""
    if getattr(options, "raw", False):
        sys.stdout.buffer.write(got.payload + b"\n")
        sys.stdout.buffer.flush()
        return
    content_type = got.content_type or content_type_of(got.payload)
    if content_type == "application/json" and content_type_of(got.payload) != content_type:
        content_type = "application/octet-stream"
    message: dict[str, Any] = {
        "id": got.id,
        "destination": got.destination,
        "attempt": got.attempt,
        "content_type": content_type,
        "properties": got.properties,
        **as_body(got.payload, content_type),
    }
    if options.json:
        print_json({key: value for key, value in message.items() if value != 0 or key == "json"})
    else:
        print(shown_body(message))
    sys.stdout.flush()
