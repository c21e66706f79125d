"""Flows: the two ends of TCP connections, as one key for both directions.

A key is the lower end, then the higher one, each address 16 · port 2. IPv4 addresses are mapped
into IPv6. Segments of both directions so have the same key, and `forward` distinguishes them: sent
by the lower end.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv6Address
from typing import Final

__all__ = [
    "ADDRESS_BYTES",
    "END_BYTES",
    "FLOW_BYTES",
    "IPV4_PREFIX",
    "FlowEnd",
    "address_of",
    "connection_name",
    "end_of",
]

ADDRESS_BYTES: Final = 16
END_BYTES: Final = ADDRESS_BYTES + 2
FLOW_BYTES: Final = 2 * END_BYTES

IPV4_PREFIX: Final = bytes(10) + b"\xff\xff"
"""What precedes an IPv4 address that is mapped into IPv6."""

FlowEnd = tuple[str, int]
"""Address and port."""

_CACHED_ADDRESSES: Final = 65_536


def end_of(end: bytes) -> FlowEnd:
    """Address and port of one half of a flow's key."""
    return address_of(end[:ADDRESS_BYTES]), int.from_bytes(end[ADDRESS_BYTES:])


@lru_cache(_CACHED_ADDRESSES)
def address_of(address: bytes) -> str:
    """The usual notation of an address of 16 bytes: `10.0.0.1`, `2001:db8::1`."""
    if address[: len(IPV4_PREFIX)] == IPV4_PREFIX:
        return ".".join(map(str, address[len(IPV4_PREFIX) :]))
    return str(IPv6Address(address))


def connection_name(connector: FlowEnd, acceptor: FlowEnd, time_ns: int) -> str:
    """`CLIENT:PORT-SERVER:PORT@SECONDS`, with the time of the connection's first segment.

    It is unique: two connections between the same ends can't begin at the same microsecond.
    """
    (here, here_port), (there, there_port) = connector, acceptor
    seconds, rest = divmod(time_ns // 1000, 1_000_000)
    return f"{here}:{here_port}-{there}:{there_port}@{seconds}.{rest:06}"
