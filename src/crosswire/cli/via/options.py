"""Options that all commands share which reach a hub through a protocol."""

from __future__ import annotations

import argparse
import os
import ssl

from crosswire.cli.via.contract import VIAS, HubTarget
from crosswire.errors import ConfigError

__all__ = ["add_via_options", "target_of", "with_kind"]


def add_via_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--via", metavar="PROTOCOL", choices=VIAS, default="emp", help=_protocols())
    parser.add_argument("--host", default="127.0.0.1", help="where the hub is (127.0.0.1)")
    parser.add_argument("--port", type=int, help="its listener (the protocol's own)")
    parser.add_argument("--tls", action="store_true", help="speak TLS")
    parser.add_argument("--ca", metavar="FILE", help="whom to trust, PEM; implies --tls")
    parser.add_argument("--cert", metavar="FILE", help="a certificate of yours, PEM")
    parser.add_argument("--key", metavar="FILE", help="its key, PEM")
    parser.add_argument(
        "--token",
        default=os.environ.get("CROSSWIRE_TOKEN"),
        help="who you are ($CROSSWIRE_TOKEN: other users of this machine don't see that one)",
    )
    parser.add_argument("--curve-server", metavar="KEY", help="the hub's CURVE key, Z85, for eMQP")
    parser.add_argument(
        "--curve-secret",
        metavar="KEY",
        default=os.environ.get("CROSSWIRE_CURVE_SECRET"),
        help="your own secret one ($CROSSWIRE_CURVE_SECRET)",
    )
    parser.add_argument(
        "--bond",
        metavar="FILE",
        action="append",
        default=[],
        help="a .bond file with a service's types, for Epoxy",
    )
    parser.add_argument("--json", action="store_true", help="JSON, one object a line")


def _protocols() -> str:
    return f"one of {', '.join(VIAS)} (emp)"


def target_of(options: argparse.Namespace) -> HubTarget:
    """Raises ConfigError."""
    return HubTarget(
        host=options.host,
        port=options.port,
        tls=_context(options),
        token=options.token,
        bond=tuple(options.bond),
        curve_server=options.curve_server,
        curve_secret=options.curve_secret,
    )


def _context(options: argparse.Namespace) -> ssl.SSLContext | None:
    if not (options.tls or options.ca or options.cert):
        return None
    try:
        context = ssl.create_default_context(cafile=options.ca)
        if options.cert is not None:
            context.load_cert_chain(options.cert, options.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"TLS can't be used: {error}") from None
    return context


def with_kind(text: str, kind: str) -> str:
    """A bare name is one of this kind."""
    return text if text.startswith(("queue/", "topic/", "service/")) else f"{kind}/{text}"
