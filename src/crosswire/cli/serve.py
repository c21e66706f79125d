"""Run a hub: all protocols on one event loop, until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from crosswire import config as configuration
from crosswire.cli.table import print_table
from crosswire.config import LISTENERS, PLAIN_LISTENERS, Address, Config
from crosswire.errors import ConfigError
from crosswire.logs import log_event, send_to_stderr, set_level
from crosswire.server.exposure import refuse_exposures
from crosswire.server.server import Server
from crosswire.toml import dotted
from crosswire.web.listener import WebListener

__all__ = ["configure", "run"]

_log = logging.getLogger("crosswire.serve")


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    parser.add_argument(
        "--config", metavar="FILE", help="crosswire.toml; other options override its settings"
    )
    parser.add_argument("--data", metavar="DIR", help="folder of store and lake")
    parser.add_argument(
        "--listen",
        metavar="NAME=HOST:PORT",
        action="append",
        default=[],
        type=_listener,
        help="move a listener; port 0 takes a free one, NAME=off leaves it out. "
        f"NAME: {', '.join(LISTENERS)}",
    )
    parser.add_argument(
        "--bond", metavar="FILE", action="append", default=[], help="a .bond file with services"
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="on other addresses than loopback: allow a hub without users, tokens without TLS,"
        " and a configuration that other users can read",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the addresses as JSON when ready"
    )
    parser.add_argument(
        "--log",
        choices=("debug", "info", "warning", "error"),
        help="the lowest level to log (default: warning)",
    )


def _listener(text: str) -> tuple[str, str]:
    name, equals, address = text.partition("=")
    if not equals or name not in LISTENERS:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=HOST:PORT with a known NAME")
    if address != "off":
        try:
            Address.parse(address)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return name, address


def run(options: argparse.Namespace) -> int:
    """Run a hub until a signal; 1 if a second one ended the drain early.

    Raises ConfigError and StoreError.
    """
    config = merged(options)
    send_to_stderr(config.log)
    for each in refuse_exposures(config, _file(options)):
        setting = dotted(each.path)
        log_event(_log, logging.WARNING, each.what, setting=setting, hint=each.hint)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, options))


def _file(options: argparse.Namespace) -> Path | None:
    return None if options.config is None else Path(options.config)


def merged(options: argparse.Namespace) -> Config:
    """The file's settings, overridden by those of the command line. Raises ConfigError."""
    config = Config() if options.config is None else configuration.load(Path(options.config))
    changes: dict[str, object] = {}
    if options.data is not None:
        changes["data"] = options.data
    if options.listen:
        changes["listen"] = {**config.listen, **dict(options.listen)}
    if options.bond:
        files = (*config.bond.files, *options.bond)
        changes["bond"] = msgspec.structs.replace(config.bond, files=files)
    if options.insecure:
        changes["insecure"] = True
    if options.log is not None:
        changes["log"] = options.log
    config = msgspec.structs.replace(config, **changes)
    for name in config.listen:
        if name not in PLAIN_LISTENERS and config.tls is None and config.listen[name] != "off":
            raise ConfigError(
                f"the listener {name} needs a certificate: [tls] in the configuration"
            )
    return config


async def _serve(config: Config, options: argparse.Namespace) -> int:
    server = Server(config, http=WebListener)
    stopping = asyncio.Event()
    hurried = False

    def stop() -> None:
        nonlocal hurried
        if stopping.is_set() and not hurried:
            hurried = True
            server.hurry()
            print("crosswire serve: second signal: stopping at once", file=sys.stderr)
        stopping.set()

    loop = asyncio.get_running_loop()
    # Before `start`, which can take long on a large store: a signal during it stops the hub in
    # order as soon as it has started.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, _reload, server, options)
    listening = await server.start()
    _calm_collector()
    try:
        if not stopping.is_set():
            _print_ready(listening, as_json=options.json)
        elif not hurried:
            print("crosswire serve: signal before it was ready: stopping", file=sys.stderr)
        await stopping.wait()
        log_event(_log, logging.INFO, "draining", connections=len(server.context.gateways))
    finally:
        await server.stop()
    log_event(_log, logging.INFO, "stopped")
    # Everything acknowledged is on disk either way; after a second signal peers were cut off
    # without waiting for their settlements.
    return 1 if hurried else 0


def _calm_collector() -> None:
    """Make garbage collection rare, and each one short.

    Modules and configuration stay for the life of the process (`freeze`), and messages are in no
    reference cycles: with Python's default thresholds a busy hub spends a sixth of its time on
    collections that find nothing. A collection of the youngest objects is part of a turn of the
    event loop: it takes about 1 ms for 5,000.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 5, 200)


def _reload(server: Server, options: argparse.Namespace) -> None:
    """Read the configuration again. The result is logged as a warning, so that the default level
    shows it to the sender of the signal."""
    try:
        config = merged(options)
        refuse_exposures(config, _file(options))
        waiting = server.reload(config)
    except ConfigError as error:
        log_event(_log, logging.ERROR, "not reloaded", mistakes=str(error).splitlines())
        return
    set_level(config.log)
    log_event(_log, logging.WARNING, "reloaded", needs_restart=waiting)


def _print_ready(listening: dict[str, Address], *, as_json: bool) -> None:
    listen = {name: str(address) for name, address in listening.items()}
    if as_json:
        print(msgspec.json.encode({"ready": True, "listen": listen}).decode(), flush=True)
        return
    print_table(("listener", "address"), sorted(listen.items()))
    sys.stdout.flush()
    print("ready; stop with Ctrl-C", file=sys.stderr)
