"""MicroMsg2: messages with properties both ways, and extensions that both sides agree on."""

from __future__ import annotations

from typing import Final

from crosswire.errors import FrameError
from crosswire.wire.micromsg2.connection import MicroMsg2Connection
from crosswire.wire.micromsg2.decoder import MicroMsg2Decoder
from crosswire.wire.micromsg2.frames import (
    DEFAULTS,
    Error,
    ErrorName,
    is_handshake,
    parse_handshake,
)
from crosswire.wire.micromsg2.layout import (
    IDENTITY_LENGTH_OFFSET,
    IDENTITY_OFFSET,
    VERSION,
)
from crosswire.wire.registry import Hint, Protocol, Sniff

__all__ = ["PROTOCOL"]

_OPENING: Final = bytes((*VERSION, 0))
"""Version and flags of a handshake."""


def sniff(data: bytes) -> Sniff:
    """Both sides begin with a handshake of version 1.0, flags of zero and printable text; a server
    may begin with an ERROR of a known name."""
    if not data:
        return Sniff.MORE
    opening = data[:IDENTITY_LENGTH_OFFSET]
    if is_handshake(opening[0]) and opening != _OPENING[: len(opening)]:
        return Sniff.NO
    if is_handshake(opening[0]) and len(data) > IDENTITY_OFFSET:
        identity = data[IDENTITY_OFFSET : IDENTITY_OFFSET + data[IDENTITY_LENGTH_OFFSET]]
        if not (identity.isascii() and identity.decode("latin-1").isprintable()):
            return Sniff.NO
    try:
        frame, _ = parse_handshake(data, 0, 0, DEFAULTS.frame_bytes)
    except FrameError:
        return Sniff.NO
    if frame is None:
        return Sniff.MORE
    if isinstance(frame, Error):
        return Sniff.YES if frame.name.lower() in set(ErrorName) else Sniff.NO
    return Sniff.YES


PROTOCOL = Protocol(
    name="micromsg2",
    title="MicroMsg2",
    roles=("client", "server"),
    ports={"micromsg2": 7360, "micromsg2-tls": 7361},
    limits=DEFAULTS,
    connection=MicroMsg2Connection,
    decoder=MicroMsg2Decoder,
    sniff=sniff,
    hints=(
        Hint(
            "next_sequence",
            "sequence number of the first message, if the bytes begin after the handshake",
        ),
    ),
)
