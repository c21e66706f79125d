"""Options of the commands that reach a hub through a protocol: address, credentials, TLS."""

from __future__ import annotations

import argparse
import os
import ssl

from crosswire.cli.via.contract import VIAS, ViaTarget
from crosswire.errors import ConfigError

__all__ = ["add_via_options", "target_of", "with_kind"]


def add_via_options(parser: argparse.ArgumentParser) -> None:
    """Add `--via`, `--host`, `--port`, TLS, credentials, `--bond` and `--json`."""
    parser.add_argument("--via", metavar="PROTOCOL", choices=VIAS, default="emp", help=_protocols())
    parser.add_argument("--host", default="127.0.0.1", help="the hub's host (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, help="the port of its listener (default: the protocol's)"
    )
    parser.add_argument("--tls", action="store_true", help="use TLS")
    parser.add_argument("--ca", metavar="FILE", help="certificates to trust, PEM; implies --tls")
    parser.add_argument("--cert", metavar="FILE", help="your certificate, PEM; implies --tls")
    parser.add_argument("--key", metavar="FILE", help="your certificate's key, PEM")
    parser.add_argument(
        "--token",
        default=os.environ.get("CROSSWIRE_TOKEN"),
        help="your token (default: $CROSSWIRE_TOKEN, which other users of the machine can't see)",
    )
    parser.add_argument(
        "--curve-server", metavar="KEY", help="the hub's public CURVE key, Z85, for eMQP"
    )
    parser.add_argument(
        "--curve-secret",
        metavar="KEY",
        default=os.environ.get("CROSSWIRE_CURVE_SECRET"),
        help="your secret CURVE key, Z85 (default: $CROSSWIRE_CURVE_SECRET)",
    )
    parser.add_argument(
        "--bond",
        metavar="FILE",
        action="append",
        default=[],
        help="a .bond file with a service's types, for Epoxy",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one object per line")


def _protocols() -> str:
    return f"one of {', '.join(VIAS)} (default: emp)"


def target_of(options: argparse.Namespace) -> ViaTarget:
    """The hub that the options name. Raises ConfigError for TLS files that can't be used."""
    return ViaTarget(
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
    """The destination; a name without `queue/`, `topic/` or `service/` gets this kind."""
    return text if text.startswith(("queue/", "topic/", "service/")) else f"{kind}/{text}"
