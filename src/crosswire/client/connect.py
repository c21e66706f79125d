"""`connect`: from a URL and credentials to a client."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

from crosswire.client.adapters.contract import Adapter, HubTarget
from crosswire.client.address import parse_url
from crosswire.client.client import Client
from crosswire.client.native.dial import Backoff
from crosswire.errors import BondError, ConfigError, Unsupported

__all__ = ["connect", "tls_context"]

_ADAPTERS: Final = {
    "emp": "EmpAdapter",
    "emqp": "EmqpAdapter",
    "epoxy": "EpoxyAdapter",
    "micromsg2": "MicroMsg2Adapter",
    "relink": "RelinkAdapter",
}
"""Class of the adapter by protocol; its module is imported on first use."""


def _soon() -> Backoff:
    return Backoff(0.1, 15.0)


def connect(
    url: str,
    *,
    token: str | None = None,
    tls: ssl.SSLContext | bool | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    ca: str | Path | None = None,
    curve_server: str | None = None,
    curve_secret: str | None = None,
    bond: Sequence[str | Path] = (),
    timeout_s: float = 30.0,
    connect_timeout_s: float = 10.0,
    backoff: Callable[[], Backoff] = _soon,
) -> Client:
    """A client of the hub at `url`, to be entered with `async with`.

        async with crosswire.connect("emp://127.0.0.1", token="…") as hub:
            await hub.publish("queue/orders", {"item": "tea"})

    The URL is `PROTOCOL://HOST[:PORT]`, with `emp`, `emqp`, `relink`, `epoxy` or `micromsg2`, and
    `+tls` after those but eMQP. Several addresses, `emp://a:5040,b:5040`, are tried in turn. eMQP
    has more ports: `emqp://HOST[:CLIENTS]?workers=PORT&publishers=PORT&subscribers=PORT&admin=PORT`;
    with 0 for CLIENTS the program only subscribes and serves.

    `token` identifies the program in EMP, Epoxy and MicroMsg2; `certificate` and `key`, PEM files,
    in all with TLS; `curve_secret` in eMQP, whose hub has the public key `curve_server`. `ca` is a
    file of certificates to trust, `tls` a context of your own or True. With `bond`, `.bond` files,
    calls by Epoxy are converted between JSON and Bond. `timeout_s` is for each request that
    doesn't name its own, `connect_timeout_s` for each attempt to connect, and `backoff` makes the
    delays between attempts.

    Entering it raises ConnectFailed if no hub is there, WrongProtocol if something else is,
    Forbidden for a token that nobody has. Raises ValueError for a URL or a key that can't be read,
    ConfigError for a file that can't, Unsupported for credentials that the protocol can't carry.
    """
    parsed = parse_url(url)
    context = tls_context(tls or parsed.tls, certificate, key, ca)
    if (curve_server or curve_secret) and parsed.protocol != "emqp":
        raise Unsupported("CURVE keys are for eMQP only")
    if curve_secret and not curve_server:
        raise ValueError("curve_secret needs the hub's public key, curve_server")
    target = HubTarget(
        # `tls=True` with a plain scheme means the same as `+tls`, its default port included.
        url=parse_url(url.replace("://", "+tls://", 1)) if context and not parsed.tls else parsed,
        tls=context,
        token=token,
        bond=tuple(map(str, bond)),
        curve_server=curve_server,
        curve_secret=curve_secret,
        connect_timeout_s=connect_timeout_s,
        backoff=backoff,
    )
    return Client(_adapter(parsed.protocol, target), timeout_s=timeout_s)


def _adapter(protocol: str, target: HubTarget) -> Adapter:
    module = import_module(f"crosswire.client.adapters.{protocol}")
    kind: type[Adapter] = getattr(module, _ADAPTERS[protocol])
    try:
        return kind(target)
    except (OSError, BondError) as error:
        raise ConfigError(f"a .bond file can't be used: {error}") from None


def tls_context(
    tls: ssl.SSLContext | bool | None,
    certificate: str | Path | None,
    key: str | Path | None,
    ca: str | Path | None,
) -> ssl.SSLContext | None:
    """The TLS settings of these arguments of `connect`, None without TLS. Raises ConfigError."""
    if isinstance(tls, ssl.SSLContext):
        return tls
    if not (tls or certificate or ca):
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"TLS can't be used: {error}") from None
    return context
