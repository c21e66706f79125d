"""Serve a service that answers each call with its own payload, through any protocol."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence

from crosswire.cli.hub import print_json
from crosswire.cli.via.contract import IncomingMessage, Via, ViaMessage, via
from crosswire.cli.via.options import add_via_options, target_of, with_kind
from crosswire.plurals import plural

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    parser.add_argument("service", help="service/NAME[/METHOD]; a bare name is a service")
    parser.add_argument(
        "--count", type=int, default=0, help="end after this many calls (default: never)"
    )
    add_via_options(parser)


def run(options: argparse.Namespace) -> int:
    """Answer until interrupted or until `--count` calls. Raises ClientError."""
    service = with_kind(options.service, "service")
    answered = asyncio.run(_serve(via(options.via, target_of(options)), service, options))
    print(f"{plural(answered, 'call')} answered", file=sys.stderr)
    return 0


async def _serve(adapter: Via, service: str, options: argparse.Namespace) -> int:
    answered = 0
    enough = asyncio.Event()

    async def answer(got: IncomingMessage) -> ViaMessage:
        nonlocal answered
        answered += 1
        if answered == options.count:
            enough.set()
        return ViaMessage(
            payload=got.payload, content_type=got.content_type, properties=got.properties
        )

    def ready() -> None:
        if options.json:
            print_json({"ready": True, "service": service})
            sys.stdout.flush()
        else:
            print(f"serving {service}", file=sys.stderr)

    serving = asyncio.create_task(adapter.serve(service, answer, ready))
    waiting = asyncio.create_task(enough.wait())
    try:
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        else:
            # The answer to the last call is returned but not written yet.
            await asyncio.sleep(0.1)
    finally:
        waiting.cancel()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    return answered
