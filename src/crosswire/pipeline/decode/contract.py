"""What a protocol's description in columns is given, and what it gives.

A protocol's `describe` takes frames of many connections: rows of a scanner, and in the same columns
what only decoders could read. It gives a row of the tables for each. What many rows share is found
out once (`text.distinct`), responses are matched with requests (`matching.Matching`), and texts are
concatenated (`text.text`). Where that is not worth it, Python describes single rows, which must not
depend on earlier ones: `DescriptionColumns.patch` replaces them.
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
from crosswire.pipeline.decode.meanings.contract import Described, ProtocolMemory
from crosswire.pipeline.decode.text import distinct
from crosswire.wire.contract import Frame

__all__ = [
    "BACKWARD_CUT",
    "FORWARD_CUT",
    "Describe",
    "DescriptionColumns",
    "FrameRows",
    "Memories",
    "null_column",
]

M = TypeVar("M", bound=ProtocolMemory)
T = TypeVar("T")

FORWARD_CUT: Final = 1
BACKWARD_CUT: Final = 2
"""Bits of `FrameRows.cut_before`."""

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
    """Frames of some connections; see `scanners.scanner.Columns`.

    The rows of a connection have the same `owner` and follow one another, in order; owners ascend.
    A frame that the scanner gave is at `position` in `octets`. One that a decoder gave has the
    position NONE, and is in `decoded`, by row; its slices are in `octets` too. `slices` are starts
    and lengths, in the order of the scanner's `slice_names`, and `trailing` is how many bytes of
    the frame follow the first of them. Before a row with FORWARD_CUT or BACKWARD_CUT in
    `cut_before`, bytes of this direction of its connection were missing, or were no frame.

    Without `payloads` the columns that only messages have are not needed.
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
    trailing: Numbers
    cut_before: Numbers
    slices: tuple[tuple[Numbers, Numbers], ...]
    decoded: Mapping[int, Frame] = field(default_factory=dict)
    _view: memoryview = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_view", self.octets.data)

    def __len__(self) -> int:
        return len(self.owner)

    def cut(self, start: int, stop: int) -> bytes:
        """A copy of octets[start:stop]."""
        return bytes(self._view[start:stop])

    def whole(self, row: int) -> bytes:
        """The bytes of a frame that the scanner gave."""
        at = self.position[row]
        return self.cut(at, at + self.length[row])

    def part(self, row: int, index: int) -> bytes:
        """The bytes of one of its slices; empty where it is absent."""
        starts, lengths = self.slices[index]
        return self.cut(starts[row], starts[row] + max(lengths[row], 0))

    def distinct(
        self,
        chosen: Flags,
        location: tuple[Numbers, Numbers],
        tags: Numbers,
        read: Callable[[int], T],
    ) -> tuple[Numbers, list[T]]:
        """Codes of the chosen rows, NONE for the others, and what `read` gives for each code.

        Rows with the same tag and the same bytes, at these starts and of these lengths, have the
        same code. A frame that a decoder gave has one of its own: it has no such bytes.
        """
        starts, lengths = location
        scanned = chosen & (self.position != NONE)
        code, firsts = distinct(self.octets, starts, np.where(scanned, lengths, NONE), tags)
        made = [read(row) for row in firsts.tolist()]
        for row in np.flatnonzero(chosen & ~scanned).tolist():
            code[row] = len(made)
            made.append(read(row))
        return code, made


class Memories(Generic[M]):
    """What is remembered of the connections of some rows.

    `known` are the memories of connections with earlier frames. `stays`, by owner, is whether more
    frames follow: what has to be remembered of such a connection must be written into its memory,
    which `of` gives; the memories of the others are not needed any more.
    """

    def __init__(self, known: Mapping[int, M], stays: Flags, begin: Callable[[int], M]) -> None:
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

    def __call__(self, rows: FrameRows, memories: Memories[Any]) -> DescriptionColumns:
        """What the tables have of each row."""
        ...


def null_column(count: int, kind: pa.DataType | None = None) -> pa.Array:
    """A column of nulls, of text by default."""
    return pa.nulls(count, kind or pa.string())
