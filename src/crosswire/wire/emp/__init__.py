"""EMP, the Extensible Messaging Protocol: JSON requests and responses, both ways, in order."""

from __future__ import annotations

from typing import Final

from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emp.decoder import EmpDecoder
from crosswire.wire.emp.frames import DEFAULTS
from crosswire.wire.emp.layout import (
    BODY_OFFSET,
    HEADER_STRUCT,
    HELLO_LENGTH,
    HELLO_VERSION_OFFSET,
    TYPE_HELLO,
    UNUSED_OFFSET,
)
from crosswire.wire.registry import Protocol, Sniff

__all__ = ["PROTOCOL"]

_HELLO: Final = HEADER_STRUCT.pack(HELLO_LENGTH, TYPE_HELLO)[:UNUSED_OFFSET]
_SNIFFED_VERSIONS: Final = 16


def sniff(data: bytes) -> Sniff:
    """Both sides begin with a hello: its length and type, zeros, a version below 16."""
    if data[:UNUSED_OFFSET] != _HELLO[: len(data)]:
        return Sniff.NO
    if len(data) <= HELLO_VERSION_OFFSET:
        return Sniff.MORE
    if any(data[UNUSED_OFFSET:BODY_OFFSET]) or data[HELLO_VERSION_OFFSET] >= _SNIFFED_VERSIONS:
        return Sniff.NO
    return Sniff.YES


PROTOCOL = Protocol(
    name="emp",
    title="EMP",
    roles=("client", "server"),
    ports={"emp": 5040, "emp-tls": 5041},
    limits=DEFAULTS,
    connection=EmpConnection,
    decoder=EmpDecoder,
    sniff=sniff,
)
