"""Call a service, through any protocol, and print its response."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from crosswire.cli.body import add_payload_options, content_type_of, payload_of, properties_of
from crosswire.cli.protocol_options import add_protocol_options, client_of, run_client, with_kind
from crosswire.cli.sub import print_message
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


def run(options: argparse.Namespace) -> int:
    """Print the response. Raises HubError for a call that fails, and ClientError."""
    payload = payload_of(options)
    if payload is None:
        payload = sys.stdin.buffer.read()
    # Providers often don't name the type of what they answer.
    print_message(run_client(_call(payload, options)), options, is_typed=False)
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
