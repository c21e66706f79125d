"""One protocol's connections in one batch: their bytes through its scanner, its columns to rows.

A batch is read in two passes, first all forward directions, then all backward ones: in two of the
protocols the opener's handshake decides how the answers are read. After that the rows of both are
put in the order in which their last bytes were captured, and described.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from crosswire.pipeline.decode.arrays import NONE, Flags, Numbers
from crosswire.pipeline.decode.arrow_batches import BATCH_ROWS
from crosswire.pipeline.decode.connection_index import DIRECTION_NAMES, ConnectionIndex
from crosswire.pipeline.decode.connection_rows import ConnectionRows, Direction, ScannedSoFar
from crosswire.pipeline.decode.contract import Describe, DescriptionColumns, FrameRows, Readings
from crosswire.pipeline.decode.readings.contract import Reading
from crosswire.pipeline.decode.row_schema import ARROW, FRAMES, OF_MESSAGES
from crosswire.pipeline.decode.scanners.fallback import DecoderOutput, scan_and_decode
from crosswire.pipeline.decode.scanners.scanner import (
    DECODER_ONLY,
    HANDSHAKE_END,
    STOP_REASON,
    BulkScanner,
    Columns,
)
from crosswire.wire import PROTOCOL_NAMES, protocol
from crosswire.wire.contract import Decoder, Placed

__all__ = ["BatchScan", "ColumnarProtocol", "columnar_protocol"]


@dataclass(frozen=True, eq=False)
class ColumnarProtocol:
    """What it takes to read a protocol in columns; `roles` are the opener's and the acceptor's."""

    name: str
    roles: tuple[str, str]
    scanner: BulkScanner
    describe: Describe
    frames: pa.Array
    layers: Numbers

    @property
    def reads_peer_handshake(self) -> bool:
        """Whether the opener's handshake decides how the other direction is read."""
        return self.scanner.reads_peer_handshake

    def state_of(self, direction: Direction) -> Numbers | None:
        """The scanner's state to continue a direction with; None at its first byte."""
        if direction.decoder is not None:
            return self.scanner.state_of(direction.decoder)
        return None if direction.scanned is None else direction.scanned.state

    def has_handshake_of(self, direction: Direction | None) -> bool:
        """Whether the direction's handshake is complete."""
        state = None if direction is None else self.state_of(direction)
        return state is not None and bool(state[HANDSHAKE_END] != NONE)


@cache
def columnar_protocol(name: str | None) -> ColumnarProtocol | None:
    """The protocol of this name; None for what no scanner reads: TLS, and unknown protocols."""
    if name is None or name not in PROTOCOL_NAMES:
        return None
    scanner: BulkScanner = import_module(f"crosswire.pipeline.decode.scanners.{name}").SCANNER()
    describe: Describe = import_module(f"crosswire.pipeline.decode.{name}").describe
    roles = protocol(name).roles
    return ColumnarProtocol(
        name,
        (roles[0], roles[-1]),
        scanner,
        describe,
        pa.array(scanner.frame_names),
        np.array(scanner.frame_layers, np.int64),
    )


