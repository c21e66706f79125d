"""Run a hub: all protocols on one event loop, until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from crosswire import config as configuration
from crosswire.cli.parsers import add_examples
from crosswire.cli.table import print_table
from crosswire.config import LISTENERS, PLAIN_LISTENERS, Address, Config
from crosswire.errors import ConfigError
from crosswire.logs import log_event, send_to_stderr, set_level
from crosswire.plurals import plural
from crosswire.server.collector import Collector
from crosswire.server.exposure import refuse_exposures
from crosswire.server.server import Server
from crosswire.server.service_manager import ServiceManager
from crosswire.server.waits import describe_waits
from crosswire.toml import dotted
from crosswire.web.listener import WebListener

__all__ = ["configure", "run"]

_log = logging.getLogger("crosswire.serve")

_SWITCH_S = 0.001
_WAIT_S = 1.0
_WAITS = 10
"""Peers that are named in the log while the hub waits for them."""


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
    parser.add_argument(
        "--log-format",
        choices=("auto", "json", "text"),
        default="auto",
        help="how to log: auto is text on a terminal, else JSON (default: auto)",
    )
    add_examples(
        parser,
        "crosswire serve --data /var/lib/crosswire",
        "crosswire serve --config /etc/crosswire/crosswire.toml --log info",
        "crosswire serve --listen emp=127.0.0.1:0 --listen relink=off --json",
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
    send_to_stderr(config.log, options.log_format)
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
    manager = ServiceManager()
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
    loop.add_signal_handler(signal.SIGHUP, _reload, server, options, manager)
    listening = await server.start()
    context = server.context
    collector = Collector([context.connection_slots, context.http_slots, server])
    collector.start()
    _shorten_waits()

    def on_role() -> None:
        _print_role(server, as_json=options.json)
        if not server.is_leading:
            # Of the hub that it was, nothing is used any more.
            collector.free_later()

    server.on_role = on_role
    try:
        if not stopping.is_set():
            if server.replica is None:
                _print_ready(listening, as_json=options.json)
            else:
                _print_role(server, as_json=options.json)
            # A standby is ready, too: what systemd waits for is that the process does its part.
            manager.ready(_status(listening))
            manager.keep_alive(loop)
        elif not hurried:
            print("crosswire serve: signal before it was ready: stopping", file=sys.stderr)
        await _until_end(server, stopping)
        log_event(_log, logging.INFO, "draining", connections=len(server.context.gateways))
    finally:
        manager.stopping("draining")
        await _drain(server)
        collector.stop()
    log_event(_log, logging.INFO, "stopped")
    # Everything acknowledged is on disk either way; after a second signal peers were cut off
    # without waiting for their settlements.
    return 1 if hurried else 0


async def _drain(server: Server) -> None:
    """Stop the server; what it waits for is logged as a warning, which the default level shows,
    when it begins to wait and when that changes."""
    stop = asyncio.ensure_future(server.stop())
    shown: list[str] = []
    while not stop.done():
        waits = describe_waits(server.context.gateways.values())
        if waits and waits != shown:
            shown = waits
            log_event(
                _log,
                logging.WARNING,
                "waiting for peers before it stops; a second signal stops it at once",
                peers=len(waits),
                waits_for=waits[:_WAITS],
                at_most_s=server.config.drain_s,
            )
        await asyncio.wait((stop,), timeout=_WAIT_S)
    stop.result()


async def _until_end(server: Server, stopping: asyncio.Event) -> None:
    """Returns after a signal. Raises the error that a replica can't go on after."""
    if server.replica is None:
        await stopping.wait()
        return
    failed = server.replica.failed
    failed.add_done_callback(lambda _: stopping.set())
    await stopping.wait()
    if failed.done():
        raise failed.result()


def _shorten_waits() -> None:
    """Let the event loop have the interpreter soon when a thread is using it.

    The loop gives the interpreter up for every read and write of a socket. While a thread searches
    the store or the lake it gets it back after this time at the latest, several times for each
    peer; by Python's default that is 5 ms each time.
    """
    sys.setswitchinterval(_SWITCH_S)


def _reload(server: Server, options: argparse.Namespace, manager: ServiceManager) -> None:
    """Read the configuration again. The result is logged as a warning, so that the default level
    shows it to the sender of the signal."""
    manager.reloading()
    try:
        config = merged(options)
        refuse_exposures(config, _file(options))
        waiting = server.reload(config)
    except ConfigError as error:
        log_event(_log, logging.ERROR, "not reloaded", mistakes=str(error).splitlines())
        manager.ready("running with the configuration before the reload: it has mistakes")
        return
    set_level(config.log)

    def confirm() -> None:
        log_event(_log, logging.WARNING, "reloaded", needs_restart=waiting)
        manager.ready("running with the reloaded configuration")

    # Not before nobody has anything that this reload took away.
    server.when_revoked(confirm)


def _status(listening: dict[str, Address]) -> str:
    return f"running with {plural(len(listening), 'listener')}"


def _print_role(server: Server, *, as_json: bool) -> None:
    """A line each time that a replica begins or ceases to lead, and one at its start."""
    listening = {name: each.address for name, each in server.listeners.items()}
    if server.is_leading:
        _print_ready(listening, as_json=as_json)
        return
    listen = {name: str(address) for name, address in listening.items()}
    if as_json:
        line = {"ready": False, "role": "standby", "listen": listen}
        print(msgspec.json.encode(line).decode(), flush=True)
    else:
        print("standby; it takes over when the leader is gone", file=sys.stderr)


def _print_ready(listening: dict[str, Address], *, as_json: bool) -> None:
    listen = {name: str(address) for name, address in listening.items()}
    if as_json:
        print(msgspec.json.encode({"ready": True, "listen": listen}).decode(), flush=True)
        return
    print_table(("listener", "address"), sorted(listen.items()))
    sys.stdout.flush()
    print("ready; stop with Ctrl-C", file=sys.stderr)
