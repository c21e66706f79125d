"""Epoxy, the transport of Bond Comm: requests, responses and events of Bond structs, both ways."""

from __future__ import annotations

from crosswire.wire.epoxy.connection import EpoxyConnection
from crosswire.wire.epoxy.decoder import EpoxyDecoder
from crosswire.wire.epoxy.frames import DEFAULTS
from crosswire.wire.epoxy.layout import (
    COUNT_SIZE,
    FRAMELET_HEADER_SIZE,
    HEADER_SIZE,
    SIZE_OFFSET,
    TYPE_CONFIG,
    TYPE_PROTOCOL_ERROR,
    TYPE_SIZE,
)
from crosswire.wire.registry import Protocol, Sniff

__all__ = ["PROTOCOL"]

_FIRST = tuple(
    (1).to_bytes(COUNT_SIZE, "little") + kind.to_bytes(TYPE_SIZE, "little")
    for kind in (TYPE_CONFIG, TYPE_PROTOCOL_ERROR)
)
_SIZE_OFFSET = HEADER_SIZE + SIZE_OFFSET
_SIZE_END = HEADER_SIZE + FRAMELET_HEADER_SIZE
_SNIFF_BYTES = 65536


def sniff(data: bytes) -> Sniff:
    """Both peers begin with a config, or a server with a protocol error: one small framelet."""
    if not any(data[:_SIZE_OFFSET] == first[: len(data)] for first in _FIRST):
        return Sniff.NO
    if len(data) < _SIZE_END:
        return Sniff.MORE
    size = int.from_bytes(data[_SIZE_OFFSET:_SIZE_END], "little")
    return Sniff.YES if 0 < size < _SNIFF_BYTES else Sniff.NO


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
