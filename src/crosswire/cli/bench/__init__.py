"""Measure throughput and latency of a hub: a running one, or one started for the measurement."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from crosswire.cli.bench.contract import BenchTarget, Work
from crosswire.cli.bench.hub import StartedHub, started_hub
from crosswire.cli.bench.run import Figures, Latency, load, one_at_a_time
from crosswire.cli.hub import print_json
from crosswire.cli.parsers import add_examples
from crosswire.cli.protocol_options import add_protocol_options
from crosswire.client.connect import tls_context
from crosswire.listeners import PLAIN_LISTENERS
from crosswire.plurals import plural

__all__ = ["configure", "run"]

_LATENCIES = 500


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    parser.add_argument(
        "--count", type=_positive, default=50_000, help="number of messages (default: 50000)"
    )
    parser.add_argument(
        "--size", type=_positive, default=128, help="bytes of a payload (default: 128)"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--queue", action="store_true", help="through a queue (default)")
    kind.add_argument("--topic", action="store_true", help="through a topic")
    parser.add_argument(
        "--durable",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="acknowledge messages when they are on disk (default). For a topic the hub's "
        "configuration decides: then it has an effect only on a hub that is started here",
    )
    parser.add_argument(
        "--not-durable", dest="durable", action="store_false", help="the same as --no-durable"
    )
    parser.add_argument(
        "--window",
        type=_positive,
        default=1000,
        help="unacknowledged messages at a time (default: 1000)",
    )
    parser.add_argument(
        "--consumers", type=_positive, default=1, help="number of consumers (default: 1)"
    )
    parser.add_argument(
        "--lake",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a hub that is started here writes messages and ledger to its lake, and the work of "
        "that is part of its CPU time (default)",
    )
    parser.add_argument(
        "--running", action="store_true", help="use a running hub, at --host and --port"
    )
    add_protocol_options(parser)
    add_examples(
        parser,
        "crosswire bench",
        "crosswire bench --topic --via relink --size 1024 --count 100000",
        "crosswire bench --running --host hub.example --consumers 4 --json",
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def run(options: argparse.Namespace) -> int:
    """Measure and print the figures. Raises ClientError."""
    is_ours = not (options.running or options.port is not None)
    with _hub(options) if is_ours else nullcontext() as hub:
        work = Work(
            via=options.via,
            destination="topic/bench" if options.topic else "queue/bench",
            target=_target(options),
            ports={} if hub is None else hub.ports,
            size_bytes=options.size,
            window=options.window,
            consumers=options.consumers,
            durable=options.durable,
        )
        if hub is None:
            figures = load(work, options.count)
        else:
            wait = hub.wait_for_lake if options.lake else None
            figures = load(work, options.count, hub.cpu_s, wait)
        latency = one_at_a_time(work, min(options.count, _LATENCIES))
    if options.json:
        print_json(_values(work, figures, latency))
    else:
        _print(work, figures, latency)
    return 0


def _target(options: argparse.Namespace) -> BenchTarget:
    return BenchTarget(
        host=options.host,
        port=options.port,
        tls=tls_context(options.tls, options.cert, options.key, options.ca),
        token=options.token,
        curve_server=options.curve_server,
        curve_secret=options.curve_secret,
    )


@contextmanager
def _hub(options: argparse.Namespace) -> Iterator[StartedHub]:
    listeners = [name for name in PLAIN_LISTENERS if name.partition("-")[0] == options.via]
    durable = "true" if options.durable else "false"
    lake = "true" if options.lake else "false"
    config = f"[lake]\nmessages = {lake}\nledger = {lake}\n[topics.bench]\ndurable = {durable}\n"
    with started_hub(*listeners, config=config) as hub:
        yield hub


def _values(work: Work, figures: Figures, latency: Latency) -> dict[str, object]:
    return {
        "via": work.via,
        "destination": work.destination,
        "durable": work.durable,
        "size": work.size_bytes,
        "window": work.window,
        "consumers": work.consumers,
        "messages": figures.messages,
        "deliveries": figures.deliveries,
        "seconds": figures.seconds,
        "per_second": figures.per_second,
        "hub_cpu_us": figures.cpu_us,
        "answered_p50_us": latency.answered_us,
        "delivered_p50_us": latency.delivered_us,
    }


def _print(work: Work, figures: Figures, latency: Latency) -> None:
    disk = "durable" if work.durable else "not durable"
    size = plural(work.size_bytes, "byte")
    print(f"{work.via}, {work.destination}, {disk}, {size}, window {work.window}")
    deliveries = plural(figures.deliveries, "delivery", "deliveries")
    print(f"  {deliveries} in {figures.seconds:.2f} s", end="")
    print(f"   {figures.per_second:,.0f}/s", end="")
    if figures.cpu_us is not None:
        print(f"   {figures.cpu_us:.1f} µs of the hub's CPU time per delivery", end="")
    print()
    print(f"  one at a time, p50: {latency.answered_us:.0f} µs until acknowledged", end="")
    print(f", {latency.delivered_us:.0f} µs until delivered")
