"""How a link is saved: what has to be known to take it up again, as msgpack."""

from __future__ import annotations

from typing import Final

import msgspec

from crosswire.errors import LinkStateError
from crosswire.wire.relink.channels import ReceivingChannel, SendingChannel
from crosswire.wire.relink.handshake import LinkTerms

__all__ = ["SavedLink", "decode", "encode"]

_VERSION: Final = 1


class SavedLink(msgspec.Struct, array_like=True, kw_only=True):
    """`used` are the channels that we have closed; see `Link`."""

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
    return msgspec.msgpack.encode(saved)


def decode(data: bytes) -> SavedLink:
    """Raises LinkStateError for what is damaged or of another version."""
    try:
        saved = _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise LinkStateError(f"a saved link is damaged: {error}") from None
    if saved.version != _VERSION:
        raise LinkStateError(
            f"a saved link has version {saved.version}, this is version {_VERSION}"
        )
    return saved
