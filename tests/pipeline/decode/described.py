"""One conversation described twice: frame by frame, and in the columns of the scanner."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import structs

from crosswire.errors import FrameError
from crosswire.pipeline.decode.arrow_batches import Batches
from crosswire.pipeline.decode.contract import DescriptionColumns, FrameRows
from crosswire.pipeline.decode.decoded_connection import (
    DecodedConnection,
    DecodedItems,
    Direction,
)
from crosswire.pipeline.decode.frame_table import FrameTable
from crosswire.pipeline.decode.meanings.contract import Described
from crosswire.pipeline.decode.protocols import columnar_protocol
from crosswire.pipeline.decode.row_schema import ARROW, OF_MESSAGES, VIOLATIONS
from crosswire.pipeline.decode.scanners.fallback import scan_and_decode
from crosswire.pipeline.decode.scanners.registry import scanner_of
from crosswire.pipeline.decode.scanners.scanner import Columns
from crosswire.wire import protocol
from crosswire.wire.contract import Encrypted, Frame, Gap, Unsynchronized
from tests.pipeline.decode.oracle import Reading, reading_of
from tests.pipeline.decode.scanned import decoder_for
from tests.wire.stream import Stream

Pieces = list[tuple[bool, bytes]]
"""Bytes in the order in which they were sent, and whether the opener sent them."""

DescribedItem = tuple[bool, int, int, Described | tuple[str, str]]
"""Direction, offset and length of an item, and its description."""

_BESIDE = (Gap, Unsynchronized, Encrypted)
_SLICES = 7
"""The first row of slices in a scanner's table."""


def agrees(name: str) -> bool:
    """Whether the opener's handshake decides how the other direction is read."""
    return scanner_of(name).reads_peer_handshake


@dataclass(frozen=True)
class Talk:
    """What both sides sent, piece by piece, and what decoders need to read it."""

    name: str
    pieces: Pieces
    streams: tuple[Stream, Stream]
    senders: tuple[str, str]

    @classmethod
    def of(cls, name: str, pieces: Pieces) -> Talk:
        """Of a whole connection, where one side has what it takes to read the other."""
        forward, backward = (
            b"".join(data for direction, data in pieces if direction == which)
            for which in (True, False)
        )
        peer = forward if agrees(name) else b""
        roles = protocol(name).roles
        return cls(
            name, pieces, (Stream(forward), Stream(backward, peer=peer)), (roles[0], roles[-1])
        )

    def decoders(self) -> list[Any]:
        return [
            decoder_for(self.name, sender, stream)
            for sender, stream in zip(self.senders, self.streams, strict=True)
        ]


@dataclass(frozen=True)
class Scanned:
    """A frame that a scanner gave: a column of its table, and where the frame is in the data."""

    table: Any
    position: int


@dataclass(frozen=True)
class Item:
    """What stands somewhere: a scanned frame, or what a decoder gave."""

    forward: bool
    offset: int
    length: int
    what: Frame | FrameError | Scanned


def by_frames(talk: Talk) -> list[Item]:
    """What the decoders alone give, in the order in which it became known."""
    decoders = talk.decoders()
    return [
        Item(forward, *placed)
        for forward, piece in talk.pieces
        for placed in decoders[0 if forward else 1].feed(piece)
    ]


def by_columns(talk: Talk, *, step_bytes: int) -> tuple[bytes, list[Item]]:
    """All bytes; and what the scanner gives, and the decoders for what it leaves, in order."""
    runs = [
        b"".join(data for direction, data in talk.pieces if direction == which)
        for which in (True, False)
    ]
    before = b"before"
    whole = before + b"".join(runs)
    starts = np.array([len(before), len(before) + len(runs[0])])
    ends = starts + [len(run) for run in runs]
    piece_ends = _ends(talk.pieces, starts.tolist())
    decoders, scanner = talk.decoders(), scanner_of(talk.name)
    states = np.array([scanner.state_of(decoder) for decoder in decoders])
    cuts, order = [end for end, _ in piece_ends], [index for _, index in piece_ends]

    def known(stop: int) -> int:
        """The piece with which all up to data[stop] was there."""
        return order[bisect_left(cuts, stop)]

    found: list[tuple[int, int, Item]] = []
    for part in scan_and_decode(
        scanner,
        np.frombuffer(whole, np.uint8),
        starts,
        ends,
        np.zeros(2, np.int64),
        states,
        decoders.__getitem__,
        cuts=np.array(cuts, np.int64),
        step_bytes=step_bytes,
    ):
        if isinstance(part, Columns):
            columns = part.run.tolist(), part.offset.tolist(), part.length.tolist()
            for row, (run, offset, length) in enumerate(zip(*columns, strict=True)):
                position = int(starts[run]) + offset
                scanned = Scanned(part.rows[:, row : row + 1], position)
                item = Item(run == 0, offset, length, scanned)
                found.append((known(position + length), len(found), item))
        else:
            for placed in part.placed:
                item = Item(part.run == 0, *placed)
                found.append((known(part.stop), len(found), item))
    found.sort(key=lambda each: each[:2])
    return whole, [item for _, _, item in found]


