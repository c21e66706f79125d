"""The saved form of a link: what has to be known to resume it after a restart, as msgpack."""

from __future__ import annotations

from typing import Final

import msgspec

from crosswire.errors import LinkStateError
from crosswire.wire.relink.channels import ReceivingChannel, SendingChannel
from crosswire.wire.relink.handshake import LinkTerms

__all__ = ["SavedLink", "decode", "encode"]

_VERSION: Final = 1


class SavedLink(msgspec.Struct, array_like=True, kw_only=True):
    """The state of a link; the order of the fields is that of the saved array.

    `sending` and `used` belong to its sending half, `receiving` and `closed` to the receiving one.
    """

    version: int = _VERSION
    role: str
    terms: LinkTerms
    epoch: int
    id: int
    start: int
    order: int
    ended: bool
    shut_down: bool
    shut_down_first: bool
    peer_shut_down: bool
    sending: dict[int, SendingChannel]
    receiving: dict[int, ReceivingChannel]
    closed: dict[int, ReceivingChannel]
    used: list[int]


_DECODER: Final = msgspec.msgpack.Decoder(SavedLink)


def encode(saved: SavedLink) -> bytes:
    """The bytes that `decode` reads."""
    return msgspec.msgpack.encode(saved)


def decode(data: bytes) -> SavedLink:
    """What `encode` wrote. Raises LinkStateError if it is damaged or of another version."""
    try:
        saved = _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise LinkStateError(f"a saved link is damaged: {error}") from None
    if saved.version != _VERSION:
        raise LinkStateError(
            f"a saved link has version {saved.version}, this is version {_VERSION}"
        )
    return saved