class _DirectionScan:
    """All directions of one kind, forward or backward, that have bytes in a batch: its runs.

    By run: the lane and owner, where its bytes are, where they are in the stream, and the scanner's
    state; `is_new` where that is the state of a first byte.
    """

    def __init__(
        self,
        columnar: ColumnarProtocol,
        forward: bool,
        lanes: Numbers,
        connections: ConnectionIndex,
    ) -> None:
        pieces = connections.batch.pieces
        self.forward = forward
        self.lanes = lanes
        self.owners = connections.batch.lane_owner[lanes]
        self.starts = pieces.lane_start[lanes]
        self.ends = pieces.lane_stop[lanes]
        self.bases = connections.lane_base[lanes]
        # Scanners and decoders count from where the capture of a direction begins, rows from where
        # the direction does: `bases` is the difference.
        self.offsets = connections.lane_seen[lanes]
        self.states = columnar.scanner.new_states(columnar.roles[0 if forward else 1], len(lanes))
        self.is_new = np.ones(len(lanes), np.bool_)
        for run in np.flatnonzero(connections.lane_known[lanes]).tolist():
            state = columnar.state_of(connections.direction(int(lanes[run])))
            if state is not None:
                self.states[run] = state
                self.is_new[run] = False
        self.parts: list[Columns | DecoderOutput] = []
        self.handshake_ends: dict[int, int] = {}
        """By run, for runs with a decoder: it does not keep where its handshake ended."""
        self.fed_to: dict[int, int] = {}
        """By run: how far its decoder has been fed."""

    def handshake_end(self) -> Numbers:
        """By run: where in its stream the handshake ended, NONE if it has not."""
        ends = self.states[:, HANDSHAKE_END].copy()
        for run, end in self.handshake_ends.items():
            ends[run] = end
        return ends


