"""Call a service, through any protocol, and print its response."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from crosswire.cli.body import add_payload_options, content_type_of, payload_of, properties_of
from crosswire.cli.sub import print_message
from crosswire.cli.via.contract import ViaMessage, via
from crosswire.cli.via.options import add_via_options, target_of, with_kind

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
    add_via_options(parser)


def run(options: argparse.Namespace) -> int:
    """Print the response. Raises ClientError for a call that fails."""
    payload = payload_of(options)
    if payload is None:
        payload = sys.stdin.buffer.read()
    message = ViaMessage(
        payload=payload,
        content_type=options.content_type or content_type_of(payload),
        properties=properties_of(options),
    )
    adapter = via(options.via, target_of(options))
    service = with_kind(options.service, "service")
    print_message(asyncio.run(adapter.call(service, message, options.timeout)), options)
    return 0
