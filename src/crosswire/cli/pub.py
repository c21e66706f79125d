"""Send to a queue or publish to a topic, through any protocol; ends when it is acknowledged."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from crosswire.cli.body import add_payload_options, content_type_of, payload_of, properties_of
from crosswire.cli.hub import print_json
from crosswire.cli.protocol_options import add_protocol_options, client_of, run_client, with_kind
from crosswire.client import OutgoingMessage
from crosswire.plurals import plural
from crosswire.wire.registry import protocol

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    parser.add_argument("destination", help="queue/NAME or topic/NAME; a bare name is a queue")
    add_payload_options(parser)
    parser.add_argument("--lines", action="store_true", help="each line is a message")
    parser.add_argument(
        "--count", type=int, default=1, help="how many times to send it (default: 1)"
    )
    parser.add_argument(
        "--content-type", metavar="TYPE", help="the payload's type (default: detected)"
    )
    add_protocol_options(parser)


def run(options: argparse.Namespace) -> int:
    """Print the ids that the protocol returned. Raises HubError and ClientError."""
    payload = payload_of(options)
    if payload is None:
        payload = sys.stdin.buffer.read()
    payloads = payload.splitlines() if options.lines else [payload]
    messages = [
        OutgoingMessage(
            body=each,
            content_type=options.content_type or content_type_of(each),
            properties=properties_of(options),
        )
        for each in payloads
    ] * options.count
    destination = with_kind(options.destination, "queue")
    ids = run_client(_publish(destination, messages, options))
    known = [identifier for identifier in ids if identifier is not None]
    if options.json:
        print_json({"destination": destination, "count": len(messages), "ids": known})
        return 0
    for identifier in known:
        print(identifier)
    remark = "" if len(known) == len(ids) else f" ({protocol(options.via).title} returns no ids)"
    print(f"{plural(len(messages), 'message')} to {destination}{remark}", file=sys.stderr)
    return 0


async def _publish(
    destination: str, messages: list[OutgoingMessage], options: argparse.Namespace
) -> list[int | None]:
    async with client_of(options) as hub:
        return await hub.publish_many(destination, messages)
