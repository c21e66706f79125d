"""A batch of bronze.wire in numpy arrays: the connection of each row, and where its bytes are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from crosswire.lake.schemas import BACKWARD, DATA, FIN, GAP, LOST, OPEN, RESET
from crosswire.pipeline.decode.arrays import NONE, Flags, Numbers

__all__ = ["INTRODUCTION", "PayloadPieces", "WireBatch"]


_NO_OCTETS: Final = np.empty(0, np.uint8)
_SPARSE: Final = 8
"""With this many times more codes than rows it is faster to sort them than to mark those in use."""

INTRODUCTION: Final = (
    "protocol",
    "listener",
    "connector_address",
    "connector_port",
    "acceptor_address",
    "acceptor_port",
)


class WireBatch:
    """Rows of many connections, each connection's in order.

    An *owner* is the number of a connection in this batch; a *lane* is one direction of one
    connection, as far as it has rows here. Lanes are numbered by owner, the opener's direction
    first. Arrays named `lane_…` have an element for each lane.
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        kinds, kind_names = _coded(batch.column("kind"))
        lost = _which(kind_names, LOST)[kinds]
        if lost.any():
            batch = batch.filter(pa.array(~lost))
            kinds = kinds[~lost]
        self._rows = batch
        self.seq = _numbers(batch, "seq")
        self.offset = _numbers(batch, "offset")
        self.time = _numbers(batch, "time")
        self.owner, self.owners = _owners(batch)
        directions, names = _coded(batch.column("direction"))
        backward = _which(names, BACKWARD)[directions]
        self.is_data = _which(kind_names, DATA)[kinds]
        self._kinds, self._kind_names = kinds, kind_names
        # Lanes.
        lane = self.owner * 2 + backward
        order = np.argsort(lane, kind="stable")
        number, head = _groups(lane[order])
        self.lane_owner = lane[order[head]] >> 1
        self.lane_backward = (lane[order[head]] & 1).astype(np.bool_)
        first = order[head]
        self.lane_first = first
        self.lane_first_time = self.time[first]
        self.lane_base = self.offset[first]
        late = batch.column("late").take(pa.array(first)).fill_null(False)
        self.lane_late = late.to_numpy(zero_copy_only=False) | (self.lane_base > 0)
        self.lane_last_time = _reduced(np.maximum, self.time[order], head)
        self._order, self._number, self._head = order, number, head

    def __len__(self) -> int:
        return len(self.owner)

    @cached_property
    def connections(self) -> pa.Array:
        """By owner: its name."""
        return self.first("connection")

    @cached_property
    def nodes(self) -> pa.Array:
        """By owner: the node whose tap captured it."""
        return self.first("node")

    @cached_property
    def keys(self) -> list[tuple[str, str]]:
        """Connection and node of each owner."""
        return list(zip(self.connections.to_pylist(), self.nodes.to_pylist(), strict=True))

    @cached_property
    def lane_end(self) -> tuple[Numbers, list[str]]:
        """By lane: the code of how it ended in this batch, NONE if it has not; and the names of
        the codes."""
        ending = _which(self._kind_names, FIN, RESET)[self._kinds][self._order]
        index = np.where(ending, np.arange(len(ending)), NONE)
        last = _reduced(np.maximum, index, self._head)
        return np.where(last == NONE, NONE, self._kinds[self._order[last]]), self._kind_names

    @cached_property
    def lanes_of(self) -> tuple[Numbers, Numbers]:
        """By owner: the opener's lane, and the other one; NONE if it has no rows."""
        found = np.full((2, self.owners), NONE)
        found[self.lane_backward.astype(np.int64), self.lane_owner] = np.arange(
            len(self.lane_owner)
        )
        return found[0], found[1]

    @cached_property
    def opened(self) -> Flags:
        """By owner: whether the opening of the connection is among the rows."""
        return self._owners_with(OPEN)

    @cached_property
    def _by_owner(self) -> tuple[Numbers, Numbers]:
        order = np.argsort(self.owner, kind="stable")
        return order, _groups(self.owner[order])[1]

    @property
    def first_rows(self) -> Numbers:
        """By owner: the index of its first row."""
        order, head = self._by_owner
        rows: Numbers = order[head]
        return rows

    @property
    def last_rows(self) -> Numbers:
        """By owner: the index of its last row."""
        order, head = self._by_owner
        rows: Numbers = order[np.append(head[1:], len(order)) - 1]
        return rows

    @cached_property
    def pieces(self) -> PayloadPieces:
        """The bytes of all lanes, lane by lane."""
        here = self.is_data[self._order]
        return PayloadPieces(self._rows.column("data"), self._order[here], self._number[here], self)

    @cached_property
    def introductions(self) -> list[tuple[Any, ...]]:
        """By owner: the columns of the connection itself, from its first row."""
        columns = [self.first(name).to_pylist() for name in INTRODUCTION]
        return list(zip(*columns, strict=True))

    @cached_property
    def protocols(self) -> tuple[Numbers, list[str | None]]:
        """By owner: the code of its protocol; and the names of the codes."""
        return _coded(self._rows.column("protocol").take(pa.array(self.first_rows)))

    def first(self, name: str) -> pa.Array:
        """A column of the owners' first rows."""
        column = self._rows.column(name).take(pa.array(self.first_rows))
        return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column

    @cached_property
    def irregular(self) -> Flags:
        """By owner: whether bytes are missing, or rows are there twice or out of order."""
        order = self._by_owner[0]
        seq, owner = self.seq[order], self.owner[order]
        wrong = (seq[1:] <= seq[:-1]) & (owner[1:] == owner[:-1])
        irregular = self._owners_with(GAP)
        irregular[owner[1:][wrong]] = True
        irregular[self.lane_owner[self.pieces.broken_lanes]] = True
        return irregular

    def rows_of(
        self, owners: Numbers, names: Sequence[str]
    ) -> Iterator[tuple[int, int, tuple[Any, ...]]]:
        """All rows of these connections, in order: index, owner, and a tuple of these columns."""
        wanted = np.zeros(self.owners, np.bool_)
        wanted[owners] = True
        rows = np.flatnonzero(wanted[self.owner])
        taken = pa.array(rows)
        columns = [self._rows.column(name).take(taken).to_pylist() for name in names]
        values = zip(*columns, strict=True)
        return zip(rows.tolist(), self.owner[rows].tolist(), values, strict=True)

    def _owners_with(self, kind: str) -> Flags:
        marked = np.zeros(self.owners, np.bool_)
        marked[self.owner[_which(self._kind_names, kind)[self._kinds]]] = True
        return marked


