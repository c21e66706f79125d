"""The URL of a hub: protocol, addresses, and eMQP's further ports."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, urlsplit

import msgspec

from crosswire.listeners import LISTENERS
from crosswire.wire.registry import PROTOCOL_NAMES

__all__ = ["HubUrl", "parse_url"]

_ROLES: Final = ("clients", "workers", "publishers", "subscribers", "admin")
"""eMQP's listeners. The first is the port of the URL itself, the others are in its query."""


class HubUrl(msgspec.Struct, frozen=True):
    """Where a hub is reached, by which protocol; every address has a port."""

    protocol: str
    tls: bool
    addresses: tuple[tuple[str, int], ...]
    ports: dict[str, int] = {}
    """eMQP's further listeners, by role; they have the hosts of `addresses`. The port of the
    listener for clients may be 0, for a program that only subscribes and serves."""

    def of_role(self, role: str) -> tuple[tuple[str, int], ...]:
        """The addresses of one of eMQP's listeners."""
        if role == "clients":
            return self.addresses
        return tuple((host, self.ports[role]) for host, _ in self.addresses)


def parse_url(url: str) -> HubUrl:
    """`emp://HOST[:PORT]`, `epoxy+tls://A:1,B:2`, `emqp://HOST?workers=PORT`. Raises ValueError."""
    parts = urlsplit(url)
    protocol, _, suffix = parts.scheme.partition("+")
    if protocol not in PROTOCOL_NAMES:
        raise ValueError(
            f"{url!r} is no address of a hub: it begins with one of"
            f" {', '.join(f'{name}://' for name in PROTOCOL_NAMES)}"
        )
    if suffix not in ("", "tls") or (protocol == "emqp" and suffix):
        known = "only CURVE, no TLS" if protocol == "emqp" else "+tls only"
        raise ValueError(f"{parts.scheme!r}: {protocol} has {known}")
    if parts.path.strip("/") or parts.username is not None:
        raise ValueError(f"{url!r} has more than a protocol, hosts and ports: pass a token apart")
    listener = "emqp-clients" if protocol == "emqp" else protocol + (f"-{suffix}" if suffix else "")
    ports = _query_ports(parts.query) if protocol == "emqp" else {}
    if parts.query and protocol != "emqp":
        raise ValueError(f"only an eMQP address has a query, {protocol} has one port")
    default = LISTENERS[listener]
    lowest = 0 if protocol == "emqp" else 1
    addresses = tuple(_address(text, default, lowest) for text in parts.netloc.split(","))
    return HubUrl(protocol, bool(suffix), addresses, ports)


def _query_ports(query: str) -> dict[str, int]:
    ports = {role: LISTENERS[f"emqp-{role}"] for role in _ROLES[1:]}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in ports:
            raise ValueError(f"{name!r} is none of {', '.join(ports)}")
        ports[name] = _port(value)
    return ports


def _address(text: str, default: int, lowest: int) -> tuple[str, int]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    else:
        host, _, port = text.partition(":")
    if not host:
        raise ValueError("an address needs a host")
    return host, _port(port, lowest) if port else default


def _port(text: str, lowest: int = 1) -> int:
    if not (text.isascii() and text.isdecimal() and lowest <= int(text) < 65536):
        raise ValueError(f"{text!r} is no port")
    return int(text)
