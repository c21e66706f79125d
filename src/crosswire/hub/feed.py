"""What the hub hands to the lake: every committed group, and the memory of what the lake sealed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from crosswire.errors import RecordDamaged
from crosswire.hub.items import Arrivals

__all__ = ["Committed", "Gap", "Seal", "parse_seal", "serialize_seal"]

_VERSION: Final = 1


class Committed(msgspec.Struct, frozen=True, gc=False):
    """A group that is on disk: its block of the journal, and the messages that came with it.

    Everything stored with an id up to `newest` is in this group or in one before it.
    """

    first_row: int
    rows: int
    block: bytes
    messages: Sequence[Arrivals]
    newest: int

    @property
    def size_bytes(self) -> int:
        return len(self.block) + sum(sum(run.sizes) for run in self.messages)


class Gap(msgspec.Struct, frozen=True, array_like=True):
    """What the lake will never have: rows of the ledger by number, messages by id."""

    table: str
    first: int
    last: int
    time: int
    reason: str


class Seal(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A range of the journal that goes to the lake as one, with the messages that belong to it.

    An empty one (`last_row` before `first_row`) says where the lake begins. `first_seq` and
    `last_seq` number the messages, whose ids are above `after` and at most `newest`; `gaps` are to
    be published along with it. `skipped` rows are in
    no file; `tables` are those that the lake had then, none while it was off.
    """

    first_row: int
    last_row: int
    first_seq: int
    last_seq: int
    newest: int
    after: int = 0
    tables: tuple[str, ...] = ()
    skipped: bool = False
    first_gap: int = 1
    gaps: tuple[Gap, ...] = ()
    version: int = _VERSION


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Seal).decode


def serialize_seal(seal: Seal) -> bytes:
    return _encode(seal)


def parse_seal(data: bytes) -> Seal:
    """Raises RecordDamaged."""
    try:
        seal = _decode(data)
    except msgspec.MsgspecError as error:
        raise RecordDamaged(f"the last seal of the lake can't be read: {error}") from None
    if seal.version != _VERSION:
        raise RecordDamaged(f"a seal of version {seal.version}")
    return seal
