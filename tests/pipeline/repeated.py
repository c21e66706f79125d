"""Large traffic made from little: a block of rows of `wire/`, repeated any number of times.

Making traffic with the protocols' serializers takes far longer than reading it. So a block is made
once and repeated column by column: as ever more connections, or as ever more messages of the same
ones. What must not repeat continues: row numbers, times, offsets in a direction, the sequence
numbers of MicroMsg2 and Relink, the ids of Relink's links. Ids of requests repeat, each after its
response.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from crosswire.lake.files import write
from crosswire.lake.schemas import BACKWARD, DATA, FORWARD
from crosswire.pipeline.decode.arrow_batches import Batches
from crosswire.pipeline.decode.decoded_connection import (
    WIRE_COLUMNS,
    DecodedConnection,
    DecodedItems,
)
from crosswire.pipeline.decode.row_schema import ARROW, DIRECTIONS, FRAMES, VIOLATIONS
from crosswire.wire import protocol
from crosswire.wire.contract import Decoder

if TYPE_CHECKING:
    from crosswire.testing.traffic import SampleTraffic

__all__ = ["Counted", "Numbers", "Repeated", "count", "long_connections", "many_connections"]

FILE_BYTES = 96_000_000
_PAUSE_US = 1000

Integers = NDArray[np.int64]


class Counted(NamedTuple):
    """Result of reading: rows of each kind, and the bytes of all directions."""

    frames: int
    violations: int
    directions: int
    bytes: int


class Numbers(NamedTuple):
    """Positions of numbers of one format in the bytes of a block. A repetition increases each by
    its step; after the highest value follows the lowest."""

    kind: str
    lowest: int
    highest: int
    positions: Integers
    steps: Integers

    def advance(self, data: NDArray[np.uint8], times: int) -> None:
        """Change the bytes to those of the repetition with this number."""
        kind = np.dtype(self.kind)
        at = self.positions[:, None] + np.arange(kind.itemsize)
        values = data[at].view(kind)[:, 0].astype(np.int64) - self.lowest
        values = (values + times * self.steps) % (self.highest - self.lowest + 1) + self.lowest
        data[at] = values.astype(kind)[:, None].view(np.uint8)


class Part(NamedTuple):
    """Rows in the order of their times; `strides` are the bytes that a repetition adds to the
    direction of each row."""

    rows: pa.Table
    strides: Integers


@dataclasses.dataclass(frozen=True)
class Repeated:
    """`before` once, `block` repeated, `after` once. If `renamed`, every repetition of the block
    has new connections."""

    before: Part
    block: Part
    after: Part
    numbers: tuple[Numbers, ...] = ()
    renamed: bool = False

    def tables(self, times: int) -> Iterator[pa.Table]:
        """All rows, a table per repetition of the block."""
        seq = 1
        for part, number in self._parts(times):
            rows = self._repetition(part, number)
            yield _with(rows, seq=np.arange(seq, seq + len(rows)))
            seq += len(rows)

    def size_bytes(self, times: int) -> int:
        before, block, after = (
            pc.sum(part.rows["length"]).as_py() or 0
            for part in (self.before, self.block, self.after)
        )
        return int(before + times * block + after)

    def times_for(self, size_bytes: float) -> int:
        """How many repetitions come nearest to this size."""
        block: int = pc.sum(self.block.rows["length"]).as_py()
        return max(round(size_bytes / block), 1)

    def connections(self, times: int) -> int:
        found = len(pc.unique(self.block.rows["connection"]))
        return found * times if self.renamed else found

    def expected(self, times: int) -> Counted:
        """The result that reading all of it must have, extrapolated from one and two repetitions,
        which the decoders read."""
        one, two = (count(self.tables(few)) for few in (1, 2))
        return Counted(*(a + (times - 1) * (b - a) for a, b in zip(one, two, strict=True)))

    def write(self, lake: Path, times: int, file_bytes: int = FILE_BYTES) -> Iterator[int]:
        """Write files of about this size into `lake/wire`; yields the number of bytes so far."""
        waiting: list[pa.Table] = []
        size = written = 0
        for rows in self.tables(times):
            waiting.append(rows)
            size += pc.sum(rows["length"]).as_py()
            if size >= file_bytes:
                write(lake, "wire", pa.concat_tables(waiting))
                written += size
                yield written
                waiting, size = [], 0
        if waiting:
            write(lake, "wire", pa.concat_tables(waiting))
            yield written + size

    def _parts(self, times: int) -> Iterator[tuple[Part, int]]:
        if len(self.before.rows):
            yield self.before, 0
        for number in range(times):
            yield self.block, number
        if len(self.after.rows):
            yield self.after, times - 1

    def _repetition(self, part: Part, number: int) -> pa.Table:
        rows = part.rows
        times = self.block.rows["time"].to_numpy()
        span = int(times[-1] - times[0]) + _PAUSE_US
        changed: dict[str, Any] = {
            "offset": rows["offset"].to_numpy() + number * part.strides,
            "time": rows["time"].to_numpy() + number * span,
        }
        if self.renamed:
            names = rows["connection"].combine_chunks()
            changed["connection"] = pc.binary_join_element_wise(names, str(number), "-")
        if number and part is self.block and self.numbers:
            changed["data"] = self._data(rows["data"].combine_chunks(), number)
        return _with(rows, **changed)

    def _data(self, column: pa.Array, times: int) -> pa.Array:
        valid, offsets, values = column.buffers()
        data = np.frombuffer(values, np.uint8).copy()
        for numbers in self.numbers:
            numbers.advance(data, times)
        return pa.Array.from_buffers(
            column.type, len(column), [valid, offsets, pa.py_buffer(data)], offset=column.offset
        )


def many_connections(traffic: SampleTraffic) -> Repeated:
    """The traffic's connections, with new names in each repetition."""
    rows = pa.concat_tables(traffic.wire()).sort_by("time").combine_chunks()
    nothing = Part(rows.slice(0, 0), np.zeros(0, np.int64))
    block = Part(rows, np.zeros(len(rows), np.int64))
    return Repeated(nothing, block, nothing, (_links(rows),), renamed=True)


