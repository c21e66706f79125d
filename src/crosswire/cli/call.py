"""Call a service, through any protocol, and print its response."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from crosswire.cli.body import add_payload_options, content_type_of, payload_of, properties_of
from crosswire.cli.parsers import add_examples
from crosswire.cli.protocol_options import add_protocol_options, client_of, run_client, with_kind
from crosswire.cli.sub import print_message
from crosswire.cli.table import in_short
from crosswire.client import Message

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    parser.add_argument("service", help="service/NAME[/METHOD]; a bare name is a service")
    add_payload_options(parser)
    parser.add_argument(
        "--content-type", metavar="TYPE", help="the payload's type (default: detected)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long to wait for the response (default: 30)",
    )
    parser.add_argument(
        "--raw", action="store_true", help="print the response's payload only, unchanged"
    )
    add_protocol_options(parser)
    add_examples(
        parser,
        """crosswire call stock/check '{"item": "tea"}'""",
        "crosswire call stock/check --file request.json --via epoxy --bond stock.bond --json",
    )


def run(options: argparse.Namespace) -> int:
    """Print the response: its payload to standard output, its properties to standard error, so that
    JSON is JSON for the next program. Raises HubError for a call that fails, and ClientError."""
    payload = payload_of(options)
    if payload is None:
        payload = sys.stdin.buffer.read()
    response = run_client(_call(payload, options))
    if response.properties and not (options.json or options.raw):
        print(f"properties: {in_short(response.properties)}", file=sys.stderr)
        response.properties = {}
    # Providers often don't name the type of what they answer.
    print_message(response, options, is_typed=False)
    return 0


async def _call(payload: bytes, options: argparse.Namespace) -> Message:
    async with client_of(options) as hub:
        return await hub.call(
            with_kind(options.service, "service"),
            payload,
            properties=properties_of(options),
            content_type=options.content_type or content_type_of(payload),
            timeout_s=options.timeout,
        )