class BatchScan:
    """Reads the bytes of some connections of a batch when it is created.

    `rows` then gives what was found, and `settle` carries the state of the connections that have
    more to come over to the next batch.

    `out_of_turn` are connections, all of them new, in which the acceptor sent more than its
    handshake before the opener's handshake was complete. In columns their directions were read one
    after the other, as if it had been complete from the start; they have to be read again row by
    row, and are left as if they had not been read at all.
    """

    def __init__(
        self, columnar: ColumnarProtocol, connections: ConnectionIndex, owners: Numbers
    ) -> None:
        self.columnar = columnar
        self.connections = connections
        self.batch = connections.batch
        self._owners = owners
        self._settled: set[tuple[bool, int]] = set()
        for owner in owners[~connections.is_new[owners]].tolist():
            connections.with_directions(owner)
        self._forward = self._read(True)
        self._backward = self._read(False)
        self.out_of_turn = self._out_of_turn() if columnar.reads_peer_handshake else []
        for owner in self.out_of_turn:
            connections.forget(owner)

    # Reading.

    def _read(self, forward: bool) -> _DirectionScan:
        columnar, connections, pieces = self.columnar, self.connections, self.batch.pieces
        lanes = self.batch.lanes_of[0 if forward else 1][self._owners]
        lanes = lanes[lanes != NONE]
        with_bytes = lanes[pieces.lane_row[lanes] != NONE]
        side = _DirectionScan(columnar, forward, with_bytes, connections)
        if columnar.reads_peer_handshake and not forward and side.is_new.any():
            self._share_handshakes(side)

        def decoder_of(run: int) -> Decoder:
            side.handshake_ends.setdefault(run, int(side.states[run, HANDSHAKE_END]))
            connection = connections.with_directions(int(side.owners[run]))
            if not forward:
                # The acceptor's decoder is created with the opener's, which must have read as far
                # as the scanner has.
                self._settle_direction(int(side.owners[run]), self._forward)
            return connection.decoder(forward, connection.directions[forward])

        bounds = (side.starts, side.ends, side.offsets)
        for part in scan_and_decode(
            columnar.scanner, pieces.array, *bounds, side.states, decoder_of, cuts=pieces.ends
        ):
            side.parts.append(part)
            if isinstance(part, DecoderOutput):
                side.fed_to[part.run] = part.stop
        return side

    def _share_handshakes(self, side: _DirectionScan) -> None:
        """Give the acceptors' states what their openers' handshakes have decided.

        An opener's state is that of this batch, if it has bytes in it, or that of an earlier one.
        """
        scanner, forward = self.columnar.scanner, self._forward
        runs = np.flatnonzero(side.is_new)
        owners = side.owners[runs]
        peers = scanner.new_states(self.columnar.roles[0], len(runs))
        peer, has_bytes = _find(forward.owners, owners)
        peers[has_bytes] = forward.states[peer[has_bytes]]
        for index in np.flatnonzero(~has_bytes & ~self.connections.is_new[owners]).tolist():
            directions = self.connections.get_or_create(int(owners[index])).directions
            direction = directions.get(True)
            state = None if direction is None else self.columnar.state_of(direction)
            if state is not None:
                peers[index] = state
        states = side.states[runs]
        scanner.share_handshake(states, peers)
        # A direction that only its decoder can read leaves no state to copy from.
        states[peers[:, STOP_REASON] == DECODER_ONLY, STOP_REASON] = DECODER_ONLY
        side.states[runs] = states

    def _out_of_turn(self) -> list[int]:
        """New connections whose acceptor went on before the opener's handshake was complete.

        By owner, the row with which the opener's handshake was complete is compared with the row of
        the acceptor's first byte after its own handshake.
        """
        forward, backward = self._forward, self._backward
        batch, pieces = self.batch, self.batch.pieces
        never = len(batch)
        complete, went_on = np.full((2, batch.owners), never)
        ends = forward.handshake_end()
        runs = np.flatnonzero((forward.offsets == 0) & (ends > 0))
        last = forward.starts[runs] + ends[runs] - 1
        complete[forward.owners[runs]] = pieces.rows_at(last)
        ends = backward.handshake_end()
        next_byte = backward.starts + ends
        runs = np.flatnonzero(
            (backward.offsets == 0) & (ends != NONE) & (next_byte < backward.ends)
        )
        went_on[backward.owners[runs]] = pieces.rows_at(next_byte[runs])
        # Without the end of the acceptor's handshake there is nothing to compare: read by rows.
        went_on[backward.owners[ends == NONE]] = NONE
        early = (went_on < complete) & self.connections.is_new
        return self._owners[early[self._owners]].tolist()  # type: ignore[no-any-return]

    # Carrying over.

    def settle(self) -> None:
        """Note what was read in the objects of the connections that have one, or will need one.

        Connections that began and ended within the batch, as most do, never have one.
        """
        connections, batch = self.connections, self.batch
        needed = ~connections.over
        needed[list(connections.objects)] = True
        needed[self.out_of_turn] = False
        frames = self._frames()
        ends, names = batch.lane_end
        sizes = batch.pieces.lane_stop - batch.pieces.lane_start
        for owner in self._owners[needed[self._owners]].tolist():
            connection = connections.with_directions(owner)
            self._settle_direction(owner, self._forward)
            self._settle_direction(owner, self._backward)
            connection.seq = int(batch.seq[batch.last_rows[owner]])
            connection.opened |= bool(batch.opened[owner])
            for forward, lanes in zip((True, False), batch.lanes_of, strict=True):
                lane = lanes[owner]
                if lane == NONE:
                    continue
                direction = connection.directions[forward]
                direction.seen += int(sizes[lane])
                direction.frames += int(frames[lane])
                direction.last_time = max(direction.last_time, int(batch.lane_last_time[lane]))
                if ends[lane] != NONE:
                    direction.end = names[ends[lane]]

    def _frames(self) -> Numbers:
        """By lane: how many frames it has in columns."""
        frames = np.zeros(len(self.batch.lane_owner), np.int64)
        for side in (self._forward, self._backward):
            for part in side.parts:
                if isinstance(part, Columns):
                    frames += np.bincount(side.lanes[part.run], minlength=len(frames))
        return frames

    def _settle_direction(self, owner: int, side: _DirectionScan) -> None:
        """Put the decoder of a direction where its run ended, or note the scanner's state.

        Once for each direction, or the bytes of a handshake would be noted twice.
        """
        run, has_bytes = (int(each[0]) for each in _find(side.owners, np.array([owner])))
        if not has_bytes or (side.forward, run) in self._settled:
            return
        self._settled.add((side.forward, run))
        scanner, pieces = self.columnar.scanner, self.batch.pieces
        direction = self.connections.objects[owner].directions[side.forward]
        start, end, offset = int(side.starts[run]), int(side.ends[run]), int(side.offsets[run])
        if direction.decoder is not None:
            if side.fed_to.get(run) != end:
                whole = pieces.array[start:end]
                scanner.hand_over(direction.decoder, side.states[run], whole, offset)
            return
        # Without a decoder it is enough to keep the state and the bytes of the handshake, from
        # which a decoder can be created when one is needed; often none ever is.
        known = direction.scanned
        opening = b"" if known is None else known.opening
        if known is None or known.state[HANDSHAKE_END] == NONE:
            handshake_end = int(side.states[run, HANDSHAKE_END])
            stop = end if handshake_end == NONE else start + handshake_end - offset
            opening += pieces.array[start:stop].tobytes()
        direction.scanned = ScannedSoFar(scanner.hand_over, side.states[run].copy(), opening)

    # Rows.

    def rows(self, payloads: bool) -> Iterator[pa.RecordBatch]:
        """Rows of frames, each connection's in the order in which its frames were complete.

        Frames that decoders gave are added to what the connections' objects collect, in between.
        """
        found = _ScanResults(self.connections, (self._forward, self._backward), self.out_of_turn)
        columns = found.columns(self.columnar.scanner)
        for start, stop, decoded in found.rounds():
            for at in range(start, stop, BATCH_ROWS):
                chunk = _Chunk(self, found, columns, slice(at, min(at + BATCH_ROWS, stop)))
                yield chunk.described(payloads)
            for connection, forward, direction, placed, time in decoded:
                connection.emit(forward, direction, placed, time)