def long_connections(traffic: SampleTraffic) -> Repeated:
    """The traffic's connections, each with its messages repeated between opening and end."""
    rows = pa.concat_tables(traffic.wire()).combine_chunks()
    bare = pa.concat_tables(dataclasses.replace(traffic, messages=0).wire())
    names = rows["connection"].to_numpy(zero_copy_only=False)
    bare_names = bare["connection"].to_numpy(zero_copy_only=False)
    index = np.zeros(len(rows), np.int64)
    for name in dict.fromkeys(names):
        mine = np.flatnonzero(names == name)
        without = bare["data"].take(pa.array(np.flatnonzero(bare_names == name))).to_pylist()
        start = _same(rows["data"].take(pa.array(mine[: len(without)])).to_pylist(), without)
        end = len(mine) - (len(without) - start)
        index[mine[start:end]] = 1
        index[mine[end:]] = 2
    lanes = pc.binary_join_element_wise(rows["connection"], rows["direction"], " ").to_pylist()
    sizes: Counter[str] = Counter()
    for lane, size, where in zip(lanes, rows["length"].to_pylist(), index.tolist(), strict=True):
        sizes[lane] += size if where == 1 else 0
    strides = np.array([sizes[lane] for lane in lanes], np.int64)
    order = np.argsort(rows["time"].to_numpy(), kind="stable")
    before, block, after = (
        Part(rows.take(pa.array(chosen)).combine_chunks(), strides[chosen])
        for chosen in (order[index[order] == which] for which in range(3))
    )
    return Repeated(before, block, after, tuple(_sequence_numbers(before.rows, block.rows)))


def count(tables: Iterable[pa.Table]) -> Counted:
    """The result of the decoders for rows of `wire/`, connection by connection and row by row."""
    found: Counter[str] = Counter()
    size = 0
    connections: dict[str, DecodedConnection] = {}

    def count_items(every: Iterable[DecodedItems]) -> None:
        for items in every:
            for placed in items.placed:
                is_frame = Decoder.describe(*placed).error is None
                found[FRAMES if is_frame else VIOLATIONS] += 1

    for table in tables:
        for row in zip(*(table[name].to_pylist() for name in WIRE_COLUMNS), strict=True):
            connection = connections.get(row[1])
            if connection is None:
                connection = connections[row[1]] = DecodedConnection(row, Batches(ARROW))
            count_items(connection.read(row))
            size += row[6]
            if connection.is_closed:
                count_items(connections.pop(row[1]).read_rest())
                found[DIRECTIONS] += len(connection.directions)
    for connection in connections.values():
        count_items(connection.read_rest())
        found[DIRECTIONS] += len(connection.directions)
    return Counted(found[FRAMES], found[VIOLATIONS], found[DIRECTIONS], size)