def _ends(pieces: Pieces, starts: Sequence[int]) -> list[tuple[int, int]]:
    """Where each piece ends in the data, in order, and its number; nothing for empty ones."""
    at = {True: starts[0], False: starts[1]}
    ends = []
    for index, (forward, piece) in enumerate(pieces):
        at[forward] += len(piece)
        if piece:
            ends.append((at[forward], index))
    return sorted(ends)


# ---------------------------------------------------------------------------------- frame by frame


def described(reading: Reading, items: Sequence[Item]) -> list[DescribedItem]:
    """The description of each, by the oracle."""
    return [each for item in items for each in _described(reading, item)]


def _described(reading: Reading, item: Item) -> list[DescribedItem]:
    what = item.what
    assert not isinstance(what, Scanned)
    if isinstance(what, _BESIDE):
        if item.length and not isinstance(what, Encrypted):
            reading.interrupt(item.forward)
        return []
    answer: Described | FrameError
    try:
        if isinstance(what, FrameError):
            raise what
        answer = reading.describe(item.forward, what, item.offset, item.length)
    except FrameError as error:
        reading.interrupt(item.forward)
        answer = error
    return [(item.forward, item.offset, item.length, _plain(answer))]


def _plain(answer: Described | FrameError) -> Described | tuple[str, str]:
    return (answer.code, answer.reason) if isinstance(answer, FrameError) else answer


# -------------------------------------------------------------------------------------- in columns


class DescribedConnections:
    """Connections whose frames are described together, call by call."""

    def __init__(self, name: str, count: int) -> None:
        found = columnar_protocol(name)
        assert found is not None
        self.columnar = found
        self.collected = Batches(ARROW)
        self.objects: dict[int, DecodedConnection] = {}
        self.connections = pa.array([str(owner) for owner in range(count)])
        self.nodes = pa.array(["n"] * count)
        self.stays = np.ones(count, np.bool_)
        self.found: list[list[DescribedItem]] = [[] for _ in range(count)]

    def with_directions(self, owner: int) -> DecodedConnection:
        if owner not in self.objects:
            first = ("n", str(owner), *[None] * 8, self.columnar.name, *[None] * 5)
            made = self.objects[owner] = DecodedConnection(first, self.collected)
            made.directions[True] = Direction("forward", 0, 0, False)
            made.directions[False] = Direction("backward", 0, 0, False)
        return self.objects[owner]

    def memory(self, owner: int) -> bytes:
        """What is remembered of a connection."""
        memory = self.with_directions(owner).memory
        assert memory is not None
        return memory.dump()

    def describe(
        self, parts: Sequence[tuple[bytes, Sequence[Item]]], *, payloads: bool = True
    ) -> None:
        """Describe the next items of each connection, given with the bytes that they are in."""
        octets = b"".join(data for data, _ in parts)
        table = _RecordedTable(self.columnar, self, np.frombuffer(octets, np.uint8))
        key = base = 0
        for owner, (data, items) in enumerate(parts):
            for (scanned, forward), group in groupby(
                items, lambda item: (isinstance(item.what, Scanned), item.forward)
            ):
                own = list(group)
                if scanned:
                    self._add(table, owner, forward, [item.what for item in own], key, base)
                else:
                    placed: list[Any] = [(item.offset, item.length, item.what) for item in own]
                    made = DecodedItems(forward, placed)
                    table.add_items(owner, made, time=0, key=key, serial=0)
                key += len(own)
            base += len(data)
        list(table.batches(payloads=payloads))
        for each in self.collected.take().to_pylist():
            if each["table"] == VIOLATIONS:
                answer = (each["status"], json.loads(each["fields"])["reason"])
                location = (each["direction"] == "forward", each["offset"], each["length"])
                self.found[int(each["connection"])].append((*location, answer))

    def _add(
        self,
        table: FrameTable,
        owner: int,
        forward: bool,
        frames: Sequence[Any],
        key: int,
        base: int,
    ) -> None:
        scanner = self.columnar.scanner
        whole = np.concatenate([each.table for each in frames], axis=1)
        whole[_SLICES::2] += base
        count = len(frames)
        table.add_columns(
            Columns(whole, scanner.frame_names, scanner.frame_layers, scanner.slice_names),
            owner=np.full(count, owner),
            forward=forward,
            time=np.zeros(count, np.int64),
            position=np.array([each.position for each in frames]) + base,
            base=np.zeros(count, np.int64),
            key=np.arange(key, key + count),
            serial=0,
        )


