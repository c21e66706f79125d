"""What the tests of all columnar scanners share: scanner and Decoder against the Decoder alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from crosswire.pipeline.decode.arrays import NONE
from crosswire.pipeline.decode.scanners.fallback import scan_and_decode
from crosswire.pipeline.decode.scanners.scanner import BulkScanner, Columns
from crosswire.wire import protocol
from crosswire.wire.contract import Decoder, Frame, FrameError, Placed
from tests.wire.stream import Stream

Slices = dict[str, Any]
Typed = tuple[int, int, int, Slices]
"""Number, detail, sequence, and the slices that are there."""

InColumns = Callable[[Frame, bytes], Typed]
"""What a scanner should give for a frame, whose bytes are there too."""

Reader = Callable[[Slices, bytes], Slices]
"""Reads, in the slices of a frame, what the frame on the wire does not show."""


def as_they_are(slices: Slices, raw: bytes) -> Slices:
    return slices


@dataclass(frozen=True)
class Noisy:
    """A stream as a capture may have it, and where its bytes come in batches."""

    stream: Stream
    data: bytes
    batches: tuple[bytes, ...]


@st.composite
def noisy(draw: st.DrawFn, streams: SearchStrategy[Stream], batches: int) -> Noisy:
    """Whole, with bytes after it, with one changed or taken out, or cut short."""
    stream = draw(streams)
    data = stream.data
    position = draw(st.integers(0, max(len(data) - 1, 0)))
    match draw(st.sampled_from(["whole", "whole", "after", "changed", "less", "short"])):
        case "after":
            data += draw(st.binary(max_size=20))
        case "changed":
            data = data[:position] + draw(st.binary(min_size=1, max_size=1)) + data[position + 1 :]
        case "less":
            data = data[:position] + data[position + 1 :]
        case "short":
            data = data[:position]
    marks = sorted(
        draw(st.lists(st.integers(0, len(data)), min_size=batches - 1, max_size=batches - 1))
    )
    ends = [0, *marks, len(data)]
    pieces = tuple(data[ends[index] : ends[index + 1]] for index in range(batches))
    return Noisy(stream, data, pieces)


def decoder_for(name: str, sender: str, stream: Stream, *, late: bool = False) -> Decoder:
    entry = protocol(name)
    peer = None
    if stream.peer:
        other = entry.roles[-1] if sender != entry.roles[-1] else entry.roles[0]
        peer = entry.decoder(other)
        peer.feed(stream.peer)
    return entry.decoder(sender, hints=stream.hints or None, peer=peer, late=late)


def decoded(decoder: Decoder, pieces: Sequence[bytes], typed: InColumns) -> list[Any]:
    """What the Decoder alone makes of it."""
    whole = b"".join(pieces)
    return [_in_words(item, whole, typed) for piece in pieces for item in decoder.feed(piece)]


def scanned(
    scanner: BulkScanner,
    decoders: Sequence[Decoder],
    cases: Sequence[Noisy],
    typed: InColumns,
    *,
    step_bytes: int,
    reader: Reader = as_they_are,
) -> tuple[list[list[Any]], int]:
    """What both make of it together, batch after batch; and how many rows the scanner gave."""
    found: list[list[Any]] = [[] for _ in cases]
    offsets = np.zeros(len(cases), np.int64)
    by_scanner = 0
    for pieces in zip(*(case.batches for case in cases), strict=True):
        data = np.frombuffer(b"".join((b"before", *pieces)), np.uint8)
        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64) + len(b"before")
        starts = ends - np.array([len(piece) for piece in pieces], np.int64)
        states = np.array([scanner.state_of(decoder) for decoder in decoders])
        for part in scan_and_decode(
            scanner,
            data,
            starts,
            ends,
            offsets,
            states,
            decoders.__getitem__,
            continues=np.ones(len(cases), np.bool_),
            step_bytes=step_bytes,
        ):
            if isinstance(part, Columns):
                by_scanner += len(part)
                for row in range(len(part)):
                    found[part.run[row]].append(_row(part, row, data, starts - offsets, reader))
            else:
                whole = cases[part.run].data
                found[part.run] += [_in_words(item, whole, typed) for item in part.placed]
        offsets += ends - starts
    return found, by_scanner


def check(
    scanner: BulkScanner,
    name: str,
    sender: str,
    cases: Sequence[Noisy],
    typed: InColumns,
    *,
    step_bytes: int = 16,
    late: bool = False,
    reader: Reader = as_they_are,
) -> None:
    """Row for row the same, and the decoders end in the same state."""
    alone = [decoder_for(name, sender, case.stream, late=late) for case in cases]
    expected = [
        decoded(decoder, case.batches, typed) for decoder, case in zip(alone, cases, strict=True)
    ]
    helped = [decoder_for(name, sender, case.stream, late=late) for case in cases]
    found, _ = scanned(scanner, helped, cases, typed, step_bytes=step_bytes, reader=reader)
    assert found == expected
    for one, other in zip(alone, helped, strict=True):
        assert (one.offset, one.pending, one.unread, one.lost) == (
            other.offset,
            other.pending,
            other.unread,
            other.lost,
        )


def check_alone(
    scanner: BulkScanner,
    name: str,
    sender: str,
    streams: Sequence[Stream],
    typed: InColumns,
    *,
    reader: Reader = as_they_are,
    peers: Any = None,
) -> None:
    """Streams in which the scanner finds nothing odd: from their first byte on, without any help,
    it gives all their rows."""
    expected = [
        decoded(decoder_for(name, sender, stream), [stream.data], typed) for stream in streams
    ]
    data = np.frombuffer(b"".join(stream.data for stream in streams), np.uint8)
    ends = np.cumsum([len(stream.data) for stream in streams], dtype=np.int64)
    starts = ends - np.array([len(stream.data) for stream in streams], np.int64)
    at, states = starts.copy(), scanner.new_states(sender, len(streams))
    if peers is not None:
        scanner.share_handshake(states, peers)
    columns = scanner.scan(data, at, ends, states)
    assert at.tolist() == ends.tolist()
    found: list[list[Any]] = [[] for _ in streams]
    for row in range(len(columns)):
        found[columns.run[row]].append(_row(columns, row, data, starts, reader))
    assert found == expected


def _row(columns: Columns, row: int, data: Any, shifts: Any, reader: Reader) -> Any:
    """`shifts`: where in data the first byte of each run's stream would stand."""
    start = columns.offset[row] + shifts[columns.run[row]]
    raw = data[start : start + columns.length[row]].tobytes()
    slices: Slices = {}
    for name in columns.slice_names:
        starts, lengths = columns.slice(name)
        if lengths[row] != NONE:
            slices[name] = data[starts[row] : starts[row] + lengths[row]].tobytes()
    return (
        int(columns.offset[row]),
        int(columns.length[row]),
        int(columns.layer[row]),
        columns.frame_names[columns.frame[row]],
        (
            int(columns.number[row]),
            int(columns.detail[row]),
            int(columns.sequence[row]),
            reader(slices, raw),
        ),
    )


def _in_words(item: Placed, whole: bytes, typed: InColumns) -> Any:
    offset, length, what = item
    if isinstance(what, FrameError):
        return offset, length, what.code, what.reason
    raw = whole[offset : offset + length]
    return offset, length, what.layer, what.frame_name, typed(what, raw)
