"""The names of a hub's listeners, with their default ports, and which addresses are local."""

import ipaddress
from typing import Final

__all__ = ["HTTP_LISTENERS", "LISTENERS", "PLAIN_LISTENERS", "is_loopback", "network_of"]

PLAIN_LISTENERS: Final = {
    "emp": 5040,
    "emqp-clients": 47291,
    "emqp-workers": 47290,
    "emqp-admin": 47293,
    "emqp-publishers": 47298,
    "emqp-subscribers": 47299,
    "relink": 7350,
    "epoxy": 25188,
    "micromsg2": 7360,
    "http": 7380,
}
LISTENERS: Final = {
    **PLAIN_LISTENERS,
    "emp-tls": 5041,
    "relink-tls": 7351,
    "epoxy-tls": 25156,
    "micromsg2-tls": 7361,
    "https": 7381,
}
"""Those without TLS, and those with it, which need a certificate."""
HTTP_LISTENERS: Final = ("http", "https")


def network_of(host: str) -> str:
    """What counts as one address: an IPv4 address, but the first half of an IPv6 address, since one
    machine may have all of the second."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))


def is_loopback(host: str) -> bool:
    """Whether only this machine has this address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