class _RecordedTable(FrameTable):
    """Keeps the descriptions."""

    def _batch(self, rows: FrameRows, time: Any, description: DescriptionColumns) -> Any:
        owners: Any = self._owners
        for row, answer in enumerate(listed(description)):
            if isinstance(answer, FrameError):
                continue  # it becomes a violation
            location = bool(rows.forward[row]), int(rows.offset[row]), int(rows.length[row])
            owners.found[int(rows.owner[row])].append((*location, answer))
        return super()._batch(rows, time, description)


def listed(descriptions: DescriptionColumns) -> list[Described | FrameError]:
    """Row by row."""
    columns: dict[str, list[Any]] = {}
    for name in Described.__struct_fields__:
        column = getattr(descriptions, name)
        if isinstance(column, np.ndarray):
            has_null = name != "payload_end"
            columns[name] = [None if has_null and each < 0 else each for each in column.tolist()]
        else:
            columns[name] = [None] * len(descriptions) if column is None else column.to_pylist()
    return [
        descriptions.errors.get(row) or Described(**{name: columns[name][row] for name in columns})
        for row in range(len(descriptions))
    ]


# ----------------------------------------------------------------------------------------- compared


def check(
    talk: Talk,
    *,
    payloads: bool = True,
    step_bytes: int = 64,
    by_frame: frozenset[int] = frozenset(),
    cut: int = 1 << 30,
) -> list[DescribedItem]:
    """Descriptions and what is remembered are equal; gives the descriptions.

    Instead of the scanner's rows with numbers `by_frame`, those of the decoder's frames are taken.
    All after number `cut` is described in a second call.
    """
    frames = by_frames(talk)
    octets, items = by_columns(talk, step_bytes=step_bytes)
    chosen = _whole(by_frame, frames)
    items = [frames[index] if index in chosen else item for index, item in enumerate(items)]
    reading, columns = reading_of(talk.name)(), DescribedConnections(talk.name, 1)
    expected = described(reading, frames)
    for part in (items[:cut], items[cut:]):
        columns.describe([(octets, part)], payloads=payloads)
    (found,) = columns.found
    if payloads:
        assert in_order(found) == in_order(expected)
        assert columns.memory(0) == reading.dump()
    else:
        assert in_order(_without_payloads(found)) == in_order(_without_payloads(expected))
    return expected


def in_order(items: Iterable[DescribedItem]) -> list[DescribedItem]:
    """Those of each direction as they follow one another. Violations are found after frames, but
    what depends on the order of the two directions shows in the descriptions."""
    return sorted(items, key=lambda item: item[:3])


def check_together(talks: Sequence[Talk], cuts: Sequence[int], stays: Sequence[bool]) -> None:
    """Connections are described in two calls, all of them in each: as each is alone, and what is
    remembered of those who stay is alike too."""
    columns = DescribedConnections(talks[0].name, len(talks))
    every = [by_columns(talk, step_bytes=64) for talk in talks]
    columns.describe(
        [(octets, items[:cut]) for (octets, items), cut in zip(every, cuts, strict=True)]
    )
    columns.stays = np.array(stays, np.bool_)
    columns.describe(
        [(octets, items[cut:]) for (octets, items), cut in zip(every, cuts, strict=True)]
    )
    for owner, talk in enumerate(talks):
        alone = reading_of(talk.name)()
        assert in_order(columns.found[owner]) == in_order(described(alone, by_frames(talk)))
        assert not stays[owner] or columns.memory(owner) == alone.dump()


def _whole(by_frame: frozenset[int], frames: list[Item]) -> frozenset[int]:
    """What stands in a frame is read with it, in the same way."""
    chosen: set[int] = set()
    for index, item in enumerate(frames):
        inside = isinstance(item.what, Frame) and item.what.layer > 0
        if (index - 1 if inside else index) in (chosen if inside else by_frame):
            chosen.add(index)
    return frozenset(chosen)


def _without_payloads(descriptions: list[DescribedItem]) -> list[DescribedItem]:
    return [
        (*each[:3], structs.replace(each[3], **dict.fromkeys(OF_MESSAGES)))
        if isinstance(each[3], Described)
        else each
        for each in descriptions
    ]
