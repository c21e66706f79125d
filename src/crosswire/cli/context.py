"""Name hubs with their addresses and credentials, and choose the one that commands use.

They are in a file that only you can read: $CROSSWIRE_CONTEXTS, else
~/.config/crosswire/contexts.json.
"""

from __future__ import annotations

import argparse
import getpass
import sys
from collections.abc import Sequence
from pathlib import Path

from crosswire.cli.hub import print_json
from crosswire.cli.known_hubs import KnownHub, contexts_file, load_hubs, save_hubs
from crosswire.cli.parsers import add_action, add_actions
from crosswire.cli.table import harmless, print_table
from crosswire.errors import ConfigError
from crosswire.wire import PROTOCOL_NAMES

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    actions = add_actions(parser)
    listing = add_action(
        actions, "list", "all contexts; the chosen one has a star", "crosswire context list"
    )
    adding = add_action(
        actions,
        "add",
        "add a context, or replace the one of this name",
        "crosswire context add local --hub http://127.0.0.1:7380",
        "crosswire context add live --hub https://hub.example:7381 --ca ca.pem --token-file -",
    )
    _add_address(adding)
    using = add_action(
        actions,
        "use",
        "choose the context that commands use by default; '' for none",
        "crosswire context use live",
    )
    removing = add_action(
        actions, "remove", "remove a context, and its credentials", "crosswire context remove live"
    )
    for each in (using, removing):
        each.add_argument("name", help="the context's name")
    for each in (listing, adding, using, removing):
        each.add_argument("--json", action="store_true", help="print JSON, without the secrets")


def _add_address(parser: argparse.ArgumentParser) -> None:
    # `dest` differs from that of other commands: nothing is filled in from the chosen context.
    parser.add_argument("name", help="the context's name")
    parser.add_argument(
        "--hub", dest="url", metavar="URL", help="the HTTP listener, for commands that use the API"
    )
    parser.add_argument("--host", help="the host of the other listeners (default: that of --hub)")
    parser.add_argument(
        "--via", choices=PROTOCOL_NAMES, metavar="PROTOCOL", help="the protocol (default: emp)"
    )
    parser.add_argument("--port", type=int, help="the port of that protocol's listener")
    parser.add_argument("--tls", action="store_true", help="use TLS, as --ca and --cert do")
    parser.add_argument("--ca", metavar="FILE", help="certificates to trust, PEM")
    parser.add_argument("--cert", metavar="FILE", help="your certificate, PEM")
    parser.add_argument("--key", metavar="FILE", help="your certificate's key, PEM")
    secret = parser.add_mutually_exclusive_group()
    secret.add_argument("--token", help="your token; other users of the machine may see it here")
    secret.add_argument(
        "--token-file",
        metavar="FILE",
        help="a file whose first line is your token; - for standard input",
    )
    parser.add_argument("--curve-server", metavar="KEY", help="the hub's public CURVE key, Z85")
    parser.add_argument("--curve-secret", metavar="KEY", help="your secret CURVE key, Z85")
    parser.add_argument("--use", action="store_true", help="choose it, too")


def run(options: argparse.Namespace) -> int:
    """Run the action. Raises ConfigError."""
    actions = {"list": _list, "add": _add, "use": _use, "remove": _remove}
    return actions[options.action](options)


def _list(options: argparse.Namespace) -> int:
    hubs = load_hubs()
    if options.json:
        contexts = {name: each.public() for name, each in sorted(hubs.contexts.items())}
        print_json({"current": hubs.current, "contexts": contexts})
        return 0
    rows = [
        (
            "*" if name == hubs.current else "",
            harmless(name),
            harmless(each.hub or "-"),
            harmless(each.host or "-"),
            each.via or "emp",
            ", ".join(_credentials(each)) or "-",
        )
        for name, each in sorted(hubs.contexts.items())
    ]
    print_table(("", "context", "hub", "host", "via", "credentials"), rows, empty="no contexts")
    return 0


def _credentials(hub: KnownHub) -> list[str]:
    names = {"token": hub.token, "certificate": hub.cert, "CURVE key": hub.curve_secret}
    return [name for name, value in names.items() if value]


def _add(options: argparse.Namespace) -> int:
    if not options.url and not options.host:
        raise ConfigError("a context needs --hub or --host")
    hubs = load_hubs()
    hubs.contexts[options.name] = KnownHub(
        hub=options.url,
        token=_token(options),
        via=options.via,
        host=options.host,
        port=options.port,
        tls=options.tls,
        ca=_absolute(options.ca),
        cert=_absolute(options.cert),
        key=_absolute(options.key),
        curve_server=options.curve_server,
        curve_secret=options.curve_secret,
    )
    if options.use:
        hubs.current = options.name
    save_hubs(hubs)
    _report(options, f"context {harmless(options.name)} is in {contexts_file()}")
    return 0


def _token(options: argparse.Namespace) -> str | None:
    if options.token_file is None:
        token: str | None = options.token
        return token
    if options.token_file != "-":
        try:
            return Path(options.token_file).read_text().partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"can't read {options.token_file}: {error}") from None
    if sys.stdin.isatty():
        return getpass.getpass("token: ")
    return sys.stdin.readline().strip()


def _absolute(file: str | None) -> str | None:
    return None if file is None else str(Path(file).absolute())


def _use(options: argparse.Namespace) -> int:
    hubs = load_hubs()
    if options.name and options.name not in hubs.contexts:
        raise ConfigError(f"there is no context {options.name!r}")
    hubs.current = options.name
    save_hubs(hubs)
    _report(options, f"commands use {harmless(options.name) or 'no context'} by default now")
    return 0


def _remove(options: argparse.Namespace) -> int:
    hubs = load_hubs()
    if hubs.contexts.pop(options.name, None) is None:
        raise ConfigError(f"there is no context {options.name!r}")
    if hubs.current == options.name:
        hubs.current = ""
    save_hubs(hubs)
    _report(options, f"context {harmless(options.name)} is removed")
    return 0


def _report(options: argparse.Namespace, text: str) -> None:
    if options.json:
        hubs = load_hubs()
        shown = hubs.contexts.get(options.name)
        print_json(
            {"context": options.name, "current": hubs.current, **(shown.public() if shown else {})}
        )
    else:
        print(text, file=sys.stderr)
