"""Print the messages of a queue or a topic, through any protocol, and settle them."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any, Final

from crosswire.cli.body import as_body, content_type_of, shown_body
from crosswire.cli.hub import print_json
from crosswire.cli.parsers import add_examples
from crosswire.cli.protocol_options import add_protocol_options, client_of, run_client, with_kind
from crosswire.cli.stopping import stop_on_signal
from crosswire.cli.table import harmless
from crosswire.client import ClientSubscription, Message
from crosswire.client.message import BYTES, JSON
from crosswire.errors import ConnectionLost, DeliveryLost, RequestTimeout
from crosswire.plurals import plural
from crosswire.wire.registry import protocol

__all__ = ["configure", "print_message", "run"]

_TYPED: Final = ("emp", "epoxy", "micromsg2")
"""Protocols whose messages from the hub always name their type."""
_WINDOW: Final = 16
"""Unsettled messages at a time: few, since others may want the rest."""


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
        "--filter",
        default="",
        help="only messages whose properties pass, as 'price > 10; name & acme'",
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
    add_protocol_options(parser)
    add_examples(
        parser,
        "crosswire sub orders --count 1",
        "crosswire sub 'topic/ticks/#' --filter 'price > 10' --json",
        "crosswire sub topic/ticks/acme --name audit --from earliest --via relink",
    )


def run(options: argparse.Namespace) -> int:
    """Print messages until SIGTERM or SIGINT, or `--count` or `--wait` is reached; 1 if fewer than
    `--count` arrived. Raises HubError and ClientError.
    """
    destination = with_kind(options.destination, "queue")
    seen = run_client(_print_all(destination, options))
    print(f"{plural(seen, 'message')} from {destination}", file=sys.stderr)
    return 0 if not options.count or seen == options.count else 1


async def _print_all(destination: str, options: argparse.Namespace) -> int:
    stop = stop_on_signal()
    listener = "subscribers" if destination.startswith("topic/") else "workers"
    connecting = asyncio.current_task()
    subscription: ClientSubscription | None = None
    is_subscribed = False

    async def unsubscribe() -> None:
        """On a signal: closing the subscription ends `receive`."""
        await stop.wait()
        if subscription is not None and is_subscribed:
            await subscription.close()
        elif connecting is not None:
            connecting.cancel()

    unsubscribing = asyncio.create_task(unsubscribe())
    try:
        async with client_of(options, listener) as hub:
            subscription = hub.subscribe(
                destination,
                name=options.name,
                filter=options.filter,
                start=options.start,
                window=min(options.count, _WINDOW) or _WINDOW,
            )
            async with subscription:
                is_subscribed = True
                remark = "" if hub.knows_ids else f" ({protocol(options.via).title} carries no ids)"
                print(f"subscribed to {destination}{remark}", file=sys.stderr, flush=True)
                try:
                    return await _print_messages(subscription, options, stop)
                finally:
                    if stop.is_set():
                        await unsubscribing
    except asyncio.CancelledError:
        if stop.is_set() and not is_subscribed:
            return 0
        raise
    finally:
        unsubscribing.cancel()


async def _print_messages(
    subscription: ClientSubscription, options: argparse.Namespace, stop: asyncio.Event
) -> int:
    seen = 0
    while not options.count or seen < options.count:
        try:
            message = await subscription.receive(options.wait)
        except RequestTimeout:
            break
        except ConnectionLost:
            if stop.is_set():
                break
            raise
        print_message(message, options, is_typed=options.via in _TYPED)
        # After printing: a message that could not be printed is delivered again.
        try:
            await message.settle()
            seen += 1
        except DeliveryLost as error:
            print(harmless(str(error)), file=sys.stderr)
    return seen


def print_message(message: Message, options: argparse.Namespace, *, is_typed: bool = True) -> None:
    """Write a message to standard output in the format that `--raw` and `--json` choose.

    The type of one that is not `is_typed` is detected, unless it names one other than bytes.
    """
    if options.raw:
        sys.stdout.buffer.write(message.payload + b"\n")
        sys.stdout.buffer.flush()
        return
    detected = content_type_of(message.payload)
    content_type = message.content_type
    if content_type == BYTES and not is_typed:
        content_type = detected
    elif content_type == JSON != detected:
        content_type = BYTES
    shown: dict[str, Any] = {
        "id": message.id,
        "destination": message.destination,
        "attempt": message.attempt,
        "content_type": content_type,
        "properties": message.properties,
        **as_body(message.payload, content_type),
    }
    if options.json:
        print_json({key: value for key, value in shown.items() if value is not None})
    else:
        identifier = "" if message.id is None else f"{message.id}  "
        print(identifier + shown_body(shown))
    sys.stdout.flush()