def _find(values: Numbers, wanted: Numbers) -> tuple[Numbers, Flags]:
    """The index of each wanted value in ascending values, and whether it is there at all."""
    index = np.searchsorted(values, wanted)
    if not len(values):
        return index, np.zeros(len(wanted), np.bool_)
    index = np.minimum(index, len(values) - 1)
    return index, values[index] == wanted


class _DecodedFrames(NamedTuple):
    """Frames that a decoder gave at once."""

    connection: ConnectionRows
    forward: bool
    direction: Direction
    placed: list[Placed]
    time: int


class _ScannedBlock(NamedTuple):
    """Frames that a scanner gave at once: its table, and for each frame what it is here."""

    table: Numbers
    lane: Numbers
    row: Numbers
    """Of the batch: the row with which the frame was complete."""
    position: Numbers
    offset: Numbers
    key: Numbers
    """Orders frames by connection, then by row."""
    serial: Numbers
    """Orders frames with the same key: by when scanner or decoder gave them."""


class _ScanResults:
    """Frames that scanner and decoders gave for a batch, in the order in which they were complete.

    Connections don't depend on one another, but of one connection frames from a decoder must be
    described after the scanned frames before them and before those after them: an answer may be on
    one side and its request on the other. Describing connection by connection would give up what
    columns are good for. So there are rounds: in each, the scanned frames of all connections up to
    the next frames that a decoder gave, and then those.
    """

    def __init__(
        self, connections: ConnectionIndex, sides: tuple[_DirectionScan, ...], dropped: list[int]
    ) -> None:
        self._connections = connections
        batch = connections.batch
        self._dropped = np.zeros(batch.owners, np.bool_)
        self._dropped[dropped] = True
        blocks: list[_ScannedBlock] = []
        decoded: list[tuple[int, int, _DecodedFrames]] = []
        parts = [(side, part) for side in sides for part in side.parts]
        for serial, (side, part) in enumerate(parts):
            if isinstance(part, Columns):
                blocks.append(self._block(side, part, serial))
            elif part.placed:
                owner = int(side.owners[part.run])
                row = int(batch.pieces.rows_at(np.array([part.stop - 1]))[0])
                if not self._dropped[owner]:
                    key = owner * len(batch) + row
                    decoded.append((key, serial, self._decoded_frames(side, part, owner, row)))
        if not blocks:
            empty = np.empty(0, np.int64)
            blocks = [_ScannedBlock(np.empty((0, 0), np.int64), *[empty] * 6)]
        joined = (np.concatenate(each, axis=-1) for each in zip(*blocks, strict=True))
        whole = blocks[0] if len(blocks) == 1 else _ScannedBlock(*joined)
        self.table, self.lane, self.row, self.position, self.offset = whole[:5]
        self._arrange(whole.key, whole.serial, decoded)
        owners = batch.lane_owner[self.lane[self.order]]
        self.last = np.full(batch.owners, NONE)
        """By owner: the index of its last frame, in order."""
        self.last[owners] = np.arange(len(owners))

    def columns(self, scanner: BulkScanner) -> Callable[[Numbers], Columns]:
        """A function that gives the columns of some frames."""
        names = scanner.frame_names, scanner.frame_layers, scanner.slice_names
        return lambda index: Columns(np.take(self.table, index, axis=1), *names)

    def rounds(self) -> Iterator[tuple[int, int, list[_DecodedFrames]]]:
        """Each round: scanned frames order[start:stop], then those that decoders gave."""
        yield from zip(self._starts, self._stops, self._decoded, strict=True)

    def _block(self, side: _DirectionScan, part: Columns, serial: int) -> _ScannedBlock:
        batch = self._connections.batch
        table, owner = part.rows, side.owners[part.run]
        if self._dropped.any():
            kept = ~self._dropped[owner]
            part = Columns(table[:, kept], part.frame_names, part.frame_layers, part.slice_names)
            owner = owner[kept]
        run, offset = part.run, part.offset
        position = side.starts[run] + offset - side.offsets[run]
        row = batch.pieces.rows_at(position + part.length - 1)
        return _ScannedBlock(
            part.rows,
            side.lanes[run],
            row,
            position,
            offset + side.bases[run],
            owner * len(batch) + row,
            np.full(len(run), serial),
        )

    def _decoded_frames(
        self, side: _DirectionScan, part: DecoderOutput, owner: int, row: int
    ) -> _DecodedFrames:
        connection = self._connections.with_directions(owner)
        direction = connection.directions[side.forward]
        time = int(self._connections.batch.time[row])
        return _DecodedFrames(connection, side.forward, direction, part.placed, time)

    def _arrange(
        self, key: Numbers, serial: Numbers, decoded: list[tuple[int, int, _DecodedFrames]]
    ) -> None:
        """Set `order`, the indexes of the scanned frames round by round, and the rounds' bounds."""
        if not decoded:
            self.order = np.argsort(key, kind="stable")
            self._starts, self._stops = [0], [len(key)]
            self._decoded: list[list[_DecodedFrames]] = [[]]
            return
        decoded_key, decoded_serial, _ = zip(*decoded, strict=True)
        keys = np.append(key, decoded_key)
        order = np.lexsort((np.append(serial, decoded_serial), keys))
        is_decoded = order >= len(key)
        owner = keys[order] // len(self._connections.batch)
        first = np.append(True, owner[1:] != owner[:-1])
        # Within a connection, a frame's round is the number of sequences of decoded frames that
        # ended before it. Decoded frames that follow one another are one sequence, and belong to
        # the round that they end.
        begins = is_decoded & (first | ~np.append(False, is_decoded[:-1]))
        begun = np.cumsum(begins)
        heads = np.flatnonzero(first)
        before_connection = (begun - begins)[heads][np.cumsum(first) - 1]
        number = begun - before_connection - is_decoded
        in_order = np.argsort(number[~is_decoded], kind="stable")
        self.order = order[~is_decoded][in_order]
        count = int(number.max()) + 1
        self._stops = np.cumsum(np.bincount(number[~is_decoded], minlength=count)).tolist()
        self._starts = [0, *self._stops[:-1]]
        self._decoded = [[] for _ in range(count)]
        for index, which in zip(
            (order[is_decoded] - len(key)).tolist(), number[is_decoded].tolist(), strict=True
        ):
            self._decoded[which].append(decoded[index][2])


