"""Committed groups as a batch that the lake's writer turns into files."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from crosswire.commitlog.contract import AcceptedMessages
from crosswire.envelope import Envelope
from crosswire.hub.ledger import parse_columns
from crosswire.hub.seals import LakeGap
from crosswire.lake.writer import LakeBatch, MissingRows

__all__ = ["FeedGroup", "build_batch"]


class FeedGroup(msgspec.Struct, frozen=True):
    """A committed group: its block of the ledger, and its messages.

    A group that was kept in memory has `runs`, one that was read from the store `messages`.
    """

    first_row: int
    last_row: int
    block: bytes
    messages: Sequence[Envelope]
    runs: Sequence[AcceptedMessages]
    newest: int
    size_bytes: int

    def envelopes(self) -> Sequence[Envelope]:
        """All of its messages."""
        return [*self.messages, *(each for run in self.runs for each in run.envelopes)]


def build_batch(
    groups: Sequence[FeedGroup],
    tables: Sequence[str],
    *,
    first_seq: int,
    first_gap: int,
    gaps: Sequence[LakeGap],
) -> LakeBatch:
    """The rows of these groups for the tables that the lake has; numbers start at `first_seq` and
    `first_gap`. Takes time: call it on a thread. Raises RecordDamaged."""
    messages: list[Envelope] = []
    if "messages" in tables:
        for group in groups:
            messages += group.envelopes()
        # Files are in order of ids; in a group, retained messages follow all others.
        ids = [envelope.id for envelope in messages]
        if ids != sorted(ids):
            messages.sort(key=lambda envelope: envelope.id)
    blocks = []
    if "ledger" in tables:
        blocks = [(each.first_row, parse_columns(each.block)) for each in groups if each.block]
    return LakeBatch(
        first_seq=first_seq,
        messages=messages,
        blocks=blocks,
        first_gap=first_gap,
        gaps=[MissingRows(**msgspec.structs.asdict(gap)) for gap in gaps],
    )
