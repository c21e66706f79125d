"""Frames of many connections in the order in which they were complete, from scanner and decoders,
and their description as rows.

Connections don't depend on one another, but of one connection a frame from a decoder stands between
the scanned frames before it and those after it: an answer may be on one side and its request on the
other. So all are put into the same columns, in order, and are described together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from crosswire.errors import FrameError
from crosswire.lake.schemas import BACKWARD, FORWARD
from crosswire.pipeline.decode.arrays import NONE, Bytes, Flags, Numbers
from crosswire.pipeline.decode.arrow_batches import BATCH_ROWS
from crosswire.pipeline.decode.contract import (
    BACKWARD_CUT,
    FORWARD_CUT,
    DescriptionColumns,
    FrameRows,
    Memories,
)
from crosswire.pipeline.decode.decoded_connection import DecodedConnection, DecodedItems
from crosswire.pipeline.decode.meanings.contract import ProtocolMemory
from crosswire.pipeline.decode.protocols import ColumnarProtocol
from crosswire.pipeline.decode.row_schema import ARROW, FRAMES, OF_MESSAGES
from crosswire.pipeline.decode.scanners.scanner import Columns, FrameColumns, columns_of_frames
from crosswire.wire.contract import Frame

__all__ = ["DIRECTION_NAMES", "FrameTable", "Owners"]

DIRECTION_NAMES = pa.array([FORWARD, BACKWARD])


class Owners(Protocol):
    """The connections of the frames, by number; `objects` are those that have one."""

    @property
    def nodes(self) -> pa.Array:
        """By owner: the node whose tap captured it."""
        ...

    @property
    def connections(self) -> pa.Array:
        """By owner: its name."""
        ...

    @property
    def stays(self) -> Flags:
        """By owner: whether frames of it may follow, so that its memory is needed."""
        ...

    @property
    def objects(self) -> Mapping[int, DecodedConnection]:
        """Connections that have earlier frames, or a decoder."""
        ...

    def with_directions(self, owner: int) -> DecodedConnection:
        """The object of a connection, with its directions; it is created if there is none."""
        ...


class _Block(NamedTuple):
    """Frames that a scanner or the decoders gave at once: the scanner's table, and for each frame
    what it is here."""

    table: Numbers
    owner: Numbers
    forward: Flags
    time: Numbers
    position: Numbers
    offset: Numbers
    trailing: Numbers
    key: Numbers
    """Orders frames by owner, then by when they were complete."""
    serial: Numbers
    """Orders frames with the same key: by when scanner or decoder gave them."""
    decoded: Numbers
    """The index of a frame that a decoder gave, NONE for others."""


class _DecodedFrame(NamedTuple):
    """An item of a decoder: a frame, or where one may be missing."""

    owner: int
    forward: bool
    time: int
    key: int
    serial: int
    offset: int
    length: int
    columns: FrameColumns | None
    frame: Frame | FrameError


_NO_FRAME = FrameColumns(0)


class FrameTable:
    """Collects the frames of one protocol, then gives their rows.

    `octets` is what the scanner has read. Violations and bytes that are in no frame become rows as
    soon as they are added; they are among those that the connections' objects collect.
    """

    def __init__(self, columnar: ColumnarProtocol, owners: Owners, octets: Bytes) -> None:
        self._columnar = columnar
        self._owners = owners
        self._octets = octets
        self._blocks: list[_Block] = []
        self._decoded: list[_DecodedFrame] = []

    def add_columns(
        self,
        columns: Columns,
        *,
        owner: Numbers,
        forward: bool,
        time: Numbers,
        position: Numbers,
        base: Numbers,
        key: Numbers,
        serial: int,
    ) -> None:
        """Add frames of one direction that the scanner gave at these positions; `base` is where the
        capture of their direction begins."""
        count = len(owner)
        starts, lengths = columns.slice(columns.slice_names[0])
        self._blocks.append(
            _Block(
                columns.rows,
                owner,
                np.full(count, forward),
                time,
                position,
                columns.offset + base,
                position + columns.length - starts - lengths,
                key,
                np.full(count, serial),
                np.full(count, NONE),
            )
        )

    def add_items(
        self, owner: int, items: DecodedItems, *, time: int, key: int, serial: int
    ) -> None:
        """Add what a decoder gave at once."""
        if not items.placed:
            return
        connection = self._owners.with_directions(owner)
        direction = connection.directions[items.forward]
        below: Frame | None = None
        for placed in items.placed:
            is_cut = connection.set_aside(items.forward, placed, time)
            if is_cut is False:
                continue
            offset, length, item = placed
            offset += direction.base
            columns: FrameColumns | None = None
            if is_cut is None:
                assert isinstance(item, Frame)
                below = item if item.layer == 0 else below
                try:
                    columns = self._columnar.scanner.columns_of(item, length, below)
                except FrameError as error:
                    error.__traceback__ = None
                    connection.violation(direction, (item.layer, offset, length, time), error)
            self._decoded.append(
                _DecodedFrame(
                    *(owner, items.forward, time, key, serial, offset, length, columns, item)
                )
            )

    def batches(self, *, payloads: bool) -> Iterator[pa.RecordBatch]:
        """Rows of frames, each connection's in order."""
        if self._decoded:
            self._blocks.append(self._decoded_block())
        if not self._blocks:
            return
        joined: Any = (np.concatenate(each, axis=-1) for each in zip(*self._blocks, strict=True))
        whole = self._blocks[0] if len(self._blocks) == 1 else _Block(*joined)
        order, cut_before, cuts_after = self._in_order(whole)
        last = np.full(len(self._owners.stays), NONE)
        last[whole.owner[order]] = np.arange(len(order))
        for start in range(0, len(order), BATCH_ROWS):
            part = slice(start, start + BATCH_ROWS)
            taken: Any = (np.take(each, order[part], axis=-1) for each in whole)
            chunk = _Block(*taken)
            continues = last[chunk.owner] >= part.stop
            yield self._described(chunk, cut_before[part], continues, payloads)
        for owner, forward in cuts_after:
            _memory(self._owners, owner).interrupt(forward)

    # In order.

    def _in_order(self, whole: _Block) -> tuple[Numbers, Numbers, list[tuple[int, bool]]]:
        """The indexes of the frames in order; what `FrameRows.cut_before` is for each; and the
        connections and directions that are cut after their last frame."""
        if not self._decoded:
            order = np.argsort(whole.key, kind="stable")
            return order, np.zeros(len(order), np.int64), []
        order = np.lexsort((whole.serial, whole.key))
        is_frame = np.ones(len(order), np.bool_)
        decoded = whole.decoded[order]
        for index in np.flatnonzero(decoded != NONE).tolist():
            is_frame[index] = self._decoded[decoded[index]].columns is not None
        cuts, order = order[~is_frame], order[is_frame]
        # The index of the first frame after each cut.
        after = np.flatnonzero(~is_frame) - np.arange(len(cuts))
        cut_before = np.zeros(len(order), np.int64)
        cuts_after: list[tuple[int, bool]] = []
        for cut, index in zip(cuts.tolist(), after.tolist(), strict=True):
            owner, forward = int(whole.owner[cut]), bool(whole.forward[cut])
            if index < len(order) and whole.owner[order[index]] == owner:
                cut_before[index] |= FORWARD_CUT if forward else BACKWARD_CUT
            else:
                cuts_after.append((owner, forward))
        return order, cut_before, cuts_after

    def _decoded_block(self) -> _Block:
        frames = [each.columns or _NO_FRAME for each in self._decoded]
        lengths = [each.length for each in self._decoded]
        slice_count = len(self._columnar.scanner.slice_names)
        table, more = columns_of_frames(frames, lengths, slice_count, len(self._octets))
        if more:
            self._octets = np.append(self._octets, np.frombuffer(more, np.uint8))
        owner, forward, time, key, serial, offset, *_ = zip(*self._decoded, strict=True)
        count = len(frames)
        return _Block(
            table,
            np.array(owner, np.int64),
            np.array(forward, np.bool_),
            np.array(time, np.int64),
            np.full(count, NONE),
            np.array(offset, np.int64),
            np.array([each.trailing for each in frames], np.int64),
            np.array(key, np.int64),
            np.array(serial, np.int64),
            np.arange(count),
        )

    # Rows.

    def _described(
        self, chunk: _Block, cut_before: Numbers, continues: Flags, payloads: bool
    ) -> pa.RecordBatch:
        """Rows of frames; `continues` are those whose connection has frames in a later chunk."""
        owners, columnar = self._owners, self._columnar
        scanner = columnar.scanner
        columns = Columns(
            chunk.table, scanner.frame_names, scanner.frame_layers, scanner.slice_names
        )
        rows = FrameRows(
            octets=self._octets,
            payloads=payloads,
            owner=chunk.owner,
            position=chunk.position,
            forward=chunk.forward,
            frame=columns.frame,
            offset=chunk.offset,
            length=columns.length,
            number=columns.number,
            detail=columns.detail,
            sequence=columns.sequence,
            trailing=chunk.trailing,
            cut_before=cut_before,
            slices=tuple(map(columns.slice, scanner.slice_names)),
            decoded=self._decoded_rows(chunk.decoded),
        )
        stays = owners.stays.copy()
        stays[chunk.owner] |= continues
        here = np.zeros(len(stays), np.bool_)
        here[chunk.owner] = True
        known = {owner: _memory(owners, owner) for owner in owners.objects if here[owner]}
        description = columnar.describe(
            rows, Memories(known, stays, lambda owner: _memory(owners, owner))
        )
        batch = self._batch(rows, chunk.time, description)
        if not description.errors:
            return batch
        right = np.ones(len(rows), np.bool_)
        for index, error in description.errors.items():
            right[index] = False
            connection = owners.with_directions(int(rows.owner[index]))
            layer = int(columnar.layers[rows.frame[index]])
            where = (layer, int(rows.offset[index]), int(rows.length[index]))
            direction = connection.directions[bool(rows.forward[index])]
            connection.violation(direction, (*where, int(chunk.time[index])), error)
        return batch.filter(pa.array(right))

    def _decoded_rows(self, decoded: Numbers) -> dict[int, Frame]:
        if not self._decoded:
            return {}
        found: dict[int, Frame] = {}
        for row in np.flatnonzero(decoded != NONE).tolist():
            frame = self._decoded[decoded[row]].frame
            assert isinstance(frame, Frame)
            found[row] = frame
        return found

    def _batch(
        self, rows: FrameRows, time: Numbers, description: DescriptionColumns
    ) -> pa.RecordBatch:
        columnar, count = self._columnar, len(rows)
        owner = pa.array(rows.owner)
        payload_offset = rows.offset + rows.length - description.payload_end
        payload_offset -= description.payload_size
        has_payload = description.payload_size != NONE
        columns: dict[str, Any] = {
            "table": pa.repeat(FRAMES, count),
            "node": self._owners.nodes.take(owner),
            "connection": self._owners.connections.take(owner),
            "direction": DIRECTION_NAMES.take(pa.array((~rows.forward).astype(np.int8))),
            "layer": pa.array(columnar.layers[rows.frame].astype(np.int32)),
            "offset": pa.array(rows.offset),
            "length": pa.array(rows.length),
            "time": pa.array(time),
            "protocol": pa.repeat(columnar.name, count),
            "frame": columnar.frames.take(pa.array(rows.frame)),
            "payload_offset": pa.array(payload_offset, mask=~has_payload),
            "payload_length": pa.array(description.payload_size, mask=~has_payload),
            "sequence": pa.array(description.sequence, mask=description.sequence == NONE),
            "begun_at": pa.array(description.begun_at, mask=description.begun_at == NONE),
        }
        if not rows.payloads:
            for name in OF_MESSAGES:
                columns[name] = pa.nulls(count, ARROW.field(name).type)
        arrays = [
            columns[field.name] if field.name in columns else getattr(description, field.name)
            for field in ARROW
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=ARROW)


def _memory(owners: Owners, owner: int) -> ProtocolMemory:
    memory = owners.with_directions(owner).memory
    assert memory is not None
    return memory
