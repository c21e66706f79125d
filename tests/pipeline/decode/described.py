"""One conversation described twice: frame by frame, and from the columns of the scanner."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any

import numpy as np
from msgspec import structs

from crosswire.errors import FrameError
from crosswire.pipeline.decode.batch_scan import columnar_protocol
from crosswire.pipeline.decode.contract import Describe, FrameRows, Readings
from crosswire.pipeline.decode.contract import DescriptionColumns as Columnar
from crosswire.pipeline.decode.readings import reading_of
from crosswire.pipeline.decode.readings.contract import Described, Reading
from crosswire.pipeline.decode.row_schema import OF_MESSAGES
from crosswire.pipeline.decode.scanners.fallback import scan_and_decode
from crosswire.pipeline.decode.scanners.scanner import BulkScanner, Columns
from crosswire.wire import protocol
from crosswire.wire.contract import Encrypted, Frame, Gap, Unsynchronized
from tests.pipeline.decode.scanned import decoder_for
from tests.wire.stream import Stream

Pieces = list[tuple[bool, bytes]]
"""Bytes in the order in which they were sent, and whether the opener sent them."""

DescribedItem = tuple[bool, int, int, Described | tuple[str, str]]
"""Direction, offset and length of an item, and its description."""

OWNER = 3
"""Of all rows: some number."""
_BESIDE = (Gap, Unsynchronized, Encrypted)


def scanner_of(name: str) -> BulkScanner:
    module = import_module(f"crosswire.pipeline.decode.scanners.{name}")
    scanner: BulkScanner = module.SCANNER()
    return scanner


def describe_of(name: str) -> Describe:
    found = columnar_protocol(name)
    assert found is not None
    return found.describe


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
class Item:
    """What stands somewhere, in the order in which it became known; of a row, its number."""

    forward: bool
    offset: int
    length: int
    what: Frame | FrameError | int


def by_frames(talk: Talk) -> list[Item]:
    """What the decoders alone give."""
    decoders = talk.decoders()
    return [
        Item(forward, *placed)
        for forward, piece in talk.pieces
        for placed in decoders[0 if forward else 1].feed(piece)
    ]


def by_columns(talk: Talk, *, payloads: bool, step_bytes: int) -> tuple[FrameRows, list[Item]]:
    """What the scanner gives, and the decoders for what it leaves; rows are in order too."""
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
    columns: list[tuple[Any, ...]] = []
    data = np.frombuffer(whole, np.uint8)
    offsets = np.zeros(2, np.int64)
    for part in scan_and_decode(
        scanner,
        data,
        starts,
        ends,
        offsets,
        states,
        decoders.__getitem__,
        cuts=np.array(cuts, np.int64),
        step_bytes=step_bytes,
    ):
        if isinstance(part, Columns):
            for row in _listed(part, starts.tolist()):
                stop = row[0] + row[4]
                item = Item(row[1], row[3], row[4], len(columns))
                columns.append(row)
                found.append((known(stop), len(found), item))
        else:
            for placed in part.placed:
                item = Item(part.run == 0, *placed)
                found.append((known(part.stop), len(found), item))
    found.sort(key=lambda each: each[:2])
    return _in_order(columns, [item for _, _, item in found], whole, payloads, scanner)


def _ends(pieces: Pieces, starts: Sequence[int]) -> list[tuple[int, int]]:
    """Where each piece ends in the data, in order, and its number; nothing for empty ones."""
    at = {True: starts[0], False: starts[1]}
    ends = []
    for index, (forward, piece) in enumerate(pieces):
        at[forward] += len(piece)
        if piece:
            ends.append((at[forward], index))
    return sorted(ends)


def _listed(columns: Columns, starts: Sequence[int]) -> Iterable[tuple[Any, ...]]:
    """Rows as tuples: their position in the data, direction, and the columns."""
    runs = columns.run.tolist()
    offsets = columns.offset.tolist()
    positions = [offset + starts[run] for run, offset in zip(runs, offsets, strict=True)]
    slices = [each.tolist() for name in columns.slice_names for each in columns.slice(name)]
    return zip(
        positions,
        [run == 0 for run in runs],
        columns.frame.tolist(),
        offsets,
        columns.length.tolist(),
        columns.number.tolist(),
        columns.detail.tolist(),
        columns.sequence.tolist(),
        *slices,
        strict=True,
    )


def _in_order(
    columns: list[tuple[Any, ...]],
    items: list[Item],
    data: bytes,
    payloads: bool,
    scanner: BulkScanner,
) -> tuple[FrameRows, list[Item]]:
    ordered: list[tuple[Any, ...]] = []
    numbered = []
    for item in items:
        if isinstance(item.what, int):
            ordered.append(columns[item.what])
            item = Item(item.forward, item.offset, item.length, len(ordered) - 1)
        numbered.append(item)
    kinds: dict[int, Any] = {1: np.bool_, 5: np.uint64}
    arrays: Any = [
        np.array([row[index] for row in ordered], kinds.get(index, np.int64))
        for index in range(8 + 2 * len(scanner.slice_names))
    ]
    slices = tuple(zip(arrays[8::2], arrays[9::2], strict=True))
    rows = FrameRows(
        np.frombuffer(data, np.uint8),
        payloads,
        np.full(len(ordered), OWNER),
        *(*arrays[:8], slices),
    )
    return rows, numbered


def some(rows: FrameRows, start: int, stop: int) -> FrameRows:
    """A part of them."""
    taken = {
        each.name: getattr(rows, each.name)[start:stop]
        for each in fields(FrameRows)
        if each.name not in ("octets", "payloads", "slices", "_view")
    }
    slices = tuple((at[start:stop], sizes[start:stop]) for at, sizes in rows.slices)
    return replace(rows, **taken, slices=slices)


def listed(descriptions: Columnar) -> list[Described | FrameError]:
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


def described(
    name: str,
    reading: Reading,
    items: Sequence[Item],
    rows: FrameRows | None = None,
    frames: Sequence[Item] = (),
    by_frame: frozenset[int] = frozenset(),
) -> list[DescribedItem]:
    """The description of each. Rows that follow one another are described in one call, but for
    those `by_frame`: there the frame at the same index is taken instead."""
    descriptions: list[DescribedItem] = []
    index = 0
    readings = Readings(
        {OWNER: reading}, np.ones(OWNER + 1, np.bool_), {OWNER: reading}.__getitem__
    )
    while index < len(items):
        item = items[index]
        what = frames[index].what if index in by_frame else item.what
        if not isinstance(what, int):
            descriptions += _described(reading, item, what)
            index += 1
            continue
        stop = index + 1
        while stop < len(items) and isinstance(items[stop].what, int) and stop not in by_frame:
            stop += 1
        assert rows is not None
        made = listed(describe_of(name)(some(rows, what, what + stop - index), readings))
        for each, answer in zip(items[index:stop], made, strict=True):
            descriptions.append((each.forward, each.offset, each.length, _plain(answer)))
        index = stop
    return descriptions


def _described(reading: Reading, item: Item, what: Frame | FrameError) -> list[DescribedItem]:
    if isinstance(what, _BESIDE):
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


def check(
    talk: Talk,
    *,
    payloads: bool = True,
    step_bytes: int = 64,
    by_frame: frozenset[int] = frozenset(),
) -> list[DescribedItem]:
    """Descriptions and what is remembered are equal; gives the descriptions."""
    frames = by_frames(talk)
    rows, items = by_columns(talk, payloads=payloads, step_bytes=step_bytes)
    one, other = reading_of(talk.name)(), reading_of(talk.name)()
    expected = described(talk.name, one, frames)
    found = described(talk.name, other, items, rows, frames, _whole(by_frame, frames))
    if payloads:
        assert found == expected
        assert other.dump() == one.dump()
    else:
        assert _without_payloads(found) == _without_payloads(expected)
    return expected


def together(each: Sequence[FrameRows]) -> FrameRows:
    """Rows of several connections, each with its index as its owner."""
    ends = np.cumsum([len(rows.octets) for rows in each])
    at = [0, *ends.tolist()]
    octets = np.concatenate([rows.octets for rows in each])

    def joined(columns: Iterable[Any]) -> Any:
        return np.concatenate(list(columns))

    apart = ("octets", "payloads", "owner", "position", "slices", "_view")
    names = [one.name for one in fields(FrameRows) if one.name not in apart]
    return FrameRows(
        octets=octets,
        payloads=each[0].payloads,
        owner=np.repeat(np.arange(len(each)), [len(rows) for rows in each]),
        position=joined(rows.position + start for rows, start in zip(each, at, strict=False)),
        slices=tuple(
            (
                joined(
                    rows.slices[index][0] + start for rows, start in zip(each, at, strict=False)
                ),
                joined(rows.slices[index][1] for rows in each),
            )
            for index in range(len(each[0].slices))
        ),
        **{name: joined(getattr(rows, name) for rows in each) for name in names},
    )


def check_together(talks: Sequence[Talk], cuts: Sequence[int], stays: Sequence[bool]) -> None:
    """Connections that the scanner alone can read are described in two calls, all of them in each:
    as each is alone, and what is remembered of those who stay is alike too."""
    name = talks[0].name
    describe, begin = describe_of(name), reading_of(name)
    made: dict[int, Reading] = {}

    def reading(owner: int) -> Reading:
        return made.setdefault(owner, begin())

    found: list[list[Any]] = [[] for _ in talks]
    every = [by_columns(talk, payloads=True, step_bytes=64)[0] for talk in talks]
    halves = [[some(rows, 0, cut) for rows, cut in zip(every, cuts, strict=True)]]
    halves.append([some(rows, cut, len(rows)) for rows, cut in zip(every, cuts, strict=True)])
    for half, staying in zip(halves, ([True] * len(talks), stays), strict=True):
        rows = together(half)
        readings = Readings(dict(made), np.array(staying, np.bool_), reading)
        for owner, answer in zip(
            rows.owner.tolist(), listed(describe(rows, readings)), strict=True
        ):
            found[owner].append(_plain(answer))
    for owner, talk in enumerate(talks):
        alone = begin()
        assert found[owner] == [what for *_, what in described(name, alone, by_frames(talk))]
        assert not stays[owner] or reading(owner).dump() == alone.dump()


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
