"""Send to a queue or publish to a topic, through any protocol; ends when it is acknowledged."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from crosswire.cli.body import add_payload_options, content_type_of, payload_of, properties_of
from crosswire.cli.hub import print_json
from crosswire.cli.lines import read_lines
from crosswire.cli.parsers import add_examples
from crosswire.cli.protocol_options import add_protocol_options, client_of, run_client, with_kind
from crosswire.client import OutgoingMessage
from crosswire.errors import CrosswireError
from crosswire.plurals import plural
from crosswire.wire.registry import protocol

__all__ = ["configure", "run"]

_RUN: Final = 1000
_RUN_BYTES: Final = 4 << 20
"""Messages, and bytes of them, that are sent before their acknowledgements are awaited."""


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    parser.add_argument("destination", help="queue/NAME or topic/NAME; a bare name is a queue")
    add_payload_options(parser)
    several = parser.add_mutually_exclusive_group()
    several.add_argument(
        "--lines",
        action="store_true",
        help="each line is a message, sent as it arrives; with --json, one object for each group "
        "of lines that was acknowledged",
    )
    several.add_argument(
        "--count", type=int, default=1, help="how many times to send it (default: 1)"
    )
    parser.add_argument(
        "--content-type", metavar="TYPE", help="the payload's type (default: detected)"
    )
    add_protocol_options(parser)
    add_examples(
        parser,
        """crosswire pub orders '{"item": "tea"}' --property price=12""",
        "crosswire pub topic/ticks/acme --file tick.json --via micromsg2",
        "tail -f access.log | crosswire pub topic/access --lines",
    )


def run(options: argparse.Namespace) -> int:
    """Print the ids that the protocol returned. Raises HubError and ClientError."""
    sent = _Sent(with_kind(options.destination, "queue"), options)
    try:
        run_client(_publish(sent, options))
    except BaseException:
        if sent.count:
            # What is counted here was acknowledged.
            sent.print_total()
        raise
    sent.print_total()
    return 0


async def _publish(sent: _Sent, options: argparse.Namespace) -> None:
    async with client_of(options) as hub, aclosing(_runs(options)) as runs:
        async for run in runs:
            sent.add(await hub.publish_many(sent.destination, run))


async def _runs(options: argparse.Namespace) -> AsyncGenerator[list[OutgoingMessage], None]:
    """All messages, some at a time."""
    if options.lines and options.payload is None:
        descriptor = _input(options.file)
        try:
            async with aclosing(read_lines(descriptor)) as chunks:
                async for lines in chunks:
                    for start in range(0, len(lines), _RUN):
                        yield [_message(each, options) for each in lines[start : start + _RUN]]
        finally:
            if options.file not in (None, "-"):
                os.close(descriptor)
        return
    payload = payload_of(options)
    if payload is None:
        payload = sys.stdin.buffer.read()
    if options.lines:
        yield [_message(each, options) for each in payload.splitlines()]
        return
    message = _message(payload, options)
    most = max(min(_RUN, _RUN_BYTES // max(len(payload), 1)), 1)
    for start in range(0, options.count, most):
        yield [message] * min(most, options.count - start)


def _input(file: str | None) -> int:
    if file in (None, "-"):
        return sys.stdin.fileno()
    assert file is not None
    try:
        return os.open(file, os.O_RDONLY)
    except OSError as error:
        raise CrosswireError(f"can't read {file}: {error.strerror}") from None


def _message(payload: bytes, options: argparse.Namespace) -> OutgoingMessage:
    return OutgoingMessage(
        body=payload,
        content_type=options.content_type or content_type_of(payload),
        properties=properties_of(options),
    )


class _Sent:
    """What was acknowledged, printed as it is."""

    def __init__(self, destination: str, options: argparse.Namespace) -> None:
        self.destination = destination
        self._title = protocol(options.via).title
        self._as_json = options.json
        self.count = 0
        self._with_id = 0

    def add(self, ids: Sequence[int | None]) -> None:
        known = [each for each in ids if each is not None]
        self.count += len(ids)
        self._with_id += len(known)
        if self._as_json:
            print_json({"destination": self.destination, "count": len(ids), "ids": known})
        else:
            for identifier in known:
                print(identifier)
        sys.stdout.flush()

    def print_total(self) -> None:
        if not self._as_json:
            has_ids = self._with_id == self.count
            remark = "" if has_ids else f" ({self._title} returns no ids)"
            total = plural(self.count, "message")
            print(f"{total} to {self.destination}{remark}", file=sys.stderr)
