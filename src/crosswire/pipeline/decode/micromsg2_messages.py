"""MicroMsg2's messages, which may be split over several frames: which rows belong together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from crosswire.pipeline.decode.arrays import NONE, Bytes, Flags, Numbers
from crosswire.pipeline.decode.contract import BACKWARD_CUT, FORWARD_CUT, FrameRows, Memories
from crosswire.pipeline.decode.kernels import (
    INT,
    INTS,
    OCTETS,
    OUT_INTS,
    OUT_OCTETS,
    OUT_TRUTHS,
    TRUTHS,
    kernel,
    subroutine,
)
from crosswire.pipeline.decode.meanings.micromsg2 import (
    MESSAGE_BYTES,
    MicroMsg2Memory,
    PartialMessage,
)
from crosswire.pipeline.decode.scanners.micromsg2 import DESTINATION, MESSAGE, PAYLOAD, PROPERTIES
from crosswire.pipeline.decode.text import Raw, binary, copy_octets
from crosswire.wire.micromsg2.values import parse_properties

__all__ = [
    "Messages",
    "PendingMessage",
    "begun_before",
]


class PendingMessage(NamedTuple):
    """A message that began in an earlier batch."""

    owner: int
    forward: bool
    message: PartialMessage


def begun_before(memories: Memories[MicroMsg2Memory]) -> list[PendingMessage]:
    """The messages that began in earlier batches, ordered by owner."""
    return [
        PendingMessage(owner, forward, message)
        for owner in sorted(memories.known)
        for forward, message in memories.known[owner].begun.items()
        if message is not None
    ]


@subroutine
def _close(first: int, count: int, closed: Flags) -> int:
    if first >= count:
        closed[first - count] = True
    return NONE


@kernel(
    *(INTS, TRUTHS, TRUTHS, TRUTHS, INTS, INTS, INTS, INTS),
    *(INTS, TRUTHS, INTS),
    *(OUT_INTS, OUT_INTS, OUT_INTS, OUT_TRUTHS, OUT_INTS),
    returns=INT,
)
def _follow(
    owners: Numbers,
    directions: Flags,
    messages: Flags,
    wrong: Flags,
    cut_before: Numbers,
    continued: Numbers,
    names: Numbers,
    sizes: Numbers,
    begun_owners: Numbers,
    begun_directions: Flags,
    begun_sizes: Numbers,
    head: Numbers,
    after: Numbers,
    together: Numbers,
    closed: Flags,
    left: Numbers,
) -> int:
    """Follow the messages of each direction through the rows.

    `first`, `last` and `size` are those of the message that each of the two directions is in, NONE
    between messages. A message that began in an earlier batch has a number after the last row as
    its first. `head` is set to the first row of each row's message, `after` to the next row of the
    same message, `together` to the size so far; `closed` are earlier messages that ended, `left`
    the first rows of messages that continue in a later batch. Returns how many those are.
    """
    count, kept, before, owner = len(owners), 0, 0, NONE
    first, last = np.full(2, NONE, np.int64), np.full(2, NONE, np.int64)
    size = np.zeros(2, np.int64)
    for row in range(count + 1):
        if row == count or owners[row] != owner:
            for direction in range(2):
                if first[direction] != NONE:
                    left[kept] = first[direction]
                    kept += 1
                first[direction] = NONE
            if row == count:
                break
            owner = owners[row]
            while before < len(begun_owners) and begun_owners[before] <= owner:
                if begun_owners[before] == owner:
                    direction = int(begun_directions[before])
                    first[direction] = last[direction] = count + before
                    size[direction] = begun_sizes[before]
                before += 1
        if cut_before[row] & BACKWARD_CUT:
            first[0] = _close(first[0], count, closed)
        if cut_before[row] & FORWARD_CUT:
            first[1] = _close(first[1], count, closed)
        direction = int(directions[row])
        if wrong[row]:
            first[direction] = _close(first[direction], count, closed)
        if not messages[row] or wrong[row]:
            continue
        if first[direction] != NONE:
            after[last[direction]] = row
        elif names[row]:
            first[direction], size[direction] = row, 0
        else:
            continue
        last[direction] = row
        size[direction] += sizes[row]
        if size[direction] <= MESSAGE_BYTES:
            head[row], together[row] = first[direction], size[direction]
        if not continued[row] or size[direction] > MESSAGE_BYTES:
            first[direction] = _close(first[direction], count, closed)
    return kept


@kernel(OCTETS, INTS, INTS, OCTETS, INTS, INTS, INTS, INTS, OUT_OCTETS)
def _join(
    octets: Bytes,
    starts: Numbers,
    lengths: Numbers,
    begun: Bytes,
    begun_ends: Numbers,
    head: Numbers,
    after: Numbers,
    chosen: Numbers,
    out: Bytes,
) -> None:
    """Copy the payloads of messages, each given by its last row, one after the other."""
    position = 0
    for row in chosen:
        piece = head[row]
        if piece >= len(starts):
            index = piece - len(starts)
            start = begun_ends[index - 1] if index else 0
            copy_octets(begun, start, out, position, begun_ends[index] - start)
            position += begun_ends[index] - start
            piece = after[piece]
        while True:
            copy_octets(octets, starts[piece], out, position, lengths[piece])
            position += lengths[piece]
            if piece == row:
                break
            piece = after[piece]


class Messages:
    """Which rows make up messages. Those `begun` in earlier batches have numbers after the last
    row.

    `head` is the first row of a row's message; NONE where that was missed, or is too large. `whole`
    are the rows that complete one.
    """

    def __init__(self, rows: FrameRows, begun: list[PendingMessage], wrong: Iterable[int]) -> None:
        """`wrong` are rows of messages that are not valid: they end a message, too."""
        self._rows, self.begun = rows, begun
        count, sizes = len(rows), rows.slices[PAYLOAD][1]
        self.head, self._together = np.full(count, NONE), np.zeros(count, np.int64)
        self._after = np.full(count + len(begun), NONE)
        self._closed, left = np.zeros(len(begun), np.bool_), np.empty(count + len(begun), np.int64)
        is_wrong = np.zeros(count, np.bool_)
        is_wrong[list(wrong)] = True
        kept = _follow(
            rows.owner,
            rows.forward,
            rows.frame == MESSAGE,
            is_wrong,
            rows.cut_before,
            rows.detail,
            rows.slices[DESTINATION][1],
            sizes,
            np.array([each.owner for each in begun], np.int64),
            np.array([each.forward for each in begun], np.bool_),
            np.array([each.message.size_bytes for each in begun], np.int64),
            self.head,
            self._after,
            self._together,
            self._closed,
            left,
        )
        self._left = left[:kept]
        self.whole: Flags = (self.head != NONE) & (rows.detail == 0)

    def begun_at(self) -> Numbers:
        """The offset at which each whole message begins in its direction."""
        before = np.array([each.message.offset for each in self.begun], np.int64)
        return np.where(self.whole, np.append(self._rows.offset, before)[self.head], NONE)

    def payloads(self) -> pa.Array:
        """The payloads of whole messages; those of one frame are not copied twice."""
        starts, lengths = self._rows.slices[PAYLOAD]
        count = len(starts)
        alone = self.whole & (self.head == np.arange(count))
        parts = [Raw(self._rows.octets, starts, np.where(alone, lengths, NONE))]
        chosen = np.flatnonzero(self.whole & ~alone)
        if len(chosen):
            before = [b"".join(each.message.payloads) for each in self.begun]
            missing = np.zeros(len(self._after), np.int64)
            # Earlier batches may have been read without payloads: then they are not there.
            missing[count:] = [
                each.message.size_bytes - len(payload)
                for each, payload in zip(self.begun, before, strict=True)
            ]
            together = self._together[chosen] - missing[self.head[chosen]]
            ends = np.cumsum(together)
            joined = np.empty(ends[-1], np.uint8)
            _join(
                self._rows.octets,
                starts,
                lengths,
                np.frombuffer(b"".join(before), np.uint8),
                np.cumsum(np.array([len(each) for each in before], np.int64)),
                self.head,
                self._after,
                chosen,
                joined,
            )
            positions, sizes = np.zeros(count, np.int64), np.full(count, NONE)
            positions[chosen], sizes[chosen] = ends - together, together
            parts.append(Raw(joined, positions, sizes))
        return binary(count, *parts, valid=self.whole)

    def keep(self, memories: Memories[MicroMsg2Memory]) -> None:
        """Write the messages that continue later into the memories of connections that stay."""
        rows, count = self._rows, len(self._rows)
        for index in np.flatnonzero(self._closed).tolist():
            owner, forward, _ = self.begun[index]
            if memories.stays[owner]:
                memories.of(owner).begun[forward] = None
        for piece in self._left.tolist():
            if piece >= count:
                owner, forward, message = self.begun[piece - count]
                piece = int(self._after[piece])
            else:
                owner, forward = int(rows.owner[piece]), bool(rows.forward[piece])
                message = None
            if memories.stays[owner]:
                memory = memories.of(owner)
                memory.begun[forward] = self._gone_on(message, piece)

    def _gone_on(self, message: PartialMessage | None, piece: int) -> PartialMessage:
        """A message with what these rows have of it, from row `piece` on."""
        rows = self._rows
        if message is None:
            message = PartialMessage(
                rows.part(piece, DESTINATION).decode(),
                parse_properties(rows.part(piece, PROPERTIES)),
                int(rows.offset[piece]),
            )
        while piece != NONE:
            payload = rows.part(piece, PAYLOAD) if rows.payloads else b""
            message.add(payload, int(rows.slices[PAYLOAD][1][piece]))
            piece = int(self._after[piece])
        return message
