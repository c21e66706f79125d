"""Serve a service that answers each call with its own payload, through any protocol."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from crosswire.cli.hub import print_json
from crosswire.cli.parsers import add_examples
from crosswire.cli.protocol_options import add_protocol_options, client_of, run_client, with_kind
from crosswire.cli.stopping import stop_on_signal
from crosswire.client import Message, OutgoingMessage
from crosswire.plurals import plural

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    parser.add_argument("service", help="service/NAME[/METHOD]; a bare name is a service")
    parser.add_argument(
        "--count", type=int, default=0, help="end after this many calls (default: never)"
    )
    add_protocol_options(parser)
    add_examples(parser, "crosswire echo-service echo", "crosswire echo-service echo --via epoxy")


def run(options: argparse.Namespace) -> int:
    """Answer until SIGTERM or SIGINT, or until `--count` calls. Raises HubError and ClientError."""
    answered = run_client(_serve(with_kind(options.service, "service"), options))
    print(f"{plural(answered, 'call')} answered", file=sys.stderr)
    return 0


async def _serve(name: str, options: argparse.Namespace) -> int:
    answered = 0
    stop = stop_on_signal()

    async def answer(call: Message) -> OutgoingMessage:
        nonlocal answered
        answered += 1
        if answered == options.count:
            stop.set()
        return OutgoingMessage(
            body=call.payload, content_type=call.content_type, properties=call.properties
        )

    async with client_of(options, "workers") as hub, await hub.serve(name, answer) as service:
        if options.json:
            print_json({"ready": True, "service": name})
            sys.stdout.flush()
        else:
            print(f"serving {name}", file=sys.stderr)
        service.ended.add_done_callback(lambda _: stop.set())
        await stop.wait()
        if service.ended.done():
            service.ended.result()
    return answered