class PayloadPieces:
    """The bytes of all rows in one `array`, lane by lane, so that a lane is one slice of it.

    `ends` are the positions at which a row's piece ends, `row` the index of the row.
    """

    def __init__(self, column: pa.Array, rows: Numbers, lanes: Numbers, batch: WireBatch) -> None:
        # Taking rows in the order of lanes copies the bytes once; from then on nothing is copied.
        taken = column.take(pa.array(rows)).fill_null(b"")
        _, offsets, values = taken.buffers()
        cuts = np.frombuffer(offsets, np.int32, len(taken) + 1, taken.offset * 4).astype(np.int64)
        start, stop = int(cuts[0]), int(cuts[-1])
        self.array = _NO_OCTETS
        if stop > start:
            self.array = np.frombuffer(values, np.uint8, stop - start, start)
        cuts -= start
        self.ends = cuts[1:]
        self.row = rows
        sizes = cuts[1:] - cuts[:-1]
        offset = batch.offset[rows]
        same = lanes[1:] == lanes[:-1]
        broken = same & (offset[1:] != offset[:-1] + sizes[:-1])
        self.broken_lanes = np.unique(lanes[1:][broken])
        count = len(batch.lane_owner)
        self.lane_start = np.zeros(count, np.int64)
        self.lane_stop = np.zeros(count, np.int64)
        self.lane_offset = np.full(count, NONE)
        """Of the first byte, in its direction."""
        self.lane_row = np.full(count, NONE)
        """The first row that carries bytes."""
        if len(rows):
            head = np.flatnonzero(np.append(True, ~same))
            tail = np.append(head[1:], len(rows)) - 1
            lane = lanes[head]
            self.lane_start[lane] = cuts[head]
            self.lane_stop[lane] = cuts[tail + 1]
            self.lane_offset[lane] = offset[head]
            self.lane_row[lane] = rows[head]

    def rows_at(self, positions: Numbers) -> Numbers:
        """The indexes of the rows with the bytes at these positions."""
        return self.row[np.searchsorted(self.ends, positions, "right")]


def _numbers(batch: pa.RecordBatch, name: str) -> Numbers:
    return batch.column(name).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _coded(column: pa.Array) -> tuple[Numbers, list[Any]]:
    """A column as codes, and their names."""
    if not pa.types.is_dictionary(column.type):
        column = pc.dictionary_encode(column)
    names = column.dictionary.to_pylist()
    indices = column.indices
    if indices.null_count:
        indices = indices.fill_null(len(names))
        names = [*names, None]
    return indices.to_numpy(zero_copy_only=False).astype(np.int64), names


def _indices(column: pa.Array) -> Numbers:
    """A column as codes, without their names."""
    if not pa.types.is_dictionary(column.type):
        column = pc.dictionary_encode(column)
    return column.indices.to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]


def _which(names: list[str], *wanted: str) -> Flags:
    return np.array([name in wanted for name in names], np.bool_)


def _owners(batch: pa.RecordBatch) -> tuple[Numbers, int]:
    """The connection of each row as a number, and how many there are."""
    connections, nodes = (_indices(batch.column(name)) for name in ("connection", "node"))
    codes = connections * (nodes.max(initial=0) + 1) + nodes
    most = int(codes.max(initial=-1)) + 1
    if most > _SPARSE * len(codes):
        chosen, numbers = np.unique(codes, return_inverse=True)
        return numbers, len(chosen)
    used = np.zeros(most, np.bool_)
    used[codes] = True
    number = np.cumsum(used) - 1
    return number[codes], int(number[-1]) + 1 if len(number) else 0


def _groups(values: Numbers) -> tuple[Numbers, Numbers]:
    """Of sorted values: the number of each one's group, and where each group begins."""
    if not len(values):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    new = np.append(True, values[1:] != values[:-1])
    return np.cumsum(new) - 1, np.flatnonzero(new)


def _reduced(function: Callable[..., Any], values: Numbers, head: Numbers) -> Numbers:
    if not len(values):
        return np.zeros(0, np.int64)
    return function.reduceat(values, head)  # type: ignore[attr-defined, no-any-return]
