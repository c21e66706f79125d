"""Epoxy, the transport of Bond Comm: requests, responses and events of Bond structs, both ways."""

from __future__ import annotations

from crosswire.wire.contract import Protocol, Sniff
from crosswire.wire.epoxy.connection import EpoxyConnection
from crosswire.wire.epoxy.decoder import EpoxyDecoder
from crosswire.wire.epoxy.frames import DEFAULTS

__all__ = ["PROTOCOL"]

_FIRST = (b"\x01\x00CG", b"\x01\x00ER")
_SIZE_BYTES = 4


def sniff(data: bytes) -> Sniff:
    """Both sides open with a config, or a server with a protocol error: one framelet, not large."""
    if not any(data[:4] == first[: len(data)] for first in _FIRST):
        return Sniff.NO
    if len(data) < 4 + _SIZE_BYTES:
        return Sniff.MORE
    return Sniff.YES if 0 < int.from_bytes(data[4:8], "little") < 65536 else Sniff.NO


PROTOCOL = Protocol(
    name="epoxy",
    title="Bond Epoxy",
    roles=("client", "server"),
    ports={"epoxy": 25188, "epoxy-tls": 25156},
    limits=DEFAULTS,
    connection=EpoxyConnection,
    decoder=EpoxyDecoder,
    sniff=sniff,
)
