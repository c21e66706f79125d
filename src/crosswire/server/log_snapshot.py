"""The log at one moment, for reading on a thread: which ids are in the lake, which in the store,
which are missing, and about how many messages are where."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from crosswire.envelope import Envelope, decode_at
from crosswire.errors import RecordDamaged
from crosswire.hub.floors import floors
from crosswire.lake.columns import booleans, numbers
from crosswire.lake.history import CoveredIds, History, IdShare, LakeExtent
from crosswire.lake.writer import messages_table
from crosswire.server.log_selection import LogSelection
from crosswire.store.contract import Page, View

__all__ = [
    "DestinationTally",
    "LogPiece",
    "LogSnapshot",
    "MissingMessages",
    "Moment",
    "cut",
    "ids_of",
]

_WINDOW: Final = 16_384
_WIDEST: Final = 1 << 18
_SLICE: Final = 500
_BREATH_S: Final = 0.0003
_PAGE_BYTES: Final = 4 << 20
_FEW: Final = 8
_PROBES: Final = 6
_PROBED: Final = 16
_SAMPLED: Final = 32
_MESSAGE_WEIGHT: Final = 256
"""The fixed cost of a message, in bytes that take as long."""


class Moment(NamedTuple):
    """What a thread gets from the event loop: `view` has all ids above `kept` and up to
    `committed`, except that those up to `limit` may have been deleted.
    """

    view: View
    kept: LakeExtent | None
    committed: int
    limit: int


class MissingMessages(msgspec.Struct, frozen=True):
    """A range in which messages of a destination may be missing from lake and store."""

    destination: str
    first: int
    last: int


class DestinationTally(msgspec.Struct, kw_only=True):
    """How many messages, and the sum of their payloads; 0 `bytes` where these were not added."""

    messages: int = 0
    bytes: int = 0


class LogPiece(NamedTuple):
    """A range of ids that are in the lake or, all of them, in the store."""

    in_lake: bool
    first: int
    last: int


class LogSnapshot:
    """The log of some destinations at one moment."""

    def __init__(
        self,
        history: History,
        moment: Moment,
        choice: LogSelection,
        logs: Mapping[str, int],
        *,
        report: Callable[[RecordDamaged], None],
        breathe: Callable[[float], None] = time.sleep,
    ) -> None:
        self.moment = moment
        self.choice = choice
        self.logs = logs
        self.history = history
        self.segments: list[CoveredIds] = history.segments(moment.kept)
        self._numbers = sorted(logs.values())
        self._names = {number: name for name, number in logs.items()}
        self._report = report
        self._breathe = breathe

    def __call__(self, first: int, last: int) -> Iterator[LogPiece]:
        """All of a range, in order."""
        for segment in self.segments:
            if segment.last < first:
                continue
            if segment.first > last:
                break
            if segment.first > first:
                yield LogPiece(False, first, segment.first - 1)
                first = segment.first
            yield LogPiece(True, first, min(segment.last, last))
            first = segment.last + 1
        if first <= last:
            yield LogPiece(False, first, last)

    # What is missing.

    def holes(self) -> list[LogPiece]:
        """Ids that the lake does not have, and that the store may have deleted."""
        upto = min(self.moment.limit, self.moment.committed)
        return [piece for piece in self(1, upto) if not piece.in_lake]

    def missing(self, first: int, last: int) -> list[MissingMessages]:
        """Messages of a range that existed once, from each destination's start on."""
        holes = [hole for hole in self.holes() if hole.last >= first and hole.first <= last]
        if not holes:
            return []
        gone = floors(self.moment.view)
        found: list[MissingMessages] = []
        for name, number in self.logs.items():
            begin = max(first, self.choice.start(name))
            end = min(last, gone.get(number, 0))
            spans = [hole for hole in holes if hole.first <= end and hole.last >= begin]
            if spans and begin <= end:
                found.append(
                    MissingMessages(name, max(spans[0].first, begin), min(spans[-1].last, end))
                )
        return found

    # Where is what.

    def count(self, most: int, first: int, last: int, *, within_s: float) -> tuple[int, int]:
        """How many messages of a range are selected, and up to which id they were counted: the end
        of the range, the message with number `most`, or where the time was up."""
        if not self.logs:
            return 0, last
        deadline = time.monotonic() + within_s
        found = 0
        for piece in self(first, last):
            for ids, upto in self._wanted(piece):
                if found + len(ids) >= most:
                    return most, int(ids[most - found - 1])
                found += len(ids)
                if time.monotonic() > deadline:
                    return found, upto
                self._breathe(_BREATH_S)
        return found, last

    def tally(
        self, most: int, first: int, last: int, *, sized: bool, within_s: float
    ) -> tuple[dict[str, DestinationTally], int]:
        """Messages of a range by destination, with the bytes of their payloads if `sized`, and up
        to which id they were counted: it stops as `count` does, after some more messages."""
        found: dict[str, DestinationTally] = {}
        deadline = time.monotonic() + within_s
        total = 0
        for piece in self(first, last) if self.logs else ():
            for counted, upto in self._tallied(piece, sized=sized):
                for name, messages, size_bytes in counted:
                    own = found.setdefault(name, DestinationTally())
                    own.messages += messages
                    own.bytes += size_bytes
                    total += messages
                if total >= most or time.monotonic() > deadline:
                    return found, upto
                self._breathe(_BREATH_S)
        return found, last

    def _tallied(
        self, piece: LogPiece, *, sized: bool
    ) -> Iterator[tuple[list[tuple[str, int, int]], int]]:
        """Destinations with messages and bytes, some messages at a time, and up to where they are
        all."""
        if piece.in_lake:
            names = ("id", "destination", *(("payload",) if sized else ()))
            first = piece.first
            for batch, upto in self.history.read(piece.first, piece.last, names):
                if batch is not None:
                    ids = ids_of(batch)
                    fits = self.choice.mask(batch.column("destination"), ids)
                    fits &= (ids >= first) & (ids <= upto)
                    yield _by_destination(batch.filter(booleans(fits)), sized=sized), upto
                first = upto + 1
            return
        position, width = piece.first, _WINDOW
        while position <= piece.last:
            rest = LogPiece(False, position, piece.last)
            names = ("id", "destination", "payload")
            batch, upto, width = self.stored(rest, names, "", width)
            if batch is not None:
                fits = self.choice.mask(batch.column("destination"), ids_of(batch))
                yield _by_destination(batch.filter(booleans(fits)), sized=sized), upto
            else:
                yield [], upto
            position = upto + 1

    def _wanted(self, piece: LogPiece) -> Iterator[tuple[Any, int]]:
        """Ids that are wanted, in order, some at a time, and up to where they are all."""
        if piece.in_lake:
            names = ("id", "destination")
            first = piece.first
            for batch, upto in self.history.read(piece.first, piece.last, names):
                if batch is not None:
                    ids = ids_of(batch)
                    fits = self.choice.mask(batch.column("destination"), ids)
                    yield ids[fits & (ids >= first) & (ids <= upto)], upto
                first = upto + 1
            return
        position, width = piece.first, _WINDOW
        while position <= piece.last:
            upto = min(position + width - 1, piece.last)
            found = [each for log in self.logs.items() for each in self._ids(*log, position, upto)]
            yield np.sort(np.asarray(found, np.int64)), upto
            position, width = upto + 1, _next_width(width, len(found))

    def _ids(self, name: str, number: int, first: int, last: int) -> Iterator[int]:
        view, choice = self.moment.view, self.choice
        if not name.startswith("service/"):
            first, last = max(first, choice.start(name)), min(last, choice.end(name) - 1)
            yield from view.ids(number, after=first - 1, upto=last)
            return
        position = first - 1
        while position < last:
            page = view.page([number], after=position, upto=last, count=_SLICE)
            for _, identifier, record in page.records:
                envelope = self._decode(number, identifier, record)
                if envelope is not None and choice.takes(envelope.destination, identifier):
                    yield identifier
            position = page.last

    def since(self, time_us: int, first: int, last: int) -> int | None:
        """The first id in a range that came at this time or later."""
        for piece in self(first, last):
            if piece.in_lake:
                found = self.history.first_since(time_us, piece.first, piece.last)
            else:
                each = (self._first_since(time_us, number, piece) for number in self._numbers)
                found = min((one for one in each if one is not None), default=None)
            if found is not None:
                return found
        return None

    def _first_since(self, time_us: int, number: int, piece: LogPiece) -> int | None:
        """By bisection: times grow with ids."""
        # For each of thousands of destinations: others go on, and the hub can stop.
        self._breathe(0.0)
        low, high = piece.first, piece.last
        found = None
        while low <= high:
            middle = (low + high) // 2
            page = self.moment.view.page([number], after=middle - 1, upto=high, count=1)
            envelope = self._decode(*page.records[0]) if page.records else None
            if envelope is None:
                high = middle - 1
            elif envelope.time >= time_us:
                found, high = envelope.id, middle - 1
            else:
                low = envelope.id + 1
        return found

    # How much is where.

    def shares(self, first: int, last: int) -> list[IdShare]:
        """About how many messages, and how many bytes, are in which parts of a range, wanted or
        not."""
        found: list[IdShare] = []
        for piece in self(first, last) if self.logs else ():
            if piece.in_lake:
                found += self.history.shares(piece.first, piece.last)
            else:
                found += self._occupied(piece)
        return [each for share in found for each in _clipped(share, first, last)]

    def _occupied(self, piece: LogPiece) -> list[IdShare]:
        """Ids are dense, but for holes that restarts leave: ranges with something in them."""
        step = max(len(self._numbers) // _PROBED, 1)
        spans = [
            span
            for number in self._numbers[::step]
            for span in self._spans(number, piece.first, piece.last, _PROBES)
        ]
        merged: list[IdShare] = []
        for first, last in sorted(spans):
            if merged and first <= merged[-1].last + 1:
                first, last = merged[-1].first, max(last, merged[-1].last)
                merged.pop()
            rows = last - first + 1
            merged.append(IdShare(first, last, rows, rows * self._sampled_bytes(first, last)))
        return merged

    def _sampled_bytes(self, first: int, last: int) -> int:
        """The size of a message, by some at the beginning of a range."""
        page = self.moment.view.page(
            self._numbers[:_PROBED], after=first - 1, upto=last, count=_SAMPLED
        )
        return sum([len(each[2]) for each in page.records]) // max(len(page.records), 1)

    def _spans(self, number: int, first: int, last: int, depth: int) -> Iterator[tuple[int, int]]:
        bounds = self.moment.view.bounds(number, first - 1, last)
        if bounds is None:
            return
        first, last = bounds
        if not depth or last - first < _WINDOW:
            yield bounds
            return
        middle = (first + last) // 2
        yield from self._spans(number, first, middle, depth - 1)
        yield from self._spans(number, middle + 1, last, depth - 1)

    # The messages themselves.

    def stored(
        self, piece: LogPiece, names: Sequence[str], node: str, width: int
    ) -> tuple[pa.RecordBatch | None, int, int]:
        """What the store has at the beginning of a piece; up to where; how far to look next."""
        upto = min(piece.first + width - 1, piece.last)
        # Short pages let the event loop in; but each looks at every destination.
        count = _SLICE if len(self._numbers) <= _FEW else _WINDOW
        tables: list[pa.Table] = []
        position, rows, size_bytes = piece.first, 0, 0
        while position <= upto and rows < _WINDOW and size_bytes < _PAGE_BYTES:
            page = self.moment.view.page(
                self._numbers,
                after=position - 1,
                upto=upto,
                count=count,
                size_bytes=_PAGE_BYTES - size_bytes,
            )
            position = page.last + 1
            rows += len(page.records)
            size_bytes += sum([len(each[2]) for each in page.records])
            tables += self._tables(page, names, node)
        width = _next_width(width, rows)
        if not tables:
            return None, position - 1, width
        (batch,) = pa.concat_tables(tables).combine_chunks().to_batches()
        return batch, position - 1, width

    def _tables(self, page: Page, names: Sequence[str], node: str) -> Iterator[pa.Table]:
        for start in range(0, len(page.records), _SLICE):
            some = [self._decode(*each) for each in page.records[start : start + _SLICE]]
            envelopes = [each for each in some if each is not None]
            if envelopes:
                yield messages_table(node, 0, envelopes, names=names, pause=self._breathe)

    def _decode(self, number: int, identifier: int, record: bytes) -> Envelope | None:
        try:
            return decode_at(record, self._names[number], identifier)
        except RecordDamaged as error:
            self._report(error)
            return None


def _by_destination(batch: pa.RecordBatch, *, sized: bool) -> list[tuple[str, int, int]]:
    coded = batch.column("destination").dictionary_encode()
    names, codes = coded.dictionary.to_pylist(), _int32s(coded.indices)
    messages = np.bincount(codes, minlength=len(names))
    sizes = [0] * len(names)
    if sized:
        lengths = _int32s(pc.binary_length(batch.column("payload")))
        sizes = [int(size) for size in np.bincount(codes, lengths, len(names))]
    return list(zip(names, messages.tolist(), sizes, strict=True))


def _int32s(column: pa.Array) -> Any:
    """For numpy, without pandas: see `lake.columns`."""
    return np.frombuffer(column.buffers()[1], np.int32, len(column), 4 * column.offset)


def ids_of(batch: pa.RecordBatch) -> Any:
    """For numpy."""
    return numbers(pa.chunked_array([batch.column("id")]))


def cut(shares: Sequence[IdShare], first: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """Cut a range into this number of parts, or fewer, with about as much work in each."""
    weights = [share.size_bytes + _MESSAGE_WEIGHT * share.rows for share in shares]
    total = sum(weights)
    borders = [first]
    seen = 0
    for share, weight in zip(shares, weights, strict=True):
        while len(borders) < parts and seen + weight >= (due := total * len(borders) // parts):
            within = (due - seen) / max(weight, 1)
            if weight * parts <= total // 2:
                # A row group between two tasks would be read by both.
                within = round(within)
            border = share.first + int((share.last - share.first + 1) * within)
            if border >= stop:
                break
            if border <= borders[-1]:
                border = borders[-1]
            borders.append(border)
        seen += weight
    ends = [*borders[1:], stop]
    return [(begin, end) for begin, end in zip(borders, ends, strict=True) if begin < end]


def _clipped(share: IdShare, first: int, last: int) -> Iterator[IdShare]:
    begin, end = max(share.first, first), min(share.last, last)
    if begin <= end:
        part = (end - begin + 1) / (share.last - share.first + 1)
        yield IdShare(begin, end, max(int(share.rows * part), 1), int(share.size_bytes * part))


def _next_width(width: int, found: int) -> int:
    """Look farther where there is little."""
    return min(width * 4, _WIDEST) if found < _WINDOW // 8 else _WINDOW
