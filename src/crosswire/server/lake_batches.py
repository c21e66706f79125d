"""Committed groups as a batch that the lake's writer turns into files."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from crosswire.envelope import Envelope, decode
from crosswire.hub.ledger import parse_columns
from crosswire.hub.seals import LakeGap
from crosswire.lake.writer import LakeBatch, MissingRows

__all__ = ["BatchOrder", "FeedGroup", "build_batch"]


class FeedGroup(msgspec.Struct, frozen=True):
    """A committed group: its block of the ledger, and the records of its messages."""

    first_row: int
    last_row: int
    block: bytes
    records: Sequence[bytes]
    newest: int
    size_bytes: int


class BatchOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Which tables are to be made of groups, and from which numbers on."""

    tables: tuple[str, ...]
    first_seq: int
    first_gap: int
    gaps: tuple[LakeGap, ...]


def build_batch(
    order: BatchOrder, blocks: Sequence[tuple[int, bytes]], records: Sequence[bytes]
) -> LakeBatch:
    """The rows of blocks, each with its first row's number, and of records, for the tables that
    the lake has. Takes time: don't call it on the event loop. Raises RecordDamaged."""
    messages: list[Envelope] = []
    if "messages" in order.tables:
        messages = list(map(decode, records))
        # Files are in order of ids; in a group, retained messages follow all others.
        ids = [envelope.id for envelope in messages]
        if ids != sorted(ids):
            messages.sort(key=lambda envelope: envelope.id)
    columns = []
    if "ledger" in order.tables:
        columns = [(first_row, parse_columns(block)) for first_row, block in blocks if block]
    return LakeBatch(
        first_seq=order.first_seq,
        messages=messages,
        blocks=columns,
        first_gap=order.first_gap,
        gaps=[MissingRows(**msgspec.structs.asdict(gap)) for gap in order.gaps],
    )