class _Chunk:
    """Scanned frames that become one batch of rows."""

    def __init__(
        self,
        scan: BatchScan,
        found: _ScanResults,
        columns: Callable[[Numbers], Columns],
        part: slice,
    ) -> None:
        index = found.order[part]
        batch = scan.batch
        self._scan = scan
        self._columns = columns(index)
        self._lane, self._offset = found.lane[index], found.offset[index]
        self._position = found.position[index]
        self._time = batch.time[found.row[index]]
        self._owner = batch.lane_owner[self._lane]
        # What is pending must be remembered of connections that are not over, that have an object,
        # or that have more frames in a later chunk of this batch.
        self._stays = ~scan.connections.over
        self._stays[list(scan.connections.objects)] = True
        self._stays[self._owner] |= found.last[self._owner] >= part.stop

    def described(self, payloads: bool) -> pa.RecordBatch:
        """Rows of frames. Violations are added to what the connections' objects collect."""
        scan, columns = self._scan, self._columns
        connections, pieces = scan.connections, scan.batch.pieces
        rows = FrameRows(
            pieces.array,
            payloads,
            self._owner,
            self._position,
            ~scan.batch.lane_backward[self._lane],
            columns.frame,
            self._offset,
            columns.length,
            columns.number,
            columns.detail,
            columns.sequence,
            tuple(map(columns.slice, scan.columnar.scanner.slice_names)),
        )
        here = np.zeros(scan.batch.owners, np.bool_)
        here[self._owner] = True
        known = {
            owner: _reading(connections, owner) for owner in connections.objects if here[owner]
        }
        description = scan.columnar.describe(
            rows, Readings(known, self._stays, lambda owner: _reading(connections, owner))
        )
        batch = self._batch(description, payloads)
        if not description.errors:
            return batch
        right = np.ones(len(rows), np.bool_)
        for index, error in description.errors.items():
            right[index] = False
            direction = connections.direction(int(self._lane[index]))
            layer = int(scan.columnar.layers[columns.frame[index]])
            where = (layer, int(self._offset[index]), int(columns.length[index]))
            connection = connections.get_or_create(int(self._owner[index]))
            connection.violation(direction, (*where, int(self._time[index])), error)
        return batch.filter(pa.array(right))

    def _batch(self, description: DescriptionColumns, payloads: bool) -> pa.RecordBatch:
        batch, columnar, count = self._scan.batch, self._scan.columnar, len(description)
        owner, length = pa.array(self._owner), self._columns.length
        payload_offset = self._offset + length - description.payload_end - description.payload_size
        has_payload = description.payload_size != NONE
        columns: dict[str, Any] = {
            "table": pa.repeat(FRAMES, count),
            "node": batch.nodes.take(owner),
            "connection": batch.connections.take(owner),
            "direction": DIRECTION_NAMES.take(
                pa.array(batch.lane_backward[self._lane].astype(np.int8))
            ),
            "layer": pa.array(columnar.layers[self._columns.frame].astype(np.int32)),
            "offset": pa.array(self._offset),
            "length": pa.array(length),
            "time": pa.array(self._time),
            "protocol": pa.repeat(columnar.name, count),
            "frame": columnar.frames.take(pa.array(self._columns.frame)),
            "payload_offset": pa.array(payload_offset, mask=~has_payload),
            "payload_length": pa.array(description.payload_size, mask=~has_payload),
            "sequence": pa.array(description.sequence, mask=description.sequence == NONE),
            "begun_at": pa.array(description.begun_at, mask=description.begun_at == NONE),
        }
        if not payloads:
            for name in OF_MESSAGES:
                columns[name] = pa.nulls(count, ARROW.field(name).type)
        arrays = [
            columns[field.name] if field.name in columns else getattr(description, field.name)
            for field in ARROW
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=ARROW)


def _reading(connections: ConnectionIndex, owner: int) -> Reading:
    reading = connections.with_directions(owner).reading
    assert reading is not None
    return reading