def _with(rows: pa.Table, **changed: Any) -> pa.Table:
    for name, values in changed.items():
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, rows.schema.field(at), pa.array(values))
    return rows


def _same(one: list[Any], other: list[Any]) -> int:
    """The length of the common prefix."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def _links(rows: pa.Table) -> Numbers:
    """Ids of Relink's links, which follow the epoch in the listener's second frame: two connections
    with the same id would be one session."""
    chosen = (rows["protocol"].to_numpy(zero_copy_only=False) == "relink") & (
        rows["direction"].to_numpy(zero_copy_only=False) == BACKWARD
    )
    chosen &= (rows["offset"].to_numpy() == 8) & (rows["length"].to_numpy() == 16)
    positions = _starts(rows)[:-1][chosen] + 8
    return Numbers("<u8", 1, 2**62, positions, np.ones(len(positions), np.int64))


def _starts(rows: pa.Table) -> Integers:
    """Where the bytes of each row begin."""
    column = rows["data"].combine_chunks()
    assert column.offset == 0
    return np.frombuffer(column.buffers()[1], np.int32, len(column) + 1).astype(np.int64)


def _sequence_numbers(before: pa.Table, block: pa.Table) -> Iterator[Numbers]:
    """Those of MicroMsg2's messages and acknowledgements, and of Relink's acknowledgements."""
    starts = _starts(block)
    forms = {"micromsg2": (">u2", 1, 65535), "relink": ("<u4", 0, 2**32 - 1)}
    for name, form in forms.items():
        found: list[tuple[int, tuple[Any, ...]]] = []
        steps: Counter[tuple[Any, ...]] = Counter()
        for row, counts, index, counter in _counters(name, before, block):
            if counts:
                steps[counter] += 1
            if index is not None:
                found.append((int(starts[row]) + index, counter))
        if found:
            positions = np.array([position for position, _ in found])
            yield Numbers(*form, positions, np.array([steps[counter] for _, counter in found]))


def _counters(
    name: str, before: pa.Table, block: pa.Table
) -> Iterator[tuple[int, bool, int | None, tuple[Any, ...]]]:
    """For each frame of a protocol that belongs to a sequence: its row, whether it is a message
    that increases it, the position of its number in the row, and the key of the sequence."""
    from crosswire.wire.micromsg2.frames import ExtensionFrame
    from crosswire.wire.micromsg2.frames import Message as MicroMsg2Message
    from crosswire.wire.relink.frames import Message as RelinkMessage
    from crosswire.wire.relink.frames import SequenceAcknowledgement

    entry = protocol(name)
    decoders: dict[tuple[str, bool], Any] = {}
    columns = ("protocol", "kind", "connection", "direction", "offset", "data")
    for row, (protocol_name, kind, connection, direction, offset, data) in enumerate(
        zip(
            *(pa.concat_tables([before, block])[column].to_pylist() for column in columns),
            strict=True,
        ),
        -len(before),
    ):
        if protocol_name != name or kind != DATA:
            continue
        forward = direction == FORWARD
        if (connection, forward) not in decoders:
            peer = None if forward else decoders[connection, True]
            role = entry.roles[0 if forward else -1]
            decoders[connection, forward] = entry.decoder(role, peer=peer)
        for at, length, frame in decoders[connection, forward].feed(data):
            index = at - offset
            match frame:
                case MicroMsg2Message():
                    yield row, True, index + 1, (connection, forward)
                case ExtensionFrame():
                    yield row, False, index + length - 2, (connection, not forward)
                case RelinkMessage():
                    yield row, True, None, (connection, forward, frame.channels)
                case SequenceAcknowledgement():
                    yield row, False, index + 4, (connection, not forward, frame.channels)
