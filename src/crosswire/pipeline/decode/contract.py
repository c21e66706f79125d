"""What a protocol's description in columns is given, and what it gives.

A protocol's `describe` takes rows of many connections and gives for each exactly what its Reading
would give for the frame. It works in columns: what many rows share is found out once
(`text.distinct`), responses are matched with requests (`matching.Matching`), and texts are
concatenated (`text.text`). Where that is not worth it, Python describes single rows:

    DescriptionColumns.patch   replaces some rows, which must not depend on earlier ones
    describe_one_by_one        reads whole connections frame by frame, with their Readings
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from crosswire.errors import FrameError
from crosswire.pipeline.decode.arrays import NONE, Bytes, Flags, Numbers
from crosswire.pipeline.decode.readings.contract import Described, Reading
from crosswire.wire.contract import Frame

__all__ = [
    "Describe",
    "DescriptionColumns",
    "FrameRows",
    "Readings",
    "describe_one_by_one",
    "null_column",
]

R = TypeVar("R", bound=Reading)

_TEXTS: Final = ("fields", "kind", "identifier", "destination", "status")
_NUMBERS: Final = ("sequence", "payload_size", "payload_end", "begun_at")
_OF_MESSAGES: Final = {
    "payload": pa.binary(),
    "content_type": pa.string(),
    "properties": pa.string(),
    "reply_to": pa.string(),
    "message_id": pa.int64(),
}


@dataclass(frozen=True, slots=True)
class FrameRows:
    """Frames of some connections as a scanner gave them; see `scanners.scanner.Columns`.

    The rows of a connection have the same `owner` and follow one another, in order; owners ascend.
    A frame is at `position` in `octets`. `slices` are starts in them and lengths, in the order of
    the scanner's `slice_names`. Without `payloads` the columns that only messages have are not
    needed.
    """

    octets: Bytes
    payloads: bool
    owner: Numbers
    position: Numbers
    forward: Flags
    frame: Numbers
    offset: Numbers
    length: Numbers
    number: NDArray[np.uint64]
    detail: Numbers
    sequence: Numbers
    slices: tuple[tuple[Numbers, Numbers], ...]
    _view: memoryview = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_view", self.octets.data)

    def __len__(self) -> int:
        return len(self.owner)

    def cut(self, start: int, stop: int) -> bytes:
        """A copy of octets[start:stop]."""
        return bytes(self._view[start:stop])

    def whole(self, row: int) -> bytes:
        """The bytes of the frame."""
        at = self.position[row]
        return self.cut(at, at + self.length[row])

    def part(self, row: int, index: int) -> bytes:
        """The bytes of one of its slices; empty where it is absent."""
        starts, lengths = self.slices[index]
        return self.cut(starts[row], starts[row] + max(lengths[row], 0))


class Readings(Generic[R]):
    """The readings of the connections of some rows: what is remembered of earlier frames.

    `known` are those of connections with earlier frames. `stays`, by owner, is whether more frames
    follow: what has to be remembered of such a connection must be written into its reading, which
    `of` gives; the readings of the others are not needed any more.
    """

    def __init__(self, known: Mapping[int, R], stays: Flags, begin: Callable[[int], R]) -> None:
        self.known = known
        self.stays = stays
        self.of = begin


@dataclass
class DescriptionColumns:
    """Columns of `Described`; an absent number is NONE, an absent text null.

    `errors` are rows whose content is not valid: they are violations, and what the columns have
    there does not count.
    """

    fields: pa.Array
    kind: pa.Array
    identifier: pa.Array
    destination: pa.Array
    status: pa.Array
    sequence: Numbers
    payload_size: Numbers
    payload_end: Numbers
    begun_at: Numbers
    payload: pa.Array | None = None
    content_type: pa.Array | None = None
    properties: pa.Array | None = None
    reply_to: pa.Array | None = None
    message_id: pa.Array | None = None
    errors: dict[int, FrameError] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.fields)

    def patch(self, rows: Sequence[int], made: Sequence[Described | FrameError]) -> None:
        """Replace the descriptions of some rows."""
        if not len(rows):
            return
        count = len(self)
        for row, each in zip(rows, made, strict=True):
            if isinstance(each, FrameError):
                self.errors[int(row)] = each
        described = [_WRONG if isinstance(each, FrameError) else each for each in made]
        taken = np.arange(count)
        taken[rows] = count + np.arange(len(rows))
        index = pa.array(taken)
        for name in (*_TEXTS, *_OF_MESSAGES):
            column = getattr(self, name)
            if column is None:
                continue
            more = pa.array(map(attrgetter(name), described), column.type, size=len(described))
            whole = more if len(rows) == count else pa.concat_arrays([column, more])
            setattr(self, name, whole.take(index if len(rows) < count else pa.array(taken - count)))
        for name in _NUMBERS:
            values = map(attrgetter(name), described)
            column = getattr(self, name).copy()
            column[rows] = [NONE if value is None else value for value in values]
            setattr(self, name, column)


_WRONG: Final = Described("")


class Describe(Protocol):
    """The type of a protocol's `describe`."""

    def __call__(self, rows: FrameRows, readings: Readings[Any]) -> DescriptionColumns:
        """What the protocol's Reading would give for each row."""
        ...


def null_column(count: int, kind: pa.DataType | None = None) -> pa.Array:
    """A column of nulls, of text by default."""
    return pa.nulls(count, kind or pa.string())


def describe_one_by_one(
    rows: FrameRows,
    chosen: Sequence[int],
    readings: Readings[R],
    frame_of: Callable[[FrameRows, int, R], Frame],
) -> list[Described | FrameError]:
    """What the readings give for these rows, which must be all the rows of their connections."""
    made: list[Described | FrameError] = []
    for row in chosen:
        reading = readings.of(int(rows.owner[row]))
        forward, length = bool(rows.forward[row]), int(rows.length[row])
        try:
            frame = frame_of(rows, row, reading)
            made.append(reading.describe(forward, frame, int(rows.offset[row]), length))
        except FrameError as error:
            error.__traceback__ = None
            reading.interrupt(forward)
            made.append(error)
    return made
