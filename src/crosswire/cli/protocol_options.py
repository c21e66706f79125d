"""Options of the commands that reach a hub through a protocol: address, credentials, TLS."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from crosswire.cli.hub import add_credential_options
from crosswire.cli.known_hubs import DEFAULT_HOST
from crosswire.client import Client, connect
from crosswire.errors import ConfigError, HubError, ProviderFailed, RequestFailed
from crosswire.gateways.failures import code_of
from crosswire.wire.registry import PROTOCOL_NAMES

__all__ = ["add_protocol_options", "client_of", "run_client", "with_kind"]

T = TypeVar("T")


def add_protocol_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for choosing a hub and the way to it, and `--json`; `fill_in` sets what
    is not given."""
    group = parser.add_argument_group("hub")
    group.add_argument(
        "--via",
        metavar="PROTOCOL",
        choices=PROTOCOL_NAMES,
        help=f"one of {', '.join(PROTOCOL_NAMES)} (default: that of the context, else emp)",
    )
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--host", help=f"the hub's host (default: that of the context, else {DEFAULT_HOST})"
    )
    add_credential_options(group, which)
    group.add_argument(
        "--port", type=int, help="the port of its listener (default: the protocol's)"
    )
    group.add_argument("--tls", action="store_true", help="use TLS, as --ca and --cert do")
    group.add_argument(
        "--curve-server", metavar="KEY", help="the hub's public CURVE key, Z85, for eMQP"
    )
    group.add_argument(
        "--curve-secret",
        metavar="KEY",
        help="your secret CURVE key, Z85 (default: that of the context, else "
        "$CROSSWIRE_CURVE_SECRET)",
    )
    group.add_argument(
        "--bond",
        metavar="FILE",
        action="append",
        default=[],
        help="a .bond file with a service's types, for Epoxy",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one object per line")


def client_of(options: argparse.Namespace, listener: str = "clients") -> Client:
    """A client of the hub that the options name, not connected yet.

    `listener` is the one of eMQP's that `--port` means. Raises ConfigError for a port, a key or a
    file that can't be used, Unsupported for credentials that the protocol can't carry.
    """
    try:
        return connect(
            _url(options, listener),
            token=options.token,
            tls=options.tls,
            certificate=options.cert,
            key=options.key,
            ca=options.ca,
            curve_server=options.curve_server,
            # It may come from the environment, where it is for other commands as well.
            curve_secret=options.curve_secret if options.curve_server else None,
            bond=options.bond,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def run_client(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which uses a client. Raises ClientError and HubError.

    A refusal has the hub's code before its text, as in the commands that use the HTTP API.
    """
    try:
        return asyncio.run(work)
    except ProviderFailed:
        raise  # its text begins with the provider's code
    except HubError as error:
        if type(error) is HubError:
            raise  # the protocol did not carry the code
        raise RequestFailed(code_of(error), str(error)) from error


def _url(options: argparse.Namespace, listener: str) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    if options.via == "emqp" and listener != "clients":
        # Only this listener is known, and needed.
        port = "" if options.port is None else f"?{listener}={options.port}"
        return f"emqp://{host}:0{port}"
    return f"{options.via}://{host}" + ("" if options.port is None else f":{options.port}")


def with_kind(text: str, kind: str) -> str:
    """The destination; a name without `queue/`, `topic/` or `service/` gets this kind."""
    return text if text.startswith(("queue/", "topic/", "service/")) else f"{kind}/{text}"
