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
from crosswire.config import LISTENERS, Address, Config
from crosswire.errors import ConfigError
from crosswire.logs import log_event, send_to_stderr, set_level
from crosswire.server.exposure import refuse_exposures
from crosswire.server.server import Server
from crosswire.web.listener import WebListener

__all__ = ["configure", "run"]

_log = logging.getLogger("crosswire.serve")


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help="crosswire.toml; what follows overrides it"
    )
    parser.add_argument("--data", metavar="DIR", help="where store and lake live")
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
    parser.add_argument("--json", action="store_true", help="report readiness as JSON")
    parser.add_argument(
        "--log", choices=("debug", "info", "warning", "error"), help="what to log (warning)"
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
    config = merged(options)
    send_to_stderr(config.log)
    for each in refuse_exposures(config, _file(options)):
        setting = ".".join(each.path)
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
        if name.endswith("-tls") and config.tls is None and config.listen[name] != "off":
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
            print("crosswire serve: a second signal: it stops at once", file=sys.stderr)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, _reload, server, options)
    listening = await server.start()
    _calm_collector()
    try:
        if not stopping.is_set():
            _print_ready(listening, as_json=options.json)
        elif not hurried:
            print("crosswire serve: a signal: it stops before it was ready", file=sys.stderr)
        await stopping.wait()
        log_event(_log, logging.INFO, "draining", connections=len(server.context.gateways))
    finally:
        await server.stop()
    log_event(_log, logging.INFO, "stopped")
    # All that was acknowledged is on disk either way; in a hurry peers were not waited for.
    return 1 if hurried else 0


def _calm_collector() -> None:
    """What is loaded by now stays, and messages are not in cycles: with Python's own settings a
    sixth of a busy hub's time would go into looking for garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _reload(server: Server, options: argparse.Namespace) -> None:
    """Logged as a warning: the sender of a signal wants to see its outcome."""
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
    print("ready; stop it with Ctrl-C", file=sys.stderr)
