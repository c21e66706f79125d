"""EMP, the Extensible Messaging Protocol: JSON requests and responses, both ways, in order."""

from __future__ import annotations

from crosswire.wire.contract import Protocol, Sniff
from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emp.decoder import EmpDecoder
from crosswire.wire.emp.frames import DEFAULTS

__all__ = ["PROTOCOL"]

_HELLO = bytes.fromhex("00000008 00")


def sniff(data: bytes) -> Sniff:
    """Both sides open with a hello: its length and type, a version that is not far off."""
    if data[:5] != _HELLO[: len(data)]:
        return Sniff.NO
    if len(data) < 9:
        return Sniff.MORE
    return Sniff.YES if not any(data[5:8]) and data[8] < 16 else Sniff.NO


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
