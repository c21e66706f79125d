"""Relink: channels of messages, with transactions, on links that outlive their connections."""

from __future__ import annotations

from crosswire.errors import FrameError
from crosswire.wire.registry import Hint, Protocol, Sniff
from crosswire.wire.relink.connection import RelinkConnection
from crosswire.wire.relink.decoder import RelinkDecoder
from crosswire.wire.relink.frames import DEFAULTS
from crosswire.wire.relink.handshake import ConnectorHello, parse_hello
from crosswire.wire.relink.layout import EPOCH_SIZE, VERSION_OFFSET, VERSION_SIZE

__all__ = ["PROTOCOL"]

_FAR_VERSION = 16
"""Versions from here on are unlikely: other protocols begin with such bytes."""


def sniff(data: bytes) -> Sniff:
    """A plausible version, seven bytes of padding, and one of the two hellos."""
    if not data:
        return Sniff.MORE
    if data[VERSION_OFFSET] >= _FAR_VERSION or any(data[VERSION_OFFSET + 1 : VERSION_SIZE]):
        return Sniff.NO
    plausible = [_sniff_hello("connector", data), _sniff_hello("listener", data)]
    if Sniff.YES in plausible:
        return Sniff.YES
    return Sniff.MORE if Sniff.MORE in plausible else Sniff.NO


def _sniff_hello(sender: str, data: bytes) -> Sniff:
    if len(data) <= VERSION_SIZE:
        return Sniff.MORE
    try:
        hello, _ = parse_hello(sender, data, VERSION_SIZE, VERSION_SIZE)
    except FrameError:
        return Sniff.NO
    if hello is None:
        return Sniff.MORE
    # Any 16 bytes could be a listener's epoch and link id. Epochs are microseconds since 1970
    # (specification 1): likely are those from about 1987 on, and small numbers, which tests use.
    if not isinstance(hello, ConnectorHello):
        epoch = int.from_bytes(data[VERSION_SIZE : VERSION_SIZE + EPOCH_SIZE], "little")
        return Sniff.YES if epoch >> 49 in range(1, 16) or epoch < 1 << 32 else Sniff.NO
    return Sniff.YES


PROTOCOL = Protocol(
    name="relink",
    title="Relink",
    roles=("connector", "listener"),
    ports={"relink": 7350, "relink-tls": 7351},
    limits=DEFAULTS,
    connection=RelinkConnection,
    decoder=RelinkDecoder,
    sniff=sniff,
    hints=(
        Hint("connector_id_size", "size of the connector's channel ids in bytes, 0 to 8"),
        Hint("listener_id_size", "size of the listener's channel ids in bytes, 0 to 8"),
    ),
)
